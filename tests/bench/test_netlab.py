"""bench/netlab: its options, what it needs, and that hosts are apart."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from bench.netlab import plan
from tests.bench.netlab_runs import NETLAB, ROOT, command, hosts, netlab, on_a_network


def test_rates_and_faults_are_read_or_refused_with_what_to_write():
    assert plan.parse_rate("1gbit") == 10**9
    assert plan.parse_rate("2.5MBit") == 2_500_000
    assert plan.parse_rate_of_host("2=300mbit") == (2, 300_000_000)
    assert plan.Fault.parse("link:1@5s+0.5s") == plan.Fault("link:1@5s+0.5s", "link", 1, 5.0, 0.5)
    assert plan.Fault.parse("kill:rank12@2.5s") == plan.Fault("kill:rank12@2.5s", "kill", 12, 2.5, None)
    assert plan.parse_islands("0,2/1,3") == ((0, 2), (1, 3))
    with pytest.raises(ValueError, match="names no islands; write the hosts of each, such as 0,2/1,3"):
        plan.parse_islands("0,2/b")
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
        ([*hosts(2), "--islands", "0/1", "--", "true"], "--islands and --between belong together"),
        (
            [*hosts(3), "--islands", "0/1", "--between", "1mbit", "--", "true"],
            "--islands must name each of the hosts 0 to 2 once",
        ),
        ([*hosts(2), "--fail", "kill:rank2@1s", "--", "true"], "names rank 2; the ranks are 0 to 1"),
        (hosts(2), "COMMAND is missing; write -- and the command at the end"),
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
    launch = ["setpriv", "--bounding-set=-sys_admin", *NETLAB, *hosts(1), "--", "true"]
    done = subprocess.run(launch, capture_output=True, text=True, timeout=60, cwd=ROOT)
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
