"""The benchmark against a stand-in for the runtime whose speeds are known, and once on tiny models."""

from __future__ import annotations

import builtins
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from directories import write_model
from fake_speeds import DRAFT_BYTES, SPEEDS, TARGET_BYTES, FakeLLM, fake_load, statistics

import mlx_spec
from mlx_spec.cli.bench import plot, view
from mlx_spec.cli.bench.figures import figures_of
from mlx_spec.cli.bench.prompt_file import of_kinds, read_prompts
from mlx_spec.cli.bench.prompts import KINDS, PROMPTS, WARM_UP, BenchPrompt
from mlx_spec.cli.bench.report import Report
from mlx_spec.cli.bench.runs import Run, check_prompts, measure, warm_up, ways_of
from mlx_spec.cli.main import main
from mlx_spec.errors import BadConfig, MLXSpecError
from mlx_spec.llm.completion import Completion
from mlx_spec.llm.statistics import Drafted
from mlx_spec.machine.bandwidth import Bandwidth, measure_bandwidth
from mlx_spec.settings import KVConfig, Sampling, Speculation

TEXTS = [BenchPrompt("code", "a", "text a"), BenchPrompt("code", "b", "text b"), BenchPrompt("chat", "c", "text c")]


def measured(llm: Any, prompts: list[BenchPrompt] = TEXTS, repeats: int = 1) -> list[Run]:
    return list(measure(llm, prompts, ways_of(llm, [3]), repeats=repeats, max_tokens=20, sampling=llm.sampling))


# Prompts


def test_every_kind_has_prompts_with_enough_to_quote() -> None:
    for kind in KINDS:
        assert len([prompt for prompt in PROMPTS if prompt.kind == kind]) >= 2
    assert len({prompt.name for prompt in PROMPTS}) == len({prompt.text for prompt in PROMPTS}) == len(PROMPTS)
    assert {prompt.kind for prompt in PROMPTS} == set(KINDS)
    for prompt in PROMPTS:
        if prompt.kind == "summary":
            assert len(prompt.text.split()) > 300
        if prompt.kind == "edit":
            assert len(prompt.text.splitlines()) > 25
            assert prompt.text.count("```") == 2
    assert WARM_UP not in {prompt.text for prompt in PROMPTS}


def test_the_code_to_edit_runs() -> None:
    [source] = re.findall(r"```python\n(.*?)```", next(p.text for p in PROMPTS if p.name == "edit-1"), re.DOTALL)
    names: dict[str, Any] = {"__name__": "shop"}
    sys.modules["shop"] = type(sys)("shop")
    exec(compile(source, "shop", "exec"), names)
    basket = names["Basket"](discount=0.5)
    basket.add("tea", 2.0)
    basket.add("tea", 2.0, 2)
    assert basket.receipt() == "3 x tea: 6.00\nTotal: 3.00"
    del sys.modules["shop"]


def test_a_file_of_prompts(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = ['\ufeff"one\u2028two"\r', "", '{"kind": "code", "prompt": "three\\n"}', '{"prompt": "vier Grüße"}']
    file.write_bytes("\n".join(lines).encode())
    assert read_prompts(str(file)) == [
        BenchPrompt("own", "line 1", "one\u2028two"), BenchPrompt("code", "line 3", "three\n"),
        BenchPrompt("own", "line 4", "vier Grüße"),
    ]  # fmt: skip


@pytest.mark.parametrize(("line", "parts"), [
    ("plain words", ["'plain words' is not JSON"]),
    ('"open', ["not JSON"]),
    ("[" * 100_000, ["not JSON"]),
    ("9" * 5000, ["not JSON"]),
    ("5", ["5 is not a text"]),
    ("null", ["null is not a text"]),
    ('["a"]', ['["a"] is not a text']),
    ('""', ["the prompt is empty"]),
    ('{"prompt": " "}', ["the prompt is empty"]),
    ('{"kind": "code"}', ['no "prompt"']),
    ("{}", ['no "prompt"']),
    ('{"promt": "x"}', ["the key 'promt' is not known"]),
    ('{"prompt": 5}', ["5 is not a text"]),
    ('{"kind": 3, "prompt": "x"}', ['"kind" is 3']),
    ('{"kind": "", "prompt": "x"}', ["\"kind\" is ''"]),
    ('{"kind": "a,b", "prompt": "x"}', ["\"kind\" is 'a,b'"]),
    ('{"kind": "a\\nb", "prompt": "x"}', ['"kind" is']),
    ('"half \\ud800"', ["half of a surrogate pair"]),
])  # fmt: skip
def test_bad_lines_are_named(tmp_path: Path, line: str, parts: list[str]) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'"good"\n\n{line}\n"good"\n', encoding="utf-8")
    with pytest.raises(BadConfig) as caught:
        read_prompts(str(file))
    message = str(caught.value)
    for part in [*parts, "prompts.jsonl', line 3:", 'each line is a JSON string, or an object such as {"kind"']:
        assert part in message
    assert "\n" not in message
    assert len(message) < 600


def test_all_bad_lines_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "p"
    file.write_text("a\n" * 8, encoding="utf-8")
    with pytest.raises(BadConfig, match=r"line 1: .*\(as bad: lines 2, 3, 4, 5, 6 \.\.\.\);"):
        read_prompts(str(file))
    file.write_text('a\n"good"\nb\n', encoding="utf-8")
    with pytest.raises(BadConfig, match=r"line 1: .*\(as bad: line 3\);"):
        read_prompts(str(file))


def test_files_that_are_no_prompts(tmp_path: Path) -> None:
    for data, part in ((b"", "has no prompts; each line"), (b"\n \n", "has no prompts"),
                       (b'"a"\n"h\xe9"', "line 2 is not UTF-8: byte 0xe9")):  # fmt: skip
        (tmp_path / "p").write_bytes(data)
        with pytest.raises(BadConfig, match=part):
            read_prompts(str(tmp_path / "p"))
    for name, part in ((str(tmp_path), "Is a directory"), ("absent", "No such file"), ("a\0b", "null byte")):
        with pytest.raises(BadConfig, match=rf"cannot read .*{part}.*--prompts"):
            read_prompts(name)


def test_kinds_are_chosen_by_name() -> None:
    assert [prompt.name for prompt in of_kinds(TEXTS, ["chat", "code"])] == ["a", "b", "c"]
    assert [prompt.name for prompt in of_kinds(TEXTS, ["chat"])] == ["c"]
    with pytest.raises(BadConfig, match="'prose'; the kinds are code, chat;"):
        of_kinds(TEXTS, ["chat", "prose"])


# Runs


def test_ways_with_and_without_a_draft() -> None:
    llm: Any = FakeLLM("pair", None)
    assert {way.name: way.speculation for way in ways_of(llm, [3, 5])} == {
        "plain": Speculation(0, "none", "token", 9), "K=3": Speculation(3, "model", "token", 9),
        "K=5": Speculation(5, "model", "token", 9), "auto": Speculation("auto", "model", "token", 9),
        "lookup": Speculation("auto", "lookup", "token", 9), "hybrid": Speculation("auto", "hybrid", "token", 9),
    }  # fmt: skip
    alone: Any = FakeLLM("alone", None)
    assert [way.name for way in ways_of(alone, [3])] == ["plain", "lookup"]


def test_all_ways_take_turns_in_changing_order() -> None:
    llm = FakeLLM("pair", None)
    runs, calls = measured(llm, repeats=2), llm.calls
    names = ["plain", "K=3", "auto", "lookup", "hybrid"]
    for turn, (repeat, prompt) in enumerate((repeat, prompt) for repeat in range(2) for prompt in TEXTS):
        part = calls[turn * 5 : turn * 5 + 5]
        first = turn % 5
        assert [call["way"] for call in part] == names[first:] + names[:first]
        assert {(call["prompt"], call["max_tokens"]) for call in part} == {(prompt.text, 20)}
        assert all(call["sampling"] == replace(llm.sampling, seed=repeat) for call in part)
        assert {(run.prompt, run.kind, run.repeat) for run in runs[turn * 5 : turn * 5 + 5]} == {
            (prompt.name, prompt.kind, repeat)
        }
    assert [run.way for run in runs] == [call["way"] for call in calls]


@pytest.mark.parametrize(("name", "real"), [
    ("pair", ["plain", "K=3", "auto", "lookup", "hybrid"]), ("badly", ["plain", "lookup"]), ("plainly", ["plain"]),
])  # fmt: skip
def test_warming_up_tells_which_ways_are_what_they_are_called(name: str, real: list[str]) -> None:
    llm: Any = FakeLLM(name, None)
    ways = ways_of(llm, [3])
    told: list[tuple[str, int, int]] = []
    warm, others = warm_up(llm, ways, sampling=llm.sampling, progress=lambda *a: told.append(a))
    assert [way.name for way in warm] == real
    assert others == [way for way in ways if way not in warm]
    assert [call["way"] for call in llm.calls] == [way.name for way in ways]
    assert {call["prompt"] for call in llm.calls} == {WARM_UP}
    assert told == [(f"warming up, {way.name}", done, 5) for done, way in enumerate(ways)]


def test_what_was_measured_before_an_interrupt_is_kept() -> None:
    llm: Any = FakeLLM("pair", None)
    runs: list[Run] = []
    prompts = [TEXTS[0], BenchPrompt("code", "x", "stop here")]
    measuring = measure(llm, prompts, ways_of(llm, [3]), repeats=1, max_tokens=5, sampling=llm.sampling)
    with pytest.raises(KeyboardInterrupt):
        runs.extend(measuring)  # keeps what came before the exception
    assert [run.way for run in runs] == ["plain", "K=3", "auto", "lookup", "hybrid", "K=3", "auto"]


def test_a_prompt_that_cannot_be_asked_is_named_before_anything_runs() -> None:
    llm: Any = FakeLLM("pair", None)
    with pytest.raises(BadConfig, match=r"^prompt line 7 \(own\): the prompt has 9 tokens"):
        check_prompts(llm, [TEXTS[0], BenchPrompt("own", "line 7", "endless")], 5)
    assert llm.calls == []


def test_progress_counts_to_the_end() -> None:
    llm: Any = FakeLLM("alone", None)
    told: list[tuple[str, int, int]] = []
    ways = ways_of(llm, [])
    list(measure(llm, TEXTS, ways, repeats=1, max_tokens=5, sampling=llm.sampling, progress=lambda *a: told.append(a)))
    assert told[:2] == [("a, plain", 0, 6), ("a, lookup", 1, 6)]
    assert told[-1] == ("done", 6, 6)
    assert [done for _, done, _ in told] == list(range(7))


# Figures


def run_of(way: str, prompt: str = "a", repeat: int = 0, kind: str = "code", **figures: Any) -> Run:
    return Run(kind, prompt, repeat, way, statistics(**figures))


def test_drift_cancels() -> None:
    llm = FakeLLM("pair", None)
    prompts = [BenchPrompt("code", f"p{index}", "text") for index in range(10)]
    figures = {entry.way: entry for entry in figures_of(measured(llm, prompts), *llm.bytes_per_pass)}
    for way, entry in figures.items():
        assert entry.ratio_to_plain is not None
        assert entry.ratio_to_plain.middle == pytest.approx(SPEEDS[way] / SPEEDS["plain"], rel=2e-4)
        assert entry.ratio_to_plain.count == entry.runs == 10
    # Without the turns it would not.
    assert figures["hybrid"].ratio_to_plain is not None
    assert figures["hybrid"].ratio_to_plain.least < 2.995


def test_ways_are_compared_over_the_same_prompts_after_an_interruption() -> None:
    runs = [run_of(way, prompt, seconds=seconds) for prompt, way, seconds in (
        ("a", "plain", 1.0), ("a", "auto", 1.0), ("a", "hybrid", 1.0), ("b", "plain", 4.0), ("b", "auto", 1.0))]
    for entry in figures_of(runs, 1, 1):
        assert entry.runs == 1
        assert entry.ratio_to_plain is not None
        assert (entry.ratio_to_plain.middle, entry.ratio_to_plain.count) == (1.0, 1)
    # With one turn there is nothing else to show.
    assert [entry.runs for entry in figures_of(runs[3:], 1, 1)] == [1, 1]


def test_a_mixture_of_experts_has_no_bytes_per_pass() -> None:
    for target, draft in ((None, 1), (1, None)):
        assert figures_of([run_of("plain")], target, draft)[0].weights_read_per_second is None


def test_the_heading_says_how_keys_and_values_were_kept() -> None:
    llm: Any = FakeLLM("pair", None)
    assert report_of(llm, []).heading == "pair with small, temperature 0, answers of 20 tokens at most"
    kept = report_of(llm, [], kv=KVConfig("int8", window=4096))
    assert kept.heading == (
        "pair with small, temperature 0, storage int8, window 4096, answers of 20 tokens at most")


def test_ratios_are_geometric_over_prompts_and_medians_over_repeats() -> None:
    runs = []
    for repeat, (plain, ours) in enumerate(((1.0, 0.5), (2.0, 1.0), (1.0, 100.0))):  # twice as fast, and once disturbed
        runs += [run_of("plain", "a", repeat, seconds=plain), run_of("auto", "a", repeat, seconds=ours)]
    runs += [run_of("plain", "b", kind="chat", seconds=1.0), run_of("auto", "b", kind="chat", seconds=2.0)]
    plain, auto = figures_of(runs, 1, 1)
    assert auto.ratio_to_plain is not None
    assert (auto.ratio_to_plain.middle, auto.ratio_to_plain.count) == (pytest.approx(1.0), 2)
    assert (auto.ratio_to_plain.least, auto.ratio_to_plain.most) == (pytest.approx(0.5), pytest.approx(2.0))
    assert {kind: spread.middle for kind, spread in auto.ratio_to_plain_by_kind.items()} == {
        "code": pytest.approx(2.0), "chat": pytest.approx(0.5)}  # fmt: skip
    assert plain.ratio_to_plain is not None
    assert (plain.ratio_to_plain.least, plain.ratio_to_plain.most) == (1.0, 1.0)
    assert plain.tokens_per_second is not None
    assert (plain.tokens_per_second.middle, plain.tokens_per_second.least, plain.tokens_per_second.most) == (20, 10, 20)
    assert plain.repeat_spread == pytest.approx((20 - 10) / 20)
    assert figures_of(runs[-2:], 1, 1)[0].repeat_spread is None


def test_tokens_passes_and_positions_are_added_up() -> None:
    runs = [
        run_of("hybrid", "a", tokens=30, passes=10, seconds=2, parked=1, positions=[(8, 6), (6, 3)],
               by_drafter={"model": Drafted(5, 20, 12), "lookup": Drafted(3, 30, 8)}),
        run_of("hybrid", "b", tokens=10, passes=10, seconds=3, parked=4, positions=[(2, 1), (0, 0), (0, 0)],
               by_drafter={"lookup": Drafted(2, 2, 1)}),
    ]  # fmt: skip
    [figures] = figures_of(runs, 100, 7)
    assert figures.tokens_per_pass == 2.0
    assert figures.drafted_per_pass == 52 / 20
    assert figures.acceptance_rate == 21 / 52
    assert figures.acceptance_by_position == [0.7, 0.5]
    assert figures.parked == 0.25
    assert figures.weights_read_per_second == (100 * 20 + 7 * 20) / 5
    assert figures.ratio_to_plain is None
    assert figures.ratio_to_plain_by_kind == {}


def test_answers_of_nothing_divide_by_nothing() -> None:
    for seconds in (0.0, 1.0):
        runs = [run_of(way, tokens=0, passes=0, seconds=seconds) for way in ("plain", "auto")]
        for figures in figures_of(runs, 1, 1):
            shown = asdict(figures)
            assert [shown[name] for name in ("tokens_per_second", "ratio_to_plain", "tokens_per_pass", "parked",
                                             "acceptance_rate", "repeat_spread")] == [None] * 6  # fmt: skip
    assert figures_of([], 1, 1) == []


def test_plain_stands_first_though_it_was_interrupted() -> None:
    runs = [run_of("auto"), run_of("lookup"), run_of("plain", "b")]
    figures = figures_of(runs, 1, 1)
    assert [entry.way for entry in figures] == ["plain", "auto", "lookup"]
    assert figures[1].ratio_to_plain is None
    assert figures[1].tokens_per_second is not None


def test_bandwidth_is_that_of_a_memory() -> None:
    bandwidth = measure_bandwidth(2**26)
    assert bandwidth.array_bytes == 2**26
    assert 1e8 < bandwidth.bytes_per_second < 1e13
    assert bandwidth.how == ("adding up an array of 0.067 GB of 32-bit whole numbers with MLX, the fastest of 5 passes")


def test_bandwidth_takes_no_memory_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_spec.machine.bandwidth.available_memory", lambda: 2**27)
    assert measure_bandwidth().array_bytes == 2**25
    monkeypatch.setattr("mlx_spec.machine.bandwidth.available_memory", lambda: 0)
    assert measure_bandwidth().array_bytes == 2**24


# What is shown


def report_of(llm: Any, runs: list[Run], planned: int | None = None, **changes: Any) -> Report:
    return Report(model=llm.name, draft=llm.draft_name, sampling=Sampling(), max_tokens=20, repeats=1, prompts=3,
                  planned_runs=len(runs) if planned is None else planned, bytes_per_pass=llm.bytes_per_pass,
                  bandwidth=Bandwidth(400e9, 2**30), runs=runs, **{"kv": KVConfig(), **changes})  # fmt: skip


def shown(capsys: pytest.CaptureFixture[str], report: Report) -> str:
    view.show(report)
    return capsys.readouterr().out


def test_tables_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM("pair", None)
    text = shown(capsys, report_of(llm, measured(llm)))
    lines = text.splitlines()
    assert lines[:2] == ["pair with small, temperature 0, answers of 20 tokens at most", "3 prompts"]
    rows = [line.split() for line in lines]
    assert rows[2] == ["WAY", "TOK/S", "RANGE", "TO", "PLAIN", "RANGE", "TOK/PASS", "ACCEPTED", "GB/S", "OF", "PEAK"]
    hybrid = rows[7]
    assert hybrid[0] == "hybrid"
    assert hybrid[3] == "3.00"
    assert hybrid[5:7] == ["1.00", "50%"]
    # 20 passes of 8 GB and 30 drafted tokens of 1 GB in 20 tokens' time at about 29.7 tok/s.
    assert float(hybrid[7]) == pytest.approx(190 / 20 * 29.6, rel=0.01)
    assert hybrid[8] == "71%"
    assert "400 GB/s that memory delivers here" in text
    assert "by kind" in text
    assert ["WAY", "code", "chat"] in rows
    assert ["WAY", "DRAFTED", "PARKED", "1", "2"] in rows
    assert ["auto", "1.50", "0%", "90%", "67%"] in rows
    assert ["lookup", "0.00", "0%", "-", "-"] in rows
    assert max(len(line) for line in lines) <= 100


def test_without_a_draft_only_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM("alone", None)
    text = shown(capsys, report_of(llm, measured(llm)))
    assert text.startswith("alone, temperature 0,")
    assert [line.split()[0] for line in text.splitlines() if line.startswith(("plain", "lookup"))].count("plain") == 1
    assert "hybrid" not in text


def test_an_incomplete_report_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM("pair", None)
    report = report_of(llm, measured(llm)[:1], planned=15)
    assert "INCOMPLETE: 1 of 15 runs (3 prompts)" in shown(capsys, report)
    assert report.as_dict({})["complete"] is False
    assert "Not in the figures" not in shown(capsys, report)
    runs = measured(llm)
    turn = len(runs) // 3
    for more, said in ((1, "1 run of"), (2, "2 runs of")):
        text = " ".join(shown(capsys, report_of(llm, runs[: turn + more], planned=15)).split())
        assert f"Not in the figures: {said} the prompt at which not every way had its turn." in text


class _Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_tables_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM("pair", None)
    report = report_of(llm, measured(llm))
    plain = shown(capsys, report)
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.delenv("NO_COLOR", raising=False)
    view.show(report)
    drawn = terminal.getvalue()
    assert "\x1b[1m" in drawn
    assert "─" in drawn
    # The same figures, none cut off in a narrow window.
    words = re.sub(r"\x1b\[[\d;]*m|─", "", drawn).split()
    assert words == plain.split()
    # Prose is broken between words.
    lines = re.sub(r"\x1b\[[\d;]*m", "", drawn).splitlines()
    assert lines[:2] == ["pair with small, temperature 0, answers", "of 20 tokens at most"]
    assert "GB/S: weights read while decoding. OF" in lines


def _without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def importing(name: str, *arguments: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", importing)


def test_a_plot_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for index, name in enumerate(("pair", "alone")):
        llm = FakeLLM(name, None)
        file = tmp_path / f"{index}.PNG"
        plot.check_plot(str(file))
        assert plot.draw(report_of(llm, measured(llm)), str(file))
        data = file.read_bytes()
        assert data.startswith(b"\x89PNG")
        assert len(data) > 10_000


def test_a_plot_of_nothing_is_none(tmp_path: Path) -> None:
    llm = FakeLLM("pair", None)
    assert not plot.draw(report_of(llm, measured(llm)[:1], planned=15), str(tmp_path / "p.png"))
    assert list(tmp_path.iterdir()) == []


def test_long_names_of_kinds_lean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.axes import Axes

    drawn: list[tuple[list[str], int]] = []
    monkeypatch.setattr(
        Axes, "set_xticks", lambda self, ticks, labels, rotation=0, ha="": drawn.append((labels, rotation))
    )
    for kinds in (KINDS, ("code", "a rather long name of a kind", "another name of a kind")):
        llm = FakeLLM("pair", None)
        runs = measured(llm, [BenchPrompt(kind, kind, "text") for kind in kinds])
        assert plot.draw(report_of(llm, runs), str(tmp_path / "p.png"))
    assert drawn[0] == (["all", *KINDS], 0)
    assert drawn[1] == (["all", "code", "a rather long name of a…", "another name of a kind"], 25)


def test_an_axis_of_tokens_counts_in_whole_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: figures.append(self))
    for positions in ([], [(4, 2)], [(4, 2), (2, 1)]):
        runs = [run_of("plain"), run_of("lookup", positions=positions)]
        assert plot.draw(report_of(FakeLLM("alone", None), runs), str(tmp_path / "p.png"))
    for figure in figures:
        low, high = figure.axes[1].get_xlim()
        assert [tick for tick in figure.axes[1].get_xticks() if low <= tick <= high] == [1, 2]


def test_plots_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "folder.png").mkdir()
    for name, part in (("p.pdf", "ends in .png"), ("p", "ends in .png"), ("absent/p.png", "no folder"),
                       ("folder.png", "which is a folder")):  # fmt: skip
        with pytest.raises(BadConfig, match=part):
            plot.check_plot(str(tmp_path / name))
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)  # whoever runs the tests may write all
        with pytest.raises(BadConfig, match="may not be written"):
            plot.check_plot(str(tmp_path / "p.png"))
    llm = FakeLLM("pair", None)
    with pytest.raises(MLXSpecError, match="cannot write the plot"):
        plot.draw(report_of(llm, measured(llm)), str(tmp_path / "folder.png"))


# The command


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs `mlx-spec bench` on the stand-in; gives exit code, stdout, stderr."""
    monkeypatch.setattr(mlx_spec, "load", fake_load)
    monkeypatch.setattr("mlx_spec.machine.bandwidth.measure_bandwidth", lambda: Bandwidth(400e9, 2**30))
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    return lambda *arguments: _run(capsys, *arguments)


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *arguments])
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


def _file(folder: Path, *texts: str) -> str:
    (folder / "prompts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts), encoding="utf-8")
    return str(folder / "prompts.jsonl")


def test_the_command_measures_the_built_in_prompts(run: Any) -> None:
    code, out, err = run("-m", "pair", "--repeats", "2")
    assert (code, err) == (0, "note: the same note each time\n")
    assert out.splitlines()[1] == "12 prompts, 2 times each"
    assert out.endswith("\n")
    assert not out.endswith("\n\n")
    assert re.search(r"Repeats of one prompt lie \d+% apart: the median", out)


def test_json_holds_every_run(run: Any, tmp_path: Path) -> None:
    code, out, _ = run("-m", "pair", "--json", "--prompts", _file(tmp_path, "one", "two"), "-k", "3", "-k", "5",
                       "-k", "3", "-n", "20", "-t", "0.5", "--repeats", "2")  # fmt: skip
    assert code == 0
    found = json.loads(out)
    assert found["complete"] is True
    assert (found["model"], found["draft"], found["sampling"]["temperature"]) == ("pair", "small", 0.5)
    assert (found["sampling"]["top_p"], found["kv"]["storage"]) == (0.9, "int8")
    assert (found["max_tokens"], found["repeats"], found["prompts"], found["planned_runs"]) == (20, 2, 2, 24)
    assert found["bytes_per_pass"] == {"target": TARGET_BYTES, "draft": DRAFT_BYTES}
    assert found["bandwidth"]["bytes_per_second"] == 400e9
    assert found["bandwidth"]["how"].startswith("adding up an array of 1.1 GB")
    assert found["machine"]["mlx"].startswith("0.")
    assert [way["way"] for way in found["ways"]] == ["plain", "K=3", "K=5", "auto", "lookup", "hybrid"]
    assert len(found["runs"]) == 24
    assert found["ways"][1]["acceptance_by_position"] == [0.9, pytest.approx(2 / 3)]
    assert found["ways"][0]["share_of_bandwidth"] == pytest.approx(
        found["ways"][0]["weights_read_per_second"] / 400e9)  # fmt: skip
    first = found["runs"][0]
    assert (first["kind"], first["prompt"], first["repeat"], first["way"]) == ("own", "line 1", 0, "plain")
    assert first["seed"] == 0
    assert found["runs"][-1]["seed"] == 1
    assert str(tmp_path) not in out


def test_ways_that_would_be_others_under_their_names_are_left_out(run: Any) -> None:
    code, out, err = run("-m", "badly", "--kinds", "code", "--json")
    assert code == 0
    found = json.loads(out)
    assert ([way["way"] for way in found["ways"]], found["complete"], found["planned_runs"]) == (
        ["plain", "lookup"], True, 4)  # fmt: skip
    assert "note: left out, since they would not draft so here: K=3, auto, hybrid\n" in err
    code, out, err = run("-m", "plainly", "--kinds", "code")
    assert code == 0
    assert "note: left out, since they would not draft so here: K=3, auto, lookup, hybrid\n" in err
    assert [line.split()[0] for line in out.splitlines()[2:4]] == ["WAY", "plain"]


def test_without_a_draft(run: Any) -> None:
    code, out, err = run("-m", "pair", "-d", "none", "-k", "4", "--kinds", "edit,chat", "-n", "5")
    assert code == 0
    assert err.startswith("note: no draft model is loaded, so --draft-tokens does nothing; name one with --draft\n"
                          "note: the same note each time\n")  # fmt: skip
    _, _, err = run("-m", "pair", "-d", "none", "--draft-kv", "int8", "--kinds", "code")
    assert err.startswith("note: no draft model is loaded, so --draft-kv does nothing; name one with --draft\n")
    assert out.splitlines()[1] == "4 prompts"
    assert "K=4" not in out
    assert "GB/S" in out


def test_the_plot_is_written_beside_the_tables(run: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "speed.png"
    code, out, err = run("-m", "pair", "--kinds", "code", "--plot", str(file))
    assert code == 0
    assert out
    assert file.read_bytes().startswith(b"\x89PNG")
    assert err.endswith(f"written: {file}\n")


@pytest.mark.parametrize(("text", "code", "line"), [
    ("stop here", 130, ""), ("fail here", 1, "error: the model's logits are no numbers.\n"),
])  # fmt: skip
def test_what_was_measured_is_shown_when_it_ends_early(
    run: Any, tmp_path: Path, text: str, code: int, line: str
) -> None:
    file = _file(tmp_path, "one", text)
    found = run("-m", "pair", "--prompts", file)
    assert (found[0], found[2]) == (code, "note: the same note each time\n" + line)
    assert "INCOMPLETE: 7 of 10 runs (2 prompts)" in found[1]
    found = run("-m", "pair", "--prompts", file, "--json", "--plot", str(tmp_path / "p.png"))
    assert found[0] == code
    answer = json.loads(found[1])
    assert answer["complete"] is False
    assert len(answer["runs"]) == 7
    assert (tmp_path / "p.png").exists()


def test_interrupted_before_anything_was_measured(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> Completion:
        raise KeyboardInterrupt

    monkeypatch.setattr(FakeLLM, "generate", interrupted)
    assert run("-m", "pair") == (130, "", "")
    code, out, err = run("-m", "pair", "--json", "--plot", str(tmp_path / "p.png"))
    assert code == 130
    assert json.loads(out)["complete"] is False
    assert json.loads(out)["runs"] == []
    assert err == f"note: nothing to draw yet, so {tmp_path / 'p.png'} was not written\n"


_PROGRAM = """
import fake_speeds, mlx_spec
from mlx_spec.cli.main import main
from mlx_spec.machine import bandwidth
mlx_spec.load = fake_speeds.fake_load
bandwidth.measure_bandwidth = lambda: bandwidth.Bandwidth(400e9, 2**30)
main()
"""


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("more", [[], ["--json"]])
def test_control_c_and_termination(tmp_path: Path, more: list[str], sent: signal.Signals, code: int) -> None:
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    arguments = ["bench", "-m", "pair", "--prompts", _file(tmp_path, "one", "hang here"), *more]
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, *arguments],
        env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    while process.stderr.readline() != b"ready\n":
        assert process.poll() is None
    process.send_signal(sent)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (code, b"")
    if more:
        assert json.loads(out)["complete"] is False
    else:
        assert b"INCOMPLETE: 7 of 10 runs" in out


@pytest.mark.parametrize(("arguments", "parts"), [
    ([], ["no model", "--model demo"]),
    (["-m", "pair", "-d", ""], ["--draft '' is empty"]),
    (["-m", "pair", "--repeats", "0"], ["--repeats is 0", "1 or more"]),
    (["-m", "pair", "--repeats", "few"], ["'few'", "mlx-spec bench --help"]),
    (["-m", "pair", "-n", "0"], ["--max-tokens is 0"]),
    (["-m", "pair", "-k", "0"], ["--draft-tokens is 0", "1 to 64"]),
    (["-m", "pair", "-k", "65"], ["--draft-tokens is 65"]),
    (["-m", "pair", "-t", "-1"], ["--temperature is -1"]),
    (["-m", "pair", "--kinds", "prose"], ["'prose'", "code, edit, json, summary, chat, reasoning"]),
    (["-m", "pair", "--kinds", "code,"], ["'code,'", "empty kind"]),
    (["-m", "pair", "--kinds", ""], ["empty kind"]),
    (["-m", "pair", "--prompts", "absent.jsonl"], ["'absent.jsonl'", "No such file"]),
    (["-m", "pair", "--plot", "p.jpg"], ["'p.jpg'", ".png"]),
    (["-m", "pair", "hello"], ["hello", "mlx-spec bench --help"]),
])  # fmt: skip
def test_mistakes_are_one_line_before_a_model_is_loaded(
    run: Any, monkeypatch: pytest.MonkeyPatch, arguments: list[str], parts: list[str]
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr(mlx_spec, "load", refuse)
    code, out, err = run(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ")
    for part in parts:
        assert part in err


def test_a_plot_needs_matplotlib(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _without_matplotlib(monkeypatch)
    monkeypatch.setattr(mlx_spec, "load", None)
    assert run("-m", "pair", "--plot", "p.png") == (
        2, "", "error: --plot needs matplotlib, which is not installed: pip install 'mlx-spec[plot]', or leave --plot "
        "out.\n")  # fmt: skip


def test_progress_is_drawn_on_a_terminal_only(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys, "stderr", terminal)
    run("-m", "pair", "--kinds", "code")
    assert "code-2, hybrid" in terminal.getvalue()
    assert "warming up, plain" in terminal.getvalue()


# Tiny models


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return str(write_model(folder / "target")), str(write_model(folder / "draft"))


def test_tiny_models(
    pair: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mlx_spec.machine.bandwidth.measure_bandwidth", lambda: measure_bandwidth(2**24))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    prompts = _file(tmp_path, "hello hello hello hello", "the hell")
    for draft, ways in ((pair[1], ["plain", "K=2", "auto", "lookup", "hybrid"]), ("none", ["plain", "lookup"])):
        code, out, err = _run(capsys, "-m", pair[0], "-d", draft, "--prompts", prompts, "-n", "12", "-k", "2", "--json")
        assert code == 0, err
        found = json.loads(out)
        assert [way["way"] for way in found["ways"]] == ways
        assert (found["model"], found["draft"]) == ("target", None if draft == "none" else "draft")
        by_way = {way["way"]: way for way in found["ways"]}
        assert by_way["plain"]["tokens_per_pass"] == 1
        assert by_way["plain"]["drafted_per_pass"] == 0
        assert by_way["plain"]["ratio_to_plain"]["middle"] == 1
        for way in found["ways"]:
            assert way["weights_read_per_second"] > 0
            assert 1 <= way["tokens_per_pass"] <= 16
        if draft != "none":
            assert by_way["K=2"]["drafted_per_pass"] > 1
            # The draft is the target.
            assert by_way["K=2"]["acceptance_by_position"] == [1.0, 1.0]
            assert by_way["K=2"]["tokens_per_pass"] > 2
            assert found["bytes_per_pass"]["draft"] == found["bytes_per_pass"]["target"] > 0
        # Greedy: whatever the way, each answer has the same length.
        for prompt in ("line 1", "line 2"):
            assert len({run["completion_tokens"] for run in found["runs"] if run["prompt"] == prompt}) == 1


def test_a_prompt_that_the_context_cannot_hold(
    pair: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = _run(capsys, "-m", pair[0], "-d", "none", "--prompts", _file(tmp_path, "hello", "x" * 5000))
    assert (code, out) == (2, "")
    assert err.startswith("error: prompt line 2 (own): the prompt has 5000 tokens")
