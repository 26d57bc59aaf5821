"""A .gguf file in the same in-memory form a safetensors directory gives: module, config, tokenizer.

Knows GGUF's tensor names and rotary order. The model classes come from the caller, and the compute type is
the caller's business too, with one condition: the scales of quantized weights stay float16 or become float32,
as bfloat16 would lose bits that make them exact. One tensor is converted at a time, so peak memory stays near
the size of the result.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten

from mlx_spec.errors import BadConfig, ModelNotFound
from mlx_spec.loading.gguf.config import ADVICE, ROPE_FACTORS, build_config
from mlx_spec.loading.gguf.tokenizer import build_tokenizer
from mlx_spec.loading.gguf.weights import DENSE, GROUP_SIZE, WIDTHS, dense, quantized

_NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


def load_gguf(
    path: str | Path, get_model_classes: Callable[[dict[str, Any]], tuple[Any, Any]]
) -> tuple[nn.Module, dict[str, Any], Any]:
    """Read a GGUF file, or all files of a split one given any of them.

    get_model_classes(config) gives (model class, arguments class) with mlx-lm's parameter names. Returns
    (module, config, mlx-lm TokenizerWrapper); config is what config.json would hold, with the width of each
    quantized weight under `quantization`.
    Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0 weights are exact, Q4_K and Q5_K up to the rounding of their scales to
    float16; other quantized types are rounded again. All become MLX affine weights with groups of 32.

    Raises ModelNotFound for a missing file, BadConfig for a broken one and for what cannot be represented.
    """
    path = Path(path)
    readers = _open(path)
    tensors = {tensor.name: tensor for reader in readers for tensor in reader.tensors}
    for tensor in tensors.values():
        if 0 in tensor.shape:
            raise BadConfig(f"Tensor {tensor.name} of {path} is empty. {ADVICE}")
    try:
        metadata = {key: field.contents() for key, field in readers[0].fields.items()}
        config = build_config(metadata, tensors)
        tokenizer, ends = build_tokenizer(metadata, config["max_position_embeddings"])
    except (TypeError, ValueError, LookupError, AttributeError) as error:  # wrong types, bad UTF-8
        raise BadConfig(f"The metadata of {path} is broken: {_one_line(error)}. {ADVICE}") from error
    config["bos_token_id"], config["eos_token_id"] = tokenizer.bos_token_id, ends

    places = {name: _place(name) for name in tensors if name != ROPE_FACTORS}  # before any slow work
    widths = {places[name].removesuffix(".weight"): WIDTHS[tensor.tensor_type.name]
              for name, tensor in tensors.items() if name in places and _check_type(tensor)}
    if widths:
        usual = Counter(widths.values()).most_common(1)[0][0]
        each = {module: {"group_size": GROUP_SIZE, "bits": bits} for module, bits in widths.items()}
        config["quantization"] = {"group_size": GROUP_SIZE, "bits": usual, **each}

    module = _build(config, widths, get_model_classes)
    weights: dict[str, mx.array] = {}
    for name, place in places.items():
        tensor, order = tensors[name], _row_order(name, tensors[name].data.shape[0], config)
        if tensor.tensor_type.name in DENSE:
            weights[place] = dense(tensor.data, tensor.tensor_type.name, order)
        else:
            owner = place.removesuffix("weight")
            parts = quantized(tensor.data, tensor.tensor_type, order)
            weights |= {owner + part: array for part, array in parts.items()}
    return _fill(module, weights, path), config, tokenizer


def _open(path: Path) -> list[Any]:
    split = re.fullmatch(r"(.+)-\d{5}-of-(\d{5})\.gguf", path.name)
    paths = [path]
    if split:
        count = int(split[2])
        paths = [path.with_name(f"{split[1]}-{i:05}-of-{split[2]}.gguf") for i in range(1, count + 1)]
    readers = [_read(each) for each in paths]
    field = readers[0].get_field("split.count")
    expected = (field.contents() if field else 0) or 1
    if expected != len(paths):
        raise BadConfig(f"{path} is part of a model split into {expected} files, but not named like one; "
                        "name the files NAME-00001-of-0000N.gguf and so on, in one directory.")
    return readers


def _read(path: Path) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise BadConfig(f"Reading {path.name} needs the gguf package: pip install 'mlx-spec[gguf]'") from error
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        reason = error.strerror
        raise ModelNotFound(f"Cannot read {path}: {reason}. Give the path of a .gguf file.") from error
    if magic != b"GGUF":
        raise BadConfig(f"{path} is not a GGUF file: it begins with {magic!r}, not b'GGUF'. {ADVICE}")
    try:
        reader = GGUFReader(path)
    except Exception as error:  # whatever numpy and the reader run into at bytes that are not there
        raise BadConfig(f"{path} is truncated or broken ({_one_line(error)}). {ADVICE}") from error
    if reader.endianess.name.lower() != sys.byteorder:
        raise BadConfig(f"{path} is for {reader.endianess.name.lower()}-endian machines. {ADVICE}")
    return reader


def _place(name: str) -> str:
    """GGUF tensor name -> parameter name."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in _NAMES:
        raise BadConfig(f"Tensor {name} of this GGUF file has no place in the model. {ADVICE}")
    layer = "" if match[1] is None else f"model.layers.{match[1]}."
    return f"{layer}{_NAMES[match[2]]}.{match[3]}"


def _check_type(tensor: Any) -> bool:
    """Whether the tensor becomes a quantized weight."""
    kind = tensor.tensor_type.name
    if kind not in WIDTHS and kind not in DENSE:
        raise BadConfig(f"Tensor {tensor.name} of this GGUF file has type {kind}; known are "
                        f"{', '.join((*DENSE, *WIDTHS))}. {ADVICE}")
    return kind in WIDTHS


def _row_order(name: str, rows: int, config: Mapping[str, Any]) -> npt.NDArray[np.intp] | None:
    """Which row of the tensor is the i-th of ours; None if they are in order.

    GGUF's llama files keep two channels that rotate together side by side; here they are half a head apart.
    """
    part = name.split(".")[-2]
    if config["model_type"] != "llama" or part not in ("attn_q", "attn_k"):
        return None
    heads = config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
    if rows != heads * config["head_dim"]:
        raise BadConfig(f"Tensor {name} of this GGUF file has {rows} rows, not {heads} heads of "
                        f"{config['head_dim']}. {ADVICE}")
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _build(
    config: dict[str, Any], widths: Mapping[str, int], get_model_classes: Callable[[dict[str, Any]], Any]
) -> nn.Module:
    """The module without its weights, every parameter in the layout the file needs. Nothing is evaluated."""
    model_class, arguments_class = get_model_classes(config)
    try:
        module: nn.Module = model_class(arguments_class.from_dict(config))
        nn.quantize(module, class_predicate=lambda path, _: path in widths and config["quantization"][path])
    except ValueError as error:  # sizes that make no model, or none with groups of 32
        raise BadConfig(f"The metadata of this GGUF file is broken: {_one_line(error)}. {ADVICE}") from error
    return module


def _fill(module: nn.Module, weights: dict[str, mx.array], path: Path) -> nn.Module:
    if hasattr(module, "sanitize"):
        weights = module.sanitize(weights)
    missing = sorted(dict(tree_flatten(module.parameters())).keys() - weights.keys())
    if missing:
        raise BadConfig(f"{path} lacks the tensors of {len(missing)} parameters: {', '.join(missing[:3])}"
                        f"{', ...' if len(missing) > 3 else ''}. {ADVICE}")
    try:
        module.load_weights(list(weights.items()), strict=True)
    except ValueError as error:
        raise BadConfig(f"The tensors of {path} do not fit its metadata: {_one_line(error)} {ADVICE}") from error
    module.eval()
    return module


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
