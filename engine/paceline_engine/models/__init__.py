"""Checkpoints and architectures: readers of weight files and the config-driven decoder."""
