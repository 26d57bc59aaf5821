"""Speculative decoding on MLX: a small model drafts, the large one decides, and its distribution is untouched."""

from mlx_spec.config import Sampling, Speculation
from mlx_spec.errors import (
    BadConfig,
    DoesNotFit,
    IncompatiblePair,
    MLXSpecError,
    ModelNotFound,
)
from mlx_spec.metrics import Statistics
from mlx_spec.runtime import LLM, Chunk, Completion, load

__all__ = [
    "LLM",
    "BadConfig",
    "Chunk",
    "Completion",
    "DoesNotFit",
    "IncompatiblePair",
    "MLXSpecError",
    "ModelNotFound",
    "Sampling",
    "Speculation",
    "Statistics",
    "load",
]
