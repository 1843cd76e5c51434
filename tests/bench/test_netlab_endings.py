"""How ranks of bench/netlab end, by themselves or by faults that were asked for, and what it says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time

import pytest

from tests.bench.netlab_runs import ROOT, command, hosts, largest_gap, netlab, on_a_network


@on_a_network
@pytest.mark.parametrize(
    ("ending", "code", "sentence"),
    [
        ("sys.exit(7)", 7, "netlab: rank 3 on host 1 ended with exit code 7.\n"),
        ("os.kill(os.getpid(), 11)", 139, "netlab: rank 3 on host 1 was killed by SIGSEGV.\n"),
    ],
)
def test_the_exit_code_is_that_of_the_rank_that_failed(ending, code, sentence):
    # Rank 0 ends well, and later: netlab waits for it.
    program = f"""
        if rank == 3:
            {ending}
        if rank == 0:
            time.sleep(0.5)
            tell("done")
    """
    done = netlab(*hosts(2, 2), *command(program))
    assert (done.returncode, done.stdout, done.stderr) == (code, '["done"]\n', sentence)


@on_a_network
def test_other_ranks_have_the_grace_then_sigterm_then_sigkill():
    program = """
        if rank == 0:
            sys.exit(3)
        def terminated(*_):
            tell(rank, "was told to end")
            if rank == 1:
                sys.exit(0)
        signal.signal(signal.SIGTERM, terminated)
        while True:
            time.sleep(10)
    """
    shorter = "from bench.netlab import __main__, supervise; supervise.KILL_AFTER_S = 0.3; __main__.main()"
    arguments = [*hosts(1, 3), "--grace", "0.4s", *command(program)]
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", shorter, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert time.monotonic() - start > 0.4 + 0.3
    assert done.returncode == 3
    assert sorted(done.stdout.splitlines()) == ['[1, "was told to end"]', '[2, "was told to end"]']
    assert "ranks 1, 2 did not end within 0.4 s (--grace): sent SIGTERM" in done.stderr
    assert (
        "rank 0 on host 0 ended with exit code 3; then rank 2 on host 0 was killed by SIGKILL" in done.stderr
    )


@on_a_network
def test_a_rank_is_killed_when_asked_and_netlab_says_that_it_was_asked():
    done = netlab(*hosts(2, 2), "--fail", "kill:rank2@0.5s", "--grace", "0s", "--", "sleep", "30")
    assert done.returncode == 137
    moment = float(re.search(r"netlab: (\d+\.\d+) s: rank 2 is killed\.\n", done.stderr)[1])
    assert 0.5 <= moment < 3
    assert "netlab: rank 2 on host 1 was killed by SIGKILL (asked for by --fail); then " in done.stderr


@on_a_network
def test_faults_can_be_counted_from_when_a_rank_says_that_it_is_ready(tmp_path):
    ready = tmp_path / "ready"
    program = f"""
        time.sleep(0.7)
        if rank == 0:
            open({str(ready)!r}, "w").close()
        time.sleep(30)
    """
    ask = ["--fail", "kill:rank1@0.2s", "--ready", str(ready), "--grace", "0s"]
    done = netlab(*hosts(1, 2), *ask, *command(program))
    moment = float(re.search(r"netlab: (\d+\.\d+) s: rank 1 is killed\.\n", done.stderr)[1])
    assert moment >= 0.9
    assert done.returncode == 137
    again = netlab(*hosts(1, 2), *ask, "--", "true")
    assert again.returncode == 2 and f"--ready {ready} exists already" in again.stderr


@on_a_network
def test_a_stopped_rank_stands_still_and_goes_on():
    program = """
        stamps = [time.monotonic()]
        while time.monotonic() < stamps[0] + 1.6:
            time.sleep(0.01)
            stamps.append(time.monotonic())
        tell(rank, stamps)
    """
    done = netlab(*hosts(1, 2), "--fail", "stop:rank1@0.5s+0.8s", *command(program))
    assert done.returncode == 0, done.stderr
    stamps = dict(json.loads(line) for line in done.stdout.splitlines())
    assert 0.75 < largest_gap(stamps[1]) < 1.4
    assert largest_gap(stamps[0]) < 0.7
    assert re.search(r"0\.\d+ s: rank 1 is stopped\.\nnetlab: 1\.\d+ s: rank 1 goes on\.", done.stderr)


@on_a_network
def test_a_rank_stopped_for_good_does_not_keep_the_run_from_ending():
    done = netlab(*hosts(2), "--fail", "stop:rank1@0.2s", "--", "sleep", "0.5")
    assert done.returncode == 137
    assert "rank 1 on host 1 was killed by SIGKILL (stopped for good by --fail, and all other" in done.stderr


@on_a_network
def test_a_command_that_cannot_be_run_is_one_sentence_and_exit_code_127(tmp_path):
    done = netlab(*hosts(1), "--", "no-such-program-here")
    assert done.returncode == 127
    assert "there is no program 'no-such-program-here'" in done.stderr
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    done = netlab(*hosts(2), "--", str(script))
    assert done.returncode == 127
    assert re.search(r"rank \d could not be started: .*No such file or directory", done.stderr)
