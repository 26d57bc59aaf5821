"""Ctrl-C at every line of pages and tables, and of the contexts over them: no page is lost or held twice, whatever was
said stays said, and a sequence reads what it should."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
from interruptions import interrupted
from tiny import tiny_module

from mlx_spec.architectures.paged import PagedContext, PagedModel
from mlx_spec.kv import PAGE
from mlx_spec.kv import pool as pools

TEXT = [(7 * index + 3) % 40 for index in range(1000)]
MODULE = tiny_module(0)
TOLERANCE = {False: 1e-4, True: 1e-3}


class Scene:
    """Two sequences that share pages, behind a window or not, and a third between whose pages there are gaps."""

    def __init__(self, int8: bool, window: int | None) -> None:
        self.model = PagedModel(MODULE, int8=int8)
        self.model.take_divisors(TEXT[:PAGE])
        self.sinks, self.window = (4, window) if window else (0, None)
        self.first = self.new(150)
        self.other = self.first.fork()
        self.third = self.new(70)
        self.living = [self.first, self.other, self.third]

    def new(self, length: int) -> PagedContext:
        context = self.model.new_context(self.sinks, self.window)
        for start in range(0, length, 50):
            context.extend(TEXT[start : min(start + 50, length)], rows=0)
        context.evaluate()
        return context

    def check(self) -> None:
        pool, held = self.model.pool, set()
        for context in self.living:
            pages = context.table.pages
            assert len(pages) == len(set(pages)) == -(-context.length // PAGE) - context.table.dropped
            held |= set(pages)
        assert pool.pages_in_use == len(held)
        assert all(0 <= page < pool.pages for page in held)
        everything = [array for kind in pool._arrays for array in kind]
        assert {array.shape[2] for array in everything} == {pool.pages * PAGE}
        assert pool.nbytes == sum(array.nbytes for array in everything)


OPERATIONS: dict[str, Callable[[Scene], object]] = {
    "copy on write": lambda scene: scene.first.extend(TEXT[150:153]),
    "append": lambda scene: scene.third.extend(TEXT[70:130]),
    "grow": lambda scene: scene.first.extend(TEXT[150:500], rows=1),
    "rewind": lambda scene: scene.first.rewind(100),
    "settle": lambda scene: scene.first.settle(150),
    "fork": lambda scene: scene.third.fork(),
    "reserve": lambda scene: scene.third.reserve(3000),
    "trim": lambda scene: scene.model.trim(),
    "close": lambda scene: scene.first.close(),
}


def logits_after(context: PagedContext) -> np.ndarray:
    logits = np.array(context.extend(TEXT[context.length : context.length + 1])[0])
    context.rewind(context.length - 1)
    return logits


@pytest.mark.parametrize("name", list(OPERATIONS))
@pytest.mark.parametrize(("int8", "window"), [(False, None), (True, None), (False, 65)])
def test_ctrl_c_at_every_line(monkeypatch: pytest.MonkeyPatch, name: str, int8: bool, window: int | None) -> None:
    """One scene for many lines: each interruption finds what the one before has left."""
    monkeypatch.setattr(pools, "_KEPT", 0)
    operation = OPERATIONS[name]
    scene = Scene(int8, window)
    expected = {length: logits_after(scene.new(length)) for length in (70, 100, 150)}
    lengths = [context.length for context in scene.living]
    at, happened = 0, True
    while happened:
        at += 1
        happened, _ = interrupted(functools.partial(operation, scene), at, "/mlx_spec/kv/")
        if happened:
            scene.check()
            if scene.first.length == 0:  # closed, though interrupted
                scene.first = scene.living[0] = scene.other.fork()
            assert [context.length for context in scene.living] == lengths  # all of it, or nothing
        if at % 8 == 1:
            for context in scene.living:
                if context.length:
                    np.testing.assert_allclose(logits_after(context), expected[context.length], atol=TOLERANCE[int8])
            scene.check()
    assert at > 1
    for context in scene.living:
        context.close()
    scene.check()
    assert scene.model.pool.pages_in_use == 0


@pytest.mark.parametrize("chained", [False, True])
def test_ctrl_c_at_every_line_of_the_end(chained: bool) -> None:
    """Whatever is not closed because of it is nobody's once it is gone."""
    model, at, happened = PagedModel(MODULE), 0, True
    while happened:
        at += 1
        context: PagedContext | None = model.new_context()
        logits = context.extend(TEXT[:100])
        if not chained:
            mx.eval(logits)
        happened, _ = interrupted(context.close, at)
        context = None
        gc.collect()
        assert model.pool.pages_in_use == 0
    assert at > 5
