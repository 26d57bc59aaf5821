"""From the options that name models and their memory to what is loaded. Knows options and the catalogue; no command."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_spec.config import KVConfig
from mlx_spec.errors import BadConfig

_log = logging.getLogger("mlx_spec")


def check_models(model: str | None, draft: str | None) -> str:
    """The target's name. Raises BadConfig where there is none, or an empty draft."""
    if draft == "":
        raise BadConfig("--draft '' is empty; name a model, or give none to switch drafting off.")
    if not model:
        raise BadConfig("no model; give --model demo to try, or another name from `mlx-spec models`.")
    return model


def kv_config(model: str | None, **given: Any) -> KVConfig:
    """The model's own way to keep keys and values, changed by the options that were given."""
    from mlx_spec import catalog

    entry = catalog.find(model) if model else None
    own = entry.kv if entry else KVConfig()
    given = {name: value for name, value in given.items() if value is not None}
    if given.get("window", own.window or "none") == "none":
        if "sinks" in given:
            raise BadConfig("--sinks says what stays visible beside a window; give --window N, such as --window 4096.")
        given |= {"window": None, "sinks": None}
    return dataclasses.replace(own, **given)


def note_no_draft(model: str, options: Mapping[str, object]) -> None:
    """Say of each option that was given that it is a draft's, and that `model` has none."""
    for name, value in options.items():
        if value:
            _log.warning(f"{model} has no draft, so {name} does nothing; name one with --draft")


def is_here(name: str) -> bool:
    """Whether nothing of `name` needs to be downloaded, which would draw its own bars."""
    from mlx_spec import catalog, hub

    entry = catalog.find(name)
    sources = [name] if entry is None else [entry.target, *([entry.draft] if entry.draft else [])]
    try:
        return all(Path(source).exists() or hub.is_local(source) for source in sources)
    except (OSError, ValueError):  # no path at all, as loading it will say
        return False
