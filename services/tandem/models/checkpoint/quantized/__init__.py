"""Reads quantized safetensors: what a config says of them, and the numbers that they stand for."""
