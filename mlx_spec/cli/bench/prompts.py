"""What is asked in a benchmark: the built-in prompts, written for this project. Plain text; knows nothing of models.

Six kinds, since what a drafter gains depends on the text: in `edit` and `summary` much of the answer stands in the
prompt already, `json` repeats its own keys, `code` is predictable line by line, `chat` and `reasoning` are not.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class BenchPrompt:
    """One prompt: a user turn, or plain text for a model without a chat template."""

    kind: str
    name: str
    """Unique in a set: says which one it is in errors and results."""
    text: str


KINDS = ("code", "edit", "json", "summary", "chat", "reasoning")

WARM_UP = "Name the days of the week, one a line."
"""Asked before anything is measured; of no kind."""


def _built_in(kind: str, number: int) -> BenchPrompt:
    name = f"{kind}-{number}"
    return BenchPrompt(kind, name, (Path(__file__).parent / "texts" / f"{name}.txt").read_bytes().decode())


PROMPTS = tuple(_built_in(kind, number) for kind in KINDS for number in (1, 2))
"""Two of each kind."""
