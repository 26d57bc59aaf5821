"""The threads that MLX works on: jobs in order, one at a time. Knows nothing of models.

What MLX has in flight belongs to the thread that started it, every thread that used MLX leaves an OS thread behind, and
one that ends before the process makes MLX abort it at exit now and then. So these threads never end: one that nobody
uses is taken over by the next `Worker`, and at exit they stand still.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from mlx_spec.errors import MLXSpecError

Result = TypeVar("Result")


class Worker:
    """A thread of one's own, for as long as this object lives.

    All methods may be called from any thread. Raises MLXSpecError in a process forked from one that had a worker.
    """

    _thread: _Thread | None = None

    def __init__(self) -> None:
        _check_process()
        try:
            self._thread = _idle.pop()
        except IndexError:
            self._thread = _Thread()

    def __del__(self) -> None:
        if self._thread is not None:
            _idle.append(self._thread)

    def run(self, function: Callable[[], Result]) -> Result:
        """What `function` gives or raises on the worker, after the jobs before it.

        An exception in this thread, such as Ctrl-C, ends the waiting: the function is dropped if it has not begun, and
        ends in the background if it has.
        """
        assert self._thread is not None
        if threading.get_ident() == self._thread.ident:
            return function()
        done = threading.Lock()
        done.acquire()
        job = _Job(function, done.release)
        del function
        self._put(job)
        try:
            done.acquire()
        except BaseException:
            job.function = None
            raise
        return job.outcome()

    async def wait_for(self, function: Callable[[], Result]) -> Result:
        """`run` for coroutines: the event loop goes on meanwhile."""
        import asyncio

        done, loop = asyncio.Event(), asyncio.get_running_loop()

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # a loop that has been closed
                loop.call_soon_threadsafe(done.set)

        job = _Job(function, tell)
        del function
        self._put(job)
        try:
            await done.wait()
        except BaseException:
            job.function = None
            raise
        return job.outcome()

    def post(self, function: Callable[[], object]) -> None:
        """Have `function` run without waiting for it. Never raises, and takes no lock: for finalizers."""
        if self._thread is not None:
            self._thread.jobs.put(_Job(function, lambda: None))

    def _put(self, job: _Job[Result]) -> None:
        _check_process()
        if _ending:
            if threading.current_thread() is threading.main_thread():
                raise MLXSpecError("the program is ending: no model runs any more.")
            _stop()  # a daemon, which has no one to answer to
        assert self._thread is not None
        self._thread.jobs.put(job)


class _Job(Generic[Result]):
    """A function, and what came of it."""

    __slots__ = ("_error", "_result", "done", "function")

    def __init__(self, function: Callable[[], Result], done: Callable[[], object]) -> None:
        self.function: Callable[[], Result] | None = function
        self.done = done
        self._result: list[Result] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        function, self.function = self.function, None
        if function is not None:
            try:
                self._result.append(function())
            except BaseException as error:
                self._error = error

    def outcome(self) -> Result:
        error, self._error = self._error, None
        if error is None:
            return self._result.pop()
        try:
            raise error
        finally:
            del error  # else the exception would hold itself, by this frame


class _Thread:
    """Works off its jobs for ever."""

    def __init__(self) -> None:
        global _process
        _process = os.getpid()
        self.jobs: SimpleQueue[_Job[Any]] = SimpleQueue()
        # A daemon: others would be waited for at exit.
        thread = threading.Thread(target=_work, args=(self.jobs,), name="mlx-spec", daemon=True)
        thread.start()
        self.ident = thread.ident
        _threads.append(self)


def _work(jobs: SimpleQueue[_Job[Any]]) -> None:
    while True:
        job = jobs.get()
        if _ending:
            break
        job.run()
        done = job.done
        del job  # before it is known to be done: whoever waited can then free all that it held
        done()
        del done
    _stopped.release()
    _stop()


def _stop() -> None:
    """For ever, keeping all that is held: at exit MLX can neither compute nor end its threads."""
    lock = threading.Lock()
    while True:
        lock.acquire()


_threads: list[_Thread] = []
_idle: list[_Thread] = []
_process: int | None = None
"""Where the first thread was started."""
_ending, _stopped = False, threading.Semaphore(0)


def _check_process() -> None:
    if _process not in (None, os.getpid()):
        raise MLXSpecError(
            "this process was forked from one that had loaded a model, and MLX does not survive that; start it with "
            "multiprocessing's method spawn, or load models only after the fork."
        )


@atexit.register
def _end() -> None:
    """Wait for what is being computed; what is still in the queues stays there."""
    global _ending
    _ending = True
    if _process == os.getpid():
        for thread in _threads:
            thread.jobs.put(_Job(_end, _end))  # wakes it
        for _ in _threads:
            _stopped.acquire()
