"""From runs to figures: medians and spread, ratios to plain decoding, acceptance, weights read. Pure arithmetic.

Speeds are compared within a prompt and a repeat only, since those runs followed one another: the ratio of a prompt is
the median over its repeats, and ratios of several prompts are averaged geometrically, so that twice as fast and half as
fast cancel. What counts tokens and passes is added up over all runs of a way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import median

from mlx_spec.cli.bench.runs import PLAIN, Run
from mlx_spec.settings import MODEL


@dataclass(frozen=True)
class Spread:
    """A middle and how far values lie apart."""

    middle: float
    least: float
    most: float
    count: int


@dataclass(frozen=True)
class WayFigures:
    """What one way did. None where nothing was measured to say it."""

    way: str
    runs: int
    tokens_per_second: Spread | None
    """The middle is the median over runs."""
    ratio_to_plain: Spread | None
    """Of decoding speeds; the middle is the geometric mean over prompts."""
    ratio_to_plain_by_kind: dict[str, Spread]
    repeat_spread: float | None
    """How far repeats of one prompt lie apart, as a share of their median; the median over prompts."""
    tokens_per_pass: float | None
    drafted_per_pass: float | None
    parked: float | None
    """The share of target passes that were plain because speculation could not win."""
    acceptance_rate: float | None
    """Accepted per drafted token."""
    acceptance_by_position: list[float]
    """The share accepted where all before it were, for the first drafted token of a pass, the second..."""
    weights_read_per_second: float | None
    """Bytes: the target's weights for each of its passes and the draft's for each token it drafted, by decoding time.
    Passes in which the draft only catches up are not in it; None for a mixture of experts."""


def figures_of(runs: Sequence[Run], target_bytes: int | None, draft_bytes: int | None) -> list[WayFigures]:
    """Figures of each way, in the order of their first runs with plain decoding at the top. Bytes are of weights that
    a pass reads, None where that is not known. A last turn that was interrupted counts only if there is no other: ways
    are compared over the same prompts."""
    ways = sorted(dict.fromkeys(run.way for run in runs), key=lambda way: way != PLAIN)
    turns = Counter((run.prompt, run.repeat) for run in runs)
    runs = [run for run in runs if turns[run.prompt, run.repeat] == len(ways)] or runs
    plain = {(run.prompt, run.repeat): run for run in runs if run.way == PLAIN}
    return [_figures([run for run in runs if run.way == way], plain, target_bytes, draft_bytes) for way in ways]


def _figures(runs: Sequence[Run], plain: dict[tuple[str, int], Run], target_bytes: int | None,
             draft_bytes: int | None) -> WayFigures:
    all_statistics = [run.statistics for run in runs]
    speeds = [s.tokens_per_second for s in all_statistics if s.tokens_per_second is not None]
    tokens = sum(s.completion_tokens for s in all_statistics)
    passes = sum(s.target_passes for s in all_statistics)
    drafted = sum(s.drafted for s in all_statistics)
    seconds = sum(s.decode_seconds for s in all_statistics)
    draft_passes = sum(s.by_drafter[MODEL].drafted for s in all_statistics if MODEL in s.by_drafter)
    read = None
    if target_bytes is not None and draft_bytes is not None and seconds:
        read = (target_bytes * passes + draft_bytes * draft_passes) / seconds
    kinds, ratios = _ratios(runs, plain)
    by_kind = {
        kind: _geometric([ratio for prompt, ratio in ratios.items() if kinds[prompt] == kind])
        for kind in dict.fromkeys(kinds.values())
    }
    return WayFigures(
        way=runs[0].way,
        runs=len(runs),
        tokens_per_second=Spread(median(speeds), min(speeds), max(speeds), len(speeds)) if speeds else None,
        ratio_to_plain=_geometric(list(ratios.values())),
        ratio_to_plain_by_kind={kind: spread for kind, spread in by_kind.items() if spread is not None},
        repeat_spread=_repeat_spread(runs),
        tokens_per_pass=tokens / passes if passes else None,
        drafted_per_pass=drafted / passes if passes else None,
        parked=sum(s.parked_passes for s in all_statistics) / passes if passes else None,
        acceptance_rate=sum(s.accepted for s in all_statistics) / drafted if drafted else None,
        acceptance_by_position=_by_position(s.accepted_by_position for s in all_statistics),
        weights_read_per_second=read,
    )


def _ratios(runs: Sequence[Run], plain: dict[tuple[str, int], Run]) -> tuple[dict[str, str], dict[str, float]]:
    """The kind of each prompt that has a ratio, and that ratio."""
    kinds: dict[str, str] = {}
    repeats: dict[str, list[float]] = {}
    for run in runs:
        beside = plain.get((run.prompt, run.repeat))
        ours = run.statistics.tokens_per_second
        theirs = beside.statistics.tokens_per_second if beside else None
        if ours is not None and theirs is not None:
            kinds[run.prompt] = run.kind
            repeats.setdefault(run.prompt, []).append(ours / theirs)
    return kinds, {prompt: median(values) for prompt, values in repeats.items()}


def _repeat_spread(runs: Sequence[Run]) -> float | None:
    speeds: dict[str, list[float]] = {}
    for run in runs:
        if run.statistics.tokens_per_second is not None:
            speeds.setdefault(run.prompt, []).append(run.statistics.tokens_per_second)
    spreads = [(max(values) - min(values)) / median(values) for values in speeds.values() if len(values) > 1]
    return median(spreads) if spreads else None


def _by_position(counts: Iterable[Sequence[tuple[int, int]]]) -> list[float]:
    """From (tried, accepted) of each position in each run; ends before the first position that was never tried."""
    totals: list[list[int]] = []
    for run in counts:
        for position, (tried, accepted) in enumerate(run):
            if position == len(totals):
                totals.append([0, 0])
            totals[position][0] += tried
            totals[position][1] += accepted
    reached: list[float] = []
    for tried, accepted in totals:
        if not tried:
            break
        reached.append(accepted / tried)
    return reached


def _geometric(ratios: Sequence[float]) -> Spread | None:
    if not ratios:
        return None
    mean = exp(sum(log(ratio) for ratio in ratios) / len(ratios))
    least, most = min(ratios), max(ratios)
    return Spread(min(max(mean, least), most), least, most, len(ratios))  # where all are equal, it rounds past them
