"""The operations of a decoder in torch, one per file. The package `native` is a complete decoder in
C++, and `triton` has the operations as Triton kernels."""
