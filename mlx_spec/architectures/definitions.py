"""Which definition a checkpoint's configuration asks for: a native one, or mlx-lm's through `external.py`."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from mlx_lm.utils import _get_classes as mlx_lm_classes

from mlx_spec.architectures import llama, qwen2, qwen3
from mlx_spec.architectures.decoder import Decoder
from mlx_spec.errors import BadConfig

NATIVE: dict[str, ModuleType] = {"llama": llama, "mistral": llama, "qwen2": qwen2, "qwen3": qwen3}
"""model_type -> definition whose keys and values live in our pages."""

__all__ = ["NATIVE", "Decoder", "model_classes"]


def model_classes(config: dict[str, Any]) -> tuple[type, type]:
    """(model class, arguments class) for a checkpoint's config.json, as `mlx_lm.utils.load_model` asks for them.

    Raises BadConfig for an architecture that neither mlx-spec nor mlx-lm defines.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise BadConfig("config.json has no model_type; download the model again.")
    if kind in NATIVE and not _slides(config) and not _stretches(config):
        return NATIVE[kind].Model, NATIVE[kind].ModelArgs
    try:
        model, arguments = mlx_lm_classes(config)
    except ValueError as error:
        raise BadConfig(
            f"architecture {kind!r} is known neither to mlx-spec nor to the installed mlx-lm; "
            "upgrade mlx-lm or choose another model (mlx-spec models)."
        ) from error
    return model, arguments


def _stretches(config: dict[str, Any]) -> bool:
    """Whether angles depend on the length so far, which keys that stay rotated cannot follow."""
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    return isinstance(rope, dict) and "dynamic" in (rope.get("type"), rope.get("rope_type"))


def _slides(config: dict[str, Any]) -> bool:
    """Whether some layers attend only to a window, which the native definitions do not do."""
    return any(kind == "sliding_attention" for kind in config.get("layer_types") or ())
