"""Metal source text: getting it from MLX or from headers, and what its kernel function asks for.

Knows the text only: nothing is compiled or run here.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx

from .errors import BadLaunch

# In the order of shim_attribute in runtime/grid.cpp.
ATTRIBUTES = (
    "thread_position_in_grid",
    "threads_per_grid",
    "thread_position_in_threadgroup",
    "thread_index_in_threadgroup",
    "threads_per_threadgroup",
    "dispatch_threads_per_threadgroup",
    "threadgroup_position_in_grid",
    "threadgroups_per_grid",
    "thread_index_in_simdgroup",
    "threads_per_simdgroup",
    "simdgroup_index_in_threadgroup",
    "simdgroups_per_threadgroup",
    "dispatch_simdgroups_per_threadgroup",
    "thread_index_in_quadgroup",
    "quadgroup_index_in_threadgroup",
    "quadgroups_per_threadgroup",
)
_SYNONYMS = {"thread_execution_width": "threads_per_simdgroup"}
_CAPTURING = threading.Lock()


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel function: a buffer, or an attribute such as thread_position_in_grid."""

    name: str
    type: str
    buffer: int | None
    attribute: int | None
    needs: str | None  # the function constant without which it is absent

    @property
    def is_pointer(self) -> bool:
        return "*" in self.type

    @property
    def space(self) -> str:
        return "constant" if re.search(r"\bconstant\b", self.type) else "device"


@dataclass(frozen=True)
class Program:
    """Metal source and the instantiation of the kernel function to run, such as `name<float, 64>`."""

    text: str
    instantiation: str
    function_constants: Mapping[int, object] = field(default_factory=dict)

    @property
    def function(self) -> str:
        return self.instantiation.split("<")[0].strip()


def capture(call: Callable[..., object], inputs: list[mx.array]) -> str:
    """The source MLX would hand to Metal for `call(*inputs)`, which must call one kernel with verbose=True.

    Exporting the call traces it without evaluating, so no GPU is needed; MLX prints the text from C++, so the
    process's standard output is redirected meanwhile.
    """
    with _CAPTURING, tempfile.TemporaryFile() as printed, tempfile.TemporaryDirectory() as directory:
        sys.stdout.flush()
        before = os.dup(1)
        os.dup2(printed.fileno(), 1)
        try:
            mx.export_function(os.path.join(directory, "call.mlxfn"), call, *inputs)
        finally:
            os.dup2(before, 1)
            os.close(before)
        printed.seek(0)
        text = printed.read().decode()
    found = re.findall(r"^Generated source code for `(\w+)`:\n```\n(.*?)\n```$", text, re.S | re.M)
    if len(found) != 1:
        raise BadLaunch(f"expected one generated kernel source, found {len(found)}")
    return str(found[0][1]) + "\n"


def generated_program(text: str) -> Program:
    """The program in what MLX generated: it instantiates a template itself, where there is one."""
    instantiation = re.search(r"\[\[host_name\(\"\w+\"\)\]\] \[\[kernel\]\] decltype\((.*?)\)(?= \w+\b)", text)
    if instantiation:
        return Program(text, instantiation[1])
    found = re.findall(r"^[ \t]*\[\[kernel\]\] void (\w+)\(", text, re.M)
    return Program(text, found[-1])


def flatten(path: Path, roots: list[Path]) -> str:
    """A header's text with what it includes by a quoted name put in its place, each file once."""
    seen: set[Path] = set()

    def read(file: Path) -> str:
        if file in seen:
            return ""
        seen.add(file)

        def include(match: re.Match[str]) -> str:
            for root in [file.parent, *roots]:
                if (root / match[1]).is_file():
                    return read(root / match[1])
            raise BadLaunch(f"{file}: cannot find {match[1]}")

        text = file.read_text().replace("#pragma once", "")
        return re.sub(r'^#include "(.*?)"$', include, text, flags=re.M)

    return read(path)


def blank(text: str) -> str:
    """The text with comments and string contents as spaces: same length, same lines."""

    def spaces(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match[0])

    return re.sub(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"", spaces, text, flags=re.S)


def closing(text: str, start: int, pair: str) -> int:
    """Index after the bracket that closes the one at `start`."""
    depth = 0
    for index in range(start, len(text)):
        depth += (text[index] == pair[0]) - (text[index] == pair[1])
        if depth == 0:
            return index + 1
    raise BadLaunch(f"unbalanced {pair} in the source")


def split(text: str) -> list[str]:
    """Split at commas outside of any bracket."""
    parts, depth, start = [], 0, 0
    for index, character in enumerate(text):
        depth += (character in "([{<") - (character in ")]}>")
        if character == "," and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    return [part.strip() for part in [*parts, text[start:]] if part.strip()]


def heads(text: str) -> dict[str, re.Match[str]]:
    """Where each kernel function starts: up to its opening parenthesis."""
    return {
        head["name"]: head for head in re.finditer(r"\bkernel\b(?P<more>[^;{}]*?)\bvoid\s+(?P<name>\w+)\s*\(", text)
    }


def most_threads(program: Program) -> int | None:
    """What [[max_total_threads_per_threadgroup(n)]] promises, if the kernel function has it."""
    head = heads(blank(program.text)).get(program.function)
    found = re.search(r"max_total_threads_per_threadgroup\((\d+)\)", head["more"]) if head else None
    return int(found[1]) if found else None


def parameters(program: Program) -> list[Parameter]:
    """What the kernel function takes, in order."""
    return list(_parameters(program.text, program.function))


@functools.lru_cache
def _parameters(source: str, function: str) -> tuple[Parameter, ...]:
    text = blank(source)
    head = heads(text).get(function)
    if head is None:
        raise BadLaunch(f"no kernel function {function!r} in the source")
    listing = text[head.end() : closing(text, head.end() - 1, "()") - 1]
    return tuple(_parameter(part) for part in split(listing))


def _parameter(text: str) -> Parameter:
    attributes = [item for group in re.findall(r"\[\[(.*?)\]\]", text, re.S) for item in split(group)]
    declaration = re.sub(r"\[\[.*?\]\]", "", text, flags=re.S).strip()
    matched = re.fullmatch(r"(.*?)(\w+)", declaration, re.S)
    if matched is None:
        raise BadLaunch(f"cannot read the parameter {text!r}")
    buffer, attribute, needs = None, None, None
    for item in attributes:
        if number := re.fullmatch(r"buffer\(\s*(\d+)\s*\)", item):
            buffer = int(number[1])
        elif condition := re.fullmatch(r"function_constant\(\s*(\w+)\s*\)", item):
            needs = condition[1]
        elif _SYNONYMS.get(item, item) in ATTRIBUTES:
            attribute = ATTRIBUTES.index(_SYNONYMS.get(item, item))
        else:
            raise BadLaunch(f"parameter {matched[2]!r}: attribute {item!r} is not known here")
    if (buffer is None) == (attribute is None):
        raise BadLaunch(f"parameter {matched[2]!r} is neither a buffer nor an attribute")
    return Parameter(matched[2], matched[1].strip(), buffer, attribute, needs)
