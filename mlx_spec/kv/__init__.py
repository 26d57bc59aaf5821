"""Where keys and values live: one pool of pages per model, and one page table per sequence."""

from mlx_spec.kernels.reference import PAGE
from mlx_spec.kv.pool import PagePool
from mlx_spec.kv.table import PageTable

__all__ = ["PAGE", "PagePool", "PageTable"]
