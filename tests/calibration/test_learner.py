"""What a request's rounds teach, on a machine whose passes take a known time, with noise, compiling and drift; and what
is left of it for those that come later."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from mlx_spec.calibration import filters as filters_module
from mlx_spec.calibration.filters import Filters
from mlx_spec.calibration.learner import Learner
from mlx_spec.calibration.record import ROWS, SLOW_SECONDS, Store, Table
from mlx_spec.decoding.schedule.costs import Costs
from mlx_spec.decoding.schedule.learning import RoundTime
from mlx_spec.machine.remembered import Remembered
from mlx_spec.settings import Sampling

GREEDY, TOP_P = Sampling(), Sampling(temperature=0.7, top_p=0.9)
KEY = "near 256 tokens"


class Machine:
    """Rounds take what passes take, some noise, and what is compiled at the first of a kind."""

    def __init__(self, seed: int = 0, *, first: float = 0.01, more: float = 0.002, noise: float = 0.04,
                 disturbed: float = 0.05, compiling: float = 0.5, drawn: float = 0.0) -> None:  # fmt: skip
        self.random = random.Random(seed)
        self.first, self.more, self.noise, self.disturbed = first, more, noise, disturbed
        self.compiling, self.drawn = compiling, drawn
        self.speed = 1.0
        self.step, self.row = first / 8, first / 100
        self.compiled: set[Any] = set()

    def seconds(self, rows: int) -> float:
        return self.first + self.more * (rows - 1)

    def disturb(self, seconds: float) -> float:
        longer = self.random.uniform(1.6, 6) if self.random.random() < self.disturbed else 1.0
        return seconds * self.random.lognormvariate(0, self.noise) * longer / self.speed

    def round(self, rows: int, *, read: int = 0, drafter: str | None = "model", lazily: bool = False) -> RoundTime:
        drafted = rows - 1
        first = 0.0 if (rows, drafter) in self.compiled else self.compiling
        self.compiled.add((rows, drafter))
        target = self.disturb(self.seconds(rows) + rows * self.drawn) + first
        if drafted == 0:
            return RoundTime(1, target, None, 0, None)
        if drafter == "lookup":
            return RoundTime(rows, target, "lookup", 0, 0.0)
        step = self.step * (0.5 if lazily else 1.0) + self.drawn
        drafting = self.disturb(drafted * step + read * self.row)
        return RoundTime(rows, target + drafting, drafter, read, None if lazily else drafting)

    def answer(self, learner: Learner, rounds: int, rows: tuple[int, ...] = (1, 1, 2, 3, 5, 9), length: int = 256,
               **options: Any) -> Learner:  # fmt: skip
        for _ in range(rounds):
            learner.observe(length, self.round(self.random.choice(rows), **options))
        learner.close()
        return learner


def store(file: Path | None = None) -> Store:
    return Store(Remembered(file, "M1"))


def learner(kept: Store, sampling: Sampling = GREEDY, draft: str | None = "draft") -> Learner:
    return Learner(kept, lambda length: [KEY], Filters(kept, sampling, 50, "CPU"), draft)


def check(costs: Costs, machine: Machine, rows: tuple[int, ...], within: float) -> None:
    assert [count for count, _ in costs.target] == list(rows)
    for count, seconds in costs.target:
        assert seconds == pytest.approx(machine.seconds(count) / machine.speed, rel=within), count


def test_nothing_is_known_at_first_and_what_was_not_tried_stays_unknown() -> None:
    taught = learner(store())
    assert taught.costs(256) == Costs((), None)
    Machine().answer(taught, 100, rows=(1, 4))
    assert [rows for rows, _ in taught.costs(256).target] == [1, 4]
    Machine().answer(taught, 100, rows=(9,))
    assert [rows for rows, _ in taught.costs(256).target] == [1, 4, 9]


@pytest.mark.parametrize("seed", range(10))
def test_many_answers_know_what_calibrating_measures(seed: int) -> None:
    machine, kept = Machine(seed), store()
    for _ in range(25):
        taught = machine.answer(learner(kept), 60)
    check(taught.costs(256), machine, (1, 2, 3, 5, 9), 0.05)
    assert taught.costs(256).draft_step == pytest.approx(machine.step, rel=0.05)


@pytest.mark.parametrize("seed", range(10))
def test_one_answer_is_enough_to_go_by(seed: int) -> None:
    machine = Machine(seed)
    taught = machine.answer(learner(store()), 80)
    check(taught.costs(256), machine, (1, 2, 3, 5, 9), 0.15)


@pytest.mark.parametrize("seed", range(5))
def test_a_noisy_machine(seed: int) -> None:
    machine, kept = Machine(seed, noise=0.15, disturbed=0.2), store()
    for _ in range(25):
        taught = machine.answer(learner(kept), 60)
    check(taught.costs(256), machine, (1, 2, 3, 5, 9), 0.15)


def test_what_is_compiled_at_the_first_round_of_a_kind_is_not_counted() -> None:
    machine, kept = Machine(noise=0, disturbed=0), store()
    taught = learner(kept)
    assert not taught.observe(256, machine.round(1))
    assert not taught.observe(256, machine.round(1))
    assert taught.observe(256, machine.round(1))  # known now
    assert not taught.observe(256, machine.round(1))
    check(taught.costs(256), machine, (1,), 1e-6)
    machine.answer(learner(kept), 40, rows=(3,))
    check(taught.costs(256), machine, (1, 3), 1e-6)


def test_a_slow_pass_counts_at_once_where_it_is_believable() -> None:
    machine = Machine(first=1.0, more=0.5, noise=0, disturbed=0, compiling=0)
    taught = learner(store())
    for rows in (1, 1, 1, 2, 2):
        taught.observe(256, machine.round(rows))
    check(taught.costs(256), machine, (1, 2), 1e-6)
    compiling = Machine(first=1.0, more=0.5, noise=0, disturbed=0, compiling=60)
    for rows in (4, 4, 4):
        taught.observe(256, compiling.round(rows))
    check(taught.costs(256), machine, (1, 2, 4), 1e-6)
    assert machine.first > SLOW_SECONDS


@pytest.mark.parametrize("at", range(6))
def test_one_disturbed_round_changes_nothing(at: int) -> None:
    machine = Machine(noise=0, disturbed=0, compiling=0)
    taught = learner(store())
    for index in range(8):
        took = machine.round(3)
        for rows in (1, 1, 1):
            taught.observe(256, machine.round(rows))
        taught.observe(256, RoundTime(3, took.seconds * (10 if index == at else 1), "model", 0, took.draft_seconds))
    check(taught.costs(256), machine, (1, 3), 1e-6)


@pytest.mark.parametrize("speed", [0.3, 0.6, 1.7, 3.0])
@pytest.mark.parametrize("thorough", [False, True])
def test_a_machine_that_has_changed_is_noticed_and_proportions_are_kept(speed: float, thorough: bool) -> None:
    machine, kept = Machine(1), store()
    if thorough:
        for rows in (1, 2, 3, 5, 9):
            kept.observe(KEY, f"{rows} rows", machine.seconds(rows), thorough=True)
    else:
        machine.answer(learner(kept), 300)
    machine.speed = speed
    taught = machine.answer(learner(kept), 40, rows=(1, 5))  # the others are not seen
    check(taught.costs(256), machine, (1, 2, 3, 5, 9), 0.2)
    machine.speed = 1.0
    check(machine.answer(learner(kept), 40).costs(256), machine, (1, 2, 3, 5, 9), 0.2)


def test_where_one_pass_alone_has_changed_the_others_are_as_they_were() -> None:
    machine, kept = Machine(2, noise=0.01, disturbed=0), store()
    machine.answer(learner(kept), 300)
    seconds = machine.seconds
    machine.seconds = lambda rows: seconds(rows) * (3 if rows == 5 else 1)  # type: ignore[method-assign]
    taught = machine.answer(learner(kept), 100, rows=(5, 1, 3))
    expected = {rows: machine.seconds(rows) for rows in (1, 3, 5)}
    assert {rows: pytest.approx(s, rel=0.1) for rows, s in taught.costs(256).target if rows in expected} == expected


def test_what_was_measured_thoroughly_outweighs_rounds() -> None:
    machine, kept = Machine(3), store()
    kept.observe(KEY, "1 rows", 0.0085, thorough=True)
    taught = machine.answer(learner(kept), 500, rows=(1, 2))
    assert dict(taught.costs(256).target)[1] == 0.0085
    kept.observe(KEY, "2 rows", 0.0111, thorough=True)
    assert dict(machine.answer(learner(kept), 100).costs(256).target)[2] == 0.0111


@pytest.mark.parametrize("seed", range(5))
def test_the_draft(seed: int) -> None:
    machine, kept = Machine(seed), store()
    machine.answer(learner(kept), 200, rows=(1, 2, 5))
    known = learner(kept).costs(256)
    assert known.draft_step == pytest.approx(machine.step, rel=0.1)
    assert known.draft_row == known.draft_step  # not known yet: it never costs more
    machine.answer(learner(kept), 60, rows=(2, 5), read=100)
    known = learner(kept).costs(256)
    assert known.draft_step == pytest.approx(machine.step, rel=0.1)
    assert known.draft_row == pytest.approx(machine.row, rel=0.1)
    check(known, machine, (1, 2, 5), 0.1)
    assert not known.draft_chained
    assert learner(kept, draft=None).costs(256) == Costs(known.target, None)
    assert learner(kept, draft="another").costs(256) == Costs(known.target, None)


def test_steps_that_are_chained_lazily() -> None:
    machine, kept = Machine(4, noise=0.02), store()
    machine.answer(learner(kept), 200, rows=(1, 5))
    machine.answer(learner(kept), 60, rows=(5,), lazily=True)  # what is left beside the target's pass
    known = learner(kept).costs(256)
    assert known.draft_chained
    assert known.draft_step == pytest.approx(machine.step / 2, rel=0.3)
    machine.answer(learner(kept), 60, rows=(9,), lazily=True)  # what is left beside the steps
    check(learner(kept).costs(256), machine, (1, 5, 9), 0.1)


def test_lookup_says_nothing_of_the_draft() -> None:
    machine, kept = Machine(), store()
    for draft in ("draft", None):
        taught = machine.answer(learner(kept, draft=draft), 60, rows=(1, 3), drafter="lookup")
        check(taught.costs(256), machine, (1, 3), 0.1)
        assert taught.costs(256).draft_step is None


# Filters


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each call that was timed; a filtered one takes 4 ms and 1 ms per further row."""
    clock, calls = SimpleNamespace(now=0.0), []

    def distribution(logits: mx.array, sampling: Sampling, columns: int) -> mx.array:
        assert logits.shape[1] == columns == 50
        if sampling != GREEDY:
            calls.append(logits.shape[0])
            clock.now += (0.003 + 0.001 * logits.shape[0]) * (30 if calls.count(logits.shape[0]) == 1 else 1)
        clock.now += 0.002
        return logits

    monkeypatch.setattr(filters_module, "distribution", distribution)
    monkeypatch.setattr(filters_module, "draw", lambda rows, key: rows)
    monkeypatch.setattr(filters_module, "perf_counter", lambda: clock.now)
    monkeypatch.setattr("mlx_spec.calibration.learner.perf_counter", lambda: clock.now)
    return calls


class Filtered(Machine):
    """Drawing takes what `timed` says."""

    def round(self, rows: int, **options: Any) -> RoundTime:
        took = super().round(rows, **options)
        more = 0.003 + 0.001 * rows
        drafting = None if took.draft_seconds is None else took.draft_seconds + 0.004 * (rows - 1)
        seconds = took.seconds + more + (0.0 if drafting is None else 0.004 * (rows - 1))
        return RoundTime(rows, seconds, took.drafter, took.read, drafting)


def test_filters_change_one_table_by_what_they_cost(timed: list[int]) -> None:
    kept = store()
    machine = Filtered(noise=0, disturbed=0)
    taught = machine.answer(learner(kept, TOP_P), 800)
    assert timed == [1, 1, 1, 4, 4, 4]  # the first of each compiles
    plain = learner(kept).costs(256)
    check(plain, machine, (1, 2, 3, 5, 9), 0.01)
    assert plain.draft_step == pytest.approx(machine.step)
    filtered = taught.costs(256)
    for (rows, seconds), (same, base) in zip(filtered.target, plain.target, strict=True):
        assert (rows, seconds) == (same, pytest.approx(base + 0.003 + 0.001 * rows))
    assert filtered.draft_step == pytest.approx(machine.step + 0.004)
    # Later ones have it from the record, whoever taught the table.
    unfiltered = Machine(noise=0, disturbed=0, first=0.03)
    for _ in range(3):
        unfiltered.answer(learner(kept), 100)
    assert learner(kept, TOP_P).costs(256).target[0][1] == pytest.approx(0.034, rel=0.01)
    assert len(timed) == 6


def test_timing_filters_takes_a_small_share_of_an_answer_and_none_of_its_first_token(timed: list[int]) -> None:
    kept, machine = store(), Filtered(noise=0, disturbed=0, compiling=0)
    taught = learner(kept, TOP_P)
    taught.costs(256)
    assert timed == []
    seconds = 0.0
    for _ in range(2000):
        took = machine.round(1)
        seconds += took.seconds
        taught.observe(256, took)
        spent = sum((0.003 + 0.001 * rows) * (30 if timed.index(rows) == index else 1) + 0.004
                    for index, rows in enumerate(timed[:-1]))  # fmt: skip
        assert spent <= 0.02 * seconds + 1e-9  # all but the latest
    assert len(timed) == 6
    check(learner(kept).costs(256), machine, (1,), 0.01)


def test_answers_that_are_too_short_for_it_learn_what_filters_cost_together(timed: list[int], tmp_path: Path) -> None:
    file, machine = tmp_path / "calibration.json", Filtered(noise=0, disturbed=0)
    for _ in range(12):  # of one process each, but for what is compiled
        kept = store(file)
        kept._ran.update({(Filters(kept, TOP_P, 50, "CPU").key, rows) for rows in (1, 4)})
        machine.answer(learner(kept, TOP_P), 8, rows=(1,))
        kept.wait()
    assert Filters(store(file), TOP_P, 50, "CPU").seconds(1) is not None
    check(learner(store(file)).costs(256), machine, (1,), 0.01)


@pytest.mark.parametrize("error", [RuntimeError("no memory"), MemoryError()])
def test_no_answer_is_lost_for_timing_its_filters(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fail(*_: Any) -> Any:
        calls.append(1)
        raise error

    monkeypatch.setattr(filters_module, "distribution", fail)
    Machine().answer(learner(store(), TOP_P), 100)
    assert len(calls) == 1


def test_greedy_rounds_have_no_filters(timed: list[int]) -> None:
    Machine().answer(learner(store(), Sampling(top_p=0.5)), 100)
    assert timed == []


def test_what_filters_cost_is_really_timed() -> None:
    kept = store()
    filters = Filters(kept, TOP_P, 300, "CPU")
    for calls in range(9):  # noqa: B007
        if filters.seconds(1) is not None:
            break
        filters.sample()
    assert calls == 6
    assert 0 < filters.seconds(1) <= filters.seconds(9)  # type: ignore[operator]
    assert Filters(kept, TOP_P, 299, "CPU").seconds(1) is None


# Remembering


def test_what_was_learned_is_there_for_the_next_process(tmp_path: Path) -> None:
    file, machine = tmp_path / "calibration.json", Machine()
    kept = store(file)
    taught = machine.answer(learner(kept), 100)
    kept.wait()
    again = learner(store(file)).costs(256)
    assert [rows for rows, _ in again.target] == [rows for rows, _ in taught.costs(256).target]
    for (_, seconds), (_, other) in zip(again.target, taught.costs(256).target, strict=True):
        assert seconds == pytest.approx(other, rel=1e-9)


def test_each_request_writes_once_at_most_and_only_what_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, machine, writes = tmp_path / "calibration.json", Machine(noise=0.01, disturbed=0), []
    write = Remembered._write
    monkeypatch.setattr(Remembered, "_write", lambda self, content: (writes.append(1), write(self, content))[1])
    kept = store(file)
    for _ in range(10):
        taught = learner(kept)
        for rows in [1, 3, 5] * 20:
            before = len(writes)
            taught.observe(256, machine.round(rows))
            assert len(writes) == before
        taught.close()
        kept.wait()
    assert 1 <= len(writes) <= 3
    learner(kept).close()
    kept.wait()
    assert len(writes) <= 3


def test_several_processes_add_to_one_table(tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    one, two = store(file), store(file)
    taught, other = learner(one), learner(two)
    Machine(1).answer(taught, 100, rows=(1, 3))
    one.wait()
    Machine(2).answer(other, 100, rows=(1, 7))  # began before the other ended
    two.wait()
    check(learner(store(file)).costs(256), Machine(), (1, 3, 7), 0.15)
    one.observe(KEY, "1 rows", 0.0105, thorough=True)  # `calibrate`, while the other process runs
    one.write()
    one.wait()
    Machine(3, first=0.012).answer(learner(two), 200, rows=(1, 7))
    two.wait()
    assert dict(learner(store(file)).costs(256).target)[1] == 0.0105


def test_a_slow_disk_keeps_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released, write = threading.Event(), Remembered._write

    def slowly(self: Remembered, content: dict[str, Any]) -> bool:
        assert released.wait(60)
        return write(self, content)

    monkeypatch.setattr(Remembered, "_write", slowly)
    file, machine = tmp_path / "calibration.json", Machine()
    kept = store(file)
    try:
        machine.answer(learner(kept), 100)  # ends, and what it learned is known
        check(learner(kept).costs(256), machine, (1, 2, 3, 5, 9), 0.2)
        machine.answer(learner(kept), 20, length=3000)
        kept.get("near 8192 tokens")
        assert not file.exists()
    finally:
        released.set()
    kept.wait()
    assert KEY in json.loads(file.read_text())["machines"]["M1"]["passes"]


def test_an_interrupt_at_the_end_harms_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "calibration.json"
    kept = store(file)
    Machine().answer(learner(kept), 100)
    kept.wait()
    before = file.read_text()
    taught = Machine(more=0.02).answer(learner(store(file)), 0)
    for _ in range(60):
        taught.observe(256, RoundTime(4, 0.1, "lookup", 0, 0.0))

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupt)
        with pytest.raises(KeyboardInterrupt):
            taught.close()
    assert file.read_text() == before
    assert [each.name for each in tmp_path.iterdir()] == ["calibration.json"]


def test_threads_may_learn_at_once() -> None:
    kept = store()
    threads = [threading.Thread(target=Machine(seed).answer, args=(learner(kept), 300)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check(learner(kept).costs(256), Machine(), (1, 2, 3, 5, 9), 0.1)


# Tables


def test_a_table_keeps_everything() -> None:
    table, chance = Table(), random.Random(5)
    for _ in range(500):
        table.observe(f"{chance.choice(ROWS)} rows", chance.lognormvariate(0, 1), thorough=chance.random() < 0.02)
        again = Table.from_json(json.loads(json.dumps(table.as_json())))
        assert again is not None
        assert again.as_json() == table.as_json()
        assert list(again.known().items()) == list(table.known().items())


@pytest.mark.parametrize("sample", [0.0, -1.0, float("nan"), float("inf"), 1e300])
def test_no_time_is_no_sample(sample: float) -> None:
    table = Table()
    for _ in range(9):
        assert not table.observe("1 rows", sample)
    assert table.known() == {}
    assert table.as_json() == []


def test_rounds_that_make_no_sense_are_ignored() -> None:
    kept = store()
    taught = learner(kept)
    for _ in range(9):
        taught.observe(256, RoundTime(3, 0.0, "lookup", 0, 0.0))
    assert taught.costs(256) == Costs((), None)
