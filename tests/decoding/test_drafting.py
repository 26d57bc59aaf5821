"""Drafters and schedules inside the round loop: the tokens stay those of plain decoding, both contexts and the lookup
hold what was committed, a pass stays in flight while nothing is drafted, and schedules are told what happened."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from reference import TableModel
from replay import automatic
from test_engine import Broken, Run, _breaks
from tiny import tiny_module

from mlx_spec.architectures.paged import PagedContext, PagedModel
from mlx_spec.decoding import drafting
from mlx_spec.decoding.drafters import lookup as looking_up
from mlx_spec.decoding.drafters.draft_model import DraftModel
from mlx_spec.decoding.drafters.lookup import Lookup
from mlx_spec.decoding.drafters.suffixes import Suffixes
from mlx_spec.decoding.drafting import Drafting
from mlx_spec.decoding.engine import Decoding
from mlx_spec.decoding.schedule.costs import Costs
from mlx_spec.decoding.schedule.offers import Offer
from mlx_spec.decoding.schedule.schedule import FixedSchedule, Schedule
from mlx_spec.decoding.verification import verify_block, verify_tokenwise
from mlx_spec.settings import Sampling

SIZE = 40
PROMPT = [3, 17, 8, 25, 3]
CHEAP = Costs(((1, 1.0), (16, 1.1)), draft_step=0.01, draft_row=0.001)
"""Passes over many rows cost little more: drafting always pays."""
DEAR = Costs(((1, 1.0), (2, 6.0), (16, 60.0)), draft_step=0.5, draft_row=0.1)
"""Drafting never pays."""
BETWEEN = Costs(((1, 1.0), (2, 1.3), (4, 1.7), (8, 3.0), (16, 8.0)), draft_step=0.1, draft_row=0.02)


def _model(seed: int) -> PagedModel:
    """Nearly forgets what came before the last token, and so comes back to what it said before."""
    module = tiny_module(seed, 0.8, vocab_size=SIZE, tie_word_embeddings=False)
    for layer in module.model.layers:
        layer.self_attn.o_proj.weight *= 0.01
    return PagedModel(module)


TARGET, SAME, OTHER = _model(3), _model(3), _model(5)


class Checked:
    """A schedule, and the protocol by which it is asked and told."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.offers: list[Offer] = []
        self.observed: list[tuple[Offer | None, int, int]] = []
        self._choice: tuple[Offer, int] | None = None  # the latest since the latest observation
        self.early = True

    @property
    def parked(self) -> bool:
        return self.schedule.parked

    @property
    def whole_rounds(self) -> bool:
        return self.schedule.whole_rounds

    @property
    def stops_early(self) -> bool:
        """Confidences are asked for, as by AutoSchedule on most machines."""
        return self.early

    def reprice(self, costs: Costs) -> None:
        self.schedule.reprice(costs)

    def choose(self, offers: Sequence[Offer]) -> tuple[Offer, int] | None:
        assert len({offer.drafter for offer in offers}) == len(offers)
        assert all(offer.tokens >= 1 for offer in offers)
        self.offers.extend(offers)
        self._choice = self.schedule.choose(offers)
        return self._choice

    def proceed(self, drafted: int, confidences: Sequence[float]) -> bool:
        assert self._choice is not None
        assert self._choice[0].drafter == "model"
        assert 1 <= drafted == len(confidences) < self._choice[1]
        assert all(0 < confidence <= 1.0001 for confidence in confidences)
        return self.schedule.proceed(drafted, confidences)

    def observe(
        self, offer: Offer | None, drafted: int, accepted: int, confidences: Sequence[float],
        seconds: float | None = None,
    ) -> None:  # fmt: skip
        """What is told is what was chosen last."""
        if offer is None:
            assert (drafted, accepted, list(confidences)) == (0, 0, [])
            assert self._choice is None
        else:
            assert self._choice is not None
            assert offer is self._choice[0]
            assert 0 <= accepted <= drafted <= self._choice[1]
            assert drafted >= 1
            assert len(confidences) in (0, drafted)
        self.observed.append((offer, drafted, accepted))
        self._choice = None
        assert seconds is None if offer is None else seconds is not None
        self.schedule.observe(offer, drafted, accepted, confidences, seconds)

    def plain_rounds(self) -> int:
        return self.schedule.plain_rounds()


class Moody:
    """Takes turns between drafters and plain rounds, and stops where the draft is unsure."""

    parked, stops_early, whole_rounds = False, True, False

    def __init__(self) -> None:
        self._round = 0

    def choose(self, offers: Sequence[Offer]) -> tuple[Offer, int] | None:
        wanted = ("model", "lookup", None, "lookup", "model", "model")[self._round % 6]
        offer = next((offer for offer in offers if offer.drafter == wanted), None)
        return offer and (offer, min(offer.tokens, 1 + self._round % 7))

    def proceed(self, drafted: int, confidences: Sequence[float]) -> bool:
        return confidences[-1] > 0.6

    def observe(self, offer: Offer | None, drafted: int, accepted: int, *more: Any) -> None:
        self._round += 1

    def plain_rounds(self) -> int:
        return 0


SCHEDULES: dict[str, Any] = {
    "1": lambda: FixedSchedule(1), "3": lambda: FixedSchedule(3), "15": lambda: FixedSchedule(15), "moody": Moody,
    "cheap": lambda: automatic(CHEAP, 15), "between": lambda: automatic(BETWEEN, 15),
    "dear": lambda: automatic(DEAR, 15),
}  # fmt: skip
GREEDY = Sampling()
DRAFTERS = ("lookup", "same", "other", "hybrid same", "hybrid other")
HYBRID = "hybrid other"


def prepared(
    drafters: str = HYBRID, schedule: str = "moody", sampling: Sampling = GREEDY, *, target: Any = TARGET,
    verify: drafting.Verify = verify_block, shortest: int = 2, **options: Any,
) -> Run:  # fmt: skip
    """A Run after its prompt, with these drafters."""
    draft = None if drafters == "lookup" else SAME if "same" in drafters else OTHER
    run = Run(target, options.pop("draft", draft), sampling, **options)
    run.lookup = Lookup(run.size, shortest) if "lookup" in drafters or "hybrid" in drafters else None
    both = [drafter for drafter in (run.lookup, run.draft) if drafter is not None]
    run.drafting = Drafting(both, Checked(SCHEDULES[schedule]()), verify=verify)
    run.begin()
    return run


def go(run: Run, limit: int | None = 60, **options: Any) -> list[int]:
    for finished in run.decoding.rounds(limit=limit, **options):
        run.rounds.append(finished)
    return run.made


def drafted_by(run: Run, drafter: str) -> tuple[int, int]:
    """Drafted and accepted."""
    rounds = [finished for finished in run.rounds if finished.drafter == drafter]
    return sum(finished.drafted for finished in rounds), sum(finished.accepted for finished in rounds)


def check(run: Run) -> None:
    """Both contexts hold committed tokens, and the lookup all of them once it is asked again."""
    run.check()
    if run.lookup is not None:
        run.drafting.schedule.schedule = FixedSchedule(3)
        run.drafting.plan(run.tokens, 9)
        fresh = Suffixes()
        fresh.extend(run.tokens)
        assert run.lookup._suffixes.length == len(run.tokens)
        assert run.lookup._suffixes.find(9) == fresh.find(9)


def plainly(count: int, sampling: Sampling = GREEDY, target: Any = TARGET, **options: Any) -> list[int]:
    return Run(target, None, sampling, **options).go(0, count)


@pytest.fixture(scope="module")
def plain() -> list[int]:
    """160 greedy tokens of TARGET after PROMPT."""
    made = plainly(160)
    assert 10 < len(set(made)) < 30
    return made


# -- the output ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("drafters", DRAFTERS)
def test_greedy_equals_plain_decoding(drafters: str, schedule: str, plain: list[int]) -> None:
    run = prepared(drafters, schedule)
    assert go(run, 80) == plain[:80]
    assert [token for finished in run.rounds for token in finished.tokens] == plain[:80]
    check(run)
    if schedule in ("dear", "between"):
        return
    if drafters in ("lookup", HYBRID) or (drafters == "hybrid same" and schedule != "cheap"):
        drafted, accepted = drafted_by(run, "lookup")
        assert drafted > accepted > (0 if schedule == "moody" or "same" in drafters else 8)
    if drafters != "lookup":
        drafted, accepted = drafted_by(run, "model")
        assert drafted > 0
        assert accepted == drafted if "same" in drafters else accepted < drafted


def test_the_model_drafts_where_lookup_finds_little(plain: list[int]) -> None:
    run = prepared("hybrid same", "3")
    go(run, 80)
    assert {finished.drafter for finished in run.rounds} == {"model", "lookup"}
    alone = prepared("lookup", "3")
    go(alone, 80)
    assert {finished.drafter for finished in alone.rounds} == {None, "lookup"}
    assert len(run.rounds) < len(alone.rounds) < 80


def test_a_draft_that_is_unsure_stops_early(plain: list[int]) -> None:
    lengths = set()
    for drafters in ("same", "other"):
        run = prepared(drafters, "moody")
        assert go(run, 80) == plain[:80]
        lengths |= {finished.drafted for finished in run.rounds}
    assert len(lengths) > 3
    run = prepared("other", "15")
    run.drafting.schedule.schedule.proceed = lambda drafted, confidences: drafted < 2
    go(run, 20)
    assert {finished.drafted for finished in run.rounds[:-2]} == {2}
    run = prepared("other", "15")
    run.drafting.schedule.early = False
    run.drafting.schedule.schedule.proceed = None  # nobody asks
    go(run, 20)
    assert run.rounds[0].drafted == 15


@pytest.mark.parametrize("verify", [verify_tokenwise, verify_block])
def test_the_chosen_verification_is_used(verify: Any, plain: list[int]) -> None:
    calls: list[int] = []

    def spy(target: mx.array, draft: mx.array, tokens: mx.array, key: mx.array) -> tuple[mx.array, mx.array]:
        assert target.shape == (tokens.size + 1,)  # greedy: each row's only token
        assert draft.shape[0] == tokens.size
        calls.append(tokens.size)
        return verify(target, draft, tokens, key)

    run = prepared(HYBRID, "3", verify=spy)
    assert go(run, 40) == plain[:40]
    assert calls == [finished.drafted for finished in run.rounds if finished.drafted]


@pytest.mark.parametrize("drafters", ["lookup", HYBRID])
@pytest.mark.parametrize("temperature", [0, 0.7])
@pytest.mark.parametrize(
    "settings", [{"repetition_penalty": 1.3, "frequency_penalty": -0.3}, {"presence_penalty": -1.0}], ids=str
)
def test_penalties_count_each_token_once(settings: dict[str, float], temperature: float, drafters: str) -> None:
    """Negative ones favour what was said, so that lookup finds it."""
    sampling = Sampling(temperature=temperature, **settings)  # type: ignore[arg-type]
    run = prepared(drafters, "moody", sampling)
    go(run, 60)
    assert drafted_by(run, "lookup")[1] > 0
    np.testing.assert_array_equal(np.array(run.decoding._seen)[0], np.bincount(run.tokens, minlength=SIZE))
    if temperature == 0:
        assert run.made == plainly(60, sampling)


@pytest.mark.parametrize("drafters", ["lookup", HYBRID])
@pytest.mark.parametrize("schedule", ["3", "dear", "cheap"])
@pytest.mark.parametrize("cheap", [True, False])
def test_any_limit(
    drafters: str, schedule: str, cheap: bool, plain: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PagedContext, "chains_cheaply", property(lambda self: cheap))
    for limit in (0, 1, 2, 3, 33):
        run = prepared(drafters, schedule)
        assert go(run, limit) == plain[:limit]
        assert sum(len(finished.tokens) for finished in run.rounds) == limit
        check(run)
    run = prepared(drafters, schedule)
    for _ in range(5):  # in pieces, the last of which may be all that fits
        for limit in (1, 2, 4):
            go(run, limit)
            check(run)
            run.drafting.schedule = Checked(SCHEDULES[schedule]())
    assert run.made == plain[:35]


def test_lookup_never_proposes_the_padding_of_an_embedding() -> None:
    """Which a prompt may hold: nothing of it could be emitted, and its row of the distribution does not exist."""
    table = np.array(TableModel.random(1, SIZE).table)
    target, size = TableModel(table), SIZE - 4
    for place in (0, 1, 2):
        run_of = [5, 6, 7, 8, 9, 10]
        run_of[2 + place] = SIZE - 1
        prompt = [*run_of, 1, 5, 6]
        for sampling in (Sampling(), Sampling(temperature=1, frequency_penalty=0.1)):
            run = prepared("lookup", "3", sampling, target=target, prompt=prompt, size=size)
            [first, *_] = run.decoding.rounds(limit=12)
            assert first.drafted == min(place, 3)
            assert max(run.made) < size
            if sampling.temperature == 0:
                assert run.made == plainly(12, target=target, prompt=prompt, size=size)
            for offer in run.drafting.schedule.offers:
                assert offer.tokens > 0


# -- the invariant -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cheap", [True, False])
@pytest.mark.parametrize("schedule", ["moody", "3", "between"])
def test_closing_at_any_yield(schedule: str, cheap: bool, plain: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagedContext, "chains_cheaply", property(lambda self: cheap))
    seen = set()
    for rounds in (0, 1, 2, 3, 5, 8, 13, 21):
        run = prepared("hybrid same", schedule)
        generator = run.decoding.rounds(limit=None)
        for _ in range(rounds):
            run.rounds.append(next(generator))
        generator.close()
        seen |= {finished.drafter for finished in run.rounds}
        check(run)
        run.begin()
        run.drafting.schedule = Checked(SCHEDULES[schedule]())
        go(run, 9)
        assert run.made == plain[: len(run.made)]
        check(run)
    assert seen >= {"model", "lookup"}


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("where", ["target", "draft", "verify", "lookup", "observe"])
def test_an_exception_anywhere_in_a_round(where: str, after: bool, plain: list[int]) -> None:
    for at in (1, 2, 3, 7, 15, 24):
        run = prepared("hybrid same", "moody")
        owner, name = {
            "target": (run.target, "extend"), "draft": (run.draft.context, "extend"),
            "lookup": (run.lookup._suffixes, "extend"), "verify": (run.drafting, "verify"),
            "observe": (run.drafting.schedule, "observe"),
        }[where]  # fmt: skip
        setattr(owner, name, _breaks(getattr(owner, name), at, after))
        with pytest.raises(Broken):
            go(run, 140)
        delattr(owner, name) if name != "verify" else setattr(owner, name, verify_block)
        assert run.made == plain[: len(run.made)]
        check(run)
        run.drafting.schedule = Checked(Moody())
        run.begin()
        go(run, 10)
        check(run)
        assert run.made == plain[: len(run.made)]


def test_ctrl_c_at_any_line_of_the_drafting(plain: list[int]) -> None:
    """Everywhere but in the restoring itself."""
    lines, at = 0, sys.maxsize
    restoring = ("_rewind", "rewind", "settle")

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal lines
        if "/mlx_spec/" not in frame.f_code.co_filename.replace("\\", "/") or frame.f_code.co_name in restoring:
            return None
        if event == "line" and not _is_restoring(frame, restoring):
            lines += 1
            if lines == at:
                raise KeyboardInterrupt
        return trace

    def interrupted(run: Run) -> None:
        nonlocal lines
        lines, before = 0, sys.gettrace()
        sys.settrace(trace)
        try:
            go(run, 30)
        finally:
            sys.settrace(before)

    interrupted(prepared("hybrid same", "moody"))
    total, wrong = lines, 0
    for chosen in random.Random(1).sample(range(1, total), 40):
        at = chosen
        run = prepared("hybrid same", "moody")
        try:
            interrupted(run)
        except KeyboardInterrupt:
            wrong += 1
        check(run)
        run.drafting.schedule = Checked(Moody())
        run.begin()
        go(run, 10)
        assert run.made == plain[: len(run.made)]
        check(run)
    assert wrong > 30


def _is_restoring(frame: Any, names: Sequence[str]) -> bool:
    while frame is not None:
        if frame.f_code.co_name in names and "/mlx_spec/" in frame.f_code.co_filename.replace("\\", "/"):
            return True
        frame = frame.f_back
    return False


@pytest.mark.parametrize("drafters", ["lookup", "hybrid same"])
def test_an_end_token_inside_what_lookup_drafted(drafters: str) -> None:
    """A count to 39 and over again, by a table that lookup knows by heart after one turn."""
    run, prompt = _counting(drafters, "15"), list(range(SIZE))
    [finished] = run.decoding.rounds(limit=None, end_tokens={5, 9})
    assert run.tokens == [*prompt, 0, 1, 2, 3, 4, 5]
    assert finished.drafter == "lookup"
    assert finished.accepted == finished.drafted == 15
    assert finished.tokens[-1] == 5
    assert finished.ended
    check(run)
    [again] = run.decoding.rounds(limit=4)
    assert again.tokens == [6, 7, 8, 9]
    check(run)


@pytest.mark.parametrize("kept", [0, 1, 7])
def test_keep_cuts_what_lookup_drafted(kept: int) -> None:
    run = _counting("hybrid same", "15")
    before = list(run.tokens)
    [finished] = run.decoding.rounds(limit=None, keep=lambda tokens: kept)
    assert finished.drafter == "lookup"
    assert finished.tokens == [(before[-1] + 1 + index) % SIZE for index in range(kept)]
    check(run)
    go(run, 20)
    assert run.made == [(before[-1] + 1 + index) % SIZE for index in range(kept + 20)]
    check(run)


def _counting(drafters: str, schedule: str, prompt: Sequence[int] = (*range(SIZE), 0, 1, 2), cheap: bool = True) -> Run:
    """A target that counts, after one turn of it."""
    table = np.zeros((SIZE, SIZE, SIZE))
    table[:, np.arange(SIZE), (np.arange(SIZE) + 1) % SIZE] = 20
    model = TableModel(table, chains_cheaply=cheap)
    draft = TableModel(table) if drafters != "lookup" else None
    return prepared(drafters, schedule, target=model, prompt=prompt, draft=draft)


@pytest.mark.parametrize("lag", [1, 2, 31, 32, 33, 100])
def test_the_draft_catches_up_after_rounds_without_it(lag: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In passes of at most `prefill_rows`, and then agrees as if it had been there."""
    for sampling in (Sampling(), Sampling(temperature=1, frequency_penalty=0.1)):
        run = prepared("hybrid same", "3", sampling)
        run.drafting.schedule = Checked(FixedSchedule(0))
        go(run, lag)
        both, run.drafting = run.drafting, Drafting([run.draft], Checked(FixedSchedule(3)))
        run.decoding.drafting = run.drafting
        assert run.draft.lag(run.tokens) == lag
        rows: list[int] = []
        extend = run.draft.context.extend

        def spy(tokens: Any, rows: int | None = None, *, sizes: list[int] = rows, call: Any = extend) -> mx.array:
            sizes.append(len(tokens) if isinstance(tokens, list) else int(tokens.size))
            return call(tokens, rows)

        monkeypatch.setattr(run.draft.context, "extend", spy)
        go(run, 4)
        monkeypatch.undo()
        assert run.rounds[-1].accepted == run.rounds[-1].drafted == 3
        assert sum(rows) == lag + 3
        assert max(rows) <= run.draft.context.prefill_rows
        assert len(rows) <= 2 + 3 + lag // run.draft.context.prefill_rows
        both.schedule, run.drafting = run.drafting.schedule, both
        check(run)


@pytest.mark.parametrize("lazily", [None, True, False])
def test_steps_are_chained_while_that_is_cheap(lazily: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that has grown too large for it is found out though it was small at first; what was measured counts."""
    run = _counting("same", "3")
    run.drafting.schedule.early = False
    run.draft._lazily = lazily
    waits, evaluate = [], mx.eval
    monkeypatch.setattr(mx, "eval", lambda *arrays: (waits.append(arrays), evaluate(*arrays)))
    for cheap in (True, False, True):
        run.draft.context.chains_cheaply = cheap
        waits.clear()
        go(run, 4)
        assert run.rounds[-1].drafted == 3
        assert len(waits) == (0 if (cheap if lazily is None else lazily) else 3)


def test_a_draft_that_lags_says_so_in_its_offer() -> None:
    run = prepared("hybrid same", "3")
    go(run, 60)
    lags = {offer.lag for offer in run.drafting.schedule.offers if offer.drafter == "model"}
    assert {0, 1} < lags  # after its own rounds; more after those of lookup


# -- a pass in flight ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("drafters", "schedule"), [("lookup", "3"), ("hybrid same", "dear"), ("same", "dear")])
def test_one_pass_is_in_flight_while_nothing_is_drafted(drafters: str, schedule: str) -> None:
    """Without a match, and parked."""
    prompt = list(range(0, SIZE, 2))
    run = _counting(drafters, schedule, prompt)
    lengths = []
    for finished in run.decoding.rounds(limit=6):
        run.rounds.append(finished)
        lengths.append(run.target.length - len(run.tokens))
        assert finished.parked == (schedule == "dear")
        assert finished.drafted == 0
    assert lengths == [0] * 5 + [-1]
    assert run.target.passes == 1 + 6  # the prompt's, and one each
    run = _counting(drafters, schedule, prompt, cheap=False)
    for _ in run.decoding.rounds(limit=6):
        assert run.target.length == len(run.tokens) - 1


@pytest.mark.parametrize(("cheap", "late"), [(True, 1), (False, 0)])
def test_a_match_that_appears_is_used_one_token_later(cheap: bool, late: int) -> None:
    run = _counting("lookup", "3", range(20), cheap=cheap)
    made = go(run, 50)
    assert made == [(20 + index) % SIZE for index in range(50)]
    # 20 tokens to 39, then 0 and 1, after which 2 to 4 are known.
    assert [finished.drafted for finished in run.rounds[: 22 + late]] == [0] * (22 + late)
    assert [finished.accepted for finished in run.rounds[22 + late : 26]] == [3] * (4 - late)
    assert run.target.passes == 1 + len(run.rounds)
    check(run)


def test_a_pass_in_flight_is_forgotten_when_the_generation_ends() -> None:
    for end in range(20, 25):
        run = _counting("lookup", "3", range(20))
        go(run, None, end_tokens={end})
        assert run.made == list(range(20, end + 1))
        check(run)
        assert go(run, 3) == list(range(20, end + 4))


@pytest.mark.parametrize("drafters", ["lookup", "hybrid same"])
def test_penalties_count_a_pass_in_flight_once(drafters: str) -> None:
    sampling = Sampling(frequency_penalty=1.0)
    expected = plainly(70, sampling)
    for schedule in ("3", "dear"):
        run = prepared(drafters, schedule, sampling)
        for count in (1, 2, 30, 1, 2, 34):
            go(run, count)
            np.testing.assert_array_equal(np.array(run.decoding._seen)[0], np.bincount(run.tokens, minlength=SIZE))
        assert run.made == expected


# -- the schedule --------------------------------------------------------------------------------------------------


def test_every_round_is_told_in_order_and_once() -> None:
    for drafters in DRAFTERS:
        for schedule in SCHEDULES:
            run = prepared(drafters, schedule)
            go(run, 30)
            told = [
                (offer and offer.drafter, drafted, accepted)
                for offer, drafted, accepted in run.drafting.schedule.observed
            ]
            assert told == [(finished.drafter, finished.drafted, finished.accepted) for finished in run.rounds]


class Probing:
    """Plain, but for one drafted token every fourth round; a choice that was not carried out would come to nothing."""

    stops_early, whole_rounds = True, False

    def __init__(self) -> None:
        self._rounds, self.parked = 0, False

    def choose(self, offers: Sequence[Offer]) -> tuple[Offer, int] | None:
        probes = self._rounds % 4 == 3
        self.parked = not probes
        return (offers[0], 1) if probes else None

    def proceed(self, drafted: int, confidences: Sequence[float]) -> bool:
        return False

    def observe(self, offer: Offer | None, drafted: int, accepted: int, *more: Any) -> None:
        self._rounds += 1

    def plain_rounds(self) -> int:
        return 0


@pytest.mark.parametrize("cheap", [True, False])
def test_probes_happen_though_passes_run_ahead(cheap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is asked for and made in its own round, and rounds that were parked say so."""
    monkeypatch.setattr(PagedContext, "chains_cheaply", property(lambda self: cheap))
    run = prepared("same")
    run.drafting.schedule = Checked(Probing())
    go(run, 40)
    assert [finished.drafted for finished in run.rounds[:16]] == [0, 0, 0, 1] * 4
    assert [finished.parked for finished in run.rounds[:16]] == [True, True, True, False] * 4


def test_what_cannot_win_is_parked_and_probed_now_and_then() -> None:
    # A little dearer than what a perfect draft gives: only probes tell.
    costs = Costs(((1, 1.0), (2, 2.2), (4, 5.0)), draft_step=0.1, draft_row=0.001)
    for drafters in ("other", "same", "lookup", HYBRID):
        run = prepared(drafters, "3")
        run.drafting.schedule = Checked(automatic(costs, 15))
        go(run, 400)
        drafted = [finished for finished in run.rounds if finished.drafted]
        assert 1 <= len(drafted) < 20, drafters
        assert {finished.drafted for finished in drafted} == {1}
        parked = sum(finished.parked for finished in run.rounds)
        assert parked > 200 if drafters != "lookup" else parked > 0
        assert not any(finished.parked for finished in drafted)


def test_a_draft_that_is_hopeless_at_first_is_taken_up_again() -> None:
    """After tokens from 20 on it says what the target says; at first only others are allowed."""
    target = TableModel.random(1, SIZE)
    table = np.array(target.table)
    table[:, :20] = np.array(TableModel.random(2, SIZE).table)[:, :20]
    costs = Costs(((1, 1.0), (2, 1.2), (8, 1.9)), draft_step=0.1, draft_row=0.01)
    run = Run(target, TableModel(table), Sampling(logit_bias=dict.fromkeys(range(20, SIZE), -1e3)))
    run.drafting = Drafting([run.draft], automatic(costs, 7, drafters=["model"]))
    run.begin()
    go(run, 300)
    assert sum(finished.drafted == 0 for finished in run.rounds) > 200
    before = len(run.rounds)
    run.decoding._sampling = run.draft._sampling = Sampling(logit_bias=dict.fromkeys(range(20), -1e3))
    go(run, 900)
    late = run.rounds[before:]
    assert sum(len(finished.tokens) for finished in late) == 900
    assert len(late) < 600


def test_no_schedule_is_plain_decoding(plain: list[int]) -> None:
    run = prepared("hybrid same")
    run.drafting.schedule = FixedSchedule(0)
    assert go(run, 20) == plain[:20]
    assert [finished.drafted for finished in run.rounds] == [0] * 20
    assert not any(finished.parked for finished in run.rounds)


def test_the_drafts_context_ends_and_lookup_goes_on(plain: list[int], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "mlx_spec"):
        run = prepared("hybrid same", "3", draft_context_length=20)
        assert go(run, 80) == plain[:80]
    [message] = [record.getMessage() for record in caplog.records]
    assert "20 tokens is full: no drafts by it" in message
    assert drafted_by(run, "model")[0] > 0
    reached, last = len(PROMPT), 0
    for finished in run.rounds:
        if finished.drafter == "model":
            last = reached
        reached += len(finished.tokens)
    assert last < 20
    assert {finished.drafter for finished in run.rounds[-20:]} >= {"lookup"}
    assert run.draft.context.length <= 20


def test_who_may_draft_has_a_name() -> None:
    model = DraftModel(OTHER.new_context(), Sampling(), SIZE)
    lookup, plain = Lookup(SIZE), FixedSchedule(0)
    assert Drafting([model], plain).name == "model"
    assert Drafting([lookup], plain).name == "lookup"
    assert Drafting([lookup, model], plain).name == "hybrid"


# -- INT8, sinks and a window --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("int8", "sinks", "schedule"),
    [
        (False, 4, "15"),
        (True, 4, "moody"),
        (True, 4, "15"),
        (True, 4, "cheap"),
        (True, 65, "15"),
        (True, 65, "between"),
    ],
)
def test_a_window_with_hybrid(int8: bool, sinks: int, schedule: str) -> None:
    """Long past the window, drafts of up to 15 tokens, in several pieces."""
    prompt = [(7 * index) % SIZE for index in range(60)] + [(3 * index) % SIZE for index in range(100)]
    models = [PagedModel(module, int8=int8) for module in (TARGET.module, SAME.module)]
    contexts = [model.new_context(sinks, 65) for model in models]
    lengths = set()

    def generate(drafts: Drafting | None, target: Any, pieces: Sequence[int]) -> list[int]:
        tokens = list(prompt)
        decoding = Decoding(tokens, target, drafts, sampling=Sampling(), seed=0, vocabulary_size=SIZE)
        decoding.prefill()
        for piece in pieces:
            for finished in decoding.rounds(limit=piece):
                lengths.add(finished.drafted)
        assert target.length == len(tokens) - 1
        return tokens[len(prompt) :]

    plain_context = PagedModel(TARGET.module, int8=int8).new_context(sinks, 65)
    expected = generate(None, plain_context, [250])
    both = [Lookup(SIZE), DraftModel(contexts[1], Sampling(), SIZE)]
    drafts = Drafting(both, Checked(SCHEDULES[schedule]()))
    assert generate(drafts, contexts[0], [100, 1, 2, 147]) == expected
    if schedule in ("15", "cheap"):
        assert 15 in lengths
    assert contexts[0].table.dropped > 0
    held = [model.pool.pages_in_use for model in models]
    assert max(held) <= 2 + 2 + 3  # sinks, window, and what a round may still need
    for context in contexts:
        context.close()
    assert [model.pool.pages_in_use for model in models] == [0, 0]


def test_lookup_reads_a_prompt_once_and_no_more_of_it_than_it_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looking_up, "_LOOKED_BACK", 50)
    read: list[int] = []
    extend = Suffixes.extend
    monkeypatch.setattr(Suffixes, "extend", lambda self, tokens: (read.append(len(tokens)), extend(self, tokens))[1])
    lookup = Lookup(100)
    made = Drafting([lookup], FixedSchedule(3))
    tokens = list(range(30)) * 10
    made.prefill(tokens)
    assert read == [50]
    tokens.append(0)
    plan = made.plan(tokens, 5)
    assert plan is not None
    assert lookup._found[: plan.k] == [1, 2, 3]
    assert read == [50, 1]


def test_lookup_forgets_what_is_long_past(monkeypatch: pytest.MonkeyPatch) -> None:
    """An endless stream takes constant memory; what came lately is found all the same."""
    monkeypatch.setattr(looking_up, "_LOOKED_BACK", 50)
    lookup = Lookup(100)
    made = Drafting([lookup], FixedSchedule(3))
    tokens = list(range(30)) * 2
    lengths = []
    for step in range(300):
        plan = made.plan(tokens, 5)
        lengths.append(lookup._suffixes.length)
        if len(tokens) > 100 + 50 and step % 30 > 5:
            assert plan is not None
            assert lookup._found[0] == tokens[-30]
        tokens.append(step % 30)
    assert max(lengths) <= 100
    assert min(lengths[60:]) >= 50
