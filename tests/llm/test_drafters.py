"""Who drafts for a request and by which schedule, on tiny models behind the runtime, and what the figures say of it."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from directories import write_tokenizer
from external_models import module_of
from mlx_lm.utils import load_tokenizer
from tiny import tiny_module

from mlx_spec.architectures.paged import PagedContext
from mlx_spec.calibration import calibrations as calibration
from mlx_spec.calibration.learner import Learner
from mlx_spec.calibration.record import Calibration
from mlx_spec.cli import console
from mlx_spec.decoding.drafters import building
from mlx_spec.decoding.drafters.draft_model import DraftModel
from mlx_spec.decoding.drafting import Drafting
from mlx_spec.decoding.schedule.automatic import AutoSchedule
from mlx_spec.decoding.schedule.schedule import FixedSchedule
from mlx_spec.decoding.verification import verify_block, verify_tokenwise
from mlx_spec.errors import BadConfig
from mlx_spec.llm.llm import LLM
from mlx_spec.llm.statistics import Statistics
from mlx_spec.loading.loader import LoadedModel
from mlx_spec.loading.tokenizer import Tokenizer
from mlx_spec.machine.remembered import Remembered
from mlx_spec.settings import KVConfig, Sampling, Speculation

COLUMNS = 272
PROMPT = [(index * 7) % 11 + 40 for index in range(40)]
"""Comes back to where it was."""
ENDLESS = Sampling(logit_bias=dict.fromkeys(range(256, 263), -1e9), seed=3)
"""No special token, and so no end."""
CHEAP = Calibration(40, ((1, 0.1), (4, 0.101), (16, 0.102)), 0.0012, 0.001, 0.0001, "2026-01-01T00:00:00+00:00")
"""Drafts always pay, and waiting for each token costs nothing."""
DEAR = replace(CHEAP, target=((1, 0.1), (2, 1.0), (16, 9.0)), draft_lazily=0.09, draft_synchronised=0.1)
"""They never do, and steps are chained."""
LAZY = replace(CHEAP, draft_lazily=0.001, draft_synchronised=0.002)
"""They pay, and are faster in a chain."""
Make = Callable[..., LLM]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    return Tokenizer(load_tokenizer(directory))


def _module(seed: int) -> Any:
    """Nearly forgets what came before the last token, and so repeats itself."""
    module = tiny_module(seed, 0.8, vocab_size=COLUMNS, tie_word_embeddings=False)
    for layer in module.model.layers:
        layer.self_attn.o_proj.weight *= 0.01
    return module


@pytest.fixture(autouse=True)
def _rounds_teach_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs are what a test says; those of this machine are another matter."""
    monkeypatch.setattr(Learner, "observe", lambda self, length, took: False)


@pytest.fixture
def make(tokenizer: Tokenizer) -> Make:
    def made(draft: int | None = None, kv: KVConfig | None = None, *, target: Any = None, small: Any = None,
             context: int = 4096, draft_context: int = 4096, known: Calibration | None = CHEAP) -> LLM:  # fmt: skip
        """draft: the seed of a draft's weights; 1 is the target's. known: what passes cost."""
        if draft is not None:
            small = _module(draft)
        large = LoadedModel("large", target or _module(1), tokenizer, {}, context)
        llm = LLM(large, small and LoadedModel("small", small, tokenizer, {}, draft_context), kv)
        if known is not None:
            alone = replace(known, draft_lazily=None, draft_synchronised=None, draft_row=None)
            for length in (40, 4096):  # with and without a window
                llm._calibrations.keep(replace(known if llm._draft else alone, context_length=length))
        return llm

    return made


def figures(
    llm: LLM, *, max_tokens: int = 60, sampling: Sampling = ENDLESS, prompt: Any = PROMPT, **options: Any
) -> Statistics:
    """Of an answer with these settings of Speculation."""
    answer = llm.generate(prompt, max_tokens=max_tokens, sampling=sampling, speculation=Speculation(**options))
    check_sums(answer.statistics)
    return answer.statistics


def check_sums(statistics: Statistics) -> None:
    """What the figures say must be one story."""
    drafters, passes = statistics.by_drafter, statistics.passes_by_draft_tokens
    assert set(drafters) <= ({"model", "lookup"} if statistics.drafter == "hybrid" else {statistics.drafter})
    assert sum(part.drafted for part in drafters.values()) == statistics.drafted
    assert sum(part.accepted for part in drafters.values()) == statistics.accepted
    assert sum(part.passes for part in drafters.values()) == sum(count for k, count in passes.items() if k)
    assert all(0 < part.passes <= part.drafted >= part.accepted for part in drafters.values())
    assert sum(passes.values()) == statistics.target_passes
    assert sum(k * count for k, count in passes.items()) == statistics.drafted
    assert list(passes) == sorted(passes)
    assert statistics.parked_passes <= passes.get(0, 0)
    positions = statistics.accepted_by_position
    assert len(positions) <= max(passes, default=0)
    assert sum(accepted for _, accepted in positions) == statistics.accepted
    if positions:
        assert positions[0][0] == sum(part.passes for part in drafters.values())
    assert all(reached >= accepted for reached, accepted in positions)
    assert all(accepted >= reached for (_, accepted), (reached, _) in itertools.pairwise(positions))
    # A limit bounds what is drafted, unless the number is fixed: then it cuts what was accepted past it.
    cut = statistics.target_passes + statistics.accepted - statistics.completion_tokens
    assert 0 <= cut <= (0 if statistics.draft_tokens == "auto" else statistics.draft_tokens)
    assert json.loads(json.dumps(statistics.as_dict()))["by_drafter"] == {
        name: {"passes": part.passes, "drafted": part.drafted, "accepted": part.accepted}
        for name, part in drafters.items()
    }


# -- as the context grows --------------------------------------------------------------------------------------------


def test_costs_follow_the_length_of_the_context(make: Make) -> None:
    """Cheap at 300 tokens, and dear from about a thousand on, where nothing can be won any more."""
    llm = make(1, known=None)
    for length, known in ((256, CHEAP), (2048, DEAR), (8192, DEAR)):
        llm._calibrations.keep(replace(known, context_length=length))
    short = figures(llm, prompt=PROMPT * 8, max_tokens=200, drafter="model")
    assert short.parked_passes == 0
    long = figures(llm, prompt=PROMPT * 18, max_tokens=1000, drafter="model")
    assert long.tokens_per_pass is not None
    assert long.tokens_per_pass > 1
    assert long.parked_passes > 100


def test_what_the_target_costs_counts_for_a_draft_model_that_was_not_measured_there(make: Make) -> None:
    """As where its context had ended, or of lookup alone: what its steps cost is known of a shorter text."""
    llm = make(1, known=None)
    llm._calibrations.keep(replace(CHEAP, context_length=256))
    alone = replace(DEAR, context_length=2048, draft_lazily=None, draft_synchronised=None, draft_row=None)
    llm._calibrations.keep(alone)
    for drafter in ("model", "hybrid"):
        long = figures(llm, prompt=PROMPT * 18, max_tokens=1000, drafter=drafter)
        assert long.tokens_per_pass is not None
        assert long.tokens_per_pass > 1
        assert long.parked_passes > 100
    assert figures(llm, prompt=PROMPT * 18, max_tokens=1000, drafter="lookup").parked_passes > 0


def test_the_way_to_chain_follows_the_costs(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make(1, known=None)
    monkeypatch.setattr(PagedContext, "chains_cheaply", False)
    for length, known in ((256, CHEAP), (2048, LAZY)):
        llm._calibrations.keep(replace(known, context_length=length))
    chosen: list[tuple[bool | None, bool]] = []
    propose = DraftModel.propose

    def noted(self: DraftModel, tokens: Any, k: int, seen: Any, key: Any, proceed: Any = None) -> Any:
        chosen.append((self._lazily, proceed is not None))
        return propose(self, tokens, k, seen, key, proceed)

    monkeypatch.setattr(DraftModel, "propose", noted)
    figures(llm, prompt=PROMPT * 18, max_tokens=1000, drafter="model")
    assert (chosen[0], chosen[-1]) == ((None, True), (True, False))


@pytest.mark.parametrize(("cheaply", "known", "expected"), [
    (True, LAZY, (None, False)), (False, LAZY, (True, False)), (True, CHEAP, (None, True)),
    (False, CHEAP, (None, True))])  # fmt: skip
def test_steps_that_are_chained_because_that_is_cheap_are_not_once_it_is_not(
    make: Make, monkeypatch: pytest.MonkeyPatch, cheaply: bool, known: Calibration, expected: tuple[bool | None, bool]
) -> None:
    """Chained or left to the context, and whether each token is waited for."""
    monkeypatch.setattr(PagedContext, "chains_cheaply", cheaply)
    chosen: list[tuple[bool | None, bool]] = []
    propose = DraftModel.propose

    def noted(self: DraftModel, tokens: Any, k: int, seen: Any, key: Any, proceed: Any = None) -> Any:
        chosen.append((self._lazily, proceed is not None))
        return propose(self, tokens, k, seen, key, proceed)

    monkeypatch.setattr(DraftModel, "propose", noted)
    figures(make(1, known=known), drafter="model")
    assert set(chosen) == {expected}


# -- who drafts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("draft", "asked", "expected"), [
    (2, None, "hybrid"), (2, "hybrid", "hybrid"), (2, "model", "model"), (2, "lookup", "lookup"), (2, "none", "none"),
    (None, None, "lookup"), (None, "lookup", "lookup"), (None, "none", "none"),
])  # fmt: skip
@pytest.mark.parametrize("k", ["auto", 3])
def test_who_drafts(make: Make, draft: int | None, asked: str | None, expected: str, k: Any) -> None:
    llm = make(draft)
    statistics = figures(llm, draft_tokens=k, drafter=asked)
    assert statistics.drafter == expected
    assert statistics.draft_tokens == k
    allowed = {"hybrid": {"model", "lookup"}, "none": set()}.get(expected, {expected})
    assert set(statistics.by_drafter) <= allowed
    assert (statistics.drafted > 0) == (expected != "none")
    plain = llm.generate(PROMPT, max_tokens=60, sampling=ENDLESS, speculation=Speculation(draft_tokens=0))
    again = llm.generate(PROMPT, max_tokens=60, sampling=ENDLESS, speculation=Speculation(k, asked))
    assert again.tokens == plain.tokens
    if expected in ("lookup", "hybrid"):
        assert statistics.by_drafter["lookup"].accepted > 0


@pytest.mark.parametrize("asked", [None, "model", "hybrid", "lookup", "none"])
@pytest.mark.parametrize("draft", [None, 2])
def test_no_draft_tokens_are_plain_decoding(make: Make, draft: int | None, asked: str | None) -> None:
    """Whoever was named, loaded or not."""
    statistics = figures(make(draft), draft_tokens=0, drafter=asked)
    assert (statistics.drafter, statistics.drafted, statistics.parked_passes) == ("none", 0, 0)
    assert statistics.passes_by_draft_tokens == {0: 60}
    assert statistics.accepted_by_position == []


@pytest.mark.parametrize("asked", ["model", "hybrid"])
@pytest.mark.parametrize("k", ["auto", 3])
def test_a_draft_model_that_is_not_there(make: Make, asked: str, k: Any) -> None:
    """Said at once, not at the first chunk."""
    with pytest.raises(BadConfig, match=rf"{asked!r}, and no draft model is loaded; .*--draft.*lookup") as caught:
        make().stream(PROMPT, speculation=Speculation(k, asked))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("asked", [None, "lookup"])
@pytest.mark.parametrize("prompt", [[], "", [{"role": "user", "content": ""}]])
def test_lookup_on_an_empty_prompt(make: Make, asked: str | None, prompt: Any) -> None:
    llm = make()
    with pytest.raises(BadConfig):
        llm.stream(prompt, speculation=Speculation(drafter=asked))
    for tokens in ([5], [5, 5]):
        assert figures(llm, prompt=tokens, draft_tokens=3, drafter=asked).drafter == "lookup"


@pytest.mark.parametrize(("name", "verify"), [("token", verify_tokenwise), ("block", verify_block)])
def test_drafts_are_verified_as_asked(make: Make, name: Any, verify: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def spy(*arguments: mx.array) -> tuple[mx.array, mx.array]:
        calls.append(arguments[2].size)
        return verify(*arguments)

    monkeypatch.setitem(building._VERIFY, name, spy)
    statistics = figures(make(2), draft_tokens=3, verification=name)
    assert statistics.verification == name
    assert sum(calls) == statistics.drafted > 0
    assert Speculation().verification == "block"


# -- by which schedule ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 4, 15])
@pytest.mark.parametrize("asked", ["lookup", "model", "hybrid"])
def test_auto_never_drafts_more_than_it_may(make: Make, asked: str, most: int) -> None:
    statistics = figures(make(1), drafter=asked, most_draft_tokens=most, max_tokens=120)
    assert max(statistics.passes_by_draft_tokens) == most
    if asked == "model":
        assert statistics.acceptance_rate == 1


def test_auto_never_drafts_further_than_was_measured(make: Make) -> None:
    statistics = figures(make(1, known=replace(CHEAP, target=((1, 0.1), (2, 0.1), (4, 0.1)))), drafter="model")
    assert max(statistics.passes_by_draft_tokens) == 3


@pytest.mark.parametrize("asked", ["model", "hybrid", "lookup"])
def test_auto_parks_where_drafts_cannot_win(make: Make, asked: str) -> None:
    statistics = figures(make(2, known=DEAR), drafter=asked, max_tokens=100)
    assert statistics.passes_by_draft_tokens == {0: 100}
    assert statistics.parked_passes > (60 if asked == "model" else 0)


@pytest.mark.parametrize(("known", "early"), [(CHEAP, True), (DEAR, False)])
def test_the_draft_is_run_as_was_measured(
    make: Make, known: Calibration, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Drafting] = []
    drafting = building.Drafters.drafting
    monkeypatch.setattr(
        building.Drafters, "drafting", lambda self, *arguments: seen.append(drafting(self, *arguments)) or seen[-1]
    )
    figures(make(2, known=known), drafter="model")
    figures(make(2, known=known), drafter="model", draft_tokens=2)
    assert [(type(each.schedule), each.schedule.stops_early) for each in seen] == [
        (AutoSchedule, early), (FixedSchedule, False)]  # fmt: skip


def test_an_unsure_draft_stops_early(make: Make) -> None:
    costs = replace(CHEAP, target=((1, 0.1), (16, 0.2)), draft_synchronised=0.01)
    flat = figures(make(2, known=costs), drafter="model", max_tokens=150, sampling=replace(ENDLESS, temperature=1.0))
    assert len(flat.passes_by_draft_tokens) > 2


def test_the_same_seed_gives_the_same_answer(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what passes cost remembered: also in another process, which reads it from the file."""
    answers = []
    costs = replace(CHEAP, target=((1, 0.1), (2, 0.13), (16, 0.4)), draft_synchronised=0.01)
    for known in (costs, None, None):
        kept = calibration.Store(Remembered(tmp_path / "calibration.json", "this machine"))
        monkeypatch.setattr(calibration, "store", lambda kept=kept: kept)
        llm = make(2, known=known)
        for _ in range(2):
            answer = llm.generate(PROMPT, max_tokens=120, sampling=replace(ENDLESS, temperature=0.8))
            answers.append((answer.tokens, answer.statistics.passes_by_draft_tokens))
    assert all(answer == answers[0] for answer in answers)
    assert len(answers[0][1]) > 2
    other = llm.generate(PROMPT, max_tokens=120, sampling=replace(ENDLESS, temperature=0.8, seed=4))
    assert other.tokens != answers[0][0]


# -- where a drafter cannot ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [None, "hybrid"])
def test_lookup_goes_on_where_the_draft_has_no_room(
    make: Make, asked: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "mlx_spec"):
        statistics = figures(make(1, draft_context=60), max_tokens=100, draft_tokens=3, drafter=asked)
    [message] = [record.getMessage() for record in caplog.records]
    assert "60 tokens is full: no drafts by it" in message
    assert statistics.drafter == "hybrid"
    assert statistics.by_drafter["model"].drafted <= 20
    assert statistics.by_drafter["lookup"].accepted > 0
    caplog.clear()
    llm = make(1, KVConfig(window=65, sinks=20), draft_context=70)
    with caplog.at_level(logging.WARNING, "mlx_spec"):
        statistics = figures(llm, draft_tokens=3, drafter=asked)
    assert "no drafts by it" in caplog.text
    assert (statistics.drafter, set(statistics.by_drafter)) == ("lookup", {"lookup"})


@pytest.mark.parametrize("k", ["auto", 5, 15])
@pytest.mark.parametrize("draft", [None, 1])
def test_int8_behind_a_window(make: Make, draft: int | None, k: Any) -> None:
    """The answer goes far past the window; drafts are of up to 15 tokens."""
    kv = KVConfig("int8", window=65, sinks=10)
    llm, prompt = make(draft, kv), PROMPT * 4
    plain = make(None, kv).generate(prompt, max_tokens=250, sampling=ENDLESS, speculation=Speculation(0))
    answer = llm.generate(prompt, max_tokens=250, sampling=ENDLESS, speculation=Speculation(k))
    check_sums(answer.statistics)
    assert answer.tokens == plain.tokens
    assert max(answer.statistics.passes_by_draft_tokens) == (15 if k == "auto" else k)
    assert answer.statistics.accepted > 30


def test_who_drafts_is_asked_of_each_request(make: Make) -> None:
    """One that runs beside others has a lookup, a schedule and a draft of its own."""
    llm = make(2)
    alone = {name: llm.generate(PROMPT, max_tokens=40, sampling=ENDLESS, speculation=Speculation(3, name)).tokens
             for name in ("model", "lookup", "hybrid")}  # fmt: skip
    streams = {name: llm.stream(PROMPT, max_tokens=40, sampling=ENDLESS, speculation=Speculation(3, name))
               for name in alone}  # fmt: skip
    beside: dict[str, list[int]] = {name: [] for name in alone}
    for _ in range(60):
        for name, stream in streams.items():
            chunk = next(stream, None)
            beside[name] += chunk.tokens if chunk else []
    assert beside == alone


# -- any other architecture ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", [CHEAP, None])
def test_lookup_and_auto_with_other_architectures(
    make: Make, known: Calibration | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for target, small in (("phi3", None), ("qwen3_moe", "phi3"), (None, "phi3"), ("deepseek_v3", None)):
        llm = make(target=target and module_of(target), small=small and module_of(small), known=known)
        plain = llm.generate(PROMPT, max_tokens=50, sampling=ENDLESS, speculation=Speculation(0))
        for options in ({}, {"draft_tokens": 3}, {"drafter": "lookup"}, {"drafter": "lookup", "draft_tokens": 15}):
            answer = llm.generate(PROMPT, max_tokens=50, sampling=ENDLESS, speculation=Speculation(**options))
            check_sums(answer.statistics)
            assert answer.tokens == plain.tokens
            expected = "lookup" if small is None or "drafter" in options else "hybrid"
            assert answer.statistics.drafter == expected
            if "draft_tokens" in options:
                assert answer.statistics.drafted > 0


def test_a_draft_that_cannot_be_rewound_leaves_lookup(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "mlx_spec"):
        llm = make(small=module_of("falcon_h1"))
        for asked in (None, "hybrid", "lookup"):
            statistics = figures(llm, draft_tokens=3, drafter=asked)
            assert statistics.drafter == "lookup"
            assert statistics.by_drafter["lookup"].accepted > 0
        assert figures(llm, draft_tokens=3, drafter="model").drafter == "none"
    [message] = [record.getMessage() for record in caplog.records]
    assert "draft" in message
    assert "falcon_h1" in message
    assert "plain decoding" not in message


@pytest.mark.parametrize("small", [None, "phi3"])
def test_a_target_that_cannot_be_rewound_is_decoded_plainly(
    make: Make, small: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "mlx_spec"):
        llm = make(target=module_of("falcon_h1"), small=small and module_of(small))
        for options in ({}, {"draft_tokens": 3}, {"drafter": "lookup"}):
            statistics = figures(llm, **options, max_tokens=12)
            assert (statistics.drafter, statistics.passes_by_draft_tokens) == ("none", {0: 12})
    [message] = [record.getMessage() for record in caplog.records]
    assert message.startswith("no speculation, plain decoding: the target (falcon_h1)")


# -- the figures in a line -----------------------------------------------------------------------------------------


def test_figures_of_real_answers_in_a_line(make: Make) -> None:
    both = figures(make(2), draft_tokens=3)
    parts = [f"{name} {part.accepted} of {part.drafted}" for name, part in sorted(both.by_drafter.items())]
    assert f"of {both.drafted} drafts accepted ({', '.join(parts)}), K 3, prefill" in console.statistics_line(both)
    auto = figures(make(1), drafter="model")
    line = console.statistics_line(auto)
    least = min(auto.passes_by_draft_tokens)
    assert f"100% of {auto.drafted} drafts accepted (model), K {least} to 15, prefill" in line
    parked = figures(make(2, known=DEAR), drafter="model")
    line = console.statistics_line(parked)
    assert f"1.00 tokens per target pass, K 0, {parked.parked_passes} of 60 passes parked, prefill" in line
    plain = console.statistics_line(figures(make(2), draft_tokens=0))
    assert "1.00 tokens per target pass, prefill" in plain


def test_reading_the_prompt_says_what_reading_costs(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read in pieces, between which others get their turn."""
    seen: list[float] = []
    offer = DraftModel.offer
    monkeypatch.setattr(
        DraftModel, "offer", lambda self, *given: (seen.append(self._reading.seconds), offer(self, *given))[1]
    )
    figures(make(1, known=None), prompt=PROMPT * 4, drafter="model", max_tokens=5)
    assert seen
    assert min(seen) > 0
