"""What contexts leave in memory: the buffers MLX keeps, passes that fail for want of memory, room that is reserved."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from external_models import module_of
from tiny import tiny_model, tiny_module

from mlx_spec.architectures import paged
from mlx_spec.architectures.context import Context, LanguageModel, prefill
from mlx_spec.architectures.external import ExternalModel
from mlx_spec.architectures.paged import PagedModel
from mlx_spec.attention.attend import AttentionPass
from mlx_spec.attention.window import IN_PASSING
from mlx_spec.errors import DoesNotFit
from mlx_spec.kv import PAGE
from mlx_spec.machine import memory

TEXT = [(7 * index + 3) % 40 for index in range(4100)]


@pytest.fixture
def as_on_a_mac() -> Iterator[None]:
    """MLX keeps up to 8 GB for reuse."""
    before = mx.set_cache_limit(8 * 10**9)
    mx.clear_cache()
    yield
    mx.set_cache_limit(before)
    mx.clear_cache()


MODELS: dict[str, Callable[[], LanguageModel]] = {
    "floating": lambda: PagedModel(tiny_module(num_hidden_layers=1)),
    "int8": lambda: PagedModel(tiny_module(num_hidden_layers=1), int8=True),
    "external": lambda: ExternalModel(module_of("phi3")),
}


@pytest.mark.parametrize("kind", list(MODELS))
def test_what_mlx_keeps_for_reuse_stays_within_bounds(
    monkeypatch: pytest.MonkeyPatch, as_on_a_mac: None, kind: str
) -> None:
    """Over 4,000 tokens, half of them a prompt."""
    bound = 2**21
    monkeypatch.setattr(memory, "MOST_CACHED", bound)
    context = MODELS[kind]().new_context()
    most = 0

    def look(size: int = 0) -> None:
        nonlocal most
        most = max(most, mx.get_cache_memory() - context.nbytes)

    prefill(context, TEXT[:2001], look)
    for token in TEXT[2000:4000]:
        mx.eval(context.extend([token]))
        look()
        context.settle(context.length)
        assert mx.get_cache_memory() <= bound
    assert most <= 2 * bound  # between one look and the next
    context.close()


def test_the_bound_on_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    cleared: list[bool] = []
    monkeypatch.setattr(mx, "clear_cache", lambda: cleared.append(True))
    monkeypatch.setattr(mx, "get_cache_memory", lambda: memory.MOST_CACHED)
    memory.bound_cache()
    assert not cleared
    monkeypatch.setattr(mx, "get_cache_memory", lambda: memory.MOST_CACHED + 1)
    memory.bound_cache()
    assert cleared


# Passes that fail.


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("forked", [False, True])
@pytest.mark.parametrize("error", [
    RuntimeError("[malloc] Unable to allocate 123 bytes."), MemoryError(), RuntimeError("something else"), ValueError()
])  # fmt: skip
def test_a_pass_that_cannot_be_built_leaves_everything_as_it_was(
    monkeypatch: pytest.MonkeyPatch, int8: bool, forked: bool, error: Exception
) -> None:
    model = PagedModel(tiny_module(), int8=int8)
    context = model.new_context()
    divisors = [*model.pool.divisors]
    expected = np.array(PagedModel(tiny_module(), int8=int8).new_context().extend(TEXT[:101]))[-1]
    with monkeypatch.context() as patch:
        patch.setattr(AttentionPass, "attend_to_written", _raising(error))
        with pytest.raises((DoesNotFit, RuntimeError, ValueError)):
            context.extend(TEXT[:10])
    assert model.pool.divisors == divisors
    context.extend(TEXT[:100])
    context.evaluate()
    other = context.fork() if forked else None
    state, in_use = context.table.state, model.pool.pages_in_use
    fits = isinstance(error, ValueError) or "else" in str(error)
    with monkeypatch.context() as patch:
        patch.setattr(AttentionPass, "attend_to_written", _raising(error))
        with pytest.raises(type(error) if fits else DoesNotFit):
            context.extend(TEXT[100:300])
    assert (context.table.state, context.length, model.pool.pages_in_use) == (state, 100, in_use)
    for sequence in (context, other):
        if sequence is not None:
            np.testing.assert_allclose(np.array(sequence.extend(TEXT[100:101]))[0], expected, atol=2e-2)


def _raising(error: Exception) -> Callable[..., mx.array]:
    def fail(*_: Any, **__: Any) -> mx.array:
        raise error

    return fail


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("forked", [False, True])
def test_a_pass_that_cannot_be_evaluated_can_be_taken_back(
    monkeypatch: pytest.MonkeyPatch, int8: bool, forked: bool
) -> None:
    """An operation in its midst fails on the host, as an allocation does, until `matrix` can be inverted."""
    monkeypatch.setattr(memory, "_ALLOCATION", re.compile("LU factorization"))
    model = PagedModel(tiny_module(), int8=int8)
    context = model.new_context()
    context.extend(TEXT[:100])
    context.evaluate()
    expected = np.array(context.fork().extend(TEXT[100:103]))
    other = context.fork() if forked else None
    matrix = mx.zeros((2, 2))
    mx.eval(matrix)
    attend = AttentionPass.attend_to_written

    def failing(self: AttentionPass, layer: int, queries: mx.array, scale: float) -> mx.array:
        inverse = mx.linalg.inv(matrix, stream=mx.cpu)  # type: ignore[attr-defined]
        return attend(self, layer, queries + 0 * inverse.sum(), scale)

    with monkeypatch.context() as patch:
        patch.setattr(AttentionPass, "attend_to_written", failing)
        context.extend([1] * 200)
    with pytest.raises(DoesNotFit, match="no memory for a pass"):
        context.evaluate()
    context.rewind(100)
    assert len(context.table.pages) == 2
    np.array(matrix, copy=False)[:] = np.eye(2)  # there is memory again
    for sequence in (context, other):
        if sequence is not None:
            np.testing.assert_allclose(np.array(sequence.extend(TEXT[100:103])), expected, atol=1e-4)


@pytest.mark.parametrize("int8", [False, True])
def test_a_pool_whose_last_pass_failed_for_good_serves_the_next_request(
    monkeypatch: pytest.MonkeyPatch, int8: bool
) -> None:
    monkeypatch.setattr(memory, "_ALLOCATION", re.compile("LU factorization"))
    model = PagedModel(tiny_module(), int8=int8)
    model.take_divisors(TEXT[:PAGE])
    expected = np.array(model.new_context().extend(TEXT[:50]))
    attend = AttentionPass.attend_to_written

    def failing(self: AttentionPass, layer: int, queries: mx.array, scale: float) -> mx.array:
        inverse = mx.linalg.inv(mx.zeros((2, 2)), stream=mx.cpu)  # type: ignore[attr-defined]
        return attend(self, layer, queries + 0 * inverse.sum(), scale)

    context = model.new_context()
    with monkeypatch.context() as patch:
        patch.setattr(AttentionPass, "attend_to_written", failing)
        context.extend(TEXT[:50])
    with pytest.raises(DoesNotFit):
        context.close()
    assert model.pool.pages_in_use == 0
    np.testing.assert_allclose(np.array(model.new_context().extend(TEXT[:50])), expected, atol=1e-4)


def test_an_external_pass_that_fails_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ExternalModel(module_of("phi3"))
    context = model.new_context()
    context.extend([1, 2, 3])
    context.evaluate()
    expected = np.array(context.fork().extend([4]))
    with monkeypatch.context() as patch:
        patch.setattr(type(model.module), "__call__", _raising(RuntimeError("[malloc] Unable to allocate 1 bytes.")))
        with pytest.raises(DoesNotFit):
            context.extend([4])
    assert context.length == 3
    np.testing.assert_allclose(np.array(context.extend([4])), expected, atol=1e-5)


# Room.


@pytest.mark.parametrize("window", [None, 100])
def test_reserving_for_a_context(window: int | None) -> None:
    model = tiny_model()
    context = model.new_context(4 if window else 0, window)
    held = 4000 if window is None else 4 + window + IN_PASSING
    announced = model.bytes_to_allocate(held)
    context.reserve(4000)
    assert model.pool.nbytes == announced == -(-held // PAGE) * model.pool.page_bytes
    prefill(context, TEXT[:4001])
    assert model.pool.nbytes == announced
    context.close()
    model.trim()
    assert model.pool.nbytes == announced  # little


def test_trimming_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged.PagePool, "trim", lambda pool: mx.clear_cache())
    for model in (tiny_model(), ExternalModel(module_of("phi3"))):
        context: Context = model.new_context()
        context.reserve(1000)
        mx.eval(context.extend([1, 2, 3]))
        context.close()
        model.trim()
        assert mx.get_cache_memory() == 0
