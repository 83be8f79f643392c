"""Triton kernels for CUDA devices, one operation per file with the host function first.

With TRITON_INTERPRET=1 (set before the first import) they run slowly on CPU tensors, which tests
without a GPU use. Triton 3.6 (torch 2.11) or later is required.
"""
