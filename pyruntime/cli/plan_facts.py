"""What the planner, which knows of no code but its own, is told of this project: the models, what the
trainer keeps in memory, and whether it would run a mesh.

The trainer is asked; nothing here knows what it can do. What it has no key for is given to it under the key
that it would have, and its refusal is the answer. Asking imports the trainer and with it torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pyruntime.llama.config import LlamaConfig
from pyruntime.llama.presets import PRESETS
from pyruntime.plan import models
from pyruntime.plan.cluster import Cluster
from pyruntime.plan.memory import Rules
from pyruntime.plan.mesh import Job, Mesh
from pyruntime.plan.models import GPTS, ModelShape
from pyruntime.text import toml_value

if TYPE_CHECKING:
    from pyruntime.train.config import DataParallel, RunConfig

LLAMA2_13B = LlamaConfig(
    vocab_size=32000,
    hidden_size=5120,
    intermediate_size=13824,
    num_hidden_layers=40,
    num_attention_heads=40,
)


def of_llama(name: str, config: LlamaConfig, preset: str = "") -> ModelShape:
    return ModelShape(
        name,
        config.num_hidden_layers,
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.intermediate_size,
        config.vocab_size,
        tied=config.tie_word_embeddings,
        preset=preset,
    )


TRAINER = Rules(
    gradient=2,
    ffn_kept=1,
    heap=0.95,
    largest_gradients=2,
    logits=2,
    reduced_gradient=2,
    workspaces=True,
    outer=10,
)
"""This project's trainer in bf16 on CPU ranks of one host, by resident memory: gradients in the weights'
type; over several data-parallel ranks sums of earlier micro-batches are fp32 and whole at every stage
(docs/data-parallel.md). `heap` was measured (docs/planning.md)."""
DEVICE = dataclasses.replace(TRAINER, heap=0, peers_resident=False)
"""The same on GPUs, where torch's allocator uses freed pieces again and memory of peers is not a rank's own.
Derived; no GPU has been measured."""


def trainer_rules(config: RunConfig) -> Rules:
    """What the trainer keeps in memory of a run of that type on that device, `auto` taken for CPUs. fp32
    weights need no masters."""
    rules = DEVICE if config.train.device == "cuda" else TRAINER
    if config.train.dtype == "bf16":
        return rules
    return dataclasses.replace(
        rules, weight=4, gradient=4, optimizer=8, logits=4, reduced_gradient=4, element=4
    )


MODELS: dict[str, ModelShape] = {
    **{name: of_llama(name, config, preset=name) for name, config in PRESETS.items()},
    "llama2-13b": of_llama("llama2-13b", LLAMA2_13B),
    **GPTS,
}


def find_model(name: str) -> ModelShape:
    """The known model of that name; see `pyruntime.plan.models.find_model`. Raises ValueError."""
    return models.find_model(name, MODELS)


def settings(job: Job, mesh: Mesh, layers: Sequence[int] = ()) -> dict[str, dict[str, Any]]:
    """Sections and keys of a configuration that trains `job` on `mesh`, as in a TOML file. layers: of each
    stage; empty: as the trainer cuts them."""
    tp = {"x": mesh.x, "y": mesh.y, "z": mesh.z} if mesh.is_axonn else mesh.tp
    parallel: dict[str, Any] = {"tp": tp, "pp": mesh.pp, "cp": mesh.cp, "dp": mesh.dp}
    if mesh.dp * mesh.cp > 1 and not mesh.tau and not mesh.is_axonn:
        parallel |= {"zero": mesh.zero, "dp_replicate": mesh.replicate}
    train: dict[str, Any] = {
        "batch_size": job.batch,
        "micro_batch_size": mesh.micro_batch,
        "seq_len": job.seq,
        "dtype": "bf16",
    }
    if mesh.recompute:
        train["activation_checkpointing"] = True
    sections = {"model": _model(job), "train": train, "parallel": parallel}
    if job.cluster.rings and mesh.tp == job.cluster.gpus_per_node:
        sections["comm"] = {"rings": list(job.cluster.rings)}
    if mesh.tau:
        sections["data_parallel"] = {"method": "co2", "tau": mesh.tau}
    if job.rounding != "nearest":
        sections["optimizer"] = {"rounding": job.rounding}
    if job.optimizer != "adamw":
        sections["optimizer"] = {"name": job.optimizer}
    if mesh.pp > 1:
        sections["pipeline"] = {"kind": mesh.kind, "slices": mesh.slices}
        if mesh.kind == "interleaved":
            sections["pipeline"]["virtual"] = mesh.virtual
        if layers:
            sections["pipeline"]["layers"] = list(layers)
    return sections


def _model(job: Job) -> dict[str, Any]:
    model = job.model
    if model.preset:
        return {"preset": model.preset, "vocab_size": model.vocab, "tie_word_embeddings": model.tied}
    sizes: dict[str, Any] = {
        "hidden_size": model.hidden,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "intermediate_size": model.ffn,
        "vocab_size": model.vocab,
        "tie_word_embeddings": model.tied,
    }
    if model.biased or not model.gated:
        sizes["architecture"] = "gpt"
    return sizes


def toml(job: Job, mesh: Mesh, head: str = "", layers: Sequence[int] = ()) -> str:
    """A file that `train --config` takes; `head` is a comment at its beginning."""
    lines = [f"# {line}" for line in head.splitlines()]
    for name, section in settings(job, mesh, layers).items():
        lines += ["", f"[{name}]"]
        lines += [f"{key} = {toml_value(value)}" for key, value in section.items()]
    return "\n".join(lines).lstrip() + "\n"


def planned(config: RunConfig, shape: LlamaConfig, ranks: int, cluster: Cluster) -> tuple[Job, Mesh]:
    """What a configuration that runs on `ranks` ranks is to the planner; `settings` is the way back."""
    from pyruntime.train.config import replicas, tp_axes, with_pieces

    config = with_pieces(config)
    train, parallel, pipeline = config.train, config.parallel, config.pipeline
    job = Job(
        of_llama("the run", shape),
        cluster,
        ranks,
        train.batch_size,
        train.seq_len,
        rounding=config.optimizer.rounding,
        optimizer=config.optimizer.name,
    )
    tau = _tau(config.data_parallel)
    tp, y = tp_axes(parallel, ranks)
    if y > 1:
        replicated = parallel.dp_replicate if parallel.zero == 3 else parallel.dp
        return job, Mesh(
            x=tp,
            y=y,
            z=parallel.dp // replicated,
            dp=replicated,
            pp=parallel.pp,
            cp=parallel.cp,
            zero=0,
            micro_batch=train.micro_batch_size,
            recompute=train.activation_checkpointing,
        )
    mesh = Mesh(
        tp=tp,
        pp=parallel.pp,
        cp=parallel.cp,
        dp=parallel.dp,
        zero=parallel.zero,
        replicate=parallel.dp_replicate if tau else replicas(config),
        kind=pipeline.kind,
        virtual=pipeline.virtual,
        slices=pipeline.slices,
        micro_batch=train.micro_batch_size,
        recompute=train.activation_checkpointing,
        tau=tau,
    )
    return job, mesh


def _tau(method: DataParallel) -> int:
    """Of a mesh: 0 where ranks meet in every step, or in another way than CO2's; at least 1 where it will be
    measured."""
    if method.method != "co2":
        return 0
    return 1 if method.tau == "auto" else method.tau


class Asked:
    """Asks the trainer, once for what many meshes share."""

    def __init__(self, job: Job):
        self.job = job
        self._answers: dict[Mesh, str | None] = {}

    def refusal(self, mesh: Mesh) -> str | None:
        """Why the trainer would not run `mesh`, in its own sentence; None where it would."""
        # Schedules of many micro-batches take long to make; how many inner steps CO2 takes is no matter here.
        key = dataclasses.replace(mesh, tau=min(mesh.tau, 1))
        if key not in self._answers:
            self._answers[key] = _ask(self.job, mesh)
        return self._answers[key]


def _ask(job: Job, mesh: Mesh) -> str | None:
    from pyruntime.train import config_file, dry_run
    from pyruntime.train.errors import ConfigError

    try:
        config = config_file.from_dict(settings(job, mesh), "the trainer")
        dry_run.check(config, job.gpus)
    except ConfigError as error:
        return str(error)
    return None
