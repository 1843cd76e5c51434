"""Distributes numbered tasks over processes.

Each process gets one task at a time over its own pipe and answers when it is done, so nothing piles up. A
killed process is noticed, and a process whose parent is gone ends.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import connection, forkserver
from typing import Generic, TypeVar

from pyruntime.train.errors import ConfigError

Task = TypeVar("Task")
Result = TypeVar("Result")


class Workers(Generic[Task, Result]):
    """Runs `work`, which is pickled, in `count` processes; 0: in this process. A context manager."""

    def __init__(self, count: int, work: Callable[[Task], Result]):
        self._work = work
        self._processes: dict[connection.Connection, multiprocessing.process.BaseProcess] = {}
        # This process may have threads, which a fork would break; so a server forks the workers, and imports
        # once for all of them.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([work.__class__.__module__, __name__])
        for _ in range(count):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, work), daemon=True, name="pyr-tokenize")
            process.start()
            theirs.close()  # else the end of the process would go unnoticed
            self._processes[mine] = process

    def map(self, tasks: Iterable[Task]) -> Iterator[Result]:
        """Yields the results as they arrive. Raises a task's exception, and ConfigError if a process
        ended."""
        if not self._processes:
            yield from map(self._work, tasks)
            return
        left = iter(tasks)
        busy: set[connection.Connection] = set()
        for pipe in self._processes:
            _give(pipe, left, busy)
        while busy:
            for ready in connection.wait(busy):
                pipe = next(each for each in busy if each is ready)
                try:
                    result, error = pipe.recv()
                except (EOFError, OSError):
                    raise ConfigError(
                        f"A process that made tokens has ended{self._how(pipe)}; finished parts are kept, so "
                        "start again, with fewer workers if memory was short."
                    ) from None
                busy.remove(pipe)
                if error is not None:
                    raise error
                _give(pipe, left, busy)
                yield result

    def _how(self, pipe: connection.Connection) -> str:
        process = self._processes[pipe]
        process.join(1.0)
        code = process.exitcode
        return f" by {signal.Signals(-code).name}" if code is not None and code < 0 else ""

    def __enter__(self) -> Workers[Task, Result]:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe, process in self._processes.items():
            process.terminate()
            pipe.close()
        for process in self._processes.values():
            process.join()
        if self._processes:
            # Else the server, with all its imports, would live as long as this process.
            forkserver._forkserver._stop()  # type: ignore[attr-defined]


def _give(pipe: connection.Connection, tasks: Iterator[Task], busy: set[connection.Connection]) -> None:
    for task in tasks:
        with contextlib.suppress(OSError):  # the process has ended; map() notices when it waits
            pipe.send(task)
        busy.add(pipe)
        return


def _end_with_parent() -> None:
    """Ends this process, even in the middle of a task, when its parent is gone."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
    os._exit(1)


def _serve(pipe: connection.Connection, work: Callable[[Task], Result]) -> None:
    """Serves tasks until the parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent also gets it, and ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process per core needs no more threads
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        try:
            task = pipe.recv()
        except (EOFError, OSError):
            return
        answer: tuple[Result | None, Exception | None]
        try:
            answer = work(task), None
        except Exception as error:
            answer = None, error
        with contextlib.suppress(OSError):
            pipe.send(answer)
