"""Tensors in, tensors out: what a decoder computes, a file per operation."""
