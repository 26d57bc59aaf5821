"""Who drafts for a request, and by which schedule. Knows the draft model and what was asked for; nothing of prompts."""

from __future__ import annotations

import functools
import logging

from mlx_spec.architectures.context import Context, LanguageModel
from mlx_spec.calibration.calibrations import Calibrations
from mlx_spec.calibration.learner import Learner
from mlx_spec.decoding.drafters.draft_model import DraftModel
from mlx_spec.decoding.drafters.lookup import Lookup
from mlx_spec.decoding.drafting import Drafting
from mlx_spec.decoding.schedule.costs import Costs
from mlx_spec.decoding.schedule.schedule import AutoSchedule, Drafter, FixedSchedule
from mlx_spec.decoding.verification import verify_block, verify_tokenwise
from mlx_spec.errors import BadConfig
from mlx_spec.settings import SMALLEST_WINDOW, Sampling, Speculation

_log = logging.getLogger("mlx_spec")
_VERIFY = {"token": verify_tokenwise, "block": verify_block}


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
        calibrations: Calibrations,
    ) -> None:
        """draft_name: that of the draft that was loaded, whether it can be used or not."""
        self._target, self._draft, self._draft_name = target, draft, draft_name
        self._draft_context_length, self._window = draft_context_length, window
        self._calibrations = calibrations
        self._told = False

    def chosen(self, speculation: Speculation) -> str:
        """The drafter that `speculation` means. Raises BadConfig where that is a draft model and none was loaded."""
        drafter = speculation.drafter
        if speculation.plain:
            return "none"
        if drafter in ("model", "hybrid") and self._draft_name is None:
            raise BadConfig(
                f"drafter is {drafter!r}, and no draft model is loaded; name one (--draft, load(model, draft=)), or "
                "use the drafter lookup.", setting="drafter",
            )  # fmt: skip
        if self._target.rewind_obstacle:
            asked = drafter is not None or speculation.draft_tokens != "auto"
            if asked and self._draft_name is None and not self._told:  # with a draft it was said when that was loaded
                self._told = True
                _log.warning(f"no speculation, plain decoding: the target {self._target.rewind_obstacle}")
            return "none"
        if self._draft is None:  # none at all, or one that cannot take tokens back
            return "none" if drafter == "model" else "lookup"
        return drafter or "hybrid"

    def start(
        self, drafter: str, verification: str, sampling: Sampling, sinks: int, vocabulary_size: int
    ) -> Drafting | None:
        """For one generation, without a schedule yet; None for plain decoding."""
        model = self._draft_model(sampling, sinks, vocabulary_size) if drafter in ("model", "hybrid") else None
        lookup = Lookup() if drafter in ("lookup", "hybrid") else None
        if model is None and lookup is None:
            return None
        return Drafting(model=model, lookup=lookup, verify=_VERIFY[verification])

    def schedule(self, drafting: Drafting, speculation: Speculation, sampling: Sampling, target: Context) -> None:
        """Give `drafting`, whose prompt has been read, its schedule."""
        if speculation.draft_tokens != "auto":
            drafting.schedule = FixedSchedule(speculation.draft_tokens)
            return
        learner = self._calibrations.learner(
            sampling, target.vocabulary_size, drafting=drafting.model is not None
        )
        costs = learner.costs(target.length)
        if costs.target:
            drafters: list[Drafter] = ["lookup"] if drafting.lookup is not None else []
            if drafting.model is not None:
                drafters.append("model")
            drafting.schedule = schedule = AutoSchedule(
                costs, speculation.most_draft_tokens, drafters=drafters, stops_early=_chained_as(drafting, costs)
            )
            drafting.grown = functools.partial(self._reprice, drafting, schedule, learner)

    def _reprice(self, drafting: Drafting, schedule: AutoSchedule, learner: Learner, length: int) -> None:
        if (costs := learner.costs(length)).most_rows > 1:
            schedule.reprice(costs, stops_early=_chained_as(drafting, costs))

    def _draft_model(self, sampling: Sampling, sinks: int, vocabulary_size: int) -> DraftModel | None:
        assert self._draft is not None
        window, limit = self._window, self._draft_context_length
        if window is not None and limit is not None:  # what the draft sees is its own affair
            window = min(window, limit - sinks)
            if window < SMALLEST_WINDOW:
                _log.warning(
                    f"the draft's context of {limit} tokens has no room for {sinks} sinks and {SMALLEST_WINDOW} more: "
                    "no drafts by it"
                )
                return None
            limit = None
        return DraftModel(self._draft.new_context(sinks, window), sampling, vocabulary_size, limit)


def _chained_as(drafting: Drafting, costs: Costs) -> bool:
    """Have the draft model's steps follow one another in the way that was faster. Whether it can stop early: where
    waiting for each token costs nothing, it can be asked how sure it is."""
    lazily = costs.draft_chained
    if drafting.model is not None:
        # What is cheap now may not be so once the draft's cache has grown.
        drafting.model.lazily = None if lazily and drafting.model.context.chains_cheaply else lazily
    drafting.stops_early = not lazily
    return drafting.stops_early
