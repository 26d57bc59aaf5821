"""Where the files that ship beside the code lie. Knows folders; does not know what is in them."""

from __future__ import annotations

from pathlib import Path

from mlx_spec.errors import ModelNotFound


def folder(name: str) -> Path:
    """The directory `name` ("models", "metal"): inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).parent
    for candidate in (package / name, package.parent / name):
        if candidate.is_dir():
            return candidate
    raise ModelNotFound(f"The directory {name!r} that ships with mlx-spec is missing from {package}; "
                        "install mlx-spec again.")
