"""Models of ours on simulated devices under torch.autocast and torch.compile, as on CPU ranks."""

from __future__ import annotations

import pytest
import torch

from pyruntime.comm import Runtime
from pyruntime.llama import Llama
from pyruntime.llama.config import LlamaConfig
from pyruntime.nn import ColumnParallelLinear, RowParallelLinear
from tests.cuda import build as kernels
from tests.device import sim

pytestmark = pytest.mark.usefixtures("simulated")


def local_gradients(model) -> dict[str, torch.Tensor]:
    return {name: p.grad.to_local().cpu() if hasattr(p.grad, "to_local") else p.grad.cpu()
            for name, p in model.named_parameters()}  # fmt: skip


def cast_by_torch(group, device):
    """The result, dtypes and gradients of two linears and a norm between them, under torch.autocast."""
    if device == sim.DEVICE:
        sim.begin_rank(delays=4)
        sim.use_kernels(kernels.LIBRARY)
    with Runtime.start(tp=2, device=device) as runtime:
        x = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(3))[runtime.rank]
        x = x.to(runtime.device).requires_grad_()
        options = {"group": runtime.tp, "device": runtime.device}
        model = torch.nn.Sequential(
            ColumnParallelLinear(32, 48, **options),
            torch.nn.SiLU(),
            RowParallelLinear(48, 32, **options),
            torch.nn.LayerNorm(32, device=runtime.device),
        )
        for parameter in model.parameters():
            values = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            values.data.copy_(torch.linspace(-0.2, 0.2, values.numel()).view(values.shape))
        with torch.autocast(runtime.device.type, dtype=torch.bfloat16):
            hidden = model[:3](x)
            normed = model[3](hidden)
            product = torch.nn.functional.linear(normed, normed)
        product.float().square().mean().backward()
        assert (hidden.dtype, product.dtype) == (torch.bfloat16, torch.bfloat16)
        found = [hidden, normed.detach(), product, x.grad]
        gradients = local_gradients(model)
        assert all(each.dtype == torch.float32 for each in gradients.values())
        return normed.dtype, [each.detach().float().cpu() for each in found], gradients


def test_autocast_runs_our_linears_as_on_cpus(ranks):
    expected = ranks.launch(cast_by_torch, 2, "cpu", init=False)
    found = ranks.launch(cast_by_torch, 2, sim.DEVICE, init=False)
    for one, other in zip(found, expected, strict=True):
        assert one.error is None and other.error is None, (one.error, other.error)
        assert one.value[0] == torch.float32  # by torch's list for accelerators
        torch.testing.assert_close(one.value[1], other.value[1], rtol=0.03, atol=0.03)
        torch.testing.assert_close(one.value[2], other.value[2], rtol=0.1, atol=0.03)


def eager_and_compiled(group):
    """Loss and gradients without and with torch.compile of the whole model, no graph break allowed."""
    sim.begin_rank(delays=6)
    sim.use_kernels(kernels.LIBRARY)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
    )
    ids, labels = torch.randint(0, 40, (2, 2, 9), generator=torch.Generator().manual_seed(1))
    found = []
    with Runtime.start(tp=2, device=sim.DEVICE) as runtime:
        for is_compiled in (False, True):
            model = Llama(config, runtime.tp_grid, device=runtime.device, seed=3)
            call = torch.compile(model, fullgraph=True, backend="aot_eager") if is_compiled else model
            loss = call(ids.to(runtime.device), labels.to(runtime.device))
            loss.backward()
            found.append((loss.detach().cpu(), local_gradients(model)))
    return found


def test_a_compiled_model_learns_as_it_does_uncompiled(ranks):
    for rank in ranks.launch(eager_and_compiled, 2, init=False, timeout=180):
        assert rank.error is None, rank.error
        eager, compiled = rank.value
        torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-6)
