"""The load without any engine: requests, trace formats, generators, and the times to send requests."""
