"""Causal slices inside a tensor-parallel group: against transformers, from run to run, and their order."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import transformers
from torch.distributed.device_mesh import DeviceMesh

import pyruntime
from pyruntime.comm import group_rank
from pyruntime.context import Context, positions
from pyruntime.llama import Llama, generate
from pyruntime.llama.slices import MOST, lengths, order, places
from pyruntime.nn.sliced import MOST_GATHERED_AGAIN
from tests.llama.cases import CASES, continue_text, logits_loss_gradients
from tests.llama.test_model import assert_same
from tests.transports import on_transport, take

SLOTS = 4  # kSlots of csrc/transport/flights.h


@pytest.mark.parametrize(
    ("slices", "again"), [(2, False), (3, False), (4, False), (MOST_GATHERED_AGAIN, True)]
)
def test_no_flight_begins_before_the_one_four_before_is_over(slices, again):
    """In both directions: a group has so many slots, taken in turn. again: the backward of `multiply` also
    begins to gather a column's rows again, until that of `begin`."""
    actions = list(order(6, slices))
    assert len(actions) == len(set(actions)) == 4 * 6 * slices
    for kinds, way in (("bmsf", actions), ("fsmb", actions[::-1])):
        # Forward: begin .. multiply and scatter .. finish. Backward: finish .. scatter and multiply .. begin.
        begun, over = [], set()
        for action in way:
            kind = kinds.index(action.kind[0])
            flights = [(kind // 2, action.half, action.part)]
            if again and kinds[kind] in "mb" and way is not actions:
                flights.append((MOST, action.half, action.part))
            for flight in flights:
                if kind % 2 == 0:
                    begun.append(flight)
                    assert len(begun) <= SLOTS or begun[-1 - SLOTS] in over
                else:
                    assert flight in begun
                    over.add(flight)
        assert over == set(begun)


@pytest.mark.parametrize("slices", range(2, MOST + 1))
def test_a_slice_computes_between_every_two_steps_of_another(slices):
    """What travels has work of another slice to travel under, but at both ends."""
    actions = list(order(6, slices))
    at = {action: index for index, action in enumerate(actions)}
    for action in actions:
        following = {"begin": "multiply", "scatter": "finish"}.get(action.kind)
        if following is None or action.half in (0, 5):
            continue
        end = at[type(action)(following, action.half, action.part)]
        kinds = {other.kind for other in actions[at[action] + 1 : end] if other.part != action.part}
        assert kinds & {"multiply", "scatter"}


@pytest.mark.parametrize(
    ("seq", "slices", "world", "expected"),
    [
        (47, 2, 2, (24, 23)),
        (47, 4, 3, (12, 12, 12, 11)),
        (7, 4, 2, (2, 2, 3)),
        (3, 2, 4, (3,)),
        (64, 4, 4, (16, 16, 16, 16)),
    ],
)
def test_all_slices_but_the_last_are_multiples_of_the_ranks(seq, slices, world, expected):
    assert lengths(seq, slices, world) == expected


def test_rows_of_slices_are_as_many_on_every_rank_as_of_whole_sequences():
    parts = lengths(47, 4, 4)
    assert parts == (12, 12, 12, 11)
    rows = places(3, parts, 4, torch.device("cpu"))
    assert sorted(rows.tolist()) == list(range(3 * 47))
    # Rank 1 has the second quarter of every slice: of the first, 12 tokens of each sequence, rows 9 to 17.
    assert rows.tensor_split(4)[1][:9].tolist() == [9, 10, 11, 47, 48, 49, 50, 51, 52]


@pytest.fixture
def reference(tmp_path):
    """A folder with random weights, ids and labels, and what transformers makes of them."""

    def make(case: str, batch: int, seq: int):
        config = CASES[case]
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config.to_hf()))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.1)
        model.save_pretrained(tmp_path)
        ids, labels = torch.randint(config.vocab_size, (2, batch, seq)).unbind()
        labels = labels.masked_fill(torch.rand(batch, seq) < 0.2, -100)
        exact = model(ids).logits
        loss = torch.nn.functional.cross_entropy(exact.flatten(0, 1), labels.flatten())
        loss.backward()
        return tmp_path, ids, labels, exact, loss, {n: p.grad for n, p in model.named_parameters()}

    return make


def calls_of_linears(group, config):
    """How often each linear was called in a forward pass."""
    model = Llama(config, group, slices=2)
    calls: dict[str, int] = {}
    for name, module in model.named_modules():
        if name.endswith(("qkv", "out", "gate_up", "down")):
            module.register_forward_pre_hook(
                lambda module, _, name=name: calls.update({name: calls.get(name, 0) + 1})
            )
    model(torch.zeros(1, 24, dtype=torch.long), torch.zeros(1, 24, dtype=torch.long))
    return calls


def test_every_step_is_a_call_of_its_linear(ranks):
    """Whose hooks wait for the weights that data parallelism has on their way."""
    calls = ranks.run(calls_of_linears, 2, CASES["plain"])[0]
    names = [f"layers.{layer}.{name}" for layer in (0, 1) for name in ("qkv", "out", "gate_up", "down")]
    assert calls == dict.fromkeys(names, 4)


def compiled(group, config):
    model = torch.compile(Llama(config, group, slices=2), backend="eager", fullgraph=True)
    try:
        model(torch.zeros(1, 24, dtype=torch.long))
    except Exception as error:
        return str(error)


def refusals(group, config):
    """With the group as that of the tensor-parallel ranks and as that of the context."""
    zigzag, contiguous = Context(group), Context(group, "contiguous")
    found = []
    for options in (
        {"slices": 5},
        {"slices": 3, "keep_gathered": False},
        {"slices": 3, "context": zigzag},
        {"slices": 2, "context": contiguous},
    ):
        try:
            Llama(config, group, device="meta", **options)
        except ValueError as error:
            found.append(str(error))
    ids = torch.zeros(1, 18, dtype=torch.long)
    with pytest.raises(ValueError, match="only if 8 divides the tokens, not 36; use 40 tokens"):
        Llama(config, group, slices=2, context=zigzag)(ids)
    return found


def test_what_does_not_go_with_slices_is_refused(ranks):
    found = ranks.run(refusals, 2, CASES["plain"])[0]
    assert found == [
        "slices=5; use 1 to 4.",
        "slices=3 need keep_gathered; do not pass keep_gathered=False with more than 2.",
        "slices=3 are too many with context ranks and layout='zigzag', which allows at most 2: each must lie "
        "before the next on all ranks; use layout='striped', or fewer slices.",
        "slices=2 are too many with context ranks and layout='contiguous', which allows at most 1: each must "
        "lie before the next on all ranks; use layout='striped', or fewer slices.",
    ]
    with pytest.raises(ValueError, match="without tensor parallelism or experts"):
        Llama(CASES["plain"], slices=2)
    assert "slices=2 do not run under torch.compile" in ranks.run(compiled, 2, CASES["plain"])[0]


def fault_case(group, transport, fault, where):
    """(type, message) of this rank's error; rank 1 fails where another slice's rows are under way."""
    take(group, transport)
    model = Llama(CASES["plain"], group, slices=2)
    ids = torch.zeros(1, 24, dtype=torch.long)
    model(ids, ids).backward()
    pyruntime.comm.set_deadline(group, 1.5)

    def fail(*_):
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3.0)

    if group_rank(group) == 1:
        if where == "forward":
            model.layer(1).down.register_forward_pre_hook(fail)
        else:
            model.layer(1).mlp_norm.weight.register_hook(fail)
    try:
        model(ids, ids).backward()
        # Gradients of norms come last: a rank that is late there is late for the next pass.
        model(ids, ids)
    except pyruntime.CommError as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize(
    ("transport", "fault", "where", "error"),
    [
        ("symmetric_memory", "killed", "forward", "PeerLost"),
        ("process_group", "killed", "backward", "PeerLost"),
        ("process_group", "late", "forward", "CommTimeout"),
    ],
)
@pytest.mark.second_tier(but=["symmetric_memory-killed-forward-PeerLost"])
def test_a_fault_between_two_steps_ends_in_a_named_error(ranks, transport, fault, where, error):
    outcomes = ranks.launch(fault_case, 2, transport, fault, where)
    found, message = outcomes[0].value
    assert found == error and "rank 1" in message, message
    if fault == "killed":
        assert outcomes[1].exit_code == -signal.SIGKILL


def sliced(group, transport, directory, ids, labels, options):
    """Twice, which must give the same bits."""
    first, second = (
        on_transport(group, transport, logits_loss_gradients, directory, ids, labels, options) for _ in "12"
    )
    torch.testing.assert_close(second, first, rtol=0, atol=0)
    return first


@pytest.mark.parametrize(
    ("case", "tp", "transport", "options"),
    [
        ("plain", 2, "symmetric_memory", {"slices": 2}),
        ("plain", 2, "process_group", {"slices": 2}),
        ("gqa-llama3-tied", 4, "symmetric_memory", {"slices": 4}),
        ("gqa-llama3-tied", 4, "process_group", {"slices": 4}),
        ("gqa-linear-bias-wide", 4, "hierarchical", {"slices": 3}),
        ("gqa-linear-bias-wide", 2, "process_group", {"slices": 2, "recompute": "full"}),
        ("gqa-llama3-tied", 4, "symmetric_memory", {"slices": 2, "recompute": "selective"}),
        ("plain", 4, "hierarchical", {"slices": 4, "recompute": "full", "tier": "unfused"}),
    ],
)
@pytest.mark.second_tier(but=["plain-2-symmetric_memory-options0"])
def test_logits_loss_and_gradients_are_those_of_transformers(ranks, reference, case, tp, transport, options):
    directory, ids, labels, exact, exact_loss, gradients = reference(case, 3, 47)
    results = ranks.run(sliced, tp, transport, directory, ids, labels, options)
    for rank, (logits, loss, _) in enumerate(results):
        assert_same(logits, exact, f"logits of rank {rank}")
        assert abs(loss - exact_loss) < 1e-5
        assert torch.equal(loss, results[0][1]), "the loss must be bitwise the same on every rank"
    for name, gradient in results[0][2].items():
        assert_same(gradient, gradients[name], f"gradient of {name}")


_contexts: dict[str, pyruntime.comm.Group] = {}


def tp_and_cp() -> tuple:
    """Groups (tp, cp) of two ranks each, of the pool's four; made once."""
    if not _contexts:
        mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("cp", "tp"))
        _contexts.update({name: mesh.get_group(name) for name in ("tp", "cp")})
    return _contexts["tp"], _contexts["cp"]


def sliced_over_context(group, transport, directory, ids, labels, layout, options):
    """This rank's share of logits, loss and, on the first tensor-parallel rank, gradients; twice, which must
    give the same bits."""
    tp, cp = tp_and_cp()
    for each in (tp, cp):
        take(each, transport)
    context = Context(cp, layout)
    ids, labels = context.shard(ids), context.shard(labels)
    options = {**options, "context": context}
    first, second = (logits_loss_gradients(tp, directory, ids, labels, options) for _ in "12")
    torch.testing.assert_close(second, first, rtol=0, atol=0)
    return first


@pytest.mark.parametrize(
    ("case", "layout", "seq", "transport", "options"),
    [
        ("plain", "striped", 46, "process_group", {"slices": 2}),
        ("plain", "zigzag", 48, "symmetric_memory", {"slices": 2}),
        ("gqa-llama3-tied", "striped", 38, "process_group", {"slices": 4}),
        ("gqa-linear-bias-wide", "zigzag", 40, "process_group", {"slices": 2, "recompute": "full"}),
        ("gqa-linear-bias-wide", "striped", 42, "symmetric_memory", {"slices": 3, "recompute": "selective"}),
    ],
)
@pytest.mark.second_tier(but=["plain-zigzag-48-symmetric_memory-options1"])
def test_slices_of_sequences_that_are_cut_over_ranks(ranks, reference, case, layout, seq, transport, options):
    directory, ids, labels, exact, exact_loss, gradients = reference(case, 3, seq)
    results = ranks.run(sliced_over_context, 4, transport, directory, ids, labels, layout, options)
    order = positions(layout, seq, 2).flatten().argsort()
    for tp in (0, 1):
        logits = torch.cat([results[tp][0], results[2 + tp][0]], 1)[:, order]
        assert_same(logits, exact, f"logits of tensor-parallel rank {tp}")
        assert abs((results[tp][1] + results[2 + tp][1]) / 2 - exact_loss) < 1e-5
    for name, gradient in gradients.items():
        assert_same((results[0][2][name] + results[2][2][name]) / 2, gradient, f"gradient of {name}")


def test_sequences_are_continued_whole(ranks):
    """Without a cache a forward pass has the rows of all sequences in their order."""
    ids = torch.randint(101, (3, 9), generator=torch.Generator().manual_seed(0))
    options = {"use_cache": False, "temperature": 0.0}
    whole = ranks.run(continue_text, 2, CASES["plain"], ids, 4, options)[0]
    assert torch.equal(ranks.run(continue_sliced, 2, CASES["plain"], ids, 4, options)[0], whole)


def continue_sliced(group, config, ids, new_tokens, options):
    return generate(Llama(config, group, seed=5, slices=2), ids, new_tokens, **options)
