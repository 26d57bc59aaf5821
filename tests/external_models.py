"""Tiny random models of architectures that run through mlx-lm."""

from __future__ import annotations

from typing import Any

from tiny import CONFIG, randomise

from mlx_spec.architectures.definitions import model_classes

COLUMNS = 272
BASE = CONFIG | {"vocab_size": COLUMNS, "head_dim": 8, "tie_word_embeddings": False}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "mlp_only_layers": [],
           "moe_intermediate_size": 16, "norm_topk_prob": True}
CONFIGS: dict[str, dict[str, Any]] = {
    "phi3": {},
    "qwen3_moe": EXPERTS,
    "deepseek_v3": {
        "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 8,
        "qk_nope_head_dim": 8, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2,
        "topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 16,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "mscale": 1.0,
                         "mscale_all_dim": 1.0},
    },
    "gemma3_text": {"sliding_window": 8, "sliding_window_pattern": 2, "query_pre_attn_scalar": 8},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"]},
    "llama": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_d_head": 8, "mamba_n_heads": 4, "mamba_d_state": 8,
                  "mamba_chunk_size": 16},
    "qwen3_next": EXPERTS | {
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4, "shared_expert_intermediate_size": 16, "partial_rotary_factor": 0.5,
        "full_attention_interval": 2,
    },
}

_modules: dict[tuple[str, int], Any] = {}


def module_of(kind: str, seed: int = 0) -> Any:
    """A tiny random model of mlx-lm's; the same object for the same arguments."""
    if (kind, seed) not in _modules:
        config = BASE | {"model_type": kind} | CONFIGS[kind]
        model_class, arguments_class = model_classes(config)
        assert model_class.__module__ == f"mlx_lm.models.{kind}"
        _modules[kind, seed] = randomise(model_class(arguments_class.from_dict(config)), seed)
    return _modules[kind, seed]
