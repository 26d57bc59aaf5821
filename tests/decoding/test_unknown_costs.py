"""Schedules that begin with no idea of what passes cost and find it out by the rounds of answers, played over invented
texts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from replay import Trace, automatic, replay
from traces import TABLES, Learning, copying, trace, unknown

from mlx_spec.decoding.drafters.suffixes import Suffixes
from mlx_spec.decoding.schedule.costs import Costs


def answered(texts: Sequence[Trace], costs: Costs, learner: Learning | None, *, lookup: bool = False) -> float:
    """Tokens for the time of a plain pass, over answers one after the other; learner None: costs are known."""
    tokens = cost = 0.0
    for text in texts:
        schedule = automatic(costs) if learner is None else unknown(costs)
        played = replay(text, schedule, costs, lookup=Suffixes() if lookup else None, learner=learner)
        tokens, cost = tokens + played.tokens, cost + played.cost
    return tokens / cost


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("name", ["steady 0.0", "steady 0.4", "bad-good"])
@pytest.mark.parametrize("length", [100, 600])
def test_finding_out_takes_three_percent_of_an_answer_at_most(name: str, length: int, table: str) -> None:
    """And what probing takes of every answer, costs known or not: two percent."""
    costs = TABLES[table]
    assert answered([trace(name, length)], costs, Learning(costs)) > 1 / (1 + 0.03 + 0.02)


@pytest.mark.parametrize("table", TABLES)
def test_nothing_is_drafted_before_a_worst_case_is_within_the_share(table: str) -> None:
    """An unknown row and an unknown step cost a plain pass each at most: two of them are 3% of 67."""
    costs = TABLES[table]
    played = replay(trace("steady 0.9", 60), unknown(costs), costs, learner=Learning(costs))
    assert (played.drafted, played.cost) == (0, 60)


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("name", ["steady 0.7", "steady 0.9", "informed 0.9"])
def test_after_some_answers_it_is_as_fast_as_one_that_knew(name: str, table: str) -> None:
    costs, learner = TABLES[table], Learning(TABLES[table])
    answered([trace(name, 600, seed) for seed in range(4)], costs, learner)
    texts = [trace(name, 600, seed) for seed in range(10, 12)]
    assert answered(texts, costs, learner) > 0.97 * answered(texts, costs, None)


def test_what_is_not_promising_stays_unknown_and_later_answers_go_on() -> None:
    costs = TABLES["70B"]
    learner = Learning(costs)
    answered([trace("steady 0.0", 400)], costs, learner)
    hopeless = learner.costs(0).most_rows
    answered([trace("steady 0.97", 400, seed) for seed in range(4)], costs, learner)
    promising = learner.costs(0).most_rows
    assert 1 <= hopeless < 5 <= promising
    for seed in range(8):
        answered([trace("steady 0.97", 400, seed)], costs, learner)
        assert learner.costs(0).most_rows >= promising
        promising = learner.costs(0).most_rows


def test_matches_find_out_rows_without_a_draft_model() -> None:
    from random import Random

    costs = TABLES["70B"]
    learner = Learning(costs)
    text = copying(1500, 0.0, Random(0))
    alone = Costs(costs.target, None)
    played = replay(text, unknown(costs, ["lookup"]), alone, lookup=Suffixes(), learner=learner)
    assert played.speedup > 1
    assert learner.costs(0).most_rows > 4


def test_who_knows_no_costs_does_not_say_that_drafts_cannot_win() -> None:
    costs = TABLES["CPU pair"]
    assert replay(trace("steady 0.1", 60), unknown(costs), costs, learner=Learning(costs)).parked_passes == 0
    assert replay(trace("steady 0.1", 60), automatic(costs), costs).parked_passes > 0
