"""Every option of the trainer that devices take is taken on simulated devices, with a value of its own."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from pyruntime.comm import Runtime
from pyruntime.train.config import (
    Comm,
    ContextParallel,
    Grid,
    Model,
    Output,
    Parallel,
    PipelineParallel,
    RunConfig,
)
from pyruntime.train.metrics import read
from pyruntime.train.run import run
from pyruntime.train.signals import StopRequest
from pyruntime.train.validate import check
from tests.cuda import build as kernels
from tests.device import sim
from tests.device.test_training import job
from tests.train import jobs
from tests.train.test_conversations import CHATML
from tests.train.test_pipeline import costs_file

RANKS = 4
GROUPS = [
    ["tp x dp", "went on"],
    ["slices", "init_from", "costs"],
    ["hybrid", "cp"],
    ["rings", "grid", "experts", "sigmoid experts"],
    ["adapters", "more adapters", "preferences", "routed"],
]
"""Runs on the same ranks, one after the other."""
LEFT = {
    "data.targets": "how text becomes tokens, before any device has them; tests/train/data",
    "data_parallel": "a file of tests of their own: the whole section",
    "optimizer.offload": "a file of tests of its own",
    "optimizer.offload_dir": "of CPU ranks",
    "optimizer.rounding": "a file of tests of its own",
    "parallel.rebalance": "a file of tests of its own",
    "parallel.tp_wire": "a file of tests of its own",
    "parallel.hosts": "the numbers of ranks, before anything is computed; tests/comm/test_links.py",
    "pipeline.skip": "a file of tests of its own, beside a rank that skips the same layers",
    "pipeline.wire": "a file of tests of its own",
    "context.wire": "a file of tests of its own",
    "train.ledger": "a file of tests of its own",
    "train.slow_every": "a file of tests of its own",
    "train.compile": "torch's compiler has no code for the simulated device",
    "train.device": "its values do not name the simulated device",
    "output.wandb": "needs an account and a package; tests/train/watching",
}
"""Options, or sections, that the runs here do not take, and why."""


def text(folder: Path) -> dict:
    """Options of data in several files of documents."""
    generator = torch.Generator().manual_seed(3)
    words = ["".join(map(chr, torch.randint(97, 123, (5,), generator=generator))) for _ in range(40)]
    paths = []
    for name, documents in (("many", 120), ("few", 60), ("held_out", 20)):
        (folder / name).mkdir()
        paths.append(str(folder / name))
        lines = []
        for _ in range(documents):
            drawn = torch.randint(40, (30,), generator=generator).tolist()
            lines.append(json.dumps({"body": " ".join(words[each] for each in drawn)}))
        (folder / name / "text.jsonl").write_text("\n".join(lines))
        (folder / name / "other.txt").write_text("not to be read")
    return {
        "paths": tuple(paths[:2]), "val_paths": tuple(paths[2:]), "weights": (2.0, 1.0), "field": "body",
        "pattern": "*.jsonl", "tokenizer": "bytes", "val_fraction": 0.1, "verify": True,
        "document_masks": False,
    }  # fmt: skip


def pairs(folder: Path) -> dict:
    """Options of data in a file of pairs of answers."""
    (folder / "template.jinja").write_text(CHATML)
    lines = [{"prompt": f"{n}", "chosen": "b" * (n % 5), "rejected": "a" * (n % 3)} for n in range(60)]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return {"paths": (str(folder / "pairs.jsonl"),), "chat_template": str(folder / "template.jinja")}


def changed(config: RunConfig, **sections) -> RunConfig:
    for section, values in sections.items():
        config = jobs.changed(config, section, **values)
    return config


def runs(folder: Path) -> dict[str, RunConfig]:
    """The runs, each of RANKS ranks, in their order: some read what one before has written."""
    short = {"steps": 2, "batch_size": 4, "micro_batch_size": 1, "val_every": 0, "val_sequences": 2}
    base = job(folder, train=short, parallel={"tp": 1}, output={"sample_tokens": 2})
    made = {
        "tp x dp": changed(
            base,
            model={
                "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 320, "rope_theta": 5000.0,
                "tie_word_embeddings": True,
            },
            data=text(folder),
            optimizer={
                "schedule": "wsd", "decay_fraction": 0.5, "min_lr_fraction": 0.2, "warmup_steps": None,
                "warmup_fraction": 0.4, "beta1": 0.8, "beta2": 0.9, "eps": 1e-6, "weight_decay": 0.2,
                "clip_grad_norm": 0.5, "on_bad_step": "skip", "spike_factor": 5.0,
            },
            train={
                "tokens": 300, "z_loss": 1e-3, "seed": 5, "activation_checkpointing": "selective",
                "val_every": 3, "peak_flops": 1e12, "profile": "2",
            },
            parallel={"tp": 2, "dp": 2, "zero": 2},
            comm={"tier": "unfused", "deadline_s": 60.0},
            checkpoint={"every_steps": 1, "keep": 1, "keep_every_h": 1e-9, "save_on_stop": False},
            output={"log_every": 2, "tensorboard": True, "progress": "lines"},
        ),
        "hybrid": changed(
            base,
            optimizer={"name": "muon", "momentum": 0.9},
            train={
                "activation_checkpointing": "full", "check_types": True, "val_every": 1, "patience": 2
            },
            parallel={"dp": 4, "dp_replicate": 2, "zero": 3},
            checkpoint={"keep_best": True},
        ),
        "rings": changed(
            base,
            model={"hidden_size": 128},
            train={"dtype": "bf16"},
            parallel={"tp": 2, "dp": 2},
            comm={"tier": "fused", "rings": ("0-1",)},
        ),
        "grid": changed(
            base,
            train={"dtype": "bf16"},
            parallel={"tp": Grid(2, 2)},
            output={"cluster": "dgx-h100"},
        ),
        "cp": changed(
            base,
            parallel={"tp": 2, "cp": 2, "tp_slices": 2},
            context={"layout": "striped", "variant": "all_gather_kv"},
        ),
        "experts": changed(
            base,
            model={
                "experts": 7, "experts_per_token": 2, "expert_size": 24, "shared_expert_size": 16,
                "dense_layers": 1, "norm_topk_prob": False,
            },
            # One micro-batch: with several, those of data-parallel ranks have other sequences together.
            train={"balance_loss": 0.5, "router_z_loss": 0.1, "batch_size": 2},
            parallel={"tp": 2, "dp": 2, "zero": 3, "ep": 4},
        ),
        "sigmoid experts": changed(
            base,
            model={
                "experts": 8, "expert_size": 16, "shared_expert_size": 32, "qk_norm": True,
                "sigmoid_router": True, "expert_groups": 4, "expert_groups_per_token": 2,
                "routed_scaling_factor": 1.5,
            },
            train={"router_bias_rate": 0.01, "batch_size": 2},
            parallel={"tp": 2, "dp": 2},
        ),
        "adapters": changed(
            base,
            lora={"rank": 4, "alpha": 6.0, "targets": ("q_proj", "v_proj", "o_proj"), "rslora": True},
            parallel={"tp": 2, "pp": 2, "tp_speeds": (1.0, 0.6)},
        ),
        "preferences": changed(
            base,
            data=pairs(folder),
            dpo={"beta": 0.2, "reference": str(folder / "reference.safetensors")},
            parallel={"tp": 2, "dp": 2, "zero": 3},
        ),
        "slices": changed(
            base,
            model={"num_hidden_layers": 4},
            parallel={"tp": 2, "pp": 2},
            pipeline={"kind": "seq1f1b", "slices": 2, "slice_tokens": (20, 12), "layers": (1, 3)},
        ),
        "routed": changed(
            base,
            parallel={"dp": 2, "pp": 2, "zero": 1},
            pipeline={"kind": "1f1b", "speeds": (1.0, 0.5, 1.0, 1.0)},
        ),
        "costs": changed(
            base,
            model={"num_hidden_layers": 5, "qk_norm": True},
            parallel={"dp": 2, "pp": 2},
            pipeline={"kind": "interleaved", "virtual": 2, "costs": costs_file(folder)},
        ),
    }  # fmt: skip
    made = {name: in_folder(config, folder, name) for name, config in made.items()}
    first = made["tp x dp"]
    went_on = changed(first, checkpoint={"resume": f"{first.output.run_dir}/checkpoints/step-000002"})
    made["went on"] = in_folder(went_on, folder, "went on")
    from_adapters = {"init_from": f"{made['adapters'].output.run_dir}/adapter"}
    more = changed(made["adapters"], lora=from_adapters, parallel={"pp": 1, "dp": 2, "zero": 3})
    made["more adapters"] = in_folder(more, folder, "more adapters")
    from_model = Model(init_from=f"{made['slices'].output.run_dir}/model")
    unequal = {"batch_size": 8, "micro_batches": (1, 3, 2, 2)}
    begun = dataclasses.replace(base, model=from_model)
    begun = changed(begun, train=unequal, parallel={"dp": 4, "zero": 1})
    made["init_from"] = in_folder(begun, folder, "init_from")
    return made


def in_folder(config: RunConfig, folder: Path, name: str) -> RunConfig:
    return changed(config, output={"run_dir": str(folder / name.replace(" ", "-"))})


def on_one_rank(config: RunConfig, folder: Path, name: str) -> RunConfig:
    """The run without what is about several ranks, devices, or watching."""
    one = {"parallel": Parallel(tp=1), "pipeline": PipelineParallel(), "context": ContextParallel()}
    output, dp = Output(progress="off", sample_tokens=2), config.parallel.dp
    config = dataclasses.replace(config, **one, comm=Comm(), output=output)
    # Routers count the tokens of a micro-batch of all ranks.
    size = config.train.micro_batch_size * dp
    config = changed(config, train={"profile": "", "micro_batch_size": size, "micro_batches": ()})
    return in_folder(config, folder, f"{name} alone")


def train_all(group, configs, device):
    """Returns for each run the losses, gradient norms and validation losses of its steps."""
    if device != "cpu":
        sim.begin_rank(delays=4)
        sim.use_kernels(kernels.LIBRARY)
    found = {}
    for name, config in configs.items():
        parallel = config.parallel
        grid = parallel.tp if isinstance(parallel.tp, Grid) else Grid(parallel.tp)
        sizes = {
            "tp": grid.x,
            "tp_y": grid.y,
            **{axis: getattr(parallel, axis) for axis in ("cp", "pp", "dp", "ep")},
        }
        check(config, RANKS if device != "cpu" else 1)
        with Runtime.start(**sizes, dp_replicate=parallel.dp_replicate, device=device) as runtime:
            folder = run(config, "job", runtime, StopRequest())
        steps = read(folder / "metrics.jsonl")
        found[name] = [(step["loss"], step["grad_norm"], step.get("val_loss") or 0.0) for step in steps]
    return found


def options(config: RunConfig) -> dict[str, object]:
    return {
        f"{section}.{name}": value
        for section, values in vars(config).items()
        for name, value in vars(values).items()
    }


def test_every_option_is_taken_or_left_to_a_test_of_its_own(tmp_path):
    usual, made = options(RunConfig()), runs(tmp_path)
    taken = {
        name for config in made.values() for name, value in options(config).items() if value != usual[name]
    }
    left = {name for name in usual if name in LEFT or name.partition(".")[0] in LEFT}
    assert sorted(name for group in GROUPS for name in group) == sorted(made)
    assert taken & left == set() and usual.keys() - taken - left == set()


@pytest.mark.second_tier
@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("names", GROUPS, ids=", ".join)
def test_with_its_options_a_mesh_of_devices_learns_what_one_cpu_rank_learns(ranks, tmp_path, names):
    configs = {name: config for name, config in runs(tmp_path).items() if name in names}
    (found, *_) = learned(ranks, RANKS, configs, sim.DEVICE)
    alone = {name: on_one_rank(config, tmp_path, name) for name, config in configs.items()}
    (expected,) = learned(ranks, 1, alone, "cpu")
    for name, config in configs.items():
        exact = config.train.dtype == "fp32"  # bf16 rounds by 0.4 %, other sums on every mesh
        one, other = (torch.tensor(each[name], dtype=torch.float64) for each in (found, expected))
        torch.testing.assert_close(
            one, other, rtol=2e-5 if exact else 1e-2, atol=0, msg=lambda m, n=name: f"{n}: {m}"
        )
    if "went on" in found:
        assert found["went on"] == found["tp x dp"][2:]


def learned(ranks, number, configs, device):
    outcomes = ranks.launch(train_all, number, configs, device, init=False, timeout=200.0)
    for rank in outcomes:
        assert rank.error is None, rank.error
    return [rank.value for rank in outcomes]
