"""Preference tuning (DPO) on a mesh: losses, rewards and gradients are those of the equation in fp64."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pyruntime.llama import save_hf
from pyruntime.nn import chunked_head
from pyruntime.train import checkpoint_folder
from pyruntime.train.config import Data, Grid, RunConfig, mesh_of
from pyruntime.train.data import corpus as text
from pyruntime.train.data.batches import Batches
from pyruntime.train.errors import ConfigError
from pyruntime.train.model_of_run import make_model
from pyruntime.train.passes import reference
from pyruntime.train.resolved import check
from tests.ranks import RankError
from tests.train import jobs
from tests.train.test_conversations import CHATML

BETA = 0.3
REWARDS = ("rewards_chosen", "rewards_rejected", "rewards_margins", "rewards_accuracies")


def lines():
    """Pairs whose answers are of very unequal length; two equal answers; one too long for a sample, and one
    of which nothing is left to learn."""
    answers = [("a" * 9, "be"), ("yes", "no" * 10), ("so it is", "so it is"), ("ab", "b" * 17), ("c" * 4, "d")]
    found = [
        {"prompt": f"{number}{'what'[: 1 + number % 4]}", "chosen": chosen, "rejected": rejected}
        for number, (chosen, rejected) in enumerate(answers * 9)
    ]
    found.append({"prompt": "45long", "chosen": "e" * 90, "rejected": "f" * 40})
    return [*found, {"prompt": "46" + "g" * 70, "chosen": "h", "rejected": "i"}]


def job(folder: Path, **train) -> RunConfig:
    config = jobs.job(
        folder, **{"steps": 3, "val_every": 2, "batch_size": 8, "micro_batch_size": 2, "seq_len": 96} | train
    )
    path, template = folder / "pairs.jsonl", folder / "template.jinja"
    path.write_text("\n".join(map(json.dumps, lines())))
    template.write_text(CHATML)
    config = jobs.changed(config, "data", paths=(str(path),), chat_template=str(template), val_fraction=0.2)
    config = jobs.changed(config, "dpo", beta=BETA)
    return jobs.changed(config, "optimizer", clip_grad_norm=0.0)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """A job with a reference whose log-probabilities are drawn, so that rewards are not 0 in the first
    step."""
    config = job(tmp_path_factory.mktemp("drawn"))
    jobs.prepare(config)
    found, path = jobs.opened(config), Path(config.output.run_dir).with_name("drawn.safetensors")
    drawn = {name: -20 * torch.rand(each.pairs, 2).double() for name, each in found.pairs.items()}
    reference.write(path, reference.facts_of(jobs.resolved(config), found), drawn)
    return jobs.changed(config, "dpo", reference=str(path))


@pytest.fixture(scope="module")
def whole(ranks, drawn):
    """What one rank makes of it."""
    return ranks.run(jobs.history, 1, drawn)[0]


def save_first_weights(group, config, folder):
    save_hf(make_model(jobs.resolved(config), jobs.runtime(group, config)), folder)


@pytest.fixture(scope="module")
def model(ranks, drawn, tmp_path_factory):
    """The first weights in fp64, in transformers' model."""
    from transformers import LlamaForCausalLM

    folder = tmp_path_factory.mktemp("hf")
    ranks.run(save_first_weights, 1, drawn, folder)
    return LlamaForCausalLM.from_pretrained(str(folder), dtype=torch.float64)


def log_probability(model, prompt: str, answer: str, most: int = 10**9) -> torch.Tensor:
    """The sum over an answer's bytes and the line end behind it, by the definition. most: tokens that are
    left."""
    before, said = f"<u>{prompt}\n<a>".encode(), f"{answer}\n".encode()
    ids = torch.tensor([*before, *said])[:most]
    logits = model(ids[None, :-1]).logits[0].log_softmax(-1)
    return logits[range(len(ids) - 1), ids[1:]][len(before) - 1 :].sum()


def pair_at(batch, row: int, pair: int) -> dict:
    """The line of a pair in a batch, found by its text."""
    ids = batch.ids[row][batch.documents[row] == 2 * pair]
    number = int(re.match(rb"<u>([0-9]+)", bytes(ids.tolist())).group(1))
    return lines()[number]


@pytest.fixture(scope="module")
def expected(drawn, model):
    """Loss, norm of the gradient and rewards of the first step, equation 7 pair by pair in fp64."""
    found = jobs.opened(drawn)
    (path,) = (drawn.dpo.reference,)
    for name, values in load_file(path).items():
        found.pairs[name].reference = values.numpy()
    batch = Batches(found, drawn.train.seed, 8, 96, 256).read(0)
    losses, rewards = [], []
    references = iter(batch.preferences.reference)
    counts = []
    for row in range(8):
        counts.append(int(batch.documents[row].max() + 1) // 2)
        for pair in range(counts[-1]):
            line, of_reference = pair_at(batch, row, pair), next(references)
            # Of two long answers each keeps half a sample and one token.
            most = 49 if line["prompt"] == "45long" else 10**9
            both = [log_probability(model, line["prompt"], line[key], most) for key in ("chosen", "rejected")]
            own = [BETA * (policy - other) for policy, other in zip(both, of_reference, strict=True)]
            losses.append(-torch.sigmoid(own[0] - own[1]).log())
            rewards.append(torch.stack([*own, own[0] - own[1], (own[0] > own[1]).double()]).detach())
    loss = torch.stack(losses).mean()
    model.zero_grad()
    loss.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    assert len(set(counts)) > 1  # else a mean over rows would do
    return loss.item(), norm.item(), torch.stack(rewards).mean(0).tolist()


def test_a_step_is_the_equation_in_fp64(whole, expected):
    first = whole[0]
    loss, norm, rewards = expected
    assert first.loss == pytest.approx(loss, rel=1e-6)
    assert first.grad_norm == pytest.approx(norm, rel=1e-5)
    assert [getattr(first, name) for name in REWARDS] == pytest.approx(rewards, rel=1e-5)
    assert set(whole[1].val_rewards) == {"chosen", "rejected", "margins", "accuracies"}
    assert whole[1].val_loss_per_byte is None
