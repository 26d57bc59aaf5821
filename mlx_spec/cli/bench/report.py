"""Everything one benchmark found, as one value. Knows no models and measures nothing."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from mlx_spec.cli.bench.figures import WayFigures, figures_of
from mlx_spec.cli.bench.runs import Run
from mlx_spec.machine.bandwidth import Bandwidth
from mlx_spec.settings import KVConfig, Sampling


@dataclass
class Report:
    """Grows with each run, until it is complete."""

    model: str
    draft: str | None
    sampling: Sampling
    kv: KVConfig
    max_tokens: int
    repeats: int
    prompts: int
    planned_runs: int
    bytes_per_pass: tuple[int | None, int | None]
    """Of weights, of target and draft; None where a pass reads some of them only."""
    bandwidth: Bandwidth
    runs: list[Run] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return len(self.runs) == self.planned_runs

    @property
    def heading(self) -> str:
        """What was measured, in a line."""
        pair = self.model if self.draft is None else f"{self.model} with {self.draft}"
        settings = [f"temperature {self.sampling.temperature:g}"]
        settings += [f"{name} {value}" for name, value in dataclasses.asdict(self.kv).items()
                     if value != getattr(KVConfig(), name)]  # fmt: skip
        return f"{pair}, {', '.join(settings)}, answers of {self.max_tokens} tokens at most"

    @property
    def kinds(self) -> list[str]:
        """Those with figures, in the order of their prompts."""
        return list(dict.fromkeys(kind for way in self.figures() for kind in way.ratio_to_plain_by_kind))

    def figures(self) -> list[WayFigures]:
        return figures_of(self.runs, *self.bytes_per_pass)

    def share_of_bandwidth(self, figures: WayFigures) -> float | None:
        read = figures.weights_read_per_second
        return None if read is None else read / self.bandwidth.bytes_per_second

    def as_dict(self, machine: dict[str, Any]) -> dict[str, Any]:
        """For JSON. machine: what the figures belong to."""
        described = dataclasses.asdict(self)
        return described | {
            "complete": self.complete,
            "machine": machine,
            "bytes_per_pass": dict(zip(("target", "draft"), self.bytes_per_pass, strict=True)),
            "bandwidth": described["bandwidth"] | {"how": self.bandwidth.how},
            "ways": [
                dataclasses.asdict(figures) | {"share_of_bandwidth": self.share_of_bandwidth(figures)}
                for figures in self.figures()
            ],
            "runs": [run.as_dict() for run in self.runs],
        }
