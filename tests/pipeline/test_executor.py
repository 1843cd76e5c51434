"""A model that is run stage by stage over ranks trains as the whole of it does."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pyruntime import comm
from pyruntime.comm import CommError
from pyruntime.llama import Llama
from pyruntime.llama.mixture import Mixture
from pyruntime.llama.model import ModelPart
from pyruntime.llama.presets import preset
from pyruntime.llama.stage import LlamaStage
from pyruntime.pipeline.actions import Schedule, with_transfers
from pyruntime.pipeline.executor import Pipeline
from pyruntime.pipeline.list_schedule import list_schedule
from pyruntime.pipeline.schedules import make_schedule
from pyruntime.pipeline.simulated import Costs
from pyruntime.pipeline.split import split_layers
from pyruntime.pipeline.weight_gradients import WeightGradients
from tests.ranks import without_processes
from tests.transports import TRANSPORTS, take

WIDTH, BATCH, LAYERS = 6, 3, 7  # no number of stages divides the layers


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def layers(frozen=()) -> list[nn.Module]:
    torch.manual_seed(3)
    made = [Layer().double() for _ in range(LAYERS)]
    for index in frozen:
        made[index].requires_grad_(False)
    return made


def batches(micro_batches: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64) for _ in range(micro_batches)]


def loss_of(output: torch.Tensor, micro_batch: int, part: int) -> torch.Tensor:
    return ((micro_batch + 1) * output.square()).mean()


def whole(micro_batches: int, frozen=()):
    """Losses, and gradients by layer and name, of two passes."""
    model = nn.Sequential(*layers(frozen))
    losses = []
    for _ in range(2):
        for index, x in enumerate(batches(micro_batches)):
            loss = loss_of(model(x), index, 0)
            loss.backward()
            losses.append(loss.item())
    return losses, {name: p.grad for name, p in model.named_parameters()}


def piped(group, transport, kind, micro_batches, virtual, frozen=()):
    take(group, transport)
    schedule = make_schedule(kind, group.size(), micro_batches, virtual=virtual)
    own = layers(frozen)
    runs = split_layers([1.0] * LAYERS, schedule.stages)
    modules = {
        stage: nn.Sequential(*[own[i] for i in runs[stage]]) for stage in schedule.stages_of(group.rank())
    }
    pipeline = Pipeline(schedule, modules, group, shapes=[(BATCH, WIDTH)], dtype=torch.float64)
    inputs = [[x] for x in batches(micro_batches)]
    losses = []
    for _ in range(2):
        losses += [float(parts[0]) for parts in pipeline.step(inputs, loss_of)]
    pipeline.close()
    gradients = {
        f"{runs[stage][int(name.split('.')[0])]}.{name.partition('.')[2]}": p.grad
        for stage, module in modules.items()
        for name, p in module.named_parameters()
    }
    return losses, gradients


def check(results, micro_batches, frozen=()):
    losses, gradients = whole(micro_batches, frozen)
    assert [each for each, _ in results if each] == [pytest.approx(losses, rel=1e-12)]
    found = {name: grad for _, part in results for name, grad in part.items()}
    assert found.keys() == gradients.keys()
    for name, grad in gradients.items():
        if grad is None:
            assert found[name] is None, name
            continue
        torch.testing.assert_close(
            found[name], grad, rtol=1e-11, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("kind", "virtual", "micro_batches"),
    [
        ("gpipe", 1, 3),
        ("gpipe", 1, 9),
        ("1f1b", 1, 1),
        ("1f1b", 1, 5),
        ("zb-h1", 1, 4),
        ("zb-h1", 1, 9),
    ],
)
@pytest.mark.second_tier(
    "gpipe-1-3-1",
    "gpipe-1-3-2",
    "gpipe-1-3-4",
    "gpipe-1-9-4",
    "1f1b-1-1-1",
    "zb-h1-1-4-1",
    "zb-h1-1-9-2",
    "zb-h1-1-9-3",
)
def test_equals_the_whole_model(ranks, world, kind, virtual, micro_batches):
    check(ranks.run(piped, world, "symmetric_memory", kind, micro_batches, virtual), micro_batches)


@pytest.mark.parametrize(("world", "virtual", "micro_batches"), [(2, 2, 4), (3, 2, 6), (2, 3, 2)])
@pytest.mark.second_tier(but=["2-3-2"])
def test_interleaved_stages_equal_the_whole_model(ranks, world, virtual, micro_batches):
    check(ranks.run(piped, world, "symmetric_memory", "interleaved", micro_batches, virtual), micro_batches)


@pytest.mark.parametrize(("world", "micro_batches"), [(2, 3), (2, 8), (3, 6)])
def test_v_placed_stages_equal_the_whole_model(ranks, world, micro_batches):
    check(ranks.run(piped, world, "symmetric_memory", "zb-v", micro_batches, 1), micro_batches)


STAGES_LAYERS = [range(1), range(1, 3), range(3, 6), range(6, 7)]
PATHS = {
    "skipped": ((0, 1, 3), (0, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 3)),
    "exchanged": ((0, 2, 1, 3), (0, 1, 3), (0, 1, 2, 3), (0, 2, 3), (0, 2, 1, 3)),
}


def skipping(group, transport, paths):
    """Losses of two steps and of an evaluation, and the gradients by layer and name."""
    take(group, transport)
    stages = range(len(STAGES_LAYERS))
    computes, _ = list_schedule(stages, paths, Costs(), [4] * 4)
    actions = with_transfers(computes, stages, paths)
    schedule = Schedule("mine", len(paths), 1, tuple(stages), actions, paths)
    own, mine = layers(), STAGES_LAYERS[group.rank()]
    stage = nn.Sequential(*[own[index] for index in mine])
    pipeline = Pipeline(
        schedule, {group.rank(): stage}, group, shapes=[(BATCH, WIDTH)], dtype=torch.float64, scale_grads=True
    )
    inputs = [[x] for x in batches(len(paths))]
    losses = pipeline.step(inputs, loss_of)
    with torch.no_grad():
        losses += pipeline.evaluate(inputs[:2], loss_of)
    losses += pipeline.step(inputs, loss_of)
    pipeline.close()
    gradients = {f"{mine[int(name[0])]}{name[1:]}": p.grad for name, p in stage.named_parameters()}
    return [float(parts[0]) for parts in losses], gradients


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("paths", PATHS)
def test_micro_batches_that_skip_or_exchange_stages_train_the_layers_that_they_meet(ranks, transport, paths):
    """As one rank does that takes each micro-batch through the layers of its path; gradients are the mean
    over all micro-batches. Evaluation goes through all layers."""
    model, paths = layers(), PATHS[paths]
    losses = []

    def loss(number, path):
        x = batches(len(paths))[number]
        for index in (index for stage in path for index in STAGES_LAYERS[stage]):
            x = model[index](x)
        return loss_of(x, number, 0)

    for step in range(2):
        for number, path in enumerate(paths):
            found = loss(number, path)
            (found / len(paths)).backward()
            losses.append(found.item())
        if step == 0:
            losses += [loss(number, range(4)).item() for number in range(2)]
    results = ranks.run(skipping, 4, transport, paths)
    assert results[3][0] == pytest.approx(losses, rel=1e-12)
    found = {name: gradient for _, part in results for name, gradient in part.items()}
    expected = {
        f"{i}.{name}": p.grad for i, layer in enumerate(model) for name, p in layer.named_parameters()
    }
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-11, atol=1e-12)
    again = ranks.run(skipping, 4, transport, paths)
    for (_, first), (_, second) in zip(results, again, strict=True):
        assert all(torch.equal(gradient, second[name]) for name, gradient in first.items())


@pytest.mark.parametrize("frozen", [range(4), range(2, 6), range(6)], ids=["first", "middle", "all but one"])
@pytest.mark.parametrize(("kind", "virtual"), [("1f1b", 1), ("zb-h1", 1), ("interleaved", 2)])
@pytest.mark.second_tier("1f1b-1-first", "1f1b-1-middle")
def test_frozen_stages_pass_gradients_on_and_have_none(ranks, kind, virtual, frozen):
    check(ranks.run(piped, 2, "symmetric_memory", kind, 4, virtual, frozen), 4, frozen)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("kind", "virtual"), [("1f1b", 1), ("zb-h1", 1), ("interleaved", 2)])
def test_over_any_transport(ranks, transport, kind, virtual):
    world = 4 if virtual == 1 else 3
    check(ranks.run(piped, world, transport, kind, 6, virtual), 6)


def test_more_messages_than_there_is_room_for(ranks):
    check(ranks.run(piped, 2, "symmetric_memory", "gpipe", 30, 1), 30)


def misfits(group):
    raised = []
    schedule = make_schedule("1f1b", 2, 2)
    modules = {group.rank(): nn.Linear(WIDTH, WIDTH)}
    cases = [
        (make_schedule("1f1b", 3, 2), modules, [(BATCH, WIDTH)]),
        (schedule, {1 - group.rank(): nn.Linear(2, 2)}, [(BATCH, WIDTH)]),
        (schedule, modules, [(BATCH, WIDTH), (1, WIDTH)]),
    ]
    for case, stages, shapes in cases:
        try:
            Pipeline(case, stages, group, shapes=shapes, dtype=torch.float32)
        except ValueError as error:
            raised.append(str(error))
    return raised


def test_what_does_not_fit_is_said(ranks):
    for rank, raised in enumerate(ranks.run(misfits, 2)):
        assert "is for 3 ranks, but the group has 2" in raised[0]
        assert (
            f"gives rank {rank} of the pipeline the stages [{rank}], but stages= has [{1 - rank}]"
            in raised[1]
        )
        assert "must have 1 shape(s), one for each slice" in raised[2]


def misused(group, width, count, has_loss):
    """A step that cannot be."""
    comm.set_deadline(group, 2.0)
    module = nn.Linear(WIDTH, WIDTH)
    schedule = make_schedule("1f1b", 2, 2)
    pipeline = Pipeline(schedule, {group.rank(): module}, group, shapes=[(BATCH, WIDTH)], dtype=torch.float32)
    inputs = [[torch.randn(width, WIDTH)]] * count or None
    try:
        pipeline.step(inputs, loss_of if has_loss else None)
    finally:
        pipeline.close()


@pytest.mark.parametrize(
    ("width", "count", "has_loss", "at", "sentence"),
    [
        (
            8,
            2,
            True,
            0,
            f"shapes= says that ({BATCH}, {WIDTH}) travels between stages, but stage 0 was given "
            f"(8, {WIDTH}) and returned (8, {WIDTH}), for micro-batch 0, slice 0; ",
        ),
        (BATCH, 3, True, 0, "takes inputs of 2 micro-batches of 1 slice(s)"),
        (BATCH, 0, True, 0, "takes inputs of 2 micro-batches of 1 slice(s)"),
        (BATCH, 2, False, 1, "Rank 1 has the last stage and needs loss=; pass"),
    ],
)
@pytest.mark.second_tier(but=["8-2-True-0-sentence0"])
def test_a_step_that_cannot_be_is_said_in_the_caller_s_words(ranks, width, count, has_loss, at, sentence):
    raised = ranks.run(misused, 2, width, count, has_loss, expect_errors=True)
    assert isinstance(raised[at], ValueError) and sentence in str(raised[at])
    assert isinstance(raised[1 - at], CommError)


def mean_and_sum(group):
    """Losses, and gradients of this rank, of both."""
    found = []
    for scale_grads in (False, True):
        torch.manual_seed(group.rank())
        module = nn.Linear(WIDTH, WIDTH)
        pipeline = Pipeline(
            make_schedule("zb-h1", 2, 4),
            {group.rank(): module},
            group,
            shapes=[(BATCH, WIDTH)],
            dtype=torch.float32,
            scale_grads=scale_grads,
        )
        losses = pipeline.step([[x.float()] for x in batches(4)], loss_of)
        pipeline.close()
        found.append((losses, module.weight.grad))
    return found


def test_gradients_are_a_sum_or_a_mean(ranks):
    for summed, averaged in ranks.run(mean_and_sum, 2):
        assert summed[0] == averaged[0]
        assert torch.equal(summed[1], averaged[1] * 4)


def faulty(group, fault):
    comm.set_deadline(group, 3.0)
    schedule = make_schedule("1f1b", 3, 4)
    module = nn.Linear(WIDTH, WIDTH)
    pipeline = Pipeline(schedule, {group.rank(): module}, group, shapes=[(BATCH, WIDTH)], dtype=torch.float32)
    inputs = [[torch.randn(BATCH, WIDTH)] for _ in range(4)]
    begin = time.monotonic()
    try:
        for step in range(200):
            if step == 10 and group.rank() == 1:
                if fault == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(6)
            begin = time.monotonic()
            pipeline.step(inputs, loss_of)
    except CommError as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "", "", 0.0


def test_a_killed_stage_ends_all(ranks):
    outcomes = ranks.launch(faulty, 3, "killed")
    for rank in (0, 2):
        name, message, seconds = outcomes[rank].value
        assert name == "PeerLost" and seconds < 3.5, (rank, message)
    causes = {outcomes[rank].value[1].split(" reports: ")[-1] for rank in (0, 2)}
    assert len(causes) == 1, causes


def test_a_stage_that_stops_ends_all_at_the_deadline(ranks):
    outcomes = ranks.launch(faulty, 3, "stopped")
    for rank in (0, 2):
        name, message, seconds = outcomes[rank].value
        assert name == "CommTimeout" and seconds < 4.5, (rank, message)
        assert re.search(r"rank [02] waiting for rank 1 to", without_processes(message)), message
    assert outcomes[1].value[0] == "CommTimeout", "it is told when it wakes up"


def split_backward(group):
    """What a backward pass of a Llama's layers leaves for later."""
    config = preset("debug", vocab_size=64, num_hidden_layers=3)
    model = Llama(config, None if group.size() == 1 else group, part=ModelPart((1,), False, False))
    stage = LlamaStage(model, [1], 2, [8])
    weights = WeightGradients([stage])
    rows = len(torch.arange(16).tensor_split(group.size())[group.rank()])
    y = stage(torch.randn(rows, config.hidden_size, requires_grad=True))
    with weights.deferred() as products:
        y.sum().backward()
    before = [p.grad is None for p in stage.parameters() if p.dim() == 2]
    weights.take(products)
    return len(products), before, [p.grad is not None for p in stage.parameters()]


@pytest.mark.parametrize("world", [1, 2])
def test_weight_gradients_of_all_linears_wait(ranks, world):
    for count, before, after in ranks.run(split_backward, world):
        assert count == 4 and all(before) and all(after)


def split_backward_of_experts(group, dtype):
    """How many products of a stage with experts wait in two passes. The gradients of its stacks have the bits
    of those that autograd adds, and all those of products at once."""
    mixture = Mixture(experts=5, per_token=2, width=40)
    config = preset("debug", vocab_size=64, num_hidden_layers=3, mixture=mixture)
    model = Llama(config, group, dtype=dtype, seed=1, part=ModelPart((1,), False, False))
    stage = LlamaStage(model, [1], 2, [8])
    stacks = {name: p for name, p in stage.named_parameters() if p.dim() == 3}
    rows = len(torch.arange(16).tensor_split(group.size())[group.rank()])
    generator = torch.Generator().manual_seed(group.rank())
    inputs = [torch.randn(rows, config.hidden_size, generator=generator).to(dtype) for _ in range(2)]
    found = []
    for how in ("by autograd", "at once", "later"):
        stage.zero_grad()
        weights = None if how == "by autograd" else WeightGradients([stage])
        waiting = []
        for x in inputs:
            y = stage(x.clone().requires_grad_())
            if weights is None or how == "at once":
                y.square().sum().backward()
                continue
            with weights.deferred() as products:
                y.square().sum().backward()
            assert all(p.grad is None for p in stacks.values())
            waiting.append(products)
        for products in waiting:
            weights.take(products)
        found.append({name: p.grad for name, p in stage.named_parameters()})
        if weights is not None:
            weights.close()
    by_autograd, at_once, later = found
    for name, gradient in later.items():
        assert torch.equal(gradient, at_once[name]), name
        assert name not in stacks or torch.equal(gradient, by_autograd[name]), name
    return [len(products) for products in waiting], sorted(name.rsplit(".", 1)[-1] for name in stacks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_gradients_of_experts_wait_and_are_the_same_bits(ranks, dtype):
    """Two linears of attention, and two stacks of matrices."""
    for world in (1, 2):
        for counts, stacks in ranks.run(split_backward_of_experts, world, dtype):
            assert counts == [4, 4] and stacks == ["down_proj", "gate_up_proj"]


# -- slices of sequences

SEQS, DEEP = (5, 1, 4), 4


def tokens(micro_batches):
    generator = torch.Generator().manual_seed(2)
    size = (micro_batches, 2, sum(SEQS))
    return torch.randint(64, size, generator=generator), torch.randint(64, size, generator=generator)


def llama(part=None):
    config = preset("debug", vocab_size=64, num_hidden_layers=DEEP, num_key_value_heads=2)
    return Llama(config, dtype=torch.float32, seed=1, part=part)


def gradients_of(model):
    return {name: p.grad for name, p in model.named_parameters()}


def sliced(group, kind, micro_batches):
    take(group, "symmetric_memory")
    schedule = make_schedule(kind, group.size(), micro_batches, slices=len(SEQS))
    run = split_layers([1.0] * DEEP, group.size())[group.rank()]
    model = llama(ModelPart(tuple(run), 0 in run, DEEP - 1 in run))
    stage = LlamaStage(model, run, 2, SEQS)
    shapes = [(2 * seq, model.config.hidden_size) for seq in SEQS]
    pipeline = Pipeline(schedule, {group.rank(): stage}, group, shapes=shapes, dtype=torch.float32)
    ids, labels = tokens(micro_batches)

    def loss(x, micro_batch, part):
        wanted = labels[micro_batch].split(SEQS, 1)[part].contiguous()
        return model.loss(x, wanted, torch.tensor(labels[micro_batch].numel()))

    pipeline.step([list(one.split(SEQS, 1)) for one in ids], loss)
    return gradients_of(model)


@pytest.mark.parametrize("kind", ["terapipe", "seq1f1b"])
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.second_tier("4-terapipe")
def test_gradients_of_slices_are_those_of_whole_sequences(ranks, world, kind):
    ids, labels = tokens(3)
    model = llama()
    for one, wanted in zip(ids, labels, strict=True):
        model(one, wanted).backward()
    found = {name: grad for part in ranks.run(sliced, world, kind, 3) for name, grad in part.items()}
    expected = gradients_of(model)
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert (found[name] - grad).norm() <= 2e-6 * grad.norm(), name


def closed_after_an_error(group):
    comm.set_deadline(group, 1.5)
    schedule = make_schedule("1f1b", 2, 4)
    stage = nn.Linear(WIDTH, WIDTH)
    pipeline = Pipeline(schedule, {group.rank(): stage}, group, shapes=[(BATCH, WIDTH)], dtype=torch.float32)
    inputs = [[torch.randn(BATCH, WIDTH)] for _ in range(4)]
    kept = None
    try:
        for step in range(5):
            if step == 3 and group.rank() == 1:
                time.sleep(4)
            pipeline.step(inputs, loss_of)
    except CommError as error:
        kept = error
    with pytest.raises(RuntimeError, match="make a new Pipeline"):
        pipeline.step(inputs, loss_of)
    time.sleep(1)
    comm.close(group)
    del pipeline
    told = type(kept).__name__
    del kept  # its traceback holds messages that were on their way
    torch.distributed.barrier(group)
    comm.set_deadline(group, 30)
    again = Pipeline(schedule, {group.rank(): stage}, group, shapes=[(BATCH, WIDTH)], dtype=torch.float32)
    again.step(inputs, loss_of)
    return told


def test_a_pipeline_is_made_anew_after_an_error(ranks):
    outcomes = ranks.launch(closed_after_an_error, 2)
    assert [outcome.value for outcome in outcomes] == ["CommTimeout"] * 2, outcomes


class Raised(Exception):
    """Of the user's code."""


def caught(group, fault):
    """Steps of which rank 1 leaves the third one by an exception, or rank 0 gives it too few inputs; it
    catches that and goes on. The steps that this rank has done, and its error with the seconds until then."""
    comm.set_deadline(group, 20.0)
    stage = nn.Linear(WIDTH, WIDTH)
    schedule = make_schedule("1f1b", 3, 4)
    pipeline = Pipeline(schedule, {group.rank(): stage}, group, shapes=[(BATCH, WIDTH)], dtype=torch.float32)
    step, done, begin = 0, [], time.monotonic()

    def hook(*_):
        if step == 2 and fault == "a stage raises" and group.rank() == 1:
            raise Raised("not a number")

    stage.register_forward_pre_hook(hook)
    for step in range(5):
        begin = time.monotonic()
        count = 3 if step == 2 and fault == "inputs" else 4
        try:
            pipeline.step([[torch.randn(BATCH, WIDTH)] for _ in range(count)], loss_of)
            done.append(step)
        except CommError as error:
            return done, str(error), time.monotonic() - begin
        except (Raised, ValueError) as error:
            if "Ranks disagree" in str(error):
                return done, str(error), time.monotonic() - begin
        except RuntimeError as error:
            assert "make a new Pipeline" in str(error)
            return done, str(error), 0.0
    return done, "", 0.0


def test_a_stage_that_raises_is_told_to_all(ranks):
    outcomes = [outcome.value for outcome in ranks.launch(caught, 3, "a stage raises")]
    for done, _, seconds in outcomes:
        assert done == [0, 1] and seconds < 5, outcomes
    for rank in (0, 2):
        sentence = "the forward of stage 1, micro-batch 0, of its pipeline ended by Raised: not a number."
        assert f"rank 1 reports: {sentence}" in outcomes[rank][1], outcomes


def test_a_step_that_one_rank_refused_and_left_out_is_told_to_all(ranks):
    outcomes = [outcome.value for outcome in ranks.launch(caught, 3, "inputs")]
    for done, error, seconds in outcomes:
        assert done == [0, 1] and seconds < 5, outcomes
        assert "Ranks disagree" in error and "after 1 pass that an exception ended" in error, outcomes
