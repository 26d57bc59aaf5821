"""A name becomes a model in memory: resolve it, check its files, load, choose the compute type, check a pair.

Weights, quantization layouts and tokenizers are mlx-lm's work, with our model classes. Knows nothing of
generation.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.utils import load_model, load_tokenizer

from mlx_spec.architectures.definitions import model_classes
from mlx_spec.errors import BadConfig, MLXSpecError, ModelNotFound, shortened
from mlx_spec.loading import catalog, checkpoint, hub
from mlx_spec.loading.pairing import compare_tokenizers
from mlx_spec.loading.tokenizer import Tokenizer
from mlx_spec.machine.memory import available_memory, check_fits, gigabytes, memory_or, wired_limit

__all__ = ["LoadedModel", "Source", "check_pair", "load", "load_pair", "resolve", "wired_limit"]

_REPOSITORY = re.compile(r"(?=.{3,96}$)[\w.-]+/[\w.-]+", re.ASCII)
_STEP_BYTES = 2**29


@dataclass(frozen=True)
class Source:
    """Where a model is on this machine."""

    name: str
    """As the user gave it."""
    path: Path
    """A directory in the hub's layout, or a .gguf file."""
    entry: catalog.Entry | None = None
    """The definition that the name stands for, if it is one of the catalogue's."""


@dataclass(frozen=True)
class LoadedModel:
    """A model with its weights in memory, and its tokenizer."""

    name: str
    module: nn.Module
    tokenizer: Tokenizer
    config: dict[str, Any]
    context_length: int | None
    """Positions the model was made for; None where its configuration does not say."""

    @property
    def bytes_per_pass(self) -> int | None:
        """Bytes of weights that a pass over one row reads: of an embedding that is not the output head too, a row at
        most, and so nothing. None for a mixture of experts, which reads as many as its router picks."""
        modules = dict(self.module.named_modules())
        if any(isinstance(module, SwitchLinear | QuantizedSwitchLinear) for module in modules.values()):
            return None
        has_head = any(name.split(".")[-1] == "lm_head" for name in modules)
        return sum(
            array.nbytes
            for name, array in tree_flatten(self.module.parameters())
            if not (has_head and isinstance(modules[name.rpartition(".")[0]], nn.Embedding | nn.QuantizedEmbedding))
        )


def resolve(name: str | Path) -> Source:
    """Find what `name` stands for, downloading it if need be.

    A name of the catalogue, a directory, a .gguf file, or org/name on the hub, in this order; a Path is only
    ever a path. Raises ModelNotFound with the next step.
    """
    if not isinstance(name, str | Path):
        raise BadConfig(f"the model is {name!r}; give a name as text, or a Path.")
    text = str(name)
    if isinstance(name, str) and (entry := catalog.find(text)) is not None:
        return Source(text, _fetch(entry.target), entry)
    try:
        path = Path(text).expanduser()
        kind = "file" if path.is_file() else "directory" if path.is_dir() else "other" if path.exists() else None
    except (OSError, ValueError, RuntimeError) as error:  # too long, not allowed, a NUL, an unknown user
        reason = getattr(error, "strerror", None) or str(error)
        raise ModelNotFound(f"{shortened(text)!r} is no path that can be read ({reason.rstrip('.')}); give a name of "
                            "`mlx-spec models`, org/name on the hub, a directory, or a .gguf file.") from error
    if path.suffix.lower() == ".gguf":
        if kind != "file":
            raise ModelNotFound(f"there is no file {text}; give the path of a .gguf file, or a name of "
                                "`mlx-spec models`.")
        return Source(text, path)
    if kind == "directory" and text:
        return Source(text, path)
    if kind and text:
        raise ModelNotFound(f"{text} is a file of another kind; give a .gguf file, or the directory that "
                            "holds config.json and the weights.")
    if isinstance(name, str) and (text.startswith(hub.PACKAGE) or _REPOSITORY.fullmatch(text)) \
            and not text.startswith("."):
        return Source(text, _fetch(text))
    close = difflib.get_close_matches(text.lower(), catalog.entries(), n=3, cutoff=0.5)
    guess = f"did you mean {' or '.join(close)}? G" if close else "g"
    raise ModelNotFound(f"no model or directory {shortened(text)!r}: {guess}ive a name of `mlx-spec models`, org/name "
                        "on the hub, a directory, or a .gguf file.")


def load(source: Source | str | Path) -> LoadedModel:
    """Load a model; a name is resolved first. Weights are in memory when this returns.

    Raises ModelNotFound for files that are missing or cut short, BadConfig for ones that cannot be used, and
    DoesNotFit before memory runs out.
    """
    if not isinstance(source, Source):
        source = resolve(source)
    if source.path.is_dir():
        module, config, tokenizer = _load_directory(source)
    else:
        _check_memory(source.name, source.path.stat().st_size)
        from mlx_spec.loading.gguf.loader import load_gguf  # only those who read such files need its extra

        module, config, tokenizer = load_gguf(source.path, model_classes)
    choose_compute_type(module, on_cpu=mx.default_device().type == mx.cpu, from_gguf=not source.path.is_dir())
    _evaluate(source.name, module)
    return LoadedModel(source.name, module, Tokenizer(tokenizer), config, checkpoint.context_length(config))


def load_pair(
    model: str | Path,
    draft: str | Path | Literal[False] | None,
    read: Callable[[Source], LoadedModel] | None = None,
) -> tuple[LoadedModel, LoadedModel | None, catalog.Entry | None]:
    """A target, its draft or None, and what the catalogue says of the target, if it does. draft None is the
    catalogue's draft for `model`, False none at all. read: instead of `load`, for those who have it run elsewhere.
    Raises what `resolve` and `load` raise."""
    read = load if read is None else read
    source = resolve(model)
    if draft is None and source.entry is not None:
        draft = source.entry.draft
    draft_source = None if draft is None or draft is False else resolve(draft)  # before the large one is read
    return read(source), read(draft_source) if draft_source else None, source.entry


def check_pair(target: LoadedModel, draft: LoadedModel) -> list[str]:
    """Warnings about a usable pair. Raises IncompatiblePair where the draft's ids mean other strings."""
    return compare_tokenizers(
        target.name, target.tokenizer.vocabulary(), target.tokenizer.encode,
        draft.name, draft.tokenizer.vocabulary(), draft.tokenizer.encode,
    )


def choose_compute_type(module: nn.Module, *, on_cpu: bool, from_gguf: bool) -> None:
    """Store floating parameters in a type that the backend computes fast with.

    On the CPU backend quantized weights want float32 rows (four to forty times faster than 16-bit ones, measured), and
    dense float16 is far slower than bfloat16. On a GPU a directory stays as it is; a GGUF file, whose norms are
    float32, follows its 16-bit weights or scales, so that scales stay exact and rows are not computed in float32.
    """
    parameters = tree_flatten(module.parameters())
    if on_cpu:
        if any(name.endswith("scales") for name, _ in parameters):
            module.set_dtype(mx.float32)
        else:
            module.set_dtype(mx.bfloat16, lambda dtype: dtype == mx.float16)
    elif from_gguf:
        types = {array.dtype for _, array in parameters}
        for dtype in (mx.float16, mx.bfloat16):
            if dtype in types:
                module.set_dtype(dtype)
                break


def _fetch(source: str) -> Path:
    return hub.packaged(source) if source.startswith(hub.PACKAGE) else hub.download(source)


def _load_directory(source: Source) -> tuple[nn.Module, dict[str, Any], Any]:
    config = checkpoint.read_config(source.path)
    files = checkpoint.weight_files(source.path)
    checkpoint.check_against_tensors(config, checkpoint.tensor_owners(files))
    ends = checkpoint.end_tokens(source.path, config)
    _check_memory(source.name, sum(file.stat().st_size for file in files))
    try:
        module, config = load_model(source.path, lazy=True, get_model_classes=model_classes)
    except MLXSpecError as error:
        raise type(error)(f"{source.name}: {error}") from error
    except Exception as error:  # mlx-lm and the definitions raise whatever a strange file makes them raise
        raise BadConfig(_explain(source.name, config, error)) from error
    try:
        tokenizer = load_tokenizer(source.path, {"trust_remote_code": False}, eos_token_ids=ends or None)
    except Exception as error:  # as above, with transformers
        raise BadConfig(f"the tokenizer of {source.name} cannot be loaded ({_first_line(error)}); download "
                        "the model again, or choose another conversion of it.") from error
    config["eos_token_id"] = sorted(tokenizer.eos_token_ids)
    return module, config, tokenizer


def _check_memory(name: str, needed: int) -> None:
    smaller = {entry.name: entry.download_bytes for entry in catalog.entries().values()}
    check_fits(name, needed, available_memory(), smaller)


def _evaluate(name: str, module: nn.Module) -> None:
    """Bring the weights into memory, some at a time, so that sources of a conversion are freed on the way."""
    parameters = [array for _, array in tree_flatten(module.parameters())]
    total: int = sum(array.nbytes for array in parameters)
    waiting: list[mx.array] = []
    done = 0
    try:
        with memory_or(lambda: f"memory ran out after {gigabytes(done)} of {gigabytes(total)} of {name}; close other "
                       "programs or choose a smaller model (`mlx-spec models`)."):
            for array in parameters:
                waiting.append(array)
                if sum(other.nbytes for other in waiting) >= _STEP_BYTES or array is parameters[-1]:
                    mx.eval(waiting)
                    done += sum(other.nbytes for other in waiting)
                    waiting = []
    except RuntimeError as error:
        raise BadConfig(f"the weights of {name} cannot be read ({_first_line(error)}); download the model "
                        "again.") from error


def _explain(name: str, config: dict[str, Any], error: Exception) -> str:
    kind, text = config.get("model_type"), str(error)
    absent = re.search(r"missing \d+ required \w+ arguments?: (.*)", text)
    if isinstance(error, TypeError) and absent:
        return (f"config.json of {name} lacks {absent[1]}, which architecture {kind!r} needs; download "
                "the model again.")
    if isinstance(error, KeyError) and error.args:
        where = "the weights" if "." in str(error.args[0]) else "config.json"
        return (f"{where} of {name} (architecture {kind!r}) lacks {error.args[0]!r}; download the model again, or "
                "choose another conversion of it.")
    if isinstance(error, ValueError) and re.match(r"(Received|Missing|Expected shape)", text):
        head, *names = (part.strip(" .,") for part in text.splitlines())
        listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        return (f"the weights of {name} do not fit its architecture {kind!r}: {f'{head} {listed}'.strip()}; "
                "download it again, or choose another conversion of it.")
    return (f"{name} (architecture {kind!r}) cannot be loaded: {_first_line(error)}; download it again, or "
            "choose another model (`mlx-spec models`).")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
