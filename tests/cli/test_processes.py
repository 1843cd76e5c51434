"""The commands as a user starts them: below torchrun and alone, ended by signals, refused."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from pyruntime.cli import main

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 120
SIZES = ["--train.steps", "6", "--train.val_every", "3", "--output.sample_tokens", "8"]


def start(ranks, *arguments, cwd, launcher_options=()):
    """Starts `python -m pyruntime ...` alone (ranks=0) or on `ranks` ranks below torchrun."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks else []
    launcher += map(str, launcher_options)
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.Popen(
        [sys.executable, *launcher, "-m", "pyruntime", *map(str, arguments)],
        cwd=cwd,
        env=environment | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process):
    """Exit code, stdout and stderr; the process and its children are gone afterwards."""
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return process.returncode, out, err


def wait_for_steps(process, run_dir, steps):
    """Until metrics.jsonl holds that many lines."""
    end = time.monotonic() + LIMIT_S
    path = run_dir / "metrics.jsonl"
    while not path.exists() or len(path.read_text().splitlines()) < steps:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "the run did not get going"
        time.sleep(0.05)


def processes_naming(text):
    """Command lines of living processes that hold `text`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in line:
            found.append(line)
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run on two ranks, and what it printed."""
    folder = tmp_path_factory.mktemp("trained")
    code, out, err = finish(start(2, "train", "--config", "tiny", *SIZES, cwd=folder))
    assert code == 0, err
    return folder / "runs" / "tiny-1", out


def test_a_run_on_two_ranks_ends_with_a_model_that_continues_a_prompt(trained, tmp_path, capsys):
    run_dir, out = trained
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert len(re.findall(r"^step 6/6 \| loss [\d.]+ \| val ", out, re.MULTILINE)) == 1
    assert "Overlap scorecard" in out and "Sample\ndef " in out and "\r" not in out

    assert (
        main(["generate", "--checkpoint", str(run_dir / "model"), "--prompt", "import o", "--tokens", "9"])
        == 0
    )
    first = capsys.readouterr().out
    assert first.startswith("import o") and len(first.encode()) > len("import o\n")
    main(["generate", "--checkpoint", str(run_dir / "model"), "--prompt", "import o", "--tokens", "9"])
    assert capsys.readouterr().out == first

    damaged = shutil.copytree(run_dir / "model", tmp_path / "damaged")
    config = damaged / "config.json"
    config.write_text(config.read_text()[:40])
    assert main(["generate", "--checkpoint", str(damaged)]) == 2
    refusal = capsys.readouterr().err
    assert "config.json" in refusal and refusal.count("\n") == 1


@pytest.mark.second_tier
def test_sigterm_to_the_launcher_ends_all_ranks_with_one_sentence(tmp_path):
    run_dir = tmp_path / "stopped"
    process = start(
        2, "train", "--config", "tiny", "--train.steps", "100000", "--output.run_dir", run_dir, cwd=tmp_path
    )
    wait_for_steps(process, run_dir, 3)
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process)
    assert code != 0
    said = [line for line in err.splitlines() if line.startswith("pyruntime: ")]
    assert len(said) == 1, err
    found = re.fullmatch(
        r"pyruntime: Stopped by SIGTERM after step (\d+) of 100000; go on with --checkpoint\.resume .*",
        said[0],
    )
    assert found, said
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, int(found[1]) + 1))
    assert (run_dir / "checkpoints" / f"step-{int(found[1]):06d}" / "run.json").exists()
    assert processes_naming(str(run_dir)) == []


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.second_tier("2-130")
def test_a_signal_ends_a_single_process_with_the_shells_exit_code(tmp_path, signum, code):
    run_dir = tmp_path / "stopped"
    process = start(
        0, "train", "--config", "tiny", "--train.steps", "100000", "--output.run_dir", run_dir, cwd=tmp_path
    )
    wait_for_steps(process, run_dir, 1)
    process.send_signal(signum)
    found, _, err = finish(process)
    assert found == code
    assert err.startswith(f"pyruntime: Stopped by {signum.name} after step ") and err.count("\n") == 1


@pytest.mark.second_tier
def test_a_refusal_below_torchrun_is_said_once_and_every_rank_ends_with_2(tmp_path):
    arguments = ["--config", "tiny", "--model.num_key_value_heads", "1"]
    code, out, err = finish(start(2, "train", *arguments, cwd=tmp_path))
    assert code != 0
    said = [line for line in err.splitlines() if line.startswith("pyruntime: ")]
    assert len(said) == 1 and said[0].endswith("tp=2 does not divide num_key_value_heads=1; use 1.")
    assert "pyruntime/" not in err  # the launcher's own traceback is there, but none of ours
    codes = set(re.findall(r"exitcode +: (-?\d+)", err))
    assert "2" in codes and codes <= {"2", "143", "-15"}  # the launcher ends one that is not so far
    assert "step" not in out
    assert not (tmp_path / "runs").exists()


def killed_rank(tmp_path, run_dir, logs):
    """Ends of a launcher one of whose ranks was killed, each rank's output kept below `logs`."""
    arguments = ["--train.steps", "100000", "--output.run_dir", run_dir, "--comm.deadline_s", "20"]
    keep = ["--redirects", "3", "--log-dir", logs]
    process = start(2, "train", "--config", "tiny", *arguments, cwd=tmp_path, launcher_options=keep)
    wait_for_steps(process, run_dir, 2)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    return finish(process)


def test_a_killed_rank_ends_the_run_and_leaves_nothing_behind(tmp_path):
    run_dir = tmp_path / "killed"
    started = time.monotonic()
    code, _, _ = killed_rank(tmp_path, run_dir, tmp_path / "logs")
    assert code != 0 and time.monotonic() - started < LIMIT_S
    said = {path.parent.name: path.read_text() for path in (tmp_path / "logs").rglob("stderr.log")}
    assert sorted(said) == ["0", "1"]
    assert re.fullmatch(r"pyruntime: rank 0: (PeerLost|CommTimeout): .*\brank 1\b.*\n", said["0"]), said
    assert said["1"] == ""
    assert processes_naming(str(run_dir)) == []


@pytest.mark.second_tier
def test_doctor_shows_every_part(tmp_path):
    arguments = ["doctor", "--rows", "64", "--hidden_size", "64", "--intermediate_size", "64"]
    code, out, err = finish(start(0, *arguments, cwd=tmp_path))
    assert code == 0, err
    for part in ("Built", "Hardware", "Fabric", "Symmetric memory", "Tiers (2 ranks)"):
        assert f"\n{part}\n" in f"\n{out}", out
    assert "not found out" not in out
    assert "GCC" in out or "clang" in out
    assert re.search(r"CPU +works", out)
    for layer, op in (("gate_up", "all_gather_matmul"), ("down", "matmul_reduce_scatter")):
        row = rf"layers\.0\.{layer} +forward +{op} +64 .* auto +chunked +"
        assert re.search(row, out), out
    assert "chunked is the rule where nothing was tuned" in out


@pytest.mark.parametrize("ranks", [0, 2])
@pytest.mark.second_tier
def test_output_that_nobody_reads_ends_a_run_without_a_word(tmp_path, ranks):
    run_dir = tmp_path / "unread"
    arguments = ["--train.steps", "100000", "--output.run_dir", run_dir]
    process = start(ranks, "train", "--config", "tiny", *arguments, cwd=tmp_path)
    assert process.stdout.readline().startswith("model ")
    process.stdout.close()
    process.stdout = None
    code, _, err = finish(process)
    assert "pyruntime: " not in err
    if not ranks:
        assert (code, err) == (141, "")
    else:
        codes = set(re.findall(r"exitcode +: (-?\d+)", err))
        assert "141" in codes and codes <= {"141", "143", "-15"}  # the launcher ends the slower rank


@pytest.mark.second_tier
def test_generated_text_that_nobody_reads_ends_without_a_word(trained, tmp_path):
    model = trained[0] / "model"
    process = start(0, "generate", "--checkpoint", model, "--prompt", "import", cwd=tmp_path)
    assert process.stdout.read(1) == "i"
    process.stdout.close()
    process.stdout = None
    code, _, err = finish(process)
    assert (code, err) == (141, "")


@pytest.mark.second_tier
def test_the_planner_measures_the_link_of_two_ranks(tmp_path):
    """A gather takes something from products beside it, and moves no more than memory does."""
    process = start(2, "plan", "--measure", "mine.toml", cwd=tmp_path)
    code, out, err = finish(process)
    assert code == 0, out + err
    assert "GEMMs lose a second for every " in out
    found = tomllib.loads((tmp_path / "mine.toml").read_text())
    assert found["gpus_per_node"] == 2
    assert 1e7 < found["core_bandwidth"] < 1e11
    assert 0 < found["core_share"] <= 1
