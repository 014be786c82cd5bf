"""The CPU backend's compiled part: a decoder step in C++ behind ctypes. Absent a compiler, torch does the work."""
