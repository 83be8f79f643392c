"""Reads GGUF files: config and tokenizer in the format of Hugging Face folders, and weights."""
