"""bench/clock_torch: PyTorch's own parallelism in virtual time."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence

import pytest

from bench import clock_torch
from pyruntime.cli import train as cli
from pyruntime.clock import machine_model, step_account
from pyruntime.train.resolved import check

FLAGS = ["--config", "tiny", "--train.batch_size", "4", "--train.micro_batch_size", "2"]


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench.clock_torch", *FLAGS, *flags]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.usefixtures("simulated")
@pytest.mark.second_tier
def test_weights_that_are_freed_are_gathered_again(tmp_path):
    kept = tmp_path / "kept.json"
    mesh = "--gpus", "4", "--parallel.tp", "2", "--parallel.dp", "2", "--json", str(kept)
    for zero in ("1", "3"):
        done = run(*mesh, "--parallel.zero", zero)
        assert done.returncode == 0, done.stderr
    keeps, frees = json.loads(kept.read_text())["results"]
    assert set(keeps["waits_s"]) == set(frees["waits_s"]) == {"tp", "dp"}
    assert frees["step_s"] > keeps["step_s"]
    assert frees["waits_s"]["tp"] == pytest.approx(keeps["waits_s"]["tp"])


class OfOperations(machine_model.Machine):
    """A machine on which a product of matrices takes a second for each operation, and nothing else time, but
    for messages between stages: a second for each byte."""

    def seconds(self, kind: str, sizes: Sequence[int]) -> float:
        if kind == "gemm":
            m, n, k, batch, *_ = sizes
            return 2.0 * m * n * k * batch
        return float(sizes[0]) if kind.startswith("message") else 0.0


def of_pipeline(group, flags: list[str]) -> tuple[list[float], list[float], float, int]:
    """Returns of each stage's rank the operations in products and the seconds for which it waits for the last
    rows, and the operations and the bytes of a message that the model has."""
    config, _ = cli.read([*FLAGS, *flags], 4)
    run, known = check(config, 4), machine_model.find("h100")
    machine = OfOperations(**{each.name: getattr(known, each.name) for each in dataclasses.fields(known)})
    found = clock_torch.simulate(run, machine, 4)
    shape, tp = run.shape, run.mesh.tp
    rows = shape.hidden_size * (shape.num_attention_heads + 2 * shape.num_key_value_heads) * shape.head_dim
    layer = rows + shape.num_attention_heads * shape.head_dim * shape.hidden_size
    layer += 3 * shape.hidden_size * shape.intermediate_size
    weights = shape.num_hidden_layers * layer + shape.hidden_size * shape.vocab_size
    operations = [step_account.by(each.account.computing, 0)["aten::mm"] for each in found.programs]
    waited = [step_account.by(each.account.exposed_waits, 0).get("pp", 0.0) for each in found.programs]
    message = 2 * config.train.micro_batch_size * config.train.seq_len // tp * shape.hidden_size
    return operations, waited, 6.0 * run.tokens_per_step * weights / tp, message


@pytest.mark.usefixtures("simulated")
@pytest.mark.second_tier
@pytest.mark.parametrize("kind", ["1f1b", "interleaved", "zb-v"])
def test_torchs_schedules_do_all_products_and_wait_for_rows_of_their_size(ranks, kind):
    flags = f"--parallel.tp=2 --parallel.pp=2 --parallel.dp=1 --parallel.zero=0 --pipeline.kind={kind}"
    flags += " --model.num_hidden_layers=6 --train.dtype=bf16"
    flags += " --pipeline.virtual=2" if kind == "interleaved" else ""
    split = [each for flag in flags.split() for each in flag.split("=")]
    (outcome,) = ranks.launch(of_pipeline, 1, split, init=False, timeout=240.0)
    assert outcome.error is None, outcome.error
    operations, waited, expected, message = outcome.value
    assert sum(operations) == expected
    assert all(seconds % message == 0 for seconds in waited)
    assert sum(waited) > 0


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--parallel.cp=2", "only pp, dp, tp are cut here"),
        (
            "--parallel.pp=2 --pipeline.kind=zb-h1",
            "torch has no schedule zb-h1; use gpipe, 1f1b, interleaved, zb-v.",
        ),
    ],
)
def test_what_it_does_not_cut_and_schedules_that_torch_has_not_are_refused(capsys, flags, why):
    assert clock_torch.main([*FLAGS, "--gpus", "2", *flags.split()]) == 2
    assert why in capsys.readouterr().err
