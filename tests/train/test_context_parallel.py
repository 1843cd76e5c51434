"""Training with sequences that are cut over ranks is training on one rank, in every layout and variant; with
the other axes: test_parity.py."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from pyruntime.comm import Runtime
from pyruntime.context import Context, positions
from pyruntime.llama import Llama, generate
from pyruntime.llama.presets import preset
from pyruntime.train import checkpoint_folder
from tests.train import jobs

JOB = {"batch_size": 4, "micro_batch_size": 2, "seq_len": 32}


@pytest.fixture(scope="module")
def whole(ranks, tmp_path_factory):
    """A job, and what one rank makes of it."""
    config = jobs.job(tmp_path_factory.mktemp("whole"), steps=4, val_every=2, **JOB)
    jobs.prepare(config)
    return config, ranks.run(jobs.history, 1, config)[0]


@pytest.mark.parametrize(
    ("world", "cp", "dp", "zero", "layout", "variant"),
    [
        (4, 4, 1, 1, "zigzag", "ring"),
        (4, 4, 1, 3, "striped", "all_gather_kv"),
        (4, 2, 2, 0, "contiguous", "ulysses"),
        (4, 2, 2, 2, "zigzag", "auto"),
    ],
)
@pytest.mark.second_tier(but=["4-2-2-0-contiguous-ulysses"])
def test_loss_curves_equal_those_of_one_rank(ranks, whole, world, cp, dp, zero, layout, variant):
    config, expected = whole
    config = jobs.changed(config, "parallel", cp=cp, dp=dp, zero=zero)
    config = jobs.changed(config, "context", layout=layout, variant=variant)
    jobs.check_curves(ranks.run(jobs.history, world, config), expected)


@pytest.mark.parametrize(
    ("world", "parallel", "layout", "recompute"),  # and the rest tensor parallel
    [
        (4, {"tp_slices": 2, "zero": 2}, "zigzag", "selective"),
        (4, {"tp_slices": 3, "zero": 0}, "striped", "full"),
        (8, {"tp_slices": 2, "dp": 2, "zero": 1}, "striped", "none"),
        (8, {"tp_slices": 2, "pp": 2}, "zigzag", "full"),
    ],
)
@pytest.mark.second_tier(but=["4-parallel0-zigzag-selective"])
def test_slices_inside_a_tensor_parallel_group(ranks, whole, world, parallel, layout, recompute):
    config, expected = whole
    config = jobs.changed(config, "parallel", cp=2, **parallel)
    config = jobs.changed(config, "context", layout=layout)
    config = jobs.changed(config, "train", activation_checkpointing=recompute)
    jobs.check_curves(ranks.run(jobs.history, world, config), expected)


@pytest.mark.parametrize(
    ("layout", "variant", "pipeline"),
    [
        ("zigzag", "ring", {"kind": "terapipe", "slices": 2}),
        ("striped", "all_gather_kv", {"kind": "terapipe", "slices": 5}),
        ("striped", "ulysses", {"kind": "seq1f1b", "slices": 3, "slice_tokens": (14, 4, 14)}),
    ],
)
@pytest.mark.second_tier(but=["striped-ulysses-pipeline2"])
def test_slices_of_a_pipeline(ranks, whole, layout, variant, pipeline):
    config, expected = whole
    config = jobs.changed(config, "parallel", cp=2, pp=2)
    config = jobs.changed(config, "context", layout=layout, variant=variant)
    config = jobs.changed(config, "pipeline", **pipeline)
    jobs.check_curves(ranks.run(jobs.history, 4, config), expected)


def test_a_second_run_is_bitwise_the_same(ranks, tmp_path):
    config = jobs.job(tmp_path, steps=4, dtype="bf16", **JOB)
    config = jobs.changed(config, "parallel", cp=2)
    jobs.prepare(config)
    first, second = (ranks.run(jobs.history, 4, config)[0] for _ in range(2))
    assert jobs.curve(first, "loss") == jobs.curve(second, "loss")


def test_a_checkpoint_goes_on_with_other_ranks(ranks, tmp_path):
    config = jobs.job(tmp_path, steps=3, val_every=0, **JOB)
    folder = jobs.prepare(config)
    ranks.run(jobs.history, 4, jobs.changed(config, "parallel", cp=2, dp=2, zero=2))
    saved = checkpoint_folder.find(folder)
    states = [
        ranks.run(jobs.full_state, world, jobs.changed(config, "parallel", cp=cp, dp=dp), saved)[0]
        for world, cp, dp in [(1, 1, 1), (4, 2, 2), (4, 4, 1), (4, 2, 1)]
    ]
    for state in states[1:]:
        assert state.keys() == states[0].keys()
        assert all(torch.equal(state[name], states[0][name]) for name in state)


def losses(group, ids, labels):
    """Of one sequence in which labels are left out, most of them on one rank, and its gradient."""
    context = Context(group) if group.size() > 1 else None
    model = Llama(preset("debug", vocab_size=64, max_position_embeddings=64), seed=1, context=context)
    if context is not None:
        ids, labels = context.shard(ids), context.shard(labels)
    loss = model(ids, labels)
    loss.backward()
    return float(loss), model.embed.weight.grad, model(ids).detach()


def test_labels_that_are_left_out_count_nowhere(ranks):
    ids = torch.randint(64, (2, 24), generator=torch.Generator().manual_seed(0))
    labels = ids.roll(-1, 1)
    labels[:, :5] = labels[0, 8:] = -100
    loss, gradient, logits = ranks.run(losses, 1, ids, labels)[0]
    parts = ranks.run(losses, 3, ids, labels)
    assert sum(part[0] for part in parts) / 3 == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(sum(part[1] for part in parts) / 3, gradient, rtol=1e-4, atol=1e-6)
    order = positions("zigzag", 24, 3).flatten().argsort()
    found = torch.cat([part[2] for part in parts], 1)[:, order]
    torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-5)


def generated(group, ids):
    config = preset("debug", vocab_size=64, max_position_embeddings=64)
    model = Llama(config, seed=1, context=Context(group) if group.size() > 1 else None)
    return generate(model, ids, 5, temperature=0.0, use_cache=False)


def test_every_rank_generates_for_itself(ranks):
    ids = torch.randint(64, (1, 9), generator=torch.Generator().manual_seed(0))
    alone = ranks.run(generated, 1, ids)[0]
    assert all(torch.equal(tokens, alone) for tokens in ranks.run(generated, 2, ids))


def merged(_group):
    mesh = init_device_mesh("cpu", (1, 2, 2, 1), mesh_dim_names=("pp", "dp", "cp", "tp"))
    with Runtime(mesh) as runtime:
        found = runtime.replicas.mesh.mesh_dim_names, runtime.replicas.mesh.mesh.tolist()
    wrong = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "tp", "cp"))
    with pytest.raises(ValueError, match="let cp follow the last of them"):
        _ = Runtime(wrong).replicas
    return found


def test_gradients_are_reduced_over_data_and_context_ranks_alone(ranks):
    assert ranks.run(merged, 4) == [(("dp_cp",), [0, 1, 2, 3])] * 4
