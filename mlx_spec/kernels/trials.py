"""One layer's attention at a given shape, ready to be timed in each way. Knows shapes; nothing of models, and nothing
of what is in the arrays: zeros."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import mlx.core as mx

from mlx_spec.kernels import reference, registry
from mlx_spec.kernels.choice import Trial
from mlx_spec.kernels.reference import PAGE
from mlx_spec.rotary import RotaryRows

_LENGTHS = (256, 1024, 4096, 16384)
_MOST_BYTES = 32 * 2**20
"""Of keys and values: a trial must fit beside a model that fills the memory."""
_EVERYTHING = 2**30
"""As a window: no position is hidden."""

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
        token_bytes = 2 * self.batch * self.kv_heads * self.head_dim * self.storage.size
        fitting = [length for length in _LENGTHS if length * token_bytes <= _MOST_BYTES] or [_LENGTHS[0]]
        length = next((length for length in fitting if length >= self.length), fitting[-1])
        return replace(self, batch=power_of_two(self.batch), rows=power_of_two(self.rows), length=length)


def power_of_two(number: int) -> int:
    """The least that is no smaller."""
    return 1 << max(0, number - 1).bit_length()


def attention(shape: Shape, execute: registry.Execute = registry.execute) -> Mapping[str, Trial]:
    """Each way from queries that are not rotated to what attention gives. Writing new keys is the same for all."""
    batch, n, head_dim = shape.batch, shape.rows, shape.head_dim
    pages = -(-shape.length // PAGE)
    pool = (1, shape.kv_heads, batch * pages * PAGE, head_dim)
    keys, values = mx.zeros(pool, shape.storage), mx.zeros(pool, shape.storage)
    scales = [mx.ones(pool[:3], mx.float16)] * 2 if shape.storage == mx.int8 else [None, None]
    tables = mx.arange(batch * pages, dtype=mx.int32).reshape(batch, pages)
    length = max(n, shape.length)
    state = mx.array([[length, 0, _EVERYTHING] + [0] * (reference.STATE_COLUMNS - 3)] * batch, mx.int32)
    angles = RotaryRows(mx.ones((batch, 1, n, head_dim)), mx.zeros((batch, 1, n, head_dim)), False)
    slots = mx.arange(pages * PAGE)

    def paged(attend: Callable[..., mx.array], queries: mx.array) -> mx.array:
        exact = queries.astype(mx.float32) * head_dim**-0.5
        return attend(
            angles.rotate(exact), angles.rotate(exact), keys, values, *scales, tables, state, shape.dtype
        )  # fmt: skip

    def dense(scattered: bool, queries: mx.array) -> mx.array:
        rotated, outputs = angles.rotate(queries), []
        for index in range(batch):
            start = index * pages * PAGE
            seen: slice | mx.array = slots + start if scattered else slice(start, start + shape.length)
            read = []
            for rows, scale in zip((keys, values), scales, strict=True):
                part = rows[:, :, seen]
                if scale is not None:
                    part = (part.astype(mx.float32) * scale[:, :, seen, None]).astype(shape.dtype)
                read.append(part)
            outputs.append(
                mx.fast.scaled_dot_product_attention(
                    rotated[index : index + 1], *read, scale=head_dim**-0.5, mask="causal" if n > 1 else None
                )
            )
        return outputs[0] if batch == 1 else mx.concatenate(outputs)

    def kernel(kind: registry.AttentionKernel) -> Callable[..., mx.array]:
        return functools.partial(registry.paged_attention, longest=length, kernel=kind, execute=execute)

    steps: dict[str, Callable[[mx.array], mx.array]] = {
        DENSE: functools.partial(dense, False),
        SCATTERED: functools.partial(dense, True),
        VECTOR: functools.partial(paged, kernel("vector")),
        TILE: functools.partial(paged, kernel("tile")),
        GATHER: functools.partial(paged, reference.paged_attention),
    }
    first = mx.zeros((batch, shape.heads, n, head_dim), shape.dtype)
    return {name: functools.partial(_chained, step, first) for name, step in steps.items()}


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
    return {name: functools.partial(_chained, functools.partial(step, way), first) for name, way in ways.items()}


def _chained(step: Callable[[mx.array], mx.array], first: mx.array, calls: int) -> mx.array:
    result = first
    for _ in range(calls):
        result = step(result)
    return result
