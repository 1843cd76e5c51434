"""Runs a step of PyTorch's own parallelism in virtual time, to stand beside `python -m pyruntime simulate`.

    python -m bench.clock_torch --config llama3-8b --gpus 8 --parallel.tp 8 --parallel.dp 1 --parallel.zero 0

A Llama of nn.Linear (bench/common/plain_llama.py) with DTensor's tensor and sequence parallelism and FSDP2,
laid out and prefetched as torchtitan does, on the simulated GPU of pyruntime/clock. The same table prices
GEMMs, attention, launches and the collectives, which run on a stream of their group as NCCL's do. What
torch.compile fuses is one launch each way here: norms, rotary embedding, SwiGLU and the loss.

Torch is favoured: nothing is charged for what DTensor and FSDP do in Python, nor for the multiprocessors that
NCCL takes from GEMMs; weights are bf16 without a copy in fp32, so AdamW moves less than ours; gradients
travel in bf16; norms' gradients are not summed over tensor-parallel ranks. With data-parallel ranks
parallel.zero 3 frees weights after the forward pass, and lower stages keep them until the backward pass has
read them. train.activation_checkpointing selective keeps what torchtitan's per-operator choice keeps.

With stages, parallel.pp, torch.distributed.pipelining runs its own schedule of pipeline.kind, over stages of
the same layers as ours; a process runs each rank's. Selective recomputation does not go with its zb-v: torch
recomputes a block once more for the gradients of weights, and its context refuses a second time ("Trying to
backward an extra time").
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining._utils import InferenceMode
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, _PipelineSchedule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from bench.common import plain_llama
from bench.common.plain_llama import FeedForward, PlainLlama, Shape
from bench.common.virtual_steps import OneLaunch, program, touch
from pyruntime.cli import train
from pyruntime.cli.arguments import take_count, take_option
from pyruntime.cli.simulate import command_of, keep
from pyruntime.clock import device_build
from pyruntime.clock.machine_model import Machine, find
from pyruntime.clock.simulated_step import Simulated, simulated, words
from pyruntime.comm import Runtime
from pyruntime.train.resolved import ResolvedRun, check

AXES = ("pp", "dp", "tp")
SCHEDULES: dict[str, type[_PipelineSchedule]] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zb-v": ScheduleZBVZeroBubble,
}
"""Torch's, by pipeline.kind."""
Group = dist.ProcessGroup | None
"""The tensor-parallel ranks; None where there is one."""
KEPT = (
    torch.ops.aten._scaled_dot_product_fused_attention_overrideable.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
)
"""Operators whose results selective recomputation keeps, beside products."""


class Rope(torch.autograd.Function):
    """One launch each way, which reads and writes a tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = torch.empty_like(x)
        touch("rope", x, result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return Rope.forward(ctx, gradient)


class Loss(torch.autograd.Function):
    """The mean loss of logits [rows, V / P], whose columns a group may hold: a launch that reads them twice,
    and one that reads and writes them; over the group, the largest logit, exponentials' sum, a label's."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, group: Group) -> Tensor:
        rows = torch.empty(len(logits), device=logits.device)
        touch("loss", logits, logits, rows)
        if group is not None:
            for _ in range(3):
                dist.all_reduce(rows, group=group)
        ctx.save_for_backward(logits)
        return rows.sum() / len(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (logits,) = ctx.saved_tensors
        result = torch.empty_like(logits)
        touch("loss backward", logits, result)
        return result, None


class Norm(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return OneLaunch.apply("rms_norm", x, self.weight)


@contextlib.contextmanager
def fused() -> Iterator[None]:
    """Lets the plain model compute what torch.compile fuses in one launch."""

    def feed_forward(self: FeedForward, x: Tensor) -> Tensor:
        return self.down(OneLaunch.apply("swiglu", self.gate(x), self.up(x)))

    with (
        mock.patch.object(plain_llama, "rotate", lambda x, cos, sin: Rope.apply(x)),
        mock.patch.object(FeedForward, "forward", feed_forward),
    ):
        yield


class Part(nn.Module):
    """A stage's layers of a PlainLlama; the first has the embedding and takes ids [B, S], the last the head
    and gives logits, and others take and give a tensor-parallel rank's rows [B, S / P, dim]."""

    def __init__(self, whole: PlainLlama, layers: range) -> None:
        super().__init__()
        self.embedding = whole.embedding if layers.start == 0 else None
        self.blocks = whole.blocks[layers.start : layers.stop]
        is_last = layers.stop == len(whole.blocks)
        self.norm, self.head = (whole.norm, whole.head) if is_last else (None, None)
        self.register_buffer("cos", whole.cos, persistent=False)
        self.register_buffer("sin", whole.sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x) if self.embedding is not None else x
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x)) if self.head is not None else x


def build(run: ResolvedRun, runtime: Runtime) -> nn.ModuleDict:
    """Returns this rank's stages by number, cut over the axes of the mesh; their weights have no values."""
    shape, train = run.shape, run.config.train
    assert train.micro_batch_size is not None
    sizes = Shape(
        shape.hidden_size,
        shape.num_hidden_layers,
        shape.num_attention_heads,
        shape.num_key_value_heads,
        shape.intermediate_size,
        shape.vocab_size,
        train.seq_len,
        train.micro_batch_size,
        run.micro_batches,
    )
    with torch.device("meta"), mock.patch.object(nn.init, "normal_"):
        whole = PlainLlama(sizes, torch.bfloat16)
    for name, module in list(whole.named_modules()):
        if isinstance(module, nn.RMSNorm):
            parent, _, own = name.rpartition(".")
            setattr(whole.get_submodule(parent), own, Norm(module.weight))
    own = [stage for stage, rank in enumerate(run.placement) if rank == runtime.pp.rank]
    parts = {str(stage): Part(whole, run.layers[stage]) for stage in own}
    for part in parts.values():
        if run.mesh.tp > 1:
            _cut_over_tp(part, runtime)
        if run.mesh.dp > 1:
            _cut_over_dp(part, runtime, frees=run.config.parallel.zero == 3)
        part.to_empty(device="sim")
        if train.activation_checkpointing != "none":
            _recompute(part, train.activation_checkpointing == "selective")
    return nn.ModuleDict(parts)


def _recompute(part: Part, is_selective: bool) -> None:
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if is_selective:
        options["context_fn"] = _keeps_every_second_product
    for block in part.blocks:
        forward = block.forward
        block.forward = lambda *inputs, forward=forward: checkpoint(forward, *inputs, **options)


def _keeps_every_second_product() -> tuple[Any, Any]:
    """The contexts in which a block keeps what torchtitan's selective recomputation of operators keeps:
    attention, scattered sums, and every second product of matrices."""
    products = {False: 0, True: 0}

    def keeps(ctx: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if operator == torch.ops.aten.mm.default:
            products[ctx.is_recompute] += 1
            kept = products[ctx.is_recompute] % 2 == 1
        else:
            kept = operator in KEPT
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(keeps)


def _cut_over_tp(part: Part, runtime: Runtime) -> None:
    mesh = runtime.mesh["tp"]
    rows, whole = Shard(1), Replicate()
    head = ColwiseParallel(input_layouts=rows, output_layouts=Shard(-1))
    embedding = RowwiseParallel(input_layouts=whole, output_layouts=rows)
    ends = {"embedding": embedding, "head": head}
    parallelize_module(
        part, mesh, {name: each for name, each in ends.items() if getattr(part, name) is not None}
    )
    plan = {
        "attention": PrepareModuleInput(
            input_layouts=(rows, None, None), desired_input_layouts=(whole, None, None)
        ),
        **dict.fromkeys(("attention.q", "attention.k", "attention.v"), ColwiseParallel()),
        "attention.o": RowwiseParallel(output_layouts=rows),
        "ffn": PrepareModuleInput(input_layouts=(rows,), desired_input_layouts=(whole,)),
        **dict.fromkeys(("ffn.gate", "ffn.up"), ColwiseParallel()),
        "ffn.down": RowwiseParallel(output_layouts=rows),
    }
    for block in part.blocks:
        parallelize_module(block, mesh, plan)


def _cut_over_dp(part: Part, runtime: Runtime, *, frees: bool) -> None:
    """As torchtitan: each block, the embedding, and norm and head together, which are not freed."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    options: dict[str, Any] = {"mesh": runtime.mesh["dp"], "mp_policy": policy}
    if part.embedding is not None:
        fully_shard(part.embedding, reshard_after_forward=frees, **options)
    for block in part.blocks:
        fully_shard(block, reshard_after_forward=frees, **options)
    if part.norm is not None and part.head is not None:
        fully_shard([part.norm, part.head], reshard_after_forward=False, **options)
    fully_shard(part, **options)


class Accumulation:
    """Micro-batches forward and backward, one after the other."""

    def __init__(self, model: nn.ModuleDict, run: ResolvedRun, group: Group) -> None:
        (self.part,) = model.values()
        self.run, self.group = run, group

    def __call__(self, ids: Tensor) -> None:
        micro_batches = ids.split(self.run.config.train.micro_batch_size or 0)
        for number, each in enumerate(micro_batches):
            if self.run.mesh.dp > 1:
                self.part.set_requires_gradient_sync(number == len(micro_batches) - 1)
            Loss.apply(self.part(each).flatten(0, 1), self.group).backward()


class Pipeline:
    """Micro-batches through torch's schedule of that name; each rank runs its own stages."""

    def __init__(self, model: nn.ModuleDict, run: ResolvedRun, runtime: Runtime, group: Group) -> None:
        train, mesh, count = run.config.train, run.mesh, len(run.placement)
        rows = (train.micro_batch_size or 0, train.seq_len // mesh.tp)
        ids = torch.empty(rows[0], train.seq_len, dtype=torch.int64, device="meta")
        hidden, logits = (
            torch.empty(*sizes, device="meta", dtype=torch.bfloat16, requires_grad=True)
            for sizes in (
                (*rows, run.shape.hidden_size),
                (rows[0], train.seq_len, run.shape.vocab_size // mesh.tp),
            )
        )
        stages = [
            PipelineStage(
                part,
                int(number),
                count,
                torch.device("sim", 0),
                input_args=ids if int(number) == 0 else hidden,
                output_args=logits if int(number) == count - 1 else hidden,
                group=runtime.mesh["pp"].get_group(),
            )
            for number, part in model.items()
        ]
        kind = SCHEDULES[run.config.pipeline.kind]
        of_kind: Any = stages if issubclass(kind, PipelineScheduleMulti) else stages[0]
        self.schedule = kind(
            of_kind,
            run.micro_batches,
            loss_fn=lambda logits, _: Loss.apply(logits.flatten(0, 1), group),
            scale_grads=False,
        )
        own = [int(number) for number in model]
        self.is_first, self.is_last = 0 in own, count - 1 in own

    def __call__(self, ids: Tensor) -> None:
        inputs = (ids,) if self.is_first else ()
        with mock.patch.object(_PipelineSchedule, "_warmup_p2p", _shapes_are_known):
            self.schedule.step(*inputs, target=ids if self.is_last else None, return_outputs=False)


def _shapes_are_known(_: object, stages: list[PipelineStage], *__: object) -> None:
    """Skips what stages tell each other before the first step: in virtual time numbers have no values."""
    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC


def step(
    model: nn.ModuleDict, passes: Callable[[Tensor], None], optimizer: torch.optim.Optimizer, run: ResolvedRun
) -> None:
    """Micro-batches forward and backward, clipping, AdamW; ends when the device has done it."""
    train = run.config.train
    sequences = run.micro_batches * (train.micro_batch_size or 0)
    passes(torch.empty(sequences, train.seq_len, dtype=torch.int64, device="sim"))
    (group,) = optimizer.param_groups
    for weight, each in zip(group["params"], model.parameters(), strict=True):
        assert each.grad is not None
        gradient, each.grad = each.grad, None
        if isinstance(gradient, DTensor):  # the embedding's is whole on every tensor-parallel rank
            gradient = gradient.redistribute(placements=each.placements)
        weight.grad = _own(gradient)
    gradients = [each.grad for each in group["params"]]
    norm = torch.stack(torch._foreach_norm(gradients)).norm()
    dist.all_reduce(norm)
    torch._foreach_mul_(gradients, norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    torch.accelerator.synchronize()


def _own(tensor: Tensor) -> Tensor:
    """Returns this rank's part, which AdamW takes: it takes no DTensors beside plain ones."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def simulate(run: ResolvedRun, machine: Machine, gpus: int) -> Simulated:
    """Runs a step of the mesh in virtual time. After `device_build.build`."""

    def prepare(runtime: Runtime) -> tuple[nn.Module, Callable[[], None]]:
        model, group = build(run, runtime), runtime.mesh["tp"].get_group() if run.mesh.tp > 1 else None
        passes: Callable[[Tensor], None] = (
            Pipeline(model, run, runtime, group) if run.mesh.pp > 1 else Accumulation(model, run, group)
        )
        owned = [_own(each.detach()) for each in model.parameters()]
        optimizer = torch.optim.AdamW(owned, lr=1e-4, fused=True)
        return model, functools.partial(step, model, passes, optimizer, run)

    axes = {name: size for name in AXES if (size := getattr(run.mesh, name)) > 1 or name == "tp"}
    tokens = run.tokens_per_step
    sizes = {"tokens": tokens, "flops": run.flops_per_token * tokens}
    with fused():
        return simulated(functools.partial(program, machine, axes, prepare, **sizes), machine, axes, gpus)


def main(argv: list[str]) -> int:
    gpus, of_run = take_count(argv, "gpus")
    machine, of_run = take_option(of_run, "machine")
    kept, of_run = take_option(of_run, "json")
    try:
        if gpus is None:
            raise ValueError("give the number of GPUs, --gpus N.")
        config, name = train.read(of_run, gpus, "simulate", __doc__ or "", others=("gpus", "machine", "json"))
        run = check(config, gpus)
        if run.mesh.ranks != math.prod(getattr(run.mesh, each) for each in AXES):
            raise ValueError(f"only {', '.join(AXES)} are cut here; found {run.mesh}.")
        if run.mesh.pp > 1 and run.config.pipeline.kind not in SCHEDULES:
            raise ValueError(f"torch has no schedule {run.config.pipeline.kind}; use {', '.join(SCHEDULES)}.")
        device_build.build()
        found = simulate(run, find(machine or "h100"), gpus)
        if kept:
            keep(Path(kept), {"command": command_of(name, gpus, machine, of_run), **found.record()})
    except ValueError as error:
        print(f"bench.clock_torch: {error}", file=sys.stderr)
        return 2
    print(f"{name}, torch's order of calls\n{words(found)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
