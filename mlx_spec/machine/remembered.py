"""Small results that later processes on this machine use again. Knows one file; not what the results mean.

They are kept apart by chip, system and MLX version. A file that is missing, broken, another program's, or cannot be
written is no error: then nothing is remembered, and what was to be found out is found out again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

_logger = logging.getLogger("mlx_spec")
_MOST_MACHINES = 8
"""Machines, or versions of one, that a file keeps."""


def cache_folder() -> Path | None:
    """Where this user's caches go; None where there is no home."""
    try:
        if sys.platform == "darwin":
            return Path.home() / "Library" / "Caches" / "mlx-spec"
        base = Path(os.environ.get("XDG_CACHE_HOME", ""))
        return (base if base.is_absolute() else Path.home() / ".cache") / "mlx-spec"
    except RuntimeError:
        return None


def chip() -> str:
    """Such as "Apple M3 Max"."""
    return str(mx.device_info().get("device_name") or platform.processor() or platform.machine())


def system() -> str:
    """Such as "macOS 15.5"."""
    release = platform.mac_ver()[0]
    return f"macOS {release}" if release else f"{platform.system()} {platform.release()}"


def machine() -> str:
    """What results depend on beside their own keys."""
    return f"{chip()}, {system()}, MLX {version('mlx')}"


class Remembered:
    """Values by section and key for one machine, in a JSON file that processes share."""

    def __init__(self, file: Path | None, machine: str) -> None:
        self._file, self._machine = file, machine
        self._lock = threading.Lock()
        self._values: dict[str, dict[str, Any]] | None = None
        self._unwritten: dict[tuple[str, str], Any] = {}
        """By section and key: what this process found out and the file does not have, since it cannot be written."""
        self._complained = False
        self._damage: str | None = None

    @property
    def damage(self) -> str | None:
        """Which file was there and could not be used, and why; None if there was none or nothing was wrong with it."""
        return self._damage

    def get(self, section: str, key: str) -> Any:
        """The value, which a file may have made of any JSON type; None if there is none."""
        if self._values is None:  # else nobody waits for a file that is being written
            with self._lock:
                self._values = self._values or _of_machine(self._read(), self._machine)
        return self._values.get(section, {}).get(key)

    def set(self, section: str, key: str, value: Any) -> None:
        """Keep a JSON value; None forgets."""
        self.update(section, {key: lambda _: value})

    def update(self, section: str, changes: Mapping[str, Callable[[Any], Any]]) -> None:
        """Keep, for each key, the JSON value that is made of the one there is by now or of None; None forgets."""
        with self._lock:
            # Read anew: another process may have added to the file.
            machines = self._read()
            values = _of_machine(machines, self._machine)
            for (name, key), own in self._unwritten.items():
                values.setdefault(name, {})[key] = own
            entries = values.setdefault(section, {})
            for key, change in changes.items():
                self._unwritten[section, key] = entries[key] = change(entries.get(key))
            self._values = values = {
                name: {key: value for key, value in entries.items() if value is not None}
                for name, entries in values.items()
            }
            machines.pop(self._machine, None)
            kept = [*machines.items(), (self._machine, values)][-_MOST_MACHINES:]
            if self._write({"machines": dict(kept)}):
                self._unwritten.clear()

    def _read(self) -> dict[str, Any]:
        if self._file is None:
            return {}
        try:
            content = json.loads(self._file.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except OSError as error:
            return self._damaged(f"cannot be read ({error.strerror or error})")
        except (ValueError, RecursionError):
            return self._damaged("is broken")
        machines = content.get("machines") if isinstance(content, dict) else None
        if not isinstance(machines, dict):
            return self._damaged("is of another kind")
        values = machines.get(self._machine, {})
        if not isinstance(values, dict) or not all(isinstance(entries, dict) for entries in values.values()):
            self._damaged("is broken in part")
        return machines

    def _damaged(self, how: str) -> dict[str, Any]:
        self._damage = self._damage or f"{self._file} {how}"
        return {}

    def _write(self, content: dict[str, Any]) -> bool:
        """Whether it is kept now."""
        if self._file is None:
            return False
        temporary = None
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            # Whole or not at all, whoever reads or writes meanwhile.
            number, temporary = tempfile.mkstemp(dir=self._file.parent, prefix=self._file.name)
            with open(number, "w", encoding="utf-8") as stream:
                json.dump(content, stream, indent=1)
            os.replace(temporary, self._file)
            temporary = None
            return True
        except OSError as error:
            if not self._complained:
                self._complained = True
                _logger.warning(
                    "what was found out about this machine cannot be kept in the folder %s (%s) and will be found out "
                    "again", self._file.parent, error.strerror or error,
                )  # fmt: skip
            return False
        finally:
            if temporary is not None:  # also after Ctrl-C
                with contextlib.suppress(OSError):
                    os.unlink(temporary)


def _of_machine(machines: dict[str, Any], machine: str) -> dict[str, dict[str, Any]]:
    values = machines.get(machine)
    if not isinstance(values, dict):
        return {}
    return {section: dict(entries) for section, entries in values.items() if isinstance(entries, dict)}
