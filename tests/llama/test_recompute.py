"""What a layer keeps for its backward pass, and what that computes again in place of it."""

import ctypes
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pyruntime import comm
from pyruntime.llama import Llama
from pyruntime.llama.presets import preset
from pyruntime.plan.memory import layer_activations
from pyruntime.train.planned import TRAINER, of_llama
from tests.llama.cases import CASES
from tests.llama.test_grid import grid
from tests.transports import take

BATCH, SEQ = 16, 128


def allocated_bytes() -> int:
    """That the C library's heap has handed out."""

    class Info(ctypes.Structure):
        _fields_ = [
            (name, ctypes.c_size_t)
            for name in (
                "arena", "ordblks", "smblks", "hblks", "hblkhd",
                "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
            )
        ]  # fmt: skip

    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = Info
    info = ask()
    return info.uordblks + info.hblkhd


def kept_bytes(config, **options) -> int:
    """Of a forward pass, until its backward pass."""
    model = Llama(config, **options)
    ids = torch.randint(config.vocab_size, (BATCH, SEQ))
    model.hidden(ids).sum().backward()  # what is made once is there
    before = allocated_bytes()
    out = model.hidden(ids)
    kept = allocated_bytes() - before
    del out
    return kept


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.second_tier(but=["dtype0-none"])
def test_a_layer_keeps_what_the_formula_says(recompute, dtype):
    few, many = (
        preset("debug", num_hidden_layers=layers, hidden_size=96, intermediate_size=200) for layers in (2, 6)
    )
    options = {"recompute": recompute, "dtype": dtype}
    measured = (kept_bytes(many, **options) - kept_bytes(few, **options)) / 4
    of_bf16 = layer_activations(of_llama("", many), BATCH * SEQ, rules=TRAINER, recompute=recompute)
    statistics = 0 if recompute == "full" else (2 + many.num_attention_heads) * BATCH * SEQ * 4
    assert measured == pytest.approx(of_bf16 * dtype.itemsize / 2 + statistics, rel=0.01, abs=30_000)


class Operators(TorchDispatchMode):
    """Counts what runs."""

    def __init__(self):
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket._qualified_op_name] += 1
        return func(*args, **(kwargs or {}))


def operators_of_backward(config, recompute) -> Counter[str]:
    model = Llama(config, recompute=recompute)
    ids = torch.randint(config.vocab_size, (2, 9))
    loss = model(ids, ids)
    with Operators() as operators:
        loss.backward()
    return operators.counts


def test_selective_recomputation_runs_norms_and_swiglu_again_and_nothing_else():
    config = CASES["plain"]
    more = operators_of_backward(config, "selective") - operators_of_backward(config, "none")
    more = Counter({name: count for name, count in more.items() if name.startswith("pyruntime::")})
    assert more == {"pyruntime::rms_norm": 2 * 2, "pyruntime::swiglu": 2}


def bytes_of_steps(group, config, mesh, options) -> list[float]:
    """Bytes that this rank reads over its groups in a step of each kind of recomputation."""
    groups = [group] if mesh is None else [grid(*mesh)[name] for name in grid(*mesh).mesh_dim_names]
    for each in groups:
        take(each, "process_group" if options else "symmetric_memory")
    ids, found = torch.randint(config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(0)), []
    for recompute in ("none", "selective", "full"):
        model = Llama(config, group if mesh is None else grid(*mesh), recompute=recompute, **options)
        before = sum(comm.stats(each).bytes for each in groups)
        model(ids, ids).backward()
        found.append(sum(comm.stats(each).bytes for each in groups) - before)
    return found


@pytest.mark.parametrize(
    ("world", "mesh", "options"),
    [(2, None, {}), (2, None, {"slices": 2}), (2, None, {"keep_gathered": True}), (4, (2, 2), {})],
    ids=str,
)
@pytest.mark.second_tier("2-None-{}", "4-(2, 2)-{}")
def test_selective_recomputation_exchanges_nothing_twice(ranks, world, mesh, options):
    for none, selective, full in ranks.run(bytes_of_steps, world, CASES["plain"], mesh, options):
        assert 0 < none == selective < full


def test_another_word_is_refused():
    with pytest.raises(ValueError, match="recompute=True is none of none, selective, full"):
        Llama(CASES["plain"], recompute=True)


def test_selective_recomputation_is_refused_under_the_compiler():
    model = torch.compile(Llama(CASES["plain"], recompute="selective"), backend="eager", fullgraph=True)
    ids = torch.randint(101, (1, 8))
    with pytest.raises(Exception, match=r"recompute='selective' does not run under torch\.compile"):
        model(ids, ids)
