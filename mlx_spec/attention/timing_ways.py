"""What is timed to find the fastest way: the shapes that stand for all others, every way to attend and to quantize
ready to run, and the clock. Knows nothing of what is taken or remembered (`choosing` does).
"""

from __future__ import annotations

import functools
import logging
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import mlx.core as mx
import mlx.nn as nn

from mlx_spec.attention.attend import WAYS, AttentionPass, Quantize, Way
from mlx_spec.attention.rotary import Rotary
from mlx_spec.kernels import reference, registry
from mlx_spec.kv import PagePool, PageTable

Chain = Callable[[int], mx.array]
"""Builds so many calls, each of which needs the result of the one before, and gives the last result."""
_LENGTHS = (256, 1024, 4096, 16384)
_MOST_BYTES = 32 * 2**20
"""Of keys and values: what is timed must fit beside a model that fills the memory."""
_SAMPLES = 5
_SAMPLE_SECONDS = 2e-3
"""Long against the start of a computation and the reading of a clock."""
_MOST_CALLS = 32
_logger = logging.getLogger("mlx_spec")


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


class _Scattered(PageTable):
    """Taken for one whose pages do not follow one another."""

    @property
    def consecutive(self) -> bool:
        return False


def ways_to_attend(shape: Shape, execute: registry.Execute = registry.execute) -> dict[str, Chain]:
    """In one layer, from queries and keys that are not rotated to the result.

    Left out is what is the same for all ways: writing to the pool, and with it all that INT8 does to new keys.
    """
    int8 = shape.storage == mx.int8
    pool = PagePool(layers=1, kv_heads=shape.kv_heads, head_dim=shape.head_dim, dtype=shape.dtype, int8=int8)
    if int8:
        pool.divisors[0] = mx.ones((shape.kv_heads, shape.head_dim))
    runs, scattered = [PageTable(pool) for _ in range(shape.batch)], [_Scattered(pool) for _ in range(shape.batch)]
    for run, other in zip(runs, scattered, strict=True):
        run.append(max(shape.rows, shape.length))
        other.pages, other.length = run.pages, run.length
    pool.evaluate()
    rotary, scale = Rotary(nn.RoPE(shape.head_dim), shape.head_dim), shape.head_dim**-0.5
    first = mx.zeros((shape.batch, shape.heads, shape.rows, shape.head_dim), shape.dtype)

    def chain(way: Way) -> Chain:
        tables = scattered if way == "scattered" else runs
        attention = AttentionPass(pool, tables, shape.rows, rotary, way, execute=execute)

        def step(queries: mx.array) -> mx.array:
            if not int8:
                [queries] = mx.depends([queries], [attention.rotate(queries[:, : shape.kv_heads])])
            return attention.attend_to_written(0, queries, scale)

        return functools.partial(_chained, step, first)

    return {way: chain(way) for way in WAYS}


def ways_to_quantize(
    kv_heads: int, rows: int, head_dim: int, dtype: mx.Dtype, interleaved: bool,
    execute: registry.Execute = registry.execute,
) -> dict[str, Chain]:  # fmt: skip
    """New keys and values of one sequence, by the kernel and in plain operations."""
    angles = mx.ones((1, rows, head_dim)), mx.zeros((1, rows, head_dim))
    divisors, first = mx.ones((kv_heads, head_dim)), mx.zeros((1, kv_heads, rows, head_dim), dtype)

    def chain(quantize: Quantize) -> Chain:
        def step(keys: mx.array) -> mx.array:
            quantized, key_scales, values, value_scales = quantize(keys, keys, *angles, divisors, interleaved)
            # All four results, in the shape of what came in.
            return (quantized + values).astype(dtype) * (key_scales + value_scales)[..., None].astype(dtype)

        return functools.partial(_chained, step, first)

    kernel = functools.partial(registry.quantize_kv, execute=execute)
    return {"kernel": chain(kernel), "plain": chain(reference.quantize_kv)}


def _chained(step: Callable[[mx.array], mx.array], first: mx.array, calls: int) -> mx.array:
    result = first
    for _ in range(calls):
        result = step(result)
    return result


def milliseconds_per_call(chains: Mapping[str, Chain]) -> dict[str, float]:
    """Medians, the chains taking turns. One that fails is left out."""
    calls: dict[str, int] = {}
    samples: dict[str, list[float]] = {name: [] for name in chains}

    def seconds(name: str, count: int) -> float:
        try:
            return _seconds(chains[name], count) / count
        except Exception as error:  # a kernel may fail in any way, which must not be the model's end
            _logger.info("cannot time %s: %s", name, error)
            samples.pop(name)
            return 0.0

    for name in chains:
        seconds(name, 1)  # compiles what it needs
        if name in samples:
            calls[name] = max(1, min(_MOST_CALLS, int(_SAMPLE_SECONDS / max(seconds(name, 1), 1e-9))))
    for _ in range(_SAMPLES):
        for name in list(samples):
            taken = seconds(name, calls[name])
            if name in samples:
                samples[name].append(taken)
    return {name: 1e3 * statistics.median(times) for name, times in samples.items()}


def _seconds(chain: Chain, calls: int) -> float:
    """With the time that the host takes to build the calls: at decoding it adds to the GPU's."""
    mx.synchronize()
    started = time.perf_counter()
    mx.eval(chain(calls))
    mx.synchronize()
    return time.perf_counter() - started
