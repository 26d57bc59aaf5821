"""Decoding speed and tokens per target pass against mlx-lm, plain and speculative, on a real pair.

    python benchmarks/versus_mlx_lm.py -m TARGET -d DRAFT [-k 1 2] [--tokens 48] [--temperatures 0 1] [--kinds ...]

TARGET and DRAFT are directories in the hub's layout. Ways: both plain; mlx-lm with each K; mlx-spec with K auto as a
user gets it and, above temperature 0, with the draft model and the largest K of mlx-lm, for tokens per pass. Every way
decodes every prompt in turn within one run, so that ratios hold while the machine's speed drifts, in another order for
each prompt. Each runtime reads a prompt once; every way starts from a copy of that, before the clock starts. What
passes cost, for K auto, is better measured beforehand, by `mlx-spec calibrate`. A target pass is a decoding pass.
Both runtimes compute with the same weights in the same type. The tokens of "mlx-spec auto" are kept for
`projection.py`.
"""

from __future__ import annotations

import argparse
import copy
import functools
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import exp, log
from pathlib import Path
from typing import Any

import mlx.core as mx
from common import save
from mlx_lm.generate import generate_step, generation_stream, speculative_generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler
from mlx_lm.utils import load as load_reference

from mlx_spec import LLM, Sampling, Speculation
from mlx_spec.architectures.context import prefill
from mlx_spec.calibration.learner import Learner
from mlx_spec.cli.bench.prompts import KINDS, PROMPTS
from mlx_spec.decoding.drafters.draft_model import DraftModel
from mlx_spec.decoding.engine import Decoding
from mlx_spec.llm.llm import load
from mlx_spec.settings import MODEL


@dataclass
class Run:
    tokens: int
    passes: int
    seconds: float
    processor_seconds: float
    """Of all threads: unlike `seconds`, hardly longer when something else runs on the machine."""
    emitted: list[int]
    rounds: list[tuple[str | None, int, int]]
    """Ours: who drafted, how many tokens, how many were accepted."""

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / self.passes

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def tokens_per_processor_second(self) -> float:
        return self.tokens / self.processor_seconds


class OurPrompt:
    """A prompt read by both models."""

    def __init__(self, llm: LLM, prompt: list[int]) -> None:
        assert llm._draft is not None
        self.llm, self.prompt = llm, prompt
        self.target, self.draft = llm._target.new_context(), llm._draft.new_context()
        for context in (self.target, self.draft):
            prefill(context, prompt)

    def decode(self, speculation: Speculation, temperature: float, count: int) -> Run:
        llm, sampling = self.llm, Sampling(temperature=temperature)
        target, size, drafters = self.target.fork(), llm.vocabulary_size, llm._drafters
        learner = functools.partial(self.learner, sampling)
        drafting = drafters.drafting(drafters.chosen(speculation), speculation, sampling, 0, size, learner)
        if drafting is not None and isinstance(model := drafting._drafters.get(MODEL), DraftModel):
            model.context = self.draft.fork()
        decoding = Decoding(list(self.prompt), target, drafting, sampling=sampling, seed=0, vocabulary_size=size)
        decoding.prefill()  # what lookup reads, before the clock starts
        started = started_quietly()
        rounds = list(decoding.rounds(limit=count, end_tokens=llm.tokenizer.end_tokens))
        elapsed = since(started)
        target.close()
        if drafting is not None:
            drafting.close()
        log = [(r.drafter, r.drafted, r.accepted) for r in rounds]
        return Run(sum(len(r.tokens) for r in rounds), len(rounds), *elapsed, decoding.tokens[len(self.prompt) :], log)

    def learner(self, sampling: Sampling, drafting: bool) -> Learner:
        return self.llm._calibrations.learner(sampling, self.llm.vocabulary_size, drafting=drafting)

    def close(self) -> None:
        self.target.close()
        self.draft.close()


class TheirPrompt:
    """A prompt read by both models, with mlx-lm."""

    def __init__(self, target: Any, draft: Any, end_tokens: frozenset[int], prompt: list[int]) -> None:
        self._target, self._draft, self._end_tokens, self._prompt = target, draft, end_tokens, prompt
        self._caches = []
        for model in (target, draft):
            cache = make_prompt_cache(model)
            for start in range(0, len(prompt) - 1, 64):
                model(mx.array([prompt[start : min(start + 64, len(prompt) - 1)]]), cache=cache)
                mx.eval([c.state for c in cache])
            self._caches.append(cache)

    def decode(self, k: int, temperature: float, count: int) -> Run:
        """k 0: without the draft."""
        prompt = self._prompt
        mx.random.seed(0)
        sampler = make_sampler(temp=temperature)
        caches = [c for cache in copy.deepcopy(self._caches[: 2 if k else 1]) for c in cache]
        last = mx.array(prompt[-1:])
        started = started_quietly()
        steps: Iterator[tuple[int, bool]]
        if k:
            steps = (
                (token, from_draft)
                for token, _, from_draft in speculative_generate_step(
                    last, self._target, self._draft, num_draft_tokens=k, max_tokens=count, sampler=sampler,
                    prompt_cache=caches,
                )
            )  # fmt: skip
        else:
            steps = (
                (token, False)
                for token, _ in generate_step(
                    last, self._target, max_tokens=count, sampler=sampler, prompt_cache=caches
                )
            )
        tokens: list[int] = []
        passes, from_draft = 0, False
        for token, from_draft in steps:
            tokens.append(token)
            passes += not from_draft
            if token in self._end_tokens:
                break
        return Run(len(tokens), passes + from_draft, *since(started), tokens, [])


def started_quietly() -> tuple[float, float]:
    """The clocks once nothing is in flight: plain decoding leaves a pass behind that nobody needs, in either runtime,
    and the next way would pay for it."""
    mx.synchronize(generation_stream)
    mx.synchronize()
    return time.perf_counter(), time.process_time()


def since(started: tuple[float, float]) -> tuple[float, float]:
    return time.perf_counter() - started[0], time.process_time() - started[1]


def geometric_mean(values: list[float]) -> float:
    return exp(sum(log(value) for value in values) / len(values))


def summarised(rows: list[dict[str, Any]], ks: list[int]) -> dict[str, Any]:
    """Ratios as geometric means over prompts: of each temperature, of each kind, and of all."""
    summary: dict[str, Any] = {}
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        for heading in (f"temperature {row['temperature']:g}", row["kind"]):
            groups.setdefault(heading, []).append(row)
    for heading, chosen in [*sorted(groups.items()), ("all", rows)]:
        runs = [row["runs"] for row in chosen]

        def ratio(of: str, a: str, b: str, runs: Any = runs) -> float:
            return geometric_mean([getattr(Run(**run[a]), of) / getattr(Run(**run[b]), of) for run in runs])

        figures = {}
        for label, of in (("tok/s", "tokens_per_second"), ("tok per processor second", "tokens_per_processor_second")):
            figures[f"{label}: mlx-spec plain / mlx-lm plain"] = ratio(of, OUR_PLAIN, PLAIN)
            figures[f"{label}: mlx-spec auto / mlx-lm plain"] = ratio(of, OURS, PLAIN)
            figures[f"{label}: mlx-spec auto / mlx-spec plain"] = ratio(of, OURS, OUR_PLAIN)
            best = max((ratio(of, f"mlx-lm K={k}", PLAIN), k) for k in ks)[1]
            figures[f"{label}: mlx-lm at its best K / mlx-lm plain"] = ratio(of, f"mlx-lm K={best}", PLAIN)
            figures[f"{label}: mlx-spec auto / mlx-lm at its best K"] = ratio(of, OURS, f"mlx-lm K={best}")
            figures[f"{label}: mlx-lm's best K"] = best
        for way in [name for name in runs[0] if all(name in run for run in runs)]:
            figures[f"tokens per pass: {way}"] = ratio("tokens_per_pass", way, PLAIN)
        same = f"K={ks[-1]}"
        if all(f"mlx-spec {same}" in run for run in runs):
            figures[f"tokens per pass, {same}: mlx-spec / mlx-lm"] = ratio(
                "tokens_per_pass", f"mlx-spec {same}", f"mlx-lm {same}"
            )
        summary[heading] = figures
    return summary


PLAIN, OUR_PLAIN, OURS = "mlx-lm plain", "mlx-spec plain", "mlx-spec auto"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, required=True)
    parser.add_argument("-d", "--draft", type=Path, required=True)
    parser.add_argument("-k", "--draft-tokens", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()

    llm = load(options.model, options.draft)
    target, _ = load_reference(str(options.model))
    draft, _ = load_reference(str(options.draft))
    ks = options.draft_tokens
    end_tokens = llm.tokenizer.end_tokens
    theirs = {PLAIN: 0} | {f"mlx-lm K={k}": k for k in ks}
    same = f"mlx-spec K={ks[-1]}"
    ours = {OUR_PLAIN: Speculation(0), same: Speculation(ks[-1], drafter="model"), OURS: Speculation()}
    models = {"target": options.model.name, "draft": options.draft.name, "tokens": options.tokens}
    rows: list[dict[str, Any]] = []
    for kind in options.kinds:
        text = min((p.text for p in PROMPTS if p.kind == kind), key=len)
        prompt = llm.tokenizer.chat([{"role": "user", "content": text}])
        read_by_us, read_by_them = OurPrompt(llm, prompt), TheirPrompt(target, draft, end_tokens, prompt)
        for temperature in options.temperatures:
            runs: dict[str, Run] = {}
            names = [name for name in (*theirs, *ours) if temperature > 0 or name != same]
            turn = len(rows) % len(names)
            for name in names[turn:] + names[:turn]:
                if name in ours:
                    runs[name] = read_by_us.decode(ours[name], temperature, options.tokens)
                else:
                    runs[name] = read_by_them.decode(theirs[name], temperature, options.tokens)
            rows.append({"kind": kind, "temperature": temperature, "prompt": prompt,
                         "runs": {name: asdict(runs[name]) for name in names}})  # fmt: skip
            figures = "   ".join(
                f"{name} {run.tokens_per_second:5.2f} tok/s {run.tokens_per_pass:4.2f}/pass"
                for name, run in sorted(runs.items())
            )
            print(f"{kind:9} t={temperature:g}  {figures}", flush=True)
            # After each prompt: an interrupted run keeps what was measured.
            save("versus_mlx_lm", {"models": models, "summary": summarised(rows, ks), "rows": rows}, options.output)
        read_by_us.close()
    for heading, figures in summarised(rows, ks).items():
        print(f"\n{heading} (geometric means over prompts)")
        for name, value in figures.items():
            print(f"  {name:60} {value:.3f}")


if __name__ == "__main__":
    main()
