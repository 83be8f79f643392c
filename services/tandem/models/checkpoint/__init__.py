"""Reads and checks checkpoints' headers: names, types and shapes of tensors, without their data."""
