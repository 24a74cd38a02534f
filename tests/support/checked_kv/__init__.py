"""For SGLang's own Python: the accelerator's model with a look at KV that comes back (tests/real/test_sglang.py)."""
