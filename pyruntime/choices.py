"""What is chosen by name: the values of each choice with a line on each, and below them where their code is.

Types, options, `--help`, errors and the planner read values here, so that a new one is named here first and
nowhere else (tests/test_house.py). Needs no torch.
"""

from __future__ import annotations

import functools
from typing import Annotated, Any, Literal, get_args, get_origin

WireFormat = Annotated[
    Literal["same", "bf16", "fp8"],
    "not rounded at all",
    "rounded to bfloat16",
    "a byte a value",
]
"""What rows travel as: csrc/cpu/compression/wire.h, and pyruntime/comm/wire.py for messages."""

Tier = Annotated[
    Literal["auto", "unfused", "chunked", "fused"],
    "what `python -m pyruntime tune` found on this machine, else chunked where rows travel in chunks, else "
    "unfused",
    "one collective, one GEMM",
    "a GEMM for each chunk of rows",
    "one kernel that waits for rows tile by tile; on GPUs",
]
"""How a primitive computes: csrc/ops/tier/tier.h, pyruntime/nn/tiers.py."""

PipelineKind = Annotated[
    Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "terapipe", "seq1f1b"],
    "all forward passes, then all backward",
    "one forward and one backward pass in turn",
    "1f1b of several stages a rank",
    "zero bubble, with the memory of 1f1b",
    "zero bubble, of two stages a rank that lie in a V",
    "slices of sequences, all forward, then all backward",
    "slices of sequences, one forward and one backward in turn",
]
"""Schedules of pipelines: pyruntime/pipeline/schedules.py."""
ALL_FORWARD_FIRST = ("gpipe", "terapipe")
ZERO_BUBBLE = ("zb-h1", "zb-v")
LESS_BUBBLE = ("interleaved", *ZERO_BUBBLE)
SLICED_KINDS = ("terapipe", "seq1f1b")
PLANNED_KINDS: tuple[PipelineKind, ...] = ("1f1b", "interleaved", "zb-h1", "zb-v", "seq1f1b")
FEW_PLANNED_KINDS = ("1f1b", "zb-v")
"""Where the planner has to leave meshes out."""
KINDS_BETWEEN_CLUSTERS: tuple[PipelineKind, ...] = ("1f1b", "zb-h1")

Recomputation = Annotated[
    Literal["none", "selective", "full"],
    "nothing",
    "of each layer what its norms and silu(gate) * up gave, for which nothing is multiplied or sent again",
    "all of a layer but its input, a third more work",
]
"""What a backward pass computes again: pyruntime/llama/recompute.py."""

ContextLayout = Annotated[
    Literal["contiguous", "zigzag", "striped"],
    "one run of tokens a rank; the last rank attends to most",
    "two runs a rank, one early and one late, which share causal attention evenly",
    "every n-th token, which shares it evenly too, and may be cut into slices anywhere",
]
"""Which tokens a rank holds: pyruntime/context/layouts.py."""

ContextVariant = Annotated[
    Literal["ring", "all_gather_kv", "ulysses", "auto"],
    "keys and values go around, and each rank attends to what it has",
    "each rank gathers all keys and values first",
    "heads are dealt out in place of tokens",
    "ring",
]
"""How queries see the keys of other ranks: pyruntime/context/variants.py."""
RING_VARIANTS = ("ring", "auto")
VARIANTS_OF_WHOLE_HEADS = ("ring", "all_gather_kv")

ReplicaMethod = Annotated[
    Literal["every_step", "co2", "local_sgd", "slowmo", "diloco", "overlapped_local_sgd", "streaming_diloco"],
    "gradients are summed in each step",
    "an outer step with momentum, a round late",
    "parameters are averaged at the end of each round",
    "local_sgd with outer momentum",
    "Nesterov momentum outside",
    "replicas are pulled to their average of a round ago",
    "diloco of fragments in turn, hidden behind steps",
]
"""How seldom replicas meet: pyruntime/replicas/methods.py."""
PLANNED_METHODS = ("every_step", "co2")
"""Those whose steps the planner predicts."""

CompressionMethod = Annotated[
    Literal["none", "quantize", "top_k", "power_sgd"],
    "as they are",
    "in a few bits a value",
    "the largest values alone",
    "of low rank",
]
"""What gradients of matrices travel as: pyruntime/data_parallel/compression/codecs.py."""
COMPRESSION_OF_RUNS = ("quantize", "top_k")
"""Those of what is no matrix."""

OptimizerName = Annotated[
    Literal["adamw", "muon"],
    "every element by its own running means",
    "matrices of the layers step along their momentum made orthogonal (docs/how-to/zero.md), all else as "
    "adamw has it; on the CPU",
]
"""Who updates weights: pyruntime/data_parallel/adamw.py, muon.py, and their arithmetic in update.py."""

Overlap = Annotated[
    Literal["none", "fused", "filler"],
    "every transfer is waited for",
    "GEMMs hide their own transfers",
    "weights' gradients also fill what the backward pass leaves exposed",
]
"""What hides transfers, as the planner has it: pyruntime/plan/overlap.py."""

NonFinite = Annotated[
    Literal["raise", "skip", "ignore"], "NonFiniteGradient", "the step updates nothing", "it is taken"
]
"""What becomes of a step whose gradients are not finite: pyruntime/data_parallel/optimizer.py."""

OnBadStep = Annotated[
    Literal["stop", "skip"],
    "the run ends",
    "nothing is updated and the step is counted; after 10 in a row the run ends",
]
"""The same, and of one that spikes, in the trainer: pyruntime/train/loop.py."""

Rounding = Annotated[
    Literal["nearest", "stochastic"],
    "from fp32 master weights",
    "up or down at random so that the mean is exact, without master weights",
]
"""Of bf16 weights: pyruntime/data_parallel/update.py."""

RateSchedule = Annotated[
    Literal["cosine", "linear", "wsd"],
    "along half a cosine",
    "linearly",
    "as one minus a square root, after it has stayed at its peak",
]
"""How a learning rate falls: learning_rate() in pyruntime/train/config.py."""

ProgressMode = Annotated[
    Literal["auto", "bar", "lines", "off"],
    "bar on a terminal, else lines",
    "one line that is rewritten",
    "one line a step",
    "nothing",
]
"""How a run shows its steps: pyruntime/train/progress.py."""

Dtype = Annotated[Literal["bf16", "fp32"], "bfloat16", "float32"]
"""Of weights, activations and gradients: DTYPES in pyruntime/train/model_of_run.py."""

DeviceName = Annotated[
    Literal["auto", "cpu", "cuda"],
    "cuda where every rank of a host has a GPU of its own, else cpu",
    "the CPU",
    "the GPU of each rank's LOCAL_RANK",
]
"""Where ranks compute: pyruntime/comm/devices.py."""


def meanings(choice: Any) -> dict[str, str]:
    """The values of a choice above, each with its line; none for another type."""
    literal, *lines = get_args(choice) if get_origin(choice) is Annotated else (None,)
    return dict(zip(get_args(literal), lines, strict=True)) if get_origin(literal) is Literal else {}


@functools.cache
def values(choice: Any) -> tuple[Any, ...]:
    """The values of a choice above, in order."""
    return tuple(meanings(choice))


def check_value(name: str, value: str, known: tuple[str, ...]) -> None:
    """Raises ValueError where `value`, of the argument `name`, is not known."""
    if value not in known:
        raise ValueError(f"{name}={value!r} is none of {', '.join(known)}.")


def described(choice: Any) -> str:
    """Its values and their lines, as one sentence; empty for another type."""
    lines = "; ".join(f"{value}: {line}" for value, line in meanings(choice).items())
    return lines and f"{lines}."
