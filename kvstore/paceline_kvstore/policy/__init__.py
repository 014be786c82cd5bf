"""What to keep, decided without I/O, clocks or dice: callers pass sizes, times and keys in, and do what comes out."""
