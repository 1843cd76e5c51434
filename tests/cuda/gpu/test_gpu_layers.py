"""The kernels of layers on GPUs: `pytest -m gpu` where one is, with a torch for CUDA and `make cuda`."""

from __future__ import annotations

import pytest
import torch

from pyruntime.cuda import why_not
from pyruntime.llama import Llama
from pyruntime.llama.presets import preset
from pyruntime.ops import layers
from pyruntime.ops.device_adamw import device_adamw_
from tests.cuda.cases import check_training_step
from tests.cuda.test_device_adamw import CONSTANTS, stepped
from tests.ops import cases, test_weighted_gating

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(why_not()), reason=why_not() or "there is a GPU")]

ops = torch.ops.pyruntime
COMPOSITE = torch._C.DispatchKey.CompositeExplicitAutograd
UNIT = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2e-6}
DTYPES = pytest.mark.parametrize("dtype", list(UNIT))


def agrees(op, dtype: torch.dtype, *arguments) -> None:
    """The kernel gives what ATen's operations give on the same device; both round once from fp32."""
    found, expected = op(*arguments), op.default._op_dk(COMPOSITE, *arguments)
    for one, other in zip(*((x if isinstance(x, tuple) else (x,)) for x in (found, expected)), strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=2 * UNIT[dtype], atol=2e-5)


def on_gpu(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


@DTYPES
@pytest.mark.parametrize("rows, features", [(4096, 8192), (333, 1000), (17, 35), (1, 1)])
def test_swiglu(dtype, rows, features):
    gate_up, grad = on_gpu(rows, 2 * features, dtype=dtype) * 4, on_gpu(rows, features, dtype=dtype)
    agrees(ops.swiglu, dtype, gate_up)
    agrees(ops.swiglu_backward, dtype, grad, gate_up)


@DTYPES
@pytest.mark.parametrize("form", test_weighted_gating.FORMS)
@pytest.mark.parametrize("rows, features", [(4096, 768), (333, 1000), (17, 35), (1, 1)])
def test_gating_of_experts(dtype, form, rows, features):
    grad, gate_up, p = (x.cuda() for x in test_weighted_gating.operands(rows, features, dtype))
    settings = test_weighted_gating.settings(test_weighted_gating.FORMS[form])
    agrees(ops.weighted_gating, dtype, gate_up, p, *settings)
    found, expected, again = (
        test_weighted_gating.backward(run, grad, gate_up, p, test_weighted_gating.FORMS[form])
        for run in (cases.cpu, cases.composite, cases.cpu)
    )
    for one, other in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=2 * UNIT[dtype], atol=2e-4)
    torch.testing.assert_close(found[2], expected[2], rtol=1e-4, atol=1e-4 * features**0.5)
    assert all(map(torch.equal, found, again))


@DTYPES
@pytest.mark.parametrize("rows, features", [(8192, 4096), (65536, 128), (333, 1000), (17, 16384), (17, 35)])
def test_norms(dtype, rows, features):
    x, residual, grad, also = (on_gpu(rows, features, dtype=dtype) for _ in range(4))
    weight = on_gpu(features, dtype=dtype)
    agrees(ops.add_rms_norm, dtype, x, residual, weight, 1e-5)
    y, rstd = ops.rms_norm(x, weight, 1e-5)
    assert y.isfinite().all()
    dx, dweight = ops.rms_norm_backward(grad, x, weight, rstd, also)
    expected = ops.rms_norm_backward.default._op_dk(COMPOSITE, grad, x, weight, rstd, None)
    torch.testing.assert_close(
        dx.double(), expected[0].double() + also.double(), rtol=3 * UNIT[dtype], atol=3 * UNIT[dtype]
    )
    spread = 3 * UNIT[dtype] * rows**0.5
    torch.testing.assert_close(dweight.double(), expected[1].double(), rtol=3 * UNIT[dtype], atol=spread)
    again = ops.rms_norm_backward(grad, x, weight, rstd, also)
    assert torch.equal(dx, again[0]) and torch.equal(dweight, again[1])


@DTYPES
@pytest.mark.parametrize("head_dim", [64, 128, 10])
def test_rope(dtype, head_dim):
    sizes = batch, seq, heads, kv_heads = 3, 700, 9, 3
    angles = torch.outer(torch.arange(seq), torch.rand(head_dim // 2)).repeat(1, 2).cuda()
    cos, sin = angles.cos(), angles.sin()
    qkv = on_gpu(batch * seq, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    agrees(ops.apply_rope_qkv, dtype, qkv, cos, sin, *sizes)
    grads = [on_gpu(batch, count, seq, head_dim, dtype=dtype) for count in (heads, kv_heads, kv_heads)]
    agrees(ops.apply_rope_qkv_backward, dtype, *grads, cos, sin)
    expected = [part.clone() for part in layers.apply_rope_qkv(qkv, cos, sin, *sizes)]
    found = layers.apply_rope_qkv(qkv, cos, sin, *sizes, overwrite_qkv=True)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert found[0].data_ptr() == qkv.data_ptr()


@DTYPES
@pytest.mark.parametrize("rows, vocab", [(700, 128256), (33, 32067), (5, 3)])
def test_cross_entropy(dtype, rows, vocab):
    logits, start = on_gpu(rows, vocab, dtype=dtype) * 5, 100
    labels = torch.randint(0, vocab + 200, (rows,), device="cuda")
    stats = ops.cross_entropy_stats(logits, labels, start)
    assert all(torch.equal(stats, ops.cross_entropy_stats(logits, labels, start)) for _ in range(3))
    expected = ops.cross_entropy_stats.default._op_dk(COMPOSITE, logits, labels, start)
    torch.testing.assert_close(stats, expected, rtol=1e-5, atol=0)
    lse, grad = stats[:, 0] + stats[:, 1].log(), torch.randn(rows, device="cuda")
    grad[::5] = 0
    agrees(ops.cross_entropy_backward, dtype, logits, labels, lse, grad, start)
    dlogits = ops.cross_entropy_backward(logits, labels, lse, grad, start)
    ops.cross_entropy_backward_(logits, labels, lse, grad, start)
    assert torch.equal(logits, dlogits)


@DTYPES
def test_adamw_takes_the_steps_of_the_cpu_kernel(dtype):
    seed = int(torch.randint(2**31, ()))
    mine = stepped(lambda *a, **k: device_adamw_(*a, **k, **CONSTANTS), dtype, seed, "cuda")
    theirs = stepped(lambda *a, **k: layers.adamw_(*a, **k, **CONSTANTS), dtype, seed)
    for one, other in zip(mine, theirs, strict=True):
        rtol = 2e-6 if one.dtype == torch.float32 else 1e-2
        torch.testing.assert_close(one.cpu(), other, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_training_step_of_a_llama_is_that_of_the_cpu(dtype):
    check_training_step(lambda: Llama(preset("3m", vocab_size=515), dtype=dtype, seed=3), "cuda")
