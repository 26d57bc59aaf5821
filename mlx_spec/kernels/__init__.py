"""The operations that attention needs of pages: a Metal kernel where there is one that is right here and the fastest,
else its twin. Without Metal nothing is checked or timed: the twin it is."""

from __future__ import annotations

import functools

import mlx.core as mx

from mlx_spec.kernels import reference, registry
from mlx_spec.kernels.choice import Choice
from mlx_spec.kernels.dispatch import Build, Dispatch, Quantize, attending, pool_shape
from mlx_spec.kernels.self_check import SelfCheck
from mlx_spec.kernels.trials import Shape
from mlx_spec.machine import remembered

__all__ = ["attending", "memory", "on_this_machine", "pool_shape", "prepare", "quantizing", "way"]


@functools.cache
def memory() -> remembered.Remembered:
    """What is known of the kernels on this machine."""
    folder = remembered.cache_folder()
    return remembered.Remembered(folder and folder / "kernels.json", remembered.machine())


@functools.cache
def on_this_machine() -> Dispatch:
    """What decides where there is Metal."""
    return Dispatch(SelfCheck(memory()), Choice(memory()))


def prepare(shape: Shape, plain: tuple[str, ...], interleaved: bool, build: Build) -> None:
    """See `Dispatch.prepare`. Nothing without Metal."""
    if registry.available():
        on_this_machine().prepare(shape, plain, interleaved, build)


def way(shape: Shape, plain: str, build: Build) -> str:
    """See `Dispatch.way`. Without Metal, `plain`."""
    return on_this_machine().way(shape, plain, build) if registry.available() else plain


def quantizing(kv_heads: int, rows: int, head_dim: int, dtype: mx.Dtype, interleaved: bool) -> Quantize:
    """See `Dispatch.quantizing`. Without Metal, the twin."""
    if not registry.available():
        return reference.quantize_kv
    return on_this_machine().quantizing(kv_heads, rows, head_dim, dtype, interleaved)
