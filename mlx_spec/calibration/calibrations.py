"""What passes of a pair cost on this machine: under which keys it is remembered, who learns it in a request, and how it
is measured thoroughly. Knows models and settings; how passes are timed is `timing`'s affair."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_spec.architectures.context import Context, prefill
from mlx_spec.architectures.paged import PagedContext
from mlx_spec.attention.window import sinks_of
from mlx_spec.calibration import timing as measurement
from mlx_spec.calibration.filters import Filters
from mlx_spec.calibration.learner import Learner, draft_names, rows_name
from mlx_spec.calibration.record import LEAST_SECONDS, ROWS, Calibration, Store
from mlx_spec.calibration.timing import GREEDY, ROOM, Announce
from mlx_spec.decoding.drafters.draft_model import draft_context
from mlx_spec.errors import BadConfig, DoesNotFit
from mlx_spec.loading.language_models import language_models, sample_tokens
from mlx_spec.loading.loader import LoadedModel
from mlx_spec.machine import remembered
from mlx_spec.machine.memory import check_cache_fits, wired_limit
from mlx_spec.settings import DEFAULT_SINKS, KVConfig, Sampling

__all__ = ["Calibration", "Calibrations", "LeftOut", "Store", "calibrate", "store"]

LENGTHS = (256, 2048, 8192)
"""Tokens of the texts after which `calibrate` measures."""
_STANDING_FOR_ALL = (*LENGTHS, 32768, 131072)
_LENGTH_SECONDS = 10.0
_READ = 64
"""Tokens that are really read before measuring. Passes take as long after positions that hold anything else."""
_READING_SECONDS = 20.0
_STEP = 512


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
        self._where = f"{'CPU' if mx.default_device() == mx.cpu else 'GPU'}, mlx-spec {_version()}"
        self._draft = None if draft is None else f"draft {_identity(draft)} in {kv.draft_storage}"
        self._target = f"{self._where}; target {_identity(target)} in {kv.storage}"
        self._visible: int | None = None
        if kv.window is not None:
            sinks = kv.visible_sinks
            self._visible = kv.window + (sinks if isinstance(sinks, int) else DEFAULT_SINKS)
            self._target += f"; window {kv.window} and {sinks}"

    def keys(self, length: int) -> list[str]:
        """Of what is known for contexts of about `length` tokens, without filters: the draft's passes are part of it.
        Behind it those of the next shorter and longer ones, the nearer first. Names no path and no person. Lengths near
        one another share a key, and so do all beyond a window."""
        near = sorted(_STANDING_FOR_ALL, key=lambda other: max(other / max(1, length), length / other))
        place = _STANDING_FOR_ALL.index(near[0])
        beside = [length for length in near if abs(_STANDING_FOR_ALL.index(length) - place) <= 1]
        keys = [f"{self._target}; near {each} tokens" for each in beside]
        if self._visible is None or length <= self._visible:
            return keys
        return [f"{self._target}; beyond the window", *self.keys(self._visible)]

    def learner(self, sampling: Sampling, vocabulary_size: int, *, drafting: bool = True) -> Learner:
        """For one request, which ends with `Learner.close`. drafting: whether it has the draft model."""
        return Learner(
            self.store, self.keys, self.filters(sampling, vocabulary_size), self._draft if drafting else None
        )

    def filters(self, sampling: Sampling, vocabulary_size: int) -> Filters:
        """What those of `sampling` cost."""
        return Filters(self.store, sampling, vocabulary_size, self._where)

    def keep(self, calibration: Calibration, filters: Filters | None = None) -> None:
        """Remember it in the place of what was known for its length, of the draft only if that was measured. filters:
        those it was measured with, whose cost is known."""

        def drawing(rows: int) -> float:
            return (filters.seconds(rows) or 0.0) if filters is not None else 0.0

        rows, draft = dict(calibration.target), self._draft
        names: list[str] = [*map(rows_name, ROWS)]
        times = [rows[count] - drawing(count) if count in rows else None for count in ROWS]
        if draft is not None and calibration.draft_step is not None:
            names += draft_names(draft)
            steps = calibration.draft_lazily, calibration.draft_synchronised
            times += [*(None if step is None else step - drawing(1) for step in steps), calibration.draft_row]
        key = self.keys(calibration.context_length)[0]
        for name, seconds in zip(names, times, strict=True):
            found = None if seconds is None else max(LEAST_SECONDS, seconds)
            self.store.observe(key, name, found, thorough=True)
        self.store.write()

    @property
    def store(self) -> Store:
        """Where they are remembered."""
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
    progress: Announce = lambda what: None,
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
    text = sample_tokens(target.tokenizer)
    sinks = 0
    if kv.window is not None:
        numbered = dataclasses.replace(kv, sinks=None) if kv.sinks == "system" else kv
        sinks = sinks_of(numbered, target.name, target.context_length, None, (), lambda prompt: [])
    with wired_limit(), ExitStack() as stack:
        context = stack.enter_context(closing(large.new_context(sinks, kv.window)))
        drafting = None
        if small is not None and draft is not None:
            drafting = draft_context(small, draft.context_length, sinks, kv.window)
        if drafting is not None:
            stack.enter_context(closing(drafting))
        filters = calibrations.filters(sampling, context.vocabulary_size)
        for length in _lengths(lengths, target.context_length if kv.window is None else None, calibrations):
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
                while filters.seconds(1) is None:
                    filters.sample()
                found = measurement.measure(
                    context, drafting, sampling=sampling, budget_seconds=_LENGTH_SECONDS,
                    progress=functools.partial(_tell, progress, length),
                )  # fmt: skip
            except (DoesNotFit, _TooSlow) as error:
                yield LeftOut(length, str(error).split(";")[0])
                return
            calibrations.keep(found, filters)
            calibrations.store.wait()
            yield found


def _tell(progress: Announce, length: int, what: str) -> None:
    progress(f"{length} tokens: {what}")


def _lengths(wanted: Sequence[int], limit: int | None, calibrations: Calibrations) -> list[int]:
    """Ascending, within the target's context, and only the least of those that share a key."""
    least: dict[str, int] = {}
    for length in sorted(length if limit is None else min(length, max(1, limit - ROOM)) for length in wanted):
        least.setdefault(calibrations.keys(length)[0], length)
    return list(least.values())


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
