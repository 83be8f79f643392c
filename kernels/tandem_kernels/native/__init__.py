"""The decoder of the CPU in C++: built at install, chosen at run time."""
