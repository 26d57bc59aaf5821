"""From the options that name models and their memory to what is loaded. Knows options and the catalogue; no command."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_spec.cli import console
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


def draft_wanted(model: str, draft: str | None, given: Mapping[str, Any]) -> str | None:
    """The draft to load, none where drafts come from elsewhere or nowhere: that spares its memory.

    given: the options of `Speculation`, which stand before the model's own.
    """
    from mlx_spec.loading import catalog

    entry = catalog.find(model)
    speculation = dataclasses.replace(entry.speculation if entry else Speculation(), **given)
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
    # A download draws its own bars, which a spinner would garble.
    names = [model] if draft is None or draft == "none" else [model, draft]
    with console.loading(model, shown=not quiet and all(is_here(name) for name in names)):
        import mlx_spec

        return mlx_spec.load(model, draft=False if draft == "none" else draft, kv=kv)


def kv_config(model: str | None, **given: Any) -> KVConfig:
    """The model's own way to keep keys and values, changed by the options that were given."""
    from mlx_spec.loading import catalog

    entry = catalog.find(model) if model else None
    own = entry.kv if entry else KVConfig()
    given = {name: value for name, value in given.items() if value is not None}
    if given.get("window", own.window or "none") == "none":
        if "sinks" in given:
            raise BadConfig("--sinks says what stays visible beside a window; give --window N, such as --window 4096.")
        given |= {"window": None, "sinks": None}
    return dataclasses.replace(own, **given)


def note_no_draft(options: Mapping[str, object]) -> None:
    """Say of each option that was given that it is a draft's, and that there is none."""
    for name, value in options.items():
        if value:
            _log.warning(f"no draft model is loaded, so {name} does nothing; name one with --draft")


def is_here(name: str) -> bool:
    """Whether nothing of `name` needs to be downloaded, which would draw its own bars."""
    from mlx_spec.loading import catalog, hub

    entry = catalog.find(name)
    sources = [name] if entry is None else [entry.target, *([entry.draft] if entry.draft else [])]
    try:
        return all(Path(source).exists() or hub.is_local(source) for source in sources)
    except (OSError, ValueError):  # no path at all, as loading it will say
        return False
