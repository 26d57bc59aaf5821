"""How a pool gets and gives back its memory: what growing copies, what is reserved at once, what trimming leaves."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_spec.errors import DoesNotFit
from mlx_spec.kv import PAGE, PagePool, PageTable
from mlx_spec.kv import pool as pools


def new_pool(layers: int = 1, int8: bool = False) -> PagePool:
    return PagePool(layers=layers, kv_heads=1, head_dim=2, dtype=mx.float16, int8=int8)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of the old arrays that went into a larger or smaller one, one entry per array."""
    concatenate, seen = mx.concatenate, []

    def counting(arrays: Any, axis: int = 0) -> mx.array:
        seen.append(arrays[0].nbytes)
        return concatenate(arrays, axis=axis)

    monkeypatch.setattr(mx, "concatenate", counting)
    return seen


def one_by_one(pool: PagePool) -> list[PageTable]:
    table = PageTable(pool)
    for _ in range(2048):  # 131k tokens
        table.append(PAGE)
    return [table]


def at_random(pool: PagePool) -> list[PageTable]:
    choose = random.Random(0)
    tables = [PageTable(pool) for _ in range(8)]
    for _ in range(400):
        choose.choice(tables).append(choose.randint(1, 5 * PAGE))
    return tables


def turns_of_a_session(pool: PagePool) -> list[PageTable]:
    table = PageTable(pool)
    for _ in range(200):
        table.reserve(table.length + 3 * PAGE)
        for _ in range(3):
            table.append(PAGE)
    return [table]


@pytest.mark.parametrize("grow", [one_by_one, at_random, turns_of_a_session])
@pytest.mark.parametrize("int8", [False, True])
def test_growing_copies_no_more_than_twice_the_final_size(
    copied: list[int], grow: Callable[[PagePool], list[PageTable]], int8: bool
) -> None:
    pool = new_pool(int8=int8)
    tables = grow(pool)
    assert pool.pages_in_use == sum(len(table.pages) for table in tables)
    assert 0 < sum(copied) <= 2 * pool.nbytes
    assert pool.pages <= 1.5 * pool.pages_in_use + 3  # and what is not used is less than half of what is


def test_near_the_end_of_memory_growing_takes_half_of_what_is_left_and_then_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool, total = new_pool(), 100
    monkeypatch.setattr(pools, "available_memory", lambda: (total - pool.pages) * pool.page_bytes)
    table, sizes = PageTable(pool), set()
    for _ in range(total):
        table.append(PAGE)
        sizes.add(pool.pages)
        assert pool.pages - len(table.pages) <= max(3, (total - len(table.pages)) / 2)
    assert sorted(sizes)[-2:] == [total - 1, total]
    with pytest.raises(DoesNotFit, match=f"beside {total * PAGE}, 0 more would fit"):
        table.append(1)
    assert (table.length, pool.pages, len(table.pages)) == (total * PAGE, total, total)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("tokens", [1, 64, 65, 1000])
def test_reserving_takes_what_was_announced_in_one_growth(tokens: int, int8: bool) -> None:
    pool = new_pool(layers=2, int8=int8)
    for _ in range(2):
        announced, before = pool.bytes_to_allocate(tokens), pool.nbytes
        table = PageTable(pool)
        table.reserve(tokens)
        assert pool.nbytes == before + announced
        assert pool.pages_in_use == 0  # nobody's yet
        for _ in range(tokens):
            table.append(1)
        assert pool.nbytes == before + announced
        assert table.consecutive
        table.rewind(0)
        tokens *= 3


def test_what_is_reserved_goes_on_from_what_is_held() -> None:
    pool = new_pool()
    table, other = PageTable(pool), PageTable(pool)
    table.append(10 * PAGE)
    other.append(3 * PAGE)
    table.reserve(100 * PAGE)
    assert pool.pages == 103
    table.reserve(50 * PAGE)
    assert pool.pages == 103
    other.reserve(4 * PAGE)  # what is free is anybody's
    assert pool.pages == 103


def test_reserving_more_than_there_is_takes_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = new_pool()
    table = PageTable(pool)
    monkeypatch.setattr(pools, "available_memory", lambda: 7 * pool.page_bytes + 5)
    table.reserve(1000 * PAGE)
    assert pool.pages == 7
    monkeypatch.setattr(pools, "available_memory", lambda: 0)
    table.reserve(1000 * PAGE)
    assert pool.pages == 7
    monkeypatch.undo()

    def fail(*_: Any) -> mx.array:
        raise RuntimeError("[malloc] Unable to allocate 1 bytes.")

    monkeypatch.setattr(PagePool, "_blank", fail)
    table.reserve(1000 * PAGE)
    assert pool.pages == 7


@pytest.mark.parametrize("int8", [False, True])
def test_the_peak_while_growing_is_one_layer_above_the_new_size(int8: bool) -> None:
    pool = PagePool(layers=8, kv_heads=2, head_dim=32, dtype=mx.float16, int8=int8)
    table = PageTable(pool)
    table.append(200 * PAGE)
    mx.synchronize()
    before = mx.get_active_memory() - pool.nbytes
    mx.reset_peak_memory()
    table.append(200 * PAGE)
    layer = pool.nbytes / pool.layers
    assert mx.get_peak_memory() - before <= pool.nbytes + layer + 2**16
    mx.reset_peak_memory()
    table.rewind(PAGE)
    held = pool.nbytes
    pools_kept, pools._KEPT = pools._KEPT, 0
    try:
        pool.trim()
    finally:
        pools._KEPT = pools_kept
    assert mx.get_peak_memory() - before <= held + layer + 2**16
    assert mx.get_active_memory() - before <= pool.nbytes + 2**16


def test_old_arrays_do_not_stay_in_the_cache() -> None:
    pool = PagePool(layers=2, kv_heads=2, head_dim=64, dtype=mx.float16)
    table = PageTable(pool)
    for _ in range(300):
        table.append(PAGE)
        assert mx.get_cache_memory() < 2**16


# Trimming.


@pytest.mark.parametrize("int8", [False, True])
def test_trimming_gives_back_what_lies_behind_the_last_page_in_use(
    monkeypatch: pytest.MonkeyPatch, copied: list[int], int8: bool
) -> None:
    pool = new_pool(layers=2, int8=int8)
    monkeypatch.setattr(pools, "_KEPT", 10 * pool.page_bytes)
    table = PageTable(pool)
    table.append(20 * PAGE)
    for layer in range(2):
        pool.keys[layer][:] = mx.arange(20 * PAGE)[: pool.keys[layer].shape[2], None] % 100
    pages, stored = table.pages, np.array(pool.keys[1])
    table.reserve(30 * PAGE)
    copied.clear()
    pool.trim()
    assert (pool.pages, copied) == (30, [])  # not worth it
    table.reserve(31 * PAGE)
    pool.trim()
    assert (pool.pages, table.pages) == (20, pages)
    np.testing.assert_array_equal(np.array(pool.keys[1]), stored)
    assert {array.shape[2] for kind in pool._arrays for array in kind} == {20 * PAGE}
    copied.clear()
    pool.trim()
    assert copied == []
    table.rewind(0)
    pool.trim()
    assert (pool.pages, pool.nbytes, copied) == (0, 0, [])
    assert mx.get_cache_memory() == 0


def test_trimming_moves_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = new_pool()
    monkeypatch.setattr(pools, "_KEPT", 0)
    low, high = PageTable(pool), PageTable(pool)
    low.append(5 * PAGE)
    high.append(5 * PAGE)
    low.rewind(0)
    pages = high.pages
    pool.reserve(50)
    pool.trim()
    assert (high.pages, pool.pages) == (pages, max(pages) + 1)
