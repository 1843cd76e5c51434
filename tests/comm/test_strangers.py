"""Whoever reaches the job's store may end the job, and runs nothing: what is read there is no program."""

from __future__ import annotations

import os
import pickle
import re
import time
from pathlib import Path

import pytest
import torch.distributed as dist

import pyruntime
from pyruntime.comm import CommError, messages
from pyruntime.train.ranks import on_rank_0

ROOT = Path(__file__).resolve().parents[2]
RUNS_CODE = re.compile(
    r"\bimport pickle|\bpickle\.|\b\w+_object\(|_object_list\(|torch\.load\(|(?<![\w.])(eval|exec)\((?!\))|"
    r"dcp\.(save|load)\(|checkpoint\.(save|load)_state_dict\("
)


def test_nothing_of_the_project_reads_what_could_run_code():
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for folder in ("pyruntime", "bench", "examples", "tools")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if RUNS_CODE.search(line)
    ]
    assert not found, "\n".join(found)


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, path: str):
        self._path = path

    def __reduce__(self):
        return open, (self._path, "w")


def payload(kind: str, marker: Path) -> bytes:
    if kind == "pickle":
        return pickle.dumps((Bomb(str(marker)), None))
    if kind == "random":
        return os.urandom(300)
    if kind == "truncated":
        return b"pyr1" + (2**40).to_bytes(8, "little") + bytes(20)
    if kind == "huge":
        return bytes(8_000_000)  # torch's store takes 8 MiB at most
    return b""


def attacked(_, kind: str, marker: Path):
    """Rank 1 writes what a stranger would into the store, in the place of all that rank 0 will say."""
    with pyruntime.Runtime.start(deadline_s=20.0) as runtime:
        group = pyruntime.comm.process_group(runtime.tp)
        if runtime.rank == 1:
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            stranger = dist.TCPStore(host, port, None, False)
            for number in range(1, 9):
                key = f"pyruntime/-/1/1/pyruntime/exchange/{number}/{group.group_name}/0"
                stranger.set(key, payload(kind, marker))
        start = time.monotonic()
        try:
            return on_rank_0(group, "Building the corpus", lambda: time.sleep(1.0) or "told", str), 0.0
        except CommError as error:
            return str(error), time.monotonic() - start


@pytest.mark.parametrize("kind", ["pickle", "random", "truncated", "huge", "empty"])
@pytest.mark.second_tier(but=["pickle"])
def test_what_a_stranger_writes_ends_the_job_in_a_sentence(ranks, tmp_path, kind):
    marker = tmp_path / "ran"
    _, outcome = ranks.launch(attacked, 2, kind, marker, init=False)
    said, seconds = outcome.value
    assert "Building the corpus" in said and "waiting for rank 0" in said, said
    assert "is not what a rank writes; another program writes there" in said and seconds < 15
    assert not marker.exists()


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (None, type(None)),
        ((1, "a", None), tuple[int, str, str | None]),
        ({("a", 1): [Path("x")]}, dict[tuple[str, int], list[Path]]),
        (1.5, float),
        (2, float),
        ([True, 3], list[bool | int]),
    ],
)
def test_what_is_told_is_heard_of_its_type(value, kind):
    assert messages.decode(messages.encode(value), kind) == value


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"\xff\xfe", str),
        (b"[" * 100_000, list[int]),
        (b'"1"', int),
        (b"true", int),
        (b"[1, 2]", tuple[int]),
        (b"[[1]]", dict[int, int]),
        (b'{"a": 1}', messages.Path),
        (b"1", str | None),
    ],
)
def test_what_is_of_another_type_is_refused(data, kind):
    with pytest.raises(ValueError):
        messages.decode(data, kind)
