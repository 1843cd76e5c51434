"""bench/gpu, as far as it runs without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from pyruntime.comm.core import _C
from tests.cuda import build

BENCH = (sys.executable, "-m", "bench.gpu.run")


@pytest.mark.parametrize("program", [("-m", "bench.gpu.run"), ("tools/gpu_check.py",)])
def test_help_needs_no_gpu(program):
    ran = subprocess.run(
        [sys.executable, *program, "--help"], cwd=build.ROOT, capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0 and "usage" in ran.stdout, ran.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU every part can run")
def test_a_part_that_cannot_run_is_reported(tmp_path):
    report = tmp_path / "report.json"
    command = [*BENCH, "--parts", "support", "--json", str(report)]
    ran = subprocess.run(command, cwd=build.ROOT, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 1
    texts = [result.get("text", "") for result in json.loads(report.read_text())["results"]]
    assert any("torch sees no GPU" in text for text in texts), texts
    assert any(text.startswith("support failed with exit code 1") for text in texts), texts


@pytest.fixture
def problem():
    from bench.gpu import problem as gpu_problem

    return gpu_problem


def test_shapes_are_those_of_llama_at_tp_8(problem):
    shapes = problem.llama_shapes([512])
    assert [(s.name, s.op, s.n, s.k) for s in shapes] == [
        ("8B qkv", "gather", 768, 4096),
        ("8B gate+up", "gather", 3584, 4096),
        ("8B o", "scatter", 4096, 512),
        ("8B down", "scatter", 4096, 1792),
        ("70B qkv", "gather", 1280, 8192),
        ("70B gate+up", "gather", 7168, 8192),
        ("70B o", "scatter", 8192, 1024),
        ("70B down", "scatter", 8192, 3584),
    ]
    assert len(problem.llama_shapes()) == 48


def test_figures_and_tables(problem):
    assert problem.size_for(1e-3, 7e14, 2.0 * 8192 * 8192) == 5120  # 5215 in units of 256
    figures = problem.overlap_figures(2.0, 1.0, 2.1)
    assert figures["R"] == pytest.approx(1.05) and figures["E"] == pytest.approx(0.9)
    product = {
        "kind": "gemm",
        **vars(problem.llama_shapes([512])[0]),
        "seconds": {"torch.matmul": 1e-5, "portable": 2e-5},
        "ratio": {"portable": 0.5},
        "tflops": 300.0,
    }
    overlap = {"kind": "overlap", "name": "gather, host", "t_g": 1.0, "t_c": 1.0, "R": {"chunked": 1.2}}
    overlap["R"]["chunked, 4 pieces"] = 1.04
    support = {"kind": "support", "name": "pyruntime reduce of 8", "seconds": 1e-3}
    support |= {"gb_per_second": 4000.0, "of_copy": 0.9}
    layer = support | {"name": "pyruntime swiglu", "of_copy": 0.875}
    attention = {"kind": "attention", "name": "cuDNN", "model": "8B", "head_dim": 128, "taken": True}
    attention |= {"seconds": 2e-3, "spread": 0.0, "tflops": 512.3}
    text = problem.summary([product, overlap, support, layer, attention, {"kind": "note", "text": "how"}])
    assert "pyruntime swiglu, of copy" in text and "0.875" in text
    assert "taken by torch" in text and "512" in text
    lines = text.splitlines()
    assert any(line.split() == ["portable,", "median", "ratio", "0.500", ">=", "0.6"] for line in lines), text
    assert any("gather, host, chunked, worst R" in line and "1.040" in line for line in lines), text
    assert problem.summary([]) == ""


@pytest.mark.parametrize("op", ["gather", "scatter"])
def test_one_process_runs_a_rank_whose_signals_are_all_set(host_kernels, problem, op):
    from bench.gpu import library as gpu_library
    from bench.gpu import ranks as gpu_ranks
    from bench.gpu.smoke import smoke_of

    library = gpu_library.Library(build.LIBRARY)
    for tiles in gpu_ranks.TILES:
        assert smoke_of(library, op, tiles, "cpu") < problem.TOLERANCE


def test_one_process_plays_all_ranks_of_a_gather(host_kernels, problem):
    from bench.gpu.gather import Gather
    from bench.gpu.library import Library
    from bench.gpu.ranks import error_of, fused

    library = Library(build.LIBRARY)
    m, n, k = 128, 40, 24
    x, weight = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()
    c = torch.empty(m, n, dtype=torch.bfloat16)
    gather = Gather(library, x.clone(), x)
    run = fused(library, gather.spaces, "gather", x[: m // problem.WORLD_SIZE], weight, c, m, 0)
    for flight in (
        gather.fused(run, 1),
        gather.chunked(weight, c, by_piece=False),
        gather.chunked(weight, c, by_piece=True),
        gather.fused(run, 2),
    ):
        gather.puts_alone()
        gather.slot.fill_(float("nan"))
        c.fill_(float("nan"))
        flight()
        gather.spaces.check()
        assert error_of(c, x.float() @ weight.float().t()) < problem.TOLERANCE


def test_a_training_step_in_its_captured_form_is_the_eager_one(host_kernels, problem):
    """Without a GPU nothing is captured: the step that would be runs by itself."""
    from bench.gpu import training as gpu_training

    _C.use_device_library("cpu", str(build.LIBRARY))
    size = gpu_training.size_of(quick=True)
    eager, captured = (gpu_training.Step(size, "cpu") for _ in range(2))
    for _ in range(3):
        eager.eager()
        captured.announce()
        for parameter in captured.model.parameters():
            parameter.grad = None  # as replays find it
        captured.by_settings()
        assert captured.loss == pytest.approx(float(eager.loss), rel=1e-3)
    assert eager.loss < gpu_training.Step(size, "cpu").model(eager.ids, eager.labels)
    for mine, other in zip(captured.model.parameters(), eager.model.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0.05, atol=1e-4)
    losses = [float(captured.loss)]
    found = gpu_training.result("pyruntime, eager", size, [0.5, 0.25, 1.0], losses, losses, 1e12, 10**9)
    assert found["tokens_per_second"] == size.tokens / 0.5 and not found["wrong"]
    assert found["mfu"] == pytest.approx(size.tokens / 0.5 * size.model.flops_per_token(size.seq_len) / 1e12)
    assert gpu_training.result("x", size, [1.0], [3.0], losses, None, 0)["wrong"] == ["x"]
    run, losses = gpu_training.plain(size, "cpu")
    run()
    assert losses[-1] < losses[0]


def test_the_layers_that_are_measured_do_what_their_composites_do(problem):
    from bench.gpu import layers as gpu_layers

    made = gpu_layers.layers(tokens=24, rows=5, vocab=300, device="cpu")
    names = [name.removeprefix("pyruntime ") for name in made if name.startswith("pyruntime")]
    assert len(names) == 10 and len(made) == 20
    for name in names:
        (ours, moved), (theirs, as_much) = made[f"pyruntime {name}"], made[f"ATen's {name}"]
        assert moved == as_much > 0
        found, expected = ours(), theirs()
        if found is not None:  # those in place work on the same memory by turns
            torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_the_model_that_is_trained_has_the_same_weights_each_time_drawn_where_it_is(problem, monkeypatch):
    from bench.gpu import training as gpu_training

    def draws(*_):
        raise AssertionError("weights are drawn on the CPU")

    monkeypatch.setattr("pyruntime.llama.model.init_shard", draws)
    size = gpu_training.size_of(quick=True)
    first, second = (gpu_training.Step(size, "cpu").model for _ in range(2))
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)
    spread = first.embed.weight.detach().float().std()
    assert float(spread) == pytest.approx(size.model.initializer_range, rel=0.05)


def test_every_part_has_a_name_and_a_limit(problem, monkeypatch):
    from bench.gpu import run as gpu

    assert gpu.chosen("")[0].startswith("gemms-")  # the most telling
    assert gpu.chosen("").index("training") < gpu.chosen("").index("support")
    assert set(problem.PARTS) - set(gpu.chosen("")) == {"load", "smoke-portable", "smoke-hopper"}
    assert gpu.chosen("gather-host,support") == [
        "gather-host-hopper",
        "gather-host-portable",
        "gather-host-chunked",
        "support",
    ]
    with pytest.raises(ValueError, match="names 'gater'; choose from load, smoke"):
        gpu.chosen("gater")
