"""Tensors in, tensors out: what a decoder computes, a file per operation; in C++ whole, in native/."""
