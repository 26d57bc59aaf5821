"""The Metal kernels against their twins: the text that MLX generates, run by the shim on the CPU."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import shim
from kernel_problems import KERNELS, Case, Cells, compile_ahead, on_shim, problem, shim_launch
from shim import source as shim_source

from mlx_spec.kernels import reference, registry
from mlx_spec.kv import PAGE
from mlx_spec.resources import folder

STORAGE = tuple(str(dtype).removeprefix("mlx.core.") for dtype in registry.STORAGE)
GROUPS = (1, 4, 8)
ROWS = range(1, registry.MOST_ROWS + 1)


@functools.cache
def compiled(head_dim: int) -> None:
    compile_ahead([Cells(head_dim, *rest) for rest in itertools.product(GROUPS, ROWS, STORAGE)])


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("head_dim", registry.HEAD_SIZES)
def test_attention_equals_its_twin_and_reads_nothing_unseen(head_dim: int, group: int, storage: str) -> None:
    compiled(head_dim)
    for rows in ROWS:
        Cells(head_dim, group, rows, storage).check()


@pytest.mark.metal
@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("head_dim", registry.HEAD_SIZES)
def test_attention_on_this_machines_gpu(head_dim: int, group: int, storage: str) -> None:
    for rows in ROWS:
        Cells(head_dim, group, rows, storage).check(registry.execute)


EDGES: dict[str, tuple[Case, dict[str, Any]]] = {
    "nothing but the row itself": (Case(64, 1, 1, mx.int8, 0, "whole", "vector"), {"lengths": [1]}),
    "nothing but the rows": (Case(80, 8, 5, mx.float32, 0, "whole", "tile"), {"lengths": [5]}),
    "all positions are sinks": (Case(64, 4, 3, mx.int8, 300, "window", "tile"), {"lengths": [130, 7]}),
    "sinks end at a page's end": (Case(96, 1, 2, mx.int8, 64, "wrapped", "vector"), {"lengths": [400, 64]}),
    "sinks and window share a page": (Case(64, 1, 2, mx.int8, 4, "window", "vector"), {"lengths": [50], "window": 9}),
    "a window of one": (Case(64, 4, 4, mx.int8, 0, "wrapped", "tile"), {"lengths": [200], "window": 1}),
    "a window of one with sinks": (Case(64, 4, 4, mx.int8, 3, "wrapped", "vector"), {"lengths": [200], "window": 1}),
    "one split": (Case(64, 4, 3, mx.int8, 4, "whole", "vector"), {"splits": 1}),
    "more splits than pages": (Case(64, 4, 3, mx.int8, 4, "wrapped", "tile"), {"splits": 23}),
    "splits that do not divide": (Case(64, 2, 3, mx.int8, 4, "whole", "vector"), {"lengths": [500], "splits": 3}),
    "more splits than lanes": (Case(64, 1, 1, mx.float16, 0, "whole", "vector"), {"lengths": [90], "splits": 40}),
    "three heads per kv head": (Case(64, 3, 5, mx.bfloat16, 4, "whole", "vector"), {}),
    "seven heads per kv head": (Case(128, 7, 3, mx.int8, 4, "wrapped", "tile"), {}),
    "a longest that is too small": (Case(64, 4, 3, mx.int8, 4, "whole", "tile"), {"longest": 1}),
    "two simdgroups per query": (Case(256, 8, 3, mx.int8, 4, "wrapped", "tile"), {}),
    "two simdgroups per query, float": (Case(256, 4, 9, mx.float32, 0, "whole", "tile"), {}),
    "a table of eight pages": (Case(64, 1, 1, mx.int8, 0, "whole", "vector"), {"lengths": [7 * PAGE]}),
}


@pytest.mark.parametrize("name", EDGES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_attention_at_the_edges(name: str, kernel: registry.AttentionKernel) -> None:
    case, options = EDGES[name]
    problem(case, **{**options, "kernel": kernel}).check(on_shim)


@pytest.mark.parametrize("storage", registry.STORAGE, ids=str)
@pytest.mark.parametrize(
    ("kernel", "group", "rows"), [("vector", 1, 1), ("vector", 4, 2), ("tile", 8, 2), ("tile", 8, 8)]
)
def test_each_visible_key_and_value_is_loaded_once(
    kernel: registry.AttentionKernel, group: int, rows: int, storage: mx.Dtype
) -> None:
    reports: list[shim.Report] = []

    def execute(launch: registry.Launch) -> Sequence[mx.array]:
        result = shim.run(shim_launch(launch))
        reports.append(result.report)
        return result.outputs

    window, length, sinks, head_dim = 100, 333, 4, 64
    case = Case(head_dim, group, rows, storage, sinks, "wrapped", kernel)
    problem(case, [length], window, splits=2).attend(execute)
    seen = sinks + window + rows - 1
    least = dict.fromkeys(("keys", "values"), 2 * seen * head_dim * storage.size)  # of two kv heads
    if storage == mx.int8:
        least |= dict.fromkeys(("key_scales", "value_scales"), 2 * seen * 2)
    buffers = reports[0].buffers
    assert {name: buffers[name].loaded_per_threadgroup for name in least} == least
    assert {name: buffers[name].distinct_loaded for name in least} == least
    assert reports[0].threadgroup_bytes <= 32 * 1024
    assert reports[0].threads <= 512 * reports[0].threadgroups


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "dtype", "rows"),
    [(64, mx.float16, 1), (80, mx.bfloat16, 3), (96, mx.float32, 4), (128, mx.bfloat16, 5), (128, mx.float16, 16),
     (256, mx.float32, 2)],
)  # fmt: skip
def test_quantization_equals_its_twin(head_dim: int, dtype: mx.Dtype, rows: int, interleaved: bool) -> None:
    mx.random.seed(head_dim + rows)
    kv_heads = 11 if rows == 3 else 3
    keys, values = (mx.random.normal((2, kv_heads, rows, head_dim)).astype(dtype) for _ in range(2))
    keys[0, 1, 0], values[1, 2, rows - 1] = 0, 0
    keys[1, 0, 0] *= 1e-7  # the scale underflows
    angles = mx.random.normal((2, rows, head_dim))
    divisors = mx.random.uniform(0.5, 2, (kv_heads, head_dim))
    arguments = (keys, values, mx.cos(angles), mx.sin(angles), divisors, interleaved)
    results = registry.quantize_kv(*arguments, execute=on_shim)
    for result, expected in zip(results, reference.quantize_kv(*arguments), strict=True):
        assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
        np.testing.assert_array_equal(np.array(result), np.array(expected))


def test_quantization_rounds_ties_to_even() -> None:
    row = mx.array([127, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5, 126.5] + [0] * 56)
    still = mx.ones((1, 1, 64)), mx.zeros((1, 1, 64)), mx.ones((1, 64)), False
    keys, key_scales, values, value_scales = registry.quantize_kv(
        row.reshape(1, 1, 1, 64), -row.reshape(1, 1, 1, 64), *still, execute=on_shim
    )
    assert keys[0, 0, 0, :8].tolist() == [127, 0, 2, 2, 0, -2, -126, 126]
    assert values[0, 0, 0, :8].tolist() == [-127, 0, -2, -2, 0, 2, 126, -126]
    assert (key_scales.item(), value_scales.item()) == (1, 1)


@pytest.mark.parametrize("kernel", registry.KERNELS, ids=lambda kernel: kernel.name)
def test_comments_inject_no_parameters(kernel: registry.Kernel) -> None:
    """MLX searches the body for names, comments included, to see what the kernel is to be given."""
    body = (folder("metal") / f"{kernel.name}.metal").read_text()
    code = re.sub(r"//.*", "", body)
    extras = [f"{name}_{what}" for name in kernel.inputs for what in ("shape", "strides", "ndim")]
    for word in [*extras, *shim_source.ATTRIBUTES]:
        assert (word in body) == (word in code), word


@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("head_dim", [128, 256])
def test_variants_list_what_a_model_runs(head_dim: int, group: int) -> None:
    listed = {variant.name for variant in registry.variants(head_dim, mx.int8, mx.bfloat16, group=group)}
    ran: set[str] = set()

    def collect(launch: registry.Launch) -> Sequence[mx.array]:
        ran.add(launch.variant.name)
        return [mx.zeros(s, t) for s, t in zip(launch.output_shapes, launch.output_dtypes, strict=True)]

    for rows in range(1, registry.MOST_ROWS + 1):
        for kernel in KERNELS:
            problem(Case(head_dim, group, rows, mx.int8, 4, "whole", kernel, mx.bfloat16)).attend(collect)
    new = mx.zeros((1, 2, 1, head_dim), mx.bfloat16)
    angles = mx.zeros((1, 1, head_dim))
    registry.quantize_kv(new, new, angles, angles, mx.ones((2, head_dim)), False, execute=collect)
    assert ran == listed
    assert f"paged_attention_tile[D={head_dim},S=int8]" in listed


def test_what_is_supported() -> None:
    assert registry.supports(80, mx.int8, 16)
    assert not registry.supports(72, mx.int8)
    assert not registry.supports(64, mx.int8, 17)
    assert not registry.supports(64, mx.uint8)
    assert registry.default_kernel(128, 8) == "vector"
    assert registry.default_kernel(128, 16) == "tile"
    assert registry.default_kernel(256, 8) == "tile"


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("head_dim", registry.HEAD_SIZES)
def test_layouts_stay_within_bounds(kernel: registry.AttentionKernel, head_dim: int) -> None:
    for queries in range(1, 8 * registry.MOST_ROWS + 1):
        simdgroups, tiles = registry.layout(kernel, head_dim, queries)
        assert 4 <= simdgroups <= 8
        assert tiles * simdgroups * 8 >= queries * (2 if head_dim > 128 and kernel == "tile" else 1)
        for pages in (1, 2, 64, 2048):
            splits = registry.split_count(kernel, head_dim, mx.int8, 8, queries, pages)
            assert 1 <= splits <= pages
