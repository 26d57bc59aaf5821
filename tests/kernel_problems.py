"""Problems for the attention kernels: random pages, and what must not be read spoilt. Knows the arguments of the
operation; not how kernels work."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import shim

from mlx_spec.kernels import reference, registry
from mlx_spec.kv import PAGE

TOLERANCE = {mx.float32: 2e-5, mx.float16: 2e-3, mx.bfloat16: 2e-2}
EVERYTHING = 2**31 - 1  # a window that hides nothing
NOWHERE = 1 << 20  # a page that no pool has


def on_shim(launch: registry.Launch) -> Sequence[mx.array]:
    return shim.run(shim_launch(launch)).outputs


def shim_launch(launch: registry.Launch) -> shim.Launch:
    return shim.Launch(
        launch.variant.kernel.function,
        launch.inputs,
        launch.output_shapes,
        launch.output_dtypes,
        launch.grid,
        launch.threadgroup,
        launch.variant.template,
    )


def compile_ahead(problems: Sequence[Problem]) -> None:
    """Compiles every variant that the problems need, on all cores."""
    found: dict[str, shim.Launch] = {}

    def collect(launch: registry.Launch) -> Sequence[mx.array]:
        found.setdefault(launch.variant.name, shim_launch(launch))
        return [mx.zeros(s, t) for s, t in zip(launch.output_shapes, launch.output_dtypes, strict=True)]

    for problem in problems:
        problem.attend(collect)
    shim.prepare(list(found.values()))


@dataclass(frozen=True)
class Case:
    head_dim: int
    group: int  # query heads per kv head
    rows: int
    storage: mx.Dtype
    sinks: int
    context: str  # "whole", "window": hidden but still there, "wrapped": pages are gone
    kernel: registry.AttentionKernel
    dtype: mx.Dtype = mx.float32

    def __str__(self) -> str:
        return "-".join(str(value).removeprefix("mlx.core.") for value in vars(self).values())


@dataclass(frozen=True)
class Problem:
    """Arguments for a kernel, in whose pool all that no row sees is no number; and for its twin, without those."""

    arguments: dict[str, Any]
    clean: dict[str, Any]
    options: dict[str, Any]

    def attend(self, execute: registry.Execute) -> mx.array:
        return registry.paged_attention(**self.arguments, **self.options, execute=execute)

    def check(self, execute: registry.Execute) -> None:
        result, expected = self.attend(execute), reference.paged_attention(**self.clean)
        assert result.dtype == expected.dtype
        np.testing.assert_allclose(
            np.array(result.astype(mx.float32)),
            np.array(expected.astype(mx.float32)),
            rtol=TOLERANCE[result.dtype],
            atol=TOLERANCE[result.dtype],
        )


def problem(case: Case, lengths: Sequence[int] | None = None, window: int | None = None, **options: Any) -> Problem:
    """Two sequences, or those of `lengths`, two kv heads, pages in random order."""
    chance = random.Random(str(case))
    mx.random.seed(chance.getrandbits(32))
    if window is None:
        window = EVERYTHING if case.context == "whole" else 70 + chance.randrange(60)
    if lengths is None:
        least, most = {"whole": (1, 200), "window": (100, 250), "wrapped": (300, 480)}[case.context]
        lengths = [max(case.rows, chance.randint(least, most)) for _ in range(2)]
    tables, states, slots_seen = [], [], []
    pool_pages = sum(-(-length // PAGE) for length in lengths) + 2
    free = chance.sample(range(pool_pages), pool_pages)
    for length in lengths:
        first, head = length - case.rows, -(-case.sinks // PAGE)
        dropped = max(0, (first - window + 1) // PAGE - head) if case.context == "wrapped" else 0
        table = [free.pop() for _ in range(-(-length // PAGE) - dropped)]
        for position in range(length):
            if position < case.sinks or position > first - window:
                index = position // PAGE - (dropped if position // PAGE >= head else 0)
                slots_seen.append(table[index] * PAGE + position % PAGE)
        tables.append(table)
        states.append([length, case.sinks, window, head, dropped, 0, 0, 0])
    width = max(map(len, tables)) + 1
    unseen = np.ones(pool_pages * PAGE, bool)
    unseen[slots_seen] = False

    heads, shape = 2 * case.group, (1, 2, pool_pages * PAGE, case.head_dim)
    queries = [
        mx.random.normal((len(lengths), heads, case.rows, case.head_dim)) * (2 * case.head_dim**-0.5) for _ in range(2)
    ]
    keys, values = mx.random.normal(shape), mx.random.normal(shape)
    no_number = mx.array(unseen)[:, None]
    if case.storage == mx.int8:
        (keys, key_scales), (values, value_scales) = map(reference.quantize_rows, (keys, values))
        pool = {"keys": keys, "values": values, "key_scales": key_scales, "value_scales": value_scales}
        spoilt = {name: mx.where(no_number[:, 0], mx.nan, pool[name]).astype(mx.float16)
                  for name in ("key_scales", "value_scales")}
    else:
        pool = {"keys": keys.astype(case.storage), "values": values.astype(case.storage),
                "key_scales": None, "value_scales": None}
        spoilt = {name: mx.where(no_number, mx.nan, pool[name]).astype(case.storage) for name in ("keys", "values")}

    def padded(filler: int) -> mx.array:
        return mx.array([table + [filler] * (width - len(table)) for table in tables], mx.int32)

    common = {"window_queries": queries[0], "sink_queries": queries[1], "state": mx.array(states, mx.int32),
              "dtype": case.dtype, **pool}
    options = {"longest": max(lengths), "kernel": case.kernel, **options}
    return Problem({**common, **spoilt, "pages": padded(NOWHERE)}, {**common, "pages": padded(0)}, options)


def all_pairs(factors: dict[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Few combinations in which every two values of two factors meet."""
    missing = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(factors, 2)
        for x in range(len(factors[a]))
        for y in range(len(factors[b]))
    }
    order, rows = list(factors), []
    while missing:
        chosen = dict(min(missing, key=lambda pair: [(order.index(name), value) for name, value in pair]))
        for name in order:
            if name in chosen:
                continue
            gains = [
                sum(tuple(sorted([(name, value), item], key=lambda i: order.index(i[0]))) in missing
                    for item in chosen.items())
                for value in range(len(factors[name]))
            ]
            best = max(gains)
            ties = [value for value, gain in enumerate(gains) if gain == best]
            chosen[name] = ties[len(rows) % len(ties)]
        items = sorted(chosen.items(), key=lambda i: order.index(i[0]))
        missing -= set(itertools.combinations(items, 2))
        rows.append({name: factors[name][value] for name, value in items})
    return rows
