"""What is timed to find the fastest way: the shapes of attention that stand for all others, the names of its ways, and
the quantization of new rows. Knows shapes; nothing of models, nor how attention runs (`attention.attend` does).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import mlx.core as mx

from mlx_spec.kernels import reference, registry
from mlx_spec.kernels.choice import Trial

_LENGTHS = (256, 1024, 4096, 16384)
_MOST_BYTES = 32 * 2**20
"""Of keys and values: a trial must fit beside a model that fills the memory."""

DENSE, SCATTERED, VECTOR, TILE, GATHER = "dense", "scattered", "vector", "tile", "gather"
KERNEL, PLAIN = "kernel", "plain"


@dataclass(frozen=True)
class Shape:
    """Of one layer's attention in one pass. `storage` is the pool's type, `dtype` the model's."""

    heads: int
    kv_heads: int
    head_dim: int
    storage: mx.Dtype
    dtype: mx.Dtype
    rows: int
    length: int
    batch: int = 1

    def __str__(self) -> str:
        storage, dtype = (str(kind).removeprefix("mlx.core.") for kind in (self.storage, self.dtype))
        return (
            f"{self.batch} x {self.rows} rows of {self.heads}/{self.kv_heads} heads x {self.head_dim}, "
            f"{self.length} tokens in {storage}, {dtype}"
        )

    @property
    def bucket(self) -> Shape:
        """The shape that is measured in its place: a few stand for all."""
        length = next((length for length in self._lengths if length >= self.length), self._lengths[-1])
        rows = min(power_of_two(self.rows), registry.MOST_ROWS)
        return replace(self, batch=power_of_two(self.batch), rows=rows, length=length)

    @property
    def buckets(self) -> list[Shape]:
        """Those of all shapes that have no more rows and positions, and the same sequences."""
        largest = self.bucket
        return [
            replace(largest, rows=rows, length=length)
            for length in self._lengths
            if length <= largest.length
            for rows in powers_of_two(largest.rows)
        ]

    @property
    def _lengths(self) -> list[int]:
        token_bytes = 2 * self.batch * self.kv_heads * self.head_dim * self.storage.size
        return [length for length in _LENGTHS if length * token_bytes <= _MOST_BYTES] or [_LENGTHS[0]]


def power_of_two(number: int) -> int:
    """The least that is no smaller."""
    return 1 << max(0, number - 1).bit_length()


def powers_of_two(most: int) -> list[int]:
    """From 1 to `most`, a power of two."""
    return [1 << exponent for exponent in range(most.bit_length())]


def quantization(
    batch: int, kv_heads: int, rows: int, head_dim: int, dtype: mx.Dtype, interleaved: bool,
    execute: registry.Execute = registry.execute,
) -> Mapping[str, Trial]:  # fmt: skip
    """Quantizing new keys and values by the kernel and in plain operations."""
    angles = mx.ones((batch, rows, head_dim)), mx.zeros((batch, rows, head_dim))
    divisors = mx.ones((kv_heads, head_dim))

    def step(quantize: Callable[..., tuple[mx.array, ...]], keys: mx.array) -> mx.array:
        quantized, key_scales, values, value_scales = quantize(keys, keys, *angles, divisors, interleaved)
        # All four results, in the shape of what came in.
        return (quantized + values).astype(dtype) * (key_scales + value_scales)[..., None].astype(dtype)

    ways: dict[str, Callable[..., tuple[mx.array, ...]]] = {
        KERNEL: functools.partial(registry.quantize_kv, execute=execute),
        PLAIN: reference.quantize_kv,
    }
    first = mx.zeros((batch, kv_heads, rows, head_dim), dtype)
    return {name: functools.partial(chained, functools.partial(step, way), first) for name, way in ways.items()}


def chained(step: Callable[[mx.array], mx.array], first: mx.array, calls: int) -> mx.array:
    """The last of so many steps, the first of which takes `first`."""
    result = first
    for _ in range(calls):
        result = step(result)
    return result
