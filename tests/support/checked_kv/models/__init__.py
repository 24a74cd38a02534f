"""The folder that SGLANG_EXTERNAL_MODEL_PACKAGE names in place of the accelerator's own."""
