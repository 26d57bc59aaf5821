"""One sequence's pages: append, rewind, fork with copy on write. Knows which slots are whose; nothing of what is in
them."""

from __future__ import annotations

from mlx_spec.kv.pool import PAGE, PagePool


class PageTable:
    """The pages that hold positions 0 to `length` - 1 of one sequence."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.pages: list[int] = []
        self.length = 0

    def append(self, count: int) -> None:
        """Make room for `count` more positions. Pages another table holds too are copied before they are written."""
        if self.length % PAGE and self.pool.references(self.pages[-1]) > 1:
            before = self.pages[-2] if len(self.pages) > 1 else None
            shared = self.pages[-1]
            [own] = self.pool.allocate(1, after=before)
            try:
                self.pool.copy_page(shared, own)
            except BaseException:
                self.pool.release([own])
                raise
            self.pages[-1] = own
            self.pool.release([shared])
        wanted = -(-(self.length + count) // PAGE)
        if wanted > len(self.pages):
            last = self.pages[-1] if self.pages else None
            self.pages += self.pool.allocate(wanted - len(self.pages), after=last)
        self.length += count

    def rewind(self, length: int) -> None:
        """Forget every position from `length` on and free the pages past it."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot rewind {self.length} positions to {length}")
        kept = -(-length // PAGE)
        self.pool.release(self.pages[kept:])
        del self.pages[kept:]
        self.length = length

    def fork(self) -> PageTable:
        """A second sequence with the same past, sharing its pages until one of the two writes."""
        other = PageTable(self.pool)
        other.pages, other.length = list(self.pages), self.length
        self.pool.retain(other.pages)
        return other

    @property
    def consecutive(self) -> bool:
        """Whether the pages follow one another, so that all positions are one slice of the pool."""
        pages = self.pages
        return all(pages[i] + 1 == pages[i + 1] for i in range(len(pages) - 1))

    def slot(self, position: int) -> int:
        """Where `position` is in the pool."""
        return self.pages[position // PAGE] * PAGE + position % PAGE
