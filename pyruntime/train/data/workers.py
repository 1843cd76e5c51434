"""Processes that share out numbered tasks.

Each is given one task at a time over a pipe of its own and answers when it has done it, so nothing piles up.
A process that is killed is noticed, and one whose parent is gone ends.
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
    """`count` processes that call `work`, which is pickled; 0: this process does it. A context manager."""

    def __init__(self, count: int, work: Callable[[Task], Result]):
        self._work = work
        self._processes: dict[connection.Connection, multiprocessing.process.BaseProcess] = {}
        # This process may have threads, which no fork survives; so a server forks the others, and imports
        # once for all of them.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([work.__class__.__module__, __name__])
        for _ in range(count):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, work), daemon=True, name="pyr-tokenize")
            process.start()
            theirs.close()  # or its end would never be seen
            self._processes[mine] = process

    def map(self, tasks: Iterable[Task]) -> Iterator[Result]:
        """The results, as they come. Raises the exception of a task, and ConfigError where a process
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
                        f"A process that made tokens has ended{self._how(pipe)}; what was done is kept, so "
                        "start again, with fewer workers where memory was short."
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
            # Or it would stay, with all it has imported, as long as we do.
            forkserver._forkserver._stop()  # type: ignore[attr-defined]


def _give(pipe: connection.Connection, tasks: Iterator[Task], busy: set[connection.Connection]) -> None:
    for task in tasks:
        with contextlib.suppress(OSError):  # it has ended, which is seen when it is waited for
            pipe.send(task)
        busy.add(pipe)
        return


def _end_with_parent() -> None:
    """Ends this process in the midst of a task when its parent is gone."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
    os._exit(1)


def _serve(pipe: connection.Connection, work: Callable[[Task], Result]) -> None:
    """What a process does until its parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is sent it too, and ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the library's own threads would be as many again
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
