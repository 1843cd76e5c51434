"""Writes the presets of published Llamas for clusters, pyruntime/train/presets/llama3-*.toml:

    .venv/bin/python tools/write_presets.py

For each number of GPUs our planner chooses the mesh of tensor- and data-parallel ranks with the fastest
predicted step that the trainer runs. By the trainer's own rules it must leave a fifth of a GPU's memory free,
in a step and while the model is made. If nothing fits, tokens a step are halved until one does.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pyruntime.cli.plan_facts import Asked, checked, find_model, settings  # noqa: E402
from pyruntime.plan.cluster import Cluster, find_cluster  # noqa: E402
from pyruntime.plan.findings import GB, mfu  # noqa: E402
from pyruntime.plan.mesh import Job  # noqa: E402
from pyruntime.plan.search import Candidate, SearchSpace, search  # noqa: E402
from pyruntime.text import toml_value  # noqa: E402
from pyruntime.train import config_file  # noqa: E402
from pyruntime.train.config import RunConfig  # noqa: E402
from pyruntime.train.planned import rules_of  # noqa: E402

SEQ = 8192
TOKENS = tuple(2**power for power in range(22, 17, -1))
"""Tokens of a step to try; the first with which a mesh fits is used."""
GPUS = tuple(2**power for power in range(3, 11))
CHOICE = SearchSpace(axonn=False, co2=False, hybrid=False, kinds=())
HERE = "parallel", "train"
"""Sections that [ranks.N] may set."""


@dataclasses.dataclass(frozen=True)
class Preset:
    model: str
    cluster: str
    lr: float
    """Peak learning rate, arXiv 2407.21783, table 3."""


PRESETS = (
    Preset("llama3-8b", "dgx-h100", 3e-4),
    Preset("llama3-70b", "dgx-h100", 1.5e-4),
    # 80 GB are too few: at tp 8 a rank's weights take 101 GB before ZeRO 3 cuts them.
    Preset("llama3-405b", "dgx-h200", 8e-5),
)


def config_of(job: Job, candidate: Candidate) -> RunConfig:
    """Returns the trainer's configuration. Raises ConfigError if it does not run the mesh on these GPUs."""
    return checked(job, candidate.mesh).config


def fastest(model: str, cluster: Cluster, gpus: int) -> tuple[Job, Candidate] | None:
    """Returns the fastest mesh for this number of GPUs; None if none fits."""
    for tokens in TOKENS:
        job = Job(find_model(model), cluster, gpus, tokens // SEQ, SEQ)
        asked = Asked(job)
        for candidate in search(job, CHOICE, rules=rules_of(cluster)).candidates:
            if candidate.mesh.cp == 1 and asked.refusal(candidate.mesh) is None:
                return job, candidate
    return None


def table(job: Job, candidate: Candidate) -> str:
    """Returns the table [ranks.N] of a preset."""
    sections = settings(job, candidate.mesh)
    parallel, train = (sections[name] for name in HERE)
    parallel = {key: value for key, value in parallel.items() if value != 1 or key in ("tp", "dp", "zero")}
    keys = ("batch_size", "micro_batch_size", "activation_checkpointing")
    train = {key: train[key] for key in keys if key in train}
    return (
        f"# {candidate.total:.2f} s a step, {mfu(job, candidate):.0%} of the peak, "
        f"{candidate.memory.total / GB:.0f} GB a GPU\n"
        f"[{config_file.BY_RANKS}.{job.gpus}]\n"
        f"parallel = {toml_value(parallel)}\ntrain = {toml_value(train)}\n"
    )


def text(preset: Preset) -> str:
    cluster = find_cluster(preset.cluster)
    tables = [table(*found) for gpus in GPUS if (found := fastest(preset.model, cluster, gpus))]
    shape = find_model(preset.model)
    return f"""\
# {preset.model} on {cluster.gpu} in nodes of {cluster.gpus_per_node} (cluster {cluster.name}): meshes that \
tools/write_presets.py has our planner
# choose, seconds and memory by its formulas. Not run on a GPU. Peak learning rate: arXiv 2407.21783, table 3.
# torchrun ... -m pyruntime train --config {preset.model} --data.paths TOKENS --output.run_dir RUNS/NAME

[model]
preset = "{preset.model}"
vocab_size = {shape.vocab}

[optimizer]
lr = {preset.lr:g}
warmup_steps = 8000

[train]
tokens = 1_000_000_000_000
seq_len = {SEQ}
dtype = "bf16"
device = "cuda"
val_every = 1000

[comm]
tier = "auto"
deadline_s = 600

[checkpoint]
every_steps = 500

[output]
sample_tokens = 0
cluster = "{cluster.name}"

""" + "\n".join(tables)


if __name__ == "__main__":
    for each in PRESETS:
        path = config_file.PRESET_DIR / f"{each.model}.toml"
        path.write_text(text(each), encoding="utf-8")
        print(path)
