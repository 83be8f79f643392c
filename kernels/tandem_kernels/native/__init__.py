"""The CPU decoder in C++. It is built at install; the instruction set is chosen at run time."""
