"""Reads GGUF files: configuration, tokenizer and weights, as Hugging Face folders have them."""
