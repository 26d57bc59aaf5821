"""What a user installs: the wheel's files, the entry points, the public names."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import mlx_spec

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    build = "from hatchling.build import build_wheel; import sys; build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(folder)], cwd=ROOT, check=True, capture_output=True)
    [file] = folder.glob("*.whl")
    return zipfile.ZipFile(file)


def test_wheel_holds_models_types_and_every_module(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    assert "mlx_spec/py.typed" in names
    for folder in ("models", "metal"):
        tracked = {f"mlx_spec/{file.relative_to(ROOT)}" for file in (ROOT / folder).iterdir()}
        assert tracked
        assert tracked <= names
    for kind in ("*.py", "*.txt"):  # modules, and the prompts of the benchmark
        files = {str(file.relative_to(ROOT)) for file in (ROOT / "mlx_spec").rglob(kind)}
        assert files
        assert files <= names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/"))]


def test_installed_wheel_finds_its_models(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    script = "import mlx_spec.loading.catalog as c; print(c.__file__); print(c.find('demo').target)"
    run = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, capture_output=True, text=True)
    where, target = run.stdout.splitlines()
    assert Path(where).is_relative_to(tmp_path)
    assert target.startswith("package:")


def test_public_names_exist() -> None:
    for name in mlx_spec.__all__:
        assert getattr(mlx_spec, name) is not None


def test_runs_as_a_module_and_as_a_command() -> None:
    from importlib.metadata import version

    for command in ([sys.executable, "-m", "mlx_spec"], [str(Path(sys.executable).parent / "mlx-spec")]):
        run = subprocess.run([*command, "--version"], check=True, capture_output=True, text=True)
        assert version("mlx-spec") in run.stdout
