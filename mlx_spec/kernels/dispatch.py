"""Which implementation an operation takes on a machine with Metal: a kernel that exists, is right and is the fastest,
or plain MLX operations. Knows shapes and names; nothing of models, tokens or how anything is computed.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import mlx.core as mx

from mlx_spec.kernels import reference, registry, trials
from mlx_spec.kernels.choice import Choice, Trial
from mlx_spec.kernels.self_check import SelfCheck
from mlx_spec.kv import PAGE

if TYPE_CHECKING:
    from mlx_spec.kv import PagePool

Build = Callable[[trials.Shape, registry.Execute], Mapping[str, Trial]]
"""Makes every way to attend ready to be timed."""
Attend = Callable[..., mx.array]
"""As `reference.paged_attention`."""
Quantize = Callable[[mx.array, mx.array, mx.array, mx.array, mx.array, bool], Sequence[mx.array]]
"""As `reference.quantize_kv`."""

_ATTENTION: tuple[Literal["vector"], Literal["tile"]] = ("vector", "tile")
_MOST_QUANTIZED = 64
"""A chunk of a prompt is measured in small: from some rows on, all lanes are busy."""
_NOTE = "checking and timing the Metal kernels on this machine, once"
_logger = logging.getLogger("mlx_spec")


@dataclass(frozen=True)
class _Question:
    """Which of some ways is the fastest; the last needs no kernel."""

    name: str
    trials: Callable[[], Mapping[str, Trial]]
    ways: tuple[str, ...]


class Dispatch:
    """Decides once per shape."""

    def __init__(self, self_check: SelfCheck, choice: Choice, execute: registry.Execute = registry.execute) -> None:
        self._self_check, self._choice, self._execute = self_check, choice, execute
        self._decided: dict[tuple[object, ...], str] = {}
        self._prepared: set[tuple[object, ...]] = set()
        self._said: set[int] = set()

    def way(self, shape: trials.Shape, plain: str, build: Build) -> str:
        """The fastest way to attend: by a kernel, or `plain`, which is one without.

        Passes of more rows than are timed are dense where nothing is hidden. Where something is, the most rows that
        are timed decide: kernels cut more into tiles, and so cost more by the row, as gathering does.
        """
        if shape.rows > registry.MOST_ROWS and plain != trials.GATHER:
            return plain
        key = (shape.bucket, shape.rows, plain)
        if key not in self._decided:
            supported = self._supports(shape.head_dim, shape.storage, said=plain == trials.GATHER)
            usable = self._usable(shape) if supported else ()
            self._decided[key] = self._fastest(self._attention(shape, (*usable, plain), build))
        return self._decided[key]

    def quantizing(self, kv_heads: int, rows: int, head_dim: int, dtype: mx.Dtype, interleaved: bool) -> Quantize:
        """What quantizes `rows` new rows, those of all sequences together."""
        key = (kv_heads, rows, head_dim, dtype, interleaved)
        if key not in self._decided:
            usable = self._supports(head_dim, mx.int8) and dtype in registry.TYPES
            self._decided[key] = self._fastest(self._quantization(*key)) if usable else trials.PLAIN
        if self._decided[key] == trials.PLAIN:
            return reference.quantize_kv
        return functools.partial(registry.quantize_kv, execute=self._execute)

    def prepare(self, shape: trials.Shape, plain: tuple[str, ...], interleaved: bool, build: Build) -> None:
        """Find out all that passes of up to `shape.rows` over up to `shape.length` positions will ask for, so that none
        of them waits for a check or a clock. `plain`: the ways without a kernel that they may take.

        Says so where anything is to be found out. What fails is switched off, as ever.
        """
        key = (shape, plain, interleaved)
        if key in self._prepared:
            return
        self._prepared.add(key)
        said = trials.GATHER in plain or shape.storage == mx.int8
        if not self._supports(shape.head_dim, shape.storage, said=said) or shape.dtype not in registry.TYPES:
            return
        group = shape.heads // shape.kv_heads
        variants = registry.variants(shape.head_dim, shape.storage, shape.dtype, interleaved, group)
        unknown = [variant for variant in variants if not self._self_check.knows(variant)]
        if unknown:
            _logger.warning(_NOTE)
        for variant in variants:
            self._self_check.trusts(variant)
        questions = [
            self._attention(bucket, (*usable, *plain), build)
            for bucket in shape.buckets
            if (usable := self._usable(bucket))
        ]
        if shape.storage == mx.int8:
            rows = trials.powers_of_two(_MOST_QUANTIZED)
            questions += [
                self._quantization(shape.kv_heads, n, shape.head_dim, shape.dtype, interleaved) for n in rows
            ]
        questions = [question for question in questions if not self._choice.knows(question.name, question.ways)]
        if questions and not unknown:
            _logger.warning(_NOTE)
        for question in questions:
            self._fastest(question)
        if unknown or questions:
            mx.clear_cache()  # what the trials held is the model's again

    def _attention(self, shape: trials.Shape, ways: tuple[str, ...], build: Build) -> _Question:
        bucket = shape.bucket
        return _Question(str(bucket), lambda: build(bucket, self._execute), ways)

    def _quantization(
        self, kv_heads: int, rows: int, head_dim: int, dtype: mx.Dtype, interleaved: bool
    ) -> _Question:
        variant = registry.variant_of(registry.QUANTIZE_KV, head_dim, dtype=dtype, interleaved=interleaved)
        count = min(trials.power_of_two(rows), _MOST_QUANTIZED)
        return _Question(
            f"quantize {count} rows of {kv_heads} heads, {variant.name}",
            lambda: trials.quantization(1, kv_heads, count, head_dim, dtype, interleaved, self._execute),
            (trials.KERNEL, trials.PLAIN) if self._self_check.trusts(variant) else (trials.PLAIN,),
        )

    def _fastest(self, question: _Question) -> str:
        return self._choice.fastest(question.name, question.trials, question.ways)

    def _usable(self, shape: trials.Shape) -> tuple[str, ...]:
        """The kernels that are right."""
        if shape.dtype not in registry.TYPES:
            return ()
        return tuple(way for way in _ATTENTION if all(map(self._self_check.trusts, kernel_variants(shape, way))))

    def _supports(self, head_dim: int, storage: mx.Dtype, *, said: bool = True) -> bool:
        """said: whether a lack is worth a word, which it gets once."""
        if registry.supports(head_dim, storage):
            return True
        if said and head_dim not in registry.HEAD_SIZES and head_dim not in self._said:
            self._said.add(head_dim)
            _logger.warning(
                "there is no Metal kernel for heads of %d channels (there are for %s): attention over pages runs in "
                "plain MLX operations, slower", head_dim, ", ".join(map(str, registry.HEAD_SIZES)),
            )  # fmt: skip
        return False


def attending(way: str, longest: int, execute: registry.Execute = registry.execute) -> Attend:
    """What attends over pages: a kernel, or its twin for `trials.GATHER`."""
    if way not in _ATTENTION:
        return reference.paged_attention
    kernel: registry.AttentionKernel = "tile" if way == trials.TILE else "vector"
    return functools.partial(registry.paged_attention, longest=longest, kernel=kernel, execute=execute)


def kernel_variants(shape: trials.Shape, way: str) -> list[registry.Variant]:
    """The variants that a way of attending runs; none if it needs no kernel."""
    if way not in _ATTENTION:
        return []
    # The bucket, which is timed, may hold another number of queries than the shape, which is run.
    attending = [
        registry.variant_of(
            registry.TILE if way == trials.TILE else registry.VECTOR,
            shape.head_dim,
            storage=shape.storage,
            queries=rows * (shape.heads // shape.kv_heads),
        )
        for rows in (shape.rows, shape.bucket.rows)
    ]
    combine = registry.variant_of(registry.COMBINE, shape.head_dim, dtype=shape.dtype)
    return list(dict.fromkeys([*attending, combine]))


def pool_shape(pool: PagePool, rows: int, heads: int, length: int | None = None, batch: int = 1) -> trials.Shape:
    """Of attention over `length` positions of a pool, by default as many as it holds."""
    storage = mx.int8 if pool.int8 else pool.dtype
    held = pool.pages_in_use * PAGE if length is None else length
    return trials.Shape(heads, pool.kv_heads, pool.head_dim, storage, pool.dtype, rows, held, batch)
