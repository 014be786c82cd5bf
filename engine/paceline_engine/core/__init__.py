"""The engine's pure core: requests, blocks, scheduling. No tensors, no sockets, no clock, no randomness.

Everything here is deterministic in its inputs, so a test, a fuzzer or a simulator can drive it step by step and call
`check_integrity()` after each.
"""
