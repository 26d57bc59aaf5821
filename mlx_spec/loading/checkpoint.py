"""The files of one model directory: are they all there, whole, and readable?

Knows file names and headers; reads no weights, knows no architecture, opens no connection.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from mlx_spec.errors import BadConfig, ModelNotFound

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
WEIGHTS = "model*.safetensors"
"""What mlx-lm loads: every file of this pattern, whatever the index says."""

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "tiktoken.model")
_NUMBERED = re.compile(r"(?P<stem>.*)-(?P<part>\d{5})-of-(?P<count>\d{5})\.safetensors")
_FOREIGN = (".bin", ".pth", ".pt", ".gguf", ".onnx", ".npz", ".safetensors")


def read_json(file: Path) -> dict[str, Any]:
    """The object in `file`. Raises BadConfig where it is not one."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise BadConfig(f"{file} is not valid JSON ({error}); download the model again.") from error
    if not isinstance(value, dict):
        raise BadConfig(f"{file} holds a {type(value).__name__}, not an object; download the model again.")
    return value


def read_config(directory: Path) -> dict[str, Any]:
    """config.json. Raises ModelNotFound without it, BadConfig where it cannot be read or asks to run code."""
    if not (directory / CONFIG).is_file():
        found = _foreign(directory)
        hint = f" (it has {found})" if found else ""
        raise ModelNotFound(f"{directory} has no config.json{hint}; give the directory of a model in the "
                            "Hugging Face layout, or the path of a .gguf file.")
    config = read_json(directory / CONFIG)
    if "model_file" in config:
        raise BadConfig(f"{directory / CONFIG} asks to run {config['model_file']!r}; mlx-spec never runs "
                        "code that comes with a model. Choose one whose architecture mlx-lm defines.")
    if not isinstance(config.get("text_config") or {}, dict):
        raise BadConfig(f"text_config in {directory / CONFIG} is a {type(config['text_config']).__name__}, not an "
                        "object; download the model again.")
    return config


def check_against_tensors(config: Mapping[str, Any], tensors: Collection[str]) -> None:
    """Raise BadConfig for a configuration that cannot be that of weights with these names.

    More layers than tensors would be built for ever, and mlx-lm stumbles where packed weights are promised.
    """
    for source in (config, config.get("text_config") or {}):
        packing = source.get("quantization_config")
        method = packing.get("quant_method") if isinstance(packing, dict) else None
        if method in ("awq", "gptq") and not any(name.endswith(".qweight") for name in tensors):
            raise BadConfig(f"quantization_config in config.json says {method!r}, but the weights hold none packed so "
                            "(no tensor *.qweight); download the model again.")
        for key in ("num_hidden_layers", "num_layers", "n_layers", "n_layer"):
            layers = source.get(key)
            if isinstance(layers, int) and layers > len(tensors):
                raise BadConfig(f"{key} in config.json is {layers}, but the weights hold only {len(tensors)} tensors; "
                                "download the model again.")


def missing_shards(present: Iterable[str], named: Iterable[str]) -> list[str]:
    """Weight files that should be beside those `present`; `named` are the ones that an index names.

    An index none of whose files exist is a stale one, left over from before a conversion; the numbers in the
    file names ("model-00001-of-00004") count then.
    """
    present, named = set(present), set(named)
    if named & present:
        return sorted(named - present)
    missing = set()
    for name in present:
        if match := _NUMBERED.fullmatch(name):
            count = int(match["count"])
            stem = match["stem"]
            missing |= {f"{stem}-{part:05d}-of-{count:05d}.safetensors" for part in range(1, count + 1)}
    return sorted(missing - present)


def weight_files(directory: Path) -> list[Path]:
    """The weight files. Raises ModelNotFound, naming what is missing."""
    files = sorted(directory.glob(WEIGHTS))
    if not files:
        found = _foreign(directory)
        raise ModelNotFound(
            f"{directory} has no weights (no file named {WEIGHTS})"
            + (f", only {found}; convert it with mlx_lm.convert." if found else "; download the model again.")
        )
    if missing := missing_shards((file.name for file in files), _indexed(directory)):
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ModelNotFound(f"{directory} lacks {', '.join(missing[:3])}{more}; download the model again "
                            "(what is there already is kept).")
    return files


def tensor_owners(files: Iterable[Path]) -> dict[str, Path]:
    """Tensor name -> its file. Raises ModelNotFound, naming a file that is cut short, and BadConfig where two clash."""
    owners: dict[str, Path] = {}
    for file in files:
        for tensor in tensor_names(file):
            if tensor in owners:
                raise BadConfig(f"{owners[tensor]} and {file.name} both hold {tensor!r}: two models in one "
                                "directory. Remove the files of one of them.")
            owners[tensor] = file
    return owners


def tensor_names(file: Path) -> list[str]:
    """Names in a safetensors header. Raises ModelNotFound where the file is shorter than that promises."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        if start == b"version ":
            raise ModelNotFound(f"{file} is a Git LFS pointer, not the weights; run git lfs pull beside it.")
        length = int.from_bytes(start, "little")
        broken = ModelNotFound(f"{file} is damaged: it does not start with a safetensors header; delete it "
                               "and download the model again.")
        if len(start) == 8 and 8 + length <= size:
            try:
                header = json.loads(stream.read(length))
                tensors = {name: value for name, value in header.items() if name != "__metadata__"}
                end = 8 + length + max((value["data_offsets"][1] for value in tensors.values()), default=0)
            except (ValueError, AttributeError, TypeError, LookupError) as error:
                raise broken from error
        elif len(start) < 8 or length < 2**27:  # a plausible header that the end of the file cuts
            end, tensors = 8 + length, {}
        else:
            raise broken
    if size < end or not tensors:
        raise ModelNotFound(
            f"{file} is cut short: {size} bytes of {end}; delete it and download the model again."
        )
    return list(tensors)


def is_complete(directory: Path) -> bool:
    """Whether configuration, every weight file and a tokenizer are there. Looks at names only."""
    present = [file.name for file in directory.glob(WEIGHTS)]
    try:
        named = _indexed(directory)
    except BadConfig:
        return False
    return ((directory / CONFIG).is_file() and bool(present) and not missing_shards(present, named)
            and any((directory / name).is_file() for name in _TOKENIZERS))


def end_tokens(directory: Path, config: Mapping[str, Any]) -> list[int]:
    """End tokens that config.json, its text_config and generation_config.json name, together."""
    sources: list[Mapping[str, Any]] = [config, config.get("text_config") or {}]
    if (directory / "generation_config.json").is_file():
        sources.append(read_json(directory / "generation_config.json"))
    found: set[int] = set()
    for source in sources:
        value = source.get("eos_token_id")
        for token in value if isinstance(value, list) else [value]:
            if isinstance(token, int):
                found.add(token)
    return sorted(found)


def context_length(config: Mapping[str, Any]) -> int | None:
    """Positions the model was made for; None where the configuration does not say."""
    for source in (config, config.get("text_config") or {}):
        value = source.get("max_position_embeddings")
        if isinstance(value, int) and value > 0:
            return value
    return None


def _indexed(directory: Path) -> set[str]:
    if not (directory / INDEX).is_file():
        return set()
    weight_map = read_json(directory / INDEX).get("weight_map")
    if not isinstance(weight_map, dict):
        raise BadConfig(f"{directory / INDEX} has no weight_map; download the model again.")
    return {str(name) for name in weight_map.values()}


def _foreign(directory: Path) -> str | None:
    """A file that holds weights in a form that is not read from a directory, to name it."""
    return next((file.name for file in sorted(directory.iterdir()) if file.suffix in _FOREIGN), None)
