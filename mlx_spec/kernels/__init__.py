"""Kernels for attention over pages and for INT8, each with its twin in plain MLX operations, and whether a kernel is
right on this machine. Knows arrays; nothing of passes, nor of which of several is the fastest."""
