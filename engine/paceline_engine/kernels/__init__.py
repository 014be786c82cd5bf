"""Triton kernels, one a file, each with the torch code that says what it computes.

A kernel's launcher checks shapes and picks the configuration; nothing here knows requests or models. Needs torch and
triton; to run, also a GPU, or TRITON_INTERPRET=1 in the environment before the import.
"""
