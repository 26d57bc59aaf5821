"""Which way a pass attends, and what quantizes its new keys: a rule where nothing is measured (`rule`), and over it
what was measured on this machine (`Choosing.way`). Knows shapes, names and times; nothing of how anything is computed.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import mlx.core as mx

from mlx_spec.attention import timing_ways
from mlx_spec.attention.attend import AttentionPass, Quantize, Way
from mlx_spec.attention.rotary import Rotary
from mlx_spec.attention.timing_ways import Chain, Shape, power_of_two, powers_of_two
from mlx_spec.errors import MLXSpecError
from mlx_spec.kernels import reference, registry
from mlx_spec.kernels.reference import EVERYTHING
from mlx_spec.kernels.self_check import SelfCheck
from mlx_spec.kv import PAGE, PagePool, PageTable
from mlx_spec.machine import remembered

KERNELS: tuple[Way, ...] = ("vector", "tile")
_MOST_QUANTIZED = 64
"""A chunk of a prompt is measured in small: from some rows on, all lanes are busy."""
_SECTION = "milliseconds"
_NOTE = "checking and timing the Metal kernels on this machine, once"
_logger = logging.getLogger("mlx_spec")
_Chains = Callable[[], Mapping[str, Chain]]
"""Makes ways ready to be timed."""
_Question = tuple[str, _Chains, list[str]]
"""Which way is the fastest: for what shape, how all are made ready, and those it may be, the last without a kernel."""


def attention_pass(
    pool: PagePool, tables: Sequence[PageTable], rows: int, rotary: Rotary, heads: int
) -> AttentionPass:
    """A pass of `rows` new positions of each sequence by what is the fastest here. heads: query heads."""
    way = rule(tables)
    if not registry.available():
        return AttentionPass(pool, tables, rows, rotary, way)
    chosen = on_this_machine()
    quantize: Quantize = reference.quantize_kv
    held = max(len(table.pages) for table in tables) * PAGE
    way = chosen.way(pool_shape(pool, rows, heads, held, len(tables)), way)
    if pool.int8:
        quantize = chosen.quantizing(pool.kv_heads, len(tables) * rows, pool.head_dim, pool.dtype, rotary.interleaved)
    return AttentionPass(pool, tables, rows, rotary, way, quantize, chosen.execute)


def rule(tables: Sequence[PageTable]) -> Way:
    """The way where no kernel is taken, for any storage and any number of rows."""
    if any(table.hides for table in tables):
        return "gather"
    return "dense" if all(table.consecutive for table in tables) else "scattered"


class Times:
    """The milliseconds of every way that was ever timed on this machine, by shape."""

    def __init__(
        self,
        memory: remembered.Remembered,
        measure: Callable[[Mapping[str, Chain]], dict[str, float]] = timing_ways.milliseconds_per_call,
    ) -> None:
        self._memory, self._measure = memory, measure
        self._lock = threading.Lock()
        self._failed: set[tuple[str, str]] = set()

    def fastest(self, shape: str, chains: _Chains, ways: Sequence[str]) -> str:
        """Of `ways`, of which the last is taken where none can be timed."""
        if len(ways) == 1:
            return ways[0]
        times = self.milliseconds(shape, chains, ways)
        return min(ways, key=lambda way: times.get(way, float("inf"))) if times else ways[-1]

    def knows(self, shape: str, ways: Sequence[str]) -> bool:
        """Whether `fastest` would answer at once."""
        known = _times(self._memory.get(_SECTION, shape))
        return len(ways) == 1 or all(way in known or (shape, way) in self._failed for way in ways)

    def milliseconds(
        self, shape: str, chains: _Chains, ways: Sequence[str], *, again: bool = False
    ) -> dict[str, float]:
        """Per call of each way; those that cannot run are left out. `again`: whatever is remembered."""
        with self._lock:
            known = {} if again else _times(self._memory.get(_SECTION, shape))
            if any(way not in known and (again or (shape, way) not in self._failed) for way in ways):
                # Against each other, not against those of another day.
                try:
                    known |= self._measure({way: chain for way, chain in chains().items() if way in ways})
                except (RuntimeError, MemoryError, MLXSpecError) as error:  # no memory for what is to be timed
                    _logger.info("cannot time %s: %s", shape, error)
                self._failed |= {(shape, way) for way in ways if way not in known}
                self._memory.set(_SECTION, shape, known)
            return {way: known[way] for way in ways if way in known}


def _times(value: object) -> dict[str, float]:
    if not isinstance(value, dict):
        return {}
    return {way: float(time) for way, time in value.items() if isinstance(time, int | float) and 0 < time < 1e9}


class Choosing:
    """What is taken on a machine with Metal: the fastest of the rule's way and the kernels that are right."""

    def __init__(self, self_check: SelfCheck, times: Times, execute: registry.Execute = registry.execute) -> None:
        self._self_check, self._times, self.execute = self_check, times, execute
        self._decided: dict[tuple[object, ...], str] = {}
        self._prepared: set[tuple[object, ...]] = set()
        self._said: set[int] = set()

    def way(self, shape: Shape, plain: Way) -> Way:
        """The fastest way to attend: by a kernel, or `plain`, the rule's.

        Passes of more rows than are timed are dense where nothing is hidden. Where something is, the most rows that
        are timed decide: kernels cut more into tiles, and so cost more by the row, as gathering does.
        """
        if shape.rows > registry.MOST_ROWS and plain != "gather":
            return plain
        if (shape, plain) not in self._decided:
            exists = self._exists(shape.head_dim, shape.storage, shape.dtype, said=plain == "gather")
            self._decided[shape, plain] = self._times.fastest(*self._attention(shape, plain)) if exists else plain
        return cast(Way, self._decided[shape, plain])

    def quantizing(self, kv_heads: int, rows: int, head_dim: int, dtype: mx.Dtype, interleaved: bool) -> Quantize:
        """What quantizes `rows` new rows, those of all sequences together."""
        key = (kv_heads, rows, head_dim, dtype, interleaved)
        if key not in self._decided:
            exists = self._exists(head_dim, mx.int8, dtype, said=True)
            self._decided[key] = self._times.fastest(*self._quantization(*key)) if exists else "plain"
        if self._decided[key] == "plain":
            return reference.quantize_kv
        return functools.partial(registry.quantize_kv, execute=self.execute)

    def prepare(self, shape: Shape, plain: Sequence[Way], interleaved: bool) -> None:
        """Find out all that passes of up to `shape.rows` over up to `shape.length` positions will ask for, so that none
        of them waits for a check or a clock. `plain`: the rule's ways that they may come to.

        Says so where anything is to be found out. What fails is switched off, as ever.
        """
        key, int8 = (shape, *plain, interleaved), shape.storage == mx.int8
        if key in self._prepared:
            return
        self._prepared.add(key)
        if not self._exists(shape.head_dim, shape.storage, shape.dtype, said="gather" in plain or int8):
            return
        group = shape.heads // shape.kv_heads
        variants = registry.variants(shape.head_dim, shape.storage, shape.dtype, interleaved, group)
        unchecked = not all(map(self._self_check.knows, variants))
        if unchecked:
            _logger.warning(_NOTE)
        for variant in variants:
            self._self_check.trusts(variant)
        questions = [self._attention(bucket, *plain) for bucket in shape.buckets]
        questions = [question for question in questions if len(question[2]) > len(plain)]
        if int8:
            rows = powers_of_two(_MOST_QUANTIZED)
            questions += [
                self._quantization(shape.kv_heads, n, shape.head_dim, shape.dtype, interleaved) for n in rows
            ]
        questions = [(name, chains, ways) for name, chains, ways in questions if not self._times.knows(name, ways)]
        if questions and not unchecked:
            _logger.warning(_NOTE)
        for question in questions:
            self._times.fastest(*question)
        if unchecked or questions:
            mx.clear_cache()  # what was timed held memory that is the model's again

    def _attention(self, shape: Shape, *plain: Way) -> _Question:
        bucket = shape.bucket
        right = [way for way in KERNELS if all(map(self._self_check.trusts, kernel_variants(shape, way)))]
        return str(bucket), lambda: timing_ways.ways_to_attend(bucket, self.execute), [*right, *plain]

    def _quantization(
        self, kv_heads: int, rows: int, head_dim: int, dtype: mx.Dtype, interleaved: bool
    ) -> _Question:
        variant = registry.variant_of(registry.QUANTIZE_KV, head_dim, dtype=dtype, interleaved=interleaved)
        count = min(power_of_two(rows), _MOST_QUANTIZED)
        return (
            f"quantize {count} rows of {kv_heads} heads, {variant.name}",
            lambda: timing_ways.ways_to_quantize(kv_heads, count, head_dim, dtype, interleaved, self.execute),
            ["kernel", "plain"] if self._self_check.trusts(variant) else ["plain"],
        )

    def _exists(self, head_dim: int, storage: mx.Dtype, dtype: mx.Dtype, *, said: bool) -> bool:
        """Whether there is a kernel. said: whether a lack is worth a word, which it gets once."""
        if said and head_dim not in registry.HEAD_SIZES and head_dim not in self._said:
            self._said.add(head_dim)
            _logger.warning(
                "there is no Metal kernel for heads of %d channels (there are for %s): attention over pages runs in "
                "plain MLX operations, slower", head_dim, ", ".join(map(str, registry.HEAD_SIZES)),
            )  # fmt: skip
        return registry.supports(head_dim, storage) and dtype in registry.TYPES


def kernel_variants(shape: Shape, way: Way) -> list[registry.Variant]:
    """The variants that a way of attending runs; none if it needs no kernel."""
    if way not in KERNELS:
        return []
    kernel, group = registry.TILE if way == "tile" else registry.VECTOR, shape.heads // shape.kv_heads
    # The bucket, which is timed, may hold another number of queries than the shape, which is run.
    attending = [
        registry.variant_of(kernel, shape.head_dim, storage=shape.storage, queries=rows * group)
        for rows in (shape.rows, shape.bucket.rows)
    ]
    combine = registry.variant_of(registry.COMBINE, shape.head_dim, dtype=shape.dtype)
    return list(dict.fromkeys([*attending, combine]))


def pool_shape(pool: PagePool, rows: int, heads: int, length: int, batch: int = 1) -> Shape:
    """Of attention over `length` positions of a pool."""
    storage = mx.int8 if pool.int8 else pool.dtype
    return Shape(heads, pool.kv_heads, pool.head_dim, storage, pool.dtype, rows, length, batch)


@functools.cache
def memory() -> remembered.Remembered:
    """What is known of the kernels on this machine."""
    folder = remembered.cache_folder()
    return remembered.Remembered(folder and folder / "kernels.json", remembered.machine())


@functools.cache
def on_this_machine() -> Choosing:
    """What decides where there is Metal."""
    return Choosing(SelfCheck(memory()), Times(memory()))


def prepare(pool: PagePool, heads: int, rotary: Rotary, *, window: bool, length: int | None = None) -> None:
    """Check and time, once per machine and kind of model, every kernel that passes of one sequence over this pool may
    take, so that no answer waits for it. Says so if there is anything to do; nothing without Metal.

    window: whether a window may hide positions. length: the most positions a sequence will hold, None if that is open.
    Takes seconds and some memory, which is not held on to. Kernels that fail are switched off with a warning.
    """
    if registry.available():
        plain: tuple[Way, ...] = ("dense", "scattered", "gather") if window else ("dense", "scattered")
        shape = pool_shape(pool, registry.MOST_ROWS, heads, EVERYTHING if length is None else length)
        on_this_machine().prepare(shape, plain, rotary.interleaved)
