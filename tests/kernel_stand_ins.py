"""Stand-ins for what only a Mac has: kernels that are right, comparisons and clocks that say what they are told to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_spec.attention.timing_ways import Chain
from mlx_spec.kernels import reference, registry, self_check
from mlx_spec.machine.remembered import Remembered


def cleaned(array: mx.array) -> mx.array:
    return array if array.dtype == mx.int8 else mx.where(mx.isnan(array), 0, array)


def right(launch: registry.Launch) -> Sequence[mx.array]:
    """Executes a launch by the twins."""
    template: dict[str, Any] = dict(launch.variant.template)
    if launch.variant.kernel == registry.QUANTIZE_KV:
        return reference.quantize_kv(*launch.inputs, template["INTERLEAVED"])
    if launch.variant.kernel == registry.COMBINE:
        return [self_check.combined(*launch.inputs, template["T"])]
    return attended(launch)


def attended(launch: registry.Launch, change: Callable[[dict[str, mx.array]], object] = lambda _: None) -> list[Any]:
    """The parts of attention: the first split has everything."""
    named = dict(zip(launch.variant.kernel.inputs, launch.inputs, strict=True))
    if named["keys"].dtype != mx.int8:
        named["key_scales"] = named["value_scales"] = None
    for name in ("keys", "values", "key_scales", "value_scales"):
        named[name] = named[name] if named[name] is None else cleaned(named[name])
    change(named)
    whole = reference.paged_attention(**named, dtype=mx.float32)
    partials, maxima, sums = (mx.zeros(shape) for shape in launch.output_shapes)
    partials[..., 0, :], maxima[...], sums[..., 0] = whole, reference.HIDDEN, 1
    maxima[..., 0] = 3
    return [partials, maxima, sums]


class Counting:
    """A comparison that says what it is told to, and counts."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error, self.calls = error, 0

    def __call__(self, variant: registry.Variant, execute: registry.Execute) -> None:
        self.calls += 1
        if self.error is not None:
            raise self.error


def memory(folder: Path, machine: str = "M1") -> Remembered:
    return Remembered(folder / "cache" / "kernels.json", machine)


class Clock:
    """Times by way, and a record of what was timed."""

    def __init__(self, **times: float) -> None:
        self.times, self.asked = times, list[list[str]]()

    def __call__(self, chains: Mapping[str, Chain]) -> dict[str, float]:
        self.asked.append(sorted(chains))
        return {way: self.times[way] for way in chains if way in self.times}
