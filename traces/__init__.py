"""What load looks like, without any engine: requests, trace formats, generators, and when to send what."""
