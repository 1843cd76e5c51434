"""bench/linear runs, its figures follow its own definitions, and it notices a wrong result."""

import json
import os
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.linear.problem import Case, Operands, Outcome, check, function

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ("-m", "bench.linear.run")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
KINDS = ("mlp", "column", "row")


def test_two_ranks_report_figures_that_follow_their_definitions(tmp_path):
    shapes = [f"{kind}:64x32x48" for kind in KINDS]
    file = tmp_path / "linear.json"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ["--shapes", *shapes, "--rounds", "3", "--seconds", "0", "--json", str(file)]
    done = subprocess.run(
        [*launch, *SCRIPT, *options], env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    written = json.loads(file.read_text())
    assert written["facts"]["ranks"] == 2
    assert "-m bench.linear.run" in written["facts"]["command"]
    results = written["results"]
    assert [(r["shape"], r["direction"]) for r in results] == [
        (shape, direction) for shape in shapes for direction in ("forward", "forward_backward")
    ]
    for result in results:
        assert result["shape"] in done.stdout
        t_g, t_c, t_u, t_o = (result[name] for name in ("T_g", "T_c", "T_u", "T_o"))
        assert min(t_g, t_c, t_u, t_o, result["T_dtensor"]) > 0
        assert result["R"] == pytest.approx(t_o / max(t_g, t_c))
        assert result["ECT"] == pytest.approx(t_o - t_g)
        assert result["E"] == pytest.approx((t_g + t_c - t_o) / min(t_g, t_c))
        assert {len(rounds) for rounds in result["rounds"].values()} == {3}
        medians = {name: statistics.median(rounds) for name, rounds in result["rounds"].items()}
        assert medians["ours"] == pytest.approx(t_o)
        assert medians["unfused"] == pytest.approx(t_u)
        assert min(medians["collective gloo"], medians["collective pyruntime"]) == pytest.approx(t_c)
        assert 0 < result["worst_relative_error"] < 0.03
        assert set(result["tiers"].split("+")) <= {"unfused", "chunked", "fused"}


@pytest.mark.parametrize(
    ("shape", "complaint"),
    [("mlp:63x32x48", "M=63 is not a multiple of the 2 ranks"), ("mlp:64x32", "'mlp:64x32' is not a shape")],
)
def test_a_shape_that_cannot_be_measured_is_one_sentence_and_exit_code_2(shape, complaint):
    environment = {**ENVIRONMENT, "RANK": "0", "WORLD_SIZE": "2"}
    done = subprocess.run(
        [sys.executable, *SCRIPT, "--shapes", shape],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_the_check_accepts_a_right_result_and_names_a_wrong_one(kind):
    case = Case(kind, rows=24, hidden=16, inner=20, dtype=torch.float32)
    operands = Operands.random(case, seed=1)
    for rank in range(2):
        right = _outcome(case, operands, rank)
        assert check(case, operands, right, rank, 2, "it") < 1e-5
        with pytest.raises(RuntimeError, match=rf"it, {kind}:.*rank {rank}: y is wrong by .* in row"):
            check(case, operands, replace(right, y=right.y * 1.001), rank, 2, "it")
        with pytest.raises(RuntimeError, match="dx is wrong"):
            check(case, operands, replace(right, dx=right.dx.roll(1, 0)), rank, 2, "it")
        for name, gradient in right.dw.items():
            broken = {**right.dw, name: gradient * 0.5}
            with pytest.raises(RuntimeError, match=f"gradient of {name} is wrong"):
                check(case, operands, replace(right, dw=broken), rank, 2, "it")


def _outcome(case: Case, operands: Operands, rank: int) -> Outcome:
    """What rank `rank` of 2 must hold, from the full computation in fp32."""
    x = operands.x.clone().requires_grad_()
    weights = {name: w.clone().requires_grad_() for name, w in operands.weights.items()}
    y = function(x, weights)
    y.backward(operands.dy)
    inner = (case.inner * rank // 2, case.inner * (rank + 1) // 2)
    rows = slice(case.rows * rank // 2, case.rows * (rank + 1) // 2)
    y = y.detach()
    return Outcome(
        y[:, slice(*inner)] if case.kind == "column" else y[rows],
        x.grad[:, slice(*inner)] if case.kind == "row" else x.grad[rows],
        {
            name: w.grad[:, slice(*inner)] if name in ("down", "row") else w.grad[slice(*inner)]
            for name, w in weights.items()
        },
    )
