"""`generate --chat`: a model answers by its template, until it ends its turn."""

from __future__ import annotations

import io
import json
import sys

import pytest

from pyruntime.cli import main
from pyruntime.cli.chat import Chat, before
from pyruntime.llama import Llama
from pyruntime.llama.config import LlamaConfig
from pyruntime.llama.hf import save_hf
from pyruntime.train.data.chat_template import TEMPLATE_FILE
from pyruntime.train.data.tokenizer import ByteTokenizer
from pyruntime.train.errors import ConfigError

TEMPLATE = """{%- for m in messages %}{{ '<' + m.role + '>' + m.content + '<end>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<assistant>' }}{%- endif %}"""


@pytest.mark.parametrize("cut", [1, 2, 3, 5, 100])
@pytest.mark.parametrize(
    ("text", "shown"),
    [("four<end>\n<user>", "four"), ("a <e<en<end>", "a <e<en"), ("no end <en", "no end <en"), ("", "")],
)
def test_an_answer_ends_where_the_turn_does_however_the_text_comes(text, shown, cut):
    pieces = [text[at : at + cut] for at in range(0, len(text), cut)]
    assert "".join(before("<end>", iter(pieces))) == shown
    assert "".join(before("", iter(pieces))) == text


def test_a_conversation_grows_by_what_was_asked_and_answered(tmp_path):
    (tmp_path / TEMPLATE_FILE).write_text(TEMPLATE)
    chat = Chat(tmp_path, ByteTokenizer())
    assert bytes(chat.ask("2 + 2?")).decode() == "<user>2 + 2?<end>\n<assistant>"
    assert "".join(chat.answer(iter(["fo", "ur<e", "nd>\n<user>"]))) == "four"
    asked = "<user>2 + 2?<end>\n<assistant>four<end>\n<user>And 3?<end>\n<assistant>"
    assert bytes(chat.ask("And 3?")).decode() == asked


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("", "holds no chat template; copy the model's chat_template.jinja there, or leave out --chat."),
        ("{{ raise_exception('no') }}", "--chat: the chat template refuses it: no."),
        ("{{", "chat template"),
    ],
)
def test_a_model_that_cannot_chat_says_why(tmp_path, template, why):
    if template:
        (tmp_path / TEMPLATE_FILE).write_text(template)
    with pytest.raises(ConfigError) as caught:
        Chat(tmp_path, ByteTokenizer()).ask("?")
    assert why in str(caught.value)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of a tiny model of random weights."""
    folder = tmp_path_factory.mktemp("chats")
    shape = LlamaConfig(256, 32, 64, 1, 2, max_position_embeddings=512)
    save_hf(Llama(shape, None, seed=1).materialize("cpu"), folder)
    (folder / TEMPLATE_FILE).write_text(TEMPLATE)
    return folder


def test_questions_are_answered_one_after_the_other(model, capsys, monkeypatch):
    flags = ["generate", "--checkpoint", str(model), "--chat", "True", "--tokens", "12", "--temperature", "0"]
    assert main([*flags, "--prompt", "Hello?"]) == 0
    once = capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello?\n\nAnd now?\n"))
    assert main(flags) == 0
    said = capsys.readouterr().out
    assert once.endswith("\n") and said.startswith(once) and len(said) > len(once)


def test_a_closed_standard_input_is_said(model, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["generate", "--checkpoint", str(model), "--chat", "True"]) == 2
    assert "the standard input, which is closed; give --prompt." in capsys.readouterr().err


def test_a_run_gives_its_template_to_the_model_that_it_writes(tmp_path, capsys):
    template, chats, run = tmp_path / "t.jinja", tmp_path / "chats.jsonl", tmp_path / "run"
    template.write_text(TEMPLATE)
    chats.write_text("".join(json.dumps({"prompt": f"{n}?", "completion": f"{n}"}) + "\n" for n in range(64)))
    sizes = ["num_hidden_layers=1", "hidden_size=32", "num_attention_heads=2", "num_key_value_heads=2"]
    flags = [f"--model.{each}" for each in [*sizes, "intermediate_size=64"]]
    flags += ["--train.steps=2", "--train.seq_len=64", "--train.batch_size=4", "--train.micro_batch_size=2"]
    flags += [f"--data.paths={chats}", f"--data.chat_template={template}", f"--output.run_dir={run}"]
    assert main(["train", *flags, "--train.device=cpu", "--output.sample_tokens=0"]) == 0
    assert (run / "model" / TEMPLATE_FILE).read_text() == TEMPLATE
    flags += [f"--data.chat_template={run / TEMPLATE_FILE}", f"--checkpoint.resume={run}", "--train.steps=3"]
    assert main(["train", *flags, "--train.device=cpu", "--output.sample_tokens=0"]) == 0
    asked = ["--checkpoint", str(run / "model"), "--chat", "True", "--prompt", "7?", "--tokens", "4"]
    assert main(["generate", *asked]) == 0
    saved = sorted((run / "checkpoints").iterdir())[-1]
    assert main(["convert", "--source", str(saved), "--target", str(tmp_path / "hf")]) == 0
    assert (tmp_path / "hf" / TEMPLATE_FILE).read_text() == TEMPLATE


def test_several_ranks_need_a_prompt(model, capsys, monkeypatch):
    started = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in started.items():
        monkeypatch.setenv(name, value)
    assert main(["generate", "--checkpoint", str(model), "--chat", "True"]) == 2
    assert "which 2 ranks cannot share; give --prompt, or start one rank." in capsys.readouterr().err
