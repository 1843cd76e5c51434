"""Preference tuning (DPO) on a mesh: losses, rewards and gradients are those of the equation in fp64."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pyruntime.cli import main
from pyruntime.llama import save_hf
from pyruntime.nn import chunked_head
from pyruntime.train.config import Grid, RunConfig, mesh_of
from pyruntime.train.data.batches import Batches
from pyruntime.train.errors import ConfigError
from pyruntime.train.metrics import StepMetrics, read
from pyruntime.train.model_of_run import make_model
from pyruntime.train.passes import reference
from pyruntime.train.progress import describe
from pyruntime.train.resolved import check
from pyruntime.train.run import run
from pyruntime.train.signals import StopRequest
from tests.ranks import RankError
from tests.train import jobs
from tests.train.test_conversations import CHATML

BETA = 0.3
REWARDS = ("rewards_chosen", "rewards_rejected", "rewards_margins", "rewards_accuracies")


def lines():
    """Pairs whose answers are of very unequal length; two equal answers; one too long for a sample, and one
    of which nothing is left to learn."""
    answers = [("a" * 9, "be"), ("yes", "no" * 10), ("so it is", "so it is"), ("ab", "b" * 17), ("cccc", "d")]
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
    # Such an eps does not let a step grow the rounding of gradients near 0.
    return jobs.changed(config, "optimizer", clip_grad_norm=0.0, eps=1e-3)


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


MESHES = {  # the rest of four ranks is tensor parallel
    "tp": {"train": {"micro_batch_size": 4}},
    "tp of two axes": {"parallel": {"tp": Grid(2, 2)}},
    "slices": {"parallel": {"dp": 2, "tp_slices": 2}},
    "zero 0": {"parallel": {"dp": 4, "zero": 0}},
    "zero 3": {"parallel": {"dp": 2, "zero": 3}, "train": {"micro_batch_size": 1}},
    "hybrid": {"parallel": {"dp": 4, "dp_replicate": 2, "zero": 2}, "train": {"micro_batch_size": 1}},
    "cp": {"parallel": {"cp": 2}},
    "zero 3 and cp": {"parallel": {"dp": 2, "cp": 2, "zero": 3}},
    "placed": {"parallel": {"cp": 4, "zero": 2}, "context": {"layout": "placed"}},
    "pp": {"parallel": {"pp": 2}},
    "pp and cp": {"parallel": {"pp": 2, "cp": 2, "zero": 1}},
    "pp and dp": {"parallel": {"pp": 2, "dp": 2}, "pipeline": {"kind": "zb-h1"}},
    "unequal": {"parallel": {"dp": 2}, "train": {"micro_batch_size": 1, "micro_batches": (6, 2)}},
    "routed": {
        "parallel": {"pp": 2, "dp": 2, "zero": 2},
        "train": {"micro_batch_size": 1},
        "pipeline": {"speeds": (1.0, 0.5, 0.6, 1.0)},
    },
}


def on(config, name, folder):
    for section, values in MESHES[name].items():
        config = jobs.changed(config, section, **values)
    return jobs.changed(config, "output", run_dir=str(folder))


def check_rewards(found, expected, names=REWARDS):
    for name in names:
        for one, other in zip(jobs.curve(found, name), jobs.curve(expected, name), strict=True):
            assert one == pytest.approx(other, abs=2e-4)
        key = name.removeprefix("rewards_")
        for one, other in zip(found, expected, strict=True):
            assert (one.val_rewards is None) == (other.val_rewards is None)
            if one.val_rewards is not None:
                assert one.val_rewards[key] == pytest.approx(other.val_rewards[key], abs=2e-4)


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.second_tier(but=["pp and cp"])
def test_every_mesh_learns_the_same(ranks, drawn, whole, name, tmp_path):
    found = ranks.run(jobs.history, 4, on(drawn, name, tmp_path))
    jobs.check_curves(found, whole)
    check_rewards(found[0], whole)
    assert jobs.curve(found[0], "rewards_margins") == jobs.curve(found[-1], "rewards_margins")


def by_chunks(group, config):
    """The job, with a head that computes its loss by chunks of few rows."""
    chunked_head.CHUNK_ROWS, chunked_head.LEAST_LOGITS, kept = 32, 1, vars(chunked_head).copy()
    try:
        return jobs.history(group, config)
    finally:
        chunked_head.CHUNK_ROWS, chunked_head.LEAST_LOGITS = kept["CHUNK_ROWS"], kept["LEAST_LOGITS"]


@pytest.mark.parametrize("name", ["tp", "zero 3 and cp", "pp"])
@pytest.mark.second_tier(but=["zero 3 and cp"])
def test_so_it_does_where_the_head_computes_by_chunks(ranks, drawn, whole, name, tmp_path):
    found = ranks.run(by_chunks, 4, on(drawn, name, tmp_path))
    jobs.check_curves(found, whole)
    check_rewards(found[0], whole)


def references(group, config):
    """The reference of a job, by pair as `PackedPairs` numbers them."""
    made = jobs.trainer(group, config)
    made.refer()
    found = {name: torch.from_numpy(each.reference) for name, each in made._corpus.pairs.items()}
    made.close()
    return found


@pytest.mark.parametrize("name", ["zero 3 and cp", "pp and dp", "routed", "pp and cp", "tp"])
@pytest.mark.second_tier(but=["pp and cp"])
def test_the_reference_is_the_model_as_the_run_begins(ranks, drawn, model, name, tmp_path):
    config = on(jobs.changed(drawn, "dpo", reference=""), name, tmp_path)
    config = jobs.changed(config, "train", micro_batch_size=2, micro_batches=())
    found = ranks.run(references, 4, config)
    held = load_file(tmp_path / "reference.safetensors")
    assert not list(tmp_path.glob("*.partial"))
    packed = jobs.opened(config).pairs
    assert found[0].keys() == packed.keys() == held.keys()
    pairs = 0
    for set_, each in packed.items():
        assert all(torch.equal(held[set_], of_rank[set_]) for of_rank in found)
        left_out = set(range(each.pairs))
        for sample in range(len(each)):
            row = each.row(sample)
            for pair, number in enumerate(each.members(sample)):
                left_out.remove(int(number))
                ids = bytes(row.ids[row.documents == 2 * pair].tolist())
                line = lines()[int(re.match(rb"<u>([0-9]+)", ids).group(1))]
                most = 49 if line["prompt"] == "45long" else 10**9
                for answer, key in enumerate(("chosen", "rejected")):
                    value = log_probability(model, line["prompt"], line[key], most).item()
                    assert held[set_][number, answer].item() == pytest.approx(value, rel=1e-5)
                pairs += 1
        assert not held[set_][sorted(left_out)].any()
    assert pairs == len(lines()) - 1  # of one nothing is left to learn


@pytest.mark.second_tier
def test_a_run_without_a_file_begins_with_rewards_of_0_and_keeps_the_reference(ranks, drawn, tmp_path):
    config = jobs.changed(on(drawn, "zero 0", tmp_path), "dpo", reference="")
    config = jobs.changed(config, "train", micro_batch_size=1)
    found = ranks.run(jobs.history, 4, config)[0]
    assert found[0].loss == pytest.approx(math.log(2), abs=1e-5)
    assert abs(found[0].rewards_chosen) < 1e-4 and found[-1].rewards_margins > 1e-3
    before = (tmp_path / "reference.safetensors").stat().st_mtime_ns
    again = ranks.run(jobs.history, 4, config)[0]
    assert jobs.curve(again, "loss") == jobs.curve(found, "loss")
    assert (tmp_path / "reference.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize("name", ["zero 3", "pp"])
@pytest.mark.second_tier(but=["zero 3"])
def test_a_run_resumed_in_the_middle_of_an_epoch_is_the_one_not_interrupted(ranks, drawn, name, tmp_path):
    config = jobs.changed(on(drawn, name, tmp_path), "dpo", reference="")
    config = jobs.changed(config, "train", steps=4)
    config = jobs.changed(config, "checkpoint", every_steps=2, keep=9)
    found = ranks.run(jobs.history, 4, config)[0]
    (tmp_path / "checkpoints" / "step-000004").rename(tmp_path / "kept")
    again = ranks.run(jobs.history, 4, config, tmp_path / "checkpoints" / "step-000002")[0]
    for curve in ("loss", "grad_norm", "val_loss", *REWARDS):
        assert jobs.curve(again, curve) == jobs.curve(found, curve)[2:]
    for file in sorted((tmp_path / "kept").glob("rank-*")):
        assert file.read_bytes() == (tmp_path / "checkpoints/step-000004" / file.name).read_bytes()
    assert found[0].rewards_chosen != found[2].rewards_chosen


def adapted(group, config, folder):
    """Saves adapters that have an effect; returns the log-probabilities of the reference beside them."""
    from pyruntime.llama.adapter_files import save_adapters

    made = jobs.trainer(group, config)
    for name, parameter in made.model.named_parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.05, generator=torch.Generator().manual_seed(len(name)))
    save_adapters(made.model, folder, None)
    made.close()


@pytest.mark.parametrize("name", ["tp", "zero 3 and cp", "pp"])
@pytest.mark.second_tier(but=["zero 3 and cp"])
def test_with_adapters_the_reference_is_the_model_without_them(ranks, drawn, whole, name, tmp_path):
    plain = on(jobs.changed(drawn, "dpo", reference=""), name, tmp_path / "plain")
    (tmp_path / "plain").mkdir()
    without = ranks.run(references, 4, plain)[0]
    config = jobs.changed(drawn, "lora", rank=4)
    ranks.run(adapted, 1, config, tmp_path / "adapter")
    config = jobs.changed(config, "lora", init_from=str(tmp_path / "adapter"))
    config = jobs.changed(config, "dpo", reference=str(tmp_path / "of_adapters.safetensors"))
    one = ranks.run(jobs.history, 1, jobs.changed(config, "output", run_dir=str(tmp_path)))[0]
    for set_, values in load_file(config.dpo.reference).items():
        torch.testing.assert_close(values, without[set_], rtol=1e-5, atol=1e-4)
    assert abs(one[0].rewards_chosen) > 1e-2
    found = ranks.run(jobs.history, 4, on(config, name, tmp_path))
    jobs.check_curves(found, one)
    check_rewards(found[0], one, REWARDS[:3])  # rounding decides which of two equal answers has more


def test_equal_answers_teach_nothing(ranks, drawn, tmp_path):
    path = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"{n}", "chosen": "a" * n, "rejected": "a" * n} for n in range(20)]
    path.write_text("\n".join(map(json.dumps, rows)))
    config = jobs.changed(drawn, "data", paths=(str(path),))
    config = jobs.changed(config, "dpo", reference="")
    config = jobs.changed(config, "output", run_dir=str(tmp_path))
    (first, *_) = ranks.run(jobs.history, 1, config)[0]
    assert first.loss == pytest.approx(math.log(2), abs=1e-5)
    assert first.grad_norm < 1e-3 and abs(first.rewards_margins) < 1e-5


@pytest.fixture
def kept(drawn, tmp_path):
    """A file of a reference, the facts that it belongs to, and the pairs of each of its tensors."""
    found, path = jobs.opened(drawn), tmp_path / "reference.safetensors"
    facts = reference.facts_of(jobs.resolved(drawn), found)
    values = {name: torch.rand(each.pairs, 2).double() for name, each in found.pairs.items()}
    reference.write(path, facts, values)
    sizes = {name: len(each) for name, each in values.items()}
    for name, value in reference.read(path, facts, sizes).items():
        assert torch.equal(value, values[name])
    return path, facts, sizes


def test_a_reference_of_something_else_is_refused(drawn, kept, tmp_path):
    path, facts, sizes = kept
    others = {
        "weights": jobs.changed(drawn, "train", seed=1),
        "train.dtype": jobs.changed(drawn, "train", dtype="bf16"),
        "train.seq_len": jobs.changed(drawn, "train", seq_len=64),
        "the tokens of held_out": jobs.changed(drawn, "data", val_fraction=0.3),
    }
    for what, config in others.items():
        other = reference.facts_of(jobs.resolved(config), jobs.opened(config))
        with pytest.raises(ConfigError, match=rf"is not of this run: {what} is .* and .* in the file; name"):
            reference.read(path, other, sizes)
    with pytest.raises(ConfigError, match="the tokenizer is other here and"):
        reference.read(path, facts | {"the tokenizer": "other"}, sizes)
    with pytest.raises(ConfigError, match="more is not there here and 1 in the file"):
        reference.write(path, facts | {"more": "1"}, load_file(path))
        reference.read(path, facts, sizes)


def test_a_damaged_reference_is_refused(kept):
    path, facts, sizes = kept
    content = path.read_bytes()
    flipped = bytes([*content[:-9], content[-9] ^ 1, *content[-8:]])
    for damaged in (content[:-4], flipped, b"", content[:40]):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match="is damaged, or no reference; name another file"):
            reference.read(path, facts, sizes)
    path.unlink()
    with pytest.raises(ConfigError, match="is not a file here; name one that all ranks see"):
        reference.read(path, facts, sizes)
    with pytest.raises(ConfigError, match=r"cannot be written: .*; name another"):
        reference.write(path.parent / "nowhere" / "file", facts, {})


def test_ranks_refuse_the_reference_of_another_run_together(ranks, drawn, tmp_path):
    config = jobs.changed(on(drawn, "zero 0", tmp_path), "train", seed=3, micro_batch_size=1)
    with pytest.raises(RankError, match="is not of this run: weights is random, of seed 3"):
        ranks.run(references, 4, config)


REFUSED = [
    ({"data": {"document_masks": False}}, "data.document_masks=false does not support preference tuning"),
    ({"train": {"z_loss": 1e-4}}, "train.z_loss=0.0001 does not support preference tuning"),
    ({"train": {"check_types": True}}, "train.check_types=true does not"),
    ({"parallel": {"pp": 2}, "pipeline": {"kind": "seq1f1b", "slices": 2}}, "pipeline.slices=2 does not"),
    ({"parallel": {"pp": 2, "rebalance": "on"}, "checkpoint": {"every_steps": 20}}, "parallel.rebalance=on"),
    (
        {"parallel": {"tp": 1, "dp": 2}, "data_parallel": {"method": "co2"}},
        "data_parallel.method=co2 does not support preference tuning",
    ),
    ({"model": {"experts": 4}}, "dpo.beta=0.3 does not support a model with experts, whose routers"),
    ({"dpo": {"beta": 0.0, "reference": "file"}}, "dpo.reference=file without dpo.beta"),
    ({"dpo": {"beta": -1.0}}, "dpo.beta must be 0 for none, or between 1e-4 and 100"),
    ({"dpo": {"reference": "/nowhere/file"}}, "dpo.reference: the folder /nowhere does not exist"),
    ({"dpo": {"reference": "/tmp"}}, "dpo.reference: /tmp is not a file"),
]


@pytest.mark.parametrize("changes, words", REFUSED, ids=[words for _, words in REFUSED])
def test_what_preferences_do_not_support_is_refused(drawn, changes, words):
    config = drawn
    for section, values in changes.items():
        config = jobs.changed(config, section, **values)
    with pytest.raises(ConfigError, match=re.escape(words)):
        check(config, mesh_of(config, 2).ranks)


def whole_run(group, config):
    return run(config, "job", jobs.runtime(group, config), StopRequest())


def test_a_run_prefers_what_was_chosen_and_shows_it(ranks, tmp_path, capsys):
    """It does so on held-out pairs too."""
    config = job(tmp_path, steps=12, val_every=6, micro_batch_size=2, seq_len=64)
    rows = [{"prompt": f"{n}", "chosen": "yes", "rejected": "no" * (1 + n % 5)} for n in range(99)]
    Path(config.data.paths[0]).write_text("\n".join(map(json.dumps, rows)))
    config = jobs.changed(config, "optimizer", lr=1e-3, eps=1e-8)
    config = jobs.changed(jobs.changed(config, "dpo", beta=0.1), "parallel", dp=4)
    run_dir = ranks.run(whole_run, 4, config)[0]
    steps = read(run_dir / "metrics.jsonl")
    assert steps[-1]["rewards_accuracies"] > 0.9 and steps[-1]["val_rewards"]["accuracies"] > 0.9
    assert steps[-1]["val_loss"] < steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert (run_dir / "reference.safetensors").is_file() and (run_dir / "model").is_dir()
    main(["report", str(run_dir)])
    page = (run_dir / "report.html").read_text()
    assert '"rewards_margins"' in page and "reward margin" in page
    line = describe(StepMetrics(**{key: value for key, value in steps[-1].items()}), 12)
    assert re.search(r"val 0\.\d+ \(accuracy \d+%\).* rewards [+-]\d.* margin \d.*, accuracy \d+% \|", line)
