"""What passes of a pair cost on this machine: measured once, remembered, and measured shortly inside the first request
where it is not known. Knows models and settings; how passes are timed is `measurement`'s affair."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_spec.architectures.context import Context, LanguageModel, prefill
from mlx_spec.architectures.paged import PagedContext
from mlx_spec.attention.window import sinks_of
from mlx_spec.calibration import timing as measurement
from mlx_spec.calibration.record import Calibration
from mlx_spec.calibration.timing import GREEDY, ROOM, Progress
from mlx_spec.errors import BadConfig, DoesNotFit
from mlx_spec.loading.language_models import calibration_tokens, language_models
from mlx_spec.loading.loader import LoadedModel
from mlx_spec.machine import remembered
from mlx_spec.machine.memory import check_cache_fits, wired_limit
from mlx_spec.settings import DEFAULT_SINKS, SMALLEST_WINDOW, KVConfig, Sampling

__all__ = ["Calibration", "Calibrations", "LeftOut", "Store", "calibrate", "store"]

LENGTHS = (256, 2048, 8192)
"""Tokens of the texts after which `calibrate` measures."""
_STANDING_FOR_ALL = (*LENGTHS, 32768, 131072)
_SECTION = "passes"
_REQUEST_SECONDS = 2.0
"""Enough for passes of a 70B on a Mac over up to 8 rows; a model that is fast there takes a fraction of it."""
_LENGTH_SECONDS = 10.0
_READ = 64
"""Tokens that are really read before measuring. Passes take as long after positions that hold anything else."""
_READING_SECONDS = 20.0
_STEP = 512
_logger = logging.getLogger("mlx_spec")


class Store:
    """Calibrations by key, among what is remembered of this machine. Unusable ones count as unknown, which is said
    once."""

    def __init__(self, memory: remembered.Remembered) -> None:
        self._memory = memory
        self._told = False

    def get(self, key: str) -> Calibration | None:
        value = self._memory.get(_SECTION, key)
        calibration = Calibration.from_json(value)
        if self._memory.damage is not None:
            self._tell(self._memory.damage)
        elif value is not None and calibration is None:
            self._tell("what is remembered of a pass's cost is unusable")
        return calibration

    def set(self, key: str, calibration: Calibration) -> None:
        self._memory.set(_SECTION, key, calibration.as_dict())
        if self._memory.damage is not None:
            self._tell(self._memory.damage)

    def _tell(self, what: str) -> None:
        if not self._told:
            self._told = True
            _logger.warning("%s: what passes cost on this machine is measured again", what)


@functools.cache
def store() -> Store:
    """What this user's machine remembers."""
    folder = remembered.cache_folder()
    return Store(remembered.Remembered(folder and folder / "calibration.json", remembered.machine()))


class Calibrations:
    """Those of one target with one draft or none, under one way to keep keys and values."""

    def __init__(self, target: LoadedModel, draft: LoadedModel | None, kv: KVConfig, kept: Store | None = None) -> None:
        """kept: where they are remembered; by default on this machine."""
        self._kept = kept
        self._limits = target.context_length, draft.context_length if draft is not None else None
        backend = "CPU" if mx.default_device() == mx.cpu else "GPU"
        self._draft = [] if draft is None else [f"draft {_identity(draft)} in {kv.draft_storage}"]
        parts = [f"{backend}, mlx-spec {_version()}", f"target {_identity(target)} in {kv.storage}"]
        self._visible: int | None = None
        if kv.window is not None:
            self._limits = None, None  # positions go on for ever
            sinks = DEFAULT_SINKS if kv.sinks is None else kv.sinks
            self._visible = kv.window + (sinks if isinstance(sinks, int) else DEFAULT_SINKS)
            parts.append(f"window {kv.window} and {sinks}")
        self._parts = parts

    def key(self, length: int, sampling: Sampling = GREEDY, *, drafting: bool = True) -> str:
        """Names no path and no person. Lengths near one another share one, and so do all beyond a window, and all
        values of a filter. drafting: whether the draft's passes are part of it."""
        filters = measurement.active_filters(sampling)
        parts = self._parts + (self._draft if drafting else [])
        key = "; ".join(parts + ([f"filtered by {' and '.join(filters)}"] if filters else []))
        if self._visible is not None and length > self._visible:
            return f"{key}; beyond the window"
        near = min(_STANDING_FOR_ALL, key=lambda other: max(other / max(1, length), length / other))
        return f"{key}; near {near} tokens"

    def at(self, length: int, sampling: Sampling = GREEDY, *, drafting: bool = True) -> Calibration | None:
        """What is remembered for contexts of about `length` tokens."""
        return self._store.get(self.key(length, sampling, drafting=drafting))

    def keep(self, calibration: Calibration, sampling: Sampling = GREEDY) -> None:
        """Remember it in the place of what was known for its length and `sampling`, with which it was measured: that
        of the target also for those who do not draft by a model."""
        alone = dataclasses.replace(calibration, draft_lazily=None, draft_synchronised=None, draft_row=None)
        self._store.set(self.key(calibration.context_length, sampling, drafting=False), alone)
        if calibration.draft_step is not None:
            self._store.set(self.key(calibration.context_length, sampling), calibration)

    def for_request(
        self, target: Context, draft: Context | None, sampling: Sampling = GREEDY, *, measure: bool = True
    ) -> tuple[Calibration | None, float]:
        """For contexts that hold the prompt: what is remembered, else measured now; and the seconds that took.

        The contexts are left as they were. None where nothing is known and `measure` is not set, or the target's
        context is about to end. Raises ValueError for contexts that cannot be rewound.
        """
        length, (target_limit, draft_limit) = target.length, self._limits
        if draft_limit is not None and length + ROOM > draft_limit:
            draft = None  # it has not read this text, or is about to end
        known = self.at(length, sampling, drafting=draft is not None)
        if known is not None:
            return known, 0.0
        if not measure or (target_limit is not None and length + ROOM > target_limit):
            return self.at(length, sampling, drafting=False), 0.0
        started = time.perf_counter()
        calibration = measurement.measure(target, draft, sampling=sampling, budget_seconds=_REQUEST_SECONDS)
        if not calibration.disturbed:  # else this request makes do with it, and the next one measures again
            self.keep(calibration, sampling)
        return calibration, time.perf_counter() - started

    @property
    def _store(self) -> Store:
        return store() if self._kept is None else self._kept


def _version() -> str:
    try:
        return version("mlx-spec")
    except PackageNotFoundError:  # run from its sources
        return "sources"


def _identity(model: LoadedModel) -> str:
    parameters = [array for _, array in tree_flatten(model.module.parameters())]
    kinds = "+".join(sorted({str(array.dtype).rpartition(".")[2] for array in parameters}))
    external = "" if model.module.__class__.__module__.startswith("mlx_spec") else f" of mlx-lm {version('mlx-lm')}"
    kind, layers, width = (model.config.get(name) for name in ("model_type", "num_hidden_layers", "hidden_size"))
    return f"{kind}{external} {layers} x {width}, {sum(array.nbytes for array in parameters)} bytes {kinds}"


@dataclass(frozen=True)
class LeftOut:
    """A length after which, as after all longer ones, nothing was measured."""

    context_length: int
    reason: str


def calibrate(
    target: LoadedModel,
    draft: LoadedModel | None,
    kv: KVConfig,
    *,
    sampling: Sampling = GREEDY,
    lengths: Sequence[int] = LENGTHS,
    progress: Progress = lambda what: None,
    kept: Store | None = None,
) -> Iterator[Calibration | LeftOut]:
    """Measure after texts of several lengths, remembering each result before it is given.

    sampling: as requests will have it; which filters it has is part of what is measured.

    Lengths that the target's context, memory or some seconds of reading do not allow are left out; where the draft's
    context is too short, the target is measured alone.
    Raises BadConfig where the target cannot take tokens back, or for a window or sinks that it cannot have.
    """
    large, small = language_models(target, draft, kv)
    if large.rewind_obstacle:
        raise BadConfig(
            f"nothing to measure: {target.name} {large.rewind_obstacle}, so it is always decoded plainly; choose "
            "another model."
        )
    calibrations = Calibrations(target, draft, kv, kept)
    text = calibration_tokens(target.tokenizer)
    sinks = 0
    if kv.window is not None:
        numbered = dataclasses.replace(kv, sinks=None) if kv.sinks == "system" else kv
        sinks = sinks_of(numbered, target.name, target.context_length, None, (), lambda prompt: [])
    with wired_limit(), ExitStack() as stack:
        context = stack.enter_context(closing(large.new_context(sinks, kv.window)))
        drafting = _draft_context(small, draft, sinks, kv.window)
        if drafting is not None:
            stack.enter_context(closing(drafting))
        for length in _lengths(lengths, target.context_length if kv.window is None else None, calibrations, sampling):
            limit = draft.context_length if draft is not None and kv.window is None else None
            if limit is not None and length + ROOM > limit:
                drafting = None
            pair = [(large, context), *([(small, drafting)] if small is not None and drafting is not None else [])]
            try:
                needed = length if kv.window is None else min(length, sinks + kv.window) + 2 * _STEP
                check_cache_fits(needed, sum(model.bytes_to_allocate(needed + ROOM) for model, _ in pair))
                for _, held in pair:
                    progress(f"{length} tokens: reading")
                    _fill(held, text, length)
                found = measurement.measure(
                    context, drafting, sampling=sampling, budget_seconds=_LENGTH_SECONDS, thorough=True,
                    progress=functools.partial(_tell, progress, length),
                )  # fmt: skip
            except (DoesNotFit, _TooSlow) as error:
                yield LeftOut(length, str(error).split(";")[0])
                return
            calibrations.keep(found, sampling)
            yield found


def _tell(progress: Progress, length: int, what: str) -> None:
    progress(f"{length} tokens: {what}")


def _lengths(
    wanted: Sequence[int], limit: int | None, calibrations: Calibrations, sampling: Sampling
) -> list[int]:
    """Ascending, within the target's context, and only the least of those that share a key."""
    least: dict[str, int] = {}
    for length in sorted(length if limit is None else min(length, max(1, limit - ROOM)) for length in wanted):
        least.setdefault(calibrations.key(length, sampling), length)
    return list(least.values())


def _draft_context(
    model: LanguageModel | None, draft: LoadedModel | None, sinks: int, window: int | None
) -> Context | None:
    if model is None or draft is None:
        return None
    if window is not None and draft.context_length is not None:
        window = min(window, draft.context_length - sinks)
        if window < SMALLEST_WINDOW:
            return None
    return model.new_context(sinks, window)


class _TooSlow(Exception):
    """Reading a text would take minutes."""


def _fill(context: Context, text: Sequence[int], length: int) -> None:
    """Bring a context up to `length` positions: some of `text` over and over, then in a paged context whatever is in
    the pages, so that long contexts take no long reading. Any other context has to read them all: where that would
    take too long, it stays at a few the first time, and later _TooSlow is raised."""
    last = context.vocabulary_size - 1
    tokens = [min(text[index % len(text)], last) for index in range(length + 1)]
    started, before = time.perf_counter(), context.length
    prefill(context, tokens[: _READ + 1])
    if isinstance(context, PagedContext):
        while context.length < length:
            context.table.append(min(_STEP, length - context.length))
            context.settle(context.length)
        return
    if context.length == before:  # read at an earlier length
        prefill(context, tokens[: before + _READ + 1])
    rate = (time.perf_counter() - started) / max(1, context.length - before)
    if (seconds := rate * (length - context.length)) <= _READING_SECONDS:
        prefill(context, tokens)
    elif before > 0:
        raise _TooSlow(f"reading so many takes about {seconds:.0f} s here")
