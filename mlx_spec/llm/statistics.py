"""What one generation cost. Plain numbers; knows nothing of how they were measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Drafted:
    """What came of one drafter's tokens."""

    passes: int
    """Target passes over them."""
    drafted: int
    accepted: int


@dataclass(frozen=True)
class Statistics:
    """The figures of one generation."""

    prompt_tokens: int
    completion_tokens: int
    """Tokens emitted, an end token included."""
    target_passes: int
    """Passes of the target after the prompt."""
    drafted: int
    """Tokens that were proposed to the target."""
    accepted: int
    """Proposed tokens the target accepted, also those that a stop cut off again."""
    drafter: str
    """Who might draft: "model", "lookup", "hybrid" or "none"."""
    draft_tokens: int | Literal["auto"]
    """K as it was asked for."""
    verification: str
    by_drafter: dict[str, Drafted]
    """Of "model" and "lookup", those that drafted."""
    passes_by_draft_tokens: dict[int, int]
    """How many target passes had so many drafted tokens; 0 is a plain pass."""
    accepted_by_position: list[tuple[int, int]]
    """For the first, second, ... drafted token of a pass: how often it was reached, all before it having been accepted,
    and how often it was accepted then."""
    parked_passes: int
    """Plain passes because speculation could not win."""
    prefill_seconds: float
    """Reading the prompt, with both models."""
    decode_seconds: float
    """From the prompt's end to the last token, including what the caller takes with each chunk."""
    kv_bytes: int
    """Allocated for keys and values of both models, at the end."""
    peak_memory_bytes: int
    """Largest allocation of MLX during the generation, weights included."""
    seed: int

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted per drafted token; None if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def tokens_per_pass(self) -> float | None:
        """Completion tokens per target pass; None without a pass."""
        return self.completion_tokens / self.target_passes if self.target_passes else None

    @property
    def tokens_per_second(self) -> float | None:
        """Completion tokens per second of decoding; None without any."""
        return self.completion_tokens / self.decode_seconds if self.completion_tokens and self.decode_seconds else None

    def as_dict(self) -> dict[str, Any]:
        """All figures, derived ones included."""
        return asdict(self) | {
            "acceptance_rate": self.acceptance_rate,
            "tokens_per_pass": self.tokens_per_pass,
            "tokens_per_second": self.tokens_per_second,
        }
