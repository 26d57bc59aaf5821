"""Rotary position embedding of queries and keys (Su et al. 2021). Knows angles; nothing of pages or weights.

Two ways to the same angles. `Rotary.fused` is MLX's kernel, whose angles are float32: off by 0.006 at position 60,000
and by 0.1 at a million. `Rotary.rows` computes cosines and sines in float64 on the host, exact at any position for the
frequencies the model has (those that mlx-lm scales are float32), once per pass for all layers.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_spec.kernels import reference

EXACT_FROM = 32768
"""From this position on the float32 angles of the fused kernel are too coarse."""


@dataclass(frozen=True)
class RotaryRows:
    """Cosines and sines of some positions, ready to be applied by every layer."""

    cosines: mx.array  # (..., n, head_dim) float32: each channel's own
    sines: mx.array  # (..., n, head_dim) float32: negative for the first channel of each pair
    interleaved: bool

    def rotate(self, x: mx.array) -> mx.array:
        """x (..., n, head_dim), row i rotated by position i; result of the same type."""
        return reference.rotate(x, *self._paired, self.interleaved)

    @functools.cached_property
    def _paired(self) -> tuple[mx.array, mx.array]:
        return reference.paired(self.cosines, self.interleaved), reference.paired(self.sines, self.interleaved)


class Rotary:
    """The rotary embedding that all layers of a model share, from the module mlx-lm makes of a configuration."""

    def __init__(self, module: Any, head_dim: int) -> None:
        """Every channel must be rotated, and every angle be proportional to the position."""
        self._module = module
        self.interleaved = bool(getattr(module, "traditional", False))
        if (periods := getattr(module, "_freqs", None)) is not None:
            frequencies = 1 / np.array(periods, np.float64)
        else:
            base, scale = float(module.base), float(getattr(module, "scale", 1.0))
            frequencies = scale * base ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        self._frequencies: npt.NDArray[np.float64] = frequencies  # (head_dim / 2,) radians per position
        # YaRN and long-context variants also lengthen what they rotate.
        self._length = float(getattr(module, "mscale", getattr(module, "_scale", 1.0)))

    def fused(self, x: mx.array, offset: int | mx.array) -> mx.array:
        """x (batch, heads, n, head_dim), rows at consecutive positions from `offset` on."""
        return self._module(x, offset=offset)

    def rows(self, positions: npt.NDArray[np.int64]) -> RotaryRows:
        """positions (..., n), in any order."""
        angles = positions[..., None] * self._frequencies  # (..., n, head_dim / 2)
        cosines, sines = self._length * np.cos(angles), self._length * np.sin(angles)
        if self.interleaved:
            cosines, sines = np.repeat(cosines, 2, -1), np.stack([-sines, sines], -1).reshape(*positions.shape, -1)
        else:
            cosines, sines = np.concatenate([cosines, cosines], -1), np.concatenate([-sines, sines], -1)
        return RotaryRows(mx.array(cosines.astype(np.float32)), mx.array(sines.astype(np.float32)), self.interleaved)
