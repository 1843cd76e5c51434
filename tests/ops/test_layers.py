"""The fused layer kernels together: what torch asks of an op, and bad input."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pyruntime.ops import layers
from tests.ops.cases import EPS, randn, rotary_tables

ops = torch.ops.pyruntime

# ---- what torch asks of an op ----


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    stats = layers.cross_entropy_stats(logits, labels, 3)[None]
    return layers.cross_entropy_loss(logits, labels, stats, 3, 40)[0]


def test_gradcheck():
    x, y, weight = randn(3, 7, grad=True), randn(3, 7, grad=True), randn(7, grad=True)
    assert torch.autograd.gradcheck(lambda *a: layers.rms_norm(*a, EPS), (x, weight))
    assert torch.autograd.gradcheck(lambda *a: layers.add_rms_norm(*a, EPS), (x, y, weight))
    assert torch.autograd.gradcheck(layers.swiglu, randn(3, 14, grad=True))
    cos, sin = rotary_tables(3, 6, torch.float64)
    qkv = randn(6, 4 * 6, grad=True)
    assert torch.autograd.gradcheck(lambda t: layers.apply_rope_qkv(t, cos, sin, 2, 3, 2, 1), qkv)
    labels = torch.tensor([3, 9, -100, 5])
    assert torch.autograd.gradcheck(lambda t: loss_of(t, labels), randn(4, 7, grad=True))


def opcheck_cases():
    f32 = torch.float32
    x, weight, rstd = randn(5, 33, dtype=f32), randn(33, dtype=f32), torch.rand(5)
    cos, sin = rotary_tables(4, 32, f32)
    labels = torch.randint(0, 33, (5,))
    grads = [randn(2, heads, 4, 32, dtype=f32) for heads in (2, 1, 1)]
    lists = [[randn(9, dtype=f32), randn(2, 3, dtype=f32)] for _ in range(3)]
    low = [t.bfloat16() for t in lists[0]]
    squares = [t.square() for t in lists[2]]
    adamw = dict(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=[0.1, 0.0], step=1)
    yield "rms_norm", (x, weight, EPS), {}
    yield "rms_norm", (leaf(x), leaf(weight), EPS), {}
    yield "add_rms_norm", (leaf(x), leaf(x), leaf(weight), EPS), {}
    yield "rms_norm_backward", (x, x, weight, rstd, None), {}
    yield "rms_norm_backward", (x, x, weight, rstd, x), {}
    yield "swiglu", (leaf(randn(5, 66, dtype=f32)),), {}
    yield "swiglu_backward", (x, randn(5, 66, dtype=f32)), {}
    yield "apply_rope_qkv", (leaf(randn(8, 4 * 32, dtype=f32)), cos, sin, 2, 4, 2, 1), {}
    yield "rotate_qkv_", (randn(8, 4 * 32, dtype=f32), cos, sin, 2, 4, 2, 1), {}
    yield "apply_rope_qkv_backward", (*grads, cos, sin), {}
    yield "cross_entropy_stats", (leaf(x), labels, 3), {}
    yield "cross_entropy_loss", (leaf(x), labels, torch.rand(2, 5, 3), 3, 40), {}
    yield "cross_entropy_backward", (x, labels, rstd, rstd, 3), {}
    yield "cross_entropy_backward_", (x.clone(), labels, rstd, rstd, 3), {}
    yield "adamw_", (lists[0], lists[1], lists[2], squares, [], None), adamw
    yield "adamw_", (low, lists[1], lists[2], squares, lists[0], torch.tensor(0.5)), adamw
    yield "sum_of_squares", (lists[0],), {}
    swiglu = 1.0, float("inf"), 0.0, False
    yield "weighted_gating", (randn(5, 66, dtype=f32), rstd, *swiglu), {}
    written = randn(5, 66, dtype=f32), x.clone(), rstd.clone()
    yield "weighted_gating_backward_", (x, randn(5, 66, dtype=f32), rstd, *swiglu, *written), {}


def leaf(tensor: Tensor) -> Tensor:
    return tensor.clone().requires_grad_()


@pytest.mark.parametrize("index", range(19))
@pytest.mark.second_tier("7", "9", "11", "15")
def test_opcheck(index):
    cases = list(opcheck_cases())
    assert len(cases) == 19
    name, args, kwargs = cases[index]
    torch.library.opcheck(getattr(ops, name).default, args, kwargs)


class Block(torch.nn.Module):
    """One attention block, one feed-forward block and a loss, out of every differentiable op."""

    def __init__(self, dim=32, heads=4, kv_heads=2, ffn=24, vocab=40):
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        head_dim = dim // heads
        self.norms = torch.nn.ParameterList(torch.nn.Parameter(torch.rand(dim) + 0.5) for _ in range(2))
        self.qkv = torch.nn.Linear(dim, (heads + 2 * kv_heads) * head_dim, bias=False)
        self.out = torch.nn.Linear(dim, dim, bias=False)
        self.gate_up = torch.nn.Linear(dim, 2 * ffn, bias=False)
        self.down = torch.nn.Linear(ffn, dim, bias=False)
        self.head = torch.nn.Linear(dim, vocab, bias=False)
        cos, sin = rotary_tables(8, head_dim, torch.float32)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, x: Tensor, labels: Tensor, batch: int, overwrite: bool) -> Tensor:
        tokens, dim = x.shape
        qkv = self.qkv(layers.rms_norm(x, self.norms[0], EPS))
        heads = batch, tokens // batch, self.heads, self.kv_heads
        q, k, v = layers.apply_rope_qkv(qkv, self.cos, self.sin, *heads, overwrite_qkv=overwrite)
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        attention = self.out(attention.transpose(1, 2).reshape(tokens, dim))
        normed, x = layers.add_rms_norm(x, attention, self.norms[1], EPS)
        logits = self.head(x + self.down(layers.swiglu(self.gate_up(normed))))
        stats = layers.cross_entropy_stats(logits, labels, 0)[None]
        loss, _ = layers.cross_entropy_loss(
            logits, labels, stats, 0, logits.shape[1], overwrite_logits=overwrite
        )
        return loss.mean()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.second_tier(but=["False-False"])
def test_a_block_compiles_to_one_graph_with_the_same_gradients(dynamic, overwrite):
    torch._dynamo.reset()
    block = Block()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for batch in (2, 3) if dynamic else (2,):
        x, labels = randn(batch * 8, 32, dtype=torch.float32, grad=True), torch.randint(0, 40, (batch * 8,))
        inputs = (x, *block.parameters())
        expected_loss = block(x, labels, batch, overwrite)
        expected = torch.autograd.grad(expected_loss, inputs)
        loss = compiled(x, labels, batch, overwrite)
        torch.testing.assert_close(loss, expected_loss)
        torch.testing.assert_close(torch.autograd.grad(loss, inputs), expected)


def test_results_are_bitwise_the_same_again_and_with_more_threads():
    def everything() -> list[Tensor]:
        torch.manual_seed(1)
        x, weight = (
            randn(301, 520, dtype=torch.bfloat16, grad=True),
            randn(520, dtype=torch.bfloat16, grad=True),
        )
        normed, summed = layers.add_rms_norm(layers.rms_norm(x, weight, EPS), x, weight, EPS)
        loss = loss_of(layers.swiglu(normed) + summed[:, :260], torch.randint(3, 40, (301,)))
        grads = torch.autograd.grad(loss.sum(), (x, weight))
        cos, sin = rotary_tables(301, 130, torch.float32)
        heads = layers.apply_rope_qkv(x.detach(), cos, sin, 1, 301, 2, 1)
        param, state = randn(200_003).float(), [torch.zeros(200_003) for _ in range(2)]
        layers.adamw_(
            [param], [param * 0.1], state[:1], state[1:],
            lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, step=1,
        )  # fmt: skip
        return [normed, summed, loss, *grads, *heads, param, *state, layers.sum_of_squares([param])]

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        first, again = everything(), everything()
        torch.set_num_threads(3)
        threaded = everything()
    finally:
        torch.set_num_threads(threads)
    for a, b, c in zip(first, again, threaded, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


def test_differentiating_a_backward_op_is_an_error_and_not_a_missing_gradient():
    gate_up = randn(2, 6, grad=True)
    (grad,) = torch.autograd.grad(layers.swiglu(gate_up).sum(), gate_up, create_graph=True)
    with pytest.raises(RuntimeError, match="swiglu_backward is not implemented"):
        grad.sum().backward()


# ---- bad input ----

X, W = torch.zeros(4, 6), torch.ones(6)
LABELS = torch.zeros(4, dtype=torch.int64)
STATS = torch.zeros(1, 4, 3)
TABLE = torch.zeros(4, 2)
ADAMW = dict(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0, step=1)

BAD_CALLS = [
    (ValueError, r"weight must have shape \[6\]", lambda: layers.rms_norm(X, torch.ones(5), EPS)),
    (ValueError, "x is a scalar", lambda: layers.rms_norm(torch.tensor(1.0), W, EPS)),
    (ValueError, "nothing to normalise", lambda: layers.rms_norm(X[:, :0], W[:0], EPS)),
    (TypeError, "x has dtype Long", lambda: layers.rms_norm(X.long(), W, EPS)),
    (TypeError, "x has dtype Float and weight has BFloat16", lambda: layers.rms_norm(X, W.bfloat16(), EPS)),
    (ValueError, "they must be equal", lambda: layers.add_rms_norm(X, X[:2], W, EPS)),
    (TypeError, "residual has Half", lambda: layers.add_rms_norm(X, X.half(), W, EPS)),
    (ValueError, r"gate_up has shape \[4, 5\]", lambda: layers.swiglu(X[:, :5])),
    (TypeError, "gate_up has dtype Int", lambda: layers.swiglu(X.int())),
    (ValueError, "need \\[6, 3 \\* head_dim\\]", lambda: layers.apply_rope_qkv(X, TABLE, TABLE, 2, 3, 1, 1)),
    (ValueError, "even head_dim", lambda: layers.apply_rope_qkv(X[:, :3], TABLE, TABLE, 1, 4, 1, 1)),
    (ValueError, "num_kv_heads=0", lambda: layers.apply_rope_qkv(X, TABLE, TABLE, 1, 4, 1, 0)),
    (
        ValueError,
        "at least the 4 positions",
        lambda: layers.apply_rope_qkv(X, TABLE[:3], TABLE[:3], 1, 4, 1, 1),
    ),
    (TypeError, "both must be Float", lambda: layers.apply_rope_qkv(X, TABLE.half(), TABLE, 1, 4, 1, 1)),
    (
        ValueError,
        "detach them",
        lambda: layers.apply_rope_qkv(X, TABLE.clone().requires_grad_(), TABLE, 1, 4, 1, 1),
    ),
    (
        ValueError,
        "overwrite_qkv=True would destroy",
        lambda: layers.apply_rope_qkv(
            X.clone().requires_grad_(), TABLE[:, :2], TABLE[:, :2], 1, 4, 1, 1, overwrite_qkv=True
        ),
    ),
    (
        ValueError,
        r"qkv has strides \[1, 4\]; it is written in place and its rows must be contiguous",
        lambda: layers.apply_rope_qkv(torch.zeros(6, 4).t(), TABLE, TABLE, 1, 4, 1, 1, overwrite_qkv=True),
    ),
    (ValueError, r"must be \[rows, vocabulary\]", lambda: layers.cross_entropy_stats(X[0], LABELS, 0)),
    (ValueError, r"it must be \[4\]", lambda: layers.cross_entropy_stats(X, LABELS[:3], 0)),
    (TypeError, "must be int64", lambda: layers.cross_entropy_stats(X, LABELS.int(), 0)),
    (ValueError, r"must be \[shards, 4, 3\]", lambda: layers.cross_entropy_loss(X, LABELS, STATS[0], 0, 6)),
    (
        IndexError,
        r"label 7 of row 0 is neither",
        lambda: layers.cross_entropy_loss(X, LABELS + 7, STATS, 0, 6),
    ),
    (
        ValueError,
        "overwrite_logits=True would destroy",
        lambda: layers.cross_entropy_loss(
            X.clone().requires_grad_(), LABELS, STATS, 0, 6, overwrite_logits=True
        ),
    ),
    (ValueError, "lse has shape", lambda: ops.cross_entropy_backward(X, LABELS, W, X[:, 0], 0)),
    (
        TypeError,
        "grad has dtype Double",
        lambda: ops.cross_entropy_backward(X, LABELS, X[:, 0], X[:, 0].double(), 0),
    ),
    (
        ValueError,
        "written in place and must be contiguous",
        lambda: ops.cross_entropy_backward_(X.t(), LABELS.new_zeros(6), W, W, 0),
    ),
    (ValueError, "2 params came with 1 grads", lambda: layers.adamw_([X, X], [X], [X], [X], **ADAMW)),
    (ValueError, r"grads\[0\] has shape \[6\]", lambda: layers.adamw_([X], [W], [X], [X], **ADAMW)),
    (ValueError, r"exp_avg_sq\[0\] has shape", lambda: layers.adamw_([X], [X], [X], [W], **ADAMW)),
    (TypeError, r"exp_avg\[0\] has dtype Half", lambda: layers.adamw_([X], [X], [X.half()], [X], **ADAMW)),
    (
        TypeError,
        "is not rounded at random",
        lambda: layers.adamw_([X.half()], [X], [X], [X], rounding=[(1, 0)], **ADAMW),
    ),
    (
        ValueError,
        "has a master",
        lambda: layers.adamw_([X.bfloat16()], [X], [X], [X], [X.clone()], rounding=[(1, 0)], **ADAMW),
    ),
    (
        ValueError,
        "came with 2 seeds",
        lambda: layers.adamw_([X], [X], [X], [X], rounding=2 * [(1, 0)], **ADAMW),
    ),
    (ValueError, "its own master", lambda: layers.adamw_([X], [X], [X], [X], [X], **ADAMW)),
    (ValueError, "must be contiguous", lambda: layers.adamw_([X.t()], [X.t()], [X.t()], [X.t()], **ADAMW)),
    (ValueError, "lr=nan", lambda: layers.adamw_([X], [X], [X], [X], **ADAMW | {"lr": float("nan")})),
    (ValueError, "first step is 1", lambda: layers.adamw_([X], [X], [X], [X], **ADAMW | {"step": 0})),
    (ValueError, r"in \[0, 1\)", lambda: layers.adamw_([X], [X], [X], [X], **ADAMW | {"beta2": 1.0})),
    (TypeError, "a tensor has dtype Long", lambda: layers.sum_of_squares([LABELS])),
]


@pytest.mark.parametrize("error,sentence,call", BAD_CALLS, ids=[sentence for _, sentence, _ in BAD_CALLS])
def test_bad_input_is_refused_in_a_sentence(error, sentence, call):
    with pytest.raises(error, match=sentence):
        call()
