"""What is timed, in which order and how often, on contexts whose passes take a known time; and that real contexts are
left as they were."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from tiny import CONFIG, randomise, tiny_model

from mlx_spec.architectures.context import Context, LanguageModel, prefill
from mlx_spec.architectures.definitions import model_classes
from mlx_spec.architectures.external import ExternalModel
from mlx_spec.architectures.paged import PagedModel
from mlx_spec.calibration import timing as measurement
from mlx_spec.calibration.record import ROWS
from mlx_spec.calibration.timing import ROOM, filters_of, measure
from mlx_spec.errors import DoesNotFit
from mlx_spec.settings import Sampling

COLUMNS = 32


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(measurement, "perf_counter", clock)
    return clock


class Timed:
    """A context whose passes do nothing but take time."""

    can_rewind = chains_cheaply = True
    vocabulary_size, nbytes, prefill_rows = COLUMNS, 0, 64

    def __init__(self, clock: Clock, seconds: Callable[[int], float], *, compiling: float = 0.0) -> None:
        self.clock, self.seconds, self.compiling = clock, seconds, compiling
        self.length = 100
        self.reached = 100
        self.passes: list[int] = []
        self.failure: tuple[int, BaseException] | None = None
        """(rows, error) of a pass that fails."""

    def extend(self, tokens: Any, rows: int | None = None) -> mx.array:
        count = int(tokens.size)
        self.length += count
        self.reached = max(self.reached, self.length)
        self.clock.now += self.seconds(count) + (0 if count in self.passes else self.compiling)
        self.passes.append(count)
        if self.failure is not None and self.failure[0] == count:
            raise self.failure[1]
        return mx.zeros((count if rows is None else rows, COLUMNS))

    def rewind(self, length: int) -> None:
        assert length <= self.length
        self.length = length

    def evaluate(self) -> None: ...


def linear(first: float, more: float) -> Callable[[int], float]:
    return lambda rows: first + more * (rows - 1)


def test_every_time_is_what_a_pass_takes(clock: Clock) -> None:
    target, draft = Timed(clock, linear(0.010, 0.002)), Timed(clock, linear(0.001, 0.0001))
    found = measure(target, draft, budget_seconds=100)  # type: ignore[arg-type]
    assert [rows for rows, _ in found.target] == list(ROWS)
    for rows, seconds in found.target:
        assert seconds == pytest.approx(0.010 + 0.002 * (rows - 1))
    assert found.draft_lazily == pytest.approx(0.001)
    assert found.draft_synchronised == pytest.approx(0.001)
    assert found.draft_row == pytest.approx(0.0001)
    assert found.context_length == 100
    assert not found.chains_lazily
    costs = found.costs()
    assert costs.verify(16) == pytest.approx(4)
    assert costs.draft == pytest.approx(0.1)
    assert (target.length, draft.length) == (100, 100)
    assert max(target.reached, draft.reached) == 100 + ROOM


def test_without_a_draft(clock: Clock) -> None:
    found = measure(Timed(clock, linear(0.01, 0)), None, rows=(1, 2), budget_seconds=9)  # type: ignore[arg-type]
    assert [rows for rows, _ in found.target] == [1, 2]
    assert (found.draft_lazily, found.draft_synchronised, found.draft_row) == (None, None, None)
    assert math.isinf(found.costs().draft)


def test_what_is_compiled_at_the_first_pass_is_not_counted(clock: Clock) -> None:
    target, draft = Timed(clock, linear(0.01, 0), compiling=3.0), Timed(clock, linear(0.01, 0), compiling=3.0)
    found = measure(target, draft, budget_seconds=100)  # type: ignore[arg-type]
    assert [seconds for _, seconds in found.target] == pytest.approx([0.01] * 16)
    assert found.draft_step == pytest.approx(0.01)
    assert found.draft_row == pytest.approx(0)


def test_a_median_of_turns(clock: Clock) -> None:
    disturbed = iter([0, 0, 0, 0, 0, 0, 5.0] + [0] * 1000)
    target = Timed(clock, lambda rows: 0.01 + next(disturbed))
    found = measure(target, None, rows=(1, 2, 4), budget_seconds=100)  # type: ignore[arg-type]
    assert [seconds for _, seconds in found.target] == pytest.approx([0.01] * 3)
    assert target.passes.count(2) == 6
    assert target.passes[-6:] == [1, 1, 1, 1, 2, 4]


@pytest.mark.parametrize("seconds", [0.01, 2.0])
def test_the_budget(clock: Clock, seconds: float) -> None:
    target, draft = Timed(clock, linear(seconds, 0)), Timed(clock, linear(seconds / 10, 0))
    found = measure(target, draft, budget_seconds=0)  # type: ignore[arg-type]
    assert [rows for rows, _ in found.target] == [1, 2, 4, 8, 16]  # what is needed, whatever the budget
    assert found.draft_step == pytest.approx(seconds / 10)
    assert found.draft_row == pytest.approx(0)
    clock.now = 0
    target.passes.clear()
    found = measure(target, None, budget_seconds=30 * seconds)  # type: ignore[arg-type]
    measured = [rows for rows, _ in found.target]
    assert {1, 2, 3, 4, 8, 16} <= {*measured}
    assert measured == sorted(measured)
    assert clock.now < 31 * seconds


def test_what_is_needed_of_a_slow_machine(clock: Clock) -> None:
    target, draft = Timed(clock, linear(2.0, 1.0)), Timed(clock, linear(0.2, 0.1))
    found = measure(target, draft, budget_seconds=0)  # type: ignore[arg-type]
    assert [rows for rows, _ in found.target] == [1, 2, 4, 8, 16]
    assert found.draft_row == pytest.approx(0.1)
    assert [target.passes.count(rows) for rows in (2, 4, 8, 16)] == [2, 2, 1, 1]


def test_the_most_telling_rows_come_first(clock: Clock) -> None:
    names: list[str] = []
    target, draft = Timed(clock, linear(0.01, 0)), Timed(clock, linear(0.01, 0))
    measure(target, draft, budget_seconds=100, progress=names.append)  # type: ignore[arg-type]
    first = list(dict.fromkeys(names))
    drafted = ["draft, synchronised", "draft, lazily", "draft, catching up"]
    assert first[:9] == ["1 row", "2 rows", "4 rows", "8 rows", "16 rows", *drafted, "3 rows"]
    assert first[9:11] == ["6 rows", "12 rows"]
    assert len(first) == 19


def test_slow_passes_are_not_warmed_up(clock: Clock) -> None:
    target, draft = Timed(clock, linear(1.0, 0.5)), Timed(clock, linear(0.3, 0))
    found = measure(target, draft, budget_seconds=0)  # type: ignore[arg-type]
    assert target.passes == [1, 1, 2, 4, 8, 16, 1, 2, 4]
    assert draft.passes == [1] * 4 + [ROOM] + [1] * 4
    assert found.target == tuple((rows, pytest.approx(0.5 + 0.5 * rows)) for rows in (1, 2, 4, 8, 16))
    target = Timed(clock, linear(1.0, 0.5), compiling=9.0)
    found = measure(target, None, budget_seconds=500)  # type: ignore[arg-type]
    assert [seconds for _, seconds in found.target] == pytest.approx([1 + 0.5 * rows for rows in range(16)])


def test_filters_are_part_of_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Sampling] = []
    make = measurement.distribution

    def noted(logits: mx.array, sampling: Sampling, columns: int) -> mx.array:
        used.append(sampling)
        return make(logits, sampling, columns)

    monkeypatch.setattr(measurement, "distribution", noted)
    clock = Clock()
    asked = Sampling(temperature=0.6, top_k=5, top_p=0.9, presence_penalty=1.0, seed=3)
    measure(Timed(clock, linear(0.1, 0)), Timed(clock, linear(0.1, 0)), sampling=asked, budget_seconds=0)  # type: ignore[arg-type]
    assert used
    assert all(sampling == Sampling(temperature=1.0, top_k=5, top_p=0.9) for sampling in used)
    assert filters_of(replace(asked, temperature=0)) == Sampling()


def test_lazy_chains_where_they_are_faster(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate = mx.eval
    monkeypatch.setattr(mx, "eval", lambda *arrays: (setattr(clock, "now", clock.now + 0.01), evaluate(*arrays)))
    found = measure(Timed(clock, linear(0.1, 0)), Timed(clock, linear(0.01, 0)), budget_seconds=99)  # type: ignore[arg-type]
    assert found.chains_lazily
    assert found.draft_step == found.draft_lazily == pytest.approx(0.0125)
    assert found.draft_synchronised == pytest.approx(0.0225)


def test_no_lazy_chain_without_memory_for_its_copies(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = Timed(clock, linear(0.01, 0))
    draft.nbytes, draft.chains_cheaply = 10**9, False
    monkeypatch.setattr(measurement, "available_memory", lambda: 5 * 10**9)
    found = measure(Timed(clock, linear(0.1, 0)), draft, rows=(1,), budget_seconds=99)  # type: ignore[arg-type]
    assert found.draft_lazily is None
    assert not found.chains_lazily
    assert found.draft_step == pytest.approx(0.01)
    monkeypatch.setattr(measurement, "available_memory", lambda: 5 * 10**9 + 1)
    found = measure(Timed(clock, linear(0.1, 0)), draft, rows=(1,), budget_seconds=99)  # type: ignore[arg-type]
    assert found.draft_lazily is not None


@pytest.mark.parametrize("error", [RuntimeError("no memory"), MemoryError(), DoesNotFit("no memory")])
def test_passes_that_fail_are_left_out(clock: Clock, error: Exception) -> None:
    target, draft = Timed(clock, linear(0.01, 0)), Timed(clock, linear(0.01, 0))
    target.failure, draft.failure = (12, error), (1, error)
    found = measure(target, draft, budget_seconds=99)  # type: ignore[arg-type]
    assert [rows for rows, _ in found.target] == [rows for rows in ROWS if rows != 12]
    assert found.draft_step is found.draft_row is None
    assert (target.length, draft.length) == (100, 100)
    target.failure = (1, error)
    with pytest.raises(type(error)):
        measure(target, draft, budget_seconds=99)  # type: ignore[arg-type]
    assert target.length == 100


@pytest.mark.parametrize("rows", [1, 2, 16, ROOM])
def test_an_interrupt_leaves_contexts_as_they_were(clock: Clock, rows: int) -> None:
    target, draft = Timed(clock, linear(0.01, 0)), Timed(clock, linear(0.01, 0))
    target.failure = draft.failure = (rows, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        measure(target, draft, budget_seconds=99)  # type: ignore[arg-type]
    assert (target.length, draft.length) == (100, 100)


# Real contexts


def external(kind: str = "phi3", **changes: Any) -> ExternalModel:
    config = CONFIG | {"model_type": kind, "head_dim": 8, "tie_word_embeddings": False} | changes
    model_class, arguments_class = model_classes(config)
    return ExternalModel(randomise(model_class(arguments_class.from_dict(config)), 7))


MODELS: dict[str, Callable[[], LanguageModel]] = {
    "paged": tiny_model,
    "int8": lambda: PagedModel(tiny_model().module, int8=True),
    "external": external,
}
TOKENS = [(index * 37 + 11) % 40 for index in range(300)]


@pytest.mark.parametrize("interrupted", [False, True])
@pytest.mark.parametrize("length", [0, 1, 64, 255, 290])
@pytest.mark.parametrize("name", MODELS)
def test_contexts_are_left_as_they_were(
    name: str, length: int, interrupted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for window in (None, 65) if name != "external" else (None,):
        _check_left_as_it_was(MODELS[name](), window, length, interrupted, monkeypatch)


def _check_left_as_it_was(
    model: LanguageModel, window: int | None, length: int, interrupted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read() -> Context:
        context = model.new_context(4, window) if window else model.new_context()
        prefill(context, TOKENS[: length + 1])
        return context

    untouched, target, draft = read(), read(), read()
    if interrupted:

        def interrupt(*_: Any) -> Any:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(measurement, "verify_block", interrupt)
            with pytest.raises(KeyboardInterrupt):
                measure(target, draft, budget_seconds=0)
    else:
        found = measure(target, draft, budget_seconds=0.05)
        assert [rows for rows, _ in found.target][:2] == [1, 2]
    assert target.length == draft.length == length
    expected = untouched.extend(TOKENS[:5])
    for context in (target, draft):
        np.testing.assert_array_equal(np.array(context.extend(TOKENS[:5])), np.array(expected))


def test_what_a_thread_measured_goes_on_in_another() -> None:
    model = tiny_model()
    untouched, target = model.new_context(), model.new_context()
    for context in (untouched, target):
        prefill(context, TOKENS[:100])
    thread = threading.Thread(target=lambda: measure(target, None, budget_seconds=0))
    thread.start()
    thread.join()
    np.testing.assert_array_equal(np.array(target.extend(TOKENS[:3])), np.array(untouched.extend(TOKENS[:3])))


def test_a_context_that_cannot_be_rewound_is_refused() -> None:
    obstinate = external("gemma3_text", sliding_window=8, sliding_window_pattern=2, query_pre_attn_scalar=8)
    for pair in ((obstinate, tiny_model()), (tiny_model(), obstinate)):
        with pytest.raises(ValueError, match="rewound"):
            measure(pair[0].new_context(), pair[1].new_context(), budget_seconds=0)
