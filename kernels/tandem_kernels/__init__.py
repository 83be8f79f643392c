"""The operations of a decoder, one per file. `native` is a complete decoder in C++."""
