"""`mlx-spec calibrate`: measures what passes of a pair cost on this machine. Knows the options and what comes after
what; measures and draws nothing itself."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated

from mlx_spec.cli import calibration_view, console
from mlx_spec.cli.loading import check_models, is_here, kv_config, note_no_draft
from mlx_spec.cli.options import (
    DraftOption,
    DraftStorageOption,
    ModelOption,
    SinksOption,
    StorageOption,
    WindowOption,
    option,
)
from mlx_spec.cli.outcome import TracebackOption
from mlx_spec.settings import Sampling

if TYPE_CHECKING:
    from mlx_spec.loading.loader import LoadedModel

_OUTPUT = "Output"
HELP = (
    "Measure what passes of a model and its draft cost on this machine, which -k auto goes by.\n\n"
    "Takes about ten seconds for each of three context lengths, more where a pass takes long, and is remembered in "
    "your cache folder until chip, system, MLX, model or memory settings change. Without it, a shorter measurement is "
    "part of the first answer of more than 8 tokens; a shorter one is decoded plainly until then."
)


def calibrate(
    model: ModelOption = None,
    draft: DraftOption = None,
    storage: StorageOption = None,
    draft_storage: DraftStorageOption = None,
    window: WindowOption = None,
    sinks: SinksOption = None,
    as_json: Annotated[bool, option(
        "--json", panel=_OUTPUT, help="Write one JSON object, times in seconds, instead of tables.")] = False,
    traceback: TracebackOption = False,
) -> None:
    """Measures and shows; see HELP."""
    name = check_models(model, draft)
    kv = kv_config(name, storage=storage, draft_storage=draft_storage, window=window, sinks=sinks)
    with console.notes(shown=True):
        target, small, sampling = _load(name, draft)
        if small is None:
            note_no_draft({"--draft-kv": draft_storage})
        from mlx_spec.calibration import calibrations as calibration
        from mlx_spec.calibration.timing import active_filters
        from mlx_spec.machine import remembered

        report = calibration_view.Report(
            remembered.machine(), target.name, small.name if small else None, dataclasses.asdict(kv),
            active_filters(sampling),
        )
        try:
            with _progress() as progress:
                for result in calibration.calibrate(target, small, kv, sampling=sampling, progress=progress):
                    if isinstance(result, calibration.LeftOut):
                        report.left_out.append(result)
                    else:
                        report.calibrations.append(result)
            report.complete = True
        finally:
            # Also after Ctrl-C: what was measured until then is remembered, and so shown.
            if report.calibrations or report.left_out:
                if as_json:
                    console.write_json(report.as_dict())
                else:
                    calibration_view.show(report)


def _load(model: str, draft: str | None) -> tuple[LoadedModel, LoadedModel | None, Sampling]:
    """Target and draft, or the draft that the catalogue has for the target, and how the target is sampled by default.
    """
    shown = all(is_here(name) for name in (model, draft) if name not in (None, "none"))
    with console.loading(model, shown=shown):
        from mlx_spec.loading import loader

        source = loader.resolve(model)
        if draft is None and source.entry is not None:
            draft = source.entry.draft
        draft_source = None if draft in (None, "none") else loader.resolve(draft)  # before the large one is read
        sampling = Sampling() if source.entry is None else source.entry.sampling
        return loader.load(source), loader.load(draft_source) if draft_source else None, sampling


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """What to call with what is done next. Shown on a terminal only, and clears itself."""
    if console.is_plain(sys.stderr):
        yield lambda what: None
        return
    from rich.console import Console
    from rich.markup import escape

    with Console(stderr=True, highlight=False).status("measuring") as status:
        yield lambda what: status.update(f"measuring, {escape(what)}")
