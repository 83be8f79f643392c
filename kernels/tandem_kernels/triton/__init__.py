"""Triton kernels for CUDA devices. Each file has one operation: first the function that launches
the kernels, then the kernels.

If the environment variable TRITON_INTERPRET is 1 before the first import, the kernels run on CPU
tensors. This is slow and is for tests without a GPU. Triton 3.6 (torch 2.11) or later is required.
"""
