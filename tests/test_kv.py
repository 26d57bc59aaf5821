"""Pages against plain lists: whatever is appended, rewound, forked or closed, a sequence reads its own."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from mlx_spec.attention import _slots
from mlx_spec.kv import PAGE, PagePool, PageTable

LAYERS, KV_HEADS, HEAD_DIM = 2, 2, 3


def new_pool(dtype: mx.Dtype = mx.float32) -> PagePool:
    return PagePool(layers=LAYERS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=dtype)


def vectors(tokens: list[int], layer: int, sign: int) -> np.ndarray:
    """What `tokens` leave in a layer: keys with sign 1, values with sign -1; exact in float32.
    (1, kv_heads, n, head_dim)."""
    channel = np.arange(KV_HEADS * HEAD_DIM).reshape(KV_HEADS, 1, HEAD_DIM) + KV_HEADS * HEAD_DIM * layer
    return (sign * (np.array(tokens).reshape(1, 1, -1, 1) * 16 + channel + 1)).astype(np.float32)


def write(table: PageTable, tokens: list[int]) -> None:
    """Append as one pass of attention does: lazily, layer by layer."""
    start = table.length
    table.append(len(tokens))
    where, _ = _slots(table, start)
    for layer in range(LAYERS):
        keys, values = table.pool.keys[layer], table.pool.values[layer]
        keys[:, :, where] = mx.array(vectors(tokens, layer, 1)).astype(keys.dtype)
        values[:, :, where] = mx.array(vectors(tokens, layer, -1)).astype(values.dtype)


def check_contents(table: PageTable, tokens: list[int]) -> None:
    """Both ways of reading, and position by position."""
    assert table.length == len(tokens)
    assert len(table.pages) == -(-len(tokens) // PAGE)
    if not tokens:
        return
    _, way = _slots(table, table.length)
    assert isinstance(way, slice) == table.consecutive
    gathered = mx.array([table.slot(position) for position in range(table.length)])
    for layer in range(LAYERS):
        for arrays, sign in ((table.pool.keys, 1), (table.pool.values, -1)):
            expected = vectors(tokens, layer, sign)
            np.testing.assert_array_equal(np.array(arrays[layer][:, :, way]), expected)
            np.testing.assert_array_equal(np.array(mx.take(arrays[layer], gathered, axis=2)), expected)


def check_pool(pool: PagePool, tables: list[PageTable]) -> None:
    """Counts, free pages and bytes are those of exactly these tables."""
    held = Counter(page for table in tables for page in table.pages)
    assert [pool.references(page) for page in range(pool.pages)] == [held[page] for page in range(pool.pages)]
    assert pool.pages_in_use == len(held)
    assert pool.nbytes == sum(array.nbytes for array in pool.keys + pool.values)
    assert {array.shape for array in pool.keys + pool.values} == {(1, KV_HEADS, pool.pages * PAGE, HEAD_DIM)}
    for table in tables:
        assert len(set(table.pages)) == len(table.pages)


class Sequences(RuleBasedStateMachine):
    """Several tables of one pool, each beside the plain list of its tokens."""

    tables = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.pool = new_pool()
        self.contents: dict[int, tuple[PageTable, list[int]]] = {}
        self.written = 0
        self.named = 0

    def _add(self, table: PageTable, tokens: list[int]) -> int:
        self.named += 1
        self.contents[self.named] = (table, tokens)
        return self.named

    @rule(target=tables)
    def start(self) -> int:
        return self._add(PageTable(self.pool), [])

    @rule(name=tables, count=st.one_of(st.integers(1, 9), st.sampled_from([63, 64, 65, 128, 200])))
    def extend(self, name: int, count: int) -> None:
        table, tokens = self.contents[name]
        new = list(range(self.written, self.written + count))
        self.written += count
        write(table, new)
        tokens += new

    @rule(name=tables, data=st.data())
    def rewind(self, name: int, data: st.DataObject) -> None:
        table, tokens = self.contents[name]
        length = len(tokens)
        borders = list(range(0, length + 1, PAGE))
        near = [max(0, length - back) for back in range(6)]
        target = data.draw(st.one_of(st.sampled_from(borders + near), st.integers(0, length)))
        table.rewind(target)
        del tokens[target:]

    @rule(target=tables, name=tables)
    def fork(self, name: int) -> int:
        table, tokens = self.contents[name]
        before = self.pool.pages_in_use
        other = table.fork()
        assert self.pool.pages_in_use == before  # nothing is copied until one of the two writes
        return self._add(other, list(tokens))

    @rule(name=consumes(tables))
    def close(self, name: int) -> None:
        table, _ = self.contents.pop(name)
        table.rewind(0)

    @rule(name=tables, excess=st.integers(1, 100))
    def rewind_wrongly(self, name: int, excess: int) -> None:
        table, tokens = self.contents[name]
        for target in (len(tokens) + excess, -excess):
            with pytest.raises(ValueError, match=f"cannot rewind {len(tokens)} positions to {target}"):
                table.rewind(target)

    @invariant()
    def everything_is_where_it_belongs(self) -> None:
        check_pool(self.pool, [table for table, _ in self.contents.values()])
        for table, tokens in self.contents.values():
            check_contents(table, tokens)

    def teardown(self) -> None:
        for table, _ in self.contents.values():
            table.rewind(0)
        assert self.pool.pages_in_use == 0
        if self.pool.pages:  # and all of it can be used again
            pages = self.pool.pages
            table = PageTable(self.pool)
            table.append(pages * PAGE)
            assert self.pool.pages == pages
            assert table.consecutive


Sequences.TestCase.settings = settings(
    max_examples=80, stateful_step_count=25, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
TestSequences = Sequences.TestCase


def filled(pool: PagePool, length: int, first: int = 0) -> tuple[PageTable, list[int]]:
    table, tokens = PageTable(pool), list(range(first, first + length))
    write(table, tokens)
    return table, tokens


# Rewind.


@pytest.mark.parametrize(("length", "kept"), [
    (length, kept)
    for length in (1, 63, 64, 65, 128, 130)
    for kept in (0, 1, 63, 64, 65, 128, 129) if kept <= length
])
def test_rewind_frees_whole_pages_and_keeps_the_rest(length: int, kept: int) -> None:
    pool = new_pool()
    table, tokens = filled(pool, length)
    table.rewind(kept)
    assert pool.pages_in_use == -(-kept // PAGE)
    write(table, [900, 901])
    check_contents(table, [*tokens[:kept], 900, 901])
    check_pool(pool, [table])


def test_rewind_to_the_same_length_changes_nothing() -> None:
    pool = new_pool()
    table, tokens = filled(pool, 70)
    pages = list(table.pages)
    table.rewind(70)
    assert table.pages == pages
    check_contents(table, tokens)


# Fork and copy on write.


@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129])
@pytest.mark.parametrize("writer", ["parent", "child"])
def test_a_fork_shares_until_one_writes_and_then_copies_one_page_at_most(length: int, writer: str) -> None:
    pool = new_pool()
    parent, tokens = filled(pool, length)
    child = parent.fork()
    before = pool.pages_in_use
    assert child.pages == parent.pages
    one, other = (parent, child) if writer == "parent" else (child, parent)
    write(one, [900])
    assert pool.pages_in_use == before + 1  # the copied last page, or a new one at a border
    check_contents(one, [*tokens, 900])
    check_contents(other, tokens)
    write(other, [901])  # the last page is this one's alone now: no copy where it has room
    assert pool.pages_in_use == before + (2 if length % PAGE == 0 else 1)
    check_contents(one, [*tokens, 900])
    check_contents(other, [*tokens, 901])
    check_pool(pool, [one, other])


@pytest.mark.parametrize("fork_at", [65, 70, 128, 150])
@pytest.mark.parametrize("target", [0, 1, 10, 63, 64, 65])
def test_rewinding_below_the_fork_leaves_the_other_alone(fork_at: int, target: int) -> None:
    pool = new_pool()
    parent, tokens = filled(pool, fork_at)
    child = parent.fork()
    write(child, [900, 901, 902])
    child.rewind(target)
    write(child, list(range(910, 990)))
    check_contents(parent, tokens)
    check_contents(child, tokens[:target] + list(range(910, 990)))
    parent.rewind(target)
    write(parent, [999])
    check_contents(parent, [*tokens[:target], 999])
    check_contents(child, tokens[:target] + list(range(910, 990)))
    check_pool(pool, [parent, child])


def test_three_holders_of_one_page_each_write_their_own_end() -> None:
    pool = new_pool()
    first, tokens = filled(pool, 100)
    tables = [first, first.fork(), first.fork()]
    for index, table in enumerate(tables):
        write(table, [900 + index])
    for index, table in enumerate(tables):
        check_contents(table, [*tokens, 900 + index])
    assert pool.references(first.pages[0]) == 3
    check_pool(pool, tables)


def test_closing_one_fork_lets_the_other_write_in_place() -> None:
    pool = new_pool()
    parent, tokens = filled(pool, 70)
    child = parent.fork()
    parent.rewind(0)
    pages = list(child.pages)
    write(child, [900])
    assert child.pages == pages
    check_contents(child, [*tokens, 900])


def test_a_fork_of_nothing_is_empty() -> None:
    pool = new_pool()
    child = PageTable(pool).fork()
    assert (child.length, child.pages, child.consecutive) == (0, [], True)
    write(child, [1])
    check_contents(child, [1])


# Where pages are, and how the pool grows.


def test_a_lone_sequence_stays_consecutive_however_it_grows() -> None:
    pool = new_pool()
    table, tokens = PageTable(pool), []
    for count in (1, 62, 2, 200, 64, 1, 500, 3, 1000, 64 * 30):
        new = list(range(len(tokens), len(tokens) + count))
        write(table, new)
        tokens += new
        assert table.consecutive
    table.rewind(700)
    write(table, list(range(3000)))
    assert table.consecutive
    check_contents(table, tokens[:700] + list(range(3000)))


def test_a_sequence_after_a_closed_one_is_consecutive_again() -> None:
    pool = new_pool()
    first, _ = filled(pool, 300)
    second, _ = filled(pool, 300)
    write(first, [1] * 100)
    first.rewind(0)
    second.rewind(0)
    pages = pool.pages
    third, tokens = filled(pool, pages * PAGE)
    assert third.consecutive
    assert pool.pages == pages
    check_contents(third, tokens)


def test_the_largest_free_run_is_taken() -> None:
    pool = new_pool()
    tables = [filled(pool, PAGE)[0] for _ in range(12)]
    assert [table.pages for table in tables] == [[page] for page in range(12)]
    for page in (1, 5, 6, 7):
        tables[page].rewind(0)
    new, tokens = filled(pool, 3 * PAGE)
    assert new.pages == [5, 6, 7]
    check_contents(new, tokens)


def test_the_next_page_is_preferred_to_a_larger_run() -> None:
    pool = new_pool()
    tables = [filled(pool, PAGE) for _ in range(12)]
    for page in (0, 1, 2, 3, 6, 7):
        tables[page][0].rewind(0)
    table, tokens = tables[5]
    write(table, list(range(2 * PAGE)))
    assert table.pages == [5, 6, 7]
    write(table, list(range(PAGE)))
    assert table.pages == [5, 6, 7, 0]
    check_contents(table, [*tokens, *range(2 * PAGE), *range(PAGE)])


def test_a_copied_page_follows_its_predecessor_if_it_can() -> None:
    pool = new_pool()
    tables = [filled(pool, PAGE) for _ in range(12)]
    for page in (1, 2, 6, 7, 8, 9):
        tables[page][0].rewind(0)
    parent, tokens = tables[0]
    write(parent, [900])
    child = parent.fork()
    write(child, [901])
    assert (parent.pages, child.pages) == ([0, 1], [0, 6])
    parent.rewind(0)
    grandchild = child.fork()
    write(grandchild, [902])
    assert grandchild.pages == [0, 1]
    check_contents(child, [*tokens, 900, 901])
    check_contents(grandchild, [*tokens, 900, 901, 902])


def test_pages_that_do_not_follow_are_still_the_right_ones() -> None:
    pool = new_pool()
    one, two = PageTable(pool), PageTable(pool)
    contents: dict[PageTable, list[int]] = {one: [], two: []}
    for step in range(12):
        table = (one, two)[step % 2]
        new = list(range(step * 100, step * 100 + 50))
        write(table, new)
        contents[table] += new
    assert not one.consecutive
    for table, tokens in contents.items():
        check_contents(table, tokens)


def test_growth_is_in_slabs() -> None:
    pool = PagePool(layers=1, kv_heads=1, head_dim=1, dtype=mx.float16)
    table = PageTable(pool)
    sizes = [pool.pages]
    for _ in range(1000):
        table.append(PAGE)
        if pool.pages != sizes[-1]:
            sizes.append(pool.pages)
    assert len(sizes) < 30
    assert all(after - before <= max(64, before) for before, after in pairwise(sizes[1:]))
    assert pool.pages - pool.pages_in_use <= 64  # never much more than is used
    assert pool.nbytes == pool.pages * PAGE * 2 * 2


def test_growth_keeps_what_is_there() -> None:
    pool = new_pool(mx.bfloat16)
    table, tokens = filled(pool, 7)
    write(table, list(range(7, 7 + 40)))
    assert pool.keys[0].dtype == mx.bfloat16
    before = np.array(pool.keys[1][:, :, :47].astype(mx.float32))
    PageTable(pool).append(50 * PAGE)
    np.testing.assert_array_equal(np.array(pool.keys[1][:, :, :47].astype(mx.float32)), before)
    assert pool.nbytes == sum(array.nbytes for array in pool.keys + pool.values)
    assert tokens[0] == 0


@pytest.mark.parametrize("fails_at", [1, 2, 3, 4])
def test_memory_that_cannot_be_had_leaves_everything_as_it_was(
    monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    pool = new_pool()
    table, tokens = filled(pool, 4 * PAGE)
    blank, calls = PagePool._blank, 0

    def failing(self: PagePool, pages: int) -> mx.array:
        nonlocal calls
        calls += 1
        if calls == fails_at:
            raise RuntimeError("no memory")
        return blank(self, pages)

    monkeypatch.setattr(PagePool, "_blank", failing)
    with pytest.raises(RuntimeError, match="no memory"):
        table.append(1)
    monkeypatch.undo()
    check_contents(table, tokens)
    assert pool.pages_in_use == 4
    write(table, [900])
    check_contents(table, [*tokens, 900])
    check_pool(pool, [table])


def test_a_failing_copy_on_write_leaks_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = new_pool()
    parent, tokens = filled(pool, 70)
    child = parent.fork()

    def failing(self: PagePool, source: int, destination: int) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(PagePool, "copy_page", failing)
    with pytest.raises(RuntimeError, match="no memory"):
        child.append(1)
    monkeypatch.undo()
    check_pool(pool, [parent, child])
    check_contents(parent, tokens)
    check_contents(child, tokens)


def test_a_copied_page_is_that_page() -> None:
    pool = new_pool()
    table, _ = filled(pool, 3 * PAGE)
    pool.copy_page(1, 3)
    for layer in range(LAYERS):
        for array in (pool.keys[layer], pool.values[layer]):
            whole = np.array(array)
            np.testing.assert_array_equal(whole[:, :, 3 * PAGE : 4 * PAGE], whole[:, :, PAGE : 2 * PAGE])
            assert (whole[:, :, : 3 * PAGE] != 0).all()
    assert table.length == 3 * PAGE
