"""The choices made by name: every value with a line about it, and below each choice the files of its code.

Types, options, `--help`, errors and the planner read the values here. A new value is named here first and
nowhere else (tests/test_house.py). Needs no torch.
"""

from __future__ import annotations

import functools
from typing import Annotated, Any, Literal, get_args, get_origin

WireFormat = Annotated[
    Literal["same", "bf16", "fp8"],
    "not rounded",
    "rounded to bfloat16",
    "rounded to 8-bit floats, one byte a value",
]
"""The format of what is sent. Rows: csrc/ops/wire.h; messages: pyruntime/comm/wire.py."""

Tier = Annotated[
    Literal["auto", "unfused", "chunked", "fused"],
    "the tier that `python -m pyruntime tune` found fastest on this machine; without its file, chunked where "
    "rows are sent in chunks, else unfused",
    "one collective and one GEMM, one after the other",
    "a GEMM for each chunk of rows",
    "one GPU kernel that waits for rows tile by tile",
]
"""How a primitive runs its GEMM and its transfer: csrc/ops/tier/tier.h, pyruntime/nn/tiers.py."""

PipelineKind = Annotated[
    Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "terapipe", "seq1f1b"],
    "all forward passes, then all backward",
    "one forward and one backward pass in turn",
    "1f1b of several stages a rank",
    "zero bubble with the memory of 1f1b",
    "zero bubble with two stages a rank, arranged in a V",
    "slices of sequences, all forward, then all backward",
    "slices of sequences, one forward and one backward in turn",
]
"""Pipeline schedules: pyruntime/pipeline/schedules.py."""
ALL_FORWARD_FIRST = ("gpipe", "terapipe")
ZERO_BUBBLE = ("zb-h1", "zb-v")
LESS_BUBBLE = ("interleaved", *ZERO_BUBBLE)
SLICED_KINDS = ("terapipe", "seq1f1b")
PLANNED_KINDS: tuple[PipelineKind, ...] = ("1f1b", "interleaved", "zb-h1", "zb-v", "seq1f1b")
FEW_PLANNED_KINDS = ("1f1b", "zb-v")
"""The schedules that the planner tries where there are too many meshes to try all."""
KINDS_BETWEEN_CLUSTERS: tuple[PipelineKind, ...] = ("1f1b", "zb-h1")

Recomputation = Annotated[
    Literal["none", "selective", "full"],
    "nothing",
    "the results of norms and of silu(gate) * up, which needs no GEMM and no transfer",
    "everything of a layer except its input, a third more work",
]
"""The activations that a backward pass computes again: pyruntime/llama/recompute.py."""

ContextLayout = Annotated[
    Literal["contiguous", "zigzag", "striped", "placed"],
    "one run of tokens a rank; the last rank has the most attention to compute",
    "two runs a rank, one early and one late, which splits causal attention evenly",
    "every n-th token, which also splits it evenly and can be cut into slices anywhere",
    "long documents on several neighbours, short ones whole on one rank: sends fewer keys; zigzag without "
    "documents",
]
"""The tokens of each rank: pyruntime/context/layouts.py."""
HALVED_LAYOUTS = ("zigzag", "placed")
"""The layouts that need two equal parts of a sequence for each rank."""

ContextVariant = Annotated[
    Literal["ring", "all_gather_kv", "ulysses", "auto"],
    "keys and values go around a ring; each rank attends to those that have arrived",
    "each rank gathers all keys and values first",
    "an all-to-all gives each rank all tokens of some heads",
    "the same as ring",
]
"""How queries meet the keys of other ranks: pyruntime/context/variants.py."""
RING_VARIANTS = ("ring", "auto")
VARIANTS_OF_WHOLE_HEADS = ("ring", "all_gather_kv")

ReplicaMethod = Annotated[
    Literal["every_step", "co2", "local_sgd", "slowmo", "diloco", "overlapped_local_sgd", "streaming_diloco"],
    "gradients are summed in each step",
    "an outer step with momentum, applied one round late",
    "parameters are averaged at the end of each round",
    "local_sgd with outer momentum",
    "an outer step with Nesterov momentum",
    "replicas are pulled towards their average of the previous round",
    "diloco on one fragment of the model at a time, hidden behind steps",
]
"""How replicas synchronize: pyruntime/replicas/methods.py."""
PLANNED_METHODS = ("every_step", "co2")
"""The methods whose steps the planner predicts."""

CompressionMethod = Annotated[
    Literal["none", "quantize", "top_k", "power_sgd"],
    "not compressed",
    "a few bits a value",
    "only the largest values",
    "two factors of low rank",
]
"""How gradients of matrices are compressed: pyruntime/data_parallel/compression/codecs.py."""
COMPRESSION_OF_RUNS = ("quantize", "top_k")
"""The methods for gradients of parameters that are no matrices."""

OptimizerName = Annotated[
    Literal["adamw", "muon"],
    "each element uses its own running means",
    "the layers' matrices step along their orthogonalized momentum (docs/how-to/zero.md), all else as adamw",
]
"""The optimizers: pyruntime/data_parallel/adamw.py, muon.py, and their arithmetic in update.py."""

Overlap = Annotated[
    Literal["none", "fused", "filler"],
    "every transfer is waited for",
    "GEMMs hide their own transfers",
    "GEMMs of weight gradients also hide transfers that the backward pass leaves exposed",
]
"""The overlap that the planner assumes: pyruntime/plan/overlap.py."""

NonFinite = Annotated[
    Literal["raise", "skip", "ignore"], "NonFiniteGradient", "the step updates nothing", "updates anyway"
]
"""How the optimizer treats a step whose gradients are not finite: pyruntime/data_parallel/optimizer.py."""

LearnedTurns = Annotated[
    Literal["all", "last"],
    "every turn of the assistant",
    "the last one of each conversation",
]
"""The turns of a conversation that are learned: pyruntime/train/data/conversations.py."""

OnBadStep = Annotated[
    Literal["stop", "skip"],
    "the run ends",
    "the step updates nothing but counts; after 10 such steps in a row the run ends",
]
"""How the trainer treats a step whose gradients are not finite or spike: pyruntime/train/loop.py."""

Rounding = Annotated[
    Literal["nearest", "stochastic"],
    "from fp32 master weights",
    "up or down at random so that the mean is exact, without master weights",
]
"""How updated weights are rounded to bf16: pyruntime/data_parallel/update.py."""

Offloading = Annotated[
    Literal["none", "states"],
    "nothing",
    "moments and master weights: those of CPU ranks to a file, those of devices to host memory",
]
"""Optimizer states outside the memory of the weights' device: pyruntime/data_parallel/offload.py."""

RateSchedule = Annotated[
    Literal["cosine", "linear", "wsd"],
    "along half a cosine",
    "linearly",
    "stays at its peak, then falls as one minus a square root",
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
"""The dtype of weights, activations and gradients: DTYPES in pyruntime/train/model_of_run.py."""

DeviceName = Annotated[
    Literal["auto", "cpu", "cuda"],
    "cuda if every rank of a host has its own GPU, else cpu",
    "the CPU",
    "the GPU of each rank's LOCAL_RANK",
]
"""The device that ranks compute on: pyruntime/comm/devices.py."""

HostOrder = Annotated[
    Literal["started", "measured"],
    "in the order of the launcher's ranks",
    "hosts that fast links join follow each other, by links measured at the start, so that of all axes pp, "
    "then dp, crosses slow ones",
]
"""The order in which hosts fill the mesh: pyruntime/comm/links.py."""


LORA_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LORA_TARGETS = (*LORA_ATTENTION, "gate_proj", "up_proj", "down_proj")
"""The linears of a layer that may have an adapter, as peft names them: pyruntime/llama/adapters.py."""


def meanings(choice: Any) -> dict[str, str]:
    """Returns the values of a choice above with their lines; empty for another type."""
    literal, *lines = get_args(choice) if get_origin(choice) is Annotated else (None,)
    return dict(zip(get_args(literal), lines, strict=True)) if get_origin(literal) is Literal else {}


@functools.cache
def values(choice: Any) -> tuple[Any, ...]:
    """Returns the values of a choice above, in order."""
    return tuple(meanings(choice))


def check_value(name: str, value: str, known: tuple[str, ...]) -> None:
    """Raises ValueError if `value`, passed as the argument `name`, is not in `known`."""
    if value not in known:
        raise ValueError(f"{name}={value!r} is none of {', '.join(known)}.")


def described(choice: Any) -> str:
    """Returns the values of a choice and their lines as one sentence; empty for another type."""
    lines = "; ".join(f"{value}: {line}" for value, line in meanings(choice).items())
    return lines and f"{lines}."
