"""Pages against plain lists: whatever is appended, rewound, settled, forked or closed, a sequence reads its own, in
every storage, and holds no page longer than a row can come that sees it."""

from __future__ import annotations

import contextlib
from collections import Counter
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from interruptions import interrupted

from mlx_spec.attention.attend import _written
from mlx_spec.errors import DoesNotFit
from mlx_spec.kv import PAGE, PagePool, PageTable
from mlx_spec.kv import pool as pools

LAYERS, KV_HEADS, HEAD_DIM = 2, 2, 3


def new_pool(dtype: mx.Dtype = mx.float32, int8: bool = False) -> PagePool:
    return PagePool(layers=LAYERS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=dtype, int8=int8)


def vectors(tokens: list[int], layer: int, sign: int) -> np.ndarray:
    """What `tokens` leave in a layer: keys with sign 1, values with sign -1; exact in float32.
    (1, kv_heads, n, head_dim)."""
    channel = np.arange(KV_HEADS * HEAD_DIM).reshape(KV_HEADS, 1, HEAD_DIM) + KV_HEADS * HEAD_DIM * layer
    return (sign * (np.array(tokens).reshape(1, 1, -1, 1) * 16 + channel + 1)).astype(np.float32)


def parts(pool: PagePool, tokens: list[int], layer: int) -> list[np.ndarray]:
    """The same as the pool stores it: rows, or for INT8 bytes and scales that belong together."""
    stored = []
    for sign in (1, -1):
        rows = vectors(tokens, layer, sign)
        if pool.int8:
            rows = rows.astype(np.int64)
            stored += [rows % 251 - 125, rows[..., 0] % 2039]  # both exact in their types
        else:
            stored.append(rows)
    return stored


def arrays(pool: PagePool) -> list[list[mx.array]]:
    """All that the pool holds, in the order of `parts`."""
    if pool.key_scales is None or pool.value_scales is None:
        return [pool.keys, pool.values]
    return [pool.keys, pool.key_scales, pool.values, pool.value_scales]


def write(table: PageTable, tokens: list[int]) -> None:
    """Append as one pass of attention does: lazily, layer by layer."""
    start, pool = table.length, table.pool
    table.append(len(tokens))
    where = _written(table, start)
    for layer in range(LAYERS):
        new = zip(parts(pool, tokens, layer), arrays(pool), strict=True)
        pool.write(layer, where, [mx.array(part).astype(kind[layer].dtype) for part, kind in new])


def read(pool: PagePool) -> list[list[np.ndarray]]:
    """All that the pool holds, on the host: reading it piece by piece takes far longer."""
    return [[np.array(array) for array in kind] for kind in arrays(pool)]


def check_contents(
    table: PageTable, tokens: list[int], gone: frozenset[int] = frozenset(),
    stored: list[list[np.ndarray]] | None = None,
) -> None:
    """Every position whose page is not `gone`; if none is, both ways of reading."""
    assert table.length == len(tokens)
    assert table.dropped == len(gone)
    assert len(table.pages) == -(-len(tokens) // PAGE) - len(gone)
    held = [position for position in range(len(tokens)) if position // PAGE not in gone]
    if not held:
        return
    slots = np.array([table.slot(position) for position in held])
    ids = np.array(table.page_ids())
    assert ids.tolist() == table.pages
    ways: list[Any] = [slots, (ids[:, None] * PAGE + np.arange(PAGE)).reshape(-1)[: len(held)]]
    if table.consecutive:
        ways.append(slice(table.slot(0), table.slot(0) + len(held)))
    kept = [tokens[position] for position in held]
    stored = read(table.pool) if stored is None else stored
    for layer in range(LAYERS):
        for kind, expected in zip(stored, parts(table.pool, kept, layer), strict=True):
            for way in ways:
                assert np.array_equal(kind[layer][:, :, way], expected)


def check_pool(pool: PagePool, tables: list[PageTable]) -> None:
    """Counts, free pages and bytes are those of exactly these tables."""
    held = Counter(page for table in tables for page in table.pages)
    assert [pool.references(page) for page in range(pool.pages)] == [held[page] for page in range(pool.pages)]
    assert pool.pages_in_use == len(held)
    everything = [array for kind in arrays(pool) for array in kind]
    assert pool.nbytes == sum(array.nbytes for array in everything)
    assert {array.shape[:3] for array in everything} == {(1, KV_HEADS, pool.pages * PAGE)}
    for table in tables:
        assert len(set(table.pages)) == len(table.pages)


def follow(pages: list[int]) -> bool:
    """Whether each page comes right after the one before."""
    return all(page + 1 == following for page, following in pairwise(pages))


class Model:
    """A table beside what it should hold: the plain list of its tokens, and which pages are gone."""

    def __init__(self, table: PageTable, tokens: list[int], gone: set[int], settled: int) -> None:
        self.table, self.tokens, self.gone, self.settled = table, tokens, gone, settled

    @property
    def head(self) -> int:
        """Pages with sinks: never gone."""
        return -(-self.table.sinks // PAGE)

    def oldest_seen(self, length: int) -> int:
        """By the row at `length`, after the sinks."""
        return 0 if self.table.window is None else max(0, length + 1 - self.table.window)

    def may_rewind(self, length: int) -> bool:
        """Whether all that the next row would then see is still there."""
        return not any(position // PAGE in self.gone for position in range(self.oldest_seen(length), length))

    def rewind(self, length: int) -> None:
        self.table.rewind(length)
        del self.tokens[length:]
        self.gone = {page for page in self.gone if page * PAGE < length}
        self.settled = min(self.settled, length)

    def settle(self, length: int) -> None:
        self.table.settle(length)
        self.settled = max(self.settled, length)
        pages = range(self.head, -(-len(self.tokens) // PAGE))
        self.gone |= {page for page in pages if (page + 1) * PAGE <= self.oldest_seen(length)}

    def check(self, stored: list[list[np.ndarray]] | None = None) -> None:
        check_contents(self.table, self.tokens, frozenset(self.gone), stored)
        assert self.table.consecutive is (not self.gone and follow(self.table.pages))
        length = len(self.tokens)
        hidden = range(self.table.sinks, self.oldest_seen(length - 1) if length else 0)
        assert self.table.hides is (len(hidden) > 0)


class Sequences(RuleBasedStateMachine):
    """Several tables of one pool, with and without windows, each beside its model."""

    int8 = False
    tables = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.pool = new_pool(int8=self.int8)
        self.contents: dict[int, Model] = {}
        self.kept, pools._KEPT = pools._KEPT, 2 * self.pool.page_bytes
        self.written = 0
        self.named = 0

    def _add(self, model: Model) -> int:
        self.named += 1
        self.contents[self.named] = model
        return self.named

    @rule(target=tables, sinks=st.sampled_from([0, 4, 64, 70]), window=st.sampled_from([None, 2, 65, 100, 128]))
    def start(self, sinks: int, window: int | None) -> int:
        return self._add(Model(PageTable(self.pool, sinks, window), [], set(), 0))

    @rule(name=tables, count=st.one_of(st.integers(1, 9), st.sampled_from([63, 64, 65, 128, 200])))
    def extend(self, name: int, count: int) -> None:
        new = list(range(self.written, self.written + count))
        self.written += count
        write(self.contents[name].table, new)
        self.contents[name].tokens += new

    @rule(name=tables, count=st.integers(1, 7), kept=st.integers(0, 6))
    def verify(self, name: int, count: int, kept: int) -> None:
        """A round of speculation: rows of which some are taken back, which the pages must never stand against."""
        self.extend(name, count)
        model = self.contents[name]
        model.rewind(len(model.tokens) - min(kept, count - 1))
        model.settle(len(model.tokens))

    @rule(name=tables, data=st.data())
    def settle(self, name: int, data: st.DataObject) -> None:
        model = self.contents[name]
        length = len(model.tokens)
        model.settle(data.draw(st.one_of(st.just(length), st.integers(0, length))))

    @rule(name=tables, data=st.data())
    def rewind(self, name: int, data: st.DataObject) -> None:
        model = self.contents[name]
        length = len(model.tokens)
        borders = list(range(0, length + 1, PAGE))
        near = [max(0, length - back) for back in range(6)]
        target = data.draw(st.one_of(st.sampled_from(borders + near), st.integers(0, length)))
        if model.may_rewind(target):
            model.rewind(target)
        else:
            assert model.head * PAGE < target < model.settled
            with pytest.raises(ValueError, match=f"cannot rewind {length} positions to {target}"):
                model.table.rewind(target)

    @rule(target=tables, name=tables)
    def fork(self, name: int) -> int:
        model = self.contents[name]
        before = self.pool.pages_in_use
        other = model.table.fork()
        assert self.pool.pages_in_use == before  # nothing is copied until one of the two writes
        return self._add(Model(other, list(model.tokens), set(model.gone), model.settled))

    @rule(name=tables, tokens=st.integers(0, 900))
    def reserve(self, name: int, tokens: int) -> None:
        table, before = self.contents[name].table, self.pool.pages
        table.reserve(tokens)
        assert self.pool.pages - self.pool.pages_in_use + len(table.pages) >= -(-tokens // PAGE)
        assert self.pool.pages == before or self.pool.pages >= 1.5 * before or self.pool.pages_in_use == 0

    @rule()
    def trim(self) -> None:
        last = max((page for model in self.contents.values() for page in model.table.pages), default=-1)
        self.pool.trim()
        assert self.pool.pages <= last + 3

    @rule(
        name=tables, at=st.integers(1, 80), count=st.sampled_from([1, 5, 64, 130, 300]),
        kind=st.sampled_from(["append", "rewind", "settle", "reserve", "trim", "fork"]),
    )
    def interrupt(self, name: int, at: int, kind: str, count: int) -> None:
        """Ctrl-C anywhere: it happened as a whole, or not at all."""
        model = self.contents[name]
        table, before = model.table, model.table.length
        if kind == "append":
            if interrupted(lambda: table.append(count), at)[0]:
                assert table.length == before
            else:
                table.rewind(before)
        elif kind == "rewind":
            target = max(0, before - count)
            if model.may_rewind(target) and not interrupted(lambda: table.rewind(target), at)[0]:
                model.rewind(target)
        elif kind == "settle":
            if not interrupted(lambda: table.settle(before), at)[0]:
                model.settle(before)
        elif kind == "reserve":
            interrupted(lambda: table.reserve(before + count), at)
        elif kind == "trim":
            interrupted(self.pool.trim, at)
        else:
            interrupted(table.fork, at)  # and nobody keeps the other

    @rule(name=consumes(tables))
    def close(self, name: int) -> None:
        self.contents.pop(name).table.rewind(0)

    @rule(name=tables, excess=st.integers(1, 100))
    def rewind_wrongly(self, name: int, excess: int) -> None:
        model = self.contents[name]
        length = len(model.tokens)
        for target in (length + excess, -excess):
            with pytest.raises(ValueError, match=f"cannot rewind {length} positions to {target}"):
                model.table.rewind(target)

    @invariant()
    def everything_is_where_it_belongs(self) -> None:
        check_pool(self.pool, [model.table for model in self.contents.values()])
        stored = read(self.pool)
        for model in self.contents.values():
            model.check(stored)

    def teardown(self) -> None:
        for model in self.contents.values():
            model.table.rewind(0)
        assert self.pool.pages_in_use == 0
        if self.pool.pages:  # and all of it can be used again
            pages = self.pool.pages
            table = PageTable(self.pool)
            table.append(pages * PAGE)
            assert self.pool.pages == pages
            assert table.consecutive
        pools._KEPT = self.kept


class Int8Sequences(Sequences):
    int8 = True


SETTINGS = settings(
    max_examples=60, stateful_step_count=25, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
Sequences.TestCase.settings = Int8Sequences.TestCase.settings = SETTINGS
TestSequences = Sequences.TestCase
TestInt8Sequences = Int8Sequences.TestCase


def filled(pool: PagePool, length: int, first: int = 0) -> tuple[PageTable, list[int]]:
    table, tokens = PageTable(pool), list(range(first, first + length))
    write(table, tokens)
    return table, tokens


def one_page_each(pool: PagePool, count: int) -> list[tuple[PageTable, list[int]]]:
    """Sequences of 64 tokens on pages 0, 1, ... of an empty pool."""
    whole, tokens = filled(pool, count * PAGE)
    assert whole.pages == list(range(count))
    tables = []
    for page in whole.pages:
        table = PageTable(pool)
        table.pages, table.length = [page], PAGE
        tables.append((table, tokens[page * PAGE : (page + 1) * PAGE]))
    return tables


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
    tables = one_page_each(pool, 12)
    for page in (1, 5, 6, 7):
        tables[page][0].rewind(0)
    new, tokens = filled(pool, 3 * PAGE)
    assert new.pages == [5, 6, 7]
    check_contents(new, tokens)


def test_the_next_page_is_preferred_to_a_larger_run() -> None:
    pool = new_pool()
    tables = one_page_each(pool, 12)
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
    tables = one_page_each(pool, 12)
    for page in (1, 2, 6, 7, 8, 9):
        tables[page][0].rewind(0)
    parent, tokens = tables[0]
    write(parent, [900])
    child = parent.fork()
    write(child, [901])
    assert (parent.pages, child.pages) == ([0, 1], [0, 7])  # in the middle of what is free
    parent.rewind(0)
    grandchild = child.fork()
    write(grandchild, [902])
    assert grandchild.pages == [0, 1]
    check_contents(child, [*tokens, 900, 901])
    check_contents(grandchild, [*tokens, 900, 901, 902])


def test_a_prompt_beside_another_sequence_is_consecutive() -> None:
    pool = new_pool()
    first, _ = filled(pool, 4 * PAGE)
    second, tokens = filled(pool, 30 * PAGE)
    assert second.consecutive
    check_contents(second, tokens)
    third, _ = filled(pool, 1)
    assert third.consecutive
    assert first.consecutive


def test_a_sequence_begins_where_the_one_before_can_still_grow() -> None:
    pool = new_pool()
    pool.reserve(40)
    tables = [PageTable(pool), PageTable(pool)]
    for _ in range(10):
        for table in tables:
            write(table, list(range(PAGE)))
    assert all(table.consecutive for table in tables)


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


class Bookkeeping(RuleBasedStateMachine):
    """Tables whose contents nobody reads, many of them scattered: whether they are consecutive is always known."""

    tables = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(layers=1, kv_heads=1, head_dim=1, dtype=mx.float16)
        self.living: list[PageTable] = []

    @rule(target=tables, sinks=st.sampled_from([0, 4, 64, 130]), window=st.sampled_from([None, 2, 65, 300]))
    def start(self, sinks: int, window: int | None) -> PageTable:
        self.living.append(PageTable(self.pool, sinks, window))
        return self.living[-1]

    @rule(table=tables, count=st.sampled_from([1, 30, 64, 65, 200]), settled=st.booleans())
    def append(self, table: PageTable, count: int, settled: bool) -> None:
        table.append(count)
        if settled:
            table.settle(table.length)

    @rule(table=tables, data=st.data())
    def rewind(self, table: PageTable, data: st.DataObject) -> None:
        with contextlib.suppress(ValueError):
            table.rewind(data.draw(st.integers(0, table.length)))

    @rule(target=tables, table=tables)
    def fork(self, table: PageTable) -> PageTable:
        self.living.append(table.fork())
        return self.living[-1]

    @invariant()
    def what_is_counted_is_what_is_there(self) -> None:
        for table in self.living:
            assert table.consecutive is (table.dropped == 0 and follow(table.pages))
            assert table._breaks == sum(page + 1 != following for page, following in pairwise(table.pages))


Bookkeeping.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None, derandomize=True)
TestBookkeeping = Bookkeeping.TestCase


def test_whether_pages_follow_is_known_without_looking_at_each() -> None:
    class Unread(list[int]):
        def __iter__(self) -> Any:
            raise AssertionError("looks at every page")

        __getitem__ = __iter__  # type: ignore[assignment]

    table, _ = filled(new_pool(), 20 * PAGE)
    table.pages = Unread(table.pages)
    assert table.consecutive


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
    assert pool.pages <= 1.5 * pool.pages_in_use  # never much more than is used
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


@pytest.mark.parametrize(("int8", "fails_at"), [(False, at) for at in (1, 2, 3, 4)] + [(True, at) for at in (1, 4, 8)])
def test_memory_that_cannot_be_had_leaves_everything_as_it_was(
    monkeypatch: pytest.MonkeyPatch, int8: bool, fails_at: int
) -> None:
    pool = new_pool(int8=int8)
    table, tokens = filled(pool, 4 * PAGE)
    blank, calls = PagePool._blank, 0

    def failing(self: PagePool, *arguments: Any) -> mx.array:
        nonlocal calls
        calls += 1
        if calls == fails_at:
            raise RuntimeError("no memory")
        return blank(self, *arguments)

    monkeypatch.setattr(PagePool, "_blank", failing)
    with pytest.raises(DoesNotFit, match=r"256 more tokens .* beside 256.*; give .* --kv int8"):
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


@pytest.mark.parametrize("int8", [False, True])
def test_a_copied_page_is_that_page(int8: bool) -> None:
    pool = new_pool(int8=int8)
    table, tokens = filled(pool, 3 * PAGE)
    pool.copy_page(1, 3)
    for layer in range(LAYERS):
        for kind, written in zip(arrays(pool), parts(pool, tokens, layer), strict=True):
            whole = np.array(kind[layer])
            np.testing.assert_array_equal(whole[:, :, 3 * PAGE : 4 * PAGE], written[:, :, PAGE : 2 * PAGE])
            np.testing.assert_array_equal(whole[:, :, : 3 * PAGE], written)
    assert table.length == 3 * PAGE


# Windows.


@pytest.mark.parametrize("sinks", [0, 4, 64, 70])
@pytest.mark.parametrize("window", [65, 128, 200])
@pytest.mark.parametrize("rows", [1, 7, 64])
def test_a_sequence_holds_the_window_the_sinks_and_a_page_more_at_most(sinks: int, window: int, rows: int) -> None:
    pool = new_pool()
    table = PageTable(pool, sinks, window)
    for start in range(0, 1000, rows):
        write(table, list(range(start, start + rows)))
        table.settle(table.length)
        # What the next row sees of what is held, and how many pages that must take.
        needed = min(table.length, window - 1)
        assert table.dropped == max(0, (table.length + 1 - window) // PAGE - table.head_pages)
        assert len(table.pages) <= table.head_pages + -(-needed // PAGE) + 1
    most = table.head_pages + -(-(window + rows) // PAGE) + 1
    assert pool.pages <= max(4, most + 4)
    table.rewind(0)
    check_pool(pool, [])


def test_a_window_as_long_as_the_sequence_drops_nothing() -> None:
    pool = new_pool()
    table = PageTable(pool, 4, 500)
    write(table, list(range(500)))
    for length in (0, 250, 499):
        table.settle(length)
        assert not table.hides
        assert table.consecutive
    write(table, [1] * 4)
    assert not table.hides
    write(table, [1])
    assert table.hides
    table.settle(505)
    assert table.dropped == 0  # position 6 is in the first page, with the sinks
    without = PageTable(pool)
    write(without, list(range(500)))
    without.settle(500)
    assert len(without.pages) == 8
    assert not without.hides


def test_a_fork_keeps_what_the_other_drops() -> None:
    pool = new_pool()
    parent = Model(PageTable(pool, 4, 65), [], set(), 0)
    write(parent.table, list(range(300)))
    parent.tokens += range(300)
    child = Model(parent.table.fork(), list(parent.tokens), set(), 0)
    parent.settle(300)
    assert parent.gone == {1, 2}
    parent.check()
    child.check()
    assert (child.table.sinks, child.table.window) == (4, 65)
    check_pool(pool, [parent.table, child.table])
    child.rewind(130)
    write(child.table, [900, 901])
    child.tokens += [900, 901]
    child.check()
    parent.check()
    grandchild = parent.table.fork()
    write(grandchild, list(range(500, 600)))
    check_contents(grandchild, [*range(300), *range(500, 600)], frozenset({1, 2}))
    parent.check()
    check_pool(pool, [parent.table, child.table, grandchild])


def test_a_dropped_page_is_used_again() -> None:
    pool = new_pool()
    table = PageTable(pool, 0, 65)
    for start in range(0, 50 * PAGE, 16):
        write(table, list(range(start, start + 16)))
        table.settle(table.length)
    assert pool.pages == 4
