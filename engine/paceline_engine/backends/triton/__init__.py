"""The GPU as a device: weights and KV in its memory, Triton's kernels, torch's matrix products.

On the CPU it runs as well, through Triton's interpreter, which is how tests see it.
"""
