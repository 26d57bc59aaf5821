"""Problems for the attention kernels: random pages, and what must not be read spoilt. Knows the arguments of the
operation; not how kernels work."""

from __future__ import annotations

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
SINKS = (0, 4, 70)
CONTEXTS = ("whole", "window", "wrapped")  # "window": hidden but still there, "wrapped": pages are gone
KERNELS: tuple[registry.AttentionKernel, ...] = ("vector", "tile")


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


def compile_ahead(blocks: Sequence[Cells]) -> None:
    """Compiles every variant that they need, on all cores."""
    found: dict[str, shim.Launch] = {}

    def collect(launch: registry.Launch) -> Sequence[mx.array]:
        found.setdefault(launch.variant.name, shim_launch(launch))
        return [mx.zeros(s, t) for s, t in zip(launch.output_shapes, launch.output_dtypes, strict=True)]

    for block in blocks:
        for kernel in KERNELS:
            block.problem().attend(collect, kernel)
    shim.prepare(list(found.values()))


@dataclass(frozen=True)
class Case:
    head_dim: int
    group: int  # query heads per kv head
    rows: int
    storage: mx.Dtype
    sinks: int
    context: str  # one of CONTEXTS
    kernel: registry.AttentionKernel
    dtype: mx.Dtype = mx.float32

    def __str__(self) -> str:
        return "-".join(str(value).removeprefix("mlx.core.") for value in vars(self).values())


@dataclass(frozen=True)
class Visibility:
    """Of one sequence: what its rows see, and whether pages that none of them sees are still there."""

    name: str
    length: int
    sinks: int
    window: int
    wrapped: bool


@dataclass(frozen=True)
class Problem:
    """Arguments for a kernel, in whose pool all that no row sees is no number; and for its twin, without those."""

    arguments: dict[str, Any]
    clean: dict[str, Any]
    options: dict[str, Any]
    sequences: tuple[str, ...]

    def attend(self, execute: registry.Execute, kernel: registry.AttentionKernel | None = None) -> mx.array:
        """With the kernel of the options, or with another."""
        options = self.options if kernel is None else {**self.options, "kernel": kernel}
        return registry.paged_attention(**self.arguments, **options, execute=execute)

    def check(self, execute: registry.Execute, kernels: Sequence[registry.AttentionKernel | None] = (None,)) -> None:
        expected = self.expected()
        for kernel in kernels:
            result = self.attend(execute, kernel)
            assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
            for index, name in enumerate(self.sequences):
                np.testing.assert_allclose(
                    np.array(result[index].astype(mx.float32)),
                    np.array(expected[index].astype(mx.float32)),
                    rtol=TOLERANCE[result.dtype],
                    atol=TOLERANCE[result.dtype],
                    err_msg=f"{kernel or self.options['kernel']}, {name}",
                )


    def expected(self) -> mx.array:
        """By the twin, a sequence at a time, of each the pages that it has: the padding of its table costs the twin
        more than all it has."""
        parts = []
        for index in range(len(self.sequences)):
            own = {name: self.clean[name][index : index + 1] for name in ("window_queries", "sink_queries", "state")}
            length, *_, dropped = self.clean["state"][index, :5].tolist()
            pages = self.clean["pages"][index : index + 1, : -(-length // PAGE) - dropped]
            parts.append(reference.paged_attention(**{**self.clean, **own, "pages": pages}))
        return mx.concatenate(parts)


def problem(case: Case, lengths: Sequence[int] | None = None, window: int | None = None, **options: Any) -> Problem:
    """Two sequences, or those of `lengths`, two kv heads, pages in random order."""
    chance = random.Random(str(case))
    if window is None:
        window = EVERYTHING if case.context == "whole" else 70 + chance.randrange(60)
    if lengths is None:
        least, most = {"whole": (1, 200), "window": (100, 250), "wrapped": (300, 480)}[case.context]
        lengths = [max(case.rows, chance.randint(least, most)) for _ in range(2)]
    wrapped = case.context == "wrapped"
    sequences = [Visibility(f"length {length}", length, case.sinks, window, wrapped) for length in lengths]
    return _problem(case.head_dim, case.group, case.rows, case.storage, case.dtype, sequences, 2, chance,
                    {"kernel": case.kernel, **options})  # fmt: skip


@dataclass(frozen=True)
class Cells:
    """Those cells of the matrix that one launch takes: what they differ in, SINKS times CONTEXTS, is data, so each is a
    sequence of the batch. The number of kv heads changes with the rows, and so does the type of the output: float32,
    whose rounding hides the least, but for the two others once each."""

    head_dim: int
    group: int  # query heads per kv head
    rows: int
    storage: str  # named, for another process to read

    def problem(self) -> Problem:
        """Contexts as short as what tells them apart allows."""
        chance = random.Random(str(self))
        sequences = [self._sequence(sinks, context, chance) for sinks in SINKS for context in CONTEXTS]
        dtype = {15: mx.float16, 14: mx.bfloat16}.get(self.rows, mx.float32)
        return _problem(self.head_dim, self.group, self.rows, getattr(mx, self.storage), dtype, sequences,
                        1 + (self.rows % 4 == 1), chance, {})  # fmt: skip

    def _sequence(self, sinks: int, context: str, chance: random.Random) -> Visibility:
        more, window = chance.randint(0, PAGE), chance.randint(1, PAGE // 2)
        if context == "whole":
            length, window = max(self.rows, sinks) + more, EVERYTHING
        elif context == "window":
            length = self.rows + sinks + window + more
        else:  # the rows have left at least the page after those of the sinks
            length = self.rows + window - 1 + (-(-sinks // PAGE) + 1) * PAGE + more
        return Visibility(f"{sinks} sinks, {context}", length, sinks, window, context == "wrapped")

    def check(self, execute: registry.Execute = on_shim) -> None:
        """Both kernels: a machine with Metal takes the one that is faster there."""
        try:
            self.problem().check(execute, KERNELS)
        except Exception as error:
            error.add_note(str(self))
            raise


def _problem(
    head_dim: int,
    group: int,
    rows: int,
    storage: mx.Dtype,
    dtype: mx.Dtype,
    sequences: Sequence[Visibility],
    kv_heads: int,
    chance: random.Random,
    options: dict[str, Any],
) -> Problem:
    generator = np.random.default_rng(chance.getrandbits(32))  # faster than MLX's on a CPU
    tables, states, slots_seen = [], [], []
    pool_pages = sum(-(-sequence.length // PAGE) for sequence in sequences) + 2
    free = chance.sample(range(pool_pages), pool_pages)
    for sequence in sequences:
        length, sinks, window = sequence.length, sequence.sinks, sequence.window
        first, head = length - rows, -(-sinks // PAGE)
        dropped = max(0, (first - window + 1) // PAGE - head) if sequence.wrapped else 0
        table = [free.pop() for _ in range(-(-length // PAGE) - dropped)]
        for position in range(length):
            if position < sinks or position > first - window:
                index = position // PAGE - (dropped if position // PAGE >= head else 0)
                slots_seen.append(table[index] * PAGE + position % PAGE)
        tables.append(table)
        states.append([length, sinks, window, head, dropped, 0, 0, 0])
    width = max(map(len, tables)) + 1
    unseen = np.ones(pool_pages * PAGE, bool)
    unseen[slots_seen] = False

    heads, shape = kv_heads * group, (1, kv_heads, pool_pages * PAGE, head_dim)

    def normal(*shape: int) -> mx.array:
        return mx.array(generator.standard_normal(shape, np.float32))

    queries = [normal(len(sequences), heads, rows, head_dim) * (2 * head_dim**-0.5) for _ in range(2)]
    keys, values = normal(*shape), normal(*shape)
    no_number = mx.array(unseen)[:, None]
    if storage == mx.int8:
        (keys, key_scales), (values, value_scales) = map(reference.quantize_rows, (keys, values))
        pool = {"keys": keys, "values": values, "key_scales": key_scales, "value_scales": value_scales}
        spoilt = {name: mx.where(no_number[:, 0], mx.nan, pool[name]).astype(mx.float16)
                  for name in ("key_scales", "value_scales")}
    else:
        pool = {"keys": keys.astype(storage), "values": values.astype(storage),
                "key_scales": None, "value_scales": None}
        spoilt = {name: mx.where(no_number, mx.nan, pool[name]).astype(storage) for name in ("keys", "values")}

    def padded(filler: int) -> mx.array:
        return mx.array([table + [filler] * (width - len(table)) for table in tables], mx.int32)

    common = {"window_queries": queries[0], "sink_queries": queries[1], "state": mx.array(states, mx.int32),
              "dtype": dtype, **pool}
    options = {"longest": max(sequence.length for sequence in sequences), **options}
    return Problem({**common, **spoilt, "pages": padded(NOWHERE)}, {**common, "pages": padded(0)}, options,
                   tuple(sequence.name for sequence in sequences))  # fmt: skip
