"""Schedules by themselves: what they choose after what they saw."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from replay import Trace, automatic, replay
from traces import TABLES, Recorded, trace, uninformed

from mlx_spec.decoding.drafters.draft_model import model_offer
from mlx_spec.decoding.drafters.lookup import match_offer
from mlx_spec.decoding.drafters.suffixes import Match
from mlx_spec.decoding.schedule.automatic import AutoSchedule
from mlx_spec.decoding.schedule.costs import Costs
from mlx_spec.decoding.schedule.offers import Offer
from mlx_spec.decoding.schedule.schedule import FixedSchedule

MODEL = model_offer(15)


def match(tokens: int, length: int) -> Offer:
    return match_offer(Match(length, [0] * tokens, 1))


def fail(schedule: AutoSchedule, rounds: int, offer: Offer = MODEL) -> None:
    """Everything that is drafted is rejected."""
    for _ in range(rounds):
        choice = schedule.choose([offer])
        schedule.observe(choice and choice[0], 1 if choice else 0, 0, (0.7,) if choice else ())


def test_a_fixed_schedule_drafts_what_it_is_told_and_no_more_than_can_be_had() -> None:
    schedule = FixedSchedule(4)
    assert schedule.choose([MODEL]) == (MODEL, 4)
    assert schedule.choose([model_offer(2)]) == (model_offer(2), 2)
    assert schedule.choose([]) is None
    assert schedule.choose([model_offer(0)]) is None
    assert schedule.proceed(1, [0.01])
    assert schedule.plain_rounds() == 0
    assert not schedule.parked


def test_fixed_at_none_is_plain_decoding_for_good() -> None:
    schedule = FixedSchedule(0)
    assert schedule.choose([MODEL]) is None
    assert schedule.plain_rounds() > 1_000_000
    with pytest.raises(ValueError, match="not -1"):
        FixedSchedule(-1)


def test_a_confident_match_goes_before_the_model_and_another_after_it() -> None:
    long, short = match(9, 3), match(9, 2)
    schedule = FixedSchedule(4)
    assert schedule.choose([MODEL, long]) == (long, 4)
    assert schedule.choose([short, MODEL]) == (MODEL, 4)
    assert schedule.choose([short]) == (short, 4)


def test_it_drafts_the_more_the_more_is_accepted() -> None:
    schedule = automatic(TABLES["70B"], 15, stops_early=False)
    chosen = []
    for accepts in (True, False):
        for _ in range(20):
            _, tokens = schedule.choose([MODEL]) or (MODEL, 0)
            chosen.append(tokens)
            offer = MODEL if tokens else None
            schedule.observe(offer, tokens, tokens if accepts else 0, (0.7,) * tokens)
    assert chosen[0] < 5
    assert chosen[19] == 15  # 16 / (V(16) + 15 c) is the best at acceptance 1
    assert chosen[39] <= 1
    assert all(earlier <= later for earlier, later in pairwise(chosen[:20]))
    assert all(earlier >= later for earlier, later in pairwise(chosen[20:30]))


def test_more_than_can_be_had_or_was_measured_is_never_drafted() -> None:
    costs = Costs(((1, 1.0), (6, 1.0)), 0.0)
    assert automatic(costs, 15, stops_early=False).choose([MODEL]) == (MODEL, 5)
    assert automatic(costs, 15).choose([MODEL]) == (MODEL, 5)
    assert automatic(costs, 3).choose([MODEL]) == (MODEL, 3)
    two = model_offer(2)
    assert automatic(costs, 15).choose([two]) == (two, 2)
    assert automatic(costs, 15).choose([model_offer(0)]) is None
    assert automatic(costs, 0).choose([MODEL]) is None
    assert automatic(Costs(((1, 1.0),), 0.0), 15).choose([MODEL]) is None


def test_a_drafter_that_is_not_there_is_never_chosen() -> None:
    lookup = match(15, 20)
    assert automatic(TABLES["ideal"], 15, drafters=["lookup"]).choose([MODEL]) is None
    assert automatic(replace(TABLES["ideal"], draft_step=None), 15).choose([MODEL]) is None
    choice = automatic(replace(TABLES["ideal"], draft_step=None), 15).choose([MODEL, lookup])
    assert choice is not None
    assert choice[0] == lookup


def test_a_long_match_is_worth_more_tokens_than_a_short_one_and_goes_before_the_model() -> None:
    chosen = []
    for length in (2, 6, 12, 40):
        offer = match(15, length)
        choice = automatic(TABLES["CPU"], 15).choose([offer])
        chosen.append(choice[1] if choice else 0)
    assert chosen == sorted(chosen)
    assert chosen[0] <= 1
    assert chosen[-1] >= 4
    long = match(15, 40)
    choice = automatic(TABLES["CPU"], 15).choose([MODEL, long])
    assert choice is not None
    assert choice[0] == long


def test_a_draft_that_is_unsure_is_stopped_and_one_that_is_sure_goes_on() -> None:
    schedule = automatic(TABLES["70B"], 15)
    random = Random(3)
    for _ in range(60):
        choice = schedule.choose([MODEL])
        assert choice is not None
        confidences = [random.choice([0.05, 0.98])]
        while len(confidences) < choice[1] and schedule.proceed(len(confidences), confidences):
            confidences.append(random.choice([0.05, 0.98]))
        accepted = next((i for i, sure in enumerate(confidences) if random.random() > sure), len(confidences))
        schedule.observe(MODEL, len(confidences), accepted, confidences)
    schedule.choose([MODEL])
    assert schedule.proceed(1, [0.98])
    assert not schedule.proceed(1, [0.05])
    assert not schedule.proceed(2, [0.98, 0.05])
    assert not schedule.proceed(15, [0.99] * 15)


def test_it_goes_over_a_step_that_does_not_pay_by_itself_where_the_next_ones_do() -> None:
    """The second row is dear and further ones are free."""
    schedule = automatic(Costs(((1, 1.0), (2, 1.1), (3, 2.2), (16, 2.2)), 0.0), 15)
    for _ in range(30):
        schedule.choose([MODEL])
        schedule.observe(MODEL, 15, 15, [0.99] * 15)
    schedule.choose([MODEL])
    assert schedule.proceed(1, [0.99])


def test_what_fails_is_parked_and_probed_at_growing_intervals() -> None:
    schedule = Recorded(TABLES["CPU"], 15, drafters=["model"])
    fail(schedule, 2000)
    tried = [index for index, (drafted, _) in enumerate(schedule.rounds) if drafted]
    gaps = [later - earlier for earlier, later in pairwise(tried)]
    assert len(tried) < 20
    assert gaps[-1] > 2 * gaps[1]
    assert schedule.parked
    assert all(drafted <= 1 for drafted, _ in schedule.rounds[5:])


def test_it_says_how_many_rounds_are_plain_and_tries_after_them() -> None:
    schedule = automatic(TABLES["CPU"], 15, drafters=["model"])
    assert schedule.plain_rounds() == 0
    fail(schedule, 30)
    rounds = schedule.plain_rounds()
    assert rounds > 1
    for _ in range(rounds):
        assert schedule.plain_rounds() > 0 or schedule.choose([MODEL]) is not None
        schedule.observe(None, 0, 0, ())
    assert schedule.plain_rounds() == 0
    assert schedule.choose([MODEL]) is not None
    assert not schedule.parked


def test_plain_rounds_are_never_certain_while_a_long_match_would_be_tried() -> None:
    schedule = automatic(TABLES["CPU"], 15)
    fail(schedule, 30)
    assert schedule.parked
    assert schedule.plain_rounds() == 0


def test_without_an_offer_nothing_is_parked() -> None:
    schedule = automatic(TABLES["CPU"], 15)
    assert schedule.choose([]) is None
    assert not schedule.parked


def test_a_parked_text_that_becomes_easy_is_noticed() -> None:
    for costs in (TABLES["CPU"], TABLES["8B"], TABLES["70B"]):
        schedule = Recorded(costs, 15, drafters=["model"])
        text = uninformed([0.0] * 200 + [0.98] * 300, Random(0))
        replay(text, schedule, costs, random=Random(0))
        assert sum(accepted for _, accepted in schedule.rounds) > 120


def test_a_first_success_is_followed_up_though_reading_is_dear() -> None:
    """On a CPU a model looks hopeless until a few of its tokens were accepted."""
    schedule = Recorded(TABLES["CPU pair"], 15, drafters=["model"])
    replay(Trace([1.0] * 40, [0.95] * 40), schedule, TABLES["CPU pair"])
    assert all(drafted for drafted, _ in schedule.rounds[:-1])


def test_a_model_that_is_dear_to_resume_stays_parked_unless_it_won_before() -> None:
    costs = replace(TABLES["8B"], draft_row=0.04 * 12)
    for before, comes_back in ((0.0, False), (0.95, True)):
        schedule = Recorded(costs, 15, drafters=["model"])
        text = uninformed([before] * 200 + [0.0] * 200 + [0.95] * 300, Random(0))
        replay(text, schedule, costs, random=Random(0))
        drafted_late = sum(drafted for drafted, _ in schedule.rounds[-100:])
        assert (drafted_late > 50) == comes_back


def test_after_other_costs_probes_have_their_price() -> None:
    schedule = automatic(TABLES["CPU"], 15, drafters=["model"])
    fail(schedule, 30)
    dear = Costs(tuple((rows, seconds * rows) for rows, seconds in TABLES["CPU"].target), 0.35 * 6.3)
    schedule.reprice(dear)
    before = schedule.plain_rounds()
    assert before > 1
    for _ in range(before):
        schedule.choose([MODEL])
        schedule.observe(None, 0, 0, ())
    assert schedule.choose([MODEL]) == (MODEL, 1)


def test_a_row_that_is_not_known_waits_until_its_worst_case_is_within_the_share() -> None:
    """A plain pass more at most: 3% of 34."""
    schedule = automatic(TABLES["CPU"], 15, drafters=["lookup"])
    schedule.reprice(Costs(((1, 1.0),), None))
    assert schedule.choose([match(3, 5)]) is None
    assert schedule.plain_rounds() == 34
    for _ in range(34):
        schedule.observe(None, 0, 0, ())
    assert schedule.choose([match(3, 5)]) == (match(3, 5), 1)


def test_without_any_known_cost_nothing_is_drafted() -> None:
    schedule = automatic(TABLES["CPU"], 15, drafters=["lookup"])
    schedule.reprice(Costs((), None))
    assert schedule.choose([match(3, 5)]) is None
    assert schedule.plain_rounds() == sys.maxsize


def test_it_does_the_same_again() -> None:
    runs = []
    for _ in range(2):
        schedule = Recorded(TABLES["70B"], 15)
        replay(trace("quick", 500), schedule, TABLES["70B"], random=Random(0))
        runs.append(schedule.rounds)
    assert runs[0] == runs[1]
