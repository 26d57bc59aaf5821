"""What speculation emits follows the target's law, whatever the draft says: chi-square tests with fixed seeds.

Three ways, from many samples to few: one and two rounds of `verify_tokenwise` over all samples at once, long runs of
`Decoding` on models that are tables, with every drafter, schedule and verification, and `Decoding` on a tiny
transformer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from reference import TableModel, count, exact_distribution, p_value
from replay import automatic
from tiny import fixed, tiny_model

from mlx_spec.decoding import engine
from mlx_spec.decoding import verification as verify
from mlx_spec.decoding.drafters.draft_model import DraftModel, Proposal
from mlx_spec.decoding.drafters.lookup import Lookup
from mlx_spec.decoding.drafting import Drafting
from mlx_spec.decoding.engine import Decoding
from mlx_spec.decoding.sampling import distribution, draw
from mlx_spec.decoding.schedule.costs import Costs
from mlx_spec.decoding.schedule.offers import Offer
from mlx_spec.decoding.schedule.schedule import FixedSchedule
from mlx_spec.decoding.verification import verify_block, verify_tokenwise
from mlx_spec.settings import Sampling

VOCABULARY = 6
PROMPT = [4, 1, 1]
TARGET, DRAFT = TableModel.random(1, VOCABULARY), TableModel.random(2, VOCABULARY)
ACCEPTABLE = 1e-4  # every seed is fixed: a test that passes once passes always
BROKEN = 1e-12
SAMPLES = 30_000

PENALTY = {"repetition_penalty": 1.5, "presence_penalty": 0.4, "frequency_penalty": 0.3}
FILTERS = [{"temperature": 1.6}, {"top_k": 4}, {"top_p": 0.85}, {"min_p": 0.12}, PENALTY]
COMBINATIONS = [
    {"temperature": 1.0} | {name: value for filter_ in chosen for name, value in filter_.items()}
    for size in range(len(FILTERS) + 1)
    for chosen in itertools.combinations(FILTERS, size)
]


def _name(settings: dict[str, float]) -> str:
    names = [*settings][1:] if settings["temperature"] == 1 else [*settings]
    return "+".join(name for name in names if name not in ("presence_penalty", "frequency_penalty")) or "plain"


def _exact_pairs(logits_after: Callable[[list[int]], np.ndarray], sampling: Sampling, size: int) -> np.ndarray:
    """The target's own law of the first two tokens, (size, size)."""

    def row(path: list[int]) -> np.ndarray:
        seen = count(PROMPT + path, size) if sampling.penalises else None
        return exact_distribution(logits_after(PROMPT + path), sampling, size, seen)

    return row([])[:, None] * np.array([row([token]) for token in range(size)])


def _exact_table_pairs(model: TableModel, sampling: Sampling) -> np.ndarray:
    table = np.array(model.table)
    return _exact_pairs(lambda tokens: table[tokens[-2], tokens[-1]], sampling, VOCABULARY)


# -- one graph for all samples ------------------------------------------------------------------------------------

Verify = Callable[[mx.array, mx.array, mx.array, mx.array], tuple[mx.array, mx.array]]


def _draw_by_gumbel(probabilities: mx.array, key: mx.array) -> mx.array:
    """`sampling.draw` in operations that `mx.vmap` can take."""
    noise = mx.random.gumbel(probabilities.shape, key=key)
    return mx.argmax(mx.log(probabilities) + noise, axis=-1).astype(mx.int32)


class _Tree:
    """Both models' distributions after every path of tokens: node 0 is the prompt, child `node * size + 1 + token`."""

    def __init__(self, sampling: Sampling, depth: int, draft: TableModel = DRAFT) -> None:
        paths: list[list[int]] = [[]]
        for path in paths:
            if len(path) < depth:
                paths.extend([*path, token] for token in range(VOCABULARY))
        sequences = [PROMPT + path for path in paths]
        seen = mx.array(np.array([count(tokens, VOCABULARY) for tokens in sequences], np.float32))
        before, last = (mx.array([tokens[place] for tokens in sequences]) for place in (-2, -1))
        self.p, self.q = (
            distribution(model.table[before, last], sampling, VOCABULARY, seen) for model in (TARGET, draft)
        )

    def round(self, nodes: mx.array, k: int, key: mx.array, law: Verify) -> np.ndarray:
        """The tokens that a round after each node emits, (samples, k + 1), -1 past the last."""
        *draft_keys, verify_key = mx.random.split(key, k + 1)
        path, drafts = [nodes], []
        for draft_key in draft_keys:
            drafts.append(draw(self.q[path[-1]], draft_key))
            path.append(path[-1] * VOCABULARY + 1 + drafts[-1])
        rows, tokens = mx.stack(path, axis=1), mx.stack(drafts, axis=1)  # (samples, k + 1), (samples, k)
        keys = mx.random.split(verify_key, nodes.size)
        accepted, following = mx.vmap(law)(self.p[rows], self.q[rows[:, :-1]], tokens, keys)
        accepted, following, tokens = np.array(accepted), np.array(following), np.array(tokens)
        emitted = np.concatenate([tokens, np.full((len(tokens), 1), -1)], axis=1)
        emitted[np.arange(k + 1) > accepted[:, None]] = -1
        emitted[np.arange(len(emitted)), accepted] = following[:, 0]
        return emitted

    def pairs(self, k: int, samples: int, seed: int, law: Verify = verify_tokenwise) -> np.ndarray:
        """How often each first two tokens came, (size, size); rounds that emit one token are followed by another."""
        first_key, second_key = mx.random.split(mx.random.key(seed))
        emitted = self.round(mx.zeros((samples,), mx.int32), k, first_key, law)
        first, second = emitted[:, 0], emitted[:, 1]
        again = self.round(mx.array(1 + first), k, second_key, law)[:, 0]
        second = np.where(second < 0, again, second)
        return np.bincount(first * VOCABULARY + second, minlength=VOCABULARY**2).reshape(VOCABULARY, VOCABULARY)


@pytest.fixture
def _vectorised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "draw", _draw_by_gumbel)


@pytest.mark.usefixtures("_vectorised")
@pytest.mark.parametrize("settings", COMBINATIONS, ids=_name)
def test_first_two_tokens_follow_the_target(settings: dict[str, float]) -> None:
    sampling = Sampling(**settings)  # type: ignore[arg-type]
    expected = _exact_table_pairs(TARGET, sampling)
    tree = _Tree(sampling, depth=4)
    for k in (1, 2, 3):
        assert p_value(tree.pairs(k, SAMPLES, seed=k), expected) > ACCEPTABLE
    # The draft alone would have been noticed.
    assert p_value(_counts_of(_exact_table_pairs(DRAFT, sampling), SAMPLES, expected), expected) < BROKEN


def _counts_of(law: np.ndarray, samples: int, allowed: np.ndarray) -> np.ndarray:
    counts = np.round(law * samples)
    return np.where(allowed > 0, counts, 0)


@pytest.mark.usefixtures("_vectorised")
def test_a_draft_equal_to_the_target_is_always_accepted() -> None:
    sampling = Sampling(temperature=1, top_p=0.9, **PENALTY)  # type: ignore[arg-type]
    tree = _Tree(sampling, depth=4, draft=TARGET)
    assert (tree.round(mx.zeros((4000,), mx.int32), 3, mx.random.key(0), verify_tokenwise) >= 0).all()
    assert p_value(tree.pairs(3, SAMPLES, seed=1), _exact_table_pairs(TARGET, sampling)) > ACCEPTABLE


@pytest.mark.usefixtures("_vectorised")
def test_acceptance_is_the_overlap_of_the_two_distributions() -> None:
    """Not the chance that two samples are equal, which is far lower."""
    tree = _Tree(Sampling(temperature=3), depth=1)
    overlap = float(mx.minimum(tree.p[0], tree.q[0]).sum())
    equal = float((tree.p[0] * tree.q[0]).sum())
    emitted = tree.round(mx.zeros((20_000,), mx.int32), 1, mx.random.key(7), verify_tokenwise)
    accepted = (emitted[:, 1] >= 0).mean()
    assert abs(accepted - overlap) < 4 * (overlap * (1 - overlap) / 20_000) ** 0.5
    assert accepted > 2 * equal


def test_disjoint_distributions_are_never_accepted() -> None:
    target = mx.array([[0.5, 0.5, 0, 0], [0.25, 0.25, 0.25, 0.25]])
    draft = mx.array([[0, 0, 0.5, 0.5]])
    for seed in range(50):
        accepted, following = verify_tokenwise(target, draft, mx.array([2 + seed % 2]), mx.random.key(seed))
        assert accepted.item() == 0
        assert following.item() in (0, 1)


def test_equal_rows_are_accepted_in_spite_of_rounding() -> None:
    """Rows of another sum than 1 by rounding, as float32 makes them: a residual of nothing but noise is not used."""
    row = mx.softmax(3 * mx.random.normal((1, 5000), key=mx.random.key(0)), axis=-1)
    for seed in range(50):
        drafted = draw(row, mx.random.key(seed))
        accepted, _ = verify_tokenwise(mx.concatenate([row, row]), row, drafted, mx.random.key(1000 + seed))
        assert accepted.item() == 1


# -- the tests above would notice a fault ----------------------------------------------------------------------------


def _always_accepts(target: mx.array, draft: mx.array, tokens: mx.array, key: mx.array) -> tuple[mx.array, mx.array]:
    return mx.array(tokens.size, mx.int32), _draw_by_gumbel(target[-1:], key)


def _accepts_equal_samples(
    target: mx.array, draft: mx.array, tokens: mx.array, key: mx.array
) -> tuple[mx.array, mx.array]:
    """mlx-lm's rule: the right law at a lower acceptance. Here to show that the tests accept what is right."""
    samples = _draw_by_gumbel(target, key)
    accepted = mx.cumprod((samples[:-1] == tokens).astype(mx.int32)).sum()
    return accepted, mx.take(samples, accepted, axis=0)[None]


def _mutant(change: Callable[[dict[str, mx.array]], mx.array]) -> Verify:
    """Token-wise verification written once more, with a faulty residual."""

    def law(target: mx.array, draft: mx.array, tokens: mx.array, key: mx.array) -> tuple[mx.array, mx.array]:
        k = tokens.size
        accept_key, next_key = mx.random.split(key)
        at_target = mx.take_along_axis(target[:k], tokens[:, None], axis=-1)[:, 0]
        at_draft = mx.take_along_axis(draft, tokens[:, None], axis=-1)[:, 0]
        accepts = mx.random.uniform(shape=(k,), key=accept_key) * at_draft < at_target
        accepted = mx.cumprod(accepts.astype(mx.int32)).sum()
        p, q = mx.take(target, accepted, axis=0), mx.take(draft, mx.minimum(accepted, k - 1), axis=0)
        return accepted, _draw_by_gumbel(change({"p": p, "q": q, "all": accepted == k})[None], next_key)

    return law


MUTANTS: dict[str, Verify] = {
    "always accepts": _always_accepts,
    "draws from the target after a rejection": _mutant(lambda rows: rows["p"]),
    "draws from the draft after a rejection": _mutant(lambda rows: mx.where(rows["all"], rows["p"], rows["q"])),
    "subtracts after the last draft too": _mutant(lambda rows: mx.maximum(rows["p"] - rows["q"], 0)),
    "takes the absolute difference": _mutant(
        lambda rows: mx.where(rows["all"], rows["p"], mx.abs(rows["p"] - rows["q"]))
    ),
}
SOUND: dict[str, Verify] = {
    "the residual": _mutant(lambda rows: mx.where(rows["all"], rows["p"], mx.maximum(rows["p"] - rows["q"], 0))),
    "equal samples": _accepts_equal_samples,
}


@pytest.mark.parametrize("law", MUTANTS.values(), ids=MUTANTS)
def test_a_faulty_rule_is_noticed(law: Verify) -> None:
    sampling = Sampling(temperature=1)
    tree, expected = _Tree(sampling, depth=4), _exact_table_pairs(TARGET, sampling)
    # What follows the last draft is among the first two tokens only for K = 1.
    assert min(p_value(tree.pairs(k, SAMPLES, seed=k, law=law), expected) for k in (1, 2, 3)) < BROKEN


@pytest.mark.parametrize("law", SOUND.values(), ids=SOUND)
def test_a_sound_rule_is_not(law: Verify) -> None:
    sampling = Sampling(temperature=1)
    tree, expected = _Tree(sampling, depth=4), _exact_table_pairs(TARGET, sampling)
    for k in (1, 2, 3):
        assert p_value(tree.pairs(k, SAMPLES, seed=k, law=law), expected) > ACCEPTABLE


# -- Decoding ------------------------------------------------------------------------------------------------------


def _decoding(
    target: Any, draft: Any | None, sampling: Sampling, seed: int, size: int = VOCABULARY
) -> tuple[Decoding, DraftModel | None]:
    """A Decoding after PROMPT, and its drafter."""
    drafter = None if draft is None else DraftModel(draft, sampling, size)
    drafting = drafter and Drafting([drafter], FixedSchedule(0))
    decoding = Decoding(list(PROMPT), target, drafting, sampling=sampling, seed=seed, vocabulary_size=size)
    decoding.prefill()
    return decoding, drafter


def _transition_p_value(sampling: Sampling, k: int, tokens: int, seed: int, draft: TableModel | None) -> float:
    """A table model without penalties is a Markov chain: every transition of one long run is a sample of its law."""
    decoding, _ = _decoding(TARGET.new_context(), draft and draft.new_context(), sampling, seed)
    return _chain_p_value(fixed(decoding, k), sampling, tokens)


def _chain_p_value(decoding: Decoding, sampling: Sampling, tokens: int) -> float:
    for _ in decoding.rounds(limit=tokens):
        pass
    made = decoding.tokens
    assert len(made) == len(PROMPT) + tokens
    table = np.array(TARGET.table)
    counts = np.zeros((VOCABULARY,) * 3)
    for i in range(len(PROMPT), len(made)):
        counts[made[i - 2], made[i - 1], made[i]] += 1
    law = np.array([[exact_distribution(table[a, b], sampling, VOCABULARY) for b in range(VOCABULARY)]
                    for a in range(VOCABULARY)])  # fmt: skip
    # Given how often each state was left, the joint law of states and what followed them. Summed up over the states,
    # where few cells have many counts, a small fault that is the same everywhere shows.
    expected = law * counts.sum(axis=-1, keepdims=True) / counts.sum()
    return min(p_value(counts.sum(axis=over), expected.sum(axis=over)) for over in ((), 0, 1, (0, 1)))


@pytest.mark.parametrize("k", [0, 1, 2, 3, 6])
def test_long_run_follows_the_target(k: int) -> None:
    assert _transition_p_value(Sampling(temperature=1), k, 1500, seed=k, draft=DRAFT) > ACCEPTABLE


@pytest.mark.parametrize(
    "settings", [{"temperature": 1.6, "top_p": 0.8}, {"temperature": 0.7, "top_k": 3}, {"temperature": 1, "min_p": 0.2}]
)
def test_long_run_with_filters_follows_the_target(settings: dict[str, float]) -> None:
    sampling = Sampling(**settings)  # type: ignore[arg-type]
    assert _transition_p_value(sampling, 2, 1500, seed=3, draft=DRAFT) > ACCEPTABLE


def test_long_run_without_a_draft_follows_the_target() -> None:
    assert _transition_p_value(Sampling(temperature=1), 3, 1500, seed=4, draft=None) > ACCEPTABLE


def test_long_run_with_a_narrower_draft_follows_the_target() -> None:
    """A draft that does not know the last two tokens never proposes them; they come from the residual."""
    draft = TableModel.random(5, VOCABULARY - 2)
    assert _transition_p_value(Sampling(temperature=1), 2, 1500, seed=5, draft=draft) > ACCEPTABLE


def _pairs(
    target: Any, draft: Any, sampling: Sampling, k: int, samples: int, size: int = VOCABULARY,
    drafting: Callable[[Any, Sampling, int], Drafting] | None = None,
) -> np.ndarray:  # fmt: skip
    """How often `Decoding` gives each first two tokens, (size, size); one seed per sample. With `drafting`, made anew
    for each, k says nothing."""
    counts = np.zeros((size, size))
    contexts = target.new_context(), draft.new_context()
    for seed in range(samples):
        decoding, _ = _decoding(*contexts, sampling, seed, size)
        if drafting is None:
            fixed(decoding, k)
        else:
            decoding.drafting = drafting(contexts[1], sampling, seed)
        rounds = decoding.rounds(limit=None)
        while len(decoding.tokens) < len(PROMPT) + 2:
            next(rounds)
        rounds.close()
        first, second = decoding.tokens[len(PROMPT) : len(PROMPT) + 2]
        counts[first, second] += 1
        for context in contexts:
            context.rewind(min(context.length, len(PROMPT) - 1))
    return counts


EVERYTHING = {"temperature": 1.6, "top_k": 5, "top_p": 0.9, "min_p": 0.05} | PENALTY


@pytest.mark.parametrize("k", [0, 1, 3])
@pytest.mark.parametrize("settings", [{"temperature": 1.0} | PENALTY, EVERYTHING], ids=["penalties", "everything"])
def test_first_two_decoded_tokens_follow_the_target(settings: dict[str, float], k: int) -> None:
    sampling = Sampling(**settings)  # type: ignore[arg-type]
    assert p_value(_pairs(TARGET, DRAFT, sampling, k, 700), _exact_table_pairs(TARGET, sampling)) > ACCEPTABLE


# Every drafter, schedule and verification. How many tokens are drafted then depends on those drafted before.


class _Moody:
    """Each drafter and none in turn, and as many tokens as the draft is sure of."""

    parked, stops_early, whole_rounds = False, True, False

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def choose(self, offers: Sequence[Offer]) -> tuple[Offer, int] | None:
        wanted = ("model", "lookup", "model", None, "lookup")[self.rounds % 5]
        offer = next((offer for offer in offers if offer.drafter == wanted), None)
        return offer and (offer, min(offer.tokens, 1 + self.rounds % 4))

    def proceed(self, drafted: int, confidences: Sequence[float]) -> bool:
        return confidences[-1] > 0.45

    def observe(self, offer: Offer | None, drafted: int, accepted: int, *more: Any) -> None:
        self.rounds += 1

    def plain_rounds(self) -> int:
        return 0


# So near the target that most of its drafts are accepted, and what comes late in a round matters.
NEAR = TableModel(np.array(TARGET.table) + 0.3 * np.array(DRAFT.table))
_COSTS = Costs(((1, 1.0), (2, 1.25), (4, 1.6), (8, 3.0)), draft_step=0.1, draft_row=0.02)
DRAFTINGS: dict[str, Callable[[int], tuple[str, Any]]] = {
    "lookup, 3": lambda seed: ("lookup", FixedSchedule(3)),
    "hybrid, 3": lambda seed: ("hybrid", FixedSchedule(3)),
    "hybrid, moody": lambda seed: ("hybrid", _Moody(seed)),
    "hybrid, auto": lambda seed: ("hybrid", automatic(_COSTS, 7)),
    "model, auto": lambda seed: ("model", automatic(_COSTS, 7, drafters=["model"])),
}
WAYS = {"token": verify_tokenwise, "block": verify_block}


def _drafting(name: str, way: str) -> Callable[[Any, Sampling, int], Drafting]:
    """What makes a Drafting for a draft's context, sampling settings and a seed. A match may be a single token."""

    def made(context: Any, sampling: Sampling, seed: int) -> Drafting:
        drafters, schedule = DRAFTINGS[name](seed)
        both = [Lookup(VOCABULARY, 1), DraftModel(context, sampling, VOCABULARY)]
        return Drafting([one for one in both if drafters in ("hybrid", one.name)], schedule, verify=WAYS[way])

    return made


def _drafted_chain_p_value(name: str, way: str, settings: dict[str, float], tokens: int = 1200) -> float:
    sampling = Sampling(**settings)  # type: ignore[arg-type]
    decoding, _ = _decoding(TARGET.new_context(), None, sampling, seed=8)
    decoding.drafting = _drafting(name, way)(NEAR.new_context(), sampling, 0)
    return _chain_p_value(decoding, sampling, tokens)


@pytest.mark.parametrize(
    ("way", "settings"),
    [("token", {"temperature": 1.0}), ("block", {"temperature": 1.0}), ("block", {"temperature": 1.6, "top_p": 0.8}),
     ("token", {"temperature": 1.2, "top_k": 4, "min_p": 0.1})],
    ids=["token", "block", "block, filtered", "token, filtered"],
)  # fmt: skip
@pytest.mark.parametrize("name", DRAFTINGS)
def test_long_run_follows_the_target_whoever_drafts(name: str, way: str, settings: dict[str, float]) -> None:
    assert _drafted_chain_p_value(name, way, settings) > ACCEPTABLE


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["lookup, 3", "hybrid, moody", "hybrid, auto"])
def test_first_two_tokens_follow_the_target_whoever_drafts(name: str, way: str) -> None:
    """Under penalties, which see drafts as they see what was said."""
    sampling = Sampling(**EVERYTHING)  # type: ignore[arg-type]
    counts = _pairs(TARGET, NEAR, sampling, 0, 700, drafting=_drafting(name, way))
    assert p_value(counts, _exact_table_pairs(TARGET, sampling)) > ACCEPTABLE


def test_a_lookup_that_hides_its_certainty_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    propose = Lookup.propose

    def hiding(self: Lookup, *arguments: Any) -> Proposal:
        found = propose(self, *arguments)
        return Proposal(found.tokens, mx.full(found.probabilities.shape, 1 / VOCABULARY))

    monkeypatch.setattr(Lookup, "propose", hiding)
    assert _drafted_chain_p_value("lookup, 3", "token", {"temperature": 1.0}) < 1e-6
    assert _drafted_chain_p_value("lookup, 3", "block", {"temperature": 1.0}) < 1e-6


@pytest.mark.parametrize("way", WAYS)
def test_stopping_for_a_token_that_is_left_out_is_noticed(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    propose = DraftModel.propose

    def choosy(self: DraftModel, tokens: Sequence[int], k: int, *rest: Any) -> Proposal:
        found = propose(self, tokens, k, *rest)
        left_out = k > 1 and found.tokens[-1].item() % 2  # else it stays
        return found if not left_out else Proposal(found.tokens[:-1], found.probabilities[:-1])

    monkeypatch.setattr(DraftModel, "propose", choosy)
    monkeypatch.setitem(DRAFTINGS, "choosy", lambda seed: ("model", FixedSchedule(2)))
    assert _drafted_chain_p_value("choosy", way, {"temperature": 1.0}, 4000) < 1e-6


def test_penalties_blind_to_the_drafts_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = Sampling(temperature=1, repetition_penalty=3, presence_penalty=2)
    expected = _exact_table_pairs(TARGET, sampling)
    assert p_value(_pairs(TARGET, TARGET, sampling, 1, 700), expected) > ACCEPTABLE
    monkeypatch.setattr(
        engine, "_seen_by_row", lambda seen, drafts: seen if seen is None else mx.repeat(seen, drafts.size + 1, axis=0)
    )
    assert p_value(_pairs(TARGET, TARGET, sampling, 1, 700), expected) < 1e-6


@pytest.mark.parametrize(
    ("settings", "k"), [({"temperature": 1.0}, 2), (EVERYTHING, 3)], ids=["plain", "everything"]
)
def test_first_two_tokens_of_a_transformer_follow_it(settings: dict[str, float], k: int) -> None:
    size = 7
    sampling = Sampling(**settings)  # type: ignore[arg-type]
    shape: dict[str, Any] = {"vocab_size": 8, "tie_word_embeddings": False, "hidden_size": 16, "num_hidden_layers": 1}
    target, draft = tiny_model(1, 0.7, **shape), tiny_model(2, 0.7, **shape)

    def logits_after(tokens: list[int]) -> np.ndarray:
        context = target.new_context()
        row = np.array(context.extend(tokens, rows=1))[0]
        context.close()
        return row

    expected = _exact_pairs(logits_after, sampling, size)
    assert p_value(_pairs(target, draft, sampling, k, 500, size), expected) > ACCEPTABLE
    other = _exact_pairs(lambda tokens: logits_after([*tokens[:-1], 0]), sampling, size)
    assert p_value(_counts_of(other, 500, expected), expected) < 1e-6  # so few samples have power, too
