"""What the code under test is compared with: the sampling settings in float64 with a sort, a chi-square test, and a
model that is a table."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from scipy import stats

from mlx_spec.architectures.context import Tokens
from mlx_spec.settings import Sampling


def exact_distribution(
    logits: np.ndarray, sampling: Sampling, vocabulary_size: int, seen: np.ndarray | None = None
) -> np.ndarray:
    """The distribution of one row (columns,), from its settings' definitions alone."""
    x = np.asarray(logits, np.float64)[:vocabulary_size].copy()
    for token, bias in sampling.logit_bias.items():
        if token < vocabulary_size:
            x[token] += bias
    if seen is not None:
        for token in np.flatnonzero(seen):
            if x[token] > 0:
                x[token] /= sampling.repetition_penalty
            else:
                x[token] *= sampling.repetition_penalty
            x[token] -= sampling.presence_penalty + sampling.frequency_penalty * seen[token]
    if sampling.temperature == 0:
        return np.eye(vocabulary_size)[np.argmax(x)]
    x = (x - x.max()) / sampling.temperature
    p = np.exp(x)
    p /= p.sum()
    kept = np.ones(vocabulary_size, bool)
    if sampling.top_k:
        kept &= p >= np.sort(p)[::-1][min(sampling.top_k, vocabulary_size) - 1]
    if sampling.top_p < 1:
        left = np.sort(p[kept])[::-1]
        enough = np.cumsum(left) >= sampling.top_p * left.sum()
        kept &= p >= left[np.argmax(enough)]
    kept &= p >= sampling.min_p * p.max()
    p = np.where(kept, p, 0)
    return p / p.sum()


def p_value(counts: np.ndarray, expected: np.ndarray) -> float:
    """Pearson's chi-square test of counts against probabilities. What cannot happen must not have happened."""
    counts, expected = counts.ravel(), expected.ravel() * counts.sum()
    assert counts[expected == 0].sum() == 0, "a token of probability 0 was drawn"
    order = np.argsort(-expected)
    counts, expected = counts[order], expected[order]
    rare = expected < 5
    cells = int((~rare).sum())
    observed = [*counts[:cells], counts[cells:].sum()]
    wanted = [*expected[:cells], expected[cells:].sum()]
    if wanted[-1] < 5 and cells > 0:
        observed[-2:], wanted[-2:] = [sum(observed[-2:])], [sum(wanted[-2:])]
    if len(observed) == 1:
        return 1.0
    return float(stats.chisquare(observed, wanted, sum_check=False).pvalue)


class TableModel:
    """A model whose next token depends on the last two, through a table of logits (vocabulary, vocabulary, columns)."""

    rewind_obstacle = None

    def bytes_to_allocate(self, tokens: int) -> int:
        return 4 * tokens

    def trim(self) -> None:
        pass

    def __init__(self, table: np.ndarray, can_rewind: bool = True, chains_cheaply: bool = True) -> None:
        self.table = mx.array(table.astype(np.float32))
        self.can_rewind, self.chains_cheaply = can_rewind, chains_cheaply

    @classmethod
    def random(cls, seed: int, vocabulary: int, scale: float = 1.5, columns: int | None = None) -> TableModel:
        generator = np.random.default_rng(seed)
        return cls(scale * generator.standard_normal((vocabulary, vocabulary, columns or vocabulary)))

    def new_context(self) -> TableContext:
        return TableContext(self)


class TableContext:
    """A sequence of a TableModel; token 0 precedes the first one. Keeps its tokens, so that a test can read them."""

    def __init__(self, model: TableModel) -> None:
        self._model = model
        self.can_rewind, self.chains_cheaply = model.can_rewind, model.chains_cheaply
        self.vocabulary_size = int(model.table.shape[-1])
        self.nbytes = 0
        self.passes = 0
        self._tokens = mx.zeros((1,), mx.int32)

    @property
    def length(self) -> int:
        return int(self._tokens.size) - 1

    @property
    def tokens(self) -> list[int]:
        return self._tokens.tolist()[1:]

    def extend(self, tokens: Tokens, rows: int | None = None) -> mx.array:
        tokens = tokens if isinstance(tokens, mx.array) else mx.array(tokens, mx.int32)
        assert tokens.ndim == 1
        assert tokens.size > 0
        self.passes += 1
        before = mx.concatenate([self._tokens[-1:], tokens[:-1]])
        self._tokens = mx.concatenate([self._tokens, tokens])
        logits = self._model.table[before, tokens]  # (n, columns)
        return logits if rows is None else logits[tokens.size - rows :]

    def evaluate(self) -> None:
        mx.eval(self._tokens)

    def rewind(self, length: int) -> None:
        assert 0 <= length <= self.length
        assert self.can_rewind or length in (0, self.length)
        self._tokens = self._tokens[: length + 1]

    def fork(self) -> TableContext:
        other = TableContext(self._model)
        other._tokens = self._tokens
        return other

    prefill_rows = 32

    def reserve(self, tokens: int) -> None:
        pass

    def settle(self, length: int) -> None:
        pass

    def close(self) -> None:
        self.rewind(0)


def count(tokens: Sequence[int], vocabulary_size: int) -> np.ndarray:
    return np.bincount(tokens, minlength=vocabulary_size)
