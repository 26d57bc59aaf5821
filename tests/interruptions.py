"""Ctrl-C at a chosen line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def interrupted(action: Callable[[], object], at: int = sys.maxsize, folder: str = "/mlx_spec/") -> tuple[bool, int]:
    """Run `action` with KeyboardInterrupt in the place of line number `at`, from 1, of those it runs in files whose
    paths contain `folder`. Whether it came to that, and how many lines were run."""
    lines = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal lines
        if folder not in frame.f_code.co_filename.replace("\\", "/"):
            return None
        if event == "line":
            lines += 1
            if lines == at:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    except KeyboardInterrupt:
        return True, lines
    finally:
        sys.settrace(before)
    return False, lines
