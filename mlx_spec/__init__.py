"""Speculative decoding on MLX: a small model drafts, the large one decides, and its distribution is untouched."""

from typing import TYPE_CHECKING, Any

from mlx_spec.config import KVConfig, Sampling, Speculation
from mlx_spec.errors import BadConfig, DoesNotFit, IncompatiblePair, MLXSpecError, ModelNotFound
from mlx_spec.metrics import Statistics

if TYPE_CHECKING:
    from mlx_spec.runtime import LLM, Chunk, Completion, load

__all__ = [
    "LLM",
    "BadConfig",
    "Chunk",
    "Completion",
    "DoesNotFit",
    "IncompatiblePair",
    "KVConfig",
    "MLXSpecError",
    "ModelNotFound",
    "Sampling",
    "Speculation",
    "Statistics",
    "load",
]


def __getattr__(name: str) -> Any:
    # MLX and transformers take a second to import; `mlx-spec --help` needs neither.
    if name in ("LLM", "Chunk", "Completion", "load"):
        from mlx_spec import runtime

        return getattr(runtime, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
