"""bench/moe runs, its figures follow its definitions, and it notices a wrong result."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.moe.problem import GRADIENTS, Case, check, everyones

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def test_two_ranks_report_figures_that_follow_their_definitions(tmp_path):
    file = tmp_path / "moe.json"
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "bench.moe"]
    options = ["--quick", "--rounds", "3", "--seconds", "0", "--json", str(file)]
    done = subprocess.run(
        [sys.executable, *launch, *options],
        env=ENVIRONMENT,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(file.read_text())["results"]
    assert [result["direction"] for result in results] == ["forward", "forward_backward"] * 2
    for result in results:
        assert result["shape"] in done.stdout
        medians = {name: statistics.median(rounds) for name, rounds in result["rounds"].items()}
        assert result["T_o"] == pytest.approx(medians["ours"])
        assert result["R"] == pytest.approx(medians["ours"] / max(medians["alone"], medians["collectives"]))
        assert result["grouped"] == pytest.approx(medians["dense"] / medians["grouped"])
        assert result["peers"] == {
            name: medians[name] for name in ("all_to_all", "all_gather", "transformers")
        }
        assert 0 < result["worst_relative_error"] < 0.03


@pytest.mark.parametrize(
    ("shape", "complaint"),
    [
        ("64x32:8k2", "is not a shape"),
        ("64x32x48:8k9", "K at most E"),
        ("64x32x48:7k2", "7 experts are no multiple of the 2 ranks"),
        ("64x32x48:4k3:2", "cannot have an imbalance of 2 with 3 experts a row"),
    ],
)
def test_a_shape_that_cannot_be_measured_is_one_sentence(shape, complaint):
    with pytest.raises(ValueError, match=complaint):
        Case.parse(shape).check(2)


def test_the_imbalance_is_that_of_the_busiest_rank():
    case = Case.parse("4096x8x8:16k2:1.5")
    ids = torch.cat([each.ids for each in everyones(case, 4)])
    share = torch.bincount(ids.flatten(), minlength=16).view(4, 4).sum(1) / ids.numel() * 4
    assert share.argmax() == 0
    assert share[0].item() == pytest.approx(1.5, abs=0.05)


def test_the_check_accepts_a_right_result_and_names_a_wrong_one():
    case = Case.parse("24x16x20:4k2")
    all_ranks = everyones(case, 2)
    for rank in range(2):
        right = _outcome(all_ranks, rank)
        assert check(case, all_ranks, right, rank, "it") < 1e-5
        for place, name in enumerate(GRADIENTS):
            wrong = [*right[:place], right[place] * 1.1, *right[place + 1 :]]
            with pytest.raises(RuntimeError, match=rf"it, .*rank {rank}: {name} is wrong by"):
                check(case, all_ranks, wrong, rank, "it")


def _outcome(all_ranks, rank):
    """The tensors that a rank must hold, from the whole computation in fp32, every expert on every row."""
    whole = [
        torch.cat([getattr(each, name).float() for each in all_ranks])
        for name in ("x", "p", "gate_up", "down")
    ]
    ids, dy = (torch.cat([getattr(each, name) for each in all_ranks]) for name in ("ids", "dy"))
    leaves = [each.requires_grad_() for each in whole]
    x, p, gate_up, down = leaves
    shares = torch.zeros(len(ids), len(gate_up)).scatter(1, ids, p)
    gate, up = torch.einsum("td,efd->tef", x, gate_up).chunk(2, -1)
    products = torch.nn.functional.silu(gate) * up * shares.unsqueeze(-1)
    y = torch.einsum("tef,edf->td", products, down)
    y.backward(dy.float())
    return [each.chunk(len(all_ranks))[rank] for each in (y.detach(), *(leaf.grad for leaf in leaves))]
