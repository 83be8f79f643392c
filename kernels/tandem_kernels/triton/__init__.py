"""The operations of kernels/ for CUDA devices, written in Triton; a file each, host function first.

Under TRITON_INTERPRET=1 (set before the first import) they run on tensors of a CPU, slowly: that is
how they are tested without a device. Works with Triton 3.6 (torch 2.11) and later.
"""
