"""What can be said about this installation and its kernels, for a bug report. Knows facts; not how they are shown.

Nothing personal: no host or user names, no paths.
"""

from __future__ import annotations

import functools
import os
import platform
import re
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_spec.attention import choosing
from mlx_spec.attention.attend import WAYS
from mlx_spec.attention.choosing import Times
from mlx_spec.attention.timing_ways import Shape, ways_to_attend
from mlx_spec.cli.progress import Progress
from mlx_spec.kernels import registry
from mlx_spec.kernels.self_check import ENDED, SelfCheck, fingerprint
from mlx_spec.machine import memory, remembered

__all__ = ["ENDED", "Diagnosis", "Kernel", "Timing", "diagnose"]

PACKAGES = ("mlx", "mlx-lm", "transformers", "huggingface-hub", "numpy")
WITHOUT_METAL = (
    "Without Metal no kernel can run: whether they are right and how fast they are on a GPU can only be checked on a "
    "Mac. Attention takes plain MLX operations here. The test-suite runs the same kernel source on the CPU: see "
    "tests/shim."
)


@dataclass
class Kernel:
    """One variant: "ok", "failed" or "not checked"."""

    kernel: str
    variant: str
    result: str
    error: str | None = None


@dataclass
class Timing:
    """One layer's attention in one shape."""

    shape: str
    milliseconds: dict[str, float]


@dataclass
class Diagnosis:
    facts: dict[str, str | int | None]
    versions: dict[str, str | None]
    kernels: list[Kernel] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)
    note: str | None = None

    def count(self, result: str) -> int:
        """Variants of this result."""
        return sum(kernel.result == result for kernel in self.kernels)

    def as_dict(self) -> dict[str, Any]:
        counts = {result.replace(" ", "_"): self.count(result) for result in ("ok", "failed", "not checked")}
        return {"variants": counts, **asdict(self)}


def diagnose(progress: Progress) -> Diagnosis:
    """Collects the facts and, where there is Metal, checks and times every kernel, whatever is remembered.

    progress is told what comes next, and how many of how many are done.
    """
    diagnosis = Diagnosis(facts(), {name: _version(name) for name in PACKAGES})
    variants = all_variants()
    if not registry.available():
        diagnosis.note = WITHOUT_METAL
        diagnosis.kernels = [Kernel(v.kernel.name, v.name, "not checked") for v in variants]
        return diagnosis
    self_check, known = SelfCheck(choosing.memory()), Times(choosing.memory())
    shapes = typical_shapes()
    total = len(variants) + len(shapes)
    wrong: set[str] = set()
    for done, variant in enumerate(variants):
        progress(f"checking {variant.name}", done, total)
        error = self_check.examine(variant, again=True)
        diagnosis.kernels.append(
            Kernel(variant.kernel.name, variant.name, "failed" if error else "ok", error and without_paths(error))
        )
        if error:
            wrong.add(variant.name)
    for done, shape in enumerate(shapes, len(variants)):
        progress(f"timing {shape}", done, total)
        # A kernel that is wrong is never taken, and may take for ever.
        ways = [
            way
            for way in WAYS
            if not wrong.intersection(variant.name for variant in choosing.kernel_variants(shape, way))
        ]
        times = known.milliseconds(str(shape), functools.partial(ways_to_attend, shape), ways, again=True)
        diagnosis.timings.append(Timing(str(shape), times))
    progress("done", total, total)
    return diagnosis


def all_variants() -> list[registry.Variant]:
    """Every variant of every kernel, each once."""
    found = [
        variant
        for head_dim in registry.HEAD_SIZES
        for storage in registry.STORAGE
        for dtype in registry.TYPES
        for interleaved in (False, True)
        for variant in registry.variants(head_dim, storage, dtype, interleaved, group=1)
    ]
    return sorted({variant.name: variant for variant in found}.values(), key=lambda v: registry.KERNELS.index(v.kernel))


def typical_shapes() -> list[Shape]:
    """Of decoding and of verifying four drafts with models of 70B, 1B and 0.5B."""
    return [
        Shape(heads, kv_heads, head_dim, storage, mx.float16, rows, 4096).bucket
        for heads, kv_heads, head_dim in ((64, 8, 128), (32, 8, 64), (14, 2, 64))
        for storage in (mx.int8, mx.float16)
        for rows in (1, 5)
    ]


def facts() -> dict[str, str | int | None]:
    """The machine and the software; sizes in bytes. Those that only macOS has are left out elsewhere."""
    metal = bool(mx.metal.is_available())
    found: dict[str, str | int | None] = {
        "mlx_spec": _version("mlx-spec"),
        "python": platform.python_version(),
        "system": remembered.system(),
        "architecture": platform.machine(),
        "chip": remembered.chip(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "backend": "Metal" if registry.available() else "CPU, though there is Metal" if metal else "CPU, no Metal",
        "available_bytes": memory.available_memory(),
        "kernel_source": fingerprint(),
    }
    if metal:
        about = mx.device_info(mx.gpu)
        found["recommended_working_set_bytes"] = about.get("max_recommended_working_set_size")
        found["largest_buffer_bytes"] = about.get("max_buffer_length")
    if sys.platform == "darwin":
        found["wired_limit_megabytes"] = _wired_limit()
    return found


def _wired_limit() -> int | None:
    """What `sudo sysctl iogpu.wired_limit_mb=...` has set; 0 is macOS's own limit."""
    try:
        said = subprocess.run(
            ["/usr/sbin/sysctl", "-n", "iogpu.wired_limit_mb"], capture_output=True, text=True, timeout=5, check=True
        )
        return int(said.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def without_paths(text: str) -> str:
    """Of each path only its last part: a home's name is its owner's."""
    for known in (Path.home(), Path(__file__).parent.parent, Path(sys.prefix)):
        if len(known.parts) > 1:
            text = text.replace(str(known), "")
    return re.sub(r"""(?<![\w/*])/(?:[^\s/:'"]+/)+(?=[^\s/])""", "", text)
