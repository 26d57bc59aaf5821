"""What is learned of acceptance, and what may be spent on learning more."""

from __future__ import annotations

from random import Random

import pytest

from mlx_spec.decoding.schedule.acceptance import Acceptance
from mlx_spec.decoding.schedule.probing import Allowance


def learned(chance: float, rounds: int, *, kinds: int = 4) -> Acceptance:
    acceptance, random = Acceptance([0.0] * kinds, accepted=2.8, rejected=0.9), Random(0)
    for _ in range(rounds):
        accepted = next((index for index in range(kinds) if random.random() >= chance), kinds)
        acceptance.observe(range(kinds), accepted)
    return acceptance


@pytest.mark.parametrize("chance", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_steady_outcomes_are_learned_without_bias(chance: float) -> None:
    acceptance, random = Acceptance([0.0] * 3, accepted=2.8, rejected=0.9), Random(0)
    seen = []
    for _ in range(1000):
        acceptance.observe(range(3), next((index for index in range(3) if random.random() >= chance), 3))
        seen.append(acceptance.reach(range(3)))
    means = [sum(reach) / 900 for reach in zip(*seen[100:], strict=True)]
    assert means == pytest.approx([chance, chance**2, chance**3], abs=0.04)
    assert sum(abs(reach[0] - chance) for reach in seen[100:]) / 900 < 0.06


def test_before_any_outcome_it_is_what_is_usual() -> None:
    first, second = Acceptance([0.0, 0.0], accepted=2.8, rejected=0.9).reach([0, 1])
    assert first == pytest.approx(2.8 / 3.7, abs=0.02)
    # Of a text whose first token is accepted more is to be expected.
    assert second / first > first + 0.02


def test_a_change_of_the_text_is_learned_within_few_rounds() -> None:
    acceptance = learned(0.95, 200)
    for _ in range(6):
        acceptance.observe([0], 0)
    assert acceptance.reach([0])[0] < 0.3
    for _ in range(3):
        acceptance.observe(range(4), 4)
    assert acceptance.reach([0])[0] > 0.7


def test_what_is_hopeless_is_taken_for_that_sooner_where_that_is_thought_possible() -> None:
    suspecting = Acceptance([0.0], accepted=2.8, rejected=0.9, hopeless=0.05)
    trusting = Acceptance([0.0], accepted=2.8, rejected=0.9)
    for _ in range(6):
        suspecting.observe([0], 0)
        trusting.observe([0], 0)
    assert suspecting.reach([0])[0] < 0.6 * trusting.reach([0])[0]


def test_a_position_that_is_worse_than_the_others_is_learned() -> None:
    acceptance, random = Acceptance([0.0, 0.0], accepted=2.8, rejected=0.9), Random(0)
    seen = []
    for _ in range(600):
        acceptance.observe([0, 1], (1 + (random.random() < 0.5)) if random.random() < 0.9 else 0)
        seen.append(acceptance.reach([0, 1]))
    first, both = (sum(reach) / 500 for reach in zip(*seen[100:], strict=True))
    assert first == pytest.approx(0.9, abs=0.07)
    assert both / first < 0.65  # held back by its neighbour, which was seen more often


def test_whether_kinds_mean_anything_is_learned() -> None:
    """One kind is thought to be better than the other, and here it is not."""
    random = Random(0)
    doubting = Acceptance([-2.0, 2.0], accepted=2.8, rejected=0.9, slopes=(0.0, 1.0))
    worse, better = doubting.reach([0])[0], doubting.reach([1])[0]
    assert better - worse > 0.2
    for _ in range(100):
        doubting.observe([random.randrange(2)], int(random.random() < 0.6))
    worse, better = doubting.reach([0])[0], doubting.reach([1])[0]
    assert abs(better - worse) < 0.1


def test_time_without_outcomes_leads_back_to_what_is_usual_but_slowly() -> None:
    acceptance = learned(0.0, 50)
    failed = acceptance.reach([0])[0]
    for _ in range(100):
        acceptance.rest()
    assert failed + 0.05 < acceptance.reach([0])[0] < 0.5


def test_probes_are_paid_from_a_small_share_that_shrinks_while_they_fail() -> None:
    allowance = Allowance(price=0.5)
    waited = []
    for _ in range(5):
        rounds = allowance.rounds(0.5)
        for _ in range(rounds):
            assert not allowance.affords(0.5)
            allowance.save(1.0)
        assert allowance.affords(0.5)
        waited.append(rounds)
        allowance.spend(0.5, successful=False)
    assert waited[1:] == sorted(waited[1:])
    assert waited[-1] == pytest.approx(4 * 0.5 / 0.008, abs=1)
    assert 0.01 * sum(waited) + 0.5 > 5 * 0.5
    allowance.spend(0.0, successful=True)
    assert allowance.rounds(0.5) == pytest.approx(0.5 / 0.008, abs=1)


def test_little_can_be_saved_for_a_bad_time() -> None:
    allowance = Allowance(price=0.5)
    for _ in range(100_000):
        allowance.save(1.0)
    assert allowance.affords(0.75)
    assert not allowance.affords(0.8)
