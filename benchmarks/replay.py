"""Plays a schedule over a recorded or invented text under a table of costs. No model, no clock, no device.

So policies can be compared on one text, and on machines that are not at hand. What it returns is arithmetic: V(M) and
c are taken from the table, and nothing that a table leaves out (the host's time, sampling) is in it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING

from mlx_spec.decoding.drafters.draft_model import model_offer, model_outlook
from mlx_spec.decoding.drafters.lookup import lookup_outlook, match_offer
from mlx_spec.decoding.schedule.automatic import AutoSchedule
from mlx_spec.decoding.schedule.costs import Costs
from mlx_spec.decoding.schedule.learning import CostLearner, RoundTime
from mlx_spec.decoding.schedule.offers import Outlook
from mlx_spec.decoding.schedule.schedule import Schedule
from mlx_spec.settings import LOOKUP, MODEL

if TYPE_CHECKING:
    from mlx_spec.decoding.drafters.suffixes import Suffixes


@dataclass(frozen=True)
class Trace:
    """A generated text, position by position: what a draft model would have done there, given the true past.

    acceptance (n,): the chance that the target accepts the token drafted for a position; 0 or 1 where the outcome
        itself was recorded. Under the law of rejection sampling it is the sum of min(target, draft), under a test for
        equality that of target * draft.
    confidences (n,): the largest probability of the draft's distribution there.
    tokens (n,): the token ids, where lookup is to be replayed; `prompt`: those before them.
    A draft goes on from its own tokens, so those after a wrong one really have another confidence: a replay takes the
    position's all the same, which matters only for where such a draft, lost already, is stopped.
    """

    acceptance: Sequence[float]
    confidences: Sequence[float]
    tokens: Sequence[int] = ()
    prompt: Sequence[int] = ()

    def __post_init__(self) -> None:
        if len(self.confidences) != len(self.acceptance) or len(self.tokens) not in (0, len(self.acceptance)):
            counts = [len(self.acceptance), len(self.confidences), len(self.tokens)]
            raise ValueError(f"a trace has one acceptance, confidence and token per position, not {counts}")


@dataclass(frozen=True)
class Replayed:
    """tokens emitted in so many target passes; cost, in passes of plain decoding, which emits one token for each."""

    tokens: int
    passes: int
    cost: float
    drafted: int
    accepted: int
    parked_passes: int

    @property
    def speedup(self) -> float:
        """Over plain decoding."""
        return self.tokens / self.cost


def outlooks(drafters: Collection[str]) -> list[Outlook]:
    """Of new drafters of these names."""
    return [outlook for outlook in (model_outlook(), lookup_outlook()) if outlook.drafter in drafters]


def automatic(
    costs: Costs, most_draft_tokens: int = 15, *, drafters: Collection[str] = (MODEL, LOOKUP), stops_early: bool = True
) -> AutoSchedule:
    """For drafters without a model. stops_early: whether it is asked between the steps of a draft model."""
    return AutoSchedule(replace(costs, draft_chained=not stops_early), most_draft_tokens, outlooks(drafters))


def outcomes(trace: Trace, random: Random) -> list[bool]:
    """Whether the draft's token is accepted at each position. Drawn beforehand, it is the same for every schedule."""
    return [random.random() < acceptance for acceptance in trace.acceptance]


def replay(
    trace: Trace,
    schedule: Schedule,
    costs: Costs,
    *,
    random: Random | None = None,
    lookup: Suffixes | None = None,
    most_draft_tokens: int = 15,
    learner: CostLearner | None = None,
) -> Replayed:
    """Emit the whole trace. A draft model is offered if `costs` has one, lookup if an empty `lookup` is given. learner:
    where the schedule's costs come from, if they are not known from the beginning; it is told what rounds really cost.
    """
    accepts = outcomes(trace, random or Random(0))
    length = len(accepts)
    if lookup is not None:
        lookup.extend(trace.prompt)
    position = passes = drafted_in_all = accepted_in_all = parked = lag = 0
    cost = 0.0
    if learner is not None:
        schedule.reprice(learner.costs(0))
    while position < length:
        room = min(most_draft_tokens, length - position - 1)
        offers = [model_offer(room, lag)] if costs.draft_step is not None else []
        found = None
        match = lookup.find(room) if lookup is not None and room > 0 else None
        if match is not None:
            offers.append(found := match_offer(match))
        choice = schedule.choose(offers)
        offer, drafted, accepted, read, drafting = None, 0, 0, 0, 0.0
        confidences: Sequence[float] = ()
        if choice is not None:
            offer, most = choice
            if offer is not found:
                drafted = 1 if schedule.stops_early else most
                while drafted < most and schedule.proceed(drafted, trace.confidences[position : position + drafted]):
                    drafted += 1
                confidences = trace.confidences[position : position + drafted]
                accepted = _run(accepts[position : position + drafted])
                read, drafting = lag, drafted * costs.draft + lag * costs.catching_up
                # The draft has read all it drafted but the last.
                lag = int(accepted == drafted)
            else:
                assert match is not None
                drafted = most
                pairs = zip(match.tokens[:most], trace.tokens[position:], strict=False)
                accepted = _run([token == true for token, true in pairs])
                lag += accepted + 1
        else:
            lag += 1
            parked += schedule.parked
        passed = drafting + costs.verify(drafted + 1)
        cost += passed
        seconds = passed * costs.plain
        schedule.observe(offer, drafted, accepted, confidences, seconds if offer is not None else None)
        if learner is not None:
            drafter = offer.drafter if offer is not None else None
            if learner.observe(position, RoundTime(drafted + 1, seconds, drafter, read, drafting * costs.plain)):
                schedule.reprice(learner.costs(position))
        if lookup is not None:
            lookup.extend(trace.tokens[position : position + accepted + 1])
        position += accepted + 1
        passes += 1
        drafted_in_all += drafted
        accepted_in_all += accepted
    return Replayed(position, passes, cost, drafted_in_all, accepted_in_all, parked)


def least_cost(
    accepts: Sequence[bool], costs: Costs, most_draft_tokens: int = 15, *, copied: Sequence[int] | None = None
) -> float:
    """What the trace would cost a schedule that knew every outcome beforehand: no schedule is cheaper.

    copied: of lookup, how many tokens it would have had accepted at each position (`copied_runs`); a draft model
    drafts beside it if `costs` has one.
    """
    length = len(accepts)
    least = [0.0] * (length + 1)
    for position in reversed(range(length)):
        most = min(most_draft_tokens, length - position - 1, costs.most_rows - 1)
        # More tokens than are accepted only cost; fewer may be cheaper than all.
        modelled = _run(accepts[position : position + most]) if costs.draft_step is not None else 0
        looked_up = min(copied[position], most) if copied is not None else 0
        rounds = [(drafted, drafted * costs.draft if drafted else 0.0) for drafted in range(modelled + 1)]
        rounds += [(drafted, 0.0) for drafted in range(1, looked_up + 1)]
        least[position] = min(
            costs.verify(drafted + 1) + drafting + least[position + drafted + 1] for drafted, drafting in rounds
        )
    return least[0]


def copied_runs(trace: Trace, lookup: Suffixes, most_draft_tokens: int = 15) -> list[int]:
    """How many tokens lookup, given empty, would have had accepted at each position of the trace."""
    lookup.extend(trace.prompt)
    runs = []
    for position, token in enumerate(trace.tokens):
        match = lookup.find(most_draft_tokens)
        found = match.tokens if match is not None else []
        runs.append(_run([a == b for a, b in zip(found, trace.tokens[position:], strict=False)]))
        lookup.extend([token])
    return runs


def _run(accepts: Sequence[bool]) -> int:
    """How many are accepted before the first that is not."""
    return next((index for index, accepted in enumerate(accepts) if not accepted), len(accepts))
