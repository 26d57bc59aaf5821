"""One thread at a time: a guard for what MLX ties to the thread that started it. Knows nothing of models."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mlx_spec.errors import MLXSpecError


class OneThread:
    """Lets any number of uses overlap within one thread, and refuses a second thread while there is one."""

    def __init__(self, name: str) -> None:
        """name: what is guarded, for the message."""
        self._name = name
        self._lock = threading.Lock()
        self._owner, self._uses = 0, 0

    @contextmanager
    def __call__(self) -> Iterator[Callable[[], None]]:
        """Use it in this thread; the function given back raises MLXSpecError when called in another one."""
        thread = threading.get_ident()

        def check() -> None:
            if threading.get_ident() != thread:
                raise MLXSpecError(
                    f"a generation of {self._name} was started in one thread and continued in another; stay in one."
                )

        with self._lock:
            if self._uses and self._owner != thread:
                raise MLXSpecError(
                    f"{self._name} is generating in another thread; wait until that has ended, or load it twice."
                )
            self._owner, self._uses = thread, self._uses + 1
        try:
            yield check
        finally:
            with self._lock:
                self._uses -= 1
