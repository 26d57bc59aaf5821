"""Which implementation an operation takes on a machine with Metal: a kernel that exists, is right and is the fastest,
or plain MLX operations. Knows arrays; nothing of models, tokens or how anything is computed.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Literal

import mlx.core as mx

from mlx_spec.kernels import reference, registry, trials
from mlx_spec.kernels.choice import Choice
from mlx_spec.kernels.reference import PAGE
from mlx_spec.kernels.self_check import SelfCheck

if TYPE_CHECKING:
    from mlx_spec.kv import PagePool

_ATTENTION: tuple[Literal["vector"], Literal["tile"]] = ("vector", "tile")
_logger = logging.getLogger("mlx_spec")


class Dispatch:
    """Decides once per shape. Operations as in `reference`."""

    def __init__(self, self_check: SelfCheck, choice: Choice, execute: registry.Execute = registry.execute) -> None:
        self._self_check, self._choice, self._execute = self_check, choice, execute
        self._decided: dict[tuple[object, ...], str] = {}
        self._said: set[int] = set()

    def quantize_kv(
        self, keys: mx.array, values: mx.array, cosines: mx.array, sines: mx.array, divisors: mx.array,
        interleaved: bool,
    ) -> tuple[mx.array, mx.array, mx.array, mx.array]:  # fmt: skip
        """See `reference.quantize_kv`."""
        key = (*keys.shape, keys.dtype, interleaved)
        way = self._decided.get(key) or self._decide_quantization(keys, interleaved)
        self._decided[key] = way
        if way == trials.PLAIN:
            return reference.quantize_kv(keys, values, cosines, sines, divisors, interleaved)
        return registry.quantize_kv(keys, values, cosines, sines, divisors, interleaved, execute=self._execute)

    def _decide_quantization(self, keys: mx.array, interleaved: bool) -> str:
        batch, kv_heads, rows, head_dim = keys.shape
        if not self._supports(head_dim, mx.int8) or keys.dtype not in registry.TYPES:
            return trials.PLAIN
        variant = registry.variant_of(registry.QUANTIZE_KV, head_dim, dtype=keys.dtype, interleaved=interleaved)
        if not self._self_check.trusts(variant):
            return trials.PLAIN
        # A chunk of a prompt is measured in small: from some rows on, all lanes are busy.
        count = min(trials.power_of_two(batch * rows), 64)
        return self._choice.fastest(
            f"quantize {count} rows of {kv_heads} heads, {variant.name}",
            lambda: trials.quantization(1, kv_heads, count, head_dim, keys.dtype, interleaved, self._execute),
            (trials.PLAIN, trials.KERNEL),
        )

    def paged_attention(
        self,
        window_queries: mx.array,
        sink_queries: mx.array,
        keys: mx.array,
        values: mx.array,
        key_scales: mx.array | None,
        value_scales: mx.array | None,
        pages: mx.array,
        state: mx.array,
        dtype: mx.Dtype,
    ) -> mx.array:
        """See `reference.paged_attention`."""
        batch, heads, rows, head_dim = window_queries.shape
        held = pages.shape[1] * PAGE
        shape = trials.Shape(heads, keys.shape[1], head_dim, keys.dtype, dtype, rows, held, batch)
        way = self._way(shape, (*_ATTENTION, trials.GATHER))
        if way == trials.GATHER:
            return reference.paged_attention(
                window_queries, sink_queries, keys, values, key_scales, value_scales, pages, state, dtype
            )
        return registry.paged_attention(
            window_queries, sink_queries, keys, values, key_scales, value_scales, pages, state, dtype,
            longest=held, kernel="tile" if way == trials.TILE else "vector", execute=self._execute,
        )  # fmt: skip

    def prefers_kernel(self, shape: trials.Shape, consecutive: bool) -> bool:
        """Whether a kernel is faster than the dense way, where nothing is hidden."""
        if not registry.supports(shape.head_dim, shape.storage, shape.rows):
            return False
        return self._way(shape, (*_ATTENTION, trials.DENSE if consecutive else trials.SCATTERED)) in _ATTENTION

    def _way(self, shape: trials.Shape, ways: tuple[str, ...]) -> str:
        """The last of `ways` needs no kernel."""
        key = (shape.bucket, shape.rows, ways)
        if key not in self._decided:
            usable = tuple(way for way in ways if way not in _ATTENTION or self._usable(shape, way))
            bucket = shape.bucket
            self._decided[key] = self._choice.fastest(
                str(bucket), lambda: trials.attention(bucket, self._execute), usable
            )
        return self._decided[key]

    def _usable(self, shape: trials.Shape, kernel: str) -> bool:
        if not self._supports(shape.head_dim, shape.storage) or shape.rows > registry.MOST_ROWS:
            return False
        if shape.dtype not in registry.TYPES:
            return False
        return all(self._self_check.trusts(variant) for variant in kernel_variants(shape, kernel))

    def _supports(self, head_dim: int, storage: mx.Dtype) -> bool:
        if registry.supports(head_dim, storage):
            return True
        if head_dim not in registry.HEAD_SIZES and head_dim not in self._said:
            self._said.add(head_dim)
            _logger.warning(
                "there is no Metal kernel for heads of %d channels (there are for %s): attention over pages runs in "
                "plain MLX operations, slower", head_dim, ", ".join(map(str, registry.HEAD_SIZES)),
            )  # fmt: skip
        return False


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
