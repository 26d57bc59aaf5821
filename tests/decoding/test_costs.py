"""What passes cost: the table is read as measured, and what cannot have been measured is refused."""

from __future__ import annotations

import math

import pytest

from mlx_spec.decoding.schedule.costs import Costs


def test_what_was_measured_is_kept_and_between_it_the_time_grows_evenly() -> None:
    costs = Costs(((1, 2.0), (2, 2.5), (4, 4.5)), draft_step=0.5, draft_row=0.1)
    assert [costs.verify(rows) for rows in (1, 2, 3, 4)] == pytest.approx([1, 1.25, 1.75, 2.25])
    assert costs.most_rows == 4
    assert costs.draft == pytest.approx(0.25)
    assert costs.catching_up == pytest.approx(0.05)


def test_nothing_is_known_of_passes_beyond_the_last_measured() -> None:
    costs = Costs(((1, 1.0), (4, 2.0)), draft_step=None)
    assert costs.verify(5) == math.inf
    assert costs.speedups([1.0] * 5, 0.0)[3:] == [0, 0]
    assert costs.draft == math.inf
    assert costs.speedups([1.0], costs.draft) == [0]


def test_what_is_not_known_yet_is_not_in_it() -> None:
    nothing = Costs((), draft_step=None)
    assert (nothing.most_rows, nothing.plain, nothing.draft, nothing.catching_up) == (0, math.inf, math.inf, 0)
    assert [nothing.verify(rows) for rows in (1, 2)] == [1, math.inf]  # plain decoding is the measure of all else
    assert Costs((), draft_step=1.0, draft_row=0.1).draft == math.inf
    assert Costs(((1, 2.0),), draft_step=1.0).draft == 0.5


def test_a_pass_never_costs_more_than_a_larger_one() -> None:
    costs = Costs(((1, 1.0), (2, 9.0), (3, 1.5), (4, 2.0)), draft_step=0.1)
    assert [costs.verify(rows) for rows in (1, 2, 3, 4)] == pytest.approx([1, 1.5, 1.5, 2])
    # A row that was disturbed is no measure of a draft step either.
    assert Costs(((1, 4.0), (2, 2.0)), draft_step=1.0).draft == pytest.approx(0.5)


def test_no_rows_are_no_pass() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        Costs(((1, 1.0),), draft_step=None).verify(0)


@pytest.mark.parametrize(
    ("target", "draft_step", "draft_row", "message"),
    [
        (((2, 1.0), (4, 1.0)), 1.0, 0.0, "begin with one row"),
        (((1, 1.0), (4, 1.0), (2, 1.0)), 1.0, 0.0, "ascend"),
        (((1, 1.0), (1, 1.0)), 1.0, 0.0, "ascend"),
        (((1, 0.0),), 1.0, 0.0, "positive"),
        (((1, 1.0), (2, math.nan)), 1.0, 0.0, "positive"),
        (((1, 1.0), (2, math.inf)), 1.0, 0.0, "positive"),
        (((1, 1.0),), -1.0, 0.0, "draft step"),
        (((1, 1.0),), math.nan, 0.0, "draft step"),
        (((1, 1.0),), 1.0, -1.0, "row of a draft pass"),
        (((1, 1.0),), 1.0, math.inf, "row of a draft pass"),
    ],
)
def test_a_table_that_cannot_have_been_measured_is_refused(
    target: tuple[tuple[int, float], ...], draft_step: float, draft_row: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Costs(target, draft_step, draft_row)


@pytest.mark.parametrize(
    ("acceptance", "speedup", "draft_tokens"), [(0.6, 1.66, 2), (0.7, 1.86, 2), (0.8, 2.14, 3), (0.9, 2.60, 4)]
)
def test_the_best_number_of_tokens_on_a_published_curve(acceptance: float, speedup: float, draft_tokens: int) -> None:
    """A 70B's passes (ml-explore/mlx, pull request 3791) and c = 0.03. What a pass of 4 rows takes was not measured
    there, so the figures agree to 2% and the number of tokens to half a percent of the best."""
    published = ((1, 75.9), (3, 84.8), (5, 108.0), (8, 168.0), (12, 241.0), (16, 296.0))
    costs = Costs(published, draft_step=0.03 * 75.9)
    speedups = costs.speedups([acceptance**k for k in range(1, 16)], costs.draft)
    assert max(speedups) == pytest.approx(speedup, rel=0.022)
    assert speedups[draft_tokens - 1] > 0.995 * max(speedups)
    # Where it was measured the arithmetic is exact.
    emitted = 1 + acceptance + acceptance**2
    assert speedups[1] == pytest.approx(emitted / (84.8 / 75.9 + 2 * 0.03))


def test_where_verifying_is_free_the_speedup_is_that_of_the_theorem() -> None:
    free = Costs(((1, 1.0), (16, 1.0)), draft_step=0.05)
    expected = [(1 - 0.8 ** (k + 1)) / (1 - 0.8) / (1 + k * 0.05) for k in range(1, 16)]
    assert free.speedups([0.8**k for k in range(1, 16)], free.draft) == pytest.approx(expected)


def test_a_draft_that_fell_behind_must_be_worth_its_reading() -> None:
    costs = Costs(((1, 1.0), (8, 1.0)), draft_step=0.1, draft_row=0.05)
    prices = costs.draft, costs.catching_up
    near, far = costs.speedups([0.8, 0.64], *prices), costs.speedups([0.8, 0.64], *prices, lag=1000)
    assert max(near) > 1 > max(far)
    assert costs.speedups([0.8, 0.64], 0.0, lag=1000) == pytest.approx([1.8, 2.44])
