"""Where keys and values live: one pool of pages per model, and one page table per sequence. Knows slots and bytes;
nothing of attention or rotation."""

from mlx_spec.kv.pool import PAGE, PagePool, of_pages
from mlx_spec.kv.table import PageTable

__all__ = ["PAGE", "PagePool", "PageTable", "of_pages"]
