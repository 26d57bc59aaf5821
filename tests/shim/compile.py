"""Compiles translated kernels to shared objects: in batches, two at a time, each distinct one once.

Needs clang (for its vectors, address spaces and the thread sanitizer's instrumentation, whose runtime is ours): the
one in the PyPI package ziglang, or clang++. Results are kept in a folder of the user's under the temporary
directory, named by the hash of everything that went into them.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from .errors import AddressSpaceError, CompileError
from .source import Program, parameters
from .translate import translate

_HERE = Path(__file__).parent
_COMMON = ["-std=c++20", "-Wno-everything", "-Wno-reserved-user-defined-literal", "-ferror-limit=5", "-nostdinc++"]
_COMMON += ["-fPIC", "-fno-exceptions", "-fno-rtti", "-fno-sanitize=all", "-fsigned-char", "-fno-stack-protector"]
_COMMON += ["-U_FORTIFY_SOURCE", "-fvisibility=hidden"]  # hidden: one object calls the other without a detour
# Redundant loads in straight-line code may merge, as on a GPU; nothing is vectorised, and a vector of which one element
# is used is not narrowed to it, so an access keeps the width the source gives it.
_KERNEL = ["-O1", "-fno-vectorize", "-fno-slp-vectorize", "-fno-threadsafe-statics", "-gline-tables-only", "-gdwarf-4"]
# Private variables nobody has set are refused where the compiler sees it and not a number where it does not; half
# rounds after each operation.
_KERNEL += ["-Werror=uninitialized", "-Werror=sometimes-uninitialized", "-Werror=return-type"]
_KERNEL += ["-ftrivial-auto-var-init=pattern", "-Xclang", "-ffloat16-excess-precision=none"]
_CHECKS = ["thread", "array-bounds", "alignment", "null", "shift-exponent", "integer-divide-by-zero", "unreachable"]
_CHECKS += ["return"]
_PASSES = ["-tsan-instrument-func-entry-exit=0", "-tsan-instrument-read-before-write=1", "-disable-vector-combine"]
_BATCH = 6  # kernels in one translation unit: more share the headers, fewer spread over the cores


@dataclass(frozen=True)
class Unit:
    """A program and its key in the cache."""

    program: Program
    key: str

    @property
    def entry(self) -> str:
        return f"shim_entry_{self.key}"


@functools.cache
def compiler() -> tuple[str, ...]:
    try:
        import ziglang

        return (str(Path(ziglang.__file__).parent / "zig"), "c++")
    except ImportError:
        found = shutil.which("clang++")
        if found is None:
            raise CompileError("no clang: install the dev extra (ziglang), or clang++") from None
        return (found,)


@functools.cache
def machine_flags() -> tuple[str, ...]:
    # Half precision conversions and fused multiply-add in hardware; without, the compiler calls its own library.
    return ("-mf16c", "-mfma") if platform.machine() in ("x86_64", "AMD64") else ()


@functools.cache
def folder() -> Path:
    path = Path(tempfile.gettempdir()) / f"metal-shim-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    if path.stat().st_uid != os.getuid() or path.stat().st_mode & 0o077:
        path = Path(tempfile.mkdtemp(prefix="metal-shim-"))
    return path


@functools.cache
def _base() -> str:
    """Hash of all that is the same for every kernel."""
    digest = hashlib.sha256(" ".join([*compiler(), *_COMMON, *_KERNEL, *_CHECKS, *_PASSES, *machine_flags()]).encode())
    digest.update(
        subprocess.run(
            [compiler()[0], "version" if len(compiler()) > 1 else "--version"], capture_output=True, check=False
        ).stdout
    )
    for file in sorted([*(_HERE / "include").iterdir(), *(_HERE / "runtime").iterdir(), *_HERE.glob("*.py")]):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def unit(program: Program) -> Unit:
    constants = sorted(program.function_constants.items())
    digest = hashlib.sha256(f"{_base()}\n{program.instantiation}\n{constants}\n{program.text}".encode())
    return Unit(program, digest.hexdigest()[:24])


def _entry(item: Unit) -> str:
    """A C function that calls the kernel with what its parameters ask for."""
    arguments = []
    for parameter in parameters(item.program):
        if parameter.attribute is not None:
            arguments.append(f"shim::attribute{{shim_attribute({parameter.attribute})}}")
        else:
            wrapper = "pointer" if parameter.is_pointer else "reference"
            arguments.append(f"shim::{wrapper}{{b[{parameter.buffer}]}}")
    call = f"{item.program.instantiation}({', '.join(arguments)})"
    return f'extern "C" __attribute__((visibility("default"))) void {item.entry}(void* const* b) {{ {call}; }}'


def _text(units: Sequence[Unit]) -> str:
    parts = ["#include <shim_mlx.h>"]
    for number, item in enumerate(units):
        parts += [
            f"namespace program_{number} {{",
            f'#line 1 "{item.program.function}"',
            translate(item.program),
            '#line 1 "entry"',
            _entry(item),
            "}",
        ]
    return "\n".join(parts) + "\n"


def _run(arguments: list[str]) -> str | None:
    """Nothing, or what the compiler said."""
    environment = dict(os.environ, ZIG_LOCAL_CACHE_DIR=str(folder() / "zig"))
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment, check=False)
    return None if done.returncode == 0 else done.stderr or done.stdout or f"exit status {done.returncode}"


def _compile(source: Path, output: Path, extra: Sequence[str]) -> str | None:
    command = [
        *compiler(),
        *_COMMON,
        *extra,
        f"-I{_HERE / 'include'}",
        "-x",
        "c++",
        "-c",
        str(source),
        "-o",
        str(output),
    ]
    return _run(command)


@functools.cache
def _runtime() -> tuple[str, ...]:
    """The objects every kernel is linked with."""
    objects = []
    for name in ("memory", "threads", "grid"):
        output = folder() / f"{name}-{_base()[:24]}.o"
        if not output.exists():
            partial = output.with_suffix(f".{os.getpid()}.o")
            if message := _compile(_HERE / "runtime" / f"{name}.cpp", partial, ["-O2", *machine_flags()]):
                raise CompileError(f"the shim's own runtime does not compile:\n{message}")
            partial.replace(output)
        objects.append(str(output))
    return tuple(objects)


def _link(objects: list[str], output: Path) -> str | None:
    if sys.platform == "linux" and len(compiler()) > 1:
        # Straight to the linker: the driver would first build a compiler library that nothing here uses.
        return _run([compiler()[0], "ld.lld", "-shared", *objects, "-o", str(output)])
    return _run([*compiler(), "-shared", "-nostdlib++", *objects, "-o", str(output)])


def _build(units: Sequence[Unit]) -> None:
    """One translation unit, twice: with address spaces to see that it compiles, without to run."""
    name = folder() / (units[0].key + f"-{len(units)}-{os.getpid()}")
    source, built, checked = (name.with_suffix(suffix) for suffix in (".cpp", ".o", ".syntax.o"))
    try:
        source.write_text(_text(units))
        instrument = [flag for check in _CHECKS for flag in ("-Xclang", f"-fsanitize={check}")]
        instrument += [flag for option in _PASSES for flag in ("-mllvm", option)]
        message = _compile(source, built, [*_KERNEL, *instrument, *machine_flags()])
        error: type[CompileError] = CompileError
        if message is None:
            message = _compile(source, checked, ["-O0", "-DSHIM_SYNTAX"])
            error = AddressSpaceError
        if message is not None:
            if len(units) > 1:  # one by one, so that the good ones are built and the bad one is named
                for item in units:
                    _build([item])
                return
            raise error(f"{units[0].program.function} does not compile:\n{message}")
        shared = name.with_suffix(".so")
        if message := _link([str(built), *_runtime()], shared):
            raise CompileError(f"{units[0].program.function} does not link:\n{message}")
        for item in units:
            (folder() / f"{item.key}.{os.getpid()}").write_text(shared.name)
            (folder() / f"{item.key}.{os.getpid()}").replace(folder() / f"{item.key}.where")
    finally:
        for file in (source, built, checked):
            file.unlink(missing_ok=True)


def build(units: Sequence[Unit], *, jobs: int | None = None) -> None:
    """Compile what is not in the cache yet, several at a time; processes that want the same wait for each other."""
    if all(located(item) for item in units):
        return
    with (folder() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        missing = {item.key: item for item in units if located(item) is None}
        wanted, jobs = list(missing.values()), jobs or os.cpu_count() or 1
        size = max(1, min(_BATCH, -(-len(wanted) // jobs)))
        batches = [wanted[start : start + size] for start in range(0, len(wanted), size)]
        if batches:
            _runtime()
        with ThreadPoolExecutor(jobs) as pool:
            for _ in pool.map(_build, batches):
                pass


def located(item: Unit) -> Path | None:
    """The shared object that holds a unit, if there is one."""
    try:
        path = folder() / (folder() / f"{item.key}.where").read_text()
    except FileNotFoundError:
        return None
    return path if path.exists() else None
