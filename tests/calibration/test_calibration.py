"""What is remembered of passes and under which key, and `mlx-spec calibrate`."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from directories import write_model
from external_models import module_of
from mlx.utils import tree_map
from test_measurement import TOKENS, external
from tiny import tiny_module

from mlx_spec.architectures.context import prefill
from mlx_spec.architectures.external import ExternalModel
from mlx_spec.calibration import calibrations as calibration
from mlx_spec.calibration import timing as measurement
from mlx_spec.calibration.calibrations import Calibrations, LeftOut, Store, calibrate
from mlx_spec.calibration.record import Calibration
from mlx_spec.calibration.timing import ROOM
from mlx_spec.cli import calibration_view
from mlx_spec.cli.main import main
from mlx_spec.decoding.schedule.costs import Costs
from mlx_spec.errors import BadConfig, DoesNotFit
from mlx_spec.loading import catalog, loader
from mlx_spec.loading.language_models import language_models
from mlx_spec.loading.loader import LoadedModel
from mlx_spec.machine.remembered import Remembered
from mlx_spec.settings import KVConfig, Sampling

Run = Callable[..., tuple[int, str, str]]
KV = KVConfig()
KNOWN = Calibration(256, ((1, 0.5), (2, 0.6), (4, 1.0)), 0.1, 0.2, 0.0, "2026-01-02T03:04:05+00:00")
NOTHING = Costs((), None)
ON_THIS_MACHINE = calibration.store
ALONE = replace(KNOWN, draft_lazily=None, draft_synchronised=None, draft_row=None)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return write_model(folder / "target"), write_model(folder / "draft", seed=5, num_hidden_layers=1)


@pytest.fixture(scope="module")
def pair(directories: tuple[Path, Path]) -> tuple[LoadedModel, LoadedModel]:
    target, draft = (loader.load(directory) for directory in directories)
    return target, draft


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_LENGTH_SECONDS", 0.05)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "calibration.json"


def store(file: Path, machine: str = "M1") -> Store:
    return Store(Remembered(file, machine))


# What is remembered


def known(calibrations: Calibrations, length: int = 256, *, drafting: bool = True) -> Costs:
    return calibrations.learner(Sampling(), 272, drafting=drafting).costs(length)


def same(costs: Costs, other: Costs) -> bool:
    return replace(costs, draft_row=0) == replace(other, draft_row=0) and abs(costs.draft_row - other.draft_row) < 1e-6


def test_what_was_measured_thoroughly_is_known_by_what_it_depends_on(
    pair: tuple[LoadedModel, LoadedModel], file: Path
) -> None:
    kept = store(file)
    Calibrations(*pair, KV, kept).keep(KNOWN)
    kept.wait()
    assert same(known(Calibrations(*pair, KV, store(file))), KNOWN.costs())
    assert known(Calibrations(*pair, KV, store(file)), drafting=False) == ALONE.costs()
    assert known(Calibrations(pair[0], None, KV, store(file))) == ALONE.costs()
    assert known(Calibrations(pair[0], pair[0], KV, store(file))) == ALONE.costs()
    assert known(Calibrations(pair[1], None, KV, store(file))) == NOTHING
    assert known(Calibrations(*pair, KVConfig("int8"), store(file))) == NOTHING
    assert known(Calibrations(*pair, KV, store(file, "M2"))) == NOTHING


def test_a_draft_that_was_not_measured_leaves_what_is_known_of_one(
    pair: tuple[LoadedModel, LoadedModel], file: Path
) -> None:
    calibrations = Calibrations(*pair, KV, store(file))
    calibrations.keep(KNOWN)
    calibrations.keep(replace(ALONE, target=((1, 0.4),)))
    assert known(calibrations).draft_step == KNOWN.draft_step
    assert known(calibrations).target == ((1, 0.4),)
    calibrations.keep(replace(KNOWN, draft_lazily=None))
    assert known(calibrations).draft_step == KNOWN.draft_synchronised


def test_neighbouring_lengths_are_a_first_guess(pair: tuple[LoadedModel, LoadedModel], file: Path) -> None:
    calibrations = Calibrations(*pair, KV, store(file))
    calibrations.keep(KNOWN)
    calibrations.keep(replace(KNOWN, context_length=32768, target=((1, 0.8), (8, 1.6))))
    assert same(known(calibrations, 2048), KNOWN.costs())
    assert known(calibrations, 8192).target == ((1, 0.8), (8, 1.6))
    assert known(calibrations, 131072).target == ((1, 0.8), (8, 1.6))
    calibrations.keep(replace(ALONE, context_length=2048, target=((1, 1.0), (3, 1.1))))
    guessed = known(calibrations, 2048)  # at the proportions of the neighbour, beyond what is known here
    assert guessed.target == ((1, 1.0), (3, 1.1), (4, pytest.approx(2.0)))
    assert guessed.draft_step == pytest.approx(0.2)
    calibrations.keep(replace(ALONE, context_length=2048, target=((1, 1.0), (2, 3.0))))
    assert known(calibrations, 2048).target == ((1, 1.0), (2, 3.0), (4, pytest.approx(5.0)))
    calibrations.keep(replace(ALONE, context_length=2048, target=((1, 1.0), (3, 1.1))))
    both = known(calibrations, 8192)  # of two that are as near, by the shorter's pass over one row
    assert both.target == ((1, 1.0), (3, 1.1), (8, pytest.approx(2.0)))
    assert known(Calibrations(*pair, KVConfig(window=65), store(file)), 9000) == NOTHING


def test_beyond_a_window_all_lengths_are_alike(pair: tuple[LoadedModel, LoadedModel], file: Path) -> None:
    calibrations = Calibrations(*pair, KVConfig(window=65), store(file))
    calibrations.keep(replace(KNOWN, context_length=60))
    assert same(known(calibrations, 1000), KNOWN.costs())  # guessed from what is seen there
    calibrations.keep(replace(KNOWN, context_length=200, target=((1, 2.0),)))
    assert known(calibrations, 100) == known(calibrations, 10**6)
    assert known(calibrations, 10**6).target[0] == (1, 2.0)
    assert known(calibrations, 60).target[0] == (1, 0.5)


def test_keys(pair: tuple[LoadedModel, LoadedModel], monkeypatch: pytest.MonkeyPatch) -> None:
    large, small = pair
    half = tiny_module(vocab_size=272)
    half.update(tree_map(lambda array: array.astype(mx.bfloat16), half.parameters()))
    keys = [
        Calibrations(*arguments).keys(length)[0]
        for arguments, length in (
            ((large, small, KV), 256), ((large, small, KV), 2048), ((small, None, KV), 256),
            ((large, small, KVConfig("int8")), 256),
            ((large, small, KVConfig(window=100)), 50), ((large, small, KVConfig(window=100)), 256),
            ((large, small, KVConfig(window=101)), 50), ((large, small, KVConfig(window=100, sinks="system")), 50),
            ((replace(large, module=half), small, KV), 256),
        )
    ]  # fmt: skip
    assert len({*keys}) == len(keys)
    calibrations = Calibrations(large, small, KV)
    for alike in (Calibrations(large, None, KV), Calibrations(large, large, KVConfig(draft_storage="int8"))):
        assert alike.keys(256)[0] == keys[0]
    filtered = [Sampling(temperature=0.7), Sampling(temperature=0.7, top_k=5), Sampling(temperature=0.7, top_p=0.5),
                Sampling(temperature=0.7, min_p=0.1), Sampling(temperature=0.7, top_k=5, top_p=0.5)]  # fmt: skip
    assert len({calibrations.filters(sampling, 272).key for sampling in filtered}) == len(filtered)
    key = calibrations.filters(filtered[1], 272).key
    assert key == calibrations.filters(Sampling(temperature=1, top_k=9, seed=1, presence_penalty=1), 272).key
    assert key != calibrations.filters(filtered[1], 271).key
    monkeypatch.setattr(mx, "default_device", lambda: "another")
    assert Calibrations(large, small, KV).keys(256)[0] not in keys
    assert Calibrations(large, small, KV).filters(filtered[1], 272).key != key


def test_a_model_of_mlx_lms_goes_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    own, theirs = ({Calibrations(model, None, KV).keys(9)[0] for version in ("1.0", "2.0") if not monkeypatch.setattr(
        calibration, "version", lambda name, version=version: version if name == "mlx-lm" else "0")}
        for model in (LoadedModel("own", tiny_module(), None, {}, None),  # type: ignore[arg-type]
                      LoadedModel("theirs", module_of("phi3"), None, {}, None)))  # type: ignore[arg-type]
    assert (len(own), len(theirs)) == (1, 2)


def test_a_key_names_no_path_and_does_not_depend_on_a_name(pair: tuple[LoadedModel, LoadedModel]) -> None:
    large, small = pair
    key = Calibrations(large, small, KV).keys(300)[0]
    assert key == Calibrations(replace(large, name="other"), small, KV).keys(200)[0]
    assert "/" not in key
    assert large.name not in key


def test_lengths_near_one_another_share_a_key(pair: tuple[LoadedModel, LoadedModel]) -> None:
    calibrations = Calibrations(*pair, KV)
    groups = [{calibrations.keys(length)[0] for length in lengths} for lengths in (
        (0, 1, 256, 700), (800, 2048, 4000), (5000, 8192, 16000), (20000, 32768), (10**5, 10**6))]  # fmt: skip
    assert all(len(group) == 1 for group in groups)
    assert len(set.union(*groups)) == 5


# Broken and foreign files


@pytest.mark.parametrize("content", [
    b"", b"{", b"[]", b"7", b"\xff\xfe", b"[" * 100_000, b'{"a": 1}', b'{"machines": 3}', b'{"machines": {"M1": []}}',
    b'{"machines": {"M1": {"passes": 4}}}', None,
])  # fmt: skip
def test_a_broken_or_foreign_file_is_said_once_and_made_anew(
    pair: tuple[LoadedModel, LoadedModel], file: Path, content: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    file.parent.mkdir()
    if content is None:
        file.mkdir()
    else:
        file.write_bytes(content)
    kept = store(file)
    for calibrations in (Calibrations(*pair, KV, kept), Calibrations(*pair, KVConfig("int8"), kept)):
        assert known(calibrations) == NOTHING
        calibrations.keep(KNOWN)
        assert same(known(calibrations), KNOWN.costs())
    kept.wait()
    said = [record.getMessage() for record in caplog.records]
    assert str(file) in said[0]
    assert "measured again" in said[0]
    if content is None:  # it can be neither read nor written
        assert len(said) == 2
        assert "cannot be kept" in said[1]
        return
    assert len(said) == 1
    caplog.clear()
    assert same(known(Calibrations(*pair, KVConfig("int8"), store(file))), KNOWN.costs())
    assert not caplog.records


def test_other_machines_in_the_file_are_no_fault(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = store(file, "M2")
    _keep(other, "a")
    assert store(file).get("a").known() == {}
    assert store(file, "M2").get("a").known() == {"1 rows": 0.5}
    assert not caplog.records


def _keep(kept: Store, *keys: str) -> None:
    for key in keys:
        kept.observe(key, "1 rows", 0.5, thorough=True)
    kept.write()
    kept.wait()


FIGURE = ["1 rows", 0.5, True, []]


@pytest.mark.parametrize("value", [
    7, "x", [], {}, "abcd", ["abcd"], [FIGURE, FIGURE], [FIGURE, 7], [FIGURE[:3]], [[*FIGURE, 1]],
    [[1, 0.5, True, []]], [["1 rows", None, True, []]],
    [["1 rows", -2.0, True, []]], [["1 rows", float("nan"), True, []]], [["1 rows", float("inf"), True, []]],
    [["1 rows", 0, True, []]], [["1 rows", "0.5", True, []]], [["1 rows", True, True, []]],
    [["1 rows", None, False, []]], [["1 rows", 10**400, False, []]], [["1 rows", 0.5, 1, []]],
    [["1 rows", None, False, [0.0]]], [["1 rows", None, False, ["x"]]], [["1 rows", None, False, 0.5]],
    [["1 rows", None, False, [0.5] * 5]], [["1 rows", 0.5, False, None]], [["1 rows", [0.5], False, []]],
    {"context_length": 256, "target": [[1, 0.5]], "draft_lazily": None, "draft_synchronised": None, "draft_row": None,
     "measured_at": "2026-01-02T03:04:05+00:00"},
])  # fmt: skip
def test_unusable_entries_are_learned_again(
    pair: tuple[LoadedModel, LoadedModel], file: Path, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    memory = Remembered(file, "M1")
    for length in (100, 3000):
        memory.set("passes", Calibrations(*pair, KV).keys(length)[0], value)
    _keep(store(file), "another")
    kept = store(file)
    calibrations = Calibrations(*pair, KV, kept)
    assert known(calibrations) == known(calibrations, 3000) == NOTHING
    calibrations.keep(KNOWN)
    kept.wait()
    [record] = caplog.records
    assert "measured again" in record.getMessage()
    assert same(known(Calibrations(*pair, KV, store(file))), KNOWN.costs())
    assert store(file).get("another").known() == {"1 rows": 0.5}


@pytest.mark.parametrize("name", ["", "rows", "x rows", "0 rows", "-1 rows", "01 rows", "1.5 rows", "99999999999 rows"])
def test_figures_of_another_name_do_no_harm(pair: tuple[LoadedModel, LoadedModel], file: Path, name: str) -> None:
    calibrations = Calibrations(*pair, KV, store(file))
    Remembered(file, "M1").set("passes", calibrations.keys(256)[0], [FIGURE, [name, 0.7, False, []]])
    assert known(calibrations).target == ((1, 0.5),)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    file.parent.mkdir(mode=0o500)
    _check_unwritable(file, caplog)


def test_a_folder_that_cannot_be(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    file.parent.write_text("a file, not a folder")
    _check_unwritable(file, caplog)


def _check_unwritable(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = store(file)
    for key in "ab":
        _keep(kept, key)
    assert kept.get("a").known() == kept.get("b").known() == {"1 rows": 0.5}
    [record] = caplog.records
    assert "cannot be kept" in record.getMessage()


def test_where_it_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_spec.machine.remembered.cache_folder", lambda: tmp_path / "here")
    ON_THIS_MACHINE.cache_clear()
    try:
        _keep(ON_THIS_MACHINE(), "a")
        assert ON_THIS_MACHINE() is ON_THIS_MACHINE()
        assert [each.name for each in (tmp_path / "here").iterdir()] == ["calibration.json"]
    finally:
        ON_THIS_MACHINE.cache_clear()


# The full measurement


def lengths_of(results: list[Calibration | LeftOut]) -> list[int]:
    return [result.context_length for result in results]


def test_several_lengths(pair: tuple[LoadedModel, LoadedModel], file: Path) -> None:
    said: list[str] = []
    results = list(calibrate(*pair, KV, kept=store(file), progress=said.append))
    assert lengths_of(results) == [256, 2048]  # 4096 is the whole context
    calibrations = Calibrations(*pair, KV, store(file))
    for result in results:
        assert isinstance(result, Calibration)
        assert result.draft_step is not None
        assert same(known(calibrations, result.context_length), result.costs())
    assert {"256 tokens: reading", "2048 tokens: 1 row", "2048 tokens: draft, lazily"} <= {*said}


def test_positions_that_were_not_read_are_held_like_read_ones(pair: tuple[LoadedModel, LoadedModel]) -> None:
    model, _ = language_models(*pair, KV)
    read, filled = model.new_context(), model.new_context()
    prefill(read, [TOKENS[index % len(TOKENS)] for index in range(1001)])
    calibration._fill(filled, TOKENS, 1000)
    assert (filled.length, filled.table.consecutive) == (read.length, read.table.consecutive)  # type: ignore[attr-defined]
    assert len(filled.table.pages) == len(read.table.pages)  # type: ignore[attr-defined]
    assert bool(mx.isfinite(filled.extend([1, 2, 3])).all())


@pytest.mark.parametrize(
    "kv",
    [
        KVConfig("int8", "int8"),
        KVConfig(window=100),
        KVConfig("int8", window=100, sinks=70),
        KVConfig(window=100, sinks="system"),
    ],
)
def test_every_way_to_keep_keys_and_values(pair: tuple[LoadedModel, LoadedModel], file: Path, kv: KVConfig) -> None:
    results = list(calibrate(*pair, kv, lengths=(50, 256, 5000), kept=store(file)))
    # All lengths beyond a window are alike.
    assert lengths_of(results) == [50, 256] if kv.window else [50, 4096 - ROOM]
    assert all(isinstance(result, Calibration) and result.draft_step is not None for result in results)


def test_a_short_context(pair: tuple[LoadedModel, LoadedModel], file: Path) -> None:
    large, small = pair
    results = list(calibrate(replace(large, context_length=64), small, KV, kept=store(file)))
    assert lengths_of(results) == [64 - ROOM]
    [first, second] = calibrate(large, replace(small, context_length=300), KV, kept=store(file))
    assert isinstance(first, Calibration)
    assert isinstance(second, Calibration)
    assert first.draft_step is not None
    assert second.draft_step is None
    with pytest.raises(BadConfig, match="window"):
        list(calibrate(replace(large, context_length=64), small, KVConfig(window=65), kept=store(file)))


def test_a_draft_without_room_for_the_window(pair: tuple[LoadedModel, LoadedModel], file: Path) -> None:
    large, small = pair
    for limit, drafts in ((68, False), (69, True)):
        draft = replace(small, context_length=limit)
        [only] = calibrate(large, draft, KVConfig(window=100), lengths=(256,), kept=store(file))
        assert isinstance(only, Calibration)
        assert (only.draft_step is not None) == drafts


@pytest.mark.parametrize("where", ["before", "while growing"])
def test_lengths_without_memory_are_left_out(
    pair: tuple[LoadedModel, LoadedModel], file: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def check(tokens: int, needed: int) -> None:
        assert needed > 0
        if tokens > 256:
            raise DoesNotFit("keys and values need 9 GB more and 1 GB is available; give a shorter prompt.")

    if where == "before":
        monkeypatch.setattr(calibration, "check_cache_fits", check)
    else:
        monkeypatch.setattr(calibration, "_fill", lambda context, text, length: check(length, 1))
        monkeypatch.setattr(calibration, "check_cache_fits", lambda *_: None)
    first, second = calibrate(*pair, KV, lengths=(256, 1024, 4000), kept=store(file))
    assert isinstance(first, Calibration)
    assert second == LeftOut(1024, "keys and values need 9 GB more and 1 GB is available")


@pytest.fixture
def other(pair: tuple[LoadedModel, LoadedModel]) -> LoadedModel:
    """An architecture of mlx-lm's."""
    module = external(vocab_size=272).module
    return replace(pair[0], name="other", module=module, config={"model_type": "phi3"})


def test_an_external_architecture(
    pair: tuple[LoadedModel, LoadedModel], other: LoadedModel, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(language_models(other, None, KV)[0], ExternalModel)
    for draft in (pair[1], other):
        results = list(calibrate(other, draft, KV, lengths=(256, 1024), kept=store(file)))
        assert lengths_of(results) == [256, 1024]
        assert all(isinstance(result, Calibration) and result.draft_step for result in results)
    monkeypatch.setattr(calibration, "_READING_SECONDS", 0.0)
    first, second = calibrate(other, None, KV, lengths=(256, 2048), kept=store(file))
    assert lengths_of([first, second]) == [64, 2048]
    assert isinstance(second, LeftOut)
    assert re.fullmatch(r"reading so many takes about \d+ s here", second.reason)


def test_a_target_that_cannot_take_tokens_back(pair: tuple[LoadedModel, LoadedModel], file: Path) -> None:
    module = external("gemma3_text", sliding_window=8, sliding_window_pattern=2, query_pre_attn_scalar=8).module
    obstinate = replace(pair[0], name="gemma", module=module)
    with pytest.raises(BadConfig, match=r"nothing to measure: gemma .*RotatingKVCache.*always decoded plainly"):
        list(calibrate(obstinate, None, KV, kept=store(file)))


def test_an_interrupt_keeps_what_was_measured(
    pair: tuple[LoadedModel, LoadedModel], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _interrupt_the_second(monkeypatch)
    results = calibrate(*pair, KV, kept=store(file))
    first = next(results)
    with pytest.raises(KeyboardInterrupt):
        next(results)
    assert same(known(Calibrations(*pair, KV, store(file))), first.costs())  # type: ignore[union-attr]


def _interrupt_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    measure, calls = measurement.measure, []

    def interrupting(*arguments: Any, **options: Any) -> Calibration:
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measure(*arguments, **options)

    monkeypatch.setattr(measurement, "measure", interrupting)


# The command


@pytest.fixture
def run(file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    kept = store(file)
    monkeypatch.setattr(calibration, "store", lambda: kept)

    def run_line(*arguments: Any) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["calibrate", *map(str, arguments)])
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return run_line


def test_tables_and_curve(run: Run, directories: tuple[Path, Path]) -> None:
    code, out, err = run("-m", directories[0], "-d", directories[1])
    assert (code, err) == (0, "")
    assert re.search(r"^ROWS +AT 256 +V +AT 2048 +V$", out, re.M)
    assert re.search(r"^1 +[\d.]+ +1\.00 +[\d.]+ +1\.00$", out, re.M)
    assert re.search(r"^4 +[\d.]+ +\d\.\d\d", out, re.M)
    assert re.search(r"^a step, each token waited for +[\d.]+ +[\d.]+$", out, re.M)
    assert re.search(r"^c, the better step in passes +[\d.]+ +[\d.]+$", out, re.M)
    assert "Computed from these costs, not measured" in out
    assert re.search(r"^90% +\d+ +\d\.\d\d +\d+ +\d\.\d\d$", out, re.M)
    assert "o 256 tokens, x 2048 tokens, - ideal" in out
    assert "\x1b" not in out


def test_json(run: Run, directories: tuple[Path, Path], file: Path) -> None:
    code, out, err = run("-m", directories[0], "-d", directories[1], "--kv", "int8", "--window", "100", "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert report["kv"] == {"storage": "int8", "draft_storage": "model", "window": 100, "sinks": None}
    assert (report["model"], report["draft"]) == tuple(map(str, directories))
    [first] = report["calibrations"]
    assert first["context_length"] == 256
    assert first["target"][0] == {"rows": 1, "seconds": first["target"][0]["seconds"], "V": 1.0}
    assert first["c"] > 0
    assert [entry["acceptance_rate"] for entry in first["computed"]] == [0.5, 0.6, 0.7, 0.8, 0.9]
    assert all(entry["speedup"] >= 1 for entry in first["computed"])
    assert (report["left_out"], report["complete"], report["filters"]) == ([], True, {})
    assert "storage" not in file.read_text()  # a key is no dump of settings
    assert "in int8" in file.read_text()


def test_a_model_of_the_catalogue_is_measured_with_its_filters(
    run: Run, directories: tuple[Path, Path], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = replace(catalog.entries()["demo"], sampling=Sampling(temperature=0.7, top_k=20, top_p=0.8))
    source = loader.Source("demo", directories[0], entry)
    monkeypatch.setattr(loader, "resolve", lambda name: source)
    _, out, _ = run("-m", "demo", "-d", "none")
    assert out.splitlines()[0].endswith(", top_k 20, top_p 0.8")
    assert "INCOMPLETE" not in out
    passes = json.loads(file.read_text())["machines"]["M1"]["passes"]
    assert sum("drawn by top_k and top_p from" in key for key in passes) == 1
    assert sum("near" in key for key in passes) == 2


def test_without_a_draft(run: Run, directories: tuple[Path, Path]) -> None:
    _, out, _ = run("-m", directories[0], "-d", "none")
    assert "DRAFT" not in out
    assert "for drafts that cost nothing, as by lookup" in " ".join(out.split())
    shown = out.replace(str(directories[0]), "target")  # however long the folder's name
    assert max(len(line) for line in shown.splitlines()) <= 100


def test_an_option_of_a_draft_without_one(run: Run, directories: tuple[Path, Path]) -> None:
    code, _, err = run("-m", directories[0], "--draft-kv", "int8")
    assert code == 0
    assert err == "note: no draft model is loaded, so --draft-kv does nothing; name one with --draft\n"


def test_a_folder_that_cannot_be_written_is_said_once_and_figures_are_shown(
    run: Run, directories: tuple[Path, Path], file: Path
) -> None:
    file.parent.write_text("a file, not a folder")
    code, out, err = run("-m", directories[0])
    assert code == 0
    assert err.startswith("note: what was found out about this machine cannot be kept")
    assert err.count("\n") == 1
    assert "ROWS" in out


def test_a_broken_file_is_made_anew(run: Run, directories: tuple[Path, Path], file: Path) -> None:
    file.parent.mkdir()
    file.write_text("{")
    code, _, err = run("-m", directories[0])
    assert code == 0
    assert err == f"note: {file} is broken: what passes cost on this machine is measured again\n"
    assert json.loads(file.read_text())["machines"]["M1"]["passes"]


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_control_c_shows_what_was_measured(
    run: Run, directories: tuple[Path, Path], file: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    _interrupt_the_second(monkeypatch)
    code, out, err = run("-m", directories[0], *more)
    assert (code, err) == (130, "")
    if more:
        assert [entry["context_length"] for entry in json.loads(out)["calibrations"]] == [256]
        assert json.loads(out)["complete"] is False
    else:
        assert out.splitlines()[1] == "INCOMPLETE: longer texts are missing"
        assert re.search(r"^ROWS +AT 256 +V$", out, re.M)
    assert len(json.loads(file.read_text())["machines"]["M1"]["passes"]) == 1


def test_what_is_left_out_is_said(run: Run, directories: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def check(tokens: int, needed: int) -> None:
        raise DoesNotFit("keys and values need 9 GB more and 1 GB is available; give a shorter prompt.")

    monkeypatch.setattr(calibration, "check_cache_fits", check)
    code, out, _ = run("-m", directories[0])
    assert code == 0
    assert out.endswith("\n256 tokens and more are left out: keys and values need 9 GB more and 1 GB is available\n")


@pytest.mark.parametrize(("arguments", "parts"), [
    ([], ["no model", "--model demo"]), (["-m", "x", "-d", ""], ["--draft '' is empty"]),
    (["-m", "x", "--kv", "int4"], ["--kv is 'int4'"]), (["-m", "x", "--window", "8"], ["--window is 8"]),
    (["-m", "x", "--sinks", "8"], ["--sinks", "--window 4096"]), (["-m", "no/such/directory"], ["no/such/directory"]),
    (["extra"], ["extra", "mlx-spec calibrate --help"]),
])  # fmt: skip
def test_mistakes(run: Run, arguments: list[str], parts: list[str]) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    for part in parts:
        assert part in err


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal(run: Run, directories: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = _Terminal(), _Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")  # too few for a curve, which then runs on rather than breaks
    monkeypatch.delenv("NO_COLOR", raising=False)
    run("-m", directories[0], "-d", directories[1])
    assert "\x1b[1mROWS" in out.getvalue()
    assert re.search(r"^A target pass over M rows, by tokens in context:$", out.getvalue(), re.M)
    assert re.search(r"\x1b\[1;32mo\x1b\[0m", out.getvalue())
    plain = re.sub(r"\x1b\[[\d;]*m", "", out.getvalue())
    assert re.search(r"^ {10}1   2   3   4 .* rows$", plain, re.M)
    drawn = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", err.getvalue())
    assert "measuring" in drawn
    assert "measuring" not in plain


# What is computed and drawn

PUBLISHED = Costs(tuple(zip((1, 3, 5, 8, 12, 16), (75.9, 84.8, 108, 168, 241, 296), strict=True)), 0.03 * 75.9)


def _speedup(acceptance: float, k: int, draft: float) -> float:
    """The formula."""
    return sum(acceptance**i for i in range(k + 1)) / (PUBLISHED.verify(k + 1) + k * draft)


def test_the_speedup_is_the_formula() -> None:
    assert _speedup(0.7, 2, 0.03) == pytest.approx((1 - 0.7**3) / (1 - 0.7) / (84.8 / 75.9 + 2 * 0.03))
    for acceptance, draft in ((0.7, 0.03), (1.0, 0.0), (0.3, 0.03)):
        speedups = PUBLISHED.speedups([acceptance**k for k in range(1, 16)], draft)
        assert speedups == pytest.approx([_speedup(acceptance, k, draft) for k in range(1, 16)])


@pytest.mark.parametrize(("acceptance", "gain"), [(0.6, 1.66), (0.7, 1.86), (0.8, 2.14), (0.9, 2.60)])
def test_the_best_k_of_a_published_curve(acceptance: float, gain: float) -> None:
    k, speedup = calibration_view.best(PUBLISHED, acceptance, PUBLISHED.draft)
    assert speedup == pytest.approx(gain, rel=0.025)  # rows that were not published are interpolated
    others = [_speedup(acceptance, other, PUBLISHED.draft) for other in range(16)]
    assert speedup == pytest.approx(max(others)) == others[k]
    assert 2 <= k <= 4


def test_where_drafting_does_not_pay() -> None:
    assert calibration_view.best(Costs(((1, 1.0), (16, 16.0)), 1.0), 0.9, 1.0) == (0, 1.0)
    assert calibration_view.best(Costs(((1, 1.0),), None), 0.9, 0.0) == (0, 1.0)
    assert calibration_view.best(Costs(((1, 1.0), (16, 1.0)), None), 1.0, 0.0) == (15, 16.0)


def test_the_curve() -> None:
    lines = calibration_view.curve([[(1, 1.0), (2, 1.5), (3, 2.0)], [(1, 1.0), (2, 1.0), (4, 3.0)]])
    assert lines[0] == "  3.0 |               x "
    assert lines[5] == "      |           o     "
    assert lines[8] == "  1.4 |       o         "
    assert lines[10] == "  1.0 |---o---x---------"
    assert lines[11] == "      +-----------------"
    assert lines[12] == "          1   2   3   4  rows"
    assert len(lines) == 13
    flat = calibration_view.curve([[(1, 1.0)]])
    assert flat[0].startswith("  2.0 |")
    assert flat[10] == "  1.0 |---o-"


def test_nothing_is_logged_when_all_is_well(
    pair: tuple[LoadedModel, LoadedModel], file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        list(calibrate(*pair, KV, kept=store(file)))
    assert not caplog.records
