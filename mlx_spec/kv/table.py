"""One sequence's pages: append, rewind, fork with copy on write, drop what a window has left behind. Knows which slots
are whose; nothing of what is in them."""

from __future__ import annotations

from itertools import pairwise

import mlx.core as mx

from mlx_spec.kv.pool import PAGE, PagePool

State = tuple[list[int], int, int, int, int]


class PageTable:
    """The pages of one sequence of `length` positions.

    With a `window`, the row at position p sees the first `sinks` positions and those after p - window (Xiao et al.
    2024, StreamingLLM). Pages in between are dropped once no row that can still come needs them.
    """

    def __init__(self, pool: PagePool, sinks: int = 0, window: int | None = None) -> None:
        self.pool, self.sinks, self.window = pool, sinks, window
        self.pages: list[int] = []
        """Those still held, in the order of their positions. Never changed, always replaced, by `_replace` alone."""
        self._breaks = 0
        """How many of `pages` do not follow the one before."""
        self._ids = self.pages, mx.array([], mx.int32)
        """What `page_ids` last gave, and for which `pages`."""
        self.dropped = 0
        """Pages that came after the first `head_pages` and are gone."""
        self.length = 0
        self._shared = 0
        """Positions before this one may be on pages that another table holds too."""
        pool.hold(self)

    @property
    def state(self) -> State:
        """What to assign to get back here. All that belongs together is set in one statement, before or after which
        an exception or a signal may come, but never in between."""
        return self.pages, self._breaks, self.dropped, self.length, self._shared

    @state.setter
    def state(self, state: State) -> None:
        self.pages, self._breaks, self.dropped, self.length, self._shared = state

    @property
    def head_pages(self) -> int:
        """Pages that hold sinks, and are never dropped."""
        return -(-self.sinks // PAGE)

    @property
    def hides(self) -> bool:
        """Whether the last position does not see every other."""
        return self.window is not None and self.length > self.sinks + self.window

    def append(self, count: int) -> None:
        """Make room for `count` more positions. Pages another table holds too are copied before they are written."""
        last = self.length // PAGE * PAGE  # where the page begins that is written first
        held = len(self.pages)
        shared = last < self.length and last < self._shared and self.pool.references(self.pages[-1]) > 1
        kept = held - shared
        missing = -(-(self.length + count) // PAGE) - self.dropped - kept
        new = self.pool.free_pages(missing, self.pages[kept - 1] if kept > 0 else None) if missing > 0 else []
        if shared:
            self.pool.copy_page(self.pages[-1], new[0])
        self._replace(kept, held, new, self.dropped, self.length + count, min(self._shared, last))

    def rewind(self, length: int) -> None:
        """Forget every position from `length` on and free the pages past it.

        Raises ValueError where pages that the row at `length` would see have been dropped. 0 is always possible.
        """
        in_head = length <= self.head_pages * PAGE
        if not 0 <= length <= self.length or not (in_head or self._oldest_seen(length) // PAGE >= self._resumes_at):
            raise ValueError(f"cannot rewind {self.length} positions to {length}")
        dropped = 0 if in_head else self.dropped
        self._replace(-(-length // PAGE) - dropped, len(self.pages), [], dropped, length, self._shared)

    def settle(self, length: int) -> None:
        """Drop the pages that no row from position `length` on sees: there will be no rewind to before it."""
        if self.window is None:
            return
        first = self.head_pages
        gone = min(self._oldest_seen(length) // PAGE - first - self.dropped, len(self.pages) - first)
        if gone > 0:
            self._replace(first, first + gone, [], self.dropped + gone, self.length, self._shared)

    def _oldest_seen(self, position: int) -> int:
        """The first position after the sinks that the row at `position` sees."""
        return 0 if self.window is None else max(0, position + 1 - self.window)

    @property
    def _resumes_at(self) -> int:
        """The first page held after the dropped ones; 0 while none is dropped."""
        return self.head_pages + self.dropped if self.dropped else 0

    def fork(self) -> PageTable:
        """A second sequence with the same past, sharing its pages until one of the two writes."""
        other = PageTable(self.pool, self.sinks, self.window)
        self._shared = self.length
        other.state, other._ids = self.state, self._ids
        return other

    def reserve(self, tokens: int) -> None:
        """Have room for `tokens` positions held in all, allocated at once, or for as many as there is memory for."""
        self.pool.reserve(-(-tokens // PAGE) - len(self.pages))

    @property
    def consecutive(self) -> bool:
        """Whether all positions are held, in pages that follow one another: one slice of the pool."""
        return self.dropped == 0 and self._breaks == 0

    def slot(self, position: int) -> int:
        """Where `position`, which must be held, is in the pool."""
        page = position // PAGE
        return self.pages[page if page < self.head_pages else page - self.dropped] * PAGE + position % PAGE

    def page_ids(self) -> mx.array:
        """`pages` as (n,) int32. Kept, so that a pass costs the host no more the longer the sequence is."""
        pages, (known, ids) = self.pages, self._ids
        if known is not pages:
            if known == pages[: len(known)]:
                ids = mx.concatenate([ids, mx.array(pages[len(known) :], mx.int32)])
            else:
                ids = ids[: len(pages)] if pages == known[: len(pages)] else mx.array(pages, mx.int32)
            mx.async_eval(ids)  # a lazy array belongs to the thread that made it
            self._ids = pages, ids
        return ids

    def _replace(
        self, start: int, stop: int, pages: list[int], dropped: int, length: int, shared: int
    ) -> None:
        """Put `pages` in the place of those from `start` to `stop`, counting breaks only there: a pass asks more than
        once whether all pages follow one another, and there may be thousands."""
        replaced, breaks = self.pages, self._breaks
        if start < stop or pages:
            before = max(start - 1, 0)
            breaks -= _breaks(replaced[before : stop + 1])
            replaced = [*replaced[:start], *pages, *replaced[stop:]]
            breaks += _breaks(replaced[before : start + len(pages) + 1])
        self.state = replaced, breaks, dropped, length, shared


def _breaks(pages: list[int]) -> int:
    return sum(page + 1 != following for page, following in pairwise(pages))
