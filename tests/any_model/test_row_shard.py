"""Row shards are the whole tensor to whatever reads them, and models on them are the whole model."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from pyruntime import explain, parallelize, verify
from pyruntime.any_model.activations.row_form import RowForm
from pyruntime.any_model.activations.row_shard import RowShard, from_rows, to_whole
from pyruntime.any_model.activations.when_read import GatheredWhenRead
from pyruntime.nn.parameters import TensorGroup
from pyruntime.ops.layers import rms_norm
from tests.any_model.test_auto import BATCH, IDS, build
from tests.nn.cases import assert_near, my_rows


def _cleared(x: Tensor) -> Tensor:
    y = x * 1
    y[:, 0] = 0
    return y


def _added_to(x: Tensor) -> Tensor:
    return (x * 1).add_(x).mul_(2)


def _rms_norm(x: Tensor, v: Tensor) -> Tensor:
    h = x.to(torch.float64)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return v * h.to(x.dtype)


# {what: (of x [2, 5, 6], v [6] and w [4, 6], how often rows are gathered in the forward pass)}
CASES = {
    "sum of two": (lambda x, v, w: x + x * 2, 0),
    "vector": (lambda x, v, w: x * v + v, 0),
    "number": (lambda x, v, w: 3 - x / torch.tensor(2.0), 0),
    "activation": (lambda x, v, w: F.silu(x) * F.gelu(x), 0),
    "norm by hand": (lambda x, v, w: _rms_norm(x, v), 0),
    "layer norm": (lambda x, v, w: F.layer_norm(x, (6,), v, v), 0),
    "rms norm": (lambda x, v, w: F.rms_norm(x, (6,), v), 0),
    "rms norm by one kernel": (lambda x, v, w: rms_norm(x, v, 1e-6) + rms_norm(x, v.detach(), 1e-6), 0),
    "views of rows": (lambda x, v, w: (x.view(-1, 6) * v).reshape(2, 5, 6)[:, :], 0),
    "in place": (lambda x, v, w: _added_to(x), 0),
    "linear": (lambda x, v, w: F.linear(x, w), 1),
    "linear twice": (lambda x, v, w: F.linear(x, w) + F.linear(x, w).sin(), 1),
    "slice": (lambda x, v, w: x[:, 1:], 1),
    "features": (lambda x, v, w: x[..., :3], 1),
    "other view": (lambda x, v, w: x.view(2, 5, 3, 2).transpose(1, 2), 1),
    "rows of a whole": (lambda x, v, w: x + torch.ones(2, 5, 6), 1),
    "one position": (lambda x, v, w: x * torch.arange(5.0)[:, None], 1),
    "comparison": (lambda x, v, w: torch.where(x > 0, x, 2 * x), 2),
    "all": (lambda x, v, w: x.square().mean()[None], 1),
    "softmax over positions": (lambda x, v, w: x.softmax(1), 1),
    "written in part": (lambda x, v, w: _cleared(x), 1),
    "joined": (lambda x, v, w: torch.cat([x, x], -1), 1),
}


def is_whole(group, what: str) -> tuple[int, bool]:
    """Compares outputs and gradients with those of whole tensors; (gathers, whether the result is rows)."""
    function, _ = CASES[what]
    draw = torch.Generator().manual_seed(0)
    whole = [torch.randn(size, generator=draw) for size in ((2, 5, 6), (6,), (4, 6))]
    leaves, expected_leaves = ([t.clone().requires_grad_() for t in whole] for _ in range(2))
    form = RowForm(TensorGroup.of(group))
    rows = my_rows(leaves[0].flatten(0, 1), group)
    x = from_rows(rows, (2, 5, 6), form)
    assert isinstance(x, RowShard) and x.shape == (2, 5, 6)
    y, expected = function(x, *leaves[1:]), function(*expected_leaves)
    forward = form.gathers
    kept = isinstance(y, RowShard)
    y = to_whole(y) if kept else y
    assert type(y) is Tensor
    assert_near(y, expected, what)
    weights = torch.randn(expected.shape, generator=draw)
    for each in (y, expected):
        (each * weights).sum().backward()
    mine = my_rows(expected_leaves[0].grad.flatten(0, 1), group)
    assert_near(my_rows(leaves[0].grad.flatten(0, 1), group), mine, f"dx of {what}")
    for leaf, wanted in zip(leaves[1:], expected_leaves[1:], strict=True):
        if wanted.grad is not None:
            assert_near(leaf.grad, wanted.grad, f"dw of {what}")
    return forward, kept


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.second_tier("2")
def test_whatever_reads_them_reads_the_whole(ranks, world_size):
    for what, (_, gathers) in CASES.items():
        for forward, kept in ranks.run(is_whole, world_size, what):
            assert (forward, kept) == (gathers, gathers == 0 or what == "written in part"), what


# -- models

ROWS = "norms and residuals on a rank's rows in training: "


def form_of(model: nn.Module) -> str:
    return explain(model).form


def ops_of_linears(model: nn.Module) -> list[str]:
    rows = [row for row in explain(model).rows if row.when == "forward" and row.asked != "collective"]
    return [row.op for row in rows]


def cut(group, name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, nn.Module]:
    """The model and the whole of it; the first call is behind it."""
    whole = build(name).to(dtype).train()  # fp64: gradients of two tokens are small
    model = parallelize(copy.deepcopy(whole), group, "auto")
    model(**BATCH)
    return model, whole


def ragged(group) -> list[str]:
    """Any number of rows, one too."""
    model, whole = cut(group, "Llama")
    for size in ((1, 1), (1, 2), (3, 5), (2, 12)):
        ids = torch.randint(1, 101, size, generator=torch.Generator().manual_seed(2))
        labels = {"labels": ids} if size[1] > 1 else {}  # of one token none would be left
        verify(model, whole, {"input_ids": ids, **labels, "use_cache": False}, tolerance=1e-5)
    return ops_of_linears(model)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.second_tier("3")
def test_any_number_of_rows(ranks, world_size):
    for used in ranks.run(ragged, world_size):
        assert set(used) == {"all_gather_matmul", "matmul_reduce_scatter"}


def whole_again(group) -> list[str]:
    """What users get is plain, but logits that are gathered when they are read (test_when_read.py); without
    gradients activations are whole."""
    model, whole = cut(group, "Qwen3")
    assert form_of(model).startswith(ROWS), form_of(model)
    output, expected = (each(**BATCH, output_hidden_states=True) for each in (model, whole))
    assert {type(t) for t in (output.loss, *output.hidden_states)} == {Tensor}
    assert isinstance(output.logits, GatheredWhenRead)
    assert_near(output.logits, expected.logits, "logits", 1e-4)
    for mine, theirs in zip(output.hidden_states, expected.hidden_states, strict=True):
        assert_near(mine, theirs, "hidden states", 1e-4)
    inner = model.model(input_ids=IDS).last_hidden_state
    layer = model.model.layers[0].mlp(torch.ones(1, 3, 32, dtype=torch.float64))
    assert type(inner) is Tensor and type(layer) is Tensor
    assert_near(inner, whole.model(input_ids=IDS).last_hidden_state, "the inner model", 1e-4)
    embeds = whole.get_input_embeddings()(IDS).detach()
    verify(model, whole, {"inputs_embeds": embeds, "labels": IDS}, tolerance=1e-5)
    with torch.no_grad():
        assert_near(model(**BATCH).logits, expected.logits, "without gradients", 1e-4)
    return ops_of_linears(model)


def test_what_users_get_is_plain_and_generation_is_on_whole_activations(ranks):
    for used in ranks.run(whole_again, 2):
        assert set(used) == {"replicated_matmul", "matmul_all_reduce"}


def checkpointed(group, reentrant: bool) -> None:
    model, whole = cut(group, "Llama")
    for each in (model, whole):
        each.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            each.enable_input_require_grads()
    verify(model, whole, BATCH | {"use_cache": False}, tolerance=1e-5)
    assert form_of(model).startswith(ROWS)


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_are_recomputed(ranks, reentrant):
    ranks.run(checkpointed, 2, reentrant)


def with_adapters(group) -> None:
    """Adapters of which one half is whole and reads rows."""
    targets = ["q_proj", "v_proj", "down_proj", "up_proj"]
    whole = get_peft_model(build("Llama"), LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"))
    for name, p in whole.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.1)
    model = parallelize(copy.deepcopy(whole), group, "auto")
    verify(model, whole, BATCH, tolerance=1e-5)
    verify(model, whole, BATCH, tolerance=1e-5)
    assert form_of(model)


def test_adapters_read_rows_as_whole_tensors(ranks):
    ranks.run(with_adapters, 2)


def in_bf16(group) -> None:
    model, whole = cut(group, "Llama", torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        verify(model, whole, BATCH, tolerance=0.1)


def test_autocast(ranks):
    ranks.run(in_bf16, 2)


def decisions(group) -> dict[str, str]:
    names = ("Llama tied", "Gemma3Text", "Qwen3Moe", "OPT", "T5")
    return {name: form_of(cut(group, name, torch.float32)[0]) for name in names}


def test_it_is_kept_where_more_linears_take_rows_than_other_code(ranks):
    said = ranks.run(decisions, 2)[0]
    # Gemma's embedding is whole and scales what it gives; Qwen3Moe's router reads all rows.
    for name in ("Llama tied", "Gemma3Text", "Qwen3Moe"):
        assert said[name].startswith(ROWS), (name, said[name])
    assert said["OPT"].startswith("whole everywhere: "), said["OPT"]


class Peeking(nn.Module):
    """A model that looks at what its own activations are."""

    def __init__(self, how: str = "not"):
        super().__init__()
        self.embed, self.up = nn.Embedding(101, 8), nn.Linear(8, 12)
        self.down, self.head = nn.Linear(12, 8), nn.Linear(8, 101)
        self.norm, self.peeks = nn.LayerNorm(8), how

    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.down(self.up(self.norm(x)).relu())
        if self.peeks == "list":
            x.tolist()
        if self.peeks == "type" and isinstance(x, RowShard):
            x = x * 2
        return self.head(self.norm(x))


def peeking(group, how: str) -> str:
    torch.manual_seed(0)
    whole = Peeking(how).double()
    model = parallelize(copy.deepcopy(whole), group, "auto")
    for _ in range(2):  # the first call decides
        verify(model, whole, IDS, tolerance=1e-10)
    return form_of(model)


def test_a_model_that_is_another_on_rows_stays_on_whole_activations(ranks):
    said = {how: ranks.run(peeking, 2, how)[0] for how in ("not", "list", "type")}
    assert said["not"].startswith(ROWS), said
    assert said["list"].startswith("whole everywhere: "), said
    assert said["type"] == "whole everywhere: the model's output would be another"


def compiled(group) -> None:
    """What torch.compile traces is on whole activations, once the first call has decided."""
    torch.manual_seed(0)
    whole = Peeking()
    model = parallelize(copy.deepcopy(whole), group, "auto")
    model(IDS).sum().backward()
    assert form_of(model).startswith(ROWS)
    torch.compiler.reset()
    model.compile(fullgraph=True, backend="aot_eager")
    verify(model, whole, IDS, tolerance=1e-5)


def test_compiled_models_are_on_whole_activations(ranks):
    ranks.run(compiled, 2)
