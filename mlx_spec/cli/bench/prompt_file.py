"""Reads prompts from a file: JSON Lines, each a string or {"kind": ..., "prompt": ...}. Knows nothing of models."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from mlx_spec.cli.bench.prompts import BenchPrompt
from mlx_spec.cli.prompt import read_file
from mlx_spec.errors import BadConfig, shortened

OWN = "own"
"""The kind of a line that names none."""

ACCEPTED = 'each line is a JSON string, or an object such as {"kind": "code", "prompt": "Write a ..."}'


def read_prompts(file: str) -> list[BenchPrompt]:
    """The prompts of a file, in its order; blank lines are left out.

    Raises BadConfig, naming the line, for what cannot be read, is not UTF-8, has no prompts or a line that is none.
    """
    name = f"prompts file {file!r}"
    data = read_file(file, name, "--prompts")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        broken = data[: error.start].count(b"\n") + 1
        raise BadConfig(f"{name}, line {broken} is not UTF-8: byte {data[error.start]:#04x}; convert it, for instance "
                        "with iconv.") from error  # fmt: skip
    prompts: list[BenchPrompt] = []
    faults: list[tuple[int, str]] = []
    # Not splitlines: a JSON string may hold a line separator of Unicode as it is.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                prompts.append(_prompt(line, f"line {number}"))
            except _NoPrompt as error:
                faults.append((number, str(error)))
    if faults:
        number, fault = faults[0]
        more = f" (as bad: {_lines([number for number, _ in faults[1:]])})" if len(faults) > 1 else ""
        raise BadConfig(f"{name}, line {number}: {fault}{more}; {ACCEPTED}.")
    if not prompts:
        raise BadConfig(f"{name} has no prompts; {ACCEPTED}.")
    return prompts


def of_kinds(prompts: Sequence[BenchPrompt], kinds: Iterable[str]) -> list[BenchPrompt]:
    """Those of these kinds, in the order of `prompts`. Raises BadConfig for a kind that none has."""
    present, wanted = list(dict.fromkeys(prompt.kind for prompt in prompts)), list(kinds)
    for kind in wanted:
        if kind not in present:
            shown = shortened(", ".join(present))
            raise BadConfig(f"no prompt is of the kind {kind!r}; the kinds are {shown}; give some of them to --kinds.")
    return [prompt for prompt in prompts if prompt.kind in wanted]


class _NoPrompt(Exception):
    """Why a line is none."""


def _prompt(line: str, name: str) -> BenchPrompt:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):  # also for numbers of thousands of digits
        raise _NoPrompt(f"{_shown(line.strip())} is not JSON") from None
    kind: Any = OWN
    if isinstance(value, dict):
        unknown = [key for key in value if key not in ("kind", "prompt")]
        if unknown:
            raise _NoPrompt(f"the key {_shown(unknown[0])} is not known")
        if "prompt" not in value:
            raise _NoPrompt('the object has no "prompt"')
        kind, value = value.get("kind", OWN), value["prompt"]
        if not isinstance(kind, str) or not kind.strip() or not kind.isprintable() or "," in kind:
            raise _NoPrompt(f'"kind" is {_shown(kind)}, which is not a word')
    if not isinstance(value, str):
        raise _NoPrompt(f"{_shown(value)} is not a text")
    if not value.strip():
        raise _NoPrompt("the prompt is empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise _NoPrompt("the prompt has half of a surrogate pair, which is no character") from None
    return BenchPrompt(kind.strip(), name, value)


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=True)
    return shortened(repr(text) if isinstance(value, str) else text)


def _lines(numbers: Sequence[int]) -> str:
    shown = ", ".join(str(number) for number in numbers[:5])
    return f"line {shown}" if len(numbers) == 1 else f"lines {shown}{' ...' if len(numbers) > 5 else ''}"
