"""A projection: what policies of speculation would gain on another machine, from traces of a real pair.

    python benchmarks/projection.py --record -m TARGET -d DRAFT [--tokens-of FILE]   # traces of a pair's own tokens
    python benchmarks/projection.py [--traces FILE] [--output FILE]                  # the projection, without models
    python benchmarks/projection.py --costs FILE                        # under costs of `mlx-spec calibrate --json`

**Nothing here was measured on the machine that it speaks of.** A trace says, at every position of an answer that the
target gave, how likely a draft would be accepted there: by rejection sampling sum(min(p, q)), by mlx-lm's test for
equality sum(p * q). Policies are replayed over the traces under a published table of what a target pass over M rows
costs; the draft's cost is an assumption that the output names. Acceptance of a 70B with a 1B may differ from that of
the recorded pair; the host's time, sampling and everything else that the table leaves out is not in it. The limit is
what a schedule would gain that knew beforehand which drafts are accepted.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from math import exp, log
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
import numpy as np
from common import RESULTS, save
from replay import Trace, automatic, copied_runs, least_cost, outcomes, replay

from mlx_spec.architectures.context import Context, prefill
from mlx_spec.architectures.paged import PagedModel
from mlx_spec.decoding.drafters.suffixes import Suffixes
from mlx_spec.decoding.sampling import distribution
from mlx_spec.decoding.schedule.costs import Costs
from mlx_spec.decoding.schedule.schedule import FixedSchedule, Schedule
from mlx_spec.loading.loader import load
from mlx_spec.settings import Sampling

CHUNK = 32
DRAFT_COST = 0.03
TABLES = {
    "Llama-70B class, dense, 4 bits in groups of 64, whole forward, M5 Max; published in ml-explore/mlx pull request "
    f"3791; assumed: {DRAFT_COST} of a pass for a draft step, a 64th of that for a token the draft only reads": Costs(
        ((1, 75.9e-3), (3, 84.8e-3), (5, 108e-3), (8, 168e-3), (12, 241e-3), (16, 296e-3)), DRAFT_COST * 75.9e-3,
        DRAFT_COST * 75.9e-3 / 64,
    ),
}  # fmt: skip
DRAWS = 20
"""Times that each trace is replayed, with other outcomes drawn."""


def distributions(context: Context, tokens: Sequence[int], sampling: Sampling, size: int) -> Iterator[Any]:
    """After each of `tokens` in turn: the distribution, and the largest probability before temperature and filters."""
    for start in range(0, len(tokens), CHUNK):
        logits = context.extend(tokens[start : start + CHUNK])
        confident = distribution(logits, Sampling(temperature=1), size).max(axis=-1)
        rows = distribution(logits, sampling, size)
        rows = rows if rows.ndim == 2 else mx.eye(size)[rows]  # greedy: tokens alone
        for row, confidence in zip(rows, confident.tolist(), strict=True):
            yield np.array(row, np.float64), confidence
    context.close()


def record(options: argparse.Namespace) -> None:
    target, draft = load(options.model), load(options.draft)
    models = PagedModel(target.module), PagedModel(draft.module)
    size = min(target.tokenizer.vocabulary_size, target.config["vocab_size"])
    rows = json.loads(options.tokens_of.read_text())["rows"]
    traces: list[dict[str, Any]] = []
    read: list[int] = []
    contexts: list[Context] = []
    for row in rows:
        prompt, tokens = row["prompt"], row["runs"]["mlx-spec auto"]["emitted"]
        if prompt != read:
            for context in contexts:
                context.close()
            read, contexts = prompt, [model.new_context() for model in models]
            for context in contexts:
                prefill(context, prompt)
        sampling = Sampling(temperature=row["temperature"])
        after = [prompt[-1], *tokens[:-1]]  # what comes after the last token is in no trace
        sides = [distributions(context.fork(), after, sampling, size) for context in contexts]
        overlap, equal, confidences = [], [], []
        for (p, _), (q, confidence) in zip(*sides, strict=True):
            overlap.append(round(float(np.minimum(p, q).sum()), 6))
            equal.append(round(float((p * q).sum()), 6))
            confidences.append(round(confidence, 6))
        traces.append({"kind": row["kind"], "temperature": row["temperature"], "prompt": prompt, "tokens": tokens,
                       "overlap": overlap, "equal": equal, "confidences": confidences})  # fmt: skip
        print(f"{row['kind']:9} t={row['temperature']:g}  overlap {np.mean(overlap):.3f}  equal {np.mean(equal):.3f}")
        pair = {"target": options.model.name, "draft": options.draft.name}
        save("traces", {"pair": pair, "traces": traces}, options.traces)


def speedup(
    traces: Sequence[dict[str, Any]], accepts: str, costs: Costs, policy: Any, *, lookup: bool = False
) -> float:
    """Over plain decoding: the geometric mean over traces."""
    logs = []
    for trace in traces:
        played = [
            replay(
                Trace(trace[accepts], trace["confidences"], trace["tokens"], trace["prompt"]), policy(), costs,
                random=Random(draw), lookup=Suffixes() if lookup else None,
            )
            for draw in range(DRAWS)
        ]  # fmt: skip
        logs.append(log(sum(run.tokens for run in played) / sum(run.cost for run in played)))
    return exp(sum(logs) / len(logs))


def limit(traces: Sequence[dict[str, Any]], costs: Costs) -> float:
    """Over plain decoding, of a schedule that knows all outcomes of both drafters: the geometric mean over traces."""
    logs = []
    for trace in traces:
        text = Trace(trace["overlap"], trace["confidences"], trace["tokens"], trace["prompt"])
        copied = copied_runs(text, Suffixes())
        least = [least_cost(outcomes(text, Random(draw)), costs, copied=copied) for draw in range(DRAWS)]
        logs.append(log(DRAWS * len(text.tokens) / sum(least)))
    return exp(sum(logs) / len(logs))


def measured(file: Path) -> dict[str, Costs]:
    """The costs of the shortest text in what `mlx-spec calibrate --json` wrote."""
    document = json.loads(file.read_text())
    first = document["calibrations"][0]
    target = tuple((entry["rows"], entry["seconds"]) for entry in first["target"])
    step = first["draft_lazily"] if first["chains_lazily"] else first["draft_synchronised"]
    pair = f"{Path(document['model']).name} with {Path(document['draft']).name}"
    name = f"{pair}, measured after {first['context_length']} tokens on {document['machine']}"
    return {name: Costs(target, step, first["draft_row"])}


def project(options: argparse.Namespace) -> None:
    document = json.loads(options.traces.read_text())
    pair = "{target} with {draft}".format(**document["pair"])
    projections = []
    for table, costs in (TABLES if options.costs is None else measured(options.costs)).items():
        print(f"PROJECTION, not a measurement\n  costs: {table}\n  acceptance: recorded from {pair}")

        def ours(stops_early: bool = True, costs: Costs = costs) -> Schedule:
            return automatic(costs, stops_early=stops_early)

        for temperature in sorted({trace["temperature"] for trace in document["traces"]}):
            traces = [trace for trace in document["traces"] if trace["temperature"] == temperature]
            theirs = {k: speedup(traces, "equal", costs, lambda k=k: FixedSchedule(k)) for k in range(1, 9)}
            fixed = {k: speedup(traces, "overlap", costs, lambda k=k: FixedSchedule(k)) for k in range(1, 9)}
            best, best_fixed = max(theirs, key=theirs.__getitem__), max(fixed, key=fixed.__getitem__)
            figures = {
                "mlx-lm's policy, K = 3": theirs[3],
                f"mlx-lm's policy at its best K = {best}": theirs[best],
                f"rejection sampling at its best K = {best_fixed}": fixed[best_fixed],
                "K auto, draft model": speedup(traces, "overlap", costs, ours),
                # Where steps of the draft are faster unseen, K is chosen before the first of them.
                "K auto, hybrid, not stopping early": speedup(
                    traces, "overlap", costs, lambda: ours(False), lookup=True),
                "K auto, hybrid": speedup(traces, "overlap", costs, ours, lookup=True),
            }
            figures["limit of every schedule, hybrid"] = limit(traces, costs)
            figures["K auto, hybrid, against mlx-lm's policy at its best K"] = figures["K auto, hybrid"] / theirs[best]
            print(f"  temperature {temperature:g}, against plain decoding (geometric mean of {len(traces)} prompts)")
            for name, value in figures.items():
                print(f"    {name:58} {value:.2f}")
            by_kind = {}
            for kind in dict.fromkeys(trace["kind"] for trace in traces):
                of_kind = [trace for trace in traces if trace["kind"] == kind]
                auto = speedup(of_kind, "overlap", costs, ours, lookup=True)
                by_kind[kind] = {"K auto, hybrid": auto, "limit": limit(of_kind, costs)}
                print(f"      {kind:56} {auto:.2f} of at most {by_kind[kind]['limit']:.2f}")
            projections.append(
                {"costs": table, "temperature": temperature, "projected": figures, "by kind": by_kind}
            )
    save("projection", {"about": "a projection, not a measurement", "pair": document["pair"],
                        "projections": projections}, options.output)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("-m", "--model", type=Path)
    parser.add_argument("-d", "--draft", type=Path)
    parser.add_argument("--tokens-of", type=Path, default=RESULTS / "versus_mlx_lm.json", help="of versus_mlx_lm.py")
    parser.add_argument("--traces", type=Path, default=RESULTS / "traces.json")
    parser.add_argument("--costs", type=Path, help="written by `mlx-spec calibrate --json`")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.record:
        if options.model is None or options.draft is None:
            parser.error("--record needs --model and --draft")
        record(options)
    project(options)


if __name__ == "__main__":
    main()
