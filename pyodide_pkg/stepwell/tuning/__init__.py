"""Timing a model's kernels on the adapter at hand, and remembering the fastest."""
