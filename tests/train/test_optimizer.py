"""AdamW and clipping agree with torch's own."""

import pytest
import torch
from torch import nn

from pyruntime.train.config import Optimizer
from pyruntime.train.optimizer import AdamW, clip_coefficient, global_norm

SETTINGS = Optimizer(lr=3e-3, beta1=0.8, beta2=0.9, eps=1e-7, weight_decay=0.25)


def make_model(dtype=torch.float32) -> nn.Module:
    """A matrix cut over ranks, a replicated vector, a replicated matrix."""
    model = nn.Module()
    for name, shape, tp_dim in (("cut", (33, 17), 0), ("norm", (17,), None), ("whole", (5, 7), None)):
        parameter = nn.Parameter(torch.randn(shape).to(dtype))
        parameter.tp_dim = tp_dim
        model.register_parameter(name, parameter)
    return model


def torch_adamw(parameters: list[nn.Parameter]) -> torch.optim.AdamW:
    decays = [{"params": [p], "weight_decay": 0.25 if p.dim() > 1 else 0.0} for p in parameters]
    return torch.optim.AdamW(decays, betas=(0.8, 0.9), eps=1e-7)


def step_both(ours: AdamW, model: nn.Module, theirs: torch.optim.AdamW, copies, steps=10):
    for step in range(1, steps + 1):
        for parameter, copy in zip(model.parameters(), copies, strict=True):
            parameter.grad = torch.randn_like(parameter)
            copy.grad = parameter.grad.float() * 0.5
        lr = 3e-3 / step
        for group in theirs.param_groups:
            group["lr"] = lr
        ours.step(step, lr, grad_scale=0.5)
        theirs.step()


def test_fp32_parameters_follow_torch():
    model = make_model()
    copies = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    step_both(AdamW(model, SETTINGS), model, torch_adamw(copies), copies)
    for parameter, copy in zip(model.parameters(), copies, strict=True):
        torch.testing.assert_close(parameter, copy, rtol=1e-5, atol=1e-6)
        assert parameter.grad is None


def test_bf16_parameters_are_the_rounded_fp32_ones_that_follow_torch():
    model = make_model(torch.bfloat16)
    copies = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    ours = AdamW(model, SETTINGS)
    step_both(ours, model, torch_adamw(copies), copies)
    for parameter, master, copy in zip(model.parameters(), ours._master, copies, strict=True):
        torch.testing.assert_close(master, copy.detach(), rtol=1e-5, atol=1e-6)
        assert torch.equal(parameter, master.bfloat16())


def test_the_norm_counts_every_element_once():
    model = make_model()
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    sharded, replicated = AdamW(model, SETTINGS).squared_norms()
    expected = nn.utils.get_total_norm([p.grad.double() for p in model.parameters()])
    assert global_norm([sharded], replicated) == pytest.approx(float(expected), rel=1e-6)
    # Another rank's shard adds to the cut parameters' part only.
    assert global_norm([sharded, 3.0], replicated) == pytest.approx((float(expected) ** 2 + 3.0) ** 0.5)


@pytest.mark.parametrize("max_norm", [0.1, 1.0, 1e6])
def test_clipping_scales_as_torch_does(max_norm):
    parameter = nn.Parameter(torch.zeros(50))
    parameter.grad = torch.randn(50)
    before = parameter.grad.clone()
    norm = float(nn.utils.clip_grad_norm_([parameter], max_norm))
    torch.testing.assert_close(before * clip_coefficient(norm, max_norm), parameter.grad)


def test_clipping_is_off_at_zero():
    assert clip_coefficient(1e9, 0.0) == 1.0
