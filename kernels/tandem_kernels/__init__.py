"""The operations that a decoder computes, one per file; `native` is the whole decoder in C++."""
