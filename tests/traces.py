"""Tables of costs and invented texts that schedules are played over."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from replay import Trace, outlooks

from mlx_spec.decoding.drafters.draft_model import Reading, model_outlook
from mlx_spec.decoding.drafters.lookup import lookup_outlook
from mlx_spec.decoding.schedule.automatic import AutoSchedule
from mlx_spec.decoding.schedule.costs import Costs
from mlx_spec.decoding.schedule.learning import RoundTime
from mlx_spec.decoding.schedule.offers import Offer
from mlx_spec.settings import LOOKUP, MODEL

TABLES = {
    # A 70B in 4 bits on an M5 Max (ml-explore/mlx, pull request 3791) with a 1B model.
    "70B": Costs(((1, 75.9), (3, 84.8), (5, 108), (8, 168), (12, 241), (16, 296)), 0.03 * 75.9, 0.0005 * 75.9),
    # An invented pair whose sizes are nearer to each other, so that drafts cost more.
    "8B": Costs(((1, 12.0), (2, 13.0), (3, 13.8), (5, 17.4), (8, 27.6), (16, 48)), 0.12 * 12, 0.01 * 12),
    # A dense bfloat16 pair on a CPU, where each row costs, but a draft model has nothing to read when it comes back.
    "CPU": Costs(((1, 6.3), (2, 8.4), (4, 13), (5, 16), (8, 22), (16, 43)), 0.35 * 6.3),
    # Qwen2.5-Coder 1.5B with 0.5B in bfloat16 on a CPU, measured with that (benchmarks/results/calibration.json).
    "CPU pair": Costs(((1, 1.188), (2, 1.725), (4, 2.787), (8, 4.912), (16, 9.25)), 0.4403, 0.1361),
    "ideal": Costs(((1, 1.0), (16, 1.0)), 0.03),
}
CLIFF = Costs(((1, 1.0), (4, 1.1), (5, 2.2), (16, 2.6)), 0.05)


class Recorded(AutoSchedule):
    """Keeps what came of each round."""

    def __init__(
        self, costs: Costs, most: int, *, drafters: Sequence[str] = (MODEL, LOOKUP), stops_early: bool = True
    ) -> None:
        super().__init__(replace(costs, draft_chained=not stops_early), most, outlooks(drafters))
        self.rounds: list[tuple[int, int]] = []

    def observe(self, offer: Offer | None, drafted: int, accepted: int, *more: Any) -> None:
        super().observe(offer, drafted, accepted, *more)
        self.rounds.append((drafted, accepted))


class Learning:
    """A `CostLearner` that is to find out `costs`: from the second sample of a figure on, since the first compiles. It
    goes on from one answer to the next. What reading costs is known from the prompt."""

    def __init__(self, costs: Costs) -> None:
        self._true = costs
        self._samples: Counter[int | str] = Counter()

    def costs(self, length: int) -> Costs:
        rows = sorted(rows for rows, count in self._samples.items() if isinstance(rows, int) and count > 1)
        plain = self._true.plain
        target = tuple((count, plain * self._true.verify(count)) for count in rows) if rows[:1] == [1] else ()
        return Costs(target, self._true.draft_step if self._samples["step"] > 1 else None, self._true.draft_row)

    def observe(self, length: int, took: RoundTime) -> bool:
        self._samples[took.rows] += 1
        news = [took.rows]
        if took.draft_seconds and took.read <= 1:
            self._samples["step"] += 1
            news.append("step")
        return any(self._samples[name] == 2 for name in news)

    def close(self) -> None:
        pass


def unknown(costs: Costs, drafters: Sequence[str] = (MODEL, LOOKUP)) -> AutoSchedule:
    """A schedule that is yet to be told what passes cost, for a draft model that has read its prompt."""
    reading = Reading()
    reading.seconds = costs.draft_row
    outlooks = [model_outlook(reading), lookup_outlook()]
    return AutoSchedule(Costs((), None), 15, [outlook for outlook in outlooks if outlook.drafter in drafters])


def uninformed(acceptance: Iterable[float], random: Random) -> Trace:
    """Texts whose draft has no idea when it is right."""
    chances = list(acceptance)
    return Trace(chances, [min(0.99, max(0.05, random.gauss(0.7, 0.2))) for _ in chances])


def informed(acceptance: Iterable[float], random: Random) -> Trace:
    """Easy tokens and hard ones, in such shares that about so many are accepted; the draft mostly knows which is
    which, as language models do."""
    confidences = [
        random.betavariate(2.5, 2.5) if random.random() < (1 - mean) * 1.8 else random.betavariate(18, 0.8)
        for mean in acceptance
    ]
    return Trace([0.95 * confidence for confidence in confidences], confidences)


def waves(length: int, middle: float, height: float, period: int) -> list[float]:
    return [middle + height * math.sin(position / period * 2 * math.pi) for position in range(length)]


def phases(length: int, *levels: float, each: int) -> list[float]:
    return [levels[position // each % len(levels)] for position in range(length)]


def trace(name: str, length: int, seed: int = 0) -> Trace:
    random = Random(seed)
    kind, _, number = name.partition(" ")
    if kind == "steady":
        return uninformed([float(number)] * length, random)
    if kind == "informed":
        return informed([float(number)] * length, random)
    invented = {
        "drifting": lambda: uninformed(waves(length, 0.65, 0.3, 400), random),
        "drifting-informed": lambda: informed(waves(length, 0.75, 0.2, 300), random),
        "good-bad": lambda: uninformed(phases(length, 0.95, 0.1, each=150), random),
        "bad-good": lambda: uninformed(phases(length, 0.1, 0.95, each=150), random),
        "quick": lambda: uninformed(phases(length, 0.97, 0.4, each=50), random),
    }
    return invented[kind]()


def copying(length: int, acceptance: float, random: Random) -> Trace:
    """New text and runs copied from the prompt, by turns: lookup finds the latter, a draft model is as good in both."""
    prompt = [random.randrange(5000) for _ in range(600)]
    tokens: list[int] = []
    while len(tokens) < length:
        tokens += [random.randrange(5000) for _ in range(60)]
        start = random.randrange(500)
        tokens += prompt[start : start + 60]
    text = uninformed([acceptance] * length, random)
    return Trace(text.acceptance, text.confidences, tokens[:length], prompt)
