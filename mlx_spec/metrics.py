"""What one generation cost. Plain numbers; knows nothing of how they were measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Statistics:
    """The figures of one generation."""

    prompt_tokens: int
    completion_tokens: int
    """Tokens emitted, an end token included."""
    target_passes: int
    """Passes of the target after the prompt."""
    drafted: int
    """Tokens the draft proposed."""
    accepted: int
    """Proposed tokens the target accepted, also those that a stop cut off again."""
    prefill_seconds: float
    """Reading the prompt, with both models."""
    decode_seconds: float
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
