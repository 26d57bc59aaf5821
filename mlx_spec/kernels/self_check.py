"""Whether each kernel variant is right on this machine: compared with its twin before its first use, and remembered.

Knows how to compare and what was found; not what takes over. The comparison is given what executes a launch, so that it
is itself tested without a GPU, on right and on wrong implementations.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_spec.kernels import problems, reference, registry
from mlx_spec.kv import PAGE
from mlx_spec.machine.remembered import Remembered
from mlx_spec.resources import folder

TOLERANCE = {mx.float32: 2e-4, mx.float16: 2e-3, mx.bfloat16: 2e-2}
"""Absolute and relative, by the type of the result: values are of the order of one, and a GPU's fast exponential and
other order of sums cost far less than this in float32."""
_GROUPS = (1, 2, 3, 4, 7, 8)
ENDED = "the program ended twice while it was checked"
_SECTION = "kernels"
_logger = logging.getLogger("mlx_spec")


class Mismatch(Exception):
    """A kernel's result is not its twin's."""


def compare(variant: registry.Variant, execute: registry.Execute = registry.execute) -> None:
    """Run a variant on small random problems. Raises Mismatch, or whatever running it raises."""
    template: dict[str, Any] = dict(variant.template)
    if variant.kernel is registry.QUANTIZE_KV:
        _compare_quantization(template, execute)
    elif variant.kernel is registry.COMBINE:
        _compare_combination(template, execute)
    else:
        _compare_attention(variant, template, execute)


def _compare_attention(variant: registry.Variant, template: dict[str, Any], execute: registry.Execute) -> None:
    kind: registry.AttentionKernel = "tile" if variant.kernel is registry.TILE else "vector"

    def merge_plainly(launch: registry.Launch) -> Sequence[mx.array]:
        if launch.variant.kernel is not registry.COMBINE:
            return execute(launch)
        partials, maxima, sums = launch.inputs
        return [combined(partials, maxima, sums, launch.output_dtypes[0])]

    shapes = _shapes(variant, template)
    for index, scene in enumerate(problems.SCENES):
        group, rows = shapes[index * (len(shapes) - 1) // (len(problems.SCENES) - 1)]
        problem = problems.attention_problem(scene, template["D"], template["S"], group, rows)
        with mx.stream(mx.cpu):  # an independent result: a GPU may multiply matrices of float32 less exactly
            expected = reference.paged_attention(**problem.clean, dtype=mx.float32)
            mx.eval(expected)
        result = registry.paged_attention(
            **problem.given, dtype=mx.float32, longest=problem.longest, kernel=kind, splits=problem.splits,
            execute=merge_plainly,
        )  # fmt: skip
        _agree(result, expected, f"{problem.name}, {group} heads per kv head, {rows} rows")


def _shapes(variant: registry.Variant, template: dict[str, Any]) -> list[tuple[int, int]]:
    """Query heads per kv head and rows that this variant is for, from few queries to many."""
    pairs = [(group, rows) for group in _GROUPS for rows in range(1, registry.MOST_ROWS + 1)]
    found = [
        (group, rows)
        for group, rows in sorted(pairs, key=lambda pair: pair[0] * pair[1])
        if variant == registry.variant_of(variant.kernel, template["D"], storage=template["S"], queries=group * rows)
    ]
    if not found:
        raise ValueError("no number of queries runs this variant")
    return found


def combined(partials: mx.array, maxima: mx.array, sums: mx.array, dtype: mx.Dtype) -> mx.array:
    """The twin of `paged_attention_combine`: parts (batch, heads, n, splits, head_dim) merged over the splits."""
    with mx.stream(mx.cpu):
        weights = mx.exp(maxima - maxima.max(axis=-1, keepdims=True))
        total = (weights * sums).sum(axis=-1)[..., None]
        merged = (weights[..., None] * partials).sum(axis=-2)
        result = mx.where(total > 0, merged / mx.where(total > 0, total, 1), 0).astype(dtype)
        mx.eval(result)
    return result


def _compare_combination(template: dict[str, Any], execute: registry.Execute) -> None:
    head_dim, dtype = template["D"], template["T"]
    with mx.stream(mx.cpu):
        queries, pool = mx.zeros((2, 3, 2, head_dim)), mx.zeros((1, 1, PAGE, head_dim))
        pages, state = mx.zeros((2, 1), mx.int32), mx.zeros((2, reference.STATE_COLUMNS), mx.int32)
    for splits in (1, 3, 40):
        found = problems.parts(np.random.default_rng(splits), (2, 3, 2, splits, head_dim))

        def merge(launch: registry.Launch, found: Sequence[mx.array] = found) -> Sequence[mx.array]:
            return execute(launch) if launch.variant.kernel is registry.COMBINE else found

        result = registry.paged_attention(
            queries, queries, pool, pool, None, None, pages, state, dtype, longest=1, splits=splits, execute=merge
        )
        _agree(result, combined(found[0], found[1], found[2], dtype), f"{splits} splits")


def _compare_quantization(template: dict[str, Any], execute: registry.Execute) -> None:
    names = registry.QUANTIZE_KV.outputs
    for arguments in problems.quantization_problems(template["D"], template["T"], template["INTERLEAVED"]):
        where = f"{arguments[0].shape[1]} heads, {arguments[0].shape[2]} rows"
        with mx.stream(mx.cpu):
            expected = reference.quantize_kv(*arguments)
            mx.eval(expected)
        results = registry.quantize_kv(*arguments, execute=execute)
        for name, result, twin in zip(names, results, expected, strict=True):
            if result.dtype != mx.int8:
                _agree(result, twin, f"{name}, {where}")
                continue
            # A last bit of the scale may tip a value that lies between two steps; not many, and never by more.
            steps = np.abs(np.array(result, np.int32) - np.array(twin, np.int32))
            if steps.max() > 1 or steps.mean() > 0.1:
                raise Mismatch(f"{name}, {where}: off by up to {steps.max()} steps, {steps.mean():.1%} on average")


def _agree(result: mx.array, expected: mx.array, where: str) -> None:
    if (result.shape, result.dtype) != (expected.shape, expected.dtype):
        raise Mismatch(f"{where}: {result.dtype} {result.shape} instead of {expected.dtype} {expected.shape}")
    got, wanted = (np.array(array.astype(mx.float32)) for array in (result, expected))
    tolerance = TOLERANCE[expected.dtype]
    wrong = ~np.isclose(got, wanted, rtol=tolerance, atol=tolerance)
    if wrong.any():
        largest = f"{np.abs(got - wanted).max():.2g}" if np.isfinite(got).all() else "all bounds: some are no number"
        raise Mismatch(f"{where}: {wrong.sum()} of {wrong.size} values differ from the twin's, by up to {largest}")


@functools.cache
def fingerprint() -> str:
    """Changes with the kernels, how they are launched, and what they are checked against."""
    metal = sorted(
        file
        for file in folder("metal").iterdir()
        if file.suffix in (".metal", ".h") and not file.name.startswith(".")  # an editor or macOS may add others
    )
    content = hashlib.sha256()
    for source in [*metal, *(Path(str(module.__file__)) for module in (registry, problems)), Path(__file__)]:
        with contextlib.suppress(OSError):  # Python code may come from an archive
            content.update(source.read_bytes())
    return content.hexdigest()[:16]


class SelfCheck:
    """Which variants are right on this machine. Each is checked at most once per process."""

    def __init__(
        self,
        memory: Remembered,
        execute: registry.Execute = registry.execute,
        compare: Callable[[registry.Variant, registry.Execute], None] = compare,
    ) -> None:
        self._memory, self._execute, self._compare = memory, execute, compare
        self._lock = threading.RLock()
        self._errors: dict[str, str | None] = {}

    def trusts(self, variant: registry.Variant) -> bool:
        """Whether it may be used. Checks it if that is not known, and warns once if it is wrong."""
        with self._lock:
            if variant.name not in self._errors:
                error = self.examine(variant)
                if error is not None:
                    _logger.warning(
                        "the Metal kernel %s is switched off: %s. Plain MLX operations take over: the same results, "
                        "slower. `mlx-spec doctor` makes a report of it.", variant.name, error,
                    )  # fmt: skip
            return self._errors[variant.name] is None

    def knows(self, variant: registry.Variant) -> bool:
        """Whether `trusts` would answer at once."""
        with self._lock:
            if variant.name in self._errors:
                return True
            known = self._memory.get(_SECTION, f"{variant.name} {fingerprint()}")
            return _endings(known) >= 2 or known == "ok" or (isinstance(known, str) and known.startswith("wrong: "))

    def examine(self, variant: registry.Variant, *, again: bool = False) -> str | None:
        """What is wrong with a variant, None if nothing is. `again`: whatever is remembered.

        One whose check two processes did not survive is not run again by itself: every later one would end too. Once
        may have been a terminal that was closed.
        """
        key = f"{variant.name} {fingerprint()}"
        with self._lock:
            known = self._memory.get(_SECTION, key)
            endings = _endings(known)
            if endings >= 2:
                error: str | None = ENDED
            elif known == "ok" and not again:
                error = None
            elif isinstance(known, str) and known.startswith("wrong: ") and not again:
                error = known.removeprefix("wrong: ")
            else:
                error = self._examine_now(variant, key, endings)
            self._errors[variant.name] = error
            return error

    def _examine_now(self, variant: registry.Variant, key: str, endings: int) -> str | None:
        result: str | None = None
        self._memory.set(_SECTION, key, f"checking {os.getpid()}" + " again" * endings)
        try:
            self._compare(variant, self._execute)
            result = "ok"
        except Mismatch as mismatch:
            result = f"wrong: {mismatch}"
            return str(mismatch)
        except Exception as error:  # a compiler's complaint, or memory that ran out: the next process may fare better
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            telling = [line for line in lines if "error:" in line] or lines or [""]
            return f"{type(error).__name__}: {telling[0]}"
        finally:
            self._memory.set(_SECTION, key, result)
        return None


def _endings(known: object) -> int:
    """How many processes that began a check are no more: 0, 1 or 2."""
    if not isinstance(known, str) or not known.startswith("checking "):
        return 0
    process, again, _ = known.removeprefix("checking ").partition(" again")
    earlier = 1 if again else 0
    with contextlib.suppress(ValueError, PermissionError, OverflowError):
        try:
            os.kill(int(process), 0)
        except ProcessLookupError:
            return earlier + 1
    return earlier
