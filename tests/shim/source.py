"""From Metal source text to C++ that means the same, and what its kernel function asks for.

Knows the text only: nothing is compiled or run here. Line numbers stay those of the Metal source, so that a
compiler's message and a detector's report name its lines.
"""

from __future__ import annotations

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

# In the order of shim_attribute in runtime/threads.cpp.
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
_VECTOR = r"(?:bool|u?char|u?short|u?int|u?long|half|bfloat|float)[234]"
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
    found = re.findall(r"^\[\[kernel\]\] void (\w+)\(", text, re.M)
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


def parameters(program: Program) -> list[Parameter]:
    """What the kernel function takes, in order."""
    text = blank(program.text)
    head = re.search(rf"\bkernel\b(?:\]\])?\s+void\s+{program.function}\s*\(", text)
    if head is None:
        raise BadLaunch(f"no kernel function {program.function!r} in the source")
    listing = text[head.end() : closing(text, head.end() - 1, "()") - 1]
    return [_parameter(part) for part in split(listing)]


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


def translate(program: Program) -> str:
    """The C++ reading of the source. What C++ has no words for is put into other words, and nothing else:

    arrays in threadgroup memory, function constants, vector constructors, MLX's explicit instantiation.
    """
    text = re.sub(
        r"^template \[\[host_name\(.*?\)\]\] \[\[kernel\]\] decltype.*?;\s*?$", "", program.text, flags=re.M
    )
    text = _function_constants(text, program.function_constants)
    text = _threadgroup_arrays(text)
    return _vector_constructors(text)


def _edit(text: str, edits: list[tuple[int, int, str]]) -> str:
    for start, end, new in sorted(edits, reverse=True):
        kept = text[start:end].count("\n") - new.count("\n")
        text = text[:start] + new + "\n" * max(kept, 0) + text[end:]
    return text


def _function_constants(text: str, values: Mapping[int, object]) -> str:
    edits = []
    for match in re.finditer(r"\bconstant\s+(\w+)\s+(\w+)\s*\[\[function_constant\((\d+)\)\]\]\s*;", blank(text)):
        if int(match[3]) not in values:
            raise BadLaunch(f"function constant {match[3]} ({match[2]}) has no value")
        value = str(values[int(match[3])]).lower()
        edits.append((match.start(), match.end(), f"static const {match[1]} {match[2]} = {match[1]}({value});"))
    return _edit(text, edits)


def _threadgroup_arrays(text: str) -> str:
    """`threadgroup T a[N];` in a function: shared by the threads of a group, with bounds of its own."""
    masked, edits, count = blank(text), [], 0
    for match in re.finditer(r"\bthreadgroup\s+(?=[A-Za-z_])", masked):
        head = re.compile(r"[\w:]+(?:\s+(?=<))?").match(masked, match.end())
        assert head is not None
        end = closing(masked, head.end(), "<>") if masked[head.end() : head.end() + 1] == "<" else head.end()
        kind, declared = text[match.end() : end], []
        while name := re.compile(r"\s+(\w+)\s*|\s*,\s*(\w+)\s*").match(masked, end):
            end = name.end()
            start = end
            while masked[end : end + 1] == "[":
                end = re.compile(r"\s*").match(masked, closing(masked, end, "[]")).end()  # type: ignore[union-attr]
            declared.append((name[1] or name[2], text[start:end].strip()))
            if masked[end : end + 1] != ",":
                break
        if not declared or masked[end : end + 1] != ";":
            continue  # a pointer, a reference, a parameter
        new = []
        for name_of, extent in declared:
            new.append(f'auto& {name_of} = shim::threadgroup_array<threadgroup {kind}{extent}>({count}, "{name_of}")')
            count += 1
        edits.append((match.start(), end, "; ".join(new)))
    return _edit(text, edits)


def _vector_constructors(text: str) -> str:
    masked = blank(text)
    aliases = re.findall(rf"\busing\s+(\w+)\s*=\s*(?:metal::)?(?:vec\s*<|{_VECTOR}\s*;)", masked)
    aliases += re.findall(rf"\btypedef\s+(?:metal::)?(?:vec\s*<[^;]*>|{_VECTOR})\s+(\w+)\s*;", masked)
    named = "|".join([rf"(?:metal::)?{_VECTOR}", *map(re.escape, aliases)])
    if cast := re.search(rf"(?<![\w>])\s*(?<!sizeof)(?<!alignof)\(\s*(?:{named})\s*\)\s*[\w(]", masked):
        line = masked[: cast.end()].count("\n") + 1
        raise BadLaunch(f"line {line}: C-style cast to a vector type; write it as a constructor call")
    edits = []
    for match in re.finditer(rf"(?<![\w:])({named})\s*\(", masked):
        edits.append((match.start(), match.end(), f"shim::make<{match[1]}>("))
    for match in re.finditer(rf"\bstatic_cast\s*<\s*({named})\s*>\s*\(", masked):
        edits.append((match.start(), match.end(), f"shim::make<{match[1]}>("))
    for match in re.finditer(r"(?:metal::)?\bvec\s*<", masked):
        end = closing(masked, match.end() - 1, "<>")
        if opening := re.compile(r"\s*\(").match(masked, end):
            edits.append((match.start(), opening.end(), f"shim::make<{text[match.start() : end]}>("))
    return _edit(text, edits)
