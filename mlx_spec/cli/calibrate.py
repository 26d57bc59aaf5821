"""`mlx-spec calibrate`: measures what passes of a pair cost on this machine. Knows the options and what comes after
what; measures and draws nothing itself."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from mlx_spec.cli import calibration_view, console, options
from mlx_spec.cli.model_options import check_models, kv_config, loading, note_no_draft
from mlx_spec.cli.options import OUTPUT, option
from mlx_spec.cli.outcome import TracebackOption
from mlx_spec.cli.progress import progress
from mlx_spec.settings import Sampling

HELP = (
    "Measure what passes of a model and its draft cost on this machine, which -k auto goes by.\n\n"
    "Takes about ten seconds for each of three context lengths, more where a pass takes long, and is remembered in "
    "your cache folder until chip, system, MLX, model or memory settings change. Without it, the first "
    "answers are the measurement: they are decoded plainly until their own rounds have told what passes cost."
)


def calibrate(
    model: options.Model = None,
    draft: options.Draft = None,
    storage: options.Storage = None,
    draft_storage: options.DraftStorage = None,
    window: options.Window = None,
    sinks: options.Sinks = None,
    as_json: Annotated[bool, option(
        "--json", panel=OUTPUT, help="Write one JSON object, times in seconds, instead of tables.")] = False,
    traceback: TracebackOption = False,
) -> None:
    """Measures and shows; see HELP."""
    name = check_models(model, draft)
    kv = kv_config(name, storage=storage, draft_storage=draft_storage, window=window, sinks=sinks)
    with console.notes(shown=True):
        with loading(name, draft) as wanted:
            from mlx_spec.loading.loader import load_pair

            target, small, entry = load_pair(name, wanted)
        if small is None:
            note_no_draft({"--draft-kv": draft_storage})
        sampling = entry.sampling if entry else Sampling()
        from mlx_spec.calibration import calibrations as calibration
        from mlx_spec.calibration.timing import active_filters
        from mlx_spec.machine import remembered

        found = calibration_view.Measured(
            remembered.machine(), target.name, small.name if small else None, dataclasses.asdict(kv),
            active_filters(sampling),
        )
        try:
            with progress("measuring") as tell:
                for result in calibration.calibrate(
                    target, small, kv, sampling=sampling, progress=lambda what: tell(f"measuring, {what}", 0, 0)
                ):
                    if isinstance(result, calibration.LeftOut):
                        found.left_out.append(result)
                    else:
                        found.calibrations.append(result)
            found.complete = True
        finally:
            # Also after Ctrl-C: what was measured until then is remembered, and so shown.
            if found.calibrations or found.left_out:
                if as_json:
                    console.write_json(found.as_dict())
                else:
                    calibration_view.show(found)
