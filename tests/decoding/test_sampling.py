"""Logits to distribution to token, against float64 with a sort."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from reference import exact_distribution, p_value

from mlx_spec.decoding import sampling as module
from mlx_spec.decoding.sampling import count_tokens, distribution, draw, log_probabilities
from mlx_spec.settings import Sampling

NEVER = -math.inf


def _distribution(logits: Any, sampling: Sampling, size: int | None = None, seen: Any = None) -> np.ndarray:
    logits = logits if isinstance(logits, mx.array) else mx.array(np.atleast_2d(logits).astype(np.float32))
    seen = None if seen is None else mx.array(np.atleast_2d(seen).astype(np.float32))
    size = logits.shape[-1] if size is None else size
    got = np.array(distribution(logits, sampling, size, seen))
    if got.ndim == 1:  # each row certain of its token
        assert sampling.temperature == 0
        assert got.dtype == np.int32
        return np.eye(size, dtype=np.float32)[got]
    return got


def _borderline(logits: np.ndarray, sampling: Sampling, size: int, seen: np.ndarray | None) -> bool:
    """Whether float32 may decide otherwise than float64 on which tokens a filter keeps."""

    def kept(top_p: float, min_p: float) -> list[bool]:
        nudged = Sampling(
            sampling.temperature, sampling.top_k, top_p, min_p, sampling.repetition_penalty,
            sampling.presence_penalty, sampling.frequency_penalty, sampling.logit_bias)
        return (exact_distribution(logits, nudged, size, seen) > 0).tolist()

    top_p, min_p = sampling.top_p, sampling.min_p
    nudges = [(top_p, min_p)]
    if 1e-5 < top_p < 1:
        nudges += [(top_p * (1 - 1e-5), min_p), (min(1, top_p * (1 + 1e-5)), min_p)]
    if 0 < min_p < 1:
        nudges += [(top_p, min_p * (1 - 1e-5)), (top_p, min_p * (1 + 1e-5))]
    first, *others = [kept(*nudge) for nudge in nudges]
    return any(other != first for other in others)


@st.composite
def _rows(draw_value: Any) -> tuple[np.ndarray, int, np.ndarray]:
    """Two rows of logits on a grid, so that ties are frequent and near-ties absent; real columns; counts."""
    size = draw_value(st.integers(1, 24))
    columns = size + draw_value(st.sampled_from([0, 1, 7]))
    one = st.one_of(st.integers(-160, 160).map(lambda n: n / 16), st.sampled_from([0.0, 0.0, 1.0, NEVER, 40.0]))
    logits = np.array([[draw_value(one) for _ in range(columns)] for _ in range(2)])
    logits[:, size:] = 99  # padding that would win everything
    assume((logits[:, :size] > NEVER).any(axis=1).all())
    counts = st.sampled_from([0, 0, 1, 2, 5])
    return logits, size, np.array([[draw_value(counts) for _ in range(size)] for _ in range(2)])


@st.composite
def _settings(draw_value: Any) -> Sampling:
    def pick(*values: float) -> Any:
        return draw_value(st.sampled_from(values))

    return Sampling(
        temperature=pick(0, 1e-30, 1e-3, 0.7, 1, 3),
        top_k=pick(0, 0, 1, 2, 5, 1000),
        top_p=pick(1, 1, 1e-46, 1e-9, 0.3, 0.5, 0.9, 0.999),
        min_p=pick(0, 0, 1e-3, 0.1, 0.5, 1),
        repetition_penalty=pick(1, 1, 1.3, 0.5, 10),
        presence_penalty=pick(0, 0, 0.5, -2),
        frequency_penalty=pick(0, 0, 0.25, -1),
        logit_bias=draw_value(
            st.dictionaries(st.integers(0, 30), st.sampled_from([NEVER, -1.5, 2.0, 100.0]), max_size=3)),
    )


@settings(max_examples=400, deadline=None, derandomize=True)
@given(_rows(), _settings(), st.sampled_from([mx.float32, mx.bfloat16, mx.float16]))
def test_distribution_is_the_sorted_float64_one(
    rows: tuple[np.ndarray, int, np.ndarray], sampling: Sampling, dtype: mx.Dtype
) -> None:
    logits, size, seen = rows
    rounded = mx.array(logits.astype(np.float32)).astype(dtype)
    exact_logits = np.array(rounded.astype(mx.float32))
    banned = [token for token, bias in sampling.logit_bias.items() if bias == NEVER and token < size]
    assume(all(np.delete(row[:size], banned).max(initial=NEVER) > NEVER for row in logits))
    if not sampling.penalises:
        seen = np.zeros_like(seen)
    assume(not any(_borderline(exact_logits[i], sampling, size, seen[i]) for i in range(2)))
    expected = [exact_distribution(exact_logits[i], sampling, size, seen[i]) for i in range(2)]
    got = _distribution(rounded, sampling, size, seen if sampling.penalises else None)
    assert got.shape == (2, size)
    assert got.dtype == np.float32
    if sampling.temperature == 0 and sampling.penalises:
        # Two penalised logits may tie in one precision and not in the other.
        chosen = np.take_along_axis(np.array(expected), got.argmax(axis=1)[:, None], axis=1)
        assume((chosen == 1).all())
    np.testing.assert_array_equal(got > 1e-30, np.array(expected) > 1e-30)
    np.testing.assert_allclose(got, expected, atol=3e-6, rtol=2e-4)
    np.testing.assert_allclose(got.sum(axis=1), 1, atol=1e-6)


# By a sort, as of few columns, and by a search, one bit and three at a time.
WAYS = pytest.mark.parametrize("digit", [None, 1, 3])


@WAYS
@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.integers(1, 3000), st.floats(0, 1, exclude_min=True), st.booleans())
def test_nucleus_threshold_is_exact(digit: int | None, seed: int, size: int, top_p: float, ties: bool) -> None:
    """On multiples of 2**-22 every sum is exact, so the threshold must be the sorted one to the last bit."""
    generator = np.random.default_rng(seed)
    grains = generator.multinomial(2**22, generator.dirichlet(np.full(size, generator.choice([0.05, 1, 50]))))
    if ties:
        grains = np.repeat(grains[: (size + 1) // 2], 2)
    total = int(grains.sum())
    wanted = math.ceil(top_p * total)
    rows = mx.array((grains / 2**22).astype(np.float32))[None]
    got = module._nucleus_threshold(rows, mx.array([[wanted / 2**22]]), digit)
    descending = np.sort(grains)[::-1]
    place = int(np.argmax(np.cumsum(descending) >= wanted))
    least = descending[place] / 2**22
    np.testing.assert_array_equal(np.array(rows >= got)[0], grains / 2**22 >= least)


@WAYS
@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.floats(2**-100, 0.5, width=32), st.integers(1, 300))
def test_nucleus_threshold_parts_neighbouring_floats(digit: int | None, value: float, below: int) -> None:
    likeliest = np.float32(value)
    row = np.full(5, likeliest)
    for _ in range(below):
        row[1:] = np.nextafter(row[1:], np.float32(0))
    threshold = module._nucleus_threshold(mx.array(row)[None], mx.array([[float(likeliest) / 2]]), digit)
    assert threshold.item() == likeliest


def test_few_columns_are_sorted_and_many_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError

    rows = mx.softmax(mx.random.normal((2, 6000), key=mx.random.key(0)), axis=-1)
    mass = mx.full((2, 1), 0.9)
    searched = module._nucleus_threshold(rows, mass, 1)
    for digit in (2, 3, 5):
        np.testing.assert_array_equal(module._nucleus_threshold(rows, mass, digit), searched)
    with monkeypatch.context() as patched:
        patched.setattr(mx, "sort", never)
        np.testing.assert_array_equal(module._nucleus_threshold(rows, mass), searched)
    monkeypatch.setattr(mx, "arange", never)
    module._nucleus_threshold(rows[:, :4000], mass)


LIBRARIES = """
import sys
from pathlib import Path
import mlx.core as mx
from mlx_spec.decoding.sampling import distribution, draw
from mlx_spec.decoding.verification import verify_block, verify_tokenwise
from mlx_spec.settings import Sampling
key = mx.random.key(0)
for columns in (100, 5000):
    logits = mx.random.normal((3, columns), key=key)
    for temperature in (0, 0.5, 0.7, 1):
        for top_k, top_p, min_p in ((0, 1, 0), (7, 1, 0), (9, 0.3, 0), (0, 0.9, 0), (0, 0.95, 0.1), (50, 0.8, 0.2)):
            sampling = Sampling(temperature, top_k, top_p, min_p, 1.3, 0.2, 0.1, {3: 1.5, 4: -2})
            p = distribution(logits, sampling, columns, mx.ones((1, columns)))
            mx.eval(draw(p, key), verify_block(p, p[:2], draw(p, key)[:2], key),
                    verify_tokenwise(p, p[:2], draw(p, key)[:2], key))
double = mx.compile(lambda x: mx.exp(x) * 2)
before = len([*Path(sys.argv[1]).rglob("*.so")])
mx.eval(double(mx.ones((5,))))
print(before, len([*Path(sys.argv[1]).rglob("*.so")]) - before)
"""


@pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="libraries in TMPDIR are the CPU backend's")
def test_all_settings_together_compile_next_to_nothing(tmp_path: Path) -> None:
    """MLX's CPU backend compiles a C++ library for each fused kernel and each constant in it, about a second each."""
    done = subprocess.run([sys.executable, "-c", LIBRARIES, str(tmp_path)], env=os.environ | {"TMPDIR": str(tmp_path)},
                          capture_output=True, text=True, check=True)  # fmt: skip
    libraries, of_a_fused_kernel = map(int, done.stdout.split())
    assert libraries <= 4
    assert of_a_fused_kernel == 1  # they are counted where they are made


@pytest.mark.parametrize("top_p", [1e-9, 0.1, 0.9, 0.999999])
@pytest.mark.parametrize("top_k", [0, 50])
def test_top_p_over_a_large_vocabulary(top_p: float, top_k: int) -> None:
    """The kept tokens reach the mass, and without the least likely of them they do not."""
    logits = 3 * np.random.default_rng(1).standard_normal((3, 50_000)).astype(np.float32)
    got = _distribution(logits, Sampling(temperature=1, top_p=top_p, top_k=top_k))
    for row, kept in zip(logits, got > 0, strict=True):
        before = exact_distribution(row, Sampling(temperature=1, top_k=top_k), 50_000)
        mass = before[kept].sum()
        slack = 1e-4 if not top_k else 1e-6  # a float32 sum over the whole row, on MLX's CPU backend
        assert mass >= top_p - slack
        assert mass - before[kept].min() < top_p + slack
        assert before[kept].min() > before[~kept].max()
    if top_p == 1e-9:
        assert (got.max(axis=1) == 1).all()
    elif not top_k:
        assert (got == 0).any()


def test_tokens_that_tie_at_the_last_place_are_all_kept() -> None:
    logits = np.log([[0.3, 0.1, 0.2, 0.2, 0.2]])
    for sampling in (Sampling(temperature=1, top_k=2), Sampling(temperature=1, top_p=0.4),
                     Sampling(temperature=1, top_k=3, top_p=0.4)):
        np.testing.assert_allclose(_distribution(logits, sampling), [np.array([3, 0, 2, 2, 2]) / 9], atol=1e-6)


def test_top_p_is_of_all_that_top_k_left() -> None:
    """Tokens that tie at the k-th place count: 0.6 of their mass is more than the first token has."""
    logits = np.log([[0.4, 0.2, 0.2, 0.2]])
    got = _distribution(logits, Sampling(temperature=1, top_k=2, top_p=0.6))
    np.testing.assert_allclose(got, [[0.4, 0.2, 0.2, 0.2]], atol=1e-6)


def test_min_p_is_of_the_likeliest() -> None:
    got = _distribution(np.log([[0.5, 0.24, 0.26]]), Sampling(temperature=1, min_p=0.5))
    np.testing.assert_allclose(got, [[0.5 / 0.76, 0, 0.26 / 0.76]], atol=1e-6)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("size", [5, 37, 130])
def test_equal_logits_are_equally_likely(dtype: mx.Dtype, size: int) -> None:
    """Also where a row's last elements take another path through the arithmetic: no filter may part them."""
    values = np.random.default_rng(size).integers(0, 4, size) / 3
    logits = mx.array(values.astype(np.float32)).astype(dtype)[None]
    for top_k in range(1, size):
        got = _distribution(logits, Sampling(temperature=0.7, top_k=top_k))[0]
        for value in np.unique(values):
            assert len(np.unique(got[values == value])) == 1


@pytest.mark.parametrize("temperature", [1e-45, 1e-20, 0.7, 1.0, 1e9])
def test_temperature_keeps_every_row_a_distribution(temperature: float) -> None:
    rows = [[1, 2, 3, NEVER], [0, 0, 0, 0], [3e38, -3e38, 0, NEVER], [NEVER, NEVER, -5, NEVER], [1e-38, 0, 0, 1e-38]]
    got = _distribution(rows, Sampling(temperature=temperature))
    np.testing.assert_allclose(got.sum(axis=1), 1, atol=1e-6)
    assert (got[[0, 2, 3], 3] == 0).all()
    assert got[3, 2] == 1
    np.testing.assert_array_equal(got[1], 0.25)
    if temperature < 1e-10:
        assert got[0, 2] == 1


def test_greedy_takes_the_first_of_equals_whatever_the_filters() -> None:
    got = _distribution([[1, 5, 5, 2]], Sampling(temperature=0, top_k=1, top_p=0.1, min_p=1))
    np.testing.assert_array_equal(got, [[0, 1, 0, 0]])


def test_vocabulary_of_one() -> None:
    for sampling in (Sampling(), Sampling(temperature=1, top_k=1, top_p=0.5, min_p=1), Sampling(temperature=2)):
        np.testing.assert_array_equal(_distribution([[-7.0, 50.0]], sampling, 1), [[1]])


def test_bias_of_minus_infinity_forbids() -> None:
    for temperature in (0, 0.7):
        got = _distribution([[9, 1, 0]], Sampling(temperature=temperature, logit_bias={0: NEVER, 500: 3.0}))
        assert got[0, 0] == 0
        assert got[0, 1] > 0.5


def test_bias_past_the_vocabulary_alone_changes_nothing() -> None:
    got = _distribution([[1, 2, 3]], Sampling(temperature=1, logit_bias={2: 100.0}), 2)
    np.testing.assert_allclose(got[0], [0.268941, 0.731059], atol=1e-5)


def test_largest_penalties_stay_finite() -> None:
    sampling = Sampling(temperature=1, repetition_penalty=1e9, presence_penalty=1e9, frequency_penalty=1e9)
    got = _distribution([[5, 1, 0, -3]], sampling, seen=[1, 0, 0, 200_000])
    np.testing.assert_allclose(got, [[0, 0.731059, 0.268941, 0]], atol=1e-5)


def test_one_row_of_counts_serves_every_row() -> None:
    sampling = Sampling(temperature=1, presence_penalty=1)
    logits = [[1, 2, 3], [3, 2, 1]]
    each = _distribution(logits, sampling, seen=[[1, 0, 1], [1, 0, 1]])
    np.testing.assert_array_equal(_distribution(logits, sampling, seen=[[1, 0, 1]]), each)


def test_draw_follows_the_distribution() -> None:
    probabilities = np.array([0, 0.5, 0.25, 0, 0.2, 0.049, 0.001, 0], np.float32)
    rows = mx.broadcast_to(mx.array(probabilities), (200_000, 8))
    tokens = draw(rows, mx.random.key(5))
    assert tokens.shape == (200_000,)
    assert tokens.dtype == mx.int32
    counts = np.bincount(np.array(tokens), minlength=8)
    assert p_value(counts, probabilities.astype(np.float64)) > 1e-4
    assert p_value(counts, np.array([0, 0.49, 0.26, 0, 0.2, 0.049, 0.001, 0])) < 1e-9  # the test has power


def test_draw_never_takes_what_has_no_probability() -> None:
    probabilities = np.random.default_rng(0).random((2000, 500)).astype(np.float32)
    probabilities[:, :100] = probabilities[:, 400:] = 0
    probabilities[:, 100:400:2] = 0
    rows = mx.array(probabilities)
    for seed in range(20):
        tokens = np.array(draw(rows, mx.random.key(seed)))
        assert (np.take_along_axis(probabilities, tokens[:, None], axis=1) > 0).all()


@pytest.mark.parametrize("row", [[NEVER] * 3, [math.nan] * 3, [0, 1, math.nan]])
@pytest.mark.parametrize("filters", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1}])
def test_a_row_that_leaves_no_token_is_seen(row: list[float], filters: dict[str, Any]) -> None:
    for temperature in (0, 1):
        sampling = Sampling(temperature=temperature, **filters)
        assert module.leave_tokens(distribution(mx.array([[NEVER, 0.0, 2]] * 2), sampling, 3)).item()
        if temperature or row[0] == NEVER:  # of a NaN among numbers the engine looks at the logits
            assert not module.leave_tokens(distribution(mx.array([[0.0, 1, 2], row]), sampling, 3)).item()


def test_a_bias_cannot_bring_back_what_the_model_forbids() -> None:
    got = _distribution([[NEVER, 0, 1]], Sampling(temperature=1, logit_bias={0: 1e9, 1: NEVER}))
    np.testing.assert_array_equal(got, [[0, 0, 1]])


def test_what_is_certain_is_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.random, "categorical", lambda *_, **__: pytest.fail("a draw"))
    rows = distribution(mx.array([[0.0, 3, 1], [5.0, 5, 5]]), Sampling(top_p=0.5), 3)
    np.testing.assert_array_equal(draw(rows, mx.random.key(0)), [1, 0])


def test_rounds_of_a_seed_have_keys_of_their_own() -> None:
    seeds = [0, 1, 2, 2**32, 2**64 - 1]
    keys = {tuple(module.round_key(seed, count).tolist()) for seed in seeds for count in range(1, 1000)}
    assert len(keys) == len(seeds) * 999


def test_draw_from_certainty() -> None:
    rows = mx.eye(50)
    for seed in range(20):
        np.testing.assert_array_equal(np.array(draw(rows, mx.random.key(seed))), np.arange(50))


def test_same_key_same_token() -> None:
    rows = mx.full((64, 100), 0.01)
    first, again, other = (np.array(draw(rows, mx.random.key(seed))) for seed in (1, 1, 2))
    mx.random.uniform(shape=(10,))  # the global state plays no part
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(first, np.array(draw(rows, mx.random.key(1))))
    assert (first != other).any()
    assert len(set(first.tolist())) > 20  # rows are independent


def test_count_tokens() -> None:
    np.testing.assert_array_equal(np.array(count_tokens([1, 1, 4, 9, 1], 5)), [0, 3, 0, 0, 1])
    np.testing.assert_array_equal(np.array(count_tokens([7], 3)), [0, 0, 0])
    assert count_tokens([], 4).dtype == mx.float32


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_log_probabilities(dtype: mx.Dtype) -> None:
    logits = mx.array([[1.0, 2.0, 500.0, NEVER, 77.0], [0.0, 0.0, -500.0, 0.0, 9e9]]).astype(dtype)
    got = log_probabilities(logits, 4)
    assert got.dtype == mx.float32
    exact = np.array(logits.astype(mx.float32), np.float64)[:, :4]
    exact -= exact.max(axis=1, keepdims=True)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(np.array(got), exact, rtol=1e-5)
