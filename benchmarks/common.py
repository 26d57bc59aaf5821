"""What the benchmarks share: the machine and versions a figure belongs to, and how results are written."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """The machine and versions of a run."""
    information = mx.device_info()
    return {
        "date": date.today().isoformat(),
        "device": f"{mx.default_device()}",
        "processor": information.get("device_name", platform.processor()),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "mlx": version("mlx"),
        "mlx-lm": version("mlx-lm"),
        "mlx-spec": version("mlx-spec"),
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def save(name: str, results: dict[str, Any], where: Path | None) -> None:
    """Write results, with machine and command line, as JSON."""
    path = where or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    command = f"python benchmarks/{Path(sys.argv[0]).name}"
    # Models are named by their directories; where those are on this machine, and where this goes, is nobody's concern.
    given = sys.argv[1:]
    arguments = [
        Path(argument).name if Path(argument).is_absolute() else argument
        for before, argument in zip(["", *given], given, strict=False)
        if "--output" not in (before, argument)
    ]
    document = {"command": " ".join([command, *arguments]), "machine": machine(), **results}
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"written: {path.name}", file=sys.stderr)
