"""Reads quantized matrices from safetensors: their stored tensors, and their dequantized values."""
