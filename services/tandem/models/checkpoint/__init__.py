"""Reads and checks the headers of checkpoint files: names, types and shapes of tensors. Tensor data
are not read."""
