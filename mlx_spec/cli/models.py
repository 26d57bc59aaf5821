"""`mlx-spec models`: the catalogue, and what of it is on this machine. Loads nothing, opens no connection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from mlx_spec.cli import console
from mlx_spec.cli.options import OUTPUT, option
from mlx_spec.cli.outcome import TracebackOption
from mlx_spec.cli.tables import show_table
from mlx_spec.loading import catalog

if TYPE_CHECKING:
    from mlx_spec.loading.catalog import Entry

HELP = (
    "List the models that can be named, and what is already on this machine.\n\n"
    "SIZE is the download of target and draft together, MEMORY the smallest Mac for the pair, CONTEXT the "
    "longest text in tokens."
)
_COLUMNS = ("NAME", "SIZE", "MEMORY", "CONTEXT", "LICENCE", "HERE", "TARGET AND DRAFT")


def models(
    as_json: Annotated[bool, option("--json", panel=OUTPUT, help="Write a JSON list instead of a table.")] = False,
    traceback: TracebackOption = False,
) -> None:
    """Shows the catalogue; see HELP."""
    entries = list(catalog.entries().values())
    if as_json:
        console.write_json([_as_dict(entry) for entry in entries], indent=2)
        return
    show_table(_COLUMNS, [_row(entry) for entry in entries])


def _as_dict(entry: Entry) -> dict[str, Any]:
    target_here, draft_here = _here(entry)
    pair = (("target", entry.target_weights, target_here), ("draft", entry.draft_weights, draft_here))
    return {
        "name": entry.name,
        "summary": entry.summary,
        "context_length": entry.context_length,
        "download_bytes": entry.download_bytes,
        "minimum_memory_gib": entry.minimum_memory,
        "defaults": dict(entry.defaults),
        **{role: weights and {
            "source": weights.source,
            "license": weights.license,
            "parameters": weights.parameters,
            "bits": weights.bits,
            "download_bytes": weights.download_bytes,
            "on_this_machine": here,
        } for role, weights, here in pair},
    }


def _row(entry: Entry) -> list[str]:
    target_here, draft_here = _here(entry)
    here = "no"
    if target_here or draft_here:
        here = "yes" if target_here and draft_here is not False else "target" if target_here else "draft"
    length = entry.context_length
    context = f"{length // 1024}k" if length >= 1024 else str(length)
    pair = "\n".join(filter(None, (entry.target, entry.draft)))
    return [entry.name, console.size(entry.download_bytes), f"{entry.minimum_memory} GB", context,
            entry.license, here, pair]


def _here(entry: Entry) -> tuple[bool, bool | None]:
    """Whether target and draft are complete on this machine; None without a draft."""
    from mlx_spec.loading import hub

    return hub.is_local(entry.target), hub.is_local(entry.draft) if entry.draft else None
