"""Who can draft for one target, and what a request asks of them becomes a `Drafting`. The place that knows the kinds of
drafters; nothing of prompts, nor of what passes cost."""

from __future__ import annotations

import logging
from collections.abc import Callable

from mlx_spec.architectures.context import LanguageModel
from mlx_spec.decoding.drafters.draft_model import DraftModel, draft_context
from mlx_spec.decoding.drafters.lookup import Lookup
from mlx_spec.decoding.drafters.protocol import Drafter
from mlx_spec.decoding.drafting import Drafting
from mlx_spec.decoding.schedule.automatic import AutoSchedule
from mlx_spec.decoding.schedule.costs import Costs
from mlx_spec.decoding.schedule.learning import CostLearner
from mlx_spec.decoding.schedule.schedule import FixedSchedule
from mlx_spec.decoding.verification import verify_block, verify_tokenwise
from mlx_spec.errors import BadConfig
from mlx_spec.settings import HYBRID, LOOKUP, MODEL, NO_DRAFTER, SMALLEST_WINDOW, Sampling, Speculation

_log = logging.getLogger("mlx_spec")
_VERIFY = {"token": verify_tokenwise, "block": verify_block}
_NOTHING = Costs((), None)


class Drafters:
    """What can draft for one target: a draft model, if there is one that works, and lookup where tokens can be taken
    back."""

    def __init__(
        self,
        target: LanguageModel,
        draft: LanguageModel | None,
        *,
        draft_name: str | None,
        draft_context_length: int | None,
        window: int | None,
    ) -> None:
        """draft_name: that of the draft that was loaded, whether it can be used or not. window: the target's."""
        self._target, self._draft, self._draft_name = target, draft, draft_name
        self._draft_context_length, self._window = draft_context_length, window
        self._told = False

    def chosen(self, speculation: Speculation) -> str:
        """The drafter that `speculation` means. Raises BadConfig where that is a draft model and none was loaded."""
        drafter = speculation.drafter
        if speculation.plain:
            return NO_DRAFTER
        if drafter in (MODEL, HYBRID) and self._draft_name is None:
            raise BadConfig(
                f"drafter is {drafter!r}, and no draft model is loaded; name one (--draft, load(model, draft=)), or "
                "use the drafter lookup.", setting="drafter",
            )  # fmt: skip
        if self._target.rewind_obstacle:
            asked = drafter is not None or speculation.draft_tokens != "auto"
            if asked and self._draft_name is None and not self._told:  # with a draft it was said when that was loaded
                self._told = True
                _log.warning(f"no speculation, plain decoding: the target {self._target.rewind_obstacle}")
            return NO_DRAFTER
        if self._draft is None:  # none at all, or one that cannot take tokens back
            return NO_DRAFTER if drafter == MODEL else LOOKUP
        return drafter or HYBRID

    def drafting(
        self,
        drafter: str,
        speculation: Speculation,
        sampling: Sampling,
        sinks: int,
        vocabulary_size: int,
        learner: Callable[[bool], CostLearner],
    ) -> Drafting | None:
        """For one request, whose prompt is yet to be read; None for plain decoding.

        drafter: what `chosen` said. learner: asked only where K is to go by costs, for those of passes of the target
        alone or (True) of a draft model too.
        """
        drafters: list[Drafter] = []
        if drafter in (LOOKUP, HYBRID):
            drafters.append(Lookup(vocabulary_size))
        model = self._draft_model(sampling, sinks, vocabulary_size) if drafter in (MODEL, HYBRID) else None
        if model is not None:
            drafters.append(model)
        if not drafters:
            return None
        verify = _VERIFY[speculation.verification]
        if speculation.draft_tokens != "auto":
            return Drafting(drafters, FixedSchedule(speculation.draft_tokens), verify=verify)
        # What is known is asked for when the length of the prompt is.
        schedule = AutoSchedule(_NOTHING, speculation.most_draft_tokens, [drafter.outlook for drafter in drafters])
        return Drafting(drafters, schedule, verify=verify, learner=learner(model is not None))

    def _draft_model(self, sampling: Sampling, sinks: int, vocabulary_size: int) -> DraftModel | None:
        assert self._draft is not None
        limit = self._draft_context_length
        context = draft_context(self._draft, limit, sinks, self._window)
        if context is None:
            _log.warning(
                f"the draft's context of {limit} tokens has no room for {sinks} sinks and {SMALLEST_WINDOW} more: "
                "no drafts by it"
            )
            return None
        return DraftModel(context, sampling, vocabulary_size, limit if self._window is None else None)
