"""Runs the chosen command and ends with one sentence and an exit code.

0     done
1     a run failed: not finite, a lost peer, or a defect of this program (with its traceback)
2     the request is wrong: one sentence names the part
130   ended by SIGINT (Ctrl-C); 143 by SIGTERM; 141, silently, if nobody reads the output any more
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

from pyruntime import __version__
from pyruntime.cli.arguments import HelpShown
from pyruntime.cli.environment import started_rank
from pyruntime.train.errors import ConfigError, TrainingError
from pyruntime.train.signals import Stopped, StopRequest

USAGE = """usage: python -m pyruntime COMMAND [OPTIONS]

  train      train a Llama on text; torchrun --nproc-per-node N -m pyruntime train for N ranks
  tokenize   turn text into a folder of tokens, in parallel, for runs to read
  generate   continue a prompt with a trained checkpoint
  convert    turn a checkpoint into a Hugging Face model, or the reverse
  report     write one HTML page about a run: what was hidden behind what, and a timeline
  doctor     show what was built, the hardware, and which tier each operation takes
  mesh       show which ranks of a run exchange data, over which transport, and how many bytes
  schedule   show, check and simulate a pipeline schedule
  profile    time a stage of a model and find the best slices of a sequence for a pipeline
  plan       find the fastest mesh that fits a model into a cluster, before a GPU is rented
  simulate   run a step on GPUs that are not there, in virtual time, and see what stays exposed
  tune       measure which tier is fastest for a model's linears on this machine, and store it
  members    run the service that joins replicas which come and go into one run

python -m pyruntime COMMAND --help documents every option; --version prints the version. An installation has
the command `pyruntime`, which is the same."""

COMMANDS = (
    "train",
    "tokenize",
    "generate",
    "convert",
    "report",
    "doctor",
    "mesh",
    "schedule",
    "profile",
    "plan",
    "simulate",
    "tune",
    "members",
)
LAUNCHER_ENDS_US_S = 5.0
"""Longest wait of other ranks for the launcher to end them, so that only rank 0 prints the sentence."""


def main(argv: list[str]) -> int:
    """Runs a command line (without the program's name) and returns its exit code."""
    try:
        return _run(argv)
    finally:
        _drop_unread_output()


def _run(argv: list[str]) -> int:
    with StopRequest(_end_now) as stop:
        try:
            return _dispatch(argv, stop)
        except BaseException as ending:
            stop.ending()
            return _last_words(ending, stop)


def _end_now(stopped: Stopped) -> None:
    """Ends the process from another thread, since the working thread does not answer. If another rank has
    failed, that failure is the reason given."""
    from pyruntime.comm import post_failure

    failure = _failure_of_another()
    if failure is None:
        post_failure(str(stopped))
        _say_once(str(stopped))
        code = 128 + stopped.signum
    else:
        _explain(failure, stopped.where)
        code = 1
    os._exit(code)


def _failure_of_another() -> Exception | None:
    """Returns the failure because of which a launcher stops all ranks: one that a rank reported, or that a
    rank ended. None if it stops them for another reason."""
    from pyruntime.comm.exchange import raise_for_ended
    from pyruntime.comm.groups import job_rank_name

    try:
        raise_for_ended(f"{job_rank_name(started_rank())} was asked to stop")
    except Exception as found:
        return None if "reports: Stopped by " in str(found) else found  # the signal usually goes to all
    return None


def _last_words(ending: BaseException, stop: StopRequest) -> int:
    """Prints why the program ends and returns the exit code; raises exceptions that are not ours again."""
    match ending:
        case HelpShown():
            return 0
        case BrokenPipeError():
            return 128 + signal.SIGPIPE
        case ConfigError():
            _say_on_one_rank(str(ending), stop)
            return 2
        case TrainingError():
            _say_on_one_rank(str(ending), stop)
            return 1
        case Stopped():
            if ending.signum == signal.SIGTERM and (failure := _failure_of_another()) is not None:
                _explain(failure, ending.where)
                return 1
            rank = started_rank()
            if rank and not stop.is_of_a_job:
                _say(f"pyruntime: rank {rank}: {ending}")
            elif ending.signum != signal.SIGPIPE:
                _say_once(str(ending))
            return 128 + ending.signum
        case Exception():
            _explain(ending, stop.where())
            return 1
    raise ending


def _dispatch(argv: list[str], stop: StopRequest) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if argv[0] == "--version":
        print(f"pyruntime {__version__}")
        return 0
    command, rest = argv[0], argv[1:]
    if command not in COMMANDS:
        raise ConfigError(f"There is no command {command}; use {', '.join(COMMANDS[:-1])} or {COMMANDS[-1]}.")
    module = importlib.import_module(f"pyruntime.cli.{command}")
    module.main(rest, stop) if command == "train" else module.main(rest)
    return 0


def _drop_unread_output() -> None:
    """Discards output that a closed pipe cannot take, about which Python would complain at exit."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)


def _say_on_one_rank(sentence: str, stop: StopRequest) -> None:
    """Prints the sentence that usually ends all ranks: on rank 0, and on any other rank that the launcher
    does not end soon after."""
    _say_once(sentence)
    _leave_to_torchrun(sentence)
    if rank := started_rank():
        stop.wait(LAUNCHER_ENDS_US_S)
        if not stop.signum:  # so rank 0 has not failed with it
            _say(f"pyruntime: rank {rank}: {sentence}")


def _leave_to_torchrun(sentence: str) -> None:
    """Writes the file from which torchrun takes the last line of its traceback."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    more = {"py_callstack": sentence, "timestamp": str(int(time.time()))}
    with contextlib.suppress(OSError):  # the sentence is on stderr already
        Path(path).write_text(json.dumps({"message": {"message": sentence, "extraInfo": more}}))


def _say_once(sentence: str) -> None:
    if started_rank() == 0:
        _say(f"pyruntime: {sentence}")


def _say(text: str) -> None:
    """Prints text and newline in one write, so that lines of several ranks do not mix."""
    print(f"{text}\n", end="", file=sys.stderr, flush=True)


def _explain(error: Exception, where: str) -> None:
    """Prints a CommError as a sentence with `where` the run ended and what was saved. Anything else is a
    defect and is printed with its traceback."""
    from pyruntime import CommError

    sentence = f"rank {started_rank()}: {type(error).__name__}: {error}"
    if isinstance(error, CommError):
        if where:
            sentence = f"{sentence.removesuffix('.')}. This rank ended {where}"
        _say(f"pyruntime: {sentence}")
    else:
        trace = "".join(traceback.format_exception(error))
        _say(f"pyruntime: rank {started_rank()} failed.\n{trace}")
    _leave_to_torchrun(sentence)
