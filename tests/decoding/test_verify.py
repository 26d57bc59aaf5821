"""Both verifications emit tokens of the target's joint law, whatever the draft says and however many it drafts:
chi-square tests with fixed seeds over all samples at once. And block verification accepts as many as theory says."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from fractions import Fraction

import mlx.core as mx
import numpy as np
import pytest
from reference import p_value

from mlx_spec.decoding import verification as verify
from mlx_spec.decoding.verification import verify_block, verify_tokenwise

Verify = Callable[[mx.array, mx.array, mx.array, mx.array], tuple[mx.array, mx.array]]
ACCEPTABLE = 1e-4  # every seed is fixed: a test that passes once passes always
BROKEN = 1e-12
SAMPLES = 30_000
BOTH = pytest.mark.parametrize("law", [verify_block, verify_tokenwise])


@pytest.fixture(autouse=True)
def _vectorised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "draw", _draw)


def _draw(probabilities: mx.array, key: mx.array) -> mx.array:
    """`sampling.draw` in operations that `mx.vmap` can take."""
    noise = mx.random.gumbel(probabilities.shape, key=key)
    return mx.argmax(mx.log(probabilities) + noise, axis=-1).astype(mx.int32)


# -- a pair whose distributions depend on everything before -----------------------------------------------------------


class Pair:
    """p and q after every path of tokens, (nodes, size): node 0 is the prompt, child `node * size + 1 + token`."""

    def __init__(self, p: np.ndarray, q: np.ndarray) -> None:
        self.p, self.q = p.astype(np.float64), q.astype(np.float64)
        self.size = p.shape[1]

    def joint(self, length: int) -> np.ndarray:
        """The target's law of the first `length` tokens, (size ** length,), the first token varying slowest."""
        law, nodes = np.ones(1), np.zeros(1, int)
        for _ in range(length):
            law = (law[:, None] * self.p[nodes]).ravel()
            nodes = (nodes[:, None] * self.size + 1 + np.arange(self.size)).ravel()
        return law

    def sample(self, law: Verify, drafts: Drafts, length: int, samples: int, seed: int) -> np.ndarray:
        """How often each first `length` tokens came, (size ** length,), over as many rounds as that takes."""
        key = mx.random.key(seed)
        tokens = np.full((samples, length), -1)
        while (unfinished := np.flatnonzero(tokens[:, -1] < 0)).size:
            held = (tokens[unfinished] >= 0).sum(axis=1)
            nodes = np.zeros(len(unfinished), int)
            for token in tokens[unfinished].T:
                nodes = np.where(token >= 0, nodes * self.size + 1 + token, nodes)
            key, round_key = mx.random.split(key)
            for place, token in enumerate(self._round(law, drafts, nodes, round_key).T):
                fits = (token >= 0) & (held + place < length)
                tokens[unfinished[fits], held[fits] + place] = token[fits]
        cells = tokens @ self.size ** np.arange(length)[::-1]
        return np.bincount(cells, minlength=self.size**length)

    def accepted(self, law: Verify, k: int, samples: int, seed: int) -> float:
        """The mean number of accepted drafts in a round after the prompt."""
        emitted = self._round(law, Drafts(k), np.zeros(samples, int), mx.random.key(seed))
        return float((emitted >= 0).sum(axis=1).mean()) - 1

    def _round(self, law: Verify, drafts: Drafts, nodes: np.ndarray, key: mx.array) -> np.ndarray:
        """What a round after each of `nodes` emits, (samples, most + 1), -1 past the last token."""
        *draft_keys, verify_key = mx.random.split(key, drafts.most + 1)
        p, q = mx.array(self.p.astype(np.float32)), mx.array(self.q.astype(np.float32))
        path, tokens = [nodes], np.zeros((len(nodes), 0), int)
        count = np.full(len(nodes), drafts.most)
        for drafted, draft_key in enumerate(draft_keys):
            stops = (count == drafts.most) & drafts.stop(self, path[-1], tokens)
            count[stops] = drafted
            token = np.array(_draw(q[mx.array(path[-1])], draft_key))
            dropped = (count == drafts.most) & drafts.drop(self, path[-1], token)
            count[dropped] = drafted
            tokens = np.concatenate([tokens, token[:, None]], axis=1)
            path.append(path[-1] * self.size + 1 + token)
        rows = np.stack(path, axis=1)
        emitted = np.full((len(nodes), drafts.most + 1), -1)
        keys = mx.random.split(verify_key, len(nodes))
        for k in np.unique(count):
            chosen = np.flatnonzero(count == k)
            where = mx.array(rows[chosen, : k + 1])
            if k == 0:
                emitted[chosen, 0] = np.array(mx.vmap(_draw)(p[where], keys[mx.array(chosen)]))[:, 0]
                continue
            arguments = p[where], q[where[:, :k]], mx.array(tokens[chosen, :k]), keys[mx.array(chosen)]
            accepted, following = (np.array(array) for array in mx.vmap(law)(*arguments))
            assert ((accepted >= 0) & (accepted <= k)).all()
            for place in range(k):
                some = chosen[accepted > place]
                emitted[some, place] = tokens[some, place]
            emitted[chosen, accepted] = following[:, 0]
        return emitted


class Drafts:
    """How many tokens are drafted: always `most`."""

    def __init__(self, most: int) -> None:
        self.most = most

    def stop(self, pair: Pair, nodes: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Which samples draft no more, before the token after `nodes` is drawn; tokens (samples, drafted so far)."""
        return np.zeros(len(nodes), bool)

    def drop(self, pair: Pair, nodes: np.ndarray, token: np.ndarray) -> np.ndarray:
        """Which samples draft no more, and leave out the token that was just drawn after `nodes`."""
        return np.zeros(len(nodes), bool)


class WhileSure(Drafts):
    """Stops where the draft's likeliest next token is unlikely, and after some drafted tokens."""

    def stop(self, pair: Pair, nodes: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        unsure = pair.q[nodes].max(axis=1) < 0.5
        return unsure | (tokens[:, -1] == 1) if tokens.shape[1] else unsure


class DropsUnlikely(Drafts):
    """Looks at a drawn token, and leaves it out where it is not the likeliest. Not exact, and not allowed."""

    def drop(self, pair: Pair, nodes: np.ndarray, token: np.ndarray) -> np.ndarray:
        return pair.q[nodes].argmax(axis=1) != token


def _softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def _one_hot(rows: np.ndarray) -> np.ndarray:
    return np.eye(rows.shape[1])[rows.argmax(axis=1)]


def _pair(name: str, size: int = 4, depth: int = 6) -> Pair:
    nodes = sum(size**level for level in range(depth + 1))
    generator = np.random.default_rng(5)
    shared, own, other = generator.standard_normal((3, nodes, size))
    p, q = _softmax(1.5 * own), _softmax(1.5 * other)
    near = _softmax(1.5 * own + 0.5 * other)
    kept = (shared < 0.3) | (own == own.max(axis=1, keepdims=True))  # as a filter leaves few tokens
    zeros = _softmax(np.where(kept, own, -np.inf))
    pairs = {
        "near": (p, near),
        "unrelated": (p, q),
        "far": (_softmax(4 * own), _softmax(-4 * own)),
        "equal": (p, p),
        "target with zeros": (zeros, q),
        "draft with zeros": (p, zeros),
        "both with zeros": (zeros, np.roll(zeros, 1, axis=1)),
        "lookup": (p, _one_hot(near)),
        "lookup, target with zeros": (zeros, _one_hot(q)),
        "greedy target": (_one_hot(p), q),
    }
    return Pair(*pairs[name])


NAMES = [
    "near", "unrelated", "far", "equal", "target with zeros", "draft with zeros", "both with zeros", "lookup",
    "lookup, target with zeros", "greedy target",
]  # fmt: skip


# -- the law --------------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_first_three_tokens_follow_the_target(name: str, k: int, law: Verify) -> None:
    pair = _pair(name)
    counts = pair.sample(law, Drafts(k), 3, SAMPLES, seed=k)
    assert p_value(counts, pair.joint(3)) > ACCEPTABLE


@BOTH
def test_a_draft_that_is_no_number_leaves_the_target_on_its_own(law: Verify) -> None:
    """As of a model whose 16-bit arithmetic overflows, from its second row on."""
    pair = _pair("unrelated")
    pair.q[1:] = np.nan
    assert p_value(pair.sample(law, Drafts(3), 3, SAMPLES, seed=4), pair.joint(3)) > ACCEPTABLE


@pytest.mark.parametrize("name", ["near", "unrelated", "far", "lookup"])
def test_one_long_block_follows_the_target(name: str) -> None:
    """Six drafts and six tokens: most samples see one or two rounds."""
    pair = _pair(name, size=2, depth=12)
    assert p_value(pair.sample(verify_block, Drafts(6), 6, SAMPLES, seed=1), pair.joint(6)) > ACCEPTABLE


@BOTH
@pytest.mark.parametrize("name", ["near", "unrelated", "target with zeros", "lookup"])
def test_the_number_of_drafts_may_depend_on_those_drafted(name: str, law: Verify) -> None:
    pair = _pair(name)
    assert p_value(pair.sample(law, WhileSure(4), 3, SAMPLES, seed=2), pair.joint(3)) > ACCEPTABLE


@BOTH
def test_it_must_not_depend_on_a_draft_that_is_left_out(law: Verify) -> None:
    pair = _pair("near")
    assert p_value(pair.sample(law, DropsUnlikely(4), 3, SAMPLES, seed=2), pair.joint(3)) < BROKEN


def test_greedy_drafts_of_a_greedy_target_are_accepted_up_to_the_first_difference() -> None:
    size = 5
    for agreeing, k in itertools.product(range(5), range(1, 5)):
        wanted = np.arange(k + 1) % size
        drafted = np.where(np.arange(k) < agreeing, wanted[:k], (wanted[:k] + 1) % size)
        # Whatever agrees again after the first difference stays rejected.
        if agreeing + 1 < k:
            drafted[agreeing + 1 :] = wanted[agreeing + 1 : k]
        rows = mx.eye(size)
        for seed in range(5):
            accepted, following = verify_block(
                rows[mx.array(wanted)], rows[mx.array(drafted)], mx.array(drafted), mx.random.key(seed)
            )
            assert accepted.item() == min(agreeing, k)
            assert following.item() == wanted[min(agreeing, k)]


@BOTH
def test_a_certain_target_is_that_of_its_rows(law: Verify) -> None:
    """Tokens alone give what rows with all their weight on them give, from any draft."""
    size, generator = 5, np.random.default_rng(0)
    for seed in range(60):
        k = 1 + seed % 4
        wanted, drafted = generator.integers(0, 2, k + 1), generator.integers(0, 2, k)
        for draft in (mx.eye(size)[mx.array(drafted)], mx.full((k, size), 1 / size)):
            given = mx.array(drafted), mx.random.key(seed)
            certain = law(mx.array(wanted, mx.int32), draft, *given)
            rows = law(mx.eye(size)[mx.array(wanted)], draft, *given)
            assert [array.tolist() for array in certain] == [array.tolist() for array in rows]
            assert [array.dtype for array in certain] == [mx.int32, mx.int32]


def test_equal_rows_are_accepted_in_spite_of_rounding() -> None:
    """Rows that differ by rounding, as passes of another number of rows make them."""
    logits = 3 * mx.random.normal((5, 5000), key=mx.random.key(0))
    target, draft = mx.softmax(logits, axis=-1), mx.softmax((logits + 8)[:4], axis=-1)
    assert not mx.array_equal(target[:4], draft)
    for seed in range(50):
        drafted = _draw(draft, mx.random.key(seed))
        accepted, _ = verify_block(target, draft, drafted, mx.random.key(1000 + seed))
        assert accepted.item() == 4


def test_disjoint_distributions_are_never_accepted() -> None:
    target, draft = mx.array([[0.5, 0.5, 0, 0]] * 4), mx.array([[0, 0, 0.5, 0.5]] * 3)
    for seed in range(50):
        accepted, following = verify_block(target, draft, mx.array([2, 3, 2 + seed % 2]), mx.random.key(seed))
        assert accepted.item() == 0
        assert following.item() in (0, 1)


def test_probabilities_at_the_edge_of_float32_give_numbers() -> None:
    least = 1e-38
    target = mx.array([[1, least, 0], [least, 1, 0], [1, least, 0], [0, 0, 1]])
    draft = mx.array([[least, 1, 0], [least, 1, 0], [1, least, 0]])
    for tokens in itertools.product((0, 1), repeat=3):
        for seed in range(5):
            accepted, following = verify_block(target, draft, mx.array(tokens), mx.random.key(seed))
            assert 0 <= accepted.item() <= 3
            assert target[accepted.item(), following.item()].item() > 0


@BOTH
def test_nothing_is_read_on_the_host(law: Verify) -> None:
    """A transformed function cannot read an array; and all samples at once, as above, is what each of them alone is."""
    pair = _pair("near")
    target, draft = (mx.array(rows.astype(np.float32)) for rows in (pair.p[:5], pair.q[:4]))
    tokens, keys = mx.array([1, 0, 3, 2]), mx.random.split(mx.random.key(0), 50)
    accepted, following = mx.vmap(law)(*(mx.stack([array] * 50) for array in (target, draft, tokens)), keys)
    alone = [law(target, draft, tokens, key) for key in keys]
    assert all(count.shape == () and token.shape == (1,) for count, token in alone)
    assert all(array.dtype == mx.int32 for pair_ in alone for array in pair_)
    assert accepted.tolist() == [count.item() for count, _ in alone]
    assert following.tolist() == [token.tolist() for _, token in alone]
    with pytest.raises(ValueError, match="eval"):
        mx.vmap(lambda key: mx.array(law(target, draft, tokens, key)[0].item()))(keys)


# -- how many are accepted --------------------------------------------------------------------------------------------


def _expected(pair: Pair, k: int) -> tuple[float, float]:
    """The expected number of accepted drafts, token-wise and by block: the sum over every prefix of its probability
    under the draft times that of being accepted; exact, from the definitions."""
    one_by_one = together = Fraction(0)
    for tokens in itertools.product(range(pair.size), repeat=k):
        node, drafted, product, weight = 0, Fraction(1), Fraction(1), Fraction(1)
        for place, token in enumerate(tokens):
            p, q = Fraction(float(pair.p[node, token])), Fraction(float(pair.q[node, token]))
            if q == 0:
                break
            drafted *= q
            product *= min(Fraction(1), p / q)
            weight = min(Fraction(1), weight * p / q)
            if not any(tokens[place + 1 :]):  # every prefix once
                one_by_one += drafted * product
                together += drafted * weight
            node = node * pair.size + 1 + token
    return float(one_by_one), float(together)


# How many times as many of four drafts a block accepts.
GAIN = {"near": 1.037, "unrelated": 1.323, "target with zeros": 1.218}


def _standard_error(k: int) -> float:
    return k / 2 / SAMPLES**0.5  # no count from 0 to k varies more


def test_the_example_of_the_paper() -> None:
    """p = (1/3, 2/3) and q = (2/3, 1/3) everywhere, two drafts: 10/9 accepted one by one, 11/9 as a block."""
    nodes = 7
    pair = Pair(np.tile([1 / 3, 2 / 3], (nodes, 1)), np.tile([2 / 3, 1 / 3], (nodes, 1)))
    assert _expected(pair, 2) == pytest.approx((10 / 9, 11 / 9))
    error = _standard_error(2)
    assert 2 * 4 * error < 1 / 9  # the two can be told apart
    assert pair.accepted(verify_tokenwise, 2, SAMPLES, seed=1) == pytest.approx(10 / 9, abs=4 * error)
    assert pair.accepted(verify_block, 2, SAMPLES, seed=2) == pytest.approx(11 / 9, abs=4 * error)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("k", [1, 2, 4])
def test_a_block_accepts_what_theory_says_and_never_less_than_one_by_one(name: str, k: int) -> None:
    pair = _pair(name)
    one_by_one, together = _expected(pair, k)
    assert together >= one_by_one - 1e-12
    if k == 1 or name.startswith("lookup"):  # a draft that is certain has nothing to make up for
        assert together == pytest.approx(one_by_one)
    if k == 4 and name in GAIN:
        assert together / one_by_one == pytest.approx(GAIN[name], abs=0.001)
    error = _standard_error(k)
    assert pair.accepted(verify_tokenwise, k, SAMPLES, seed=3) == pytest.approx(one_by_one, abs=4 * error)
    assert pair.accepted(verify_block, k, SAMPLES, seed=4) == pytest.approx(together, abs=4 * error)


# -- the tests above would notice a fault ----------------------------------------------------------------------------


def _variant(fault: str) -> Verify:
    """Block verification written once more, as the recurrence, with a fault."""

    def law(target: mx.array, draft: mx.array, tokens: mx.array, key: mx.array) -> tuple[mx.array, mx.array]:
        k = tokens.size
        accept_key, next_key = mx.random.split(key)
        uniform = mx.random.uniform(shape=(k,), key=accept_key)
        target_at = mx.take_along_axis(target[:k], tokens[:, None], axis=-1)[:, 0]
        draft_at = mx.take_along_axis(draft, tokens[:, None], axis=-1)[:, 0]
        weights = [mx.array(1.0)]
        for i in range(k):
            product = weights[-1] * target_at[i] / draft_at[i]
            weights.append(product if fault == "is not held below one" else mx.minimum(product, 1))
        accepted = mx.array(0, mx.int32)
        for i in range(1, k + 1):
            weight = weights[i]
            if i < k and fault != "accepts with the weight":
                left = mx.maximum(weight * target[i] - draft[i], 0).sum()
                chance = left / mx.maximum(left + 1 - weight, 1e-30)
            else:
                chance = weight
            accepts = uniform[i - 1] < chance
            if fault == "ends at the first rejection":
                accepts = accepts & (accepted == i - 1) if i > 1 else accepts
            accepted = mx.where(accepts, i, accepted)
        weight = mx.array(1.0) if fault == "forgets the weight" else mx.take(mx.stack(weights), accepted, axis=0)
        p, q = mx.take(target, accepted, axis=0), mx.take(draft, mx.minimum(accepted, k - 1), axis=0)
        residual = mx.where(accepted == k, p, mx.maximum(weight * p - q, 0))
        residual = mx.where(residual.sum() > 0, residual, p)
        return accepted, _draw(residual[None], next_key)

    return law


@pytest.mark.parametrize(
    "fault", ["is not held below one", "accepts with the weight", "ends at the first rejection", "forgets the weight"]
)
def test_a_faulty_rule_is_noticed(fault: str) -> None:
    pair = _pair("both with zeros")
    assert p_value(pair.sample(_variant(fault), Drafts(4), 3, SAMPLES, seed=4), pair.joint(3)) < BROKEN


def test_the_rule_without_a_fault_is_not() -> None:
    pair = _pair("both with zeros")
    assert p_value(pair.sample(_variant("none"), Drafts(4), 3, SAMPLES, seed=4), pair.joint(3)) > ACCEPTABLE
