"""Imports go down only, from room to room, as CONTRIBUTING.md draws them; what is on the ground is known to all."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOMS = ("cli", "llm", "calibration", "decoding", "loading", "architectures", "attention", "kernels", "kv", "machine")
GROUND = ("errors", "settings", "resources")
PACKAGE = Path(__file__).parents[1] / "mlx_spec"


def imported(source: str) -> Iterator[tuple[int, str]]:
    """Line and module of every import of this package, those inside functions and for types alone included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            names = [node.module] if node.module != "mlx_spec" else [f"mlx_spec.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        yield from ((node.lineno, name) for name in names if name.partition(".")[0] == "mlx_spec")


def offences(room: str, source: str) -> list[str]:
    """What a file of `room` must not import: rooms above it and, from the ground, anything but the ground."""
    allowed = (*GROUND, *ROOMS[ROOMS.index(room) :]) if room in ROOMS else GROUND
    # The command line is a program like any other: it may use what every program imports.
    public = room == "cli"
    return [
        f"line {line}: {name}"
        for line, name in imported(source)
        if f"{name}.".split(".")[1] not in allowed and not (public and name == "mlx_spec")
    ]


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_go_down_only(file: Path) -> None:
    room, *inside = file.relative_to(PACKAGE).parts
    if not inside and room in ("__init__.py", "__main__.py"):
        return  # the doors
    assert offences(room.removesuffix(".py"), file.read_text(encoding="utf-8")) == []


def test_every_folder_is_a_room_and_every_file_outside_is_ground() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and not path.name.startswith("_")}
    files = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__"}
    assert (folders, files) == (set(ROOMS), set(GROUND))


@pytest.mark.parametrize("folder", sorted({file.parent for file in PACKAGE.rglob("*.py")}), ids=lambda path: path.name)
def test_a_room_says_what_it_knows(folder: Path) -> None:
    module = ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))
    assert ast.get_docstring(module)


@pytest.mark.parametrize(
    ("room", "line", "offends"),
    [
        ("kv", "from mlx_spec.machine.memory import gigabytes", False),
        ("kv", "from mlx_spec.kernels.reference import PAGE", True),
        ("kv", "def f():\n    import mlx_spec.kernels", True),
        ("kernels", "from mlx_spec import attention", True),
        ("errors", "from mlx_spec.settings import Sampling", False),
        ("settings", "from mlx_spec.machine import memory", True),
        ("llm", "import mlx_spec", True),
        ("cli", "import mlx_spec\nfrom mlx_spec import load", True),
        ("cli", "import mlx_spec", False),
    ],
)
def test_offenders_are_found(room: str, line: str, offends: bool) -> None:
    assert bool(offences(room, line)) is offends


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_the_figure_has_the_rooms_in_their_order(document: str) -> None:
    lines = (PACKAGE.parent / document).read_text(encoding="utf-8").splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("cli   "))
    assert [line.split()[0] for line in lines[first : first + len(ROOMS)]] == list(ROOMS)


def test_what_is_named_for_contributors_is_there() -> None:
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:[a-z_]+/)+(?:[a-z_]+\.py)?)`", text))
    assert len(named) > 15
    assert [name for name in named if not any((root / name).exists() for root in (PACKAGE, PACKAGE.parent))] == []
