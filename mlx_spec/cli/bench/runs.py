"""Decodes every prompt in every way, in turn. Knows the runtime's public face only; works out no figures.

All ways take their turn at a prompt before the next prompt comes, and who is first changes from prompt to prompt: what
drifts, such as the machine's temperature, then falls on all of them alike. Each generation makes caches of its own, so
none starts warm because the same prompt was read before; and reading the prompt is not part of the decoding time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlx_spec.cli.bench.prompts import WARM_UP, BenchPrompt
from mlx_spec.cli.progress import Progress, untold
from mlx_spec.errors import MLXSpecError
from mlx_spec.llm.statistics import Statistics
from mlx_spec.settings import HYBRID, LOOKUP, MODEL, NO_DRAFTER, Sampling, Speculation

if TYPE_CHECKING:
    from mlx_spec.llm.llm import LLM

PLAIN, AUTO = "plain", "auto"
_WARM_UP_TOKENS = 16
"""Enough for the runtime to find it worthwhile to measure what passes cost."""


@dataclass(frozen=True)
class Way:
    """One way of decoding."""

    name: str
    speculation: Speculation


@dataclass(frozen=True)
class Run:
    """One prompt decoded once."""

    kind: str
    prompt: str
    """Its name."""
    repeat: int
    way: str
    statistics: Statistics

    def as_dict(self) -> dict[str, Any]:
        about = {"kind": self.kind, "prompt": self.prompt, "repeat": self.repeat, "way": self.way}
        return about | self.statistics.as_dict()


def ways_of(llm: LLM, draft_tokens: Sequence[int]) -> list[Way]:
    """Plain decoding, each fixed K, K chosen by the schedule, lookup, and both drafters; without a draft model plain
    and lookup only. What is not said here, such as the verification, is the model's own."""

    def way(name: str, k: int | str, drafter: str) -> Way:
        return Way(name, dataclasses.replace(llm.speculation, draft_tokens=k, drafter=drafter))  # type: ignore[arg-type]

    plain, lookup = way(PLAIN, 0, NO_DRAFTER), way(LOOKUP, "auto", LOOKUP)
    if llm.draft_name is None:
        return [plain, lookup]
    fixed = [way(f"K={k}", k, MODEL) for k in draft_tokens]
    return [plain, *fixed, way(AUTO, "auto", MODEL), lookup, way(HYBRID, "auto", HYBRID)]


def check_prompts(llm: LLM, prompts: Sequence[BenchPrompt], max_tokens: int) -> None:
    """Raises, naming the prompt, what generating would: one that is too long is found before hours are spent."""
    for prompt in prompts:
        try:
            llm.stream(prompt.text, max_tokens=max_tokens).close()
        except MLXSpecError as error:
            raise type(error)(f"prompt {prompt.name} ({prompt.kind}): {error}") from error


def warm_up(
    llm: LLM, ways: Sequence[Way], *, sampling: Sampling, progress: Progress = untold
) -> tuple[list[Way], list[Way]]:
    """Every way decodes a few tokens of another text, not measured: weights are touched and kernels compiled, and
    what passes cost begins to be known. Gives the ways that are what they are called, and those that are not: where a
    model cannot take tokens back, nothing is drafted, or by lookup alone, which would be measured twice under two
    names."""
    real: list[Way] = []
    others: list[Way] = []
    for done, way in enumerate(ways):
        progress(f"warming up, {way.name}", done, len(ways))
        completion = llm.generate(
            WARM_UP, sampling=dataclasses.replace(sampling, seed=0), speculation=way.speculation,
            max_tokens=_WARM_UP_TOKENS,
        )  # fmt: skip
        (real if completion.statistics.drafter == way.speculation.drafter else others).append(way)
    return real, others


def measure(
    llm: LLM,
    prompts: Sequence[BenchPrompt],
    ways: Sequence[Way],
    *,
    repeats: int,
    max_tokens: int,
    sampling: Sampling,
    progress: Progress = untold,
) -> Iterator[Run]:
    """Each run as it is done, so that a caller who is interrupted has those before it. Ways are to be warm; seeds are
    equal for all ways of a repeat."""
    total = repeats * len(prompts) * len(ways)
    done = 0
    for repeat in range(repeats):
        seeded = dataclasses.replace(sampling, seed=repeat)
        for index, prompt in enumerate(prompts, repeat * len(prompts)):
            first = index % len(ways)
            for way in (*ways[first:], *ways[:first]):
                progress(f"{prompt.name}, {way.name}", done, total)
                completion = llm.generate(
                    prompt.text, sampling=seeded, speculation=way.speculation, max_tokens=max_tokens
                )
                done += 1
                yield Run(prompt.kind, prompt.name, repeat, way.name, completion.statistics)
    progress("done", total, total)
