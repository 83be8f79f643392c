"""Tensors in, tensors out: what a decoder computes, an operation a file; in C++ whole: native."""
