"""From Metal source text to C++ that means the same.

Line numbers stay those of the Metal source, so that a compiler's message and a detector's report name its lines.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from .errors import BadLaunch
from .source import Program, blank, closing, heads

_VECTOR = r"(?:bool|u?char|u?short|u?int|u?long|half|bfloat|float)[234]"


def translate(program: Program) -> str:
    """The C++ reading of the source. What C++ has no words for is put into other words, and nothing else:

    arrays in threadgroup memory, function constants, vector constructors, MLX's explicit instantiation.
    """
    text = re.sub(r"^template \[\[host_name\(.*?\)\]\] \[\[kernel\]\] decltype.*?;\s*?$", "", program.text, flags=re.M)
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
    bodies = []
    for kernel in heads(masked).values():
        opening = masked.index("{", closing(masked, kernel.end() - 1, "()"))
        bodies.append(range(opening, closing(masked, opening, "{}")))
    body = None
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
        inside = next((number for number, extent in enumerate(bodies) if match.start() in extent), None)
        if inside is None:
            line = masked[: match.start()].count("\n") + 1
            raise BadLaunch(f"line {line}: a threadgroup variable outside of a kernel function")
        if inside != body:
            body, count = inside, 0
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
