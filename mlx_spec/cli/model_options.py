"""From the options that name models and their memory to what is loaded. Knows options and the catalogue; no command."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mlx_spec.cli.progress import progress
from mlx_spec.errors import BadConfig
from mlx_spec.settings import LOOKUP, KVConfig, Speculation

if TYPE_CHECKING:
    from mlx_spec.llm.llm import LLM

_log = logging.getLogger("mlx_spec")


def check_models(model: str | None, draft: str | None) -> str:
    """The target's name. Raises BadConfig where there is none, or an empty draft."""
    if draft == "":
        raise BadConfig("--draft '' is empty; name a model, or give none to switch drafting off.")
    if not model:
        raise BadConfig("no model; give --model demo to try, or another name from `mlx-spec models`.")
    return model


def draft_wanted(model: str, draft: str | None, ahead: Mapping[str, Any]) -> str | None:
    """The draft to load, none where drafts come from elsewhere or nowhere: that spares its memory.

    ahead: the options of `Speculation`, which stand before the model's own.
    """
    from mlx_spec.loading import catalog

    entry = catalog.find(model)
    speculation = dataclasses.replace(entry.speculation if entry else Speculation(), **ahead)
    if not speculation.plain and speculation.drafter != LOOKUP:
        return draft
    if draft not in (None, "none"):
        _log.warning(f"{draft} is not loaded: {'plain decoding' if speculation.plain else 'lookup'} has no use for it")
    return "none"


def load(model: str, draft: str | None, kv: KVConfig, *, quiet: bool = False) -> LLM:
    """Load for generating, with a spinner on a terminal unless `quiet`. draft None is the model's own."""
    if quiet:
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()
    with loading(model, draft, shown=not quiet) as wanted:
        import mlx_spec

        return mlx_spec.load(model, draft=wanted, kv=kv)


@contextlib.contextmanager
def loading(model: str, draft: str | None, *, shown: bool = True) -> Iterator[str | Literal[False] | None]:
    """The draft as the runtime is to be told of it, and while it loads a spinner; none where something is downloaded,
    which draws bars of its own."""
    wanted: str | Literal[False] | None = False if draft == "none" else draft
    here = _is_here(model) and (not wanted or _is_here(wanted))
    with progress(f"loading {model}", shown=shown and here):
        yield wanted


def given(**options: Any) -> dict[str, Any]:
    """Those that were given."""
    return {name: value for name, value in options.items() if value is not None}


def kv_config(model: str | None, **options: Any) -> KVConfig:
    """The model's own way to keep keys and values, changed by the options that were given."""
    from mlx_spec.loading import catalog

    entry = catalog.find(model) if model else None
    own = entry.kv if entry else KVConfig()
    changes = given(**options)
    if changes.get("window", own.window or "none") == "none":
        if "sinks" in changes:
            raise BadConfig("--sinks says what stays visible beside a window; give --window N, such as --window 4096.")
        changes |= {"window": None, "sinks": None}
    return dataclasses.replace(own, **changes)


def note_no_draft(options: Mapping[str, object]) -> None:
    """Say of each option that was given that it is a draft's, and that there is none."""
    for name, value in options.items():
        if value:
            _log.warning(f"no draft model is loaded, so {name} does nothing; name one with --draft")


def _is_here(name: str) -> bool:
    """Whether nothing of `name` needs to be downloaded."""
    from mlx_spec.loading import catalog, hub

    entry = catalog.find(name)
    sources = [name] if entry is None else [entry.target, entry.draft]
    try:
        return all(Path(source).exists() or hub.is_local(source) for source in sources if source)
    except (OSError, ValueError):  # no path at all, as loading it will say
        return False
