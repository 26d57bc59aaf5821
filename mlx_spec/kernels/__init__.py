"""The operations that attention needs of pages: a Metal kernel where there is one that is right, else its twin."""

from __future__ import annotations

from mlx_spec.kernels.reference import paged_attention, quantize_kv
from mlx_spec.kv import PagePool

__all__ = ["paged_attention", "preferred", "quantize_kv"]


def preferred(pool: PagePool, rows: int, consecutive: bool) -> bool:
    """Whether a kernel is to attend although the dense way could."""
    return False
