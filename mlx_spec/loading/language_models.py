"""From loaded models to what makes contexts: how each keeps its keys and values, and whether the draft can be used.
Knows nothing of prompts and rounds."""

from __future__ import annotations

import logging

from mlx_spec.architectures.context import LanguageModel
from mlx_spec.architectures.definitions import NATIVE, Decoder
from mlx_spec.architectures.external import ExternalModel
from mlx_spec.architectures.paged import PagedModel
from mlx_spec.attention.choosing import prepare
from mlx_spec.attention.window import IN_PASSING
from mlx_spec.errors import BadConfig
from mlx_spec.kv import PAGE
from mlx_spec.loading.loader import LoadedModel, check_pair
from mlx_spec.loading.tokenizer import Tokenizer
from mlx_spec.settings import KVConfig

_log = logging.getLogger("mlx_spec")

_SAMPLE_TEXT = (
    "The harbour was quiet that morning. Three boats lay at the quay, and a man in a blue coat was counting crates: "
    '12, 18, 25. He wrote each number down, then said: "Two are missing."\n\n'
    "def total(crates: list[int]) -> int:\n    return sum(crates)\n\n"
    "Nobody answered; only the gulls, who had seen it all before, went on with their breakfast."
)


def sample_tokens(tokenizer: Tokenizer) -> list[int]:
    """What INT8 takes the divisors of its keys from (`PagedModel.take_divisors`): a page of ordinary text, always the
    same, so that answers do not depend on what was asked before."""
    return tokenizer.encode(_SAMPLE_TEXT)[:PAGE]


def language_models(
    target: LoadedModel, draft: LoadedModel | None, kv: KVConfig
) -> tuple[LanguageModel, LanguageModel | None]:
    """Target and draft, ready to make contexts. No draft where none is given or the two cannot speculate, which is
    logged.

    Raises IncompatiblePair if the draft's ids mean other strings than the target's, and BadConfig if a model cannot
    keep its keys and values as `kv` says.
    """
    large = _language_model(target, kv.storage, kv.window)
    small = None
    if draft is not None:
        small = _language_model(draft, kv.draft_storage, kv.window)
        for warning in check_pair(target, draft):
            _log.warning(warning)
        if large.rewind_obstacle:
            _log.warning(f"no speculation, plain decoding: the target {large.rewind_obstacle}")
            small = None
        elif small.rewind_obstacle:
            _log.warning(f"no drafts by this draft model: it {small.rewind_obstacle}")
            small = None
    for model, loaded in ((large, target), (small, draft)):
        if isinstance(model, PagedModel) and loaded is not None:
            longest = _longest(loaded, kv)
            arguments, rotary = model.module.arguments, model.module.rotary
            prepare(model.pool, arguments.heads, rotary, window=kv.window is not None, length=longest)
            model.take_divisors(sample_tokens(target.tokenizer))
    return large, small


def _longest(loaded: LoadedModel, kv: KVConfig) -> int | None:
    """Positions that a sequence holds at most; None if that is open."""
    if kv.window is None:
        return loaded.context_length
    sinks = kv.visible_sinks
    return None if sinks == "system" else sinks + kv.window + IN_PASSING


def _language_model(loaded: LoadedModel, storage: str, window: int | None) -> LanguageModel:
    if isinstance(loaded.module, Decoder):
        return PagedModel(loaded.module, int8=storage == "int8")
    model = ExternalModel(loaded.module)
    if storage != "model" or window is not None:
        raise BadConfig(
            f"{loaded.name} {model.paging_obstacle}: no INT8 and no window there. The architectures that have both are "
            f"{', '.join(NATIVE)}; leave --kv, --draft-kv, --sinks and --window out."
        )
    return model
