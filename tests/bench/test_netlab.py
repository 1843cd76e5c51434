"""bench/netlab.py: hosts are apart, links keep their rate, faults happen, and nothing stays behind."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from bench.netlab_network import missing

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "bench" / "netlab.py")
NEEDED = missing()
on_a_network = pytest.mark.skipif(bool(NEEDED), reason=NEEDED or "nothing is missing")

# What the ranks' programs begin with. A connection fails until the other side listens.
PRELUDE = r"""
import json, os, signal, socket, sys, threading, time
rank, host = int(os.environ["RANK"]), int(os.environ["GROUP_RANK"])
def tell(*what):
    os.write(1, f"{json.dumps(what)}\n".encode())  # at once, so that lines of several ranks do not mix
def listen(port):
    return socket.create_server(("0.0.0.0", port))
def connect(host, port):
    while True:
        try:
            return socket.create_connection((f"host{host}", port))
        except OSError:
            time.sleep(0.01)
def receive_exactly(connection, size):
    while size:
        size -= len(connection.recv(min(size, 1 << 18))) or sys.exit("the sender closed early")
"""


def command(program: str, *arguments: str) -> list[str]:
    return ["--", sys.executable, "-c", PRELUDE + textwrap.dedent(program), *arguments]


def netlab(*arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=timeout, cwd=ROOT
    )


def hosts(count: int, ranks: int = 1, rate: str = "1gbit") -> list[str]:
    return ["--hosts", str(count), "--ranks-per-host", str(ranks), "--rate", rate]


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """netlab_plan; its sibling is found where Python looks for it when netlab.py is run."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("netlab_plan")


def test_rates_and_faults_are_read_or_refused_with_what_to_write(plan):
    assert plan.parse_rate("1gbit") == 10**9
    assert plan.parse_rate("2.5MBit") == 2_500_000
    assert plan.parse_rate_of_host("2=300mbit") == (2, 300_000_000)
    assert plan.Fault.parse("link:1@5s+0.5s") == plan.Fault("link:1@5s+0.5s", "link", 1, 5.0, 0.5)
    assert plan.Fault.parse("kill:rank12@2.5s") == plan.Fault("kill:rank12@2.5s", "kill", 12, 2.5, None)
    for rate in ("1gbps", "fast", "10", "-1mbit", "1kbit", "101gbit"):
        with pytest.raises(ValueError, match=r"use a rate from|write a number and kbit, mbit or gbit"):
            plan.parse_rate(rate)
    for fault in ("kill:rank1@5s+3s", "kill:1@5s", "link:rank1@5s", "stop:rank1", "stop:rank1@5"):
        with pytest.raises(ValueError, match="is not a fault; write link:HOST@TIME"):
            plan.Fault.parse(fault)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([*hosts(2, rate="1gb"), "--", "true"], "argument --rate: '1gb' is not a rate; write a number and"),
        ([*hosts(0), "--", "true"], "--hosts 0 is not possible; use 1 to 200"),
        ([*hosts(1, 0), "--", "true"], "--ranks-per-host 0 is not possible; use at least 1"),
        (
            [*hosts(2), "--rate-host", "2=1mbit", "--", "true"],
            "--rate-host names host 2; the hosts are 0 to 1",
        ),
        ([*hosts(2), "--fail", "kill:rank2@1s", "--", "true"], "names rank 2; the ranks are 0 to 1"),
        (hosts(2), "there is no COMMAND; write -- and the command at the end"),
        (["--hosts", "2", "--", "true"], "the following arguments are required: --ranks-per-host, --rate"),
    ],
)
def test_wrong_options_are_one_sentence_and_exit_code_2(arguments, complaint):
    done = netlab(*arguments)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_tool_is_named_with_its_package(tmp_path, monkeypatch):
    for tool in ("unshare", "nsenter", "mount", "ip"):
        (tmp_path / tool).symlink_to("/bin/true")
    monkeypatch.setenv("PATH", str(tmp_path))
    done = netlab(*hosts(1), "--", "true")
    assert done.returncode == 2
    assert "netlab needs tc, which PATH does not have; try: apt-get install iproute2" in done.stderr


@on_a_network
def test_without_the_right_to_make_namespaces_it_says_so():
    launch = ["setpriv", "--bounding-set=-sys_admin", sys.executable, SCRIPT, *hosts(1), "--", "true"]
    done = subprocess.run(launch, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "this process lacks CAP_SYS_ADMIN; run it as root" in done.stderr


@on_a_network
def test_a_rank_has_torchruns_environment_and_shares_namespaces_with_its_host_only(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "of_this_machine")
    program = """
        shared = {name: os.readlink(f"/proc/self/ns/{name}") for name in ("net", "pid", "uts", "ipc")}
        shared["shm"] = os.stat("/dev/shm").st_dev
        address = socket.gethostbyname(socket.gethostname())
        tell(dict(os.environ), shared, address)
        print("to stderr", file=sys.stderr)
    """
    done = netlab(*hosts(2, 2), "--log-dir", str(tmp_path / "logs"), *command(program))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    said = [json.loads((tmp_path / "logs" / f"rank{rank}.out").read_text()) for rank in range(4)]
    assert (tmp_path / "logs" / "rank3.err").read_text() == "to stderr\n"
    for rank, (environment, _, address) in enumerate(said):
        local, group = str(rank % 2), str(rank // 2)
        wanted = {"RANK": str(rank), "LOCAL_RANK": local, "GROUP_RANK": group, "ROLE_RANK": str(rank)}
        sizes = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2", "ROLE_WORLD_SIZE": "4"}
        names = {"MASTER_ADDR": "10.77.0.1", "OMP_NUM_THREADS": "3", "GLOO_SOCKET_IFNAME": "eth0"}
        assert wanted | sizes | names == {name: environment[name] for name in wanted | sizes | names}
        assert int(environment["MASTER_PORT"]) > 0
        assert environment["PATH"] == os.environ["PATH"]
        assert address == f"10.77.0.{rank // 2 + 1}"
    outside = {name: os.readlink(f"/proc/self/ns/{name}") for name in ("net", "pid", "uts", "ipc")}
    outside["shm"] = os.stat("/dev/shm").st_dev
    for name in outside:
        first, second, third, fourth = (shared[name] for _, shared, _ in said)
        assert first == second and third == fourth
        assert len({first, third, outside[name]}) == 3


@on_a_network
def test_links_keep_their_rate_in_both_directions_at_once():
    # Hosts 0 and 1 send to each other, and so do 2 and 3, of which 3 has the slower link.
    program = """
        peer = host ^ 1
        server = listen(5000)
        sending = connect(peer, 5000)
        receiving, _ = server.accept()
        def send():
            try:
                while True:
                    sending.sendall(bytes(1 << 16))
            except OSError:
                pass
        threading.Thread(target=send, daemon=True).start()
        def receive(seconds):
            start, size = time.monotonic(), 0
            while time.monotonic() < start + seconds:
                size += len(receiving.recv(1 << 18))
            return 8 * size / (time.monotonic() - start)
        receive(0.4)
        tell(host, receive(0.7))
        time.sleep(0.3)  # the peer measures a little longer
        os._exit(0)
    """
    done = netlab(*hosts(4, rate="100mbit"), "--rate-host", "3=40mbit", *command(program))
    assert done.returncode == 0, done.stderr
    received = dict(json.loads(line) for line in done.stdout.splitlines())
    for host, rate in enumerate((100e6, 100e6, 40e6, 40e6)):
        assert 0.80 * rate < received[host] < 1.05 * rate, received


@on_a_network
def test_a_large_message_takes_as_long_as_the_rate_says():
    # 250 kB are 100 ms at 20 Mbit/s. A link that is not limited at first, or a long burst, would be faster.
    program = """
        if host == 1:
            connection, _ = listen(5000).accept()
            receive_exactly(connection, 250_000)
            connection.sendall(b"!")
        else:
            connection = connect(1, 5000)
            start = time.monotonic()
            connection.sendall(bytes(250_000))
            connection.recv(1)
            tell(time.monotonic() - start)
    """
    done = netlab(*hosts(2, rate="20mbit"), *command(program))
    assert done.returncode == 0, done.stderr
    (took,) = json.loads(done.stdout)
    assert 0.095 < took < 0.4


@on_a_network
def test_counters_have_the_bytes_between_hosts_and_not_those_within_one(tmp_path):
    program = """
        if rank in (1, 2):
            receive_exactly(listen(5000).accept()[0], 3_000_000 if rank == 2 else 9_000_000)
        elif rank == 0:
            connect(1, 5000).sendall(bytes(3_000_000))
            connect(0, 5000).sendall(bytes(9_000_000))
    """
    file = tmp_path / "counters.json"
    done = netlab(*hosts(2, 2, rate="200mbit"), "--counters", str(file), *command(program))
    assert done.returncode == 0, done.stderr
    counted = json.loads(file.read_text())
    first, second = counted["hosts"]
    assert 0.1 < counted["seconds"] < 20
    assert [first["host"], second["host"]] == [0, 1]
    assert first["rate_bits_per_s"] == 200_000_000
    for sent, received in (
        (first["sent_bytes"], second["received_bytes"]),
        (second["sent_bytes"], first["received_bytes"]),
    ):
        assert sent == received
    assert 3_000_000 < first["sent_bytes"] < 1.06 * 3_000_000
    assert 0 < second["sent_bytes"] < 200_000  # acknowledgements


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
    shorter = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'bench')!r}); import netlab_run, netlab; "
        "netlab_run.KILL_AFTER_S = 0.3; netlab.main()"
    )
    arguments = [*hosts(1, 3), "--grace", "0.4s", *command(program)]
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", shorter, *arguments], capture_output=True, text=True, timeout=60
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
    assert again.returncode == 2 and f"--ready {ready} is there already" in again.stderr


def largest_gap(stamps: list[float]) -> float:
    return max(b - a for a, b in itertools.pairwise(stamps))


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
def test_a_link_goes_down_and_comes_back_with_its_rate():
    program = """
        if rank == 1:
            connection, _ = listen(5000).accept()
            while message := connection.recv(1 << 18):
                if message[-1:] == b"!":
                    connection.sendall(b"!")
        else:
            connection = connect(1, 5000)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stamps = [time.monotonic()]
            while len(stamps) < 2 or (stamps[-1] < stamps[-2] + 0.5 and stamps[-1] < stamps[0] + 5):
                connection.sendall(b"!")
                connection.recv(1)
                stamps.append(time.monotonic())
                time.sleep(0.01)
            start = time.monotonic()
            connection.sendall(bytes(2_500_000) + b"!")
            connection.recv(1)
            tell(stamps, time.monotonic() - start)
    """
    link = ["--fail", "link:1@0.5s+0.8s"]
    done = netlab(*hosts(2, rate="50mbit"), *link, *command(program))
    assert done.returncode == 0, done.stderr
    stamps, took = json.loads(done.stdout)
    assert len(stamps) > 5  # it worked before
    assert 0.75 < largest_gap(stamps) < 3.0
    assert took > 8 * 2_500_000 / 50e6
    assert re.search(
        r"0\.\d+ s: the link of host 1 is down\.\nnetlab: 1\.\d+ s: the link of host 1 is up again",
        done.stderr,
    )


def processes(marker: str) -> list[int]:
    """Those with `marker` among their arguments."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and marker in (entry / "cmdline").read_text(errors="replace"):
                found.append(int(entry.name))
    return found


def children(parent: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def networks() -> set[str]:
    """The network namespaces that processes of this machine are in."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/ns/net"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(link))
    return found


def soon(what: Callable[[], bool], seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while not what():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


class Running:
    """A netlab with two hosts of two ranks that goes on until a signal ends it."""

    PROGRAM = """
        signal.signal(signal.SIGINT, signal.SIG_IGN if rank == 3 else lambda *_: sys.exit(0))
        tell("up")
        time.sleep(60)
    """

    def __init__(self) -> None:
        self.marker = f"netlab-test-{uuid.uuid4().hex}"
        arguments = [*hosts(2, 2), "--grace", "0.3s", *command(self.PROGRAM, self.marker)]
        self.process = subprocess.Popen(
            [sys.executable, SCRIPT, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert [self.process.stdout.readline() for _ in range(4)] == ['["up"]\n'] * 4
        inside = [pid for host in children(self.process.pid) for pid in (host, *children(host))]
        self.networks = {os.readlink(f"/proc/{pid}/ns/net") for pid in inside}
        assert len(self.networks) == 3  # two hosts and the switch

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()

    def end(self, number: int) -> tuple[int, str]:
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=30)
        return self.process.returncode, errors


@pytest.fixture
def running() -> Iterator[Running]:
    made = Running()
    yield made
    made.close()


@on_a_network
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_is_passed_on_and_leaves_nothing_behind(running, number, code):
    before = os.listdir("/sys/class/net")
    assert len(processes(running.marker)) == 5  # four ranks and netlab itself
    returned, errors = running.end(number)
    assert returned == code
    assert f"{signal.Signals(number).name}: passed to all ranks, which have 0.3 s (--grace) to end" in errors
    if number == signal.SIGINT:  # ranks 0 to 2 end by themselves, rank 3 ignores it
        assert errors.endswith(
            "netlab: rank 3 on host 1 was killed by SIGTERM (sent by netlab after --grace).\n"
        )
    else:
        assert errors.count("was killed by SIGTERM (passed on by netlab)") == 4
    assert processes(running.marker) == []
    assert not running.networks & networks()
    assert os.listdir("/sys/class/net") == before


@on_a_network
def test_killing_netlab_itself_leaves_nothing_behind(running):
    assert running.end(signal.SIGKILL)[0] == -signal.SIGKILL
    assert soon(lambda: processes(running.marker) == [])
    assert soon(lambda: not running.networks & networks())


@on_a_network
def test_a_killed_host_ends_the_run_like_killed_ranks(running):
    unshared = [pid for pid in children(running.process.pid) if children(pid)]
    (first_process,) = children(unshared[1])
    os.kill(first_process, signal.SIGKILL)
    _, errors = running.process.communicate(timeout=30)
    assert running.process.returncode == 137
    assert "host 1 is gone: its first process was killed, and with it ranks 2, 3." in errors
    assert "ranks 0, 1 did not end within 0.3 s (--grace): sent SIGTERM" in errors
    assert processes(running.marker) == []
    assert not running.networks & networks()


@on_a_network
def test_a_command_that_cannot_be_run_is_one_sentence_and_exit_code_127(tmp_path):
    done = netlab(*hosts(1), "--", "no-such-program-here")
    assert done.returncode == 127
    assert "there is no program 'no-such-program-here' to be run" in done.stderr
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    done = netlab(*hosts(2), "--", str(script))
    assert done.returncode == 127
    assert re.search(r"rank \d could not be started: .*No such file or directory", done.stderr)


@on_a_network
def test_gloo_reduces_over_the_limited_network(tmp_path):
    program = """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        x = torch.full((1_000_000,), float(rank + 1))
        dist.all_reduce(x)
        assert x.eq(3.0).all()
        dist.destroy_process_group()
    """
    file = tmp_path / "counters.json"
    done = netlab(*hosts(2, rate="200mbit"), "--counters", str(file), *command(program), timeout=120)
    assert done.returncode == 0, done.stderr
    for host in json.loads(file.read_text())["hosts"]:
        assert 4_000_000 < host["sent_bytes"] < 4_600_000  # each rank sends half the sum and half its own
