"""Reads and dequantizes quantized matrices of safetensors files, each stored as several tensors."""
