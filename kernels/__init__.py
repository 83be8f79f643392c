"""Tensors in, tensors out: what a decoder computes, an operation a file; whole and in C++: native."""
