"""What a caller may set, as frozen dataclasses that check themselves. Knows nothing of models or files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from mlx_spec.errors import BadConfig

_LARGEST = 1e9  # far beyond any use; float32 arithmetic on it stays finite


def _require(condition: bool, name: str, value: object, accepted: str) -> None:
    if not condition:
        raise BadConfig(f"{name} is {value!r}; give {accepted}.")


@dataclass(frozen=True)
class Sampling:
    """How logits become the distribution a token is drawn from; see `mlx_spec.sampling.distribution`.

    The defaults are greedy decoding. Filters apply in the order of the fields; penalties see every committed
    token, the prompt included.
    """

    temperature: float = 0.0
    """0 is greedy; 1 is the model's own distribution."""
    top_k: int = 0
    """Keep the k likeliest tokens (ties at the last place are all kept); 0 keeps all."""
    top_p: float = 1.0
    """Keep the fewest tokens that together reach this probability (Holtzman et al. 2019); 1 keeps all."""
    min_p: float = 0.0
    """Drop tokens below this fraction of the likeliest one's probability; 0 drops none."""
    repetition_penalty: float = 1.0
    """Divide positive and multiply negative logits of seen tokens (Keskar et al. 2019); 1 does nothing."""
    presence_penalty: float = 0.0
    """Subtract this from the logit of every seen token."""
    frequency_penalty: float = 0.0
    """Subtract this from a token's logit for each time it was seen."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token id -> amount added to its logit."""
    seed: int | None = None
    """The same seed gives the same output; None draws a new one per request."""
    top_logprobs: int | None = None
    """Report each token's log-probability and those of the n likeliest tokens; None reports nothing."""

    def __post_init__(self) -> None:
        _require(0 <= self.temperature <= _LARGEST, "temperature", self.temperature, "0 (greedy) to 1e9")
        _require(self.top_k >= 0, "top_k", self.top_k, "0 (off) or more")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "more than 0 and at most 1 (off)")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "0 (off) to 1")
        _require(1 / _LARGEST <= self.repetition_penalty <= _LARGEST, "repetition_penalty",
                 self.repetition_penalty, "1e-9 to 1e9; 1 is off")
        for name in ("presence_penalty", "frequency_penalty"):
            _require(abs(getattr(self, name)) <= _LARGEST, name, getattr(self, name), "-1e9 to 1e9; 0 is off")
        for token, bias in self.logit_bias.items():
            _require(token >= 0, "logit_bias", token, "token ids of 0 or more")
            _require(bias == -math.inf or abs(bias) <= _LARGEST, "logit_bias", bias, "-1e9 to 1e9, or -inf")
        _require(self.seed is None or 0 <= self.seed < 2**64, "seed", self.seed, "0 to 2**64 - 1")
        _require(self.top_logprobs is None or 0 <= self.top_logprobs <= 100, "top_logprobs", self.top_logprobs,
                 "0 to 100")

    @property
    def penalises(self) -> bool:
        """Whether the distribution depends on which tokens came before."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True)
class Speculation:
    """How far the draft runs ahead."""

    draft_tokens: int = 3
    """K: tokens drafted per target pass; 0 is plain decoding."""

    def __post_init__(self) -> None:
        _require(0 <= self.draft_tokens <= 64, "draft_tokens", self.draft_tokens, "0 (no speculation) to 64")
