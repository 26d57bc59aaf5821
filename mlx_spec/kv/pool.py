"""The keys and values of every sequence of one model, in pages of 64 tokens. Knows slots; nothing of positions,
rotation or attention.

Paged storage after Kwon et al. 2023 (PagedAttention). Per layer, keys and values are `(1, kv_heads, slots,
head_dim)` with slot = page * PAGE + offset, so a run of consecutive pages is a plain slice, in the shape attention
takes.

Writes are assignments to the pool's arrays. MLX makes them in place only while nothing else refers to the
array, and holds what a dispatched pass reads until that pass has completed. So: keep no reference to a pool
array, and do not put two passes in flight where a copy of the pool would cost more than waiting
(`PagePool.chains_cheaply`).
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

PAGE = 64
"""Tokens per page."""

_SMALLEST_SLAB = 4  # pages
_LARGEST_SLAB = 64  # pages
_CHEAP_COPY = 8 * 2**20
"""Bytes per layer up to which a hidden copy costs less than waiting for the pass: about 0.1 ms of graph
building per layer against twice these bytes at a few hundred GB/s. An estimate; no Metal machine measured it."""


class PagePool:
    """Pages of keys and values for all layers, counted by reference, growing in slabs."""

    def __init__(self, *, layers: int, kv_heads: int, head_dim: int, dtype: mx.Dtype) -> None:
        self.kv_heads, self.head_dim, self.dtype = kv_heads, head_dim, dtype
        self.keys = [self._blank(0) for _ in range(layers)]
        self.values = [self._blank(0) for _ in range(layers)]
        self._references: list[int] = []  # one count per page; 0 is free

    def _blank(self, pages: int) -> mx.array:
        return mx.zeros((1, self.kv_heads, pages * PAGE, self.head_dim), dtype=self.dtype)

    @property
    def pages(self) -> int:
        """Pages allocated, used or free."""
        return len(self._references)

    @property
    def pages_in_use(self) -> int:
        return sum(count > 0 for count in self._references)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: keys and values of all layers."""
        return 2 * len(self.keys) * self.kv_heads * PAGE * self.head_dim * self.dtype.size

    @property
    def nbytes(self) -> int:
        """Bytes really allocated, free pages included."""
        return self.pages * self.page_bytes

    @property
    def chains_cheaply(self) -> bool:
        """Whether a pass may be built on one still in flight.

        MLX's CPU backend keeps ten operations in flight, fewer than one layer has, so nothing is copied there.
        """
        if mx.default_device() == mx.cpu:
            return True
        return self.nbytes <= _CHEAP_COPY * len(self.keys)

    def references(self, page: int) -> int:
        """How many page tables hold `page`."""
        return self._references[page]

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Take `count` free pages, following on from page `after` where they are free; grows when none are left."""
        missing = count - (self.pages - self.pages_in_use)
        if missing > 0:
            self._grow(missing)
        taken: list[int] = []
        following = self._start_of_longest_free_run() if after is None else after + 1
        while len(taken) < count:
            if following >= self.pages or self._references[following] > 0:
                following = self._start_of_longest_free_run()
            self._references[following] = 1
            taken.append(following)
            following += 1
        return taken

    def _start_of_longest_free_run(self) -> int:
        best_start, best_length, start = 0, 0, 0
        for page in range(self.pages + 1):
            if page == self.pages or self._references[page] > 0:
                if page - start > best_length:
                    best_start, best_length = start, page - start
                start = page + 1
        return best_start

    def retain(self, pages: Sequence[int]) -> None:
        """Count one more holder of each page."""
        for page in pages:
            self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Count one holder fewer of each page; a page nobody holds is free."""
        for page in pages:
            self._references[page] -= 1

    def _grow(self, missing: int) -> None:
        """Add at least `missing` pages: half as much again, within bounds, so that growth stays amortised."""
        slab = max(missing, min(max(self.pages // 2, _SMALLEST_SLAB), _LARGEST_SLAB))
        for arrays in (self.keys, self.values):
            for layer, array in enumerate(arrays):
                # After a growth that ran out of memory halfway, some arrays are larger than others.
                lacking = self.pages + slab - array.shape[2] // PAGE
                if lacking <= 0:
                    continue
                arrays[layer] = mx.concatenate([array, self._blank(lacking)], axis=2)
                del array
                mx.eval(arrays[layer])  # one layer at a time: the peak is one layer above the new size
        self._references.extend([0] * slab)

    def copy_page(self, source: int, destination: int) -> None:
        """Copy one page in every layer. A gather, since a slice would refer to the pool and force a copy of it."""
        slots = mx.arange(source * PAGE, (source + 1) * PAGE)
        start = destination * PAGE
        for arrays in (self.keys, self.values):
            copies = [mx.take(array, slots, axis=2) for array in arrays]  # (1, kv_heads, PAGE, head_dim)
            mx.eval(copies)
            for array, copied in zip(arrays, copies, strict=True):
                array[:, :, start : start + PAGE] = copied
        self.evaluate()

    def evaluate(self) -> None:
        """Wait until every write has been made."""
        mx.eval(self.keys, self.values)
