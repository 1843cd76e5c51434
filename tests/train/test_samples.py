"""Samples of a run: answers of the model before and after training are those that transformers gets."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import LlamaForCausalLM

from pyruntime.llama import Llama, save_hf
from pyruntime.train import samples
from pyruntime.train.config import mesh_of
from pyruntime.train.run import run
from pyruntime.train.signals import StopRequest
from tests.train import jobs

TEMPLATE = """{%- for message in messages %}
{{- '<' + message['role'][0] + '>' + message['content'] + '<end>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<a>' }}{%- endif %}
"""
TURNS = {f"{number} + {number}?": f"that is {2 * number}" for number in range(40)}
TOKENS = 40


@pytest.fixture
def config(tmp_path):
    """A run that learns conversations so fast that three steps change the answers."""
    lines = [
        {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]}
        for asked, said in TURNS.items()
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    config = jobs.job(tmp_path, steps=4, val_every=2, batch_size=4, micro_batch_size=2, seq_len=64)
    save_hf(Llama(jobs.resolved(config).shape, seed=4), tmp_path / "base")
    config = jobs.changed(
        config, "model", preset="", hidden_size=None, intermediate_size=None, init_from=str(tmp_path / "base")
    )
    data = {"paths": (str(tmp_path / "chats.jsonl"),), "chat_template": str(tmp_path / "template.jinja")}
    config = jobs.changed(config, "data", **data, val_fraction=0.3)
    config = jobs.changed(config, "optimizer", lr=0.03)
    return jobs.changed(config, "output", sample_tokens=TOKENS)


def whole_run(group, config):
    return run(config, "job", jobs.runtime(group, config), StopRequest())


def answer(model, prompt: str) -> str:
    """Greedy, by transformers, of bytes."""
    ids = torch.tensor([list(prompt.encode())])
    most = -(-TOKENS // samples.QUESTIONS)
    told = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=most, do_sample=False, eos_token_id=0,
        pad_token_id=0,
    )[0, ids.shape[1] :]  # fmt: skip
    text = bytes(token for token in told.tolist() if token).decode(errors="replace")
    return text.partition("<end>")[0]


MESHES = {
    "tp2": {"tp": 2},
    "tp2 dp2 zero3": {"tp": 2, "dp": 2, "zero": 3},
    "cp2 dp2": {"cp": 2, "dp": 2, "tp": 1},
    "tp2 pp2": {"tp": 2, "pp": 2},
}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.second_tier(but=["tp2 dp2 zero3", "tp2 pp2"])
def test_answers_to_held_out_questions_before_and_after_training(ranks, config, mesh):
    """Stages have parts of the model before training, so that there nobody answers."""
    sizes = MESHES[mesh]
    config = jobs.changed(config, "parallel", **sizes)
    folder = ranks.run(whole_run, mesh_of(config, 1).ranks, config)[0]
    before, after = (
        LlamaForCausalLM.from_pretrained(each) for each in (config.model.init_from, folder / "model")
    )
    found = samples.read(folder)
    assert len(found) == len({each["prompt"] for each in found}) == samples.QUESTIONS
    for each in found:
        asked = each["prompt"].removeprefix("<u>").removesuffix("<end><a>")
        assert each["wanted"] == TURNS[asked]
        assert each["before"] == (None if mesh == "tp2 pp2" else answer(before, each["prompt"]))
        assert each["after"] == answer(after, each["prompt"])
    assert all(each["before"] != each["after"] for each in found)


def test_text_is_gone_on_with_after_training_alone(ranks, tmp_path):
    config = jobs.job(tmp_path, steps=1)
    folder = ranks.run(whole_run, 1, config)[0]
    (sample,) = samples.read(folder)
    assert (sample["prompt"], sample["before"], sample["wanted"]) == ("def ", None, None)
    assert sample["after"]
    none = jobs.changed(config, "output", sample_tokens=0, run_dir=str(tmp_path / "none"))
    assert samples.read(ranks.run(whole_run, 1, none)[0]) == []


def test_pairs_ask_their_prompts(ranks, config, tmp_path):
    lines = [{"prompt": asked, "chosen": said, "rejected": "no"} for asked, said in TURNS.items()]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    config = jobs.changed(config, "data", paths=(str(tmp_path / "pairs.jsonl"),))
    config = jobs.changed(config, "dpo", beta=0.1)
    found = samples.read(ranks.run(whole_run, 1, config)[0])
    assert len(found) == samples.QUESTIONS
    for each in found:
        assert each["wanted"] == TURNS[each["prompt"].removeprefix("<u>").removesuffix("<end><a>")]
        assert each["before"] is not None


def test_a_file_that_holds_no_samples_is_named(tmp_path):
    assert samples.read(tmp_path) == []
    (tmp_path / samples.FILE_NAME).write_text('{"prompt": "a"}\n')
    with pytest.raises(ValueError, match=r"samples\.jsonl does not hold the samples of a run: line 1 is"):
        samples.read(tmp_path)
