"""Signals wait for the end of a step, but only once."""

import os
import signal
import threading
import time

import pytest

from pyruntime.comm import PeerLost
from pyruntime.train.signals import Stopped, StopRequest


def test_outside_a_step_a_signal_stops_at_once():
    with pytest.raises(Stopped, match=r"Stopped by SIGTERM\.") as stopped, StopRequest():
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
