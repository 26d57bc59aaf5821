"""Device bytes each kernel loads, counted by the shim in tests/shim, against the least possible.

    python benchmarks/kernel_traffic.py [--length 4096] [--json FILE]

Least: each visible key and value and its scales once, the queries once, the table once. Loaded: each byte once in every
threadgroup that asks for it, summed over the threadgroups. A GPU whose caches serve several threadgroups reads less,
one whose caches forget reads more. The context is cut as for a model with 8 kv heads; one of them is run, the others
would do the same. Nothing is said about time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from common import save

from mlx_spec.kernels import reference, registry
from mlx_spec.kv import PAGE

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import shim

KV_HEADS = 8


@dataclass(frozen=True)
class Setting:
    kernel: registry.AttentionKernel
    head_dim: int
    storage: mx.Dtype
    group: int  # query heads per kv head
    rows: int
    sinks: int = 0
    window: int = 2**31 - 1


INT8, HALF = mx.int8, mx.float16
SETTINGS = [
    *(Setting("vector", 128, storage, group, rows)
      for storage in (INT8, HALF) for group, rows in ((1, 1), (1, 4), (1, 8), (4, 1), (4, 2), (8, 1), (8, 2))),
    *(Setting("vector", head_dim, INT8, 1, 1) for head_dim in (64, 80, 96, 256)),
    *(Setting("tile", 128, storage, 8, rows) for storage in (INT8, HALF) for rows in range(2, 9)),
    *(Setting("tile", head_dim, INT8, 8, rows) for head_dim in (64, 80, 96, 256) for rows in (2, 4, 8)),
    *(Setting(kernel, 128, INT8, 8, rows, sinks=4, window=1024) for kernel, rows in (("vector", 1), ("tile", 5))),
]  # fmt: skip


class Counter:
    """Runs launches on the shim and keeps their reports."""

    def __init__(self) -> None:
        self.reports: list[tuple[registry.Launch, shim.Report]] = []

    def __call__(self, launch: registry.Launch) -> Sequence[mx.array]:
        result = shim.run(
            shim.Launch(
                launch.variant.kernel.function, launch.inputs, launch.output_shapes, launch.output_dtypes,
                launch.grid, launch.threadgroup, launch.variant.template,
            )
        )  # fmt: skip
        self.reports.append((launch, result.report))
        return result.outputs


def attention(setting: Setting, length: int) -> list[dict[str, Any]]:
    """Loads of the attention kernel and of the combine kernel after it."""
    head_dim, rows = setting.head_dim, setting.rows
    pages = -(-length // PAGE)
    shape = (1, 1, pages * PAGE, head_dim)
    keys, values = mx.random.normal(shape), mx.random.normal(shape)
    key_scales = value_scales = None
    if setting.storage == INT8:
        (keys, key_scales), (values, value_scales) = map(reference.quantize_rows, (keys, values))
    queries = [mx.random.normal((1, setting.group, rows, head_dim)) * head_dim**-0.5 for _ in range(2)]
    table = mx.array(np.random.default_rng(0).permutation(pages)[None], mx.int32)
    state = mx.array([[length, setting.sinks, setting.window, -(-setting.sinks // PAGE), 0, 0, 0, 0]], mx.int32)
    count = Counter()
    # Visible pages decide, as they do for a table that has dropped the others.
    visible = min(length, setting.sinks + setting.window + rows - 1)
    splits = registry.split_count(
        setting.kernel, head_dim, setting.storage, KV_HEADS, rows * setting.group, -(-visible // PAGE)
    )
    pool = (keys.astype(setting.storage), values.astype(setting.storage), key_scales, value_scales)
    registry.paged_attention(
        *queries, *pool, table, state, mx.float16, longest=length, kernel=setting.kernel, splits=splits, execute=count
    )
    (_, report), combine = count.reports
    item = setting.storage.size
    seen_pages = -(-setting.sinks // PAGE) + pages - max(setting.sinks, length - rows - setting.window + 1, 0) // PAGE
    least = {
        "keys": visible * head_dim * item,
        "values": visible * head_dim * item,
        "scales": 2 * visible * 2 if setting.storage == INT8 else 0,
        "queries": setting.group * rows * head_dim * 4 * (2 if setting.sinks else 1),
        "pages": 4 * seen_pages,
    }
    about = {"kv_heads": KV_HEADS, "splits": splits, **described(setting), "length": length}
    first = row(f"attention {setting.kernel}", report, sum(least.values()), about, ("keys", "values"))
    return [first, combined(*combine)]


def described(setting: Setting) -> dict[str, Any]:
    return {**vars(setting), "storage": str(setting.storage).removeprefix("mlx.core.")}


def combined(launch: registry.Launch, report: shim.Report) -> dict[str, Any]:
    least = sum(array.nbytes for array in launch.inputs)
    return row("combine", report, least, {"splits": launch.inputs[0].shape[3]}, ())


def quantization(head_dim: int, rows: int) -> dict[str, Any]:
    count = Counter()
    keys, values = (mx.random.normal((1, KV_HEADS, rows, head_dim)).astype(HALF) for _ in range(2))
    angles = mx.random.normal((1, rows, head_dim))
    divisors = mx.ones((KV_HEADS, head_dim))
    registry.quantize_kv(keys, values, mx.cos(angles), mx.sin(angles), divisors, False, execute=count)
    [(launch, report)] = count.reports
    least = sum(array.nbytes for array in launch.inputs)
    about = {"head_dim": head_dim, "rows": rows, "kv_heads": KV_HEADS, "storage": "float16"}
    return row("quantize_kv", report, least, about, ("keys", "values"))


def row(kernel: str, report: shim.Report, least: int, about: dict[str, Any], main: Sequence[str]) -> dict[str, Any]:
    loaded = report.total("loaded_per_threadgroup")
    return {
        **about,
        "kernel": kernel,
        "threadgroups": report.threadgroups,
        "threadgroup_bytes": report.threadgroup_bytes,
        "least_bytes": least,
        "loaded_bytes": loaded,
        "ratio": round(loaded / least, 4),
        "distinct_bytes": report.total("distinct_loaded"),
        "loaded_by_buffer": {
            name: traffic.loaded_per_threadgroup
            for name, traffic in report.buffers.items()
            if traffic.loaded and not name.endswith("_shape")
        },
        "times_each_key": max((round(report.buffers[n].loaded_per_threadgroup / report.buffers[n].distinct_loaded, 2)
                               for n in main), default=None),
    }  # fmt: skip


COLUMNS = ("kernel", "storage", "head_dim", "group", "rows", "length", "sinks", "splits", "least_bytes", "loaded_bytes",
           "ratio", "times_each_key")  # fmt: skip


def show(result: dict[str, Any]) -> None:
    cells = ["" if result.get(column) is None else str(result[column]) for column in COLUMNS]
    print("  ".join(f"{cell:>{width(column)}}" for cell, column in zip(cells, COLUMNS, strict=True)))


def width(column: str) -> int:
    return 16 if column == "kernel" else max(8, len(column))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=4096, help="positions of the context (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="where to write the results")
    arguments = parser.parse_args()
    mx.random.seed(0)
    results = []
    print("  ".join(f"{column:>{width(column)}}" for column in COLUMNS))
    for setting in SETTINGS:
        for result in attention(setting, arguments.length):
            results.append(result)
            show(result)
    for head_dim, rows in ((128, 1), (128, 5), (64, 16)):
        results.append(quantization(head_dim, rows))
        show(results[-1])
    worst = {
        "tile, group 8, 2 to 8 rows, head size 128": max(
            r["ratio"] for r in results if r["kernel"] == "attention tile" and r["head_dim"] == 128 and not r["sinks"]
        ),
        "vector, group 1, 1 row": max(
            r["ratio"] for r in results if r["kernel"] == "attention vector" and (r["group"], r["rows"]) == (1, 1)
        ),
    }
    print("\n".join(f"{name}: at most {ratio:.3f}" for name, ratio in worst.items()))
    save("kernel_traffic", {"length": arguments.length, "worst": worst, "results": results}, arguments.json)


if __name__ == "__main__":
    main()
