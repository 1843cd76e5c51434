"""Tells the planner, which knows no code but its own, the known models and whether the trainer runs a mesh.

The trainer itself is asked: nothing here knows what it can do. A mesh becomes a configuration, with the keys
that the trainer has or would have, and a refusal of that configuration is the answer. On a cluster of GPUs
the run is one on GPUs. Asking imports the trainer and with it torch. The way back, from a configuration to
the planner, is `pyruntime.train.planned`.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyruntime.llama.config import LlamaConfig
from pyruntime.llama.hf import CONFIG, read_config
from pyruntime.llama.presets import PRESETS
from pyruntime.plan import models
from pyruntime.plan.mesh import Job, Mesh
from pyruntime.plan.models import GPTS, ModelShape
from pyruntime.text import toml_value
from pyruntime.train.errors import ConfigError
from pyruntime.train.planned import of_llama

if TYPE_CHECKING:
    from pyruntime.train.resolved import ResolvedRun

LLAMA2_13B = LlamaConfig(
    vocab_size=32000,
    hidden_size=5120,
    intermediate_size=13824,
    num_hidden_layers=40,
    num_attention_heads=40,
)


MODELS: dict[str, ModelShape] = {
    **{name: of_llama(name, config, preset=name) for name, config in PRESETS.items()},
    "llama2-13b": of_llama("llama2-13b", LLAMA2_13B),
    **GPTS,
}


def find_model(name: str) -> ModelShape:
    """Returns the known model of that name (`pyruntime.plan.models.find_model`), or the one that a Hugging
    Face folder or config.json describes. Raises ValueError."""
    path = Path(name)
    if path.name == CONFIG:
        path = path.parent
    elif not path.is_dir() and os.sep not in name:
        return models.find_model(name, MODELS)
    try:
        config = LlamaConfig.from_hf(read_config(path))
    except OSError as error:
        raise ValueError(str(error)) from error
    return dataclasses.replace(of_llama(path.resolve().name, config), folder=str(path))


def settings(job: Job, mesh: Mesh) -> dict[str, dict[str, Any]]:
    """Returns the sections and keys of a configuration that trains `job` on `mesh`, as in a TOML file."""
    tp = {"x": mesh.x, "y": mesh.y, "z": mesh.z} if mesh.is_axonn else mesh.tp
    parallel: dict[str, Any] = {"tp": tp, "pp": mesh.pp, "cp": mesh.cp, "dp": mesh.dp}
    if mesh.dp * mesh.cp > 1 and not mesh.tau and not mesh.is_axonn:
        parallel |= {"zero": mesh.zero, "dp_replicate": mesh.replicate}
    if mesh.ep:
        parallel["ep"] = mesh.ep
    train: dict[str, Any] = {
        "batch_size": job.batch,
        "micro_batch_size": mesh.micro_batch,
        "seq_len": job.seq,
        "dtype": "bf16",
    }
    if job.cluster.is_of_gpus:
        train["device"] = "cuda"
    if mesh.recompute != "none":
        train["activation_checkpointing"] = mesh.recompute
    sections = {"model": _model(job), "train": train, "parallel": parallel}
    if job.cluster.rings and mesh.tp == job.cluster.gpus_per_node:
        sections["comm"] = {"rings": list(job.cluster.rings)}
    if mesh.tau:
        sections["data_parallel"] = {"method": "co2", "tau": mesh.tau}
    asked = {"rounding": job.rounding, "name": job.optimizer, "offload": job.offload}
    usual = {"rounding": "nearest", "name": "adamw", "offload": "none"}
    if asked != usual:
        sections["optimizer"] = {key: value for key, value in asked.items() if value != usual[key]}
    if mesh.pp > 1:
        sections["pipeline"] = {"kind": mesh.kind, "slices": mesh.slices}
        if mesh.kind == "interleaved":
            sections["pipeline"]["virtual"] = mesh.virtual
        if mesh.skip:
            sections["pipeline"]["skip"] = mesh.skip
        if mesh.layers:
            sections["pipeline"]["layers"] = list(mesh.layers)
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
    if model.head_norms:
        sizes["qk_norm"] = True
    if model.experts:
        sizes |= {
            "experts": model.experts,
            "experts_per_token": model.per_token,
            "expert_size": model.expert_ffn,
            "shared_expert_size": model.shared_ffn,
            "dense_layers": model.dense_layers,
        }
    if model.biased or not model.gated:
        sizes["architecture"] = "gpt"
    return sizes


def toml(job: Job, mesh: Mesh, head: str = "", cluster: str = "") -> str:
    """Returns a file for `train --config`; `head` is its first comment, `cluster` its output.cluster."""
    lines = [f"# {line}" for line in head.splitlines()]
    sections = settings(job, mesh) | ({"output": {"cluster": cluster}} if cluster else {})
    if job.model.folder:
        sections["model"] = {"init_from": job.model.folder}
    for name, section in sections.items():
        lines += ["", f"[{name}]"]
        lines += [f"{key} = {toml_value(value)}" for key, value in section.items()]
    return "\n".join(lines).lstrip() + "\n"


class Asked:
    """Asks the trainer which meshes it runs, and stores the answers."""

    def __init__(self, job: Job):
        self.job = job
        self._answers: dict[Mesh, str | None] = {}

    def refusal(self, mesh: Mesh) -> str | None:
        """Returns the trainer's sentence why it would not run `mesh`; None if it would."""
        # Schedules of many micro-batches take long to make; CO2's number of inner steps changes no answer.
        key = dataclasses.replace(mesh, tau=min(mesh.tau, 1))
        if key not in self._answers:
            try:
                checked(self.job, mesh)
                self._answers[key] = None
            except ConfigError as error:
                self._answers[key] = str(error)
        return self._answers[key]


def checked(job: Job, mesh: Mesh) -> ResolvedRun:
    """Returns the run that trains `job` on `mesh`. Raises ConfigError, as the run would."""
    from pyruntime.train import config_file
    from pyruntime.train.resolved import check

    config = config_file.from_dict(settings(job, mesh), "the trainer")
    return check(config, job.gpus)
