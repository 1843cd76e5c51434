"""What the layers' ops are on CUDA, here on tensors of the CPU through the kernels' host dialect: against
float64 and, as a whole training step, against the CPU's kernels; test_gpu_layers.py is for GPUs."""

from __future__ import annotations

import pytest
import torch

from pyruntime.comm.core import _C
from pyruntime.llama import Llama
from pyruntime.llama.presets import preset
from tests.cuda import build
from tests.cuda.cases import DEVICE_LAYERS, OnDevice, check_training_step, on_device
from tests.ops import test_cross_entropy, test_rms_norm, test_rope, test_swiglu, test_weighted_gating
from tests.ops.cases import EPS, composite, randn, rotary_tables

pytestmark = pytest.mark.usefixtures("kernels")

ops = torch.ops.pyruntime
LOW = [torch.bfloat16, torch.float16]


@pytest.fixture
def kernels(host_kernels):
    torch.manual_seed(int(torch.randint(2**31, ())))
    _C.use_device_library("cpu", str(build.LIBRARY))


@pytest.mark.parametrize("dtype", [*LOW, torch.float32])
@pytest.mark.parametrize("rows, width", [(0, 7), (1, 1), (5, 33), (300, 128), (70, 1000), (9, 4096)])
def test_norms_and_their_gradients_match_float64(dtype, rows, width):
    test_rms_norm.test_rms_norm_and_its_gradients_match_float64(on_device, dtype, width, rows)
    test_rms_norm.test_add_rms_norm_and_its_gradients_match_float64(on_device, dtype, width, rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norms_take_any_leading_dimensions_and_strides(dtype):
    whole, weight = randn(3, 4, 5, 40, dtype=dtype), randn(48, dtype=dtype)[::3]
    for x in (whole[..., 3:19], whole[..., :32:2], whole.transpose(0, 2)[..., :16], whole[0, 0, 0, :16]):
        y, rstd = on_device(ops.rms_norm, x, weight, EPS)
        again = on_device(ops.rms_norm, x.contiguous(), weight.contiguous(), EPS)
        assert y.is_contiguous() and rstd.shape == x.shape[:-1]
        assert torch.equal(y, again[0]) and torch.equal(rstd, again[1])
        grad = randn(*x.shape[:-1], 32, dtype=dtype)[..., ::2]
        found = on_device(ops.rms_norm_backward, grad, x, weight, rstd, grad)
        expected = on_device(ops.rms_norm_backward, grad.contiguous(), x.contiguous(), weight, rstd, grad)
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("dtype", [*LOW, torch.float32])
@pytest.mark.parametrize("rows, width", [(0, 7), (1, 1), (5, 33), (130, 1000)])
def test_swiglu_and_its_gradient_match_float64(dtype, rows, width):
    test_swiglu.test_swiglu_and_its_gradient_match_float64(on_device, dtype, width, rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_swiglu_takes_any_leading_dimensions_and_strides(dtype):
    whole = randn(3, 4, 5, 40, dtype=dtype)
    for gate_up in (
        whole[..., 3:19],
        whole[..., :32:2],
        whole.transpose(0, 2)[..., :16],
        whole[0, 0, :, 8:24],
        whole[0, 0, 0, :16],
    ):
        assert torch.equal(on_device(ops.swiglu, gate_up), on_device(ops.swiglu, gate_up.contiguous()))
        grad = randn(*gate_up.shape[:-1], 16, dtype=dtype)[..., ::2]
        found = on_device(ops.swiglu_backward, grad, gate_up)
        assert torch.equal(found, on_device(ops.swiglu_backward, grad.contiguous(), gate_up.contiguous()))


@pytest.mark.parametrize("dtype", [*LOW, torch.float32])
@pytest.mark.parametrize("form", test_weighted_gating.FORMS)
def test_gating_of_experts_and_its_gradients_match_float64(dtype, form):
    for rows, width in test_weighted_gating.SIZES:
        test_weighted_gating.check_gating(on_device, dtype, rows, width, test_weighted_gating.FORMS[form])


@pytest.mark.parametrize("dtype", [*LOW, torch.float32])
@pytest.mark.parametrize("sizes", [*test_rope.ROPE_SHAPES, (1, 9, 12, 2, 64), (2, 3, 2, 1, 128)])
def test_rope_and_its_gradient_match_float64(dtype, sizes):
    test_rope.test_rope_and_its_gradient_match_float64(on_device, dtype, *sizes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rope_in_place_gives_the_bits_of_rope_and_leaves_values_alone(dtype):
    cos, sin = rotary_tables(5, 64, torch.float32)
    qkv = randn(10, 7 * 64 + 8, dtype=dtype)[:, 8:]
    expected = on_device(ops.apply_rope_qkv, qkv, cos, sin, 2, 5, 3, 2)
    values, version = qkv[:, 5 * 64 :].clone(), qkv._version
    on_device(ops.rotate_qkv_, qkv, cos, sin, 2, 5, 3, 2)
    parts = qkv.unflatten(0, (2, 5)).unflatten(2, (7, 64)).transpose(1, 2).split((3, 2, 2), 1)
    assert all(torch.equal(found, wanted) for found, wanted in zip(parts, expected, strict=True))
    assert torch.equal(qkv[:, 5 * 64 :], values) and qkv._version > version


@pytest.mark.parametrize("dtype", [*LOW, torch.float32])
@pytest.mark.parametrize("shards, vocab, rows", [(1, 5, 5), (3, 33, 5), (2, 5000, 9), (1, 1000, 0)])
@pytest.mark.parametrize("overwrite", [False, True])
def test_cross_entropy_over_shards_matches_float64(dtype, shards, vocab, rows, overwrite):
    with OnDevice() as seen:
        test_cross_entropy.test_cross_entropy_over_shards_matches_torch_in_float64(
            dtype, shards, vocab, rows, overwrite
        )
    assert {
        "cross_entropy_stats",
        "cross_entropy_backward_" if overwrite else "cross_entropy_backward",
    } <= seen.ours


def test_masked_shards_and_nan_are_what_they_are_on_the_cpu():
    test_cross_entropy.test_a_shard_that_is_masked_out_contributes_nothing(on_device)
    test_cross_entropy.test_nan_logits_give_a_nan_loss(on_device)


def test_rows_of_a_wider_matrix_are_read_where_they_lie():
    logits, labels = randn(4, 50, dtype=torch.bfloat16)[:, 3:44], torch.tensor([0, 40, -100, 7])
    found = on_device(ops.cross_entropy_stats, logits, labels, 0)
    torch.testing.assert_close(found, ops.cross_entropy_stats(logits, labels, 0), rtol=1e-6, atol=0)
    lse, grad = found[:, 0] + found[:, 1].log(), torch.tensor([1.0, -2.0, 0.0, 0.5])
    dlogits = on_device(ops.cross_entropy_backward, logits, labels, lse, grad, 0)
    torch.testing.assert_close(dlogits, ops.cross_entropy_backward(logits, labels, lse, grad, 0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.second_tier("dtype1")
def test_a_training_step_of_a_llama_is_that_of_the_cpu(dtype):
    check_training_step(lambda: Llama(preset("3m", vocab_size=515), dtype=dtype, seed=3), "cpu")


def test_float64_has_no_kernel_and_is_computed_by_atens_operations():
    gate_up = randn(3, 8)
    assert torch.equal(on_device(ops.swiglu, gate_up), composite(ops.swiglu, gate_up))
    arguments = gate_up, randn(3, 8), randn(8), EPS
    found, expected = (run(ops.add_rms_norm, *arguments) for run in (on_device, composite))
    assert all(map(torch.equal, found, expected))


def test_every_op_has_a_kernel_for_cuda():
    for name in DEVICE_LAYERS:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"pyruntime::{name}", "CUDA"), name


def test_what_does_not_fit_is_refused_in_a_sentence():
    gate_up = torch.zeros(4, 6)
    with pytest.raises(ValueError, match=r"grad has shape \[4, 2\] and gate_up \[4, 6\]"):
        on_device(ops.swiglu_backward, gate_up[:, :2], gate_up)
    with pytest.raises(ValueError, match=r"x has shape \[4, 6\] and residual \[4, 2\]; they must be equal"):
        on_device(ops.add_rms_norm, gate_up, gate_up[:, :2], torch.zeros(6), EPS)
    with pytest.raises(TypeError, match="grad has dtype Half and gate_up has Float"):
        on_device(ops.swiglu_backward, gate_up[:, :3].half(), gate_up)
    with pytest.raises(
        ValueError, match=r"one tensor is on cpu and another on meta; all must be on one device"
    ):
        on_device(ops.swiglu_backward, torch.zeros(4, 3, device="meta"), gate_up)
    table = torch.zeros(4, 2)
    with pytest.raises(ValueError, match="its rows must be contiguous"):
        on_device(ops.rotate_qkv_, torch.zeros(6, 4).t(), table, table, 1, 4, 1, 1)
    row, labels = torch.zeros(6), torch.zeros(6, dtype=torch.int64)
    with pytest.raises(ValueError, match="written in place and must be contiguous"):
        on_device(ops.cross_entropy_backward_, gate_up.t(), labels, row, row, 0)
