"""Constraints on the output: what is accepted, how it becomes a grammar, and the process that compiles it."""
