"""Any other architecture, through mlx-lm's own definition and caches. Knows what those caches can and cannot do."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache, make_prompt_cache

from mlx_spec.architectures.context import Tokens, token_array
from mlx_spec.machine.memory import NO_MEMORY, bound_cache, memory_or

_EXACTLY_REWINDABLE = (KVCache, QuantizedKVCache)
"""Caches whose `trim` forgets exactly the last tokens. A rotating cache has overwritten what a rewind would need
once it has wrapped, and a recurrent state cannot go back at all."""


class ExternalModel:
    """An mlx-lm model. Each context owns its caches; there is no page pool."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        name = type(module).__module__.rpartition(".")[2]
        caches = make_prompt_cache(module)
        inexact = sorted({type(cache).__name__ for cache in _flat(caches)} - {c.__name__ for c in _EXACTLY_REWINDABLE})
        self.rewind_obstacle = (
            f"({name}) keeps its past in {' and '.join(inexact)}, "
            "which cannot take rejected tokens back"
            if inexact
            else None
        )
        self.paging_obstacle = f"({name}) runs through mlx-lm's own definition and caches"
        # Lazy: only the shape is computed.
        self._vocabulary_size = int(module(mx.array([[0]]), cache=caches).shape[-1])
        # A KVCache has just made room for its first step of positions.
        self._bytes_per_token = sum(c.nbytes // c.step for c in _flat(caches) if type(c) in _EXACTLY_REWINDABLE)

    def bytes_to_allocate(self, tokens: int) -> int:
        return tokens * self._bytes_per_token

    def trim(self) -> None:
        mx.clear_cache()

    def new_context(self, sinks: int = 0, window: int | None = None) -> ExternalContext:
        """A window is for native definitions only: see `paging_obstacle`."""
        assert window is None
        return ExternalContext(self.module, self.rewind_obstacle is None, self._vocabulary_size)


class ExternalContext:
    """A sequence in mlx-lm caches."""

    chains_cheaply = True  # mlx-lm chains its own passes, whatever the size of its caches

    def __init__(self, module: nn.Module, can_rewind: bool, vocabulary_size: int) -> None:
        self._module, self.can_rewind, self.vocabulary_size = module, can_rewind, vocabulary_size
        self._caches: list[Any] = make_prompt_cache(module)
        self.length = 0

    @property
    def prefill_rows(self) -> int:
        return 32 if mx.default_device() == mx.cpu else 512

    @property
    def nbytes(self) -> int:
        return sum(int(cache.nbytes) for cache in self._caches) if self.length else 0

    def reserve(self, tokens: int) -> None:
        """mlx-lm's caches grow as they do."""

    def extend(self, tokens: Tokens, rows: int | None = None) -> mx.array:
        tokens = token_array(tokens)
        before = self.length
        try:
            with memory_or(NO_MEMORY):
                logits = self._module(tokens[None], cache=self._caches)[0]  # (n, vocabulary_size)
        except BaseException:
            # Some layers may have appended and others not.
            for cache in _flat(self._caches):
                if self.can_rewind:
                    cache.trim(cache.offset - before)
            if not self.can_rewind:
                self.close()
            raise
        self.length = before + tokens.size
        return logits if rows is None else logits[max(0, tokens.size - rows) :]

    def evaluate(self) -> None:
        with memory_or(NO_MEMORY):
            mx.eval([cache.state for cache in self._caches])
        bound_cache()

    def rewind(self, length: int) -> None:
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot rewind {self.length} positions to {length}")
        if length == self.length:
            return
        if length == 0:
            self.close()
        elif self.can_rewind:
            for cache in _flat(self._caches):
                cache.trim(self.length - length)
            self.length = length
        else:
            raise ValueError("this cache cannot be rewound but to 0")

    def settle(self, length: int) -> None:
        bound_cache()  # mlx-lm's own free nothing before they are dropped

    def fork(self) -> ExternalContext:
        other = ExternalContext(self._module, self.can_rewind, self.vocabulary_size)
        self.evaluate()
        other._caches, other.length = copy.deepcopy(self._caches), self.length
        return other

    def close(self) -> None:
        self._caches = make_prompt_cache(self._module)
        self.length = 0


def _flat(caches: Iterable[Any]) -> Iterable[Any]:
    for cache in caches:
        if isinstance(cache, CacheList):
            yield from _flat(cache.caches)
        else:
            yield cache
