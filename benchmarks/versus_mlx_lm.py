"""Tokens per target pass and decoding speed against mlx-lm, plain and speculative, on a real pair.

    python benchmarks/versus_mlx_lm.py -m TARGET -d DRAFT [-k 3] [--tokens 40] [--temperatures 0 1] [--output FILE]

TARGET and DRAFT are directories in the hub's layout. Every way decodes every prompt in turn within one run, so that
ratios hold while the machine's speed drifts; caches start cold, the prompt is read before the clock starts. A target
pass is a decoding pass. Both runtimes compute with the same weights in the same type.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from math import exp, log
from pathlib import Path
from typing import Any

import mlx.core as mx
from common import save
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler
from mlx_lm.utils import load as load_reference

from mlx_spec import LLM, Sampling
from mlx_spec.engine import Decoding
from mlx_spec.runtime import load
from mlx_spec.speculation import DraftModel

PROMPTS = {
    "code": "Write a Python class `Stack` with push, pop, peek and __len__, with type hints and docstrings.",
    "json": "List the eight planets as a JSON array of objects with the keys name, moons and diameter_km. "
    "Answer with the JSON only.",
    "prose": "Tell a short story about a lighthouse keeper who finds a letter in a bottle.",
    "edit": "Rename the variable `x` to `total` in this function and answer with the whole function only:\n\n"
    "def add_all(numbers):\n    x = 0\n    for number in numbers:\n        if number is not None:\n"
    "            x = x + number\n    print('sum is', x)\n    return x\n",
}


@dataclass
class Run:
    tokens: int
    passes: int
    seconds: float
    processor_seconds: float
    """Of all threads: unlike `seconds`, hardly longer when something else runs on the machine."""

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / self.passes

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def tokens_per_processor_second(self) -> float:
        return self.tokens / self.processor_seconds


class Ours:
    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def __call__(self, prompt: list[int], temperature: float, k: int, count: int, seed: int) -> Run:
        llm, sampling = self._llm, Sampling(temperature=temperature)
        assert llm._draft is not None
        target, size = llm._target.new_context(), llm.vocabulary_size
        draft = DraftModel(llm._draft.new_context(), sampling, size) if k else None
        decoding = Decoding(list(prompt), target, draft, sampling=sampling, seed=seed, vocabulary_size=size)
        decoding.prefill()
        started = clocks()
        rounds = list(decoding.rounds(draft_tokens=k, limit=count, end_tokens=llm.tokenizer.end_tokens))
        elapsed = since(started)
        target.close()
        if draft:
            draft.close()
        return Run(sum(len(r.tokens) for r in rounds), len(rounds), *elapsed)


class Theirs:
    def __init__(self, target: Any, draft: Any, end_tokens: frozenset[int]) -> None:
        self._target, self._draft, self._end_tokens = target, draft, end_tokens

    def __call__(self, prompt: list[int], temperature: float, k: int, count: int, seed: int) -> Run:
        mx.random.seed(seed)
        sampler = make_sampler(temp=temperature)
        caches = []
        for model in (self._target, self._draft) if k else (self._target,):
            cache = make_prompt_cache(model)
            for start in range(0, len(prompt) - 1, 64):
                model(mx.array([prompt[start : min(start + 64, len(prompt) - 1)]]), cache=cache)
                mx.eval([c.state for c in cache])
            caches += cache
        last = mx.array(prompt[-1:])
        started = clocks()
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
        tokens, passes, from_draft = 0, 0, False
        for token, from_draft in steps:
            tokens += 1
            passes += not from_draft
            if token in self._end_tokens:
                break
        return Run(tokens, passes + from_draft, *since(started))


def clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def since(started: tuple[float, float]) -> tuple[float, float]:
    return time.perf_counter() - started[0], time.process_time() - started[1]


def geometric_mean(values: list[float]) -> float:
    return exp(sum(log(value) for value in values) / len(values))


def summarised(rows: list[dict[str, Any]], k: int) -> dict[str, dict[str, float]]:
    """Per temperature, ratios as geometric means over the prompts."""
    summary = {}
    for temperature in sorted({row["temperature"] for row in rows}):
        chosen = [row["runs"] for row in rows if row["temperature"] == temperature]

        def ratio(of: str, a: str, b: str, chosen: Any = chosen) -> float:
            return geometric_mean([getattr(Run(**runs[a]), of) / getattr(Run(**runs[b]), of) for runs in chosen])

        ours, theirs = f"mlx-spec K={k}", f"mlx-lm K={k}"
        figures = {}
        for label, of in (("tok/s", "tokens_per_second"), ("tok per processor second", "tokens_per_processor_second")):
            figures |= {
                f"{label}: mlx-spec plain / mlx-lm plain": ratio(of, "mlx-spec plain", "mlx-lm plain"),
                f"{label}: {ours} / {theirs}": ratio(of, ours, theirs),
                f"{label}: {ours} / mlx-lm plain": ratio(of, ours, "mlx-lm plain"),
                f"{label}: {theirs} / mlx-lm plain": ratio(of, theirs, "mlx-lm plain"),
            }
        for way in (ours, theirs):
            figures[f"tokens per pass: {way}"] = ratio("tokens_per_pass", way, "mlx-lm plain")
        summary[f"temperature {temperature:g}"] = figures
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, required=True)
    parser.add_argument("-d", "--draft", type=Path, required=True)
    parser.add_argument("-k", "--draft-tokens", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--kinds", nargs="+", choices=PROMPTS, default=list(PROMPTS))
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()

    llm = load(options.model, options.draft)
    target, _ = load_reference(str(options.model))
    draft, _ = load_reference(str(options.draft))
    ours, theirs = Ours(llm), Theirs(target, draft, llm.tokenizer.end_tokens)
    k = options.draft_tokens
    ways: dict[str, Callable[..., Run]] = {
        "mlx-lm plain": lambda *a: theirs(*a[:2], 0, *a[2:]),
        "mlx-spec plain": lambda *a: ours(*a[:2], 0, *a[2:]),
        f"mlx-lm K={k}": lambda *a: theirs(*a[:2], k, *a[2:]),
        f"mlx-spec K={k}": lambda *a: ours(*a[:2], k, *a[2:]),
    }
    models = {"target": options.model.name, "draft": options.draft.name, "draft_tokens": k, "tokens": options.tokens}
    rows: list[dict[str, Any]] = []
    for repeat in range(options.repeats):
        for temperature in options.temperatures:
            for kind in options.kinds:
                prompt = llm.tokenizer.chat([{"role": "user", "content": PROMPTS[kind]}])
                runs = {name: way(prompt, temperature, options.tokens, repeat) for name, way in ways.items()}
                rows.append({"kind": kind, "temperature": temperature, "repeat": repeat, "prompt_tokens": len(prompt),
                             "runs": {name: asdict(run) for name, run in runs.items()}})  # fmt: skip
                figures = "   ".join(
                    f"{name} {run.tokens_per_second:5.2f} tok/s {run.tokens_per_pass:4.2f}/pass"
                    for name, run in runs.items()
                )
                print(f"{kind:6} t={temperature:g}  {figures}", flush=True)

                # After each prompt: an interrupted run keeps what was measured.
                save("versus_mlx_lm", {"models": models, "summary": summarised(rows, k), "rows": rows}, options.output)
    for heading, figures in summarised(rows, k).items():
        print(f"\n{heading} (geometric means over prompts)")
        for name, value in figures.items():
            print(f"  {name:52} {value:.3f}")


if __name__ == "__main__":
    main()
