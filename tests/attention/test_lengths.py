"""What does not grow with the length of a sequence: the host's work for a pass, and the sizes that MLX has to keep."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from tiny import tiny_module

from mlx_spec.architectures.paged import PagedContext, PagedModel
from mlx_spec.attention.attend import AttentionPass, Way
from mlx_spec.attention.rotary import Rotary
from mlx_spec.kv import PAGE, PagePool, PageTable


class Scattered(PageTable):
    """Taken for one whose pages do not follow one another."""

    @property
    def consecutive(self) -> bool:
        return False


def work_of_a_pass(monkeypatch: pytest.MonkeyPatch, table: PageTable, way: Way, rows: int) -> tuple[int, int]:
    """Calls that the host makes, in Python or C, to build a pass of one layer, and numbers that it hands to MLX."""
    pool, rotary = table.pool, Rotary(nn.RoPE(4), 4)
    new = [mx.zeros((1, 1, rows, 4)) for _ in range(3)]
    mx.eval(new)
    calls, numbers, array = 0, 0, mx.array

    def counted(content: Any, *rest: Any) -> mx.array:
        nonlocal numbers
        numbers += np.size(content)
        return array(content, *rest)

    def count(frame: FrameType, event: str, what: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    with monkeypatch.context() as patched:
        patched.setattr(mx, "array", counted)
        sys.setprofile(count)
        try:
            AttentionPass(pool, [table], rows, rotary, way).attend(0, *new, 0.5)
        finally:
            sys.setprofile(None)
    return calls, numbers


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("way", ["scattered", "gather", "dense"])
def test_the_hosts_work_does_not_depend_on_the_length(
    way: Way, int8: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a page, and where one was added, taken back or copied before it was written."""
    found = []
    for pages in (10, 4000):
        pool = PagePool(layers=1, kv_heads=1, head_dim=4, dtype=mx.float32, int8=int8)
        if int8:
            pool.divisors[0] = mx.ones((1, 4))
        table = PageTable(pool) if way == "dense" else Scattered(pool)
        table.append(pages * PAGE - rows - 1)
        work_of_a_pass(monkeypatch, table, way, rows)
        work = []
        for change in (rows, rows, 1):
            table.append(change)
            work.append(work_of_a_pass(monkeypatch, table, way, rows))
        table.rewind(table.length - rows - 2)
        table.append(rows)
        work.append(work_of_a_pass(monkeypatch, table, way, rows))
        found.append(work)
        assert np.array(table.page_ids()).tolist() == table.pages
    assert found[0] == found[1]


def cached(context: PagedContext, tokens: int) -> int:
    """The most bytes that MLX keeps for reuse over so many passes of one token."""
    mx.synchronize()
    mx.clear_cache()
    most = 0
    for token in range(tokens):
        context.extend([token % 30])
        context.evaluate()
        context.settle(context.length)
        most = max(most, mx.get_cache_memory())
    return most


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("kind", ["consecutive", "scattered", "window"])
def test_passes_leave_few_sizes_behind(kind: str, int8: bool) -> None:
    """Over 2,000 tokens; a new size of keys and values at every token would leave 250 MB."""
    limit = mx.set_cache_limit(int(8e9))
    try:
        module = tiny_module(1, 0.8, tie_word_embeddings=False)
        model, length = PagedModel(module, int8=int8), 2000
        context = model.new_context(4, 200) if kind == "window" else model.new_context()
        if kind == "scattered":
            context.table = Scattered(model.pool)
        context.table.append(length)  # the pool has its size from now on
        context.rewind(0)
        most = cached(context, length)
    finally:
        mx.set_cache_limit(limit)
        mx.clear_cache()
    arguments = module.arguments
    # Scores of one row, which MLX's CPU backend makes in each of the layers, and keys and values in whole pages.
    scores = 4 * arguments.heads * length * length // 2
    pages = 4 * arguments.kv_heads * arguments.head_dim * PAGE * (length // PAGE) ** 2 // 2
    assert most < 2 * scores + 8 * pages
