"""Options and fixtures of the whole suite."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's threads would wait for each other beside other workers

import mlx.core as mx
import pytest

from mlx_spec.calibration import calibrations as calibration
from mlx_spec.machine.remembered import Remembered


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--real-models", type=Path, help="directory with smollm2-135m, qwen2.5-coder-0.5b, ... for tests marked slow"
    )


@pytest.fixture(scope="session")
def real_models(pytestconfig: pytest.Config) -> Path:
    """The directory given with --real-models."""
    directory = pytestconfig.getoption("--real-models")
    if directory is None or not directory.is_dir():
        pytest.skip("needs real models: give their directory with --real-models")
    return Path(directory)


@pytest.fixture(autouse=True)
def _nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What passes cost is measured anew in each test, and no test leaves it on the machine."""
    kept = calibration.Store(Remembered(None, "this test"))
    monkeypatch.setattr(calibration, "store", lambda: kept)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if sys.platform == "darwin" and platform.machine() == "arm64" and mx.metal.is_available():
        return
    for item in items:
        if item.get_closest_marker("metal"):
            item.add_marker(pytest.mark.skip(reason="needs a Mac with Apple silicon"))
