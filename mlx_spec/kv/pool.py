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

import functools
from collections.abc import Callable, Sequence

import mlx.core as mx

from mlx_spec.errors import DoesNotFit
from mlx_spec.machine.memory import available_memory, gigabytes

PAGE = 64
"""Tokens per page."""
_SMALLEST_SLAB = 4  # pages
_LARGEST_SLAB = 64  # pages
_CHEAP_COPY = 8 * 2**20
"""Bytes per layer up to which a hidden copy costs less than waiting for the pass: about 0.1 ms of graph
building per layer against twice these bytes at a few hundred GB/s. An estimate; no Metal machine measured it."""


class PagePool:
    """Pages of keys and values for all layers, counted by reference, growing in slabs.

    Storage is the model's own type or INT8. INT8 has one float16 scale per token and head beside the values, and a
    fixed divisor per key channel and head, which is taken from the first keys and then stays (`divisors`).
    """

    def __init__(self, *, layers: int, kv_heads: int, head_dim: int, dtype: mx.Dtype, int8: bool = False) -> None:
        """dtype: the type the model computes in."""
        self.layers, self.kv_heads, self.head_dim, self.dtype, self.int8 = layers, kv_heads, head_dim, dtype, int8
        row = (head_dim,)
        stored = mx.int8 if int8 else dtype
        shapes = [(row, stored), ((), mx.float16)] if int8 else [(row, stored)]
        # Keys, then values: each the stored rows and, for INT8, their scales.
        self._kinds = shapes * 2
        self._arrays = [[self._blank(kind, 0) for _ in range(layers)] for kind in self._kinds]
        mx.eval(self._arrays)  # a lazy array belongs to the thread that made it
        self.divisors: list[mx.array | None] = [None] * layers  # (kv_heads, head_dim) float32
        self._references: list[int] = []  # one count per page; 0 is free

    def _blank(self, kind: tuple[tuple[int, ...], mx.Dtype], pages: int) -> mx.array:
        row, dtype = kind
        return mx.zeros((1, self.kv_heads, pages * PAGE, *row), dtype=dtype)

    @property
    def keys(self) -> list[mx.array]:
        """Per layer (1, kv_heads, slots, head_dim)."""
        return self._arrays[0]

    @property
    def values(self) -> list[mx.array]:
        """Per layer (1, kv_heads, slots, head_dim)."""
        return self._arrays[len(self._arrays) // 2]

    @property
    def key_scales(self) -> list[mx.array] | None:
        """Per layer (1, kv_heads, slots) float16; None unless INT8."""
        return self._arrays[1] if self.int8 else None

    @property
    def value_scales(self) -> list[mx.array] | None:
        """Per layer (1, kv_heads, slots) float16; None unless INT8."""
        return self._arrays[3] if self.int8 else None

    def write(self, layer: int, slots: slice | mx.array, parts: Sequence[mx.array]) -> None:
        """Store new rows: keys and values (1, kv_heads, n, head_dim), or for INT8 keys, scales, values, scales."""
        for arrays, part in zip(self._arrays, parts, strict=True):
            arrays[layer][:, :, slots] = part

    def read(self, layer: int, slots: slice | mx.array, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        """Keys and values (1, kv_heads, n, head_dim) of some slots; INT8 dequantized to `dtype`, keys still divided."""
        return self._dequantized([arrays[layer][:, :, slots] for arrays in self._arrays], dtype)

    def read_pages(self, layer: int, pages: mx.array, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        """As `read`, all slots of some pages (n,) int32."""
        return self._dequantized([of_pages(arrays[layer], pages) for arrays in self._arrays], dtype)

    def _dequantized(self, parts: Sequence[mx.array], dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        if not self.int8:
            return parts[0], parts[1]
        keys, key_scales, values, value_scales = parts
        dequantize = _dequantize(dtype)
        return dequantize(keys, key_scales), dequantize(values, value_scales)

    @property
    def pages(self) -> int:
        """Pages allocated, used or free."""
        return len(self._references)

    @property
    def pages_in_use(self) -> int:
        return sum(count > 0 for count in self._references)

    def bytes_to_allocate(self, tokens: int) -> int:
        """What one more sequence of so many tokens would add to `nbytes`."""
        return max(0, -(-tokens // PAGE) - (self.pages - self.pages_in_use)) * self.page_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: keys and values of all layers."""
        row = self.head_dim + 2 if self.int8 else self.head_dim * self.dtype.size
        return 2 * self.layers * self.kv_heads * PAGE * row

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
        return self.nbytes <= _CHEAP_COPY * self.layers

    def references(self, page: int) -> int:
        """How many page tables hold `page`."""
        return self._references[page]

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Take `count` free pages, following on from page `after` where they are free; grows when none are left."""
        missing = count - (self.pages - self.pages_in_use)
        if missing > 0:
            self._grow(missing)
        taken: list[int] = []
        following = self._start_in_longest_free_run(count) if after is None else after + 1
        while len(taken) < count:
            if following >= self.pages or self._references[following] > 0:
                following = self._start_in_longest_free_run(count - len(taken))
            self._references[following] = 1
            taken.append(following)
            following += 1
        return taken

    def _start_in_longest_free_run(self, count: int) -> int:
        # Behind another sequence's pages, leave half of what `count` pages do not need: the other one may still grow.
        best_start, best_length, start = 0, 0, 0
        for page in range(self.pages + 1):
            if page == self.pages or self._references[page] > 0:
                if page - start > best_length:
                    best_start, best_length = start, page - start
                start = page + 1
        return best_start + max(0, best_length - count) // 2 if best_start > 0 else best_start

    def retain(self, pages: Sequence[int]) -> None:
        """Count one more holder of each page."""
        for page in pages:
            self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Count one holder fewer of each page; a page nobody holds is free."""
        for page in pages:
            self._references[page] -= 1

    def _grow(self, missing: int) -> None:
        """Add at least `missing` pages: half as much again, within bounds, so that growth stays amortised.

        Raises DoesNotFit where there is no memory for them; everything stored stays as it is.
        """
        slab = max(missing, min(max(self.pages // 2, _SMALLEST_SLAB), _LARGEST_SLAB))
        available = available_memory()
        if available is not None and slab * self.page_bytes > available:
            slab = missing
        wanted = slab * self.page_bytes
        try:
            if available is not None and wanted > available:
                raise MemoryError
            for kind, arrays in zip(self._kinds, self._arrays, strict=True):
                for layer, array in enumerate(arrays):
                    # After a growth that ran out of memory halfway, some arrays are larger than others.
                    lacking = self.pages + slab - array.shape[2] // PAGE
                    if lacking > 0:
                        grown = mx.concatenate([array, self._blank(kind, lacking)], axis=2)
                        del array
                        mx.eval(grown)  # one layer at a time: the peak is one layer above the new size
                        arrays[layer] = grown
        except (RuntimeError, MemoryError) as error:
            more = "" if available is None else f", {available // self.page_bytes * PAGE} more would fit"
            raise DoesNotFit(
                f"no memory for {slab * PAGE} more tokens of keys and values ({gigabytes(wanted)}) beside "
                f"{self.pages * PAGE}{more}; give a shorter prompt or a smaller --max-tokens, --kv int8, or a --window."
            ) from error
        self._references.extend([0] * slab)

    def copy_page(self, source: int, destination: int) -> None:
        """Copy one page in every layer. A gather, since a slice would refer to the pool and force a copy of it."""
        slots = mx.arange(source * PAGE, (source + 1) * PAGE)
        start = destination * PAGE
        for arrays in self._arrays:
            copies = [mx.take(array, slots, axis=2) for array in arrays]  # (1, kv_heads, PAGE, ...)
            mx.eval(copies)
            for array, copied in zip(arrays, copies, strict=True):
                array[:, :, start : start + PAGE] = copied
        self.evaluate()

    def evaluate(self) -> None:
        """Wait until every write has been made."""
        mx.eval(self._arrays, [divisor for divisor in self.divisors if divisor is not None])


def of_pages(array: mx.array, pages: mx.array) -> mx.array:
    """array (1, kv_heads, slots, ...) -> (1, kv_heads, n * PAGE, ...), the slots of `pages` (n,) int32.

    Along the axis of the pages: indexing the first axis away would copy the whole array.
    """
    return mx.flatten(mx.take(mx.unflatten(array, 2, (-1, PAGE)), pages, axis=2), 2, 3)


@functools.cache
def _dequantize(dtype: mx.Dtype) -> Callable[[mx.array, mx.array], mx.array]:
    """(int8 (..., n, head_dim), scales (..., n)) -> floating. Compiled for any n, so no float32 copy is kept."""

    def dequantize(rows: mx.array, scales: mx.array) -> mx.array:
        return (rows.astype(mx.float32) * mx.expand_dims(scales, -1).astype(mx.float32)).astype(dtype)

    return mx.compile(dequantize, shapeless=True)
