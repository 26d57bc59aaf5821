"""A stand-in for the runtime whose speeds are known. Imports little: processes of their own begin with it."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

from mlx_spec.errors import BadConfig, MLXSpecError
from mlx_spec.llm.completion import Completion
from mlx_spec.llm.statistics import Drafted, Statistics
from mlx_spec.settings import KVConfig, Sampling, Speculation

TARGET_BYTES, DRAFT_BYTES = 8_000_000_000, 1_000_000_000
SPEEDS = {"plain": 10.0, "K=3": 20.0, "K=5": 15.0, "auto": 25.0, "lookup": 12.5, "hybrid": 30.0}


def statistics(
    *, tokens: int = 20, passes: int = 20, seconds: float = 2.0, by_drafter: dict[str, Drafted] | None = None,
    positions: list[tuple[int, int]] | None = None, parked: int = 0, seed: int = 0, drafter: str = "hybrid",
) -> Statistics:
    by_drafter = by_drafter or {}
    return Statistics(
        prompt_tokens=7, completion_tokens=tokens, target_passes=passes,
        drafted=sum(entry.drafted for entry in by_drafter.values()),
        accepted=sum(entry.accepted for entry in by_drafter.values()),
        drafter=drafter, draft_tokens="auto", verification="block", by_drafter=by_drafter,
        passes_by_draft_tokens={0: passes}, accepted_by_position=positions or [], parked_passes=parked,
        prefill_seconds=1.0, decode_seconds=seconds, kv_bytes=1, peak_memory_bytes=2,
        seed=seed,
    )  # fmt: skip


class _Closed:
    def close(self) -> None:
        pass


class FakeLLM:
    """Decodes at SPEEDS while the machine slows down by 1% of the first speed with each generation."""

    def __init__(self, name: str, draft: str | bool | None) -> None:
        self.name = name
        self.draft_name = None if draft is False or (draft is None and name == "alone") else "small"
        self.sampling, self.kv = Sampling(top_p=0.9), KVConfig("int8")
        self.speculation = Speculation(verification="token", most_draft_tokens=9)
        self.bytes_per_pass = TARGET_BYTES, DRAFT_BYTES if self.draft_name else 0
        self.calls: list[dict[str, Any]] = []
        self.drafts_by = {"none": "none", "model": "model", "lookup": "lookup", "hybrid": "hybrid"}
        if name == "plainly":
            self.drafts_by = dict.fromkeys(self.drafts_by, "none")
        elif name == "badly":
            self.drafts_by |= {"model": "none", "hybrid": "lookup"}

    def stream(self, prompt: str, *, max_tokens: int) -> _Closed:
        if "endless" in prompt:
            raise BadConfig("the prompt has 9 tokens and fake takes 8 at most; shorten it.")
        return _Closed()

    def generate(self, prompt: str, *, sampling: Sampling, speculation: Speculation, max_tokens: int) -> Completion:
        way = self._way(speculation)
        self.calls.append({"prompt": prompt, "way": way, "sampling": sampling, "speculation": speculation,
                           "max_tokens": max_tokens})  # fmt: skip
        logging.getLogger("mlx_spec").warning("the same note each time")
        if prompt == "stop here" and way == "lookup":
            raise KeyboardInterrupt
        if prompt == "fail here" and way == "lookup":
            raise MLXSpecError("the model's logits are no numbers.")
        if prompt == "hang here" and way == "lookup":
            print("ready", file=sys.stderr, flush=True)
            time.sleep(60)
        speed = SPEEDS[way] * (1 - 0.001 * len(self.calls))
        drafted = {"model": Drafted(10, 30, 15)} if way not in ("plain", "lookup") else {}
        figures = statistics(seconds=20 / speed, by_drafter=drafted, positions=[(10, 9), (9, 6)] if drafted else [],
                             seed=sampling.seed or 0, drafter=self.drafts_by[speculation.drafter or ""])  # fmt: skip
        return Completion("", [1], None, "length", figures)

    def _way(self, speculation: Speculation) -> str:
        if speculation.plain:
            return "plain"
        if speculation.draft_tokens != "auto":
            assert speculation.drafter == "model"
            return f"K={speculation.draft_tokens}"
        assert speculation.drafter is not None
        return speculation.drafter if speculation.drafter != "model" else "auto"


def fake_load(model: str, draft: str | bool | None = None, kv: Any = None) -> FakeLLM:
    return FakeLLM(model, draft)
