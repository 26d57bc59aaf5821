"""The check of kernels against their twins, and what is remembered of it: on right and wrong stand-ins."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from kernel_problems import on_shim
from kernel_stand_ins import Counting, attended, memory, right

from mlx_spec.attention.choosing import Times
from mlx_spec.kernels import problems, reference, registry, self_check
from mlx_spec.kernels.self_check import Mismatch, SelfCheck, compare
from mlx_spec.machine import remembered
from mlx_spec.machine.remembered import Remembered
from mlx_spec.resources import folder

VECTOR = registry.variant_of(registry.VECTOR, 64, storage=mx.float16, queries=8)
INT8 = registry.variant_of(registry.TILE, 64, storage=mx.int8)
COMBINE = registry.variant_of(registry.COMBINE, 64, dtype=mx.float16)
QUANTIZE = registry.variant_of(registry.QUANTIZE_KV, 64, dtype=mx.bfloat16)


@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("storage", registry.STORAGE, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_a_right_implementation_passes(head_dim: int, storage: mx.Dtype, interleaved: bool) -> None:
    dtype = mx.float32 if storage == mx.int8 else storage
    for variant in registry.variants(head_dim, storage, dtype, interleaved):
        compare(variant, right)


def change_state(column: int, by: int) -> Callable[[dict[str, mx.array]], None]:
    def change(named: dict[str, mx.array]) -> None:
        named["state"] = named["state"] + by * (mx.arange(reference.STATE_COLUMNS) == column)

    return change


def swap(a: str, b: str) -> Callable[[dict[str, mx.array]], None]:
    return lambda named: named.update({a: named[b], b: named[a]})


def set_to(name: str, value: Callable[[mx.array], mx.array]) -> Callable[[dict[str, mx.array]], None]:
    return lambda named: named.update({name: value(named[name])})


def no_sinks(named: dict[str, mx.array]) -> None:
    named["state"] = named["state"] * (mx.arange(reference.STATE_COLUMNS) != reference.SINKS)


def no_dropped_pages(named: dict[str, mx.array]) -> None:
    named["state"] = named["state"] * (mx.arange(reference.STATE_COLUMNS) != reference.DROPPED_PAGES)


ATTENTION_MISTAKES: dict[str, Callable[[dict[str, mx.array]], object]] = {
    "a window too wide by one": change_state(reference.WINDOW, 1),
    "a window too narrow by one": change_state(reference.WINDOW, -1),
    "a sink too many": change_state(reference.SINKS, 1),
    "no sinks": no_sinks,
    "dropped pages not counted": no_dropped_pages,
    "a head page too few": change_state(reference.HEAD_PAGES, -1),
    "the future seen": change_state(reference.LENGTH, 1),
    "the row itself not seen": change_state(reference.LENGTH, -1),
    "sinks met with the window's queries": lambda named: named.update(sink_queries=named["window_queries"]),
    "queries exchanged": swap("window_queries", "sink_queries"),
    "keys and values exchanged": swap("keys", "values"),
    "kv heads exchanged": set_to("keys", lambda keys: keys[:, ::-1]),
    "rows exchanged": set_to("window_queries", lambda queries: queries[:, :, ::-1]),
    "heads dealt out the other way": set_to("window_queries", lambda queries: queries[:, ::-1]),
    "the first sequence's pages for all": set_to("pages", lambda pages: mx.broadcast_to(pages[:1], pages.shape)),
    "pages in order": set_to("pages", lambda pages: mx.sort(pages, axis=-1)),
    "a channel forgotten": set_to("keys", lambda keys: keys * (mx.arange(keys.shape[-1]) != 63).astype(keys.dtype)),
}


@pytest.mark.parametrize("variant", [VECTOR, INT8], ids=lambda variant: variant.name)
@pytest.mark.parametrize("mistake", ATTENTION_MISTAKES)
def test_wrong_attention_is_found(variant: registry.Variant, mistake: str) -> None:
    with pytest.raises(Mismatch, match="differ from the twin"):
        compare(variant, lambda launch: attended(launch, ATTENTION_MISTAKES[mistake]))


@pytest.mark.parametrize("name", ["key_scales", "value_scales"])
def test_forgotten_scales_are_found(name: str) -> None:
    with pytest.raises(Mismatch):
        compare(INT8, lambda launch: attended(launch, set_to(name, mx.ones_like)))


def reading_unseen_slots(launch: registry.Launch) -> Sequence[mx.array]:
    """As `attended`, but a hidden slot weighs 0 instead of not being read."""
    parts = attended(launch)
    named = dict(zip(launch.variant.kernel.inputs, launch.inputs, strict=True))
    parts[0] = parts[0] + 0 * (named["value_scales"] if named["keys"].dtype == mx.int8 else named["values"]).sum()
    return parts


def wrong_split(launch: registry.Launch) -> Sequence[mx.array]:
    parts = attended(launch)
    parts[1] = mx.zeros_like(parts[1])  # a split that saw nothing must not look as if it had
    parts[2] = mx.ones_like(parts[2])
    return parts


def narrow(launch: registry.Launch) -> Sequence[mx.array]:
    return [part.astype(mx.float16) for part in right(launch)]


def unfilled(launch: registry.Launch) -> Sequence[mx.array]:
    return [mx.full(s, mx.nan, t) for s, t in zip(launch.output_shapes, launch.output_dtypes, strict=True)]


@pytest.mark.parametrize("execute", [reading_unseen_slots, wrong_split, unfilled], ids=lambda f: f.__name__)
@pytest.mark.parametrize("variant", [VECTOR, INT8], ids=lambda variant: variant.name)
def test_wrong_reads_and_parts_are_found(execute: registry.Execute, variant: registry.Variant) -> None:
    with pytest.raises(Mismatch):
        compare(variant, execute)


def no_maxima(launch: registry.Launch) -> Sequence[mx.array]:
    partials, _, sums = launch.inputs
    return [self_check.combined(partials, mx.zeros_like(sums), sums, launch.output_dtypes[0])]


def few_splits(launch: registry.Launch) -> Sequence[mx.array]:
    partials, maxima, sums = launch.inputs
    return [self_check.combined(partials[..., :32, :], maxima[..., :32], sums[..., :32], launch.output_dtypes[0])]


def nothing_seen_is_no_number(launch: registry.Launch) -> Sequence[mx.array]:
    result = right(launch)[0]
    return [mx.where(launch.inputs[2].sum(axis=-1)[..., None] > 0, result, mx.nan).astype(result.dtype)]


@pytest.mark.parametrize("execute", [no_maxima, few_splits, nothing_seen_is_no_number, unfilled])
def test_wrong_combination_is_found(execute: registry.Execute) -> None:
    with pytest.raises(Mismatch):
        compare(COMBINE, execute)


def test_a_wrong_type_is_found() -> None:
    with pytest.raises(Mismatch, match=r"float16 \(2, 3, 2, 64\) instead of mlx.core.float32"):
        compare(registry.variant_of(registry.COMBINE, 64, dtype=mx.float32), narrow)


def quantized(launch: registry.Launch, **changes: Any) -> Sequence[mx.array]:
    named = dict(zip(launch.variant.kernel.inputs, launch.inputs, strict=True))
    interleaved = dict(launch.variant.template)["INTERLEAVED"]
    named.update({name: change(named[name]) for name, change in changes.items() if name in named})
    results = reference.quantize_kv(**named, interleaved=changes.get("interleaved", interleaved))
    return changes.get("after", lambda x: x)(results)


def truncated(results: Sequence[mx.array]) -> Sequence[mx.array]:
    return [mx.maximum(r - 1, -127) if r.dtype == mx.int8 else r for r in results]


QUANTIZATION_MISTAKES: dict[str, dict[str, Any]] = {
    "pairs of the other layout": {"interleaved": True},
    "sines of the other sign": {"sines": lambda sines: -sines},
    "no divisors": {"divisors": mx.ones_like},
    "divisors of the first head": {"divisors": lambda divisors: mx.broadcast_to(divisors[:1], divisors.shape)},
    "angles of the first row": {"cosines": lambda cosines: mx.broadcast_to(cosines[:, :1], cosines.shape)},
    "truncated": {"after": truncated},
    "keys for values": {"values": lambda values: values[:, ::-1]},
    "scales exchanged": {"after": lambda results: (results[0], results[3], results[2], results[1])},
}


@pytest.mark.parametrize("mistake", QUANTIZATION_MISTAKES)
def test_wrong_quantization_is_found(mistake: str) -> None:
    with pytest.raises(Mismatch):
        compare(QUANTIZE, lambda launch: quantized(launch, **QUANTIZATION_MISTAKES[mistake]))


def test_a_last_bit_of_the_scale_is_no_mistake() -> None:
    def nudged(results: Sequence[mx.array]) -> Sequence[mx.array]:
        keys, scales, values, value_scales = results
        return mx.where(mx.arange(64) == 5, mx.maximum(keys - 1, -127), keys), scales * 1.0005, values, value_scales

    compare(QUANTIZE, lambda launch: quantized(launch, after=nudged))


def test_problems_leave_the_random_state_alone() -> None:
    mx.random.seed(3)
    before = mx.random.normal((4,))
    mx.random.seed(3)
    problems.attention_problem(problems.SCENES[0], 64, mx.int8, 2, 3)
    problems.quantization_problems(64, mx.float16, False)
    assert before.tolist() == mx.random.normal((4,)).tolist()


@pytest.mark.parametrize("variant", [COMBINE, registry.variant_of(registry.VECTOR, 64, storage=mx.int8, queries=2)],
                         ids=lambda variant: variant.name)  # fmt: skip
def test_the_kernels_source_passes(variant: registry.Variant) -> None:
    """The text that Metal would compile, run by the shim."""
    compare(variant, on_shim)


@pytest.mark.metal
@pytest.mark.parametrize("head_dim", registry.HEAD_SIZES)
@pytest.mark.parametrize("storage", registry.STORAGE, ids=str)
def test_kernels_on_this_machine(head_dim: int, storage: mx.Dtype) -> None:
    for dtype in registry.TYPES:
        for variant in registry.variants(head_dim, storage, dtype, group=8):
            compare(variant)


# What is remembered


def test_a_right_variant_is_checked_once_per_machine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    counting = Counting()
    checks = SelfCheck(memory(tmp_path), compare=counting)
    assert checks.trusts(VECTOR)
    assert checks.trusts(VECTOR)
    assert SelfCheck(memory(tmp_path), compare=counting).trusts(VECTOR)
    assert counting.calls == 1
    assert SelfCheck(memory(tmp_path, "M2"), compare=counting).trusts(VECTOR)
    assert SelfCheck(memory(tmp_path), compare=counting).trusts(INT8)
    assert counting.calls == 3
    assert checks.examine(VECTOR, again=True) is None
    assert counting.calls == 4
    assert not caplog.records


def test_other_sources_are_checked_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counting = Counting()
    SelfCheck(memory(tmp_path), compare=counting).trusts(VECTOR)
    monkeypatch.setattr(self_check, "fingerprint", lambda: "other")
    SelfCheck(memory(tmp_path), compare=counting).trusts(VECTOR)
    assert counting.calls == 2


@pytest.fixture
def metal_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the kernels' sources, which `fingerprint` reads."""
    copied = tmp_path / "metal"
    shutil.copytree(folder("metal"), copied)
    monkeypatch.setattr(self_check, "folder", lambda _: copied)
    self_check.fingerprint.cache_clear()
    yield copied
    self_check.fingerprint.cache_clear()


def test_the_fingerprint_is_of_sources_alone(metal_folder: Path) -> None:
    def fingerprint() -> str:
        self_check.fingerprint.cache_clear()
        return self_check.fingerprint()

    before = fingerprint()
    for stray in (".DS_Store", "common.h~", "#common.h#", ".common.h.swp", "._common.h", "common.h.orig", "README.md"):
        (metal_folder / stray).write_bytes(b"stray")
    (metal_folder / "__pycache__").mkdir()
    assert fingerprint() == before
    for source in ("common.h", "quantize_kv.metal", "new.metal"):
        (metal_folder / source).write_text("// other")
        now = fingerprint()
        assert now != before
        before = now


def test_what_all_threads_share_is_not_lazy() -> None:
    registry._no_scales.cache_clear()
    made: list[mx.array] = []
    thread = threading.Thread(target=lambda: made.append(registry._no_scales()))
    thread.start()
    thread.join()
    assert registry._no_scales() is made[0]
    assert made[0].tolist() == [0] * 8


def test_a_wrong_variant_is_off_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    counting = Counting(Mismatch("a window: 3 of 9 values differ"))
    checks = SelfCheck(memory(tmp_path), compare=counting)
    assert [checks.trusts(VECTOR) for _ in range(3)] == [False] * 3
    [record] = caplog.records
    assert (record.name, record.levelname) == ("mlx_spec", "WARNING")
    assert VECTOR.name in record.getMessage()
    assert "a window: 3 of 9 values differ" in record.getMessage()
    assert "mlx-spec doctor" in record.getMessage()
    caplog.clear()
    assert not SelfCheck(memory(tmp_path), compare=counting).trusts(VECTOR)
    assert len(caplog.records) == 1
    assert counting.calls == 1
    # Mended, say by a restart of the machine: the doctor finds out.
    assert SelfCheck(memory(tmp_path), compare=Counting()).examine(VECTOR, again=True) is None
    assert SelfCheck(memory(tmp_path), compare=counting).trusts(VECTOR)


def test_what_does_not_compile_is_off_in_this_process(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    error = RuntimeError("[metal::Device] Unable to build\nprogram_source:7:1: error: unknown type 'hlaf'\nmore")
    counting = Counting(error)
    checks = SelfCheck(memory(tmp_path), compare=counting)
    assert not checks.trusts(VECTOR)
    assert not checks.trusts(VECTOR)
    assert counting.calls == 1
    assert "RuntimeError: program_source:7:1: error: unknown type 'hlaf'" in caplog.text
    assert SelfCheck(memory(tmp_path), compare=Counting()).trusts(VECTOR)


def test_control_c_during_a_check_decides_nothing(tmp_path: Path) -> None:
    checks = SelfCheck(memory(tmp_path), compare=Counting(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        checks.trusts(VECTOR)
    assert SelfCheck(memory(tmp_path), compare=Counting()).trusts(VECTOR)


def test_a_variant_that_ended_a_process_is_not_run_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def crash(variant: registry.Variant, execute: registry.Execute) -> None:
        raise SystemExit  # as if the process were gone: the file is as it was then

    class Gone(Remembered):
        def set(self, section: str, key: str, value: Any) -> None:
            if value is not None:
                super().set(section, key, value)

    with pytest.raises(SystemExit):
        SelfCheck(Gone(tmp_path / "cache" / "kernels.json", "M1"), compare=crash).trusts(VECTOR)
    counting = Counting()
    # This process still lives, so it may be at it.
    assert SelfCheck(memory(tmp_path), compare=counting).trusts(VECTOR)
    with subprocess.Popen([sys.executable, "-c", "pass"]) as ended:
        pass
    key = f"{VECTOR.name} {self_check.fingerprint()}"
    memory(tmp_path).set("kernels", key, f"checking {ended.pid}")
    with pytest.raises(SystemExit):  # once may have been a closed terminal: it is tried again, and says so meanwhile
        SelfCheck(Gone(tmp_path / "cache" / "kernels.json", "M1"), compare=crash).trusts(VECTOR)
    assert memory(tmp_path).get("kernels", key) == f"checking {os.getpid()} again"
    memory(tmp_path).set("kernels", key, f"checking {ended.pid}")
    assert SelfCheck(memory(tmp_path), compare=counting).trusts(VECTOR)
    assert counting.calls == 2
    memory(tmp_path).set("kernels", key, f"checking {ended.pid} again")
    checks = SelfCheck(memory(tmp_path), compare=counting)
    assert checks.examine(VECTOR, again=True) == "the program ended twice while it was checked"
    assert not checks.trusts(VECTOR)
    assert counting.calls == 2


@pytest.mark.parametrize("content", [
    b"", b"{", b"[]", b"7", b"\xff\xfe", b'{"machines": 3}', b'{"machines": {"M1": []}}', b"[" * 100_000,
    b'{"machines": {"M1": {"kernels": 4, "milliseconds": {"s": {"a": "x"}}}}}',
])  # fmt: skip
def test_a_broken_or_foreign_file_is_no_error(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "kernels.json").write_bytes(content)
    counting = Counting()
    assert SelfCheck(memory(tmp_path), compare=counting).trusts(VECTOR)
    assert SelfCheck(memory(tmp_path), compare=counting).trusts(VECTOR)
    assert counting.calls == 1
    assert Times(memory(tmp_path), lambda trials: {"a": 2.0, "b": 1.0}).fastest("s", dict, ("a", "b")) == "b"
    assert not caplog.records


@pytest.mark.parametrize("value", ["checking", "checking x", "checking -1", "checking 99999999999999999999", 7, "odd"])
def test_odd_values_are_checked_anew(tmp_path: Path, value: Any) -> None:
    memory(tmp_path).set("kernels", f"{VECTOR.name} {self_check.fingerprint()}", value)
    counting = Counting()
    assert SelfCheck(memory(tmp_path), compare=counting).trusts(VECTOR)
    assert counting.calls == 1


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    checks = SelfCheck(memory(tmp_path), compare=Counting())
    assert checks.trusts(VECTOR)
    assert checks.trusts(INT8)
    [record] = caplog.records
    assert "will be found out again" in record.getMessage()


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    memory(tmp_path).set("kernels", "a", "ok")
    assert list((tmp_path / "cache").iterdir()) == []


def test_what_cannot_be_written_is_known_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    memory(tmp_path).set("s", "before", 0)
    monkeypatch.setattr(os, "replace", full)
    kept = memory(tmp_path)
    for key in "ab":
        kept.set("s", key, key)
    assert [kept.get("s", key) for key in ("a", "b", "before")] == ["a", "b", 0]


def test_processes_share_a_file_and_few_machines_stay(tmp_path: Path) -> None:
    first, second = memory(tmp_path), memory(tmp_path)
    assert first.get("s", "b") is None
    second.set("s", "b", 2)
    first.set("s", "a", 1)
    assert [memory(tmp_path).get("s", key) for key in "ab"] == [1, 2]
    first.set("s", "a", None)
    assert memory(tmp_path).get("s", "a") is None
    for number in range(20):
        memory(tmp_path, f"other {number}").set("s", "a", number)
    content = json.loads((tmp_path / "cache" / "kernels.json").read_text())
    assert len(content["machines"]) == 8
    assert stat.S_IMODE((tmp_path / "cache" / "kernels.json").stat().st_mode) == 0o600


def test_what_another_process_found_since_is_not_undone(tmp_path: Path) -> None:
    first, second = memory(tmp_path), memory(tmp_path)
    first.set("s", "a", "old")
    assert first.get("s", "b") is None
    second.set("s", "a", "new")
    first.set("s", "b", 1)
    assert [memory(tmp_path).get("s", key) for key in "ab"] == ["new", 1]


def test_an_interrupted_write_leaves_no_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = memory(tmp_path)
    kept.set("s", "a", 1)
    before = sorted(tmp_path.rglob("*"))
    with monkeypatch.context() as patched:
        patched.setattr(json, "dump", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            kept.set("s", "b", 2)
    assert sorted(tmp_path.rglob("*")) == before
    kept.set("s", "c", 3)
    assert [memory(tmp_path).get("s", key) for key in "abc"] == [1, 2, 3]


def _interrupt(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def test_where_it_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert remembered.cache_folder() == tmp_path / ".cache" / "mlx-spec"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert remembered.cache_folder() == tmp_path / ".cache" / "mlx-spec"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert remembered.cache_folder() == tmp_path / "x" / "mlx-spec"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert remembered.cache_folder() == tmp_path / "Library" / "Caches" / "mlx-spec"
    Remembered(None, "M1").set("s", "a", 1)
    assert "MLX 0." in remembered.machine()
