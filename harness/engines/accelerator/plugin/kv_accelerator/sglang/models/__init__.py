"""The folder that SGLANG_EXTERNAL_MODEL_PACKAGE names: SGLang imports every module here and takes its EntryClass."""
