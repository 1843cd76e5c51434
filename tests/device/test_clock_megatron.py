"""bench/clock_megatron: Megatron-LM's order of calls in virtual time does and moves what its paper says."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from bench import clock_megatron
from bench.planning.megatron import Row, flops_per_step, parameters
from pyruntime.clock import mirrors
from pyruntime.clock.mirrors import mirrored
from pyruntime.plan.models import gpt

LAYERS, HIDDEN, VOCAB, SEQ = 3, 64, 256, 32
ROW = Row("tiny", 2, 1, 6, 12, 0.0)
"""Three data-parallel ranks of two, each with 4 sequences."""
MICRO_BATCH = 2


def counted(group) -> tuple[int, list[tuple[str, int]], int]:
    """Returns the operations of a rank's step, the bytes of its all-reduces by axis, and its parameters."""
    mirrors.begin(lambda kind, sizes: 0.0, 2**30)
    summed: list[tuple[str, int]] = []
    all_reduce = dist.all_reduce
    with mirrored(clock_megatron.axes_of(ROW)) as runtime:
        axes = {runtime.mesh[name].get_group().group_name: name for name in ("dp", "tp")}

        def recorded(x: torch.Tensor, group: dist.ProcessGroup, async_op: bool) -> dist.Work | None:
            summed.append((axes[group.group_name], x.nbytes))
            return all_reduce(x, group=group, async_op=async_op)

        shape = gpt("tiny", LAYERS, HIDDEN, 4, VOCAB, SEQ)
        model, step = clock_megatron.prepared(shape, ROW, MICRO_BATCH, runtime)
        with mock.patch.object(dist, "all_reduce", recorded), FlopCounterMode(display=False) as flops:
            step()
        return flops.get_total_flops(), summed, sum(each.numel() for each in model.parameters())


@pytest.mark.usefixtures("simulated")
def test_a_step_does_the_operations_and_moves_the_bytes_of_the_paper(ranks):
    (outcome,) = ranks.launch(counted, 1, init=False)
    assert outcome.error is None, outcome.error
    flops, summed, own = outcome.value
    assert flops * ROW.gpus == round(flops_per_step(ROW.batch, SEQ, LAYERS, HIDDEN, VOCAB))
    # Equation 2 counts what is cut, and on each rank norms, the biases behind sums and positions are whole.
    whole = LAYERS * 6 * HIDDEN + 2 * HIDDEN + SEQ * HIDDEN
    assert own == (parameters(LAYERS, HIDDEN, VOCAB, SEQ) + 2 * HIDDEN - whole) / ROW.tp + whole
    assert [nbytes for axis, nbytes in summed if axis == "dp"] == [4 * own]
    # Two sums of b s h in fp16 in a layer's forward pass, in its recomputation and in its backward pass
    # (section 3.2 and 3.5); one behind the embedding, one of the head's dX. The loss: three numbers of a row.
    rows = MICRO_BATCH * SEQ
    of_micro_batch = (6 * LAYERS + 2) * 2 * rows * HIDDEN + 3 * 4 * rows
    micro_batches = ROW.batch * ROW.tp // ROW.gpus // MICRO_BATCH
    of_step = micro_batches * of_micro_batch + 2 * 4  # whether a gradient is infinite, and the norm
    assert sum(nbytes for axis, nbytes in summed if axis == "tp") == of_step


@pytest.mark.usefixtures("simulated")
def test_a_micro_batch_that_does_not_divide_is_refused(capsys):
    assert clock_megatron.main(["--model", "gpt-1.7b", "--micro-batch", "3"]) == 2
    assert "--micro-batch 3 does not divide 16, the sequences of a rank" in capsys.readouterr().err
