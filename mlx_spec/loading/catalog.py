"""The model definitions a user can name: reads and checks models/*.toml.

Knows what each definition says; knows nothing of downloads, nor of what is on this machine.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from mlx_spec.errors import BadConfig
from mlx_spec.resources import folder
from mlx_spec.settings import KVConfig, Sampling, Speculation

# What Macs are sold with, in GiB.
_MEMORY_SIZES = (8, 16, 24, 32, 36, 48, 64, 96, 128, 192, 256, 512)
# Room for the KV cache of some thousand tokens and for the activations of a prefill chunk.
_WORKING_BYTES = 2 * 10**9

_Settings = TypeVar("_Settings", Sampling, Speculation, KVConfig)


@dataclass(frozen=True)
class Weights:
    """One model of a pair: where it comes from and how large it is."""

    source: str
    """org/name on the hub, or package:module/file for a file that a Python package ships."""
    license: str
    parameters: int
    bits: int
    group_size: int = 64
    bytes: int | None = None
    """Exact size where it is known; otherwise `download_bytes` computes it."""

    @property
    def download_bytes(self) -> int:
        """Bytes on disk and in memory: `bits` per weight, and per group a scale and a bias of 16 bits."""
        if self.bytes is not None:
            return self.bytes
        bits = self.bits + (32 / self.group_size if self.bits < 16 else 0)
        return round(self.parameters * bits / 8)


@dataclass(frozen=True)
class Entry:
    """One file of models/: a target, the draft that suits it, and the defaults of their publisher."""

    name: str
    summary: str
    context_length: int
    target_weights: Weights
    draft_weights: Weights | None = None
    sampling: Sampling = field(default_factory=Sampling)
    speculation: Speculation = field(default_factory=Speculation)
    kv: KVConfig = field(default_factory=KVConfig)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Only what the file sets of [sampling], [speculation] and [kv], to show."""
    template: Mapping[str, Any] = field(default_factory=dict)
    """Arguments for the chat template, such as enable_thinking."""

    @property
    def target(self) -> str:
        return self.target_weights.source

    @property
    def draft(self) -> str | None:
        return self.draft_weights.source if self.draft_weights else None

    @property
    def license(self) -> str:
        """The target's licence, and the draft's where it is another one."""
        licenses = [part.license for part in (self.target_weights, self.draft_weights) if part]
        return ", ".join(dict.fromkeys(licenses))

    @property
    def download_bytes(self) -> int:
        """Target and draft together."""
        return sum(part.download_bytes for part in (self.target_weights, self.draft_weights) if part)

    @property
    def minimum_memory(self) -> int:
        """The smallest memory of a Mac, in GiB, whose GPU may use enough of it by default.

        That is two thirds of it up to 36 GiB, and three quarters beyond.
        """
        needed = self.download_bytes + _WORKING_BYTES
        for size in _MEMORY_SIZES:
            if size * 2**30 * (2 / 3 if size <= 36 else 3 / 4) >= needed:
                return size
        return -(-needed * 4 // (3 * 2**30))


@cache
def entries(directory: Path | None = None) -> Mapping[str, Entry]:
    """Name -> definition, in the order of their names. Raises BadConfig, naming the file and the key."""
    files = sorted((directory or folder("models")).glob("*.toml"))
    return MappingProxyType({file.stem: _read(file) for file in files})


def find(name: str) -> Entry | None:
    return entries().get(name)


def _read(file: Path) -> Entry:
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadConfig(f"{file}: not valid TOML: {error}. Mend or remove the file.") from error
    table = _Table(file, "", values)
    table.only(("summary", "context_length", "target", "draft", "sampling", "speculation", "template", "kv"))
    sampling, speculation, kv, template = (
        table.table(key) for key in ("sampling", "speculation", "kv", "template"))
    for key, value in template.values.items():
        if not isinstance(value, bool | int | float | str):
            raise template.wrong(key, value, "true, false, a number or a string")
    return Entry(
        name=file.stem,
        summary=table.text("summary"),
        context_length=table.whole("context_length"),
        target_weights=_weights(table.table("target")),
        draft_weights=_weights(table.table("draft")) if "draft" in values else None,
        sampling=sampling.settings(Sampling, without=("logit_bias", "seed", "top_logprobs")),
        speculation=speculation.settings(Speculation),
        kv=kv.settings(KVConfig),
        defaults=MappingProxyType(sampling.values | speculation.values | kv.values),
        template=MappingProxyType(template.values),
    )


def _weights(table: _Table) -> Weights:
    table.only([f.name for f in dataclasses.fields(Weights)])
    bits = table.whole("bits")
    if bits not in (2, 3, 4, 5, 6, 8, 16, 32):
        raise table.wrong("bits", bits, "2, 3, 4, 5, 6, 8, 16 or 32")
    optional = {key: table.whole(key) for key in ("group_size", "bytes") if key in table.values}
    return Weights(source=table.text("source"), license=table.text("license"), bits=bits,
                   parameters=table.whole("parameters"), **optional)


@dataclass(frozen=True)
class _Table:
    """A TOML table that knows where it stands, so that every complaint can say so."""

    file: Path
    name: str
    values: dict[str, Any]

    def wrong(self, key: str, value: object, accepted: str) -> BadConfig:
        return BadConfig(f"{self.file}: {self._place(key)} is {value!r}; give {accepted}.")

    def only(self, known: Iterable[str]) -> None:
        for key in self.values:
            if key not in known:
                raise BadConfig(f"{self.file}: unknown key {self._place(key)}; known are {', '.join(known)}.")

    def table(self, key: str) -> _Table:
        value = self.values.get(key, {})
        if not isinstance(value, dict):
            raise self.wrong(key, value, f"a table [{key}]")
        return _Table(self.file, key, value)

    def text(self, key: str) -> str:
        value = self._get(key)
        if not isinstance(value, str) or not value.strip():
            raise self.wrong(key, value, "a string that is not empty")
        return value

    def whole(self, key: str) -> int:
        value = self._get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.wrong(key, value, "a whole number above 0")
        return value

    def settings(self, kind: type[_Settings], without: Collection[str] = ()) -> _Settings:
        """The values as a `kind`, which checks them itself, but for the fields that a definition may not set."""
        self.only([field.name for field in dataclasses.fields(kind) if field.name not in without])
        try:
            return kind(**self.values)
        except BadConfig as error:
            raise BadConfig(f"{self.file}: {self.name}.{error}") from error

    def _get(self, key: str) -> Any:
        if key not in self.values:
            raise BadConfig(f"{self.file}: {self._place(key)} is missing.")
        return self.values[key]

    def _place(self, key: str) -> str:
        return f"{self.name}.{key}" if self.name else key
