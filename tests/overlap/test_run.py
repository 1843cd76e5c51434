"""The ledger of a training run: every axis is in it, and a step's seconds are all accounted for."""

from __future__ import annotations

import dataclasses
import json
import signal
import statistics
from pathlib import Path

import pytest
from safetensors.torch import load_file

import pyruntime
from pyruntime.cli import report
from pyruntime.cli.plan_facts import find_model, settings
from pyruntime.llama.presets import PRESETS
from pyruntime.overlap import EntryKind
from pyruntime.overlap.files import read
from pyruntime.plan.cluster import find_cluster
from pyruntime.plan.mesh import Job, Mesh
from pyruntime.train import config_file
from pyruntime.train.errors import ConfigError
from pyruntime.train.loop import Trainer
from pyruntime.train.planned import planned
from pyruntime.train.resolved import resolve
from pyruntime.train.run import run
from pyruntime.train.shape import llama_config
from pyruntime.train.signals import Stopped, StopRequest
from tests.overlap.test_page import data_of
from tests.train import jobs

MESHES = [
    {"tp": 2},
    {"tp": 2, "dp": 2, "zero": 1},
    {"tp": 1, "dp": 4, "zero": 3},
    {"tp": 2, "cp": 2},
    {"tp": 2, "pp": 2},
]


def whole_run(group, config):
    return run(config, "job", jobs.runtime(group, config), StopRequest())


@pytest.mark.parametrize("parallel", MESHES, ids=lambda mesh: "-".join(f"{k}{v}" for k, v in mesh.items()))
@pytest.mark.second_tier(but=["tp2-pp2"])
def test_every_axis_of_the_mesh_is_in_it_and_a_step_s_seconds_add_up(ranks, tmp_path, parallel):
    config = jobs.job(
        tmp_path, steps=4, seq_len=32, batch_size=4, micro_batch_size=1, ledger=True, val_every=0
    )
    jobs.prepare(config)
    size = parallel["tp"] * parallel.get("dp", 1) * parallel.get("cp", 1) * parallel.get("pp", 1)
    ranks.run(whole_run, size, jobs.changed(config, "parallel", **{**parallel, "tp": None}))
    run_dir = Path(config.output.run_dir)
    ledgers = read(run_dir)
    assert [ledger.rank for ledger in ledgers] == list(range(size))
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    axes = {name for name in ("tp", "cp", "pp", "dp") if parallel.get(name, 1) > 1}
    for ledger in ledgers:
        account = ledger.account
        assert axes <= set(account.axes)
        assert all(account.axes[name].bytes_read > 0 for name in axes - {"pp"})
        assert account.lost == 0
        assert (ledger.steps, ledger.step) == (3, 4)  # the first is left out of the sum
        assert account.seconds == pytest.approx(sum(line["step_time_s"] for line in steps[1:]), rel=0.3)
        parts = (account.computing_s, account.copying_s, account.summing_s, account.rest_s)
        assert all(part >= 0 for part in parts)
        assert sum(parts) + account.exposed_s == pytest.approx(account.seconds, rel=1e-6)
        assert any(entry.kind is EntryKind.OP and entry.layer for entry in ledger.entries)
    if "pp" in axes:
        assert sum(ledger.account.axes["pp"].bytes_read for ledger in ledgers) > 0
    told = sum(line["exposed_comm_s"] for line in steps[1:])
    waited = max(ledger.account.exposed_s + ledger.account.copying_s for ledger in ledgers)
    assert waited < 1.5 * told + 0.05


def test_what_saving_wrote_and_waited_for_has_an_account_of_its_own(ranks, tmp_path):
    config = jobs.job(tmp_path, steps=4, ledger=True, val_every=0)
    jobs.prepare(config)
    config = jobs.changed(config, "checkpoint", every_steps=2)
    ranks.run(whole_run, 4, jobs.changed(config, "parallel", dp=2, zero=1, tp=None))
    run_dir = Path(config.output.run_dir)
    ledgers = read(run_dir)
    written = [path.stat().st_size for path in run_dir.glob("checkpoints/step-*/*.safetensors")]
    assert len(written) == 8  # of four ranks, after steps 2 and 4
    sent = 0
    for ledger in ledgers:
        assert ledger.saves == 2
        assert "checkpoint" not in ledger.account.axes
        saved = ledger.saved
        axis = saved.axes["checkpoint"]
        assert axis.bytes_sent > 0
        assert axis.exposed_s > 0
        assert saved.copying_s > 0
        sent += axis.bytes_sent
        parts = (saved.computing_s, saved.copying_s, saved.summing_s, saved.rest_s, saved.exposed_s)
        assert all(part >= 0 for part in parts)
        assert sum(parts) == pytest.approx(saved.seconds, rel=1e-6)
        saving = [entry for entry in ledger.entries if entry.axis == "checkpoint"]  # of step 4
        assert {EntryKind.WAIT, EntryKind.COPY, EntryKind.SENT} == {entry.kind for entry in saving}
        assert all(entry.begin >= ledger.end for entry in saving if entry.kind is not EntryKind.SENT)
        assert (
            len([entry for entry in saving if entry.kind is EntryKind.SENT]) == 2
        )  # and that of step 2, beside 3
    assert sent == sum(written)


def loaded(group, config, folder) -> tuple[int, float]:
    trainer = jobs.trainer(group, config)
    with pyruntime.ledger() as ledger:
        trainer.resume(folder)
    trainer.close()
    axis = ledger.account().axes["checkpoint"]
    return axis.bytes_read, axis.exposed_s


def test_what_loading_a_checkpoint_read_is_entered(ranks, tmp_path):
    config = jobs.job(tmp_path, steps=2, val_every=0)
    jobs.prepare(config)
    ranks.run(whole_run, 2, config)
    (folder,) = Path(config.output.run_dir).glob("checkpoints/step-*")
    files = [load_file(path) for path in folder.glob("*.safetensors")]
    written = sum(tensor.nbytes for file in files for tensor in file.values())
    found = ranks.run(loaded, 2, config, folder)
    assert written <= sum(size for size, _ in found) <= 2 * written  # what ranks share is read by each
    assert all(waited > 0 for _, waited in found)


def test_report_writes_a_page_and_a_trace_and_refuses_what_is_no_run(ranks, tmp_path, capsys):
    config = jobs.job(tmp_path, steps=2, ledger=True, val_every=0)
    jobs.prepare(config)
    ranks.run(whole_run, 2, config)
    report.main([config.output.run_dir])
    page = Path(config.output.run_dir) / "report.html"
    assert str(page) in capsys.readouterr().out
    assert "layers.0.qkv" in page.read_text()
    trace = json.loads((page.parent / "trace.json").read_text())
    assert {event["pid"] for event in trace["traceEvents"]} == {0, 1}
    with pytest.raises(ConfigError, match=r"is not a run folder: it has no metrics\.jsonl"):
        report.main([str(tmp_path)])
    (page.parent / "ledger" / "rank-1.json").write_text("{")
    with pytest.raises(ConfigError, match=r"rank-1\.json does not hold the ledger"):
        report.main([config.output.run_dir])


@pytest.mark.second_tier
def test_the_page_has_what_the_planner_says_beside_what_was_measured(ranks, tmp_path, capsys):
    config = jobs.job(tmp_path, steps=2, ledger=True, val_every=0, dtype="bf16")
    jobs.prepare(config)
    ranks.run(whole_run, 2, config)
    page = Path(config.output.run_dir) / "report.html"
    steps = [json.loads(line) for line in (page.parent / "metrics.jsonl").read_text().splitlines()]
    report.main([config.output.run_dir])
    plan = data_of(page.read_text())["plan"]
    assert plan["step"] is None
    assert "plan --measure" in plan["words"]
    assert plan["memory"]["process"] == 0.3e9
    assert plan["measured_memory"] == steps[-1]["memory_bytes"]
    report.main([config.output.run_dir, "--cluster", "dgx-h100"])
    plan = data_of(page.read_text())["plan"]
    assert plan["words"] == ""
    assert plan["step"]["compute"] > 0
    assert plan["step"]["tp"] > 0
    assert plan["measured_step"] == statistics.median(line["step_time_s"] for line in steps)
    report.main([config.output.run_dir])
    with pytest.raises(ConfigError, match="no-such-cluster"):
        report.main([config.output.run_dir, "--cluster", "no-such-cluster"])


def test_the_page_s_prediction_is_of_the_layers_that_stages_hold(tmp_path, capsys):
    config = jobs.job(tmp_path, batch_size=4, micro_batch_size=1, dtype="bf16")
    config = jobs.changed(config, "parallel", tp=1, pp=2)
    config = jobs.changed(config, "model", num_hidden_layers=8)
    shape = llama_config(config.model, 256, config.train.seq_len, 1)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(shape.to_hf()))
    line = {"step": 1, "loss": 1.0, "step_time_s": 1.0, "memory_bytes": 10**8}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")

    def plan_of(**changes) -> dict:
        changed = config
        for section, values in changes.items():
            changed = jobs.changed(changed, section, **values)
        (tmp_path / "config.toml").write_text(config_file.to_toml(changed))
        report.main([str(tmp_path), "--cluster", "dgx-h100"])
        return data_of((tmp_path / "report.html").read_text())["plan"]

    even, uneven = (plan_of(pipeline={"layers": layers}) for layers in ((4, 4), (7, 1)))
    assert even["step"]["compute"] > 0 and uneven["words"] == ""
    assert uneven["step"]["compute"] == pytest.approx(7 / 4 * even["step"]["compute"], rel=0.2)
    assert uneven["memory"]["weights"] > 1.3 * even["memory"]["weights"]
    for changes in ({"parallel": {"rebalance": "on"}}, {"comm": {"tier": "unfused"}}):
        plan = plan_of(**changes)
        assert plan["step"] is None and plan["memory"]["weights"] > 0
        ((section, values),) = changes.items()
        ((key, value),) = values.items()
        assert plan["words"] == f"No step is predicted: the planner does not know {section}.{key}={value}."


def test_a_configuration_is_to_the_planner_what_the_planner_wrote():
    job = Job(find_model("30m"), find_cluster("dgx-h100"), 16, 32, 2048, rounding="stochastic")
    mesh = Mesh(tp=2, cp=1, dp=4, pp=2, zero=2, replicate=2, kind="zb-h1", micro_batch=2, recompute="full")
    config = config_file.from_dict(settings(job, mesh), "the test")
    again, found = planned(resolve(config, PRESETS["30m"], 16), job.cluster)
    assert found == mesh
    assert dataclasses.replace(again, model=job.model) == job

    mixture = dataclasses.replace(job, model=find_model("mixtral-8x7b"))
    mesh = dataclasses.replace(mesh, ep=4)
    config = config_file.from_dict(settings(mixture, mesh), "the test")
    assert planned(resolve(config, PRESETS["mixtral-8x7b"], 16), job.cluster)[1] == mesh


def stopped_run(group, config):
    stop = StopRequest()
    ranks = jobs.runtime(group, config)
    original = Trainer._train_step

    def step_then_signal(trainer, number):
        if number == 2:
            stop.note(signal.SIGTERM)
        return original(trainer, number)

    Trainer._train_step = step_then_signal
    try:
        run(config, "job", ranks, stop)
    except Stopped as ending:
        return ending.signum
    finally:
        Trainer._train_step = original


def test_a_run_that_is_stopped_leaves_its_ledger_and_none_of_an_earlier_run(ranks, tmp_path):
    config = jobs.job(tmp_path, steps=9, ledger=True, val_every=0)
    jobs.prepare(config)
    ledger = Path(config.output.run_dir) / "ledger"
    ledger.mkdir()
    (ledger / "rank-7.json").write_text("of an earlier run")
    assert ranks.run(stopped_run, 2, config) == [signal.SIGTERM] * 2
    assert [kept.step for kept in read(ledger.parent)] == [2, 2]


def test_a_run_without_a_ledger_has_a_page_that_says_how_to_keep_one(ranks, tmp_path, capsys):
    config = jobs.job(tmp_path, steps=2, val_every=0)
    jobs.prepare(config)
    ranks.run(whole_run, 1, config)
    report.main([config.output.run_dir])
    assert "--train.ledger" in capsys.readouterr().out
    run_dir = Path(config.output.run_dir)
    assert not (run_dir / "ledger").exists()
    data = data_of((run_dir / "report.html").read_text())
    assert "a ledger would show why" in data["verdict"] and len(data["tiles"]) == 4
    facts = data["facts"]
    assert list(facts) == ["last step", "steps", "ranks", "model", "repeat", "ledger"]
    assert facts["ranks"] == "1 rank" and facts["steps"].startswith("2 of ")
    assert facts["repeat"].startswith(f"python -m pyruntime train --config {run_dir}/config.toml")
    (run_dir / "resolved.json").write_text('{"mesh": {"tp": 0}}')
    with pytest.raises(ConfigError, match=r"resolved\.json does not hold the mesh of a run"):
        report.main([config.output.run_dir])
