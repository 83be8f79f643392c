"""The CPU decoder in C++. It is compiled when the package is installed, once for each instruction
set. The instruction set is chosen at run time."""
