"""The keys and values of every sequence of one model, in pages of 64 tokens. Knows slots; nothing of positions,
rotation or attention.

Paged storage after Kwon et al. 2023 (PagedAttention). Per layer, keys and values are `(1, kv_heads, slots,
head_dim)` with slot = page * PAGE + offset, so a run of consecutive pages is a plain slice, in the shape attention
takes.

Writes are assignments to the pool's arrays. MLX makes them in place only while nothing else refers to the
array, and holds what a dispatched pass reads until that pass has completed. So: keep no reference to a pool
array, and do not put two passes in flight where a copy of the pool would cost more than waiting
(`PagePool.chains_cheaply`).

A page is in use while a living holder (a page table) lists it. Nothing is counted, so that nothing that interrupts,
at whatever line, can leave a count behind that is not true.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Protocol
from weakref import WeakSet

import mlx.core as mx

from mlx_spec.errors import DoesNotFit
from mlx_spec.machine.memory import SMALLER_CACHE, available_memory, bound_cache, gigabytes, memory_or

PAGE = 64
"""Tokens per page."""
_SMALLEST_SLAB = 4  # pages
_KEPT = 2**28
"""Bytes of unused pages that `trim` leaves: they are not worth moving the others for."""
_CHEAP_COPY = 8 * 2**20
"""Bytes per layer up to which a hidden copy costs less than waiting for the pass: about 0.1 ms of graph
building per layer against twice these bytes at a few hundred GB/s. An estimate; no Metal machine measured it."""


class Holder(Protocol):
    """Whose pages are in use. `pages` is replaced as a whole, never changed."""

    pages: list[int]


class PagePool:
    """Pages of keys and values for all layers, growing by half and more.

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
        self.pages = 0
        """Allocated, used or free."""
        self._holders: WeakSet[Holder] = WeakSet()

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

    def hold(self, holder: Holder) -> None:
        """The pages it lists are in use from now on, for as long as it lives."""
        self._holders.add(holder)

    def references(self, page: int) -> int:
        """How many hold `page`. Looks at all pages in use."""
        return sum(page in holder.pages for holder in self._holders)

    def _used(self) -> set[int]:
        return set().union(*(holder.pages for holder in self._holders))

    @property
    def pages_in_use(self) -> int:
        return len(self._used())

    def bytes_to_allocate(self, tokens: int) -> int:
        """What one more sequence of so many tokens would add to `nbytes`; the most that `reserve` adds for it, but
        for what grows by half where other sequences are."""
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

    def free_pages(self, count: int, after: int | None = None) -> list[int]:
        """`count` pages that nobody holds, following on from page `after` where those are free; grows where there are
        too few. They stay free until a holder lists them.

        Raises DoesNotFit where there is no memory for them; everything stored stays as it is.
        """
        used = self._used()
        missing = count - (self.pages - len(used))
        if missing > 0:
            self._grow(self._slab(max(missing, _SMALLEST_SLAB), missing), used)
        found: list[int] = []
        following = self.pages if after is None else after + 1
        while len(found) < count:
            if following >= self.pages or following in used:
                following = self._start_in_longest_free_run(used.union(found), count - len(found))
            found.append(following)
            following += 1
        return found

    def _start_in_longest_free_run(self, used: set[int], count: int) -> int:
        # Behind another sequence's pages, leave half of what `count` pages do not need: the other one may still grow.
        best_start, best_length, start = 0, 0, 0
        for page in [*sorted(used), self.pages]:
            if page - start > best_length:
                best_start, best_length = start, page - start
            start = page + 1
        return best_start + max(0, best_length - count) // 2 if best_start > 0 else best_start

    def reserve(self, count: int) -> None:
        """Grow at once so that `count` pages are free, or as many as there is memory for."""
        used = self._used()
        missing = count - (self.pages - len(used))
        available = available_memory()
        if available is not None:
            missing = min(missing, available // self.page_bytes)
        if missing > 0:
            with contextlib.suppress(DoesNotFit):
                # Where nothing is in use nothing is copied, so it need not be more than is wanted.
                self._grow(self._slab(missing, missing) if used else missing, used)

    def trim(self) -> None:
        """Give memory back: the pages behind the last one in use, if they are more than `_KEPT` bytes, and what MLX
        keeps for reuse. No page moves."""
        used = self._used()
        kept = max(used, default=-1) + 1
        if (self.pages - kept) * self.page_bytes > _KEPT:
            self._resize(kept, used)
        mx.clear_cache()

    def discard(self) -> None:
        """Let go of everything if no page is in use: what a failed pass left unwritten would fail again."""
        if self.pages_in_use == 0:
            self._resize(0, set())

    def _slab(self, wanted: int, missing: int) -> int:
        """Pages to grow by: at least half as many as there are, so that all growth together copies no more than twice
        what there is in the end; but beyond what is missing no more than half of the memory that is left."""
        available = available_memory()
        room = wanted + self.pages if available is None else available // 2 // self.page_bytes
        return max(missing, min(max(wanted, -(-self.pages // 2)), room))

    def _grow(self, slab: int, used: set[int]) -> None:
        """Add so many pages. Raises DoesNotFit where there is no memory for them."""
        wanted, available = slab * self.page_bytes, available_memory()
        more = "" if available is None else f", {available // self.page_bytes * PAGE} more would fit"
        with memory_or(
            f"no memory for {slab * PAGE} more tokens of keys and values ({gigabytes(wanted)}) beside "
            f"{self.pages * PAGE}{more}; {SMALLER_CACHE}"
        ):
            if available is not None and wanted > available:
                raise MemoryError
            self._resize(self.pages + slab, used)

    def _resize(self, pages: int, used: set[int]) -> None:
        """Have so many pages in all, no fewer than reach behind the last one in use. Whatever ends it before, what is
        stored stays, in the smaller of the two sizes."""
        smaller = min(self.pages, pages)
        try:
            self._allocate(pages, used)
        except BaseException:
            with contextlib.suppress(RuntimeError, MemoryError):
                self._allocate(smaller, used)
            raise

    def _allocate(self, pages: int, used: set[int]) -> None:
        self.pages = min(self.pages, pages)
        kept = max(used, default=-1) + 1
        for kind, arrays in zip(self._kinds, self._arrays, strict=True):
            for layer in range(self.layers):  # one at a time: the peak is one layer above the larger size
                if arrays[layer].shape[2] != pages * PAGE:
                    resized = self._blank(kind, pages - kept)
                    if kept > 0:
                        resized = mx.concatenate([arrays[layer][:, :, : kept * PAGE], resized], axis=2)
                    mx.eval(resized)
                    arrays[layer] = resized
                    del resized
                    bound_cache()
        self.pages = pages
        mx.clear_cache()  # of the old arrays

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
