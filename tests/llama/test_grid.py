"""The model over two axes of tensor parallelism, x and y, against the model of one rank."""

import dataclasses
import functools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from pyruntime import comm
from pyruntime.llama import Llama, generate, load_hf, save_hf
from pyruntime.plan.cluster import find_cluster
from pyruntime.plan.mesh import Job, Mesh
from pyruntime.plan.traffic import bytes_of_step
from pyruntime.train.planned import of_llama
from tests.llama.cases import CASES, full_tensors, logits_loss_gradients
from tests.transports import take

BATCH, SEQ = 3, 47
CONFIGS = {
    "ragged": dataclasses.replace(CASES["plain"], hidden_size=58, head_dim=8),
    "biased": CASES["gqa-linear-bias-wide"],
    "tied": CASES["gqa-llama3-tied"],
}


@functools.cache
def grid(x, y):
    return init_device_mesh("cpu", (x, y), mesh_dim_names=("tp", "tp_y"))


def on_grid(group, sizes, directory, ids, labels, options):
    return logits_loss_gradients(grid(*sizes), directory, ids, labels, options)


def written(config, folder):
    """A folder with a model of which every weight matters."""
    model = Llama(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.1)
    save_hf(model, folder)
    return folder


@pytest.mark.parametrize(
    ("sizes", "name", "options"),
    [
        ((1, 4), "ragged", {}),
        ((2, 2), "ragged", {"recompute": "selective"}),
        ((1, 4), "biased", {"recompute": "full"}),
        ((2, 2), "biased", {}),
        ((2, 2), "tied", {"keep_gathered": True}),
    ],
    ids=str,
)
@pytest.mark.second_tier("(1, 4)-ragged-{}")
def test_logits_loss_and_gradients_are_those_of_one_rank(ranks, tmp_path, sizes, name, options):
    config = CONFIGS[name]
    written(config, tmp_path)
    ids = torch.randint(config.vocab_size, (BATCH, SEQ))
    labels = torch.randint(config.vocab_size, (BATCH, SEQ)).masked_fill(torch.rand(BATCH, SEQ) < 0.2, -100)
    logits, loss, gradients = logits_loss_gradients(None, tmp_path, ids, labels)
    results = ranks.run(on_grid, 4, sizes, tmp_path, ids, labels, options)
    for found, found_loss, _ in results:
        torch.testing.assert_close(found, logits, rtol=1e-5, atol=1e-5 * float(logits.abs().max()))
        assert abs(found_loss - loss) < 1e-5
        assert torch.equal(found_loss, results[0][1])
    assert results[0][2].keys() == gradients.keys()
    for key, value in gradients.items():
        largest = float(value.abs().max())
        torch.testing.assert_close(results[0][2][key], value, rtol=0, atol=1e-5 * max(largest, 1e-2), msg=key)


def saved_and_continued(group, config, source, target, ids):
    made = Llama(config, grid(2, 2), seed=3)
    save_hf(load_hf(source, grid(2, 2)), target)
    return full_tensors(made), generate(load_hf(source, grid(2, 2)), ids, 6, temperature=0)


def test_weights_begin_load_save_and_speak_as_those_of_one_rank(ranks, tmp_path):
    config = CONFIGS["ragged"]
    source, target = written(config, tmp_path / "source"), tmp_path / "target"
    ids = torch.randint(config.vocab_size, (2, 5))
    initial, again = full_tensors(Llama(config, seed=3)), full_tensors(load_hf(source))
    words = generate(load_hf(source), ids, 6, temperature=0)
    for made, continued in ranks.run(saved_and_continued, 4, config, source, target, ids):
        assert all(torch.equal(made[name], value) for name, value in initial.items())
        assert torch.equal(continued, words)
    read = full_tensors(load_hf(target))
    assert all(torch.equal(read[name], value) for name, value in again.items())


def test_slices_with_y_are_refused(ranks):
    (message, *_) = ranks.run(refusal_of_slices, 4)
    assert message == "slices=2 cannot be combined with features cut over y; leave it at 1."


def refusal_of_slices(group):
    with pytest.raises(ValueError, match="slices") as refused:
        Llama(CONFIGS["tied"], grid(2, 2), slices=2)
    return str(refused.value)


def bytes_of_a_step(group, config, sizes, ids):
    """That this rank reads over x and over y in a forward and a backward pass."""
    mesh = grid(*sizes)
    for name in mesh.mesh_dim_names:
        take(mesh[name], "symmetric_memory")
    model = Llama(config, mesh)
    before = [comm.stats(mesh[name]).bytes for name in mesh.mesh_dim_names]
    model(ids, ids).backward()
    after = [comm.stats(mesh[name]).bytes for name in mesh.mesh_dim_names]
    return [int(late - early) for early, late in zip(before, after, strict=True)]


@pytest.mark.parametrize("sizes", [(2, 2), (1, 4), (4, 1)], ids=str)
@pytest.mark.second_tier("(4, 1)")
def test_bytes_over_each_axis_are_those_of_the_formulas(ranks, sizes):
    batch, seq = 2, 48
    small = dataclasses.replace(CASES["plain"], num_hidden_layers=1)
    large = dataclasses.replace(small, num_hidden_layers=3)
    ids = torch.randint(small.vocab_size, (batch, seq))
    of_small, of_large = (ranks.run(bytes_of_a_step, 4, config, sizes, ids) for config in (small, large))
    x, y = sizes
    job = Job(of_llama("", small), find_cluster("dgx-h100"), 4, batch, seq)
    expected = bytes_of_step(job, Mesh(x=x, y=y, micro_batch=batch), element=4)
    # Of two norms: 4 bytes a row, forward and back, over y; the gradients of their weights over x.
    of_norms = {
        "tp": 2 * 2 * (x - 1) / x * 4 * small.hidden_size / y,
        "y": 2 * 2 * (y - 1) * 4 * batch * seq / x,
    }
    for less, more in zip(of_small, of_large, strict=True):
        for axis, one, three in zip(("tp", "y"), less, more, strict=True):
            assert (three - one) / 2 == expected[axis] + of_norms[axis]
