"""`python -m pyruntime mesh` shows groups, transports and bytes, and starts nothing."""

import re

import pytest

from pyruntime.cli import main
from pyruntime.llama.presets import preset
from pyruntime.plan.cluster import find_cluster
from pyruntime.plan.traffic import bytes_of_step
from pyruntime.train.config import Grid, Parallel, PipelineParallel, RunConfig, Train, mesh_of, spelled_out
from pyruntime.train.planned import of_llama, planned
from pyruntime.train.resolved import resolve

SMALL = ["mesh", "--config", "dim256", "--train.batch_size", "16"]


def rows(capsys, *argv):
    """The heading, and what stands in each row, by its axis."""
    assert main([*SMALL, *argv]) == 0
    heading, _, table = capsys.readouterr().out.partition("\n\n")
    cells = [re.split("  +", line) for line in table.splitlines()[1:]]
    return heading, {name: rest for name, *rest in cells}


def test_groups_of_every_axis_are_shown(capsys):
    axes = ["--parallel.tp", "2", "--parallel.dp", "2", "--parallel.pp", "2", "--pipeline.kind", "zb-h1"]
    heading, found = rows(capsys, *axes)
    assert heading == (
        "8 rank(s) on 1 host(s): tp=2 (sequence parallel), cp=1, pp=2, zb-h1, dp=2, zero=1; 4 micro-batch(es)"
    )
    assert {name: cells[0] for name, cells in found.items()} == {
        "tp": "0-1 2-3 4-5 6-7",
        "pp": "0-4 1-5 2-6 3-7",
        "dp": "0-2 1-3 4-6 5-7",
    }
    assert {cells[1] for cells in found.values()} == {"shared memory"}


def test_context_ranks_share_the_reduction_and_replicas_stand_apart(capsys):
    axes = ["--parallel.cp", "2", "--parallel.dp", "4", "--parallel.dp_replicate", "2", "--parallel.tp", "1"]
    _, found = rows(capsys, *axes, "--ranks_per_host", "4")
    assert found["cp"][0] == "0-1 2-3 4-5 6-7" and found["cp"][1] == "shared memory"
    assert found["dp x cp"][:2] == ["0-1-2-3 4-5-6-7", "shared memory"]
    assert found["replicas"][:2] == ["0-4 1-5 2-6 3-7", "a gloo ring of ranks"]


def test_axes_of_a_grid_are_shown(capsys):
    heading, found = rows(capsys, "--parallel.tp", "{x=2,y=2,z=2}")
    assert (
        "8 rank(s) on 1 host(s): tp={x = 2, y = 2} (sequence parallel), cp=1, pp=1, dp=2, zero=3" in heading
    )
    assert {name: cells[0] for name, cells in found.items()} == {
        "tp": "0-2 1-3 4-6 5-7",
        "tp y": "0-1 2-3 4-5 6-7",
        "dp": "0-4 1-5 2-6 3-7",
    }


@pytest.mark.parametrize(
    ("per_host", "over"),
    [
        ("8", "shared memory"),
        ("2", "shared memory, a gloo ring of hosts"),
        ("1", "a gloo ring of ranks"),
    ],
)
def test_the_transport_follows_the_hosts(capsys, per_host, over):
    _, found = rows(capsys, "--parallel.dp", "8", "--ranks", "8", "--ranks-per-host", per_host)
    assert found["dp"][1] == over


def test_one_rank_alone_talks_to_nobody(capsys):
    assert main(["mesh", "--config", "tiny"]) == 0
    assert capsys.readouterr().out.endswith("\nNothing travels.\n")


def test_what_would_not_run_is_refused(capsys):
    for argv, sentence in [
        (["--ranks", "3", "--parallel.tp", "2"], "parallel.tp=2 but 3 rank(s) were started"),
        (["--parallel.dp", "4", "--ranks_per_host", "3"], "--ranks_per_host=3 does not divide 4 ranks"),
        (
            ["--parallel.dp", "2", "--data_parallel.method", "diloco", "--data_parallel.tau", "8"],
            "mesh counts",
        ),
        (["--parallel.dp", "2", "--data_parallel.compression", "quantize"], "leave both options out"),
        (
            ["--parallel.pp", "2", "--pipeline.wire", "fp8"],
            "pipeline.wire=fp8: mesh counts only bytes",
        ),
        (["--parallel.tp", "2", "--parallel.tp_wire", "fp8"], "parallel.tp_wire=fp8: mesh counts only bytes"),
        (["--ranks", "none"], "--ranks must be a number of at least 1, found none."),
        (["--rank", "2"], "There is no option --rank; the nearest is --ranks"),
    ]:
        assert main([*SMALL, *argv]) == 2
        assert sentence in capsys.readouterr().err


def bytes_of(element=2, **axes):
    shape = preset("dim1024", vocab_size=8192)
    pipeline = axes.pop("pipeline", {})
    config = RunConfig(
        train=Train(batch_size=8, micro_batch_size=1, seq_len=512),
        parallel=Parallel(**{"tp": 1} | axes),
        pipeline=PipelineParallel(**pipeline),
    )
    config = spelled_out(config)
    run = resolve(config, shape, mesh_of(config, 1).ranks)
    job, mesh = planned(run, find_cluster("dgx-h100"))
    assert job.model == of_llama("the run", shape)
    return bytes_of_step(job, mesh, element), shape


def test_bytes_are_those_of_what_travels():
    found, shape = bytes_of(tp=2)
    # Both column linears gather forward and back and scatter back, both row linears scatter and gather back.
    row = 8 * 512 * shape.hidden_size * 2 // 2
    assert found["tp"] == pytest.approx(shape.num_hidden_layers * row * (2 * 3 + 2 * 2))
    assert found["cp"] == found["pp"] == found["gradients"] == found["weights"] == 0
    found, _ = bytes_of(dp=2, zero=1)
    assert found["gradients"] == found["weights"] == pytest.approx(shape.parameter_count())
    found, _ = bytes_of(dp=2, zero=3)
    assert found["weights"] == pytest.approx(2 * 4 * shape.parameter_count())
    found, _ = bytes_of(dp=4, dp_replicate=2, zero=2, element=4)
    assert found["replicas"] == pytest.approx(shape.parameter_count() * 4 / 2)
    # Rows of features halved by y travel over x; what is as wide as the other side, halved by x, over y.
    found, shape = bytes_of(tp=Grid(2, 2))
    layers, tokens, heads = shape.num_hidden_layers, 8 * 512, shape.num_attention_heads * shape.head_dim
    qkv = heads + 2 * shape.num_key_value_heads * shape.head_dim
    assert found["tp"] == pytest.approx(layers * tokens * shape.hidden_size * 2 / 4 * (2 * 3 + 2 * 2))
    wide = qkv + heads + 3 * shape.intermediate_size
    assert found["y"] == pytest.approx(layers * tokens * wide * 2 / 2)
    found, _ = bytes_of(tp=Grid(y=2, z=2), dp=2)
    assert found["tp"] == 0 and found["weights"] == pytest.approx(2 * shape.parameter_count(), rel=1e-3)
    found, _ = bytes_of(pp=2)
    assert found["pp"] == pytest.approx(8 * 512 * shape.hidden_size * 2 * 2)
    found, _ = bytes_of(cp=2)
    keys = 8 * 256 * 2 * shape.num_key_value_heads * shape.head_dim * shape.num_hidden_layers
    assert found["cp"] == pytest.approx(keys * (2 + 2 + 4))
