"""A mesh as a configuration of this project's trainer, and whether the trainer would run it.

The trainer is asked; nothing here knows what it can do. What it has no key for is given to it under the key
that it would have, and its refusal is the answer. Asking imports the trainer and with it torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from pyruntime.plan.mesh import Job, Mesh


def settings(job: Job, mesh: Mesh, layers: Sequence[int] = ()) -> dict[str, dict[str, Any]]:
    """Sections and keys of a configuration that trains `job` on `mesh`, as in a TOML file. layers: of each
    stage; empty: as the trainer cuts them."""
    parallel: dict[str, Any] = {"tp": mesh.tp, "pp": mesh.pp, "cp": mesh.cp, "dp": mesh.dp}
    if mesh.dp * mesh.cp > 1 and not mesh.tau and not mesh.is_axonn:
        parallel |= {"zero": mesh.zero, "dp_replicate": mesh.replicate}
    if mesh.is_axonn:
        parallel |= {"x": mesh.x, "y": mesh.y, "z": mesh.z}
    if mesh.tau:
        parallel["co2_tau"] = mesh.tau
    train: dict[str, Any] = {
        "batch_size": job.batch,
        "micro_batch_size": mesh.micro_batch,
        "seq_len": job.seq,
        "dtype": "bf16",
    }
    if mesh.recompute:
        train["activation_checkpointing"] = True
    sections = {"model": _model(job), "train": train, "parallel": parallel}
    if job.rounding != "nearest":
        sections["optimizer"] = {"rounding": job.rounding}
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
        lines += [f"{key} = {_value(value)}" for key, value in section.items()]
    return "\n".join(lines).lstrip() + "\n"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


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
