"""Initial weights: the same model for every number of ranks, with the spread they should have."""

from __future__ import annotations

import math

import pytest
import torch

from pyruntime.llama import Llama, preset
from tests.llama.cases import CASES, full_tensors, initial_tensors


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.second_tier("plain-2")
def test_ranks_hold_slices_of_one_model(ranks, tp, case):
    whole = full_tensors(Llama(CASES[case], seed=7))
    for tensors in ranks.run(initial_tensors, tp, CASES[case], 7):
        assert tensors.keys() == whole.keys()
        for name, tensor in whole.items():
            assert torch.equal(tensors[name], tensor), name


def test_no_two_tensors_seeds_or_tiles_are_alike():
    config = preset("debug", vocab_size=600)  # three tiles of 256 rows
    first, second = full_tensors(Llama(config, seed=0)), full_tensors(Llama(config, seed=1))
    drawn = [t for t in (*first.values(), *second.values()) if t.dim() == 2]
    tiles = [tile for tensor in drawn for tile in tensor.split(256)]
    corners = {tuple(tile[0, :4].tolist()) for tile in tiles}
    assert len(corners) == len(tiles)


def test_weights_are_spread_as_documented():
    config = preset("debug", num_hidden_layers=3)
    for name, tensor in full_tensors(Llama(config)).items():
        if "norm" in name:
            assert torch.all(tensor == 1)
            continue
        std = 0.02 / math.sqrt(6) if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
        # The standard error of a standard deviation is std / sqrt(2 n); five of them hardly ever happen.
        assert tensor.std().item() == pytest.approx(std, abs=5 * std / math.sqrt(2 * tensor.numel())), name
        assert abs(tensor.mean().item()) < 5 * std / math.sqrt(tensor.numel()), name


def test_biases_start_at_zero():
    tensors = full_tensors(Llama(CASES["gqa-linear-bias-wide"]))
    biases = {name: tensor for name, tensor in tensors.items() if name.endswith(".bias")}
    assert len(biases) == 2 * 7
    assert not any(tensor.any() for tensor in biases.values())


def test_bf16_weights_are_the_rounded_fp32_weights():
    exact = full_tensors(Llama(preset("debug"), seed=2))
    for name, tensor in full_tensors(Llama(preset("debug"), dtype=torch.bfloat16, seed=2)).items():
        assert torch.equal(tensor, exact[name].bfloat16()), name


@pytest.mark.parametrize("case", CASES)
def test_a_model_built_on_meta_is_the_same_once_it_has_memory(case):
    built = Llama(CASES[case], device="meta")
    assert all(parameter.is_meta for parameter in built.parameters())
    built.materialize("cpu", seed=4)
    direct = full_tensors(Llama(CASES[case], seed=4))
    for name, tensor in full_tensors(built).items():
        assert torch.equal(tensor, direct[name]), name
    assert (built.head.weight is built.embed.weight) == CASES[case].tie_word_embeddings
