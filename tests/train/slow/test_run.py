"""On real ranks: a rank that is slowed is named by all, and layers leave it at a checkpoint for the same
losses."""

from __future__ import annotations

import dataclasses
import json
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from pyruntime import comm, ops
from pyruntime.train import checkpoint_folder, config_file, manifest, validate
from pyruntime.train import run as run_module
from pyruntime.train.config import Grid, Output, RunConfig
from pyruntime.train.errors import ConfigError
from pyruntime.train.loop import Trainer
from pyruntime.train.run import run
from pyruntime.train.signals import StopRequest
from tests.train import jobs
from tests.transports import TRANSPORTS, take

SLEEP_S = 0.04
"""For each layer that a slowed rank computes: far more than it takes on a busy machine."""


def slowed(model):
    for block in model.layers:
        block.register_forward_pre_hook(lambda *_: time.sleep(SLEEP_S))


def job(folder, steps, layers, **parallel):
    """Of two micro-batches, or one."""
    config = jobs.job(folder, steps=steps, batch_size=4, micro_batch_size=1, val_every=0, slow_every=6)
    config = jobs.changed(jobs.changed(config, "model", num_hidden_layers=layers), "parallel", **parallel)
    config = config if parallel else jobs.changed(config, "train", micro_batch_size=4)
    jobs.prepare(config)
    return config


def look_at(group, config, slow_ranks):
    """What every step said, and this rank's windows."""
    made = jobs.trainer(group, config)
    if comm.group_rank(group) in slow_ranks:
        slowed(made.model)
    said = [(step.step, step.slow) for step in made.fit() if step.slow]
    return said, list(made._slow.windows)


@pytest.mark.alone
@pytest.mark.parametrize(("size", "parallel"), [(2, {}), (4, {"pp": 2, "dp": 2})])
@pytest.mark.second_tier
def test_all_ranks_name_the_one_that_is_slowed(ranks, tmp_path, size, parallel):
    config = job(tmp_path, 18, 2, **parallel)
    results = ranks.run(look_at, size, config, [1])
    assert all(said == results[0][0] for said, _ in results)
    ((step, (found,)),) = results[0][0]
    assert (step, found["rank"], found["is_slow"]) == (18, 1, True)
    assert found["times"] > 1.3
    assert "over the last 18 steps" in found["sentence"]
    assert "waited" in found["sentence"]


@pytest.mark.alone
@pytest.mark.second_tier
def test_a_rank_of_more_layers_is_not_slow(ranks, tmp_path):
    config = jobs.changed(job(tmp_path, 18, 4, pp=2, dp=2), "pipeline", layers=(3, 1))
    for said, windows in ranks.run(look_at, 4, config, range(4)):  # so slow that it hides the machine's noise
        assert said == []
        for window in windows:
            assert max(each.layer_s for each in window) < 2 * min(each.layer_s for each in window)


def test_no_look_is_asked_for(ranks, tmp_path):
    config = jobs.job(tmp_path, steps=6, val_every=0, slow_every=0)
    jobs.prepare(config)
    assert ranks.run(has_a_report, 2, config) == [False, False]
    assert ranks.run(has_a_report, 1, jobs.changed(config, "train", slow_every=5)) == [False]


def has_a_report(group, config):
    return jobs.trainer(group, config)._slow is not None


def looks_alone(group, config):
    report = jobs.trainer(group, config)._slow
    for _ in range(6):
        with report.step():
            pass
    comm.set_deadline(group, 1.0)
    if comm.group_rank(group) == 1:
        time.sleep(2.0)
        return None
    began = time.monotonic()
    with pytest.raises(comm.CommTimeout, match="rank 1"):
        report.look()
    return time.monotonic() - began


def test_a_look_at_a_rank_that_does_not_come_ends_at_the_deadline(ranks, tmp_path):
    config = jobs.job(tmp_path)
    jobs.prepare(config)
    waited, _ = ranks.launch(looks_alone, 2, config)
    assert 0.9 < waited.value < 3.0


def waits_for_rank_1(group, transport):
    take(group, transport)
    x = torch.ones(4, 8)
    ops.all_reduce(x, group)
    before, waited, sent = comm.peers(), comm.traffic()["tp"].waiting_s, _sent(comm.peers())
    arbiter = comm.traffic()["tp"].bytes_sent
    if comm.group_rank(group) == 1:
        time.sleep(0.3)
    ops.all_reduce(x, group)
    ops.all_reduce(x, group)  # what was sent before is acknowledged by the end of it
    now = comm.peers()
    of_peers = {key: each.waiting_s - before.get(key, comm.Peer()).waiting_s for key, each in now.items()}
    return (
        of_peers,
        comm.traffic()["tp"].waiting_s - waited,
        _sent(now) - sent,
        comm.traffic()["tp"].bytes_sent - arbiter,
    )


def _sent(peers):
    return sum(each.bytes_sent for each in peers.values())


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.second_tier("process_group")
def test_a_wait_is_of_the_peer_that_is_late(ranks, transport):
    for rank, found in enumerate(ranks.run(waits_for_rank_1, 3, transport)):
        of_peers, waited, sent, left = found
        assert sum(of_peers.values()) == pytest.approx(waited, abs=1e-6)
        # Round a ring a rank waits for its neighbours, one of which is the late rank or waits for it.
        assert rank == 1 or max(of_peers.values()) > 0.1
        assert transport != "symmetric_memory" or rank == 1 or of_peers["tp", 1] > 0.25
        assert transport == "symmetric_memory" or sent > 0
        assert sent <= left + 3 * 96 * 4  # the last chunks may be acknowledged later


class Slowed(Trainer):
    """Whose rank 1 sleeps in every layer."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self._runtime.rank == 1:
            slowed(self.model)


def moving_run(group, config):
    """The layers that each of this rank's trainers held."""
    return [trainer.layers for trainer in runs(group, config)]


def dealing_run(group, config):
    """The micro-batches of all data-parallel ranks for each of this rank's trainers."""
    return [trainer.micro_batches for trainer in runs(group, config)]


@dataclasses.dataclass(frozen=True)
class Made:
    layers: Sequence[int]
    micro_batches: Sequence[int]


def runs(group, config):
    """A run whose rank 1 is slow, to its end; what each trainer was made for."""
    trainers, before = [], []

    class Kept(Slowed):
        def __init__(self, *args, **kwargs):
            # There is room for one of them: weights and states of the old stages are gone.
            assert [each() for each in before] == [None] * len(before)
            super().__init__(*args, **kwargs)
            trainers.append(Made(self.model.part.layers, self._run.micro_batches_of))
            before.extend(map(weakref.ref, (self, self.model, self.optimizer)))

    with patch.object(run_module, "Trainer", Kept):
        run(config, "job", jobs.runtime(group, config), StopRequest())
    return trainers


@pytest.mark.alone
@pytest.mark.second_tier
def test_layers_leave_a_slow_rank_at_a_checkpoint_and_losses_stay(ranks, tmp_path):
    config = job(tmp_path, 20, 6, pp=2, dp=2)
    config = jobs.changed(config, "optimizer", lr=3e-4, clip_grad_norm=0.0)
    config = jobs.changed(config, "checkpoint", every_steps=18)
    config = jobs.changed(config, "train", profile="17-19")
    stayed = [step.loss for step in ranks.run(jobs.history, 4, config)[0]]
    config = jobs.changed(jobs.changed(config, "parallel", rebalance="on"), "output", run_dir=str(tmp_path))
    validate.check(config, 4)
    held = ranks.run(moving_run, 4, config)
    # Ranks 0 and 1 are of the first place.
    before, after = held[1]
    assert (len(before), len(after)) == (3, 1)
    assert held[0] == held[1] and held[2] == held[3]
    assert sorted(after + held[2][1]) == list(range(6))
    run_dir = Path(config.output.run_dir)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 21))
    (moved,) = [line["moved"] for line in lines if "moved" in line]
    assert lines[17]["moved"] == moved
    assert "rank 1 (dp 1, pp 0; host " in moved["sentence"]
    facts = checkpoint_folder.read(run_dir / "checkpoints" / "step-000018")
    assert list(facts.layers) == moved["after"]
    assert [line["loss"] for line in lines] == stayed  # bitwise: the same sums, whoever takes them
    assert list(checkpoint_folder.read(run_dir / "checkpoints" / "step-000020").layers) == moved["after"]
    _goes_on_with_the_layers(ranks, config, moved["after"])


def _goes_on_with_the_layers(ranks, config, after):
    config = jobs.changed(jobs.changed(config, "train", steps=21), "checkpoint", resume=config.output.run_dir)
    assert [list(map(len, held)) for held in ranks.run(moving_run, 4, config)[2:]] == [[after[1]]] * 2
    # Who goes on with other stages, or without rebalance, has not asked for these layers.
    assert config_file.load(Path(config.output.run_dir) / "config.toml").pipeline.layers == ()
    config = jobs.changed(jobs.changed(config, "train", steps=22), "parallel", rebalance="off")
    assert [list(map(len, held)) for held in ranks.run(moving_run, 4, config)] == [[3]] * 4


@pytest.mark.alone
@pytest.mark.second_tier
@pytest.mark.parametrize("zero", [0, 2])
def test_micro_batches_leave_a_slow_rank_at_a_checkpoint_and_losses_stay(ranks, tmp_path, zero):
    config = job(tmp_path, 20, 2, dp=2, zero=zero)
    config = jobs.changed(jobs.changed(config, "optimizer", lr=3e-4), "checkpoint", every_steps=18)
    stayed = [step.loss for step in ranks.run(jobs.history, 4, config)[0]]
    config = jobs.changed(jobs.changed(config, "parallel", rebalance="on"), "output", run_dir=str(tmp_path))
    validate.check(config, 4)
    assert ranks.run(dealing_run, 4, config) == [[(2, 2), (1, 3)]] * 4
    run_dir = Path(config.output.run_dir)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 21))
    ((step, moved),) = [(line["step"], line["moved"]) for line in lines if "moved" in line]
    assert (step, moved["before"], moved["after"]) == (18, [2, 2], [1, 3])
    assert "rank 1 (tp 1, dp 0; host " in moved["sentence"]
    assert [line["loss"] for line in lines] == pytest.approx(stayed, rel=1e-5)
    facts = checkpoint_folder.read(run_dir / "checkpoints" / "step-000020")
    assert (facts.layers, facts.micro_batches) == ([], [1, 3])
    config = jobs.changed(jobs.changed(config, "train", steps=21), "checkpoint", resume=config.output.run_dir)
    assert ranks.run(dealing_run, 4, config)[0] == [(1, 3)]
    # Who goes on without rebalance, or with other ranks, has not asked for these.
    config = jobs.changed(config, "train", steps=22)
    assert ranks.run(dealing_run, 4, jobs.changed(config, "parallel", rebalance="off"))[0] == [(2, 2)]
    config = jobs.changed(jobs.changed(config, "train", steps=23), "parallel", dp=4)
    assert ranks.run(dealing_run, 4, config)[0] == [(1, 1, 1, 1)]


@pytest.mark.second_tier
def test_who_goes_on_with_an_older_checkpoint_takes_its_layers(ranks, tmp_path):
    """The newest one, whose layers had been moved, is damaged."""
    config = jobs.changed(job(tmp_path, 4, 4, pp=2, dp=2), "checkpoint", every_steps=2, resume="auto")
    config = jobs.changed(config, "parallel", rebalance="on")
    stayed = ranks.run(moving_run, 4, config)
    newest = Path(config.output.run_dir) / "checkpoints" / "step-000004"
    file = newest / checkpoint_folder.FACTS_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | {"layers": [1, 3]}))
    manifest.write(newest, manifest.read(newest) | {file.name: manifest.checksum(file)})
    whole = ranks.run(moving_run, 4, config)
    assert [[len(each) for each in held] for held in whole] == [[1], [1], [3], [3]]
    (newest / "rank-00001.safetensors").write_bytes(b"")
    for held, (of_older,) in zip(ranks.run(moving_run, 4, config), stayed, strict=True):
        assert held[-1] == of_older and len(held) == 2


def rebalanced(**changes):
    """A configuration that moves layers, with changes by "section.key"."""
    config = RunConfig(output=Output(run_dir="somewhere"))
    given = {"parallel.rebalance": "on", "parallel.pp": 2, "checkpoint.every_steps": 10} | changes
    for name, value in given.items():
        section, key = name.split(".")
        config = jobs.changed(config, section, **{key: value})
    return config


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"parallel.pp": 1}, "parallel.rebalance=on .* there is one of each; set parallel.pp, dp or"),
        (
            {"parallel.pp": 1, "parallel.tp": 2, "optimizer.name": "muon"},
            "optimizer.name=muon needs equal parts of tensor-parallel ranks, which parallel.rebalance=on",
        ),
        ({"checkpoint.every_steps": 0}, "checkpoint.every_steps=0 saves none before the end; set checkpoint"),
        ({"train.slow_every": 0}, "train.slow_every=0 never looks; leave one of them out"),
        ({"train.slow_every": 3}, "train.slow_every must be 0 or at least 5, found 3"),
        ({"data_parallel.method": "diloco"}, "data_parallel.method=diloco: replicas that"),
        ({"data_parallel.compression": "top_k"}, "data_parallel.compression=top_k: compression"),
    ],
)
def test_what_layers_that_move_do_not_go_together_with(changes, sentence):
    validate.check(rebalanced(), 2)
    refused(rebalanced(**changes), sentence)


def refused(config, sentence):
    with pytest.raises(ConfigError, match=sentence):
        validate.check(config, config.parallel.pp * config.parallel.dp)


OVER_DP = {"parallel.pp": 1, "parallel.dp": 2, "train.micro_batch_size": 1}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"parallel.rebalance": "on", "train.micro_batch_size": 4},
            "gives each only one; lower train.micro_b",
        ),
        ({"parallel.rebalance": "on", "parallel.zero": 3}, "rebalance=on with parallel.zero=3, .*zero to 2"),
        ({"train.micro_batches": (5, 3), "parallel.zero": 3}, r"\[5, 3\] with parallel.zero=3"),
        (
            {"train.micro_batches": (3, 1, 2, 2), "parallel.tp": Grid(1, 1, 2)},
            "with parallel.zero=3, which a z in parallel.tp means too",
        ),
        (
            {"train.micro_batches": (5, 2)},
            r"\[5, 2\] must be 2 numbers .* with a sum of 8: train.batch_size=8",
        ),
        ({"train.micro_batches": (8, 0)}, "must be 2 numbers of at least 1"),
        ({"train.micro_batches": (8,)}, "must be 2 numbers"),
        ({"train.micro_batches": (5, 3), "data_parallel.method": "diloco"}, "replicas that .* do equal work"),
        (
            {"train.micro_batches": (3, 1), "train.micro_batch_size": 2, "parallel.pp": 2},
            r"\[3, 1\] with parallel.pp=2: .* set pipeline.layers",
        ),
    ],
)
def test_what_unequal_micro_batches_do_not_go_together_with(changes, sentence):
    unequal = {"parallel.rebalance": "off", "train.micro_batches": (5, 3)}
    validate.check(rebalanced(**OVER_DP, **unequal), 2)
    refused(rebalanced(**OVER_DP | {"parallel.rebalance": "off"} | changes), sentence)


def test_one_layer_a_stage_cannot_move(tmp_path):
    config = jobs.changed(jobs.job(tmp_path), "parallel", pp=2, rebalance="on")
    with pytest.raises(ConfigError, match="but the model's 2 layers are one per stage"):
        jobs.resolved(config)


@pytest.mark.parametrize("layers", [(0, 8), ("3", 5), 8])
@pytest.mark.second_tier("8")
def test_a_checkpoint_whose_layers_are_no_numbers_is_damaged(tmp_path, layers):
    file = tmp_path / checkpoint_folder.FACTS_FILE
    for held in ((3, 5), layers):
        file.write_text(
            checkpoint_folder.to_json(checkpoint_folder.CheckpointFacts(1, "fp32", {}, layers=held))
        )
        manifest.write(tmp_path, {file.name: manifest.checksum(file)})
        if held is not layers:
            assert checkpoint_folder.read(tmp_path).layers == [3, 5]
    with pytest.raises(manifest.DamagedError, match="it does not say what was saved"):
        checkpoint_folder.read(tmp_path)
