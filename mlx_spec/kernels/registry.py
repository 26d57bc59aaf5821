"""The Metal kernels: what each takes and gives, how a call is laid out, and one function per operation with the
signature of its twin in `reference`. Knows arrays and grids; nothing of tokens, models, or whether a kernel is right
on this machine (`self_check` does).

Sources are metal/*.metal, one body per kernel, after metal/common.h. Nothing here needs Metal until a launch runs.
A variant is a kernel with its template arguments: head size, types, and how many queries a pass holds. Each is compiled
once per process, so lengths, rows and the ratio of heads are data.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx

from mlx_spec.kernels.reference import STATE_COLUMNS
from mlx_spec.kv import PAGE
from mlx_spec.resources import folder

HEAD_SIZES = (64, 80, 96, 128, 256)
STORAGE = (mx.int8, mx.float16, mx.bfloat16, mx.float32)
"""What a pool may hold."""
TYPES = (mx.float16, mx.bfloat16, mx.float32)
"""What a model may compute in."""
MOST_ROWS = 16
"""Rows per sequence up to which kernels are timed; more give the right result, in more tiles."""

AttentionKernel = Literal["vector", "tile"]
Template = tuple[tuple[str, Any], ...]
Size = tuple[int, int, int]

# MLX hands an input of fewer elements over as `constant`, which would be one more variant to compile.
_LEAST_ELEMENTS = 8
# A split reads its queries again, and writes a part that is read again. So there are no more splits than leave the
# queries' share of the bytes below _QUERY_SHARE, unless the GPU would have fewer than _FEW threadgroups to run.
# Not measured on a Mac: `splits` overrides the rule.
_QUERY_SHARE, _FEW, _MANY = 0.08, 32, 512


@dataclass(frozen=True)
class Kernel:
    """A declaration: names as the body uses them. The body is metal/<name>.metal."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @functools.cached_property
    def function(self) -> Any:
        """The callable `mx.fast.metal_kernel` makes of it; compiled per variant at its first launch."""
        sources = folder("metal")
        return mx.fast.metal_kernel(
            name=self.name,
            input_names=list(self.inputs),
            output_names=list(self.outputs),
            header=(sources / "common.h").read_text(),
            source=(sources / f"{self.name}.metal").read_text(),
        )


_PAGED = ("window_queries", "sink_queries", "keys", "values", "key_scales", "value_scales", "pages", "state")
_PARTS = ("partials", "maxima", "sums")
QUANTIZE_KV = Kernel(
    "quantize_kv",
    ("keys", "values", "cosines", "sines", "divisors"),
    ("quantized_keys", "key_scales", "quantized_values", "value_scales"),
)
VECTOR = Kernel("paged_attention_vector", _PAGED, _PARTS)
TILE = Kernel("paged_attention_tile", _PAGED, _PARTS)
COMBINE = Kernel("paged_attention_combine", _PARTS, ("attended",))
KERNELS = (QUANTIZE_KV, VECTOR, TILE, COMBINE)


@dataclass(frozen=True)
class Variant:
    """A kernel with its template arguments: what is compiled, checked and switched off as one."""

    kernel: Kernel
    template: Template

    @property
    def name(self) -> str:
        """Such as "paged_attention_vector[D=128,S=int8,QUERIES=8]"."""
        arguments = ",".join(f"{key}={str(value).removeprefix('mlx.core.')}" for key, value in self.template)
        return f"{self.kernel.name}[{arguments}]"


@dataclass(frozen=True)
class Launch:
    """One call of one kernel: its grid counts threads."""

    variant: Variant
    inputs: Sequence[mx.array]
    grid: Size
    threadgroup: Size
    output_shapes: Sequence[tuple[int, ...]]
    output_dtypes: Sequence[mx.Dtype]


Execute = Callable[[Launch], Sequence[mx.array]]


def execute(launch: Launch) -> Sequence[mx.array]:
    """Put a launch into MLX's graph. Needs Metal."""
    outputs: Sequence[mx.array] = launch.variant.kernel.function(
        inputs=list(launch.inputs),
        template=list(launch.variant.template),
        grid=launch.grid,
        threadgroup=launch.threadgroup,
        output_shapes=list(launch.output_shapes),
        output_dtypes=list(launch.output_dtypes),
    )
    return outputs


def available() -> bool:
    """Whether this machine can run kernels at all."""
    return bool(mx.metal.is_available()) and mx.default_device() == mx.gpu


def supports(head_dim: int, storage: mx.Dtype = mx.int8, rows: int = 1) -> bool:
    """Whether there are kernels for pages of this head size and storage, and this many rows."""
    return head_dim in HEAD_SIZES and storage in STORAGE and 1 <= rows <= MOST_ROWS


def variant_of(
    kernel: Kernel,
    head_dim: int,
    *,
    storage: mx.Dtype = mx.int8,
    dtype: mx.Dtype = mx.float16,
    queries: int = 1,
    interleaved: bool = False,
) -> Variant:
    """The variant of a kernel that runs for pages of `storage` and a model that computes in `dtype`; `queries` is rows
    times query heads per kv head. What a kernel has no use for is ignored."""
    arguments = {
        QUANTIZE_KV.name: (("T", dtype), ("INTERLEAVED", interleaved)),
        VECTOR.name: (("S", storage), ("QUERIES", _held_queries(head_dim, queries))),
        TILE.name: (("S", storage),),
        COMBINE.name: (("T", dtype),),
    }
    return Variant(kernel, (("D", head_dim), *arguments[kernel.name]))


def variants(
    head_dim: int, storage: mx.Dtype, dtype: mx.Dtype, interleaved: bool = False, group: int = 1
) -> list[Variant]:
    """Every variant that a model can run on pages of this storage, `group` being its query heads per kv head."""
    kernels = (QUANTIZE_KV, VECTOR, TILE, COMBINE) if storage == mx.int8 else (VECTOR, TILE, COMBINE)
    found = [
        variant_of(
            kernel, head_dim, storage=storage, dtype=dtype, queries=rows * group, interleaved=interleaved
        )
        for kernel in kernels
        for rows in range(1, MOST_ROWS + 1)
    ]
    return list({variant.name: variant for variant in found}.values())


def default_kernel(head_dim: int, queries: int) -> AttentionKernel:
    """The vector kernel where one pass of it holds all queries of a kv head, and so reads each key once."""
    return "vector" if queries <= _most_queries(head_dim) else "tile"


def _most_queries(head_dim: int) -> int:
    """Queries that a pass of the vector kernel can hold in registers."""
    return 8 if head_dim <= 128 else 4


def _held_queries(head_dim: int, queries: int) -> int:
    """Those it does hold: few powers of two, so that there are few variants."""
    tiles = -(-queries // _most_queries(head_dim))
    return 1 << (-(-queries // tiles) - 1).bit_length()


def quantize_kv(
    keys: mx.array,
    values: mx.array,
    cosines: mx.array,
    sines: mx.array,
    divisors: mx.array,
    interleaved: bool,
    *,
    execute: Execute = execute,
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """See `reference.quantize_kv`."""
    batch, kv_heads, rows, head_dim = keys.shape
    simdgroups = min(kv_heads, 8)
    quantized_keys, key_scales, quantized_values, value_scales = execute(
        Launch(
            variant=variant_of(QUANTIZE_KV, head_dim, dtype=keys.dtype, interleaved=interleaved),
            inputs=(keys, values.astype(keys.dtype), cosines, sines, divisors),
            grid=(32, -(-kv_heads // simdgroups) * simdgroups, batch * rows),
            threadgroup=(32, simdgroups, 1),
            output_shapes=(keys.shape, keys.shape[:3]) * 2,
            output_dtypes=(mx.int8, mx.float16) * 2,
        )
    )
    return quantized_keys, key_scales, quantized_values, value_scales


def paged_attention(
    window_queries: mx.array,
    sink_queries: mx.array,
    keys: mx.array,
    values: mx.array,
    key_scales: mx.array | None,
    value_scales: mx.array | None,
    pages: mx.array,
    state: mx.array,
    dtype: mx.Dtype,
    *,
    longest: int,
    kernel: AttentionKernel | None = None,
    splits: int | None = None,
    execute: Execute = execute,
) -> mx.array:
    """See `reference.paged_attention`. `longest` bounds the sequences' lengths; it only decides into how many
    `splits` the context is cut, so a bound that is too small or too large costs time, not correctness."""
    batch, heads, rows, head_dim = window_queries.shape
    kv_heads = keys.shape[1]
    queries = heads // kv_heads * rows
    kind = kernel or default_kernel(head_dim, queries)
    variant = variant_of(TILE if kind == "tile" else VECTOR, head_dim, storage=keys.dtype, queries=queries)
    simdgroups, tiles = layout(kind, head_dim, queries)
    if splits is None:
        held = min(pages.shape[1], -(-longest // PAGE))
        splits = split_count(kind, head_dim, keys.dtype, batch * kv_heads, queries, held)
    parts = (batch, heads, rows, splits)
    if pages.size < _LEAST_ELEMENTS:
        pages = mx.pad(pages, [(0, 0), (0, _LEAST_ELEMENTS - pages.shape[1])])
    assert state.shape == (batch, STATE_COLUMNS)
    scales = (_no_scales(), _no_scales()) if key_scales is None or value_scales is None else (key_scales, value_scales)
    partials, maxima, sums = execute(
        Launch(
            variant=variant,
            inputs=(window_queries, sink_queries, keys, values, *scales, pages, state),
            grid=(32 * splits, simdgroups * tiles, batch * kv_heads),
            threadgroup=(32, simdgroups, 1),
            output_shapes=((*parts, head_dim), parts, parts),
            output_dtypes=(mx.float32,) * 3,
        )
    )
    (attended,) = execute(
        Launch(
            variant=variant_of(COMBINE, head_dim, dtype=dtype),
            inputs=(partials, maxima, sums),
            grid=(32, 4, batch * heads * rows),
            threadgroup=(32, 4, 1),
            output_shapes=(window_queries.shape,),
            output_dtypes=(dtype,),
        )
    )
    return attended


@functools.cache
def _no_scales() -> mx.array:
    """What a kernel is given, and does not read, as the scales of a floating-point pool."""
    scales = mx.zeros((_LEAST_ELEMENTS,), dtype=mx.float16)
    mx.eval(scales)  # a lazy array belongs to the thread that made it, and this one serves all
    return scales


def layout(kernel: AttentionKernel, head_dim: int, queries: int) -> tuple[int, int]:
    """Simdgroups of a threadgroup, and tiles that the queries of a kv head are cut into."""
    if kernel == "vector":
        return 4, -(-queries // _held_queries(head_dim, queries))
    simdgroups_per_eight = 1 if head_dim <= 128 else 2
    tiles = -(-queries // (64 // simdgroups_per_eight))
    # Simdgroups without queries of their own help to stage keys and values.
    return max(4, -(-queries // (8 * tiles)) * simdgroups_per_eight), tiles


def split_count(
    kernel: AttentionKernel, head_dim: int, storage: mx.Dtype, sequence_heads: int, queries: int, pages: int
) -> int:
    """Into how many splits `pages` visible pages are cut; `sequence_heads` is sequences times kv heads."""
    _, tiles = layout(kernel, head_dim, queries)
    page_bytes = 2 * PAGE * (head_dim * storage.size + (2 if storage == mx.int8 else 0))
    query_bytes = -(-queries // tiles) * head_dim * 4
    frugal = int(_QUERY_SHARE * pages * page_bytes / query_bytes)
    threadgroups = tiles * sequence_heads
    wanted = max(-(-_FEW // threadgroups), min(frugal, -(-_MANY // threadgroups)))
    return max(1, min(pages, wanted))
