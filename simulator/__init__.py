"""The model of an engine and its cache tiers. Knows no HTTP, no asyncio, no result files, no wall clock."""
