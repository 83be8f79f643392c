"""Checkpoints by their headers: names, types and shapes of tensors, without a byte of these."""
