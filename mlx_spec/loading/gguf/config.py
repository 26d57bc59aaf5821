"""What the metadata of a GGUF file says of the model, as mlx-lm's config. Knows no weights and no tokenizer.

Whatever would change the model and has no exact counterpart in the config is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from mlx_spec.errors import BadConfig

ADVICE = "Download the file again, or use a safetensors directory of this model."
ROPE_FACTORS = "rope_freqs.weight"
_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# Metadata (after the architecture's name) that changes the model, and the values at which it does not.
_HARMLESS = {
    "expert_count": (0,), "attention.causal": (True,), "rope.scale_linear": (1.0,),
    "rope.scaling.attn_factor": (1.0,), "rope.scaling.yarn_ext_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,), "rope.scaling.yarn_beta_fast": (32.0,),
    "rope.scaling.yarn_beta_slow": (1.0,), "rope.scaling.yarn_log_multiplier": (),
    "rope.dimension_sections": (), "attention.scale": (), "logit_scale": (), "embedding_scale": (),
    "residual_scale": (), "attention.temperature_scale": (), "attention.temperature_length": (),
}  # fmt: skip


def build_config(metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json of the same model would say."""
    kind = metadata.get("general.architecture")
    if kind not in _CLASSES:
        raise BadConfig(f"The architecture of this GGUF file is {kind!r}; {', '.join(_CLASSES)} can be read. "
                        "Use a safetensors directory of this model: every architecture of mlx-lm works so.")
    for name, harmless in _HARMLESS.items():
        value = metadata.get(f"{kind}.{name}")
        if value is not None and value not in harmless:
            raise BadConfig(f"{kind}.{name} is {value!r} in this GGUF file, which cannot be represented here. {ADVICE}")

    def number(name: str, default: float | None = None) -> Any:
        value = metadata.get(f"{kind}.{name}", default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise BadConfig(f"{kind}.{name} is {value!r} in this GGUF file; one positive number is needed. {ADVICE}")
        return value

    if "token_embd.weight" not in tensors:
        raise BadConfig(f"This GGUF file has no tensor token_embd.weight. {ADVICE}")
    heads, width = number("attention.head_count"), number("embedding_length")
    context = number("context_length")
    head_dim = number("attention.key_length", width // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if number(name, head_dim) != head_dim:
            raise BadConfig(f"{kind}.{name} is {number(name)} in this GGUF file; only {head_dim}, the width "
                            f"of a key, can be represented here. {ADVICE}")
    window = metadata.get(f"{kind}.attention.sliding_window")
    if window and window < context:
        raise BadConfig(f"{kind}.attention.sliding_window is {window} in this GGUF file, which cannot be "
                        f"represented here. {ADVICE}")
    layers = number("block_count")
    if f"blk.{layers - 1}.attn_norm.weight" not in tensors:  # or a broken count would build layers for ever
        raise BadConfig(f"{kind}.block_count is {layers}, but this GGUF file has no tensor "
                        f"blk.{layers - 1}.attn_norm.weight. {ADVICE}")
    base = number("rope.freq_base", 10000.0)
    return {
        "model_type": kind, "architectures": [_CLASSES[kind]],
        "hidden_size": width, "num_hidden_layers": layers,
        "intermediate_size": number("feed_forward_length"),
        "num_attention_heads": heads, "num_key_value_heads": number("attention.head_count_kv", heads),
        "head_dim": head_dim, "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "rope_theta": base, "rope_scaling": _rope_scaling(metadata, tensors, head_dim, base),
        "max_position_embeddings": context, "vocab_size": int(tensors["token_embd.weight"].shape[-1]),
        "tie_word_embeddings": "output.weight" not in tensors,
        # Qwen's definitions know for themselves which projections have a bias.
        "attention_bias": kind == "llama" and "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    }  # fmt: skip


def _rope_scaling(
    metadata: Mapping[str, Any], tensors: Mapping[str, Any], head_dim: int, base: float
) -> dict[str, Any] | None:
    prefix = f"{metadata['general.architecture']}.rope.scaling"
    kind, factor = metadata.get(f"{prefix}.type", "none"), metadata.get(f"{prefix}.factor", 1.0)
    original = metadata.get(f"{prefix}.original_context_length")
    if ROPE_FACTORS in tensors and kind == "none":
        return _llama3_scaling(np.array(tensors[ROPE_FACTORS].data, dtype=np.float64), head_dim, base)
    if kind == "none" or (kind == "linear" and factor == 1):
        return None
    if kind == "linear" and factor > 0:
        return {"type": "linear", "rope_type": "linear", "factor": factor}
    if kind == "yarn" and factor > 0 and original:
        return {"type": "yarn", "rope_type": "yarn", "factor": factor,
                "original_max_position_embeddings": original}  # fmt: skip
    raise BadConfig(f"Rope scaling {kind!r} with factor {factor} and original context {original} in this "
                    f"GGUF file cannot be represented here. {ADVICE}")


def _llama3_scaling(factors: npt.NDArray[np.float64], head_dim: int, base: float) -> dict[str, Any] | None:
    """The parameters that give these divisors of the frequencies (head_dim / 2,): a file keeps only those."""
    if np.all(factors == 1):
        return None
    factor, low, high, original = float(factors.max()), 1.0, 4.0, 8192
    waves = 2 * math.pi * base ** (np.arange(0, head_dim, 2) / head_dim)  # wavelengths in tokens
    # 1 keeps a frequency, 0 divides it by the factor, between the two wavelengths it is interpolated.
    share = np.clip((original / waves - low) / (high - low), 0, 1)
    expected = 1 / (share + (1 - share) / factor)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        raise BadConfig(f"The rope factors in {ROPE_FACTORS} of this GGUF file are not those of Llama 3 "
                        f"scaling (largest {factor:g}, original context {original}). {ADVICE}")
    return {"type": "llama3", "rope_type": "llama3", "factor": factor, "low_freq_factor": low,
            "high_freq_factor": high, "original_max_position_embeddings": original}  # fmt: skip
