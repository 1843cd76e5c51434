"""The network of bench/netlab: links keep their rate, are counted, go down and come back."""

from __future__ import annotations

import json
import re

from tests.bench.netlab_runs import command, hosts, largest_gap, netlab, on_a_network


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
