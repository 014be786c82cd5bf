"""The planner: from what is observed to what is to be done. Pure: no I/O, no clock, no randomness, no client."""
