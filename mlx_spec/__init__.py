"""Speculative decoding on MLX: a small model drafts, the large one decides, and its distribution is untouched."""

from __future__ import annotations

TYPE_CHECKING = False  # typing takes as long to import as Python to start, and Ctrl-C shows a traceback until then
if TYPE_CHECKING:
    from typing import Any

    from mlx_spec.errors import BadConfig, DoesNotFit, IncompatiblePair, MLXSpecError, ModelNotFound
    from mlx_spec.llm.completion import Chunk, Completion
    from mlx_spec.llm.llm import LLM, load
    from mlx_spec.llm.statistics import Statistics
    from mlx_spec.settings import KVConfig, Sampling, Speculation

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


_HOMES = {
    "errors": ("BadConfig", "DoesNotFit", "IncompatiblePair", "MLXSpecError", "ModelNotFound"),
    "llm.completion": ("Chunk", "Completion"),
    "llm.llm": ("LLM", "load"),
    "llm.statistics": ("Statistics",),
    "settings": ("KVConfig", "Sampling", "Speculation"),
}


def __getattr__(name: str) -> Any:
    # MLX and transformers take a second to import; `mlx-spec --help` needs neither.
    for module, names in _HOMES.items():
        if name in names:
            from importlib import import_module

            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
