"""Triton kernels, one file an operation; `reference` holds the plain torch truth."""
