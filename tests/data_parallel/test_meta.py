"""A model that begins on meta is sharded without any rank holding all of it."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import pyruntime

SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
BUCKET = 1 << 12


def built(folder=None) -> nn.Module:
    transformers = importlib.import_module("transformers")
    if folder is not None:
        return transformers.AutoModelForCausalLM.from_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SIZES, **HEADS))


@pytest.fixture
def folder(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **HEADS)).save_pretrained(
        tmp_path / "whole", max_shard_size="20KB"
    )
    return str(tmp_path / "whole")


def resident(model) -> int:
    """Bytes of parameters that this rank has."""
    return sum(p.untyped_storage().nbytes() for p in model.parameters())


def train(model, optimizer, rank) -> list[float]:
    losses = []
    for step in range(3):
        ids = torch.randint(0, 96, (2, 12), generator=torch.Generator().manual_seed(10 * step + rank))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def begun(group, how, folder, saved):
    rank, mesh = dist.get_rank(group), DeviceMesh.from_group(group, "cpu")
    if how == "everywhere real" or (how == "first" and rank == 0):
        model = built(folder)
    else:
        with pyruntime.on_meta():
            model = built()
        assert all(p.is_meta for p in model.parameters()) and not any(b.is_meta for b in model.buffers())
    if how == "adapters":
        model = built(folder)
    handle = pyruntime.shard(model, mesh, stage=3, bucket_bytes=BUCKET)
    held, said = resident(model), ""
    if how in ("files", "checkpoint"):
        with pytest.raises(RuntimeError, match="began on meta, and no values have been loaded") as caught:
            model(input_ids=torch.zeros(1, 4, dtype=torch.long))
        said = str(caught.value)
    if how == "files":
        handle.load_pretrained(folder)
    elif how == "checkpoint":
        state = {"model": handle.state_dict()}
        dcp.load(state, checkpoint_id=saved, process_group=group)
    if how != "checkpoint":
        held = max(held, resident(model))
    losses = train(model, handle.of_torch(torch.optim.SGD, lr=0.5), rank)
    handle.close()
    return losses, held, said


def save(group, folder, saved):
    handle = pyruntime.shard(built(folder), DeviceMesh.from_group(group, "cpu"), stage=3, bucket_bytes=BUCKET)
    dcp.save({"model": handle.state_dict()}, checkpoint_id=saved, process_group=group)
    handle.close()


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("how", ["files", "first", "checkpoint"])
@pytest.mark.second_tier(but=["first-2"])
def test_it_trains_as_one_that_every_rank_has_loaded(ranks, folder, tmp_path, how, world_size):
    saved = str(tmp_path / "saved")
    if how == "checkpoint":
        ranks.run(save, 2, folder, saved)
    expected = ranks.run(begun, world_size, "everywhere real", folder, saved)
    whole = expected[0][1]
    for rank, (losses, held, _) in enumerate(ranks.run(begun, world_size, how, folder, saved)):
        assert losses == pytest.approx(expected[rank][0], rel=1e-6)
        if not (how == "first" and rank == 0):
            assert held < whole / 2


def refused(group, case):
    rank, mesh = dist.get_rank(group), DeviceMesh.from_group(group, "cpu")
    if case == "buffers":
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    elif case == "first" and rank > 0:
        model = nn.Sequential(nn.Linear(4, 4))
    else:
        with pyruntime.on_meta():
            model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(ValueError) as caught:
        pyruntime.shard(model, mesh, stage=2 if case == "stage" else 3)
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("stage", "0.bias, 0.weight are on meta, and a model begins there only at stage=3"),
        ("buffers", "build the model within pyruntime.on_meta(), which leaves buffers real"),
        ("first", "0.weight is on meta on rank 0"),
    ],
)
def test_what_cannot_begin_so_is_a_sentence_on_every_rank(ranks, case, sentence):
    for message in ranks.run(refused, 2, case):
        assert sentence in message


def lacking(group, folder):
    transformers = importlib.import_module("transformers")
    with pyruntime.on_meta():
        config = transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 3}, **HEADS)
        model = transformers.AutoModelForCausalLM.from_config(config)
    handle = pyruntime.shard(model, DeviceMesh.from_group(group, "cpu"), stage=3, bucket_bytes=BUCKET)
    with pytest.raises(ValueError) as caught:
        handle.load_pretrained(folder)
    return str(caught.value)


def test_a_folder_that_lacks_a_weight_is_named(ranks, folder):
    for message in ranks.run(lacking, 2, folder):
        assert "lacks model.layers.2" in message
