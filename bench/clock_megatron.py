"""Runs a step of Megatron-LM as its table 1 measured it, in virtual time (arXiv 2104.04473, section 5.1).

    python -m bench.clock_megatron --model gpt-1.7b --micro-batch 4

A GPT in torch's operators with the order of calls of Megatron-LM in 2021, on the simulated A100 of
pyruntime/clock: fp16, weights cut over tensor-parallel ranks, activations whole on each; in a layer two
all-reduces forward and two backward, for which the computing stream waits; every layer computed again before
its backward pass; scores, softmax and dropout of attention in memory; gradients added up in fp32 and
all-reduced over data-parallel ranks when the last micro-batch has ended; then Adam. What Megatron-LM fused is
one launch: softmax with scale and mask, bias with GELU, bias with dropout and residual.

Rows of the table without a pipeline are run. The paper does not say their micro-batches, and searched for
the best. Nothing is charged for what Python does beyond a call's seconds, for loading data, or for
multiprocessors that NCCL takes from GEMMs.
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bench.common.virtual_steps import program, touch
from bench.planning.megatron import SEQ, TABLE_1, Row, flops_per_step
from pyruntime.cli.plan_facts import find_model
from pyruntime.cli.simulate import keep
from pyruntime.clock import device_build
from pyruntime.clock.machine_model import Machine, find
from pyruntime.clock.simulated_step import Simulated, simulated, words
from pyruntime.comm import Runtime
from pyruntime.plan.models import ModelShape

ROWS = {row.model: row for row in TABLE_1 if row.pp == 1}
Group = dist.ProcessGroup | None
"""The tensor-parallel ranks; None where there is one."""


def summed(x: Tensor, group: Group) -> Tensor:
    """All-reduces x in place. NCCL's stream does it, and the computing stream waits."""
    if group is not None:
        dist.all_reduce(x, group=group, async_op=True).wait()
    return x


class ToRanks(torch.autograd.Function):
    """Activations that every rank reads: their gradient is the sum of all ranks'."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return summed(gradient.contiguous(), ctx.group), None


class FromRanks(torch.autograd.Function):
    """The sum of what all ranks have computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.mark_dirty(x)
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Softmax(torch.autograd.Function):
    """Scale, causal mask and softmax of scores: one launch each way."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        result = torch.empty_like(scores)
        touch("softmax", scores, result)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        result = torch.empty_like(gradient)
        touch("softmax backward", gradient, *ctx.saved_tensors, result)
        return result


class Dropout(torch.autograd.Function):
    """One launch each way, with a byte of the mask for each element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result, mask = torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)
        touch("dropout", x, result, mask)
        ctx.save_for_backward(mask)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        result = torch.empty_like(gradient)
        touch("dropout backward", gradient, *ctx.saved_tensors, result)
        return result


class BiasGelu(torch.autograd.Function):
    """gelu(x + bias): one launch each way, and one that adds up the bias' gradient over rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        result = torch.empty_like(x)
        touch("bias_gelu", x, bias, result)
        ctx.save_for_backward(x, bias)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        result = torch.empty_like(gradient)
        touch("bias_gelu backward", gradient, *ctx.saved_tensors, result)
        return result, result.flatten(0, 1).sum(0)


class BiasDropoutAdd(torch.autograd.Function):
    """dropout(x + bias) + residual: as BiasGelu, with the mask of Dropout."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        result, mask = torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)
        touch("bias_dropout_add", x, bias, residual, result, mask)
        ctx.save_for_backward(mask)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        result = torch.empty_like(gradient)
        touch("bias_dropout_add backward", gradient, *ctx.saved_tensors, result)
        return result, result.flatten(0, 1).sum(0), gradient


class Loss(torch.autograd.Function):
    """The mean loss of logits [B, S, V / P], fp32, operator by operator as Megatron-LM's cross entropy over
    ranks: the largest logit, the label's and the sum of exponentials are all-reduced."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, group: Group) -> Tensor:
        largest = summed(logits.amax(dim=-1), group)
        logits.sub_(largest.unsqueeze(-1))
        of_label = summed(torch.empty_like(largest), group)
        probabilities = logits.exp_()
        total = summed(probabilities.sum(dim=-1), group)
        loss = total.log() - of_label
        ctx.save_for_backward(probabilities.div_(total.unsqueeze(-1)))
        return loss.mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (probabilities,) = ctx.saved_tensors
        return probabilities.mul_(gradient), None


def weights(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=torch.float16, device="sim"))


class Norm(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight, self.bias = weights(hidden), weights(hidden)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias)


class Attention(nn.Module):
    """[S, B, H] to [S, B, H], without the last bias, which the layer adds."""

    def __init__(self, shape: ModelShape, group: Group, ranks: int) -> None:
        super().__init__()
        self.group, self.head_dim = group, shape.head_dim
        own = shape.hidden // ranks
        self.qkv, self.qkv_bias = weights(3 * own, shape.hidden), weights(3 * own)
        self.out = weights(shape.hidden, own)

    def forward(self, x: Tensor) -> Tensor:
        qkv = F.linear(ToRanks.apply(x, self.group), self.qkv, self.qkv_bias)
        seq, batch, _ = qkv.shape
        each = qkv.view(seq, batch, -1, 3 * self.head_dim).split(self.head_dim, dim=-1)
        q, k, v = (one.flatten(1, 2).transpose(0, 1) for one in each)
        scores = torch.empty(len(q), seq, seq, dtype=q.dtype, device=q.device)
        scores = torch.baddbmm(scores, q, k.transpose(1, 2), beta=0.0, alpha=self.head_dim**-0.5)
        context = torch.bmm(Dropout.apply(Softmax.apply(scores)), v)
        context = context.unflatten(0, (batch, -1)).permute(2, 0, 1, 3).contiguous()
        return FromRanks.apply(F.linear(context.flatten(2), self.out), self.group)


class FeedForward(nn.Module):
    """[S, B, H] to [S, B, H], without the last bias."""

    def __init__(self, shape: ModelShape, group: Group, ranks: int) -> None:
        super().__init__()
        self.group = group
        own = shape.ffn // ranks
        self.up, self.up_bias = weights(own, shape.hidden), weights(own)
        self.down = weights(shape.hidden, own)

    def forward(self, x: Tensor) -> Tensor:
        inner = BiasGelu.apply(F.linear(ToRanks.apply(x, self.group), self.up), self.up_bias)
        return FromRanks.apply(F.linear(inner, self.down), self.group)


class Layer(nn.Module):
    def __init__(self, shape: ModelShape, group: Group, ranks: int) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = Norm(shape.hidden), Norm(shape.hidden)
        self.attention = Attention(shape, group, ranks)
        self.ffn = FeedForward(shape, group, ranks)
        self.attention_bias, self.ffn_bias = weights(shape.hidden), weights(shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = BiasDropoutAdd.apply(self.attention(self.attention_norm(x)), self.attention_bias, x)
        return BiasDropoutAdd.apply(self.ffn(self.ffn_norm(x)), self.ffn_bias, x)


class Gpt(nn.Module):
    """A rank's part of a GPT with a tied head: ids [B, S] to the mean loss."""

    def __init__(self, shape: ModelShape, group: Group, ranks: int) -> None:
        super().__init__()
        self.group = group
        self.embedding = weights(shape.vocab // ranks, shape.hidden)
        self.positions = weights(shape.positions, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape, group, ranks) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden)

    def forward(self, ids: Tensor) -> Tensor:
        x = F.embedding(ids, self.embedding)
        if self.group is not None:  # rows of other ranks' words are 0
            x = FromRanks.apply(x.masked_fill(ids.unsqueeze(-1) < 0, 0.0), self.group)
        x = Dropout.apply(x + self.positions[: ids.shape[1]]).transpose(0, 1).contiguous()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True, preserve_rng_state=False)
        x = ToRanks.apply(self.norm(x).transpose(0, 1).contiguous(), self.group)
        return Loss.apply(F.linear(x, self.embedding).float(), self.group)


class Step:
    """Micro-batches forward and backward, the sum over data-parallel ranks, Adam on weights in fp32."""

    def __init__(self, model: Gpt, micro_batch: int, micro_batches: int, seq: int, runtime: Runtime) -> None:
        self.model, self.micro_batches, self.runtime = model, micro_batches, runtime
        self.ids = torch.empty(micro_batch, seq, dtype=torch.int64, device="sim")
        self.own = list(model.parameters())
        sizes = [each.numel() for each in self.own]
        self.sums = torch.empty(sum(sizes), device="sim")
        self.main = [torch.empty(each.shape, device="sim") for each in self.own]
        for weight, main, part in zip(self.own, self.main, self.sums.split(sizes), strict=True):
            main.grad = part.view_as(main)
            weight.register_post_accumulate_grad_hook(functools.partial(_add, main.grad))
        self.optimizer = torch.optim.AdamW(self.main, lr=1e-4, fused=True)

    def __call__(self) -> None:
        self.sums.zero_()
        for _ in range(self.micro_batches):
            (self.model(self.ids) / self.micro_batches).backward()
        self._update()
        torch.accelerator.synchronize()

    @torch.no_grad()
    def _update(self) -> None:
        if self.runtime.dp.size > 1:
            self.sums.div_(self.runtime.dp.size)
            summed(self.sums, self.runtime.mesh["dp"].get_group())
        gradients = [each.grad for each in self.main]
        found, scale = torch.zeros(1, device="sim"), torch.ones(1, device="sim")
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, scale)
        summed(found, self.model.group).item()
        norm = torch.stack(torch._foreach_norm(gradients)).norm()
        torch._foreach_mul_(gradients, summed(norm, self.model.group))
        self.optimizer.step()
        torch._foreach_copy_(self.own, self.main)


def _add(total: Tensor, weight: Tensor) -> None:
    """Adds a weight's gradient to its sum in fp32."""
    total.add_(weight.grad)
    weight.grad = None


def axes_of(row: Row) -> dict[str, int]:
    """Returns the ranks of the mesh by axis."""
    return {"dp": row.gpus // row.tp, "tp": row.tp}


def prepared(shape: ModelShape, row: Row, micro_batch: int, runtime: Runtime) -> tuple[Gpt, Step]:
    """Returns a rank's model and step of a row of the table."""
    group = runtime.mesh["tp"].get_group() if row.tp > 1 else None
    model = Gpt(shape, group, row.tp)
    own = row.batch // (row.gpus // row.tp)
    return model, Step(model, micro_batch, own // micro_batch, shape.positions, runtime)


def simulate(row: Row, micro_batch: int, machine: Machine) -> Simulated:
    """Runs a step of a row of the table in virtual time. After `device_build.build`. Raises ValueError for a
    micro-batch that does not divide a rank's sequences, or a step that does not fit in memory."""
    own = row.batch * row.tp // row.gpus
    if own % micro_batch:
        raise ValueError(f"--micro-batch {micro_batch} does not divide {own}, the sequences of a rank.")
    shape, axes = find_model(row.model), axes_of(row)
    sizes = {
        "tokens": row.batch * SEQ,
        "flops": flops_per_step(row.batch, SEQ, shape.layers, shape.hidden, shape.vocab),
    }
    prepare = functools.partial(prepared, shape, row, micro_batch)
    of_place = functools.partial(program, machine, axes, prepare, before=1, **sizes)
    return simulated(of_place, machine, axes, row.gpus)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.clock_megatron",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--model", choices=ROWS, required=True, help="a row of the table")
    parser.add_argument("--micro-batch", type=int, required=True, help="sequences of a micro-batch")
    parser.add_argument("--machine", default="a100", help="a machine of pyruntime/clock/machines")
    parser.add_argument("--json", help="keeps the figures in this file, a line a command")
    given = parser.parse_args(argv)
    row = ROWS[given.model]
    try:
        machine = find(given.machine)
        device_build.build()
        found = simulate(row, given.micro_batch, machine)
        tflops = found.programs[0].flops / found.account.step / row.gpus / 1e12
        if given.json:
            command = f"--model {row.model} --micro-batch {given.micro_batch} --machine {machine.name}"
            line = {"command": command, "tflops": tflops, "published_tflops": row.tflops}
            keep(Path(given.json), {**line, **found.record()})
    except ValueError as error:
        print(f"bench.clock_megatron: {error}", file=sys.stderr)
        return 2
    print(f"{row.model}, Megatron-LM's order of calls\n{words(found)}")
    print(f"\n{tflops:.1f} TFLOP/s of a GPU, published {row.tflops:.0f}: {tflops / row.tflops:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
