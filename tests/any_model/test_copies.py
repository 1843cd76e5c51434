"""Copies, pickles and checkpoints of a model that plan "auto" has cut."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from transformers import LlamaForCausalLM

from pyruntime import parallelize, verify
from tests.any_model.test_hf_llama import batch, llama

MODELS = {
    "tied": {"tie_word_embeddings": True},
    "gives way": {"num_key_value_heads": 1},
}


def through_torch_save(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": through_torch_save,
}


def copies(group, how: str, name: str, folder: str) -> None:
    """Before the first call, which settles what is cut, and after it."""
    whole = llama(**MODELS[name])
    model = parallelize(copy.deepcopy(whole), group, "auto")
    for again in (COPIES[how](model), model, COPIES[how](model)):
        verify(again, whole, batch(), tolerance=1e-5)
    for p in again.parameters():
        nn.init.zeros_(p)
    verify(model, whole, batch(), tolerance=1e-5)
    again.save_pretrained(folder)
    assert not any(p.any() for p in LlamaForCausalLM.from_pretrained(folder).parameters())


def pickled(group) -> bytes:
    return pickle.dumps(parallelize(llama(), group, "auto"))


def unpickled(_, packed: bytes) -> str:
    try:
        pickle.loads(packed)
    except ValueError as error:
        return str(error)
    return ""


def save(group, name: str, folder: str) -> None:
    model = parallelize(llama(**MODELS[name]), group, "auto")
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder, process_group=group)


def load(group, name: str, folder: str) -> None:
    other = llama(**MODELS[name])
    for p in other.parameters():
        nn.init.normal_(p)
    model = parallelize(other, group, "auto")
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder, process_group=group)
    model.load_state_dict(state["model"])
    verify(model, llama(**MODELS[name]), batch(), tolerance=1e-5)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("how", COPIES)
@pytest.mark.second_tier(but=["pickle-tied"])
def test_a_copy_is_a_parallel_model_with_weights_of_its_own(ranks, tmp_path, how, name):
    ranks.run(copies, 2, how, name, str(tmp_path))


def test_a_pickle_is_for_the_rank_that_made_it(ranks):
    packed = ranks.run(pickled, 2)[0]
    same, other = ranks.run(unpickled, 2, packed)
    assert same == ""
    assert "shards of rank 0 of 2" in other and "this process is rank 1 of 2 there;" in other
    assert "this process is not in it;" in unpickled(None, packed)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.second_tier("gives way")
def test_what_two_ranks_have_saved_one_and_four_load(ranks, tmp_path, name):
    ranks.run(save, 2, name, str(tmp_path))
    for world_size in (1, 4):
        ranks.run(load, world_size, name, str(tmp_path))
