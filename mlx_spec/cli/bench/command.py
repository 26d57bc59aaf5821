"""`mlx-spec bench`: how fast each way of decoding is on this machine. Knows the options and what comes after what."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_spec.cli import console, options
from mlx_spec.cli.model_options import check_models, kv_config, load, note_no_draft
from mlx_spec.cli.options import OUTPUT, option
from mlx_spec.cli.outcome import Terminated, TracebackOption
from mlx_spec.cli.progress import progress
from mlx_spec.errors import BadConfig
from mlx_spec.settings import MOST_DRAFT_TOKENS, KVConfig, Sampling

if TYPE_CHECKING:
    from mlx_spec.cli.bench.prompts import BenchPrompt
    from mlx_spec.cli.bench.report import Report

_log = logging.getLogger("mlx_spec")

_PROMPTS, _RUNS = "Prompts", "Runs"
_TOKENS, _REPEATS, _K = 128, 1, 3
HELP = (
    "Measure how fast each way of decoding is: plain, a fixed number of drafted tokens, a number chosen for each pass, "
    "lookup, and hybrid.\n\n"
    "All ways take turns at each prompt, in changing order and with cold caches, so that they are compared fairly; "
    "without a draft model there are plain and lookup. Ctrl-C ends it and shows what was measured."
)


def _kinds(text: str) -> list[str]:
    kinds = [kind.strip() for kind in text.split(",")]
    if not all(kinds):
        raise typer.BadParameter(f"{text!r} has an empty kind; give kinds such as code,edit")
    return kinds


def bench(
    model: options.Model = None,
    draft: options.Draft = None,
    prompts: Annotated[str | None, option(
        "--prompts", panel=_PROMPTS, metavar="FILE",
        help='Take the prompts of a file: JSON Lines, each a string or {"kind": "code", "prompt": "..."}. '
        "Default: the built-in ones, two of each kind.")] = None,
    kinds: Annotated[Any, option(
        "--kinds", panel=_PROMPTS, metavar="KINDS", parser=_kinds,
        help="Only prompts of these kinds, such as code,edit. Built in are code, edit, json, summary, chat and "
        "reasoning. Default: all.")] = None,
    repeats: Annotated[int, option(
        "--repeats", panel=_RUNS, metavar="N", parser=options.whole,
        help=f"How often each way decodes each prompt. Default: {_REPEATS}.")] = _REPEATS,
    max_tokens: Annotated[int, option(
        "--max-tokens", "-n", panel=_RUNS, metavar="N", parser=options.whole,
        help=f"Tokens to answer each prompt with at most. Default: {_TOKENS}.")] = _TOKENS,
    temperature: Annotated[float | None, option(
        "--temperature", "-t", panel=_RUNS, metavar="T", parser=options.number,
        help="0 always takes the likeliest token; 1 follows the model's probabilities. Default: the model's own, "
        "else 0.")] = None,
    draft_tokens: Annotated[list[int] | None, option(
        "--draft-tokens", "-k", panel=_RUNS, metavar="K", parser=options.whole,
        help=f"Tokens drafted per pass in the fixed way; repeated, one way for each. Default: {_K}.")] = None,
    storage: options.Storage = None,
    draft_storage: options.DraftStorage = None,
    window: options.Window = None,
    sinks: options.Sinks = None,
    as_json: Annotated[bool, option(
        "--json", panel=OUTPUT, help="Write one JSON object, with every run, instead of tables.")] = False,
    plot: Annotated[str | None, option(
        "--plot", panel=OUTPUT, metavar="FILE",
        help="Draw speed and acceptance into a PNG file; needs matplotlib.")] = None,
    traceback: TracebackOption = False,
) -> None:
    """Measures and shows; see HELP."""
    # Everything that can be checked without a model is checked first: a large one takes long to load.
    name = check_models(model, draft)
    kv = kv_config(name, storage=storage, draft_storage=draft_storage, window=window, sinks=sinks)
    for named, count in (("--repeats", repeats), ("--max-tokens", max_tokens)):
        if count < 1:
            raise BadConfig(f"{named} is {count}; give 1 or more.")
    for count in draft_tokens or []:
        if not 1 <= count <= MOST_DRAFT_TOKENS:
            raise BadConfig(f"--draft-tokens is {count}; give 1 to {MOST_DRAFT_TOKENS}.")
    sampling: dict[str, Any] = {} if temperature is None else {"temperature": temperature}
    Sampling(**sampling)
    if plot is not None:
        from mlx_spec.cli.bench.plot import check_plot

        check_plot(plot)
    chosen = _prompts(prompts, kinds)

    with console.notes(shown=True), _said_once():
        report, failure = _measured(
            name, draft, kv, chosen, repeats=repeats, max_tokens=max_tokens, sampling=sampling,
            draft_tokens=list(dict.fromkeys(draft_tokens or [])), draft_storage=draft_storage,
        )  # fmt: skip
        if report.runs or (as_json and isinstance(failure, KeyboardInterrupt | Terminated)):
            _write(report, as_json=as_json)
            if plot is not None:
                _draw(report, plot)
    if failure is not None:
        raise failure


def _prompts(file: str | None, kinds: list[str] | None) -> list[BenchPrompt]:
    from mlx_spec.cli.bench.prompt_file import of_kinds, read_prompts
    from mlx_spec.cli.bench.prompts import PROMPTS

    found = list(PROMPTS) if file is None else read_prompts(file)
    return found if kinds is None else of_kinds(found, kinds)


def _measured(
    model: str, draft: str | None, kv: KVConfig, prompts: list[BenchPrompt], *, repeats: int, max_tokens: int,
    sampling: dict[str, Any], draft_tokens: list[int], draft_storage: str | None,
) -> tuple[Report, BaseException | None]:
    """The report, and what ended it early: hours of measuring are not thrown away for what happened at their end."""
    llm = load(model, draft, kv)
    from mlx_spec.cli.bench.report import Report
    from mlx_spec.cli.bench.runs import check_prompts, measure, warm_up, ways_of
    from mlx_spec.machine.bandwidth import measure_bandwidth

    if llm.draft_name is None:
        note_no_draft({"--draft-tokens": draft_tokens, "--draft-kv": draft_storage})
    settings = dataclasses.replace(llm.sampling, **sampling)
    check_prompts(llm, prompts, max_tokens)
    ways = ways_of(llm, draft_tokens or [_K])
    report = Report(
        model=_without_folders(llm.name), draft=None if llm.draft_name is None else _without_folders(llm.draft_name),
        sampling=settings, kv=llm.kv, max_tokens=max_tokens, repeats=repeats, prompts=len(prompts),
        planned_runs=repeats * len(prompts) * len(ways), bytes_per_pass=llm.bytes_per_pass,
        bandwidth=measure_bandwidth(),
    )  # fmt: skip
    try:
        with progress() as tell:
            ways, others = warm_up(llm, ways, sampling=settings, progress=tell)
            report.planned_runs = repeats * len(prompts) * len(ways)
            if others:
                _log.warning(f"left out, since they would not draft so here: {', '.join(way.name for way in others)}")
            runs = measure(llm, prompts, ways, repeats=repeats, max_tokens=max_tokens, sampling=settings,
                           progress=tell)  # fmt: skip
            for run in runs:
                report.runs.append(run)
    except (KeyboardInterrupt, Terminated, Exception) as error:
        return report, error
    return report, None


def _without_folders(name: str) -> str:
    """Figures are shown to others; where a model lies on this machine is nobody's concern."""
    path = Path(name)
    return path.resolve().name if path.exists() else name


def _write(report: Report, *, as_json: bool) -> None:
    if not as_json:
        from mlx_spec.cli.bench import view

        view.show(report)
        return
    from importlib.metadata import version

    from mlx_spec.cli import diagnosis

    console.write_json(report.as_dict(diagnosis.facts() | {"mlx": version("mlx")}), indent=1)


def _draw(report: Report, file: str) -> None:
    from mlx_spec.cli.bench.plot import draw

    if draw(report, file):
        console.say(f"written: {file}")
    else:
        _log.warning(f"nothing to draw yet, so {file} was not written")


@contextlib.contextmanager
def _said_once() -> Iterator[None]:
    """While this lasts, what the runtime notes at each of many generations is shown at the first."""
    said: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        new = message not in said
        said.add(message)
        return new

    _log.addFilter(is_new)
    try:
        yield
    finally:
        _log.removeFilter(is_new)
