"""Which way to attend or to quantize is taken: what is timed and how, what is remembered, and who decides when."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from kernel_problems import on_shim
from kernel_stand_ins import Clock, Counting, memory, right

from mlx_spec.attention import choosing
from mlx_spec.attention.attend import WAYS, AttentionPass, Way
from mlx_spec.attention.choosing import Choosing, Times, attention_pass, pool_shape
from mlx_spec.attention.rotary import Rotary
from mlx_spec.attention.timing_ways import Chain, Shape, milliseconds_per_call, ways_to_attend, ways_to_quantize
from mlx_spec.errors import DoesNotFit
from mlx_spec.kernels import problems, reference, registry
from mlx_spec.kernels.self_check import Mismatch, SelfCheck, compare
from mlx_spec.kv import PAGE, PagePool, PageTable


def some_chains() -> Mapping[str, Chain]:
    return {way: lambda calls: mx.zeros(1) for way in ("dense", "vector", "tile", "gather")}


def test_the_fastest_is_measured_once_and_remembered(tmp_path: Path) -> None:
    clock = Clock(vector=2, tile=1, gather=9, dense=0.5)
    chosen = Times(memory(tmp_path), clock)
    assert chosen.fastest("shape", some_chains, ("vector", "tile", "gather")) == "tile"
    assert chosen.fastest("shape", some_chains, ("vector", "gather")) == "vector"
    assert Times(memory(tmp_path), clock).fastest("shape", some_chains, ("vector", "tile")) == "tile"
    assert clock.asked == [["gather", "tile", "vector"]]
    assert chosen.fastest("shape", some_chains, ("vector", "tile", "dense")) == "dense"
    assert chosen.fastest("other", some_chains, ("gather",)) == "gather"
    assert clock.asked[1:] == [["dense", "tile", "vector"]]
    assert chosen.fastest("other", some_chains, ("tile", "vector")) == "tile"
    assert len(clock.asked) == 3


def test_ways_that_cannot_be_timed_are_not_taken(tmp_path: Path) -> None:
    clock = Clock(gather=9)
    chosen = Times(memory(tmp_path), clock)
    assert chosen.fastest("shape", some_chains, ("tile", "gather")) == "gather"
    assert chosen.fastest("shape", some_chains, ("tile", "gather")) == "gather"
    assert len(clock.asked) == 1
    assert Times(memory(tmp_path), Clock()).fastest("new", some_chains, ("tile", "gather")) == "gather"


def test_what_the_host_does_counts() -> None:
    def slow_to_build(calls: int) -> mx.array:
        time.sleep(3e-3 * calls)
        return mx.zeros(1)

    times = milliseconds_per_call({"slow": slow_to_build, "fast": lambda calls: mx.zeros(1)})
    assert times["slow"] >= 3 > times["fast"]


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), ValueError("no such type"), KeyError("x")])
@pytest.mark.parametrize("at", [1, 2, 4])
def test_what_fails_at_any_time_is_left_out(error: Exception, at: int) -> None:
    built = 0

    def failing(calls: int) -> mx.array:
        nonlocal built
        built += 1
        if built >= at:
            raise error
        return mx.zeros(1)

    assert set(milliseconds_per_call({"failing": failing, "fast": lambda calls: mx.zeros(1)})) == {"fast"}


def test_ways_that_cannot_be_made_are_no_error(tmp_path: Path) -> None:
    def full() -> Mapping[str, Chain]:
        raise DoesNotFit("no memory")

    assert Times(memory(tmp_path), Clock(tile=1, gather=2)).fastest("s", full, ("tile", "gather")) == "gather"


def test_measuring_tells_slow_from_fast() -> None:
    matrix = mx.ones((256, 256)) / 256

    def slow(calls: int) -> mx.array:
        result = matrix
        for _ in range(8 * calls):
            result = result @ matrix
        return result

    def broken(calls: int) -> mx.array:
        raise RuntimeError("out of memory")

    times = milliseconds_per_call({"slow": slow, "fast": lambda calls: matrix[0] + calls, "broken": broken})
    assert set(times) == {"slow", "fast"}
    assert times["slow"] > times["fast"] > 0


@pytest.mark.parametrize("storage", [mx.int8, mx.float32], ids=str)
@pytest.mark.parametrize("batch", [1, 2])
def test_all_that_is_timed_attends_to_the_same(storage: mx.Dtype, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros tell nothing apart, so they are replaced."""
    random = np.random.default_rng(batch)

    def noise(shape: Sequence[int], dtype: mx.Dtype = mx.float32) -> mx.array:
        return mx.array(random.integers(-3, 4, shape)).astype(dtype)

    shape = Shape(4, 2, 64, storage, mx.float32, 3, 256, batch)
    with monkeypatch.context() as patched:
        patched.setattr(mx, "zeros", noise)
        ways = ways_to_attend(shape, right)
    results = {way: np.array(trial(1)) for way, trial in ways.items()}
    assert len(results) == 5
    for result in results.values():
        assert result.shape == (batch, 4, 3, 64)
        # The angles are noise too, but the same for all.
        np.testing.assert_allclose(result, results["gather"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_what_is_timed_is_what_a_pass_does_but_for_writing(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the fused kernel rotates queries and keys, once per layer each; attention waits for the keys."""
    calls: list[tuple[int, ...]] = []
    rotated_keys: list[mx.array] = []
    waited_for: list[mx.array] = []
    fused, depends = Rotary.fused, mx.depends

    def counted(self: Rotary, x: mx.array, offset: int | mx.array) -> mx.array:
        calls.append(tuple(x.shape))
        assert offset == 256 - 3
        result = fused(self, x, offset)
        rotated_keys.extend([result] if x.shape[1] == 2 else [])
        return result

    def waiting(inputs: list[mx.array], dependencies: list[mx.array]) -> list[mx.array]:
        waited_for.extend(dependencies)
        return depends(inputs, dependencies)

    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    monkeypatch.setattr(Rotary, "rows", None)
    monkeypatch.setattr(Rotary, "fused", counted)
    monkeypatch.setattr(mx, "depends", waiting)
    trial = ways_to_attend(Shape(4, 2, 64, mx.float16, mx.float16, 3, 256), right)[way]
    trial(2)
    assert calls == [(1, 2, 3, 64), (1, 4, 3, 64)] * 2
    assert [id(array) for array in waited_for] == [id(array) for array in rotated_keys]


def test_int8_rotates_queries_by_rows_when_timed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    monkeypatch.setattr(Rotary, "fused", None)
    for trial in ways_to_attend(Shape(4, 2, 64, mx.int8, mx.float16, 3, 256), right).values():
        assert trial(1).shape == (1, 4, 3, 64)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("way", ["vector", "tile"])
def test_a_kernel_costs_no_other_rotation(way: Way, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is hidden and positions are small, a GPU's fused kernel serves both ways."""
    made = PagePool(layers=1, kv_heads=2, head_dim=64, dtype=mx.float32)
    rotary, table, chosen = Rotary(nn.RoPE(64), 64), PageTable(made), "dense"
    random, outputs = np.random.default_rng(rows), []
    for count in (70, rows):
        table.append(count)
        new = [mx.array(random.standard_normal((1, heads, count, 64)).astype(np.float32)) for heads in (4, 2, 2)]
    for on_gpu in (False, True):
        if on_gpu:
            monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
            monkeypatch.setattr(Rotary, "rows", None)
            chosen = way
        passed = AttentionPass(made, [table], rows, rotary, chosen, execute=right)
        outputs.append(np.array(passed.attend(0, *new, 0.125)))
    np.testing.assert_allclose(outputs[1], outputs[0], atol=1e-4)


def test_ways_to_quantize_are_timed() -> None:
    ways = ways_to_quantize(2, 4, 64, mx.float16, False, right)
    assert set(ways) == {"kernel", "plain"}
    assert {trial(3).shape for trial in ways.values()} == {(1, 2, 4, 64)}


def test_few_shapes_stand_for_all() -> None:
    def bucket(rows: int, length: int, **more: Any) -> tuple[int, int]:
        fields = {"heads": 64, "kv_heads": 8, "head_dim": 128, "storage": mx.int8, "dtype": mx.float16, **more}
        shape = Shape(rows=rows, length=length, **fields).bucket
        return shape.rows, shape.length

    assert bucket(1, 1) == (1, 256)
    assert bucket(5, 257) == (8, 1024)
    assert bucket(16, 4097) == (16, 16384)
    assert bucket(1, 10**6) == (1, 16384)
    assert bucket(1, 10**6, storage=mx.float16) == (1, 4096)
    assert bucket(1, 10**6, batch=64) == (1, 256)


def test_the_buckets_of_all_that_may_come() -> None:
    shape = Shape(64, 8, 128, mx.int8, mx.float16, 16, 1025)
    assert [(bucket.rows, bucket.length) for bucket in shape.buckets] == [
        (rows, length) for length in (256, 1024, 4096) for rows in (1, 2, 4, 8, 16)
    ]
    for rows in range(1, 17):
        for length in (1, 256, 257, 1000, 1025):
            assert replace(shape, rows=rows, length=length).bucket in shape.buckets


# Who decides


def attention_arguments(head_dim: int = 64, rows: int = 3, storage: mx.Dtype = mx.int8) -> dict[str, Any]:
    problem = problems.attention_problem(problems.SCENES[2], head_dim, storage, 2, rows)
    return {**problem.clean, "dtype": mx.float16}


class Recording:
    def __init__(self) -> None:
        self.kernels: list[str] = []

    def __call__(self, launch: registry.Launch) -> Sequence[mx.array]:
        self.kernels.append(launch.variant.kernel.name)
        return right(launch)


def attend(
    decided: Choosing, recording: registry.Execute, arguments: dict[str, Any], plain: Way = "gather"
) -> np.ndarray:
    """What a pass does."""
    batch, heads, rows, head_dim = arguments["window_queries"].shape
    keys, held = arguments["keys"], arguments["pages"].shape[1] * PAGE
    shape = Shape(heads, keys.shape[1], head_dim, keys.dtype, arguments["dtype"], rows, held, batch)
    way = decided.way(shape, plain)
    if way == "gather":
        return np.array(reference.paged_attention(**arguments))
    assert way in ("vector", "tile")
    return np.array(registry.paged_attention(**arguments, longest=held, kernel=way, execute=recording))


def quantize(decided: Choosing, keys: mx.array, *others: Any) -> Sequence[mx.array]:
    """What a pass does."""
    batch, kv_heads, rows, head_dim = keys.shape
    return decided.quantizing(kv_heads, batch * rows, head_dim, keys.dtype, others[-1])(keys, *others)


def dispatch(
    folder: Path, execute: registry.Execute, clock: Clock, compare: Callable[..., None] | None = None
) -> Choosing:
    return Choosing(SelfCheck(memory(folder), execute, compare or Counting()), Times(memory(folder), clock), execute)


@pytest.mark.parametrize(
    ("times", "ran"),
    [
        ({"vector": 1, "tile": 2, "gather": 3}, ["paged_attention_vector", "paged_attention_combine"]),
        ({"vector": 2, "tile": 1, "gather": 3}, ["paged_attention_tile", "paged_attention_combine"]),
        ({"vector": 2, "tile": 3, "gather": 1}, []),
    ],
)
def test_the_fastest_right_way_attends(tmp_path: Path, times: dict[str, float], ran: list[str]) -> None:
    recording, clock = Recording(), Clock(**times)
    decided = dispatch(tmp_path, recording, clock)
    arguments = attention_arguments()
    expected = np.array(reference.paged_attention(**arguments))
    for _ in range(2):
        recording.kernels.clear()
        np.testing.assert_allclose(attend(decided, recording, arguments), expected, atol=2e-3)
        assert recording.kernels == ran
    assert len(clock.asked) == 1


def test_a_wrong_kernel_is_not_taken_however_fast(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def only_vector_is_right(variant: registry.Variant, execute: registry.Execute) -> None:
        if variant.kernel is registry.TILE:
            raise Mismatch("off")

    recording = Recording()
    decided = dispatch(tmp_path, recording, Clock(vector=2, tile=1, gather=3), only_vector_is_right)
    attend(decided, recording, attention_arguments())
    assert recording.kernels == ["paged_attention_vector", "paged_attention_combine"]
    assert len(caplog.records) == 1


def test_nothing_is_timed_where_no_kernel_is_right(tmp_path: Path) -> None:
    recording, clock = Recording(), Clock()
    decided = dispatch(tmp_path, recording, clock, Counting(Mismatch("off")))
    arguments = attention_arguments()
    result = attend(decided, recording, arguments)
    assert np.array_equal(result, np.array(reference.paged_attention(**arguments)))
    new = mx.ones((1, 2, 3, 64), mx.float16)
    quantize(decided, new, new, mx.ones((1, 3, 64)), mx.zeros((1, 3, 64)), mx.ones((2, 64)), False)
    assert decided.way(pool_shape(pool(64), 3, 4, 192), "dense") == "dense"
    assert (recording.kernels, clock.asked) == ([], [])


def test_the_real_comparison_decides(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def wrong(launch: registry.Launch) -> Sequence[mx.array]:
        parts = right(launch)
        return parts if launch.variant.kernel is registry.COMBINE else [parts[0] * 1.01, *parts[1:]]

    arguments = attention_arguments()
    decided = dispatch(tmp_path, wrong, Clock(vector=1, tile=2, gather=3), compare)
    result = attend(decided, wrong, arguments)
    assert np.array_equal(result, np.array(reference.paged_attention(**arguments)))
    assert {record.args[0].split("[")[0] for record in caplog.records} == {
        "paged_attention_vector", "paged_attention_tile"
    }  # fmt: skip


def test_a_head_size_without_kernel_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recording, clock = Recording(), Clock()
    decided = dispatch(tmp_path, recording, clock)
    assert decided.way(pool_shape(pool(72), 1, 4, 192), "dense") == "dense"
    assert not caplog.records
    for rows in (1, 3, 3):
        arguments = attention_arguments(72, rows)
        assert np.array_equal(
            attend(decided, recording, arguments), np.array(reference.paged_attention(**arguments))
        )
    new = mx.ones((1, 2, 3, 72), mx.float16)
    quantize(decided, new, new, mx.ones((1, 3, 72)), mx.zeros((1, 3, 72)), mx.ones((2, 72)), False)
    [record] = caplog.records
    assert "heads of 72 channels (there are for 64, 80, 96, 128, 256)" in record.getMessage()
    assert (recording.kernels, clock.asked) == ([], [])


@pytest.mark.parametrize("rows", [17, 64])
def test_many_rows_take_a_kernel_where_something_is_hidden(
    tmp_path: Path, rows: int, caplog: pytest.LogCaptureFixture
) -> None:
    """As the most rows that are timed do: both ways cost by the row."""
    recording, clock = Recording(), Clock(vector=2, tile=1, gather=3, dense=9, scattered=9)
    decided = dispatch(tmp_path, recording, clock)
    arguments = attention_arguments(rows=rows)
    expected = np.array(reference.paged_attention(**arguments))
    np.testing.assert_allclose(attend(decided, recording, arguments), expected, atol=2e-3)
    assert recording.kernels == ["paged_attention_tile", "paged_attention_combine"]
    timed = "2 x 16 rows of 4/2 heads x 64, 1024 tokens in int8, float16"
    assert Times(memory(tmp_path), Clock()).knows(timed, ("vector", "tile", "gather"))
    for plain in ("dense", "scattered"):  # one matrix product for all rows, as for a prompt
        assert decided.way(pool_shape(pool(64), rows, 4, 192), plain) == plain
    assert len(clock.asked) == 1
    assert not caplog.records


@pytest.mark.parametrize("kernel", ["vector", "tile"])
@pytest.mark.parametrize(("head_dim", "group", "rows"), [(64, 1, 17), (64, 4, 37), (256, 2, 33)])
def test_the_kernels_source_takes_many_rows(
    kernel: registry.AttentionKernel, head_dim: int, group: int, rows: int
) -> None:
    """Which no comparison on a Mac covers, since its variants are those of fewer rows."""
    problem = problems.attention_problem(problems.SCENES[2], head_dim, mx.int8, group, rows)
    ran: list[str] = []

    def execute(launch: registry.Launch) -> Sequence[mx.array]:
        ran.append(launch.variant.name)
        return on_shim(launch)

    result = registry.paged_attention(
        **problem.given, dtype=mx.float32, longest=problem.longest, kernel=kernel, execute=execute
    )
    expected = reference.paged_attention(**problem.clean, dtype=mx.float32)
    np.testing.assert_allclose(np.array(result), np.array(expected), atol=2e-5, rtol=2e-5)
    assert set(ran) <= {variant.name for variant in registry.variants(head_dim, mx.int8, mx.float32, group=group)}


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 20])
def test_a_pass_takes_what_is_the_fastest(
    mac: Callable[..., tuple[Clock, Counting]], monkeypatch: pytest.MonkeyPatch, int8: bool, rows: int
) -> None:
    """Behind a window, where nothing is hidden yet, and on scattered pages; the result is the same."""
    outputs = []
    for kernels_there in (False, True):
        recording = Recording()
        mac(execute=recording)
        monkeypatch.setattr(registry, "available", lambda there=kernels_there: there)
        made = PagePool(layers=1, kv_heads=2, head_dim=64, dtype=mx.float32, int8=int8)
        rotary, random = Rotary(nn.RoPE(64), 64), np.random.default_rng(rows)
        whole, window = PageTable(made), PageTable(made, 4, 70)
        other = PageTable(made)
        other.append(2 * PAGE)
        other.pages = other.pages[1:]  # page 1 is another's
        for table, count in ((whole, 64), (window, 60), (window, 60), (window, rows), (whole, rows), (whole, 60)):
            table.append(count)
            new = [mx.array(random.standard_normal((1, n, count, 64)).astype(np.float32)) for n in (4, 2, 2)]
            passed = attention_pass(made, [table], count, rotary, heads=4)
            outputs.append(np.array(passed.attend(0, *new, 0.125)))
        attended = [name for name in recording.kernels if name.startswith("paged_attention_vector")]
        # Hidden: 60 and `rows` rows. Not hidden: `rows` rows on pages that do not follow one another.
        assert len(attended) == (2 + (rows <= 16) if kernels_there else 0)
    for plain, chosen in zip(outputs[:6], outputs[6:], strict=True):
        np.testing.assert_allclose(chosen, plain, atol=2e-3 if int8 else 1e-5)


@pytest.mark.parametrize("way", ["kernel", "plain"])
def test_quantization_takes_the_faster_way(tmp_path: Path, way: str) -> None:
    recording = Recording()
    decided = dispatch(tmp_path, recording, Clock(**{"kernel": 2, "plain": 2, way: 1}))
    for arguments in problems.quantization_problems(64, mx.float16, True):
        for result, expected in zip(quantize(decided, *arguments), reference.quantize_kv(*arguments), strict=True):
            assert np.array_equal(np.array(result), np.array(expected))
    assert recording.kernels == (["quantize_kv"] * 3 if way == "kernel" else [])


def pool(head_dim: int, int8: bool = True) -> PagePool:
    made = PagePool(layers=1, kv_heads=2, head_dim=head_dim, dtype=mx.float16, int8=int8)
    made.reserve(3)
    return made


@pytest.mark.parametrize("int8", [False, True])
def test_a_kernel_is_preferred_where_it_is_faster(tmp_path: Path, int8: bool) -> None:
    clock = Clock(vector=2, tile=4, dense=1, scattered=3)
    decided = dispatch(tmp_path, Recording(), clock)
    shape = pool_shape(pool(64, int8), 3, 4, 192)
    assert (shape.length, shape.storage) == (192, mx.int8 if int8 else mx.float16)
    assert decided.way(shape, "dense") == "dense"
    assert decided.way(shape, "scattered") == "vector"
    assert decided.way(pool_shape(pool(64, int8), 17, 4, 192), "scattered") == "scattered"
    assert clock.asked == [["dense", "tile", "vector"], ["scattered", "tile", "vector"]]


def test_without_metal_the_twins_do_it_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(registry, "available", lambda: False)
    monkeypatch.setattr(choosing, "on_this_machine", lambda: pytest.fail("nothing is to be checked"))
    monkeypatch.setattr(choosing, "AttentionPass", lambda *given: given)
    made, rotary = pool(64), Rotary(nn.RoPE(64), 64)
    whole, broken, hiding = PageTable(made), PageTable(made), PageTable(made, 4, 65)
    for table, count in ((broken, 64), (whole, 100), (broken, 16 * PAGE), (hiding, 100)):
        table.append(count)
    chosen = [attention_pass(made, [table], 1, rotary, 4)[4:] for table in (whole, broken, hiding)]
    assert chosen == [("dense",), ("scattered",), ("gather",)]
    assert AttentionPass.__init__.__defaults__ == (reference.quantize_kv, registry.execute)
    choosing.prepare(pool(64), 4, Rotary(nn.RoPE(64), 64), window=True)
    monkeypatch.setattr(registry, "available", lambda: True)
    recording = Recording()
    decided = dispatch(tmp_path, recording, Clock(vector=1, tile=2, scattered=2, gather=2, kernel=1, plain=2))
    monkeypatch.setattr(choosing, "on_this_machine", lambda: decided)
    for table in (broken, hiding):
        _, _, _, _, way, quantizing, execute = attention_pass(made, [table], 1, rotary, 4)
        assert (way, execute) == ("vector", recording)
    arguments = problems.quantization_problems(64, mx.float16, False)[1]
    quantizing(*arguments)
    assert recording.kernels == ["quantize_kv"]


# Before the first answer


@pytest.fixture
def mac(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Clock, Counting]]:
    """Starts a process on the one machine, whose kernels and clock are stand-ins."""
    monkeypatch.setattr(registry, "available", lambda: True)

    def start(error: Exception | None = None, execute: registry.Execute = right) -> tuple[Clock, Counting]:
        clock = Clock(vector=2, tile=3, dense=1, scattered=4, gather=5, kernel=1, plain=2)
        checks = Counting(error)
        decided = dispatch(tmp_path, execute, clock, checks)
        monkeypatch.setattr(choosing, "on_this_machine", lambda: decided)
        return clock, checks

    return start


def use(made: PagePool, window: bool) -> set[str]:
    """Every pass that a model may ask for: rows, lengths, and what it finds in the pool."""
    plain: tuple[Way, ...] = ("dense", "scattered", "gather") if window else ("dense", "scattered")
    decided = choosing.on_this_machine()
    for rows in (*range(1, 18), 40, 64, 512):
        if made.int8:
            decided.quantizing(2, rows, 64, mx.float16, False)
    return {
        decided.way(pool_shape(made, rows, 6, length), way)
        for rows in (*range(1, 18), 40, 64)
        for length in (64, 320, 1024, 3000)
        for way in plain
    }


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("window", [False, True])
def test_all_is_found_out_before_the_first_answer(
    mac: Callable[..., tuple[Clock, Counting]], int8: bool, window: bool, caplog: pytest.LogCaptureFixture
) -> None:
    made, rotary = pool(64, int8), Rotary(nn.RoPE(64), 64)
    clock, checks = mac()
    choosing.prepare(made, 6, rotary, window=window, length=3000)
    [record] = caplog.records
    assert (record.name, record.levelname) == ("mlx_spec", "WARNING")
    assert record.getMessage() == "checking and timing the Metal kernels on this machine, once"
    assert len(clock.asked) == 15 + 7 * int8  # every way of a shape against the others, once
    assert checks.calls == len(registry.variants(64, made.keys[0].dtype, mx.float16, False, 3))
    asked, checked = len(clock.asked), checks.calls
    assert use(made, window) == {"vector", "dense", "scattered"}
    assert (len(clock.asked), checks.calls) == (asked, checked)
    # Another process finds all of it remembered.
    clock, checks = mac()
    choosing.prepare(made, 6, rotary, window=window, length=3000)
    choosing.prepare(made, 6, rotary, window=window, length=3000)
    use(made, window)
    assert (clock.asked, checks.calls) == ([], 0)
    assert len(caplog.records) == 1
    # More positions, or another storage, are another matter.
    choosing.prepare(made, 6, rotary, window=window)
    assert len(clock.asked) == 5
    assert len(caplog.records) == 2


@pytest.mark.parametrize("error", [Mismatch("off"), RuntimeError("no such type"), ValueError("x")])
def test_kernels_that_fail_are_off_and_no_error(
    mac: Callable[..., tuple[Clock, Counting]], error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    made = pool(64)
    clock, _ = mac(error)
    choosing.prepare(made, 4, Rotary(nn.RoPE(64), 64), window=True)
    assert clock.asked == []
    messages = [record.getMessage() for record in caplog.records]
    assert "checking and timing" in messages[0]
    assert all("is switched off" in message for message in messages[1:])
    assert use(made, True) == {"dense", "scattered", "gather"}
    assert len(caplog.records) == len(messages)


def test_a_head_size_without_kernel_is_said_beforehand(
    mac: Callable[..., tuple[Clock, Counting]], caplog: pytest.LogCaptureFixture
) -> None:
    clock, checks = mac()
    rotary = Rotary(nn.RoPE(72), 72)
    choosing.prepare(pool(72, int8=False), 4, rotary, window=False)
    assert not caplog.records
    choosing.prepare(pool(72, int8=True), 4, rotary, window=False)
    choosing.prepare(pool(72, int8=False), 4, rotary, window=True)
    [record] = caplog.records
    assert "heads of 72 channels" in record.getMessage()
    assert (clock.asked, checks.calls) == ([], 0)


def test_preparing_measures_for_real_and_keeps_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real clock and comparison, and twins for kernels."""
    monkeypatch.setattr(registry, "available", lambda: True)
    decided = Choosing(SelfCheck(memory(tmp_path), right), Times(memory(tmp_path)), right)
    monkeypatch.setattr(choosing, "on_this_machine", lambda: decided)
    made = pool(64)
    mx.synchronize()
    before = mx.get_active_memory()
    choosing.prepare(made, 4, Rotary(nn.RoPE(64), 64), window=True, length=200)
    assert mx.get_active_memory() <= before + 2**20
    assert mx.get_cache_memory() == 0
    known = Times(memory(tmp_path), Clock())
    for rows in (1, 2, 4, 8, 16):
        shape = pool_shape(made, rows, 4, 200).bucket
        assert known.knows(str(shape), ("dense", "scattered", "vector", "tile", "gather"))


@pytest.mark.metal
def test_times_on_this_machine() -> None:
    shape = Shape(32, 8, 64, mx.int8, mx.float16, 4, 1024)
    times = milliseconds_per_call(ways_to_attend(shape))
    assert set(times) == set(WAYS)
    assert all(0 < time < 1000 for time in times.values())


