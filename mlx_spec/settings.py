"""What a caller may set, as frozen dataclasses that check themselves. Knows nothing of models or files."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Literal

from mlx_spec.errors import BadConfig

_LARGEST = 1e9  # far beyond any use; float32 arithmetic on it stays finite


def _require(condition: bool, name: str, value: object, accepted: str) -> None:
    if not condition:
        raise BadConfig(f"{name} is {value!r}; give {accepted}.", setting=name)


def _number(kind: Any, inside: Callable[[Any], bool], name: str, value: Any, accepted: str) -> Any:
    """`value` as a number of Python's own; kind: `Real` or `Integral`, whatever type that is of."""
    if not isinstance(value, kind) or isinstance(value, bool):
        what = "number" if kind is Real else "whole number"
        raise BadConfig(f"{name} is {value!r}, which is no {what}; give {accepted}.", setting=name)
    number = int(value) if isinstance(value, Integral) else float(value)
    _require(inside(number), name, value, accepted)
    return number


def _settle(settings: object, kind: Any, inside: Callable[[Any], bool], name: str, accepted: str) -> None:
    """Check a field of frozen settings, and keep it as a number of Python's own."""
    object.__setattr__(settings, name, _number(kind, inside, name, getattr(settings, name), accepted))


def _require_one_of(accepted: tuple[str, ...], name: str, value: object) -> None:
    _require(value in accepted, name, value, f"{', '.join(accepted[:-1])} or {accepted[-1]}")


def token_id(value: Any) -> int | None:
    """`value` as a token id, whichever type of whole number it is; None if it is none."""
    try:
        index = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None
    return index if index is not None and index >= 0 else None


class _Biases(dict[int, float]):
    """A dict that nobody changes, and that can be hashed."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> Any:
        return _Biases, (dict(self),)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError("settings do not change; make others with dataclasses.replace")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse


@dataclass(frozen=True)
class Sampling:
    """How logits become the distribution a token is drawn from; see `mlx_spec.decoding.sampling.distribution`.

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
    """The same seed gives the same output; None draws a new one per request. `max_tokens` does not change how an
    answer begins, but with `draft_tokens` "auto" and in the last K tokens before the context's end, where it drafts
    less."""
    top_logprobs: int | None = None
    """Report each token's log-probability and those of the n likeliest tokens; None reports nothing."""

    def __post_init__(self) -> None:
        _settle(self, Real, lambda t: 0 <= t <= _LARGEST, "temperature", "0 (greedy) to 1e9")
        _settle(self, Integral, lambda k: k >= 0, "top_k", "0 (off) or more")
        _settle(self, Real, lambda p: 0 < p <= 1, "top_p", "more than 0 and at most 1 (off)")
        _settle(self, Real, lambda p: 0 <= p <= 1, "min_p", "0 (off) to 1")
        _settle(self, Real, lambda x: 1 / _LARGEST <= x <= _LARGEST, "repetition_penalty", "1e-9 to 1e9; 1 is off")
        for name in ("presence_penalty", "frequency_penalty"):
            _settle(self, Real, lambda x: abs(x) <= _LARGEST, name, "-1e9 to 1e9; 0 is off")
        _require(isinstance(self.logit_bias, Mapping), "logit_bias", self.logit_bias, "a mapping of ids to numbers")
        object.__setattr__(self, "logit_bias", _Biases(
            (_number(Integral, lambda n: n >= 0, "logit_bias", token, "token ids of 0 or more"),
             _number(Real, lambda x: x == -math.inf or abs(x) <= _LARGEST, "logit_bias", bias, "-1e9 to 1e9, or -inf"))
            for token, bias in self.logit_bias.items()
        ))  # fmt: skip
        if self.seed is not None:
            _settle(self, Integral, lambda n: 0 <= n < 2**64, "seed", "0 to 2**64 - 1")
        if self.top_logprobs is not None:
            _settle(self, Integral, lambda n: 0 <= n <= 100, "top_logprobs", "0 to 100")

    @property
    def penalises(self) -> bool:
        """Whether the distribution depends on which tokens came before."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


MODEL, LOOKUP, HYBRID, NO_DRAFTER = "model", "lookup", "hybrid", "none"
DRAFTERS = (MODEL, LOOKUP, HYBRID, NO_DRAFTER)
"""Those of `Speculation.drafter`. The first two are also the names of single drafters, as in statistics."""
VERIFICATIONS = ("token", "block")
MOST_DRAFT_TOKENS = 64
"""K is never more."""
MOST_AUTO_DRAFT_TOKENS = 15
"""K "auto" is never more: as far as passes are measured."""


@dataclass(frozen=True)
class Speculation:
    """Who drafts, how far ahead, and how the target decides."""

    draft_tokens: int | Literal["auto"] = "auto"
    """K: tokens drafted per target pass; 0 is plain decoding. "auto" picks K for each pass from what passes cost on
    this machine and from what was accepted so far in this request."""
    drafter: str | None = None
    """"model": the draft model; "lookup": what followed the same tokens earlier in prompt and answer, at no cost
    (Saxena 2023, prompt lookup decoding); "hybrid": lookup where it finds enough, else the model; "none": plain
    decoding. None is hybrid with a draft model and lookup without."""
    verification: str = "block"
    """"token": accept drafted tokens one after the other (Leviathan et al. 2023); "block": together, never fewer on
    average (Sun et al. 2024). Both leave the target's distribution as it is."""
    most_draft_tokens: int = MOST_AUTO_DRAFT_TOKENS
    """What K "auto" never exceeds."""

    def __post_init__(self) -> None:
        most = MOST_DRAFT_TOKENS
        if self.draft_tokens != "auto":
            _settle(self, Integral, lambda k: 0 <= k <= most, "draft_tokens", f"0 (no speculation) to {most}, or auto")
        if self.drafter is not None:
            _require_one_of(DRAFTERS, "drafter", self.drafter)
        _require_one_of(VERIFICATIONS, "verification", self.verification)
        most = MOST_AUTO_DRAFT_TOKENS
        _settle(self, Integral, lambda k: 1 <= k <= most, "most_draft_tokens", f"1 to {most}")

    @property
    def plain(self) -> bool:
        """Whether nothing is to be drafted."""
        return self.draft_tokens == 0 or self.drafter == NO_DRAFTER


STORAGES = ("model", "int8")


@dataclass(frozen=True)
class KVConfig:
    """How keys and values are kept."""

    storage: str = "model"
    """The target's: "model" is the type the model computes in, usually 16 bits; "int8" is half of that."""
    draft_storage: str = "model"
    """The draft's, likewise; INT8 there costs acceptance and saves little."""
    window: int | None = None
    """Each token sees this many before it, itself included, and the sinks; None sees everything. With a window, memory
    is constant and an answer may be longer than the model's context (Xiao et al. 2024)."""
    sinks: int | Literal["system"] | None = None
    """Tokens at the beginning that are always seen beside a window; "system" is the whole system prompt, None is
    `DEFAULT_SINKS`. Without a window everything is seen, and a number of sinks is refused."""

    def __post_init__(self) -> None:
        for name in ("storage", "draft_storage"):
            _require_one_of(STORAGES, name, getattr(self, name))
        if self.sinks is not None and self.sinks != "system":
            _settle(self, Integral, lambda n: 0 <= n <= 65536, "sinks", "0 to 65536, or system")
        if self.window is None:
            if self.sinks is not None:
                raise BadConfig(
                    f"sinks is {self.sinks!r}, which says what stays visible beside a window; give a window too, such "
                    "as 4096, or no sinks.", setting="sinks",
                )  # fmt: skip
        else:
            least = max(SMALLEST_WINDOW, self.sinks) if isinstance(self.sinks, int) else SMALLEST_WINDOW
            _settle(self, Integral, lambda n: n >= least, "window",
                    f"at least {least}: more than a round of drafts, and no fewer than the sinks")

    @property
    def visible_sinks(self) -> int | Literal["system"]:
        """`sinks`, with what None stands for."""
        return DEFAULT_SINKS if self.sinks is None else self.sinks


DEFAULT_SINKS = 4
"""As many as the paper needs for a stream to stay fluent."""

SMALLEST_WINDOW = MOST_DRAFT_TOKENS + 1
"""Positions of the longest round: the drafts and the token before them."""
