"""The loss of a model with labels is computed by chunks of rows where its logits are many, and who reads the
logits all the same finds them, or an error."""

from __future__ import annotations

import contextlib
import copy
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from pyruntime import explain, parallelize, shard, verify
from pyruntime.any_model.activations import causal_loss, later_logits
from pyruntime.nn import chunked_head
from tests.any_model.test_auto import BATCH, IDS, MODELS, build
from tests.nn.cases import assert_near

SOME = torch.where(IDS % 3 == 0, -100, IDS)
BATCHES = (
    {"input_ids": IDS, "labels": SOME},
    {"input_ids": IDS, "labels": SOME, "num_items_in_batch": torch.tensor(9)},
    {"input_ids": IDS, "labels": SOME, "shift_labels": IDS.flip(1)},
)
REFUSED = r"The logits of lm_head were asked for after backward\(\).*read outputs\.logits before backward"


def by_chunks():
    """Chunks of four rows, of however few logits; and logits of all rows are an error."""
    return (
        mock.patch.multiple(chunked_head, LEAST_LOGITS=0, CHUNK_ROWS=4),
        mock.patch.object(causal_loss, "losses_of_logits", side_effect=AssertionError("whole")),
    )


def models(group, tied=False):
    """A model and its cut copy, whose first call has been compared."""
    whole = build("Llama", {"Llama": MODELS["Llama"] | {"tie_word_embeddings": tied}}).train()
    model = parallelize(copy.deepcopy(whole), group, "auto")
    model(**BATCH)
    return whole, model


def learns(group, tied):
    whole, model = models(group, tied)
    chunks, no_logits = by_chunks()
    with chunks, no_logits:
        for batch in BATCHES:
            with mock.patch.object(later_logits.HeadInput, "computed", side_effect=AssertionError("read")):
                found, wanted = model(**batch), whole(**batch)
                assert_near(found.loss, wanted.loss, "loss")
                assert found.logits.shape == wanted.logits.shape and found.logits.requires_grad
            verify(model, whole, batch, tolerance=1e-5)  # gradients too
        assert ", by chunks of rows" in explain(model).loss
        none = {"input_ids": IDS, "labels": torch.full_like(IDS, -100)}
        assert model(**none).loss.isnan() and whole(**none).loss.isnan()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.second_tier("True")
def test_the_loss_and_its_gradients_are_those_of_the_whole_model(ranks, tied):
    ranks.run(learns, 2, tied)
    ranks.run(learns, 3, tied)  # of 101 words


def reads(group):
    whole, model = models(group)
    chunks, _ = by_chunks()
    with chunks:
        for each in (whole, model):
            each.zero_grad()
        found, wanted = model(**BATCHES[0]), whole(**BATCHES[0])
        assert_near(found.logits[:, -1], wanted.logits[:, -1], "read before the backward pass")
        (found.loss + found.logits.softmax(-1).square().sum()).backward()
        (wanted.loss + wanted.logits.softmax(-1).square().sum()).backward()
        for (name, mine), its in zip(model.named_parameters(), whole.parameters(), strict=True):
            assert_near(
                mine.grad.full_tensor() if hasattr(mine.grad, "full_tensor") else mine.grad, its.grad, name
            )
        again = model(**BATCHES[0])
        again.loss.backward()
        with pytest.raises(RuntimeError, match=REFUSED):
            again.logits.argmax(-1)
        held = model(**BATCHES[0])
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        with pytest.raises(RuntimeError, match=REFUSED):
            held.logits.sum()
        for batch, grads in ((BATCHES[0], torch.no_grad), ({"input_ids": IDS}, torch.enable_grad)):
            with grads(), mock.patch.object(later_logits.HeadInput, "logits", side_effect=AssertionError):
                model(**batch).logits.sum()


def test_who_reads_the_logits_finds_them_or_an_error(ranks):
    ranks.run(reads, 2)


def trained(_, stage):
    """Losses of steps on two data-parallel ranks with and without chunks, and what explain() says."""
    found, mesh = {}, init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ids = IDS.roll(mesh["dp"].get_local_rank(), 1)
    for kind in ("chunks", "whole"):
        _, model = models(mesh["tp"])
        handle = shard(model, mesh["dp"], stage=stage, bucket_bytes=1024)
        optimizer, losses = handle.adamw(lr=0.01, max_norm=1.0), []
        with by_chunks()[0] if kind == "chunks" else contextlib.nullcontext():
            for _ in range(3):
                held = model(input_ids=ids, labels=ids)
                held.loss.backward()
                optimizer.step()
                losses.append(held.loss.item())
            found[kind] = losses, explain(model).loss
            held = model(input_ids=ids, labels=ids)
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            if kind == "chunks" and stage < 3:
                with pytest.raises(RuntimeError, match=REFUSED):
                    held.logits.sum()
        handle.close()
    return found


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.second_tier("0", "3")
def test_with_data_parallelism(ranks, stage):
    """Stage 3 brings a weight for a call alone, so that it takes the logits of all rows."""
    for of_rank in ranks.run(trained, 4, stage):
        (chunks, said), (whole, _) = of_rank["chunks"], of_rank["whole"]
        assert chunks == pytest.approx(whole, rel=1e-5)
        assert (", by chunks of rows" in said) == (stage < 3)
