"""Signals wait for the end of a step, but only once, and not for long."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from pyruntime.cli.main import _last_words
from pyruntime.comm import PeerLost
from pyruntime.train.signals import Stopped, StopRequest


def test_outside_a_step_a_signal_stops_at_once():
    with (
        pytest.raises(Stopped, match=r"SIGTERM before it began\.") as stopped,
        StopRequest() as request,
    ):
        request.says("before it began.")
        os.kill(os.getpid(), signal.SIGTERM)
    assert stopped.value.signum == signal.SIGTERM


def test_inside_a_step_the_first_signal_is_noted_and_the_second_stops():
    with StopRequest() as stop:
        with pytest.raises(Stopped, match="SIGINT"), stop.deferred():
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.signum == signal.SIGINT
            noted = True
            os.kill(os.getpid(), signal.SIGTERM)
            noted = False
        assert noted


def test_a_noted_signal_stops_at_the_end_at_the_latest():
    with StopRequest() as stop, pytest.raises(Stopped, match="SIGINT"), stop.deferred():
        os.kill(os.getpid(), signal.SIGINT)


def test_what_is_saved_is_said_of_a_second_signal_and_after_the_last_step():
    with StopRequest() as stop:
        step = stop.deferred(lambda: "after step 3; it is saved.")
        with pytest.raises(Stopped, match="SIGINT after step 3; it is saved"), step:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(Stopped, match="SIGINT after step 3; it is saved"):
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_does_not_replace_a_communication_error_on_its_way_out():
    with pytest.raises(PeerLost, match="the reason"), StopRequest() as stop:
        try:
            raise PeerLost("the reason")
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.signum == signal.SIGTERM


def test_last_words_are_not_cut_short():
    with StopRequest() as stop:
        stop.ending()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signum == signal.SIGTERM


def test_the_handlers_that_were_there_come_back():
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_program_that_is_ending_waits_for_a_signal_and_not_longer():
    with StopRequest() as stop:
        stop.ending()
        begin = time.monotonic()
        stop.wait(0.2)
        assert time.monotonic() - begin >= 0.2
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
        stop.wait(60.0)
        assert stop.signum == signal.SIGTERM and time.monotonic() - begin < 30


LONG_STEP = """
import sys, torch
from pyruntime.cli.main import _end_now
from pyruntime.train import signals
signals.STEP_MAY_TAKE_S = float(sys.argv[1])
torch.set_num_threads(1)
big = torch.eye(3000)
with signals.StopRequest(_end_now) as stop, stop.deferred(lambda: "in the midst of step 3; it holds step 2."):
    with stop.saving() if sys.argv[2] == "saving" else stop.deferred():
        print("begun", flush=True)
        torch.linalg.matrix_power(big, 2**62)  # one call of C++, minutes long
"""


def long_step(step_may_take_s, *, saving=False):
    """A process in the midst of a step that does not end by itself."""
    arguments = [str(step_may_take_s), "saving" if saving else "step"]
    process = subprocess.Popen(
        [sys.executable, "-c", LONG_STEP, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "begun\n"
    return process


def ended(process):
    """Its exit code, what it said, and how many seconds it took from now."""
    start = time.monotonic()
    _, said = process.communicate(timeout=60)
    return process.returncode, said, time.monotonic() - start


def test_a_step_that_does_not_end_is_cut_short():
    process = long_step(0.5)
    process.send_signal(signal.SIGTERM)
    code, said, seconds = ended(process)
    assert code == 128 + signal.SIGTERM
    assert said == "pyruntime: Stopped by SIGTERM in the midst of step 3; it holds step 2.\n"
    assert 0.4 < seconds < 5.0


@pytest.mark.parametrize("saving", [True, False])
@pytest.mark.second_tier("True")
def test_the_second_signal_ends_it_at_once(saving):
    process = long_step(0.5 if saving else 60.0, saving=saving)
    process.send_signal(signal.SIGINT)
    time.sleep(1.0)
    assert process.poll() is None  # what is being written is waited for, and so is a step for a while
    process.send_signal(signal.SIGINT)
    code, said, seconds = ended(process)
    assert code == 128 + signal.SIGINT and said.startswith("pyruntime: Stopped by SIGINT")
    assert seconds < 3.0


def test_a_lost_peer_ends_with_how_to_go_on(capsys):
    lost, kept = PeerLost("rank 1 has ended."), "go on with --checkpoint.resume run (it holds step 2)."
    with StopRequest() as stop:
        stop.says("before the first step; nothing was saved.")
        assert _last_words(lost, stop) == 1
        with contextlib.suppress(PeerLost), stop.deferred(lambda: f"in the midst of step 3 of 4; {kept}"):
            raise lost
        assert _last_words(lost, stop) == 1
    said = "pyruntime: rank 0: PeerLost: rank 1 has ended. This rank ended"
    assert capsys.readouterr().err.splitlines() == [
        f"{said} before the first step; nothing was saved.",
        f"{said} in the midst of step 3 of 4; {kept}",
    ]


def test_a_rank_that_has_found_no_other_speaks_for_itself(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "2")
    with StopRequest() as stop:
        stopped = Stopped(signal.SIGINT, "before the first step; nothing was saved.")
        assert _last_words(stopped, stop) == 130
        stop.is_of_a_job = True  # rank 0 says it
        assert _last_words(stopped, stop) == 130
    assert capsys.readouterr().err == f"pyruntime: rank 2: {stopped}\n"
