"""What a run is follows from its configuration, model and number of ranks: without ranks, without weights."""

import dataclasses
import json
import pickle

import pytest

from pyruntime.llama.presets import preset
from pyruntime.train.config import (
    DataParallel,
    Grid,
    MeshSizes,
    Optimizer,
    Parallel,
    PipelineParallel,
    RunConfig,
    Train,
)
from pyruntime.train.errors import ConfigError
from pyruntime.train.resolved import check, resolve, settled

SHAPE = preset("debug", num_hidden_layers=6, vocab_size=256)
TRAIN = Train(steps=7, batch_size=8, micro_batch_size=1, seq_len=32)


def run_of(world_size, **sections):
    config = dataclasses.replace(RunConfig(train=TRAIN), **sections)
    return resolve(settled(config, SHAPE), SHAPE, world_size)


def test_one_rank_is_one_stage_that_holds_all_layers():
    run = run_of(1)
    assert run.mesh == MeshSizes() and run.mesh.ranks == 1
    assert (run.micro_batches, run.tokens_per_step, run.meets_every_step) == (8, 256, True)
    assert (run.placement, run.layers, run.slices) == ((0,), (range(6),), (32,))
    assert run.part_of(0) is None and run.outer is None and run.compression is None
    facts = run.facts
    assert (facts.step, facts.dtype, facts.method, facts.compression) == (0, "bf16", "every_step", "")
    assert facts.model == dataclasses.asdict(SHAPE) and facts.optimizer == "adamw"


def test_ranks_that_no_axis_names_are_tensor_parallel():
    run = run_of(16, parallel=Parallel(dp=2, pp=2))
    assert run.mesh == MeshSizes(pp=2, dp=2, tp=4) and run.mesh.ranks == 16
    assert run.mesh.axes == {"pp": 2, "dp": 2, "cp": 1, "tp": 4}
    assert run.micro_batches == 4


def test_what_stands_for_something_else_is_written_out():
    """z as ZeRO 3 of more data-parallel ranks, tokens as steps."""
    train = dataclasses.replace(TRAIN, tokens=1000)
    run = run_of(16, train=train, parallel=Parallel(tp=Grid(x=2, y=2, z=2), dp=2))
    assert run.mesh == MeshSizes(dp=4, dp_replicate=2, tp=2, tp_y=2) and run.mesh.axes["tp"] == 4
    assert run.config.parallel.zero == 3 and run.micro_batches == 2
    assert (run.config.train.steps, run.config.train.tokens) == (4, 0)


def test_the_stages_of_a_pipeline_their_ranks_and_their_layers():
    run = run_of(
        2,
        parallel=Parallel(pp=2),
        pipeline=PipelineParallel(kind="interleaved", virtual=2, layers=(2, 1, 2, 1)),
    )
    assert run.placement == (0, 1, 0, 1) and run.schedule.placement == run.placement
    assert run.layers == (range(2), range(2, 3), range(3, 5), range(5, 6))
    assert [run.part_of(rank).layers for rank in range(2)] == [(0, 1, 3, 4), (2, 5)]
    moved = run.with_work((1, 2, 1, 2))
    assert moved.config.pipeline.layers == (1, 2, 1, 2) and moved.part_of(1).layers == (1, 2, 4, 5)
    assert moved == dataclasses.replace(run, config=moved.config, layers=moved.layers)
    assert pickle.loads(pickle.dumps(run)) == run


def test_slices_are_of_a_context_parallel_rank():
    run = run_of(4, parallel=Parallel(pp=2, cp=2), pipeline=PipelineParallel(kind="seq1f1b", slices=3))
    assert run.slices == (6, 5, 5) and run.schedule.slices == 3
    of_tokens = PipelineParallel(kind="terapipe", slices=2, slice_tokens=(20, 12))
    assert run_of(4, parallel=Parallel(pp=2, cp=2), pipeline=of_tokens).slices == (10, 6)


def test_replicas_that_seldom_meet():
    chosen = DataParallel(method="diloco", tau=4, compression="top_k")
    run = run_of(4, parallel=Parallel(dp=4), data_parallel=chosen)
    assert run.mesh == MeshSizes(dp=4, dp_replicate=4) and not run.meets_every_step
    assert (run.outer.tau, run.outer.momentum) == (4, 0.9) and run.compression.method == "top_k"
    assert run.facts.method == "diloco of 4 replicas"
    assert run.facts.compression.endswith(" at zero=1 over pp=1, dp=4, cp=1, tp=1")
    members = dataclasses.replace(chosen, members="host:1", compression="none")
    run = run_of(2, parallel=Parallel(dp=2), data_parallel=members)
    assert run.mesh.dp_replicate == 1 and run.facts.method == "diloco of replicas that come and go"


def test_what_it_says_of_itself_is_json():
    run = run_of(2, parallel=Parallel(pp=2), data_parallel=DataParallel(), optimizer=Optimizer(name="muon"))
    said = json.loads(run.to_json())
    assert said["layers"] == [[0, 1, 2], [3, 4, 5]] and said["mesh"]["pp"] == 2
    assert said["config"]["optimizer"]["name"] == "muon" and said["shape"]["num_hidden_layers"] == 6


@pytest.mark.parametrize(
    ("pipeline", "sentence"),
    [
        (
            PipelineParallel(kind="interleaved", virtual=4),
            "parallel.pp: 6 layers cannot be cut into 8 stages",
        ),
        (PipelineParallel(slices=2), r"\[pipeline\]: 1f1b does not cut sequences"),
        (PipelineParallel(layers=(5, 2)), r"pipeline.layers=\[5, 2\] must be 2 numbers"),
    ],
)
def test_a_pipeline_that_there_is_not_is_refused(pipeline, sentence):
    with pytest.raises(ConfigError, match=sentence):
        run_of(2, parallel=Parallel(pp=2), pipeline=pipeline)


def test_a_configuration_alone_is_checked_and_resolved():
    config = RunConfig(train=dataclasses.replace(TRAIN, micro_batch_size=2), parallel=Parallel(dp=2))
    assert check(config, 4) == resolve(config, check(config, 4).shape, 4)
    with pytest.raises(ConfigError, match="start a multiple of 2"):
        check(config, 3)
