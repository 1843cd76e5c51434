"""The hosts of bench/netlab and the network between them: namespaces, a bridge, links of a given rate.

A host is a process with its own namespaces, and so is the switch; a veth pair joins the two. The kernel
removes a namespace with its interfaces and queues when its last process ends, and those processes end when
netlab does, even by SIGKILL (see host.py). Named namespaces (`ip netns add`) would stay behind after a kill
-9.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from types import TracebackType
from typing import Any

TOOLS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "mount": "mount",
}
CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
HOST_NAMESPACES = ["unshare", "--net", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
HOST_SCRIPT = str(Path(__file__).with_name("host.py"))
COMES_UP_S = 30.0
ENDS_S = 10.0
INTERFACE = "eth0"
MOST_HOSTS = 200  # what fits into the one /24 network they share

# Tries everything that is needed once, in namespaces that end with the shell.
TRIAL = """
ip link add name bridge type bridge && ip link add name one type veth peer name other &&
ip link set one gso_max_size 16384 && tc qdisc add dev one root tbf rate 1mbit burst 32kb limit 64kb &&
mount -t tmpfs netlab /dev/shm
"""


def address(host: int) -> str:
    return f"10.77.0.{host + 1}"


def hostname(host: int) -> str:
    return f"host{host}"


class NetworkError(RuntimeError):
    """A namespace or an interface could not be set up."""


def missing() -> str:
    """Returns a sentence on what this machine lacks for netlab; empty if nothing is missing."""
    if sys.platform != "linux":
        return f"netlab needs Linux and its network namespaces; this is {sys.platform}."
    lacking = sorted(tool for tool in TOOLS if shutil.which(tool) is None)
    if lacking:
        packages = " ".join(sorted({TOOLS[tool] for tool in lacking}))
        return f"netlab needs {', '.join(lacking)}, which PATH does not have; try: apt-get install {packages}"
    status = Path("/proc/self/status").read_text(encoding="ascii")
    effective = int(status.partition("CapEff:")[2].split()[0], 16)
    absent = [name for name, bit in CAPABILITIES.items() if not effective >> bit & 1]
    if absent:
        return (
            f"netlab makes network namespaces, for which this process lacks {' and '.join(absent)}; run it "
            "as root (sudo; a container needs --privileged), or try: unshare --user --map-root-user python "
            "-m bench.netlab ..."
        )
    tried = subprocess.run([*HOST_NAMESPACES, "sh", "-c", TRIAL], capture_output=True, text=True)
    if tried.returncode:
        return (
            "netlab needs the kernel's namespaces, bridge, veth, tbf and tmpfs, and a trial of them failed: "
            f"{' '.join(tried.stderr.split())}. A container needs --privileged, and a kernel those modules."
        )
    return ""


@dataclass(frozen=True)
class Shaping:
    """The sizes, in bytes, with which tbf holds a link to its rate.

    Linux sends TCP as packets of up to 64 KB, which a real card would cut into frames. tbf cuts packets that
    are larger than its burst, on the cores that the ranks need: at 1 Gbit/s that took a whole core. Without
    large packets it took more and reached half the rate. So the burst is short, because a burst passes at
    full speed, and packets are smaller than the burst, so that nothing is cut.
    """

    burst: int
    largest_packet: int
    queue: int

    @classmethod
    def of(cls, rate: int) -> Shaping:
        """Returns sizes for `rate` (bits/s): a burst of 1 ms and a queue of 10 ms, at least a few packets."""
        bytes_per_ms = rate // 8000
        burst = max(4096, bytes_per_ms)
        # The margin is for headers: the kernel counts them for each frame, 66 of 1514 bytes.
        largest_packet = min(65536, burst * 8 // 10)
        return cls(burst, largest_packet, burst + max(16384, 10 * bytes_per_ms))


class Host:
    """The outer end of one host: its first process and the connection to it."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.connection, theirs = Pipe()
        # A new session, so that only netlab gets Ctrl-C and passes it to the ranks.
        self.process = subprocess.Popen(
            [*HOST_NAMESPACES, sys.executable, "-I", "-S", HOST_SCRIPT, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()

    def order(self, *order: Any) -> None:
        """Tells the host's first process to `start` or `signal` ranks. Does nothing if the host is gone."""
        with contextlib.suppress(ConnectionError):  # the next read from the connection finds out
            self.connection.send(order)

    def come_up(self) -> None:
        if self.connection.poll(COMES_UP_S):
            try:
                match self.connection.recv():
                    case ("ready",):
                        return
                    case ("failed", reason):
                        raise NetworkError(f"host {self.index} could not be set up: {reason}")
            except EOFError:
                pass
        raise NetworkError(
            f"host {self.index} did not come up; see the output of unshare or Python above, if any."
        )


class Lab:
    """Hosts on one bridge, each link limited in both directions. Closing it ends all their processes.

    `rates` are bits per second, one for each host. With `islands` of hosts each island has a bridge of its
    own, and a link of `between` bits per second joins it to a bridge of all islands.
    """

    def __init__(self, rates: Sequence[int], islands: Sequence[Sequence[int]] = (), between: int = 0) -> None:
        self._rates, self._islands, self._between = rates, islands, between
        self.hosts: list[Host] = []
        self._switch: subprocess.Popen | None = None

    def __enter__(self) -> Lab:
        try:
            self._start_switch()
            self._start_hosts()
            self._connect()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends all hosts, and returns when none of their processes is left."""
        for host in self.hosts:
            host.connection.close()
        deadline = time.monotonic() + ENDS_S
        for process in [host.process for host in self.hosts]:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()  # unshare --kill-child ends its child, process 1 of the host, too
                process.wait()
        if self._switch is not None and self._switch.stdin is not None:
            self._switch.stdin.close()
            self._switch.wait()

    def set_link(self, host: int, up: bool) -> None:
        """Takes the link down at the switch, or up again: the host keeps its address and its connections."""
        _run(self._switch_pid, ["ip", "link", "set", _port(host), "up" if up else "down"])

    def counters(self) -> list[tuple[int, int] | None]:
        """Returns the bytes sent and received by each host's interface; None for a host that is gone.

        They are counted at the switch, which lives as long as netlab. A large TCP packet counts its headers
        once, not for each frame.
        """
        counted: dict[str, tuple[int, int]] = {}
        for line in Path(f"/proc/{self._switch_pid}/net/dev").read_text(encoding="ascii").splitlines()[2:]:
            name, _, numbers = line.partition(":")
            fields = numbers.split()
            counted[name.strip()] = (int(fields[0]), int(fields[8]))  # the port received what the host sent
        return [counted.get(_port(host.index)) for host in self.hosts]

    @property
    def _switch_pid(self) -> int:
        assert self._switch is not None
        return self._switch.pid

    def _start_switch(self) -> None:
        # cat ends with its input, a pipe of netlab; the line says that the namespace exists.
        self._switch = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo ready && exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._switch.stdout is not None
        with self._switch.stdout as output:
            if output.readline() != b"ready\n":
                raise NetworkError("unshare --net failed; see its output above.")

    def _start_hosts(self) -> None:
        numbers = range(len(self._rates))
        names = "".join(f"{address(host)} {hostname(host)}\n" for host in numbers)
        for number in numbers:
            self.hosts.append(Host(number))
            self.hosts[-1].order(hostname(number), f"127.0.0.1 localhost\n::1 localhost\n{names}")
        for host in self.hosts:
            host.come_up()

    def _connect(self) -> None:
        links, shapers = _bridge("bridge"), []
        bridge_of = dict.fromkeys(range(len(self.hosts)), "bridge")
        for number, island in enumerate(self._islands):
            own, up, down = (f"{name}{number}" for name in ("bridge", "up", "down"))
            bridge_of |= dict.fromkeys(island, own)
            links += [*_bridge(own), f"link add name {up} type veth peer name {down}"]
            for end, bridge in ((up, own), (down, "bridge")):
                links += [
                    f"link set {end} master {bridge} addrgenmode none",
                    f"link set {end} gso_max_size {Shaping.of(self._between).largest_packet}",
                    f"link set {end} up",
                ]
                shapers.append(_tbf(end, self._between))
        for host, rate in zip(self.hosts, self._rates, strict=True):
            port = _port(host.index)
            links += [
                f"link add name {port} type veth peer name {INTERFACE} netns {host.process.pid}",
                f"link set {port} master {bridge_of[host.index]} addrgenmode none",
                f"link set {port} gso_max_size {Shaping.of(rate).largest_packet}",
                f"link set {port} up",
            ]
            shapers.append(_tbf(port, rate))
        _run(self._switch_pid, ["ip", "-batch", "-"], links)
        _run(self._switch_pid, ["tc", "-batch", "-"], shapers)
        for host, rate in zip(self.hosts, self._rates, strict=True):
            up = [
                f"link set {INTERFACE} gso_max_size {Shaping.of(rate).largest_packet} addrgenmode none",
                f"address add {address(host.index)}/24 dev {INTERFACE}",
                "link set lo up",
                f"link set {INTERFACE} up",
            ]
            # Shaped before it is up, so that no packet passes at full speed.
            _run(host.process.pid, ["tc", "-batch", "-"], [_tbf(INTERFACE, rate)])
            _run(host.process.pid, ["ip", "-batch", "-"], up)


def _bridge(name: str) -> list[str]:
    # No IPv6 address and no multicast snooping: both send packets that would be counted.
    return [
        f"link add name {name} type bridge forward_delay 0 mcast_snooping 0",
        f"link set {name} addrgenmode none",
        f"link set {name} up",
    ]


def _port(host: int) -> str:
    return f"port{host}"


def _tbf(interface: str, rate: int) -> str:
    shaping = Shaping.of(rate)
    return f"qdisc add dev {interface} root tbf rate {rate}bit burst {shaping.burst}b limit {shaping.queue}b"


def _run(pid: int, command: list[str], lines: Sequence[str] = ()) -> None:
    """Runs `command` in the network namespace of process `pid`. Raises NetworkError with its output."""
    if os.stat(f"/proc/{pid}/ns/net").st_ino == os.stat("/proc/self/ns/net").st_ino:
        raise NetworkError(f"process {pid} shares this process's network namespace; nothing was changed.")
    done = subprocess.run(
        ["nsenter", f"--net=/proc/{pid}/ns/net", *command],
        input="".join(f"{line}\n" for line in lines),
        capture_output=True,
        text=True,
        start_new_session=True,  # only netlab gets Ctrl-C
    )
    if done.returncode:
        asked = " ".join(command) + "".join(f"; {line}" for line in lines)
        raise NetworkError(f"{asked!r} failed: {' '.join((done.stderr or done.stdout).split())}")
