"""Conversations become tokens by a model's chat template, and exactly what the assistant says is learned."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from pyruntime.cli import tokenize
from pyruntime.train.config import Data
from pyruntime.train.data import corpus
from pyruntime.train.data.batches import IGNORED, Batches, validation_batches
from pyruntime.train.data.chat_template import BadConversation
from pyruntime.train.data.conversations import chat_encoder, conversation_of
from pyruntime.train.data.token_shards import TokenShard
from pyruntime.train.data.tokenizer import ByteTokenizer, JsonTokenizer
from pyruntime.train.errors import ConfigError

LLAMA3 = """{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'assistant' and 'tool_calls' in message %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + message.tool_calls[0].function.name + '", "parameters": ' }}
        {{- message.tool_calls[0].function.arguments | tojson }}{{- '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}{%- if messages[0].role == 'system' %}
    {{- messages[0].content + '\\n' }}{%- endif %}
    {%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>' + call.function.name + call.function.arguments | tojson + '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role != 'system' %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
CHATML = """{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
MARKED = """{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' %}
{%- generation %}{{- message['content'] + '<|im_end|>' }}{%- endgeneration %}
{%- else %}{{- message['content'] + '<|im_end|>' }}{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
MISTRAL = """{{- bos_token }}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}{{- ' [INST] ' + message['content'] + ' [/INST]' }}
    {%- elif message['role'] == 'assistant' %}{{- ' ' + message['content'] + eos_token }}{%- endif %}
{%- endfor %}
"""
GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}
"""
ZEPHYR = """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}
"""
FAMILIES = {
    "Llama 3": (LLAMA3, ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]),
    "Qwen": (QWEN, ["<|endoftext|>", "<|im_end|>", "<|im_start|>"]),
    "ChatML": (CHATML, ["<|endoftext|>", "<|im_end|>", "<|im_start|>"]),
    "Mistral": (MISTRAL, ["<s>", "</s>"]),
    "Gemma": (GEMMA, ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"]),
    "Zephyr": (ZEPHYR, ["<s>", "</s>"]),
}
"""Templates, and the special tokens of their tokenizers: those that begin and end a text come first."""
ENDS = {"Llama 3": "<|eot_id|>", "Qwen": "<|im_end|>", "ChatML": "<|im_end|>", "Mistral": "</s>",
        "Gemma": "<end_of_turn>", "Zephyr": "</s>"}  # fmt: skip
TEXT = (
    "user assistant model system the quick brown fox jumps over the lazy dog 0123456789 größer 日本語 \n\n"
    * 9
)


def tokenizer_folder(folder, template: str, specials: list[str], metaspace: bool = False):
    """A tiny tokenizer, trained here, with a chat template."""
    engine = Tokenizer(models.BPE(byte_fallback=False))
    if metaspace:
        engine.pre_tokenizer, engine.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        alphabet = sorted(set(TEXT) | set(map(chr, range(32, 127))))
    else:
        engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        engine.decoder, alphabet = decoders.ByteLevel(), pre_tokenizers.ByteLevel.alphabet()
    engine.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet))
    engine.add_special_tokens([AddedToken(name, special=True) for name in specials])
    folder.mkdir(parents=True, exist_ok=True)
    engine.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": specials[0]}
    config |= {"eos_token": {"content": specials[1], "__type": "AddedToken"}, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def opened(tmp_path):
    def open_family(name: str, learned="all", **options):
        template, specials = FAMILIES[name]
        folder = tokenizer_folder(tmp_path / name.replace(" ", ""), template, specials, **options)
        return chat_encoder(JsonTokenizer(folder), "", learned)

    return open_family


def turn(role: str, content: str, **more) -> dict:
    return {"role": role, "content": content} | more


def said(encoder, *messages, tools=None) -> list[str]:
    """The runs of tokens that are learned, as text."""
    content = conversation_of({"messages": list(messages), "tools": tools})
    ((stored, _),) = encoder.encode([content])
    runs, before = [], 0
    for value in stored.tolist():
        if value & 1:
            runs = [*runs, []] if not before else runs
            runs[-1].append(value >> 1)
        before = value & 1
    return [encoder.tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize("metaspace", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_assistants_turns_and_their_ends_are_learned(opened, name, metaspace):
    encoder, end = opened(name, metaspace=metaspace), ENDS[name]
    messages = [turn("user", "the fox 日本"), turn("assistant", "größer 本"), turn("user", "the quick"),
                turn("assistant", "lazy dog")]  # fmt: skip
    found = said(encoder, *messages)
    before = " " if name == "Mistral" else ""
    last = "<think>\n\n</think>\n\nlazy dog" if name == "Qwen" else "lazy dog"
    if metaspace:  # this tokenizer cannot spell all of it
        assert [text.endswith(end) for text in found] == [True, True]
    else:
        assert found == [f"{before}größer 本{end}", f"{before}{last}{end}"]
    assert len(said(opened(name, "last"), *messages)) == 1
    assert said(opened(name, "last"), *messages) == said(opened(name), *messages)[-1:]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_tokens_are_those_that_transformers_makes(opened, name):
    from transformers import AutoTokenizer

    encoder = opened(name)
    messages = [turn("user", "größer  日本\n\n x"), turn("assistant", " the fox\n"), turn("user", ""),
                turn("assistant", "")]  # fmt: skip
    ((stored, size),) = encoder.encode([conversation_of({"messages": messages})])
    other = AutoTokenizer.from_pretrained(str(encoder.tokenizer.folder))
    assert (stored >> 1).tolist() == other.apply_chat_template(messages, return_dict=False)
    assert size == len(other.apply_chat_template(messages, tokenize=False).encode())


def test_marks_of_a_template_are_followed_as_transformers_follows_them(tmp_path):
    from transformers import AutoTokenizer

    folder = tokenizer_folder(tmp_path, MARKED, FAMILIES["Qwen"][1])
    encoder, other = (
        chat_encoder(JsonTokenizer(folder), "", "all"),
        AutoTokenizer.from_pretrained(str(folder)),
    )
    for contents in (["a", "\n\nb 本", "c", "d"], ["the fox", "", "größer", " the quick "]):
        messages = [turn(role, text) for role, text in zip(["user", "assistant"] * 2, contents, strict=True)]
        expected = other.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        ((stored, _),) = encoder.encode([conversation_of({"messages": messages})])
        assert (stored >> 1).tolist() == expected["input_ids"]
        assert (stored & 1).tolist() == expected["assistant_masks"]


def test_system_turns_tools_and_calls_are_read_and_not_learned(opened):
    encoder = opened("Qwen")
    call = {"type": "function", "function": {"name": "add", "arguments": '{"x": 1, "y": "ö"}'}}
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    messages = [turn("system", "be brief"), turn("user", "1?"), turn("assistant", None, tool_calls=[call]),
                turn("tool", "2"), turn("assistant", "2")]  # fmt: skip
    asked, answered = said(encoder, *messages, tools=[tool])
    assert asked.endswith('<tool_call>add{"x": 1, "y": "ö"}</tool_call><|im_end|>')
    assert answered.endswith("2<|im_end|>") and "be brief" not in asked + answered


def test_other_shapes_of_conversations_are_the_same_ones(opened):
    encoder = opened("ChatML")
    expected = encoder.encode([conversation_of({"messages": [turn("user", "a"), turn("assistant", "b")]})])
    parts = [{"type": "text", "text": "a"}]
    for content in (
        {"prompt": "a", "completion": "b"},
        {"prompt": [turn("user", "a")], "completion": [turn("assistant", "b")]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "id": 7},
        {"messages": [turn("user", parts), turn("assistant", "b", tool_calls=None)], "tools": "[]"},
    ):
        ((stored, _),) = encoder.encode([conversation_of(content)])
        assert np.array_equal(stored, expected[0][0])


def test_a_turn_of_weight_0_and_the_turns_of_a_prompt_are_not_learned(opened):
    encoder = opened("ChatML")
    messages = [
        turn("user", "a"),
        turn("assistant", "b", weight=0),
        turn("user", "c"),
        turn("assistant", "d"),
    ]
    assert said(encoder, *messages) == ["d<|im_end|>"]
    content = {"prompt": messages[:3], "completion": messages[3:]}
    ((stored, _),) = encoder.encode([conversation_of(content)])
    assert (stored & 1).sum() == 2


@pytest.mark.parametrize("text", [r"\u0000", r"\\u0000", "\\\n\\u0000"])
def test_code_that_writes_a_zero_character_holds_none(text):
    """A backslash in JSON is two; the first odd one would be of the character."""
    said = [turn("user", text), turn("assistant", "b")]
    assert json.loads(conversation_of({"messages": said}))["messages"][0]["content"] == text


BAD = {
    "escaped": (r'{"messages": [{"role": "user", "content": "a\\\u0000"}]}', "holds a zero character"),
    "no JSON": ('{"messages": [', "line 3 is no JSON (Expecting value, character "),
    "no object": ("[1]", "holds no object"),
    "no turns": ('{"messages": []}', 'its "messages" is no list of turns, found []'),
    "another key": ('{"text": "a"}', 'holds no "messages", no "prompt" and "completion", found text'),
    "a role": ('{"messages": [{"role": "bot", "content": "a"}]}', "turn 1 is of 'bot'; a role is one of"),
    "no content": ('{"messages": [{"role": "user"}]}', "turn 1 has no text as its content, found None"),
    "an image": ('{"messages": [{"role": "user", "content": [{"type": "b"}]}]}', "other content than text"),
    "a zero": ('{"messages": [{"role": "user", "content": "a\\u0000"}]}', "holds a zero character"),
    "tools": ('{"messages": [{"role": "user", "content": "a"}], "tools": "{"}', "the tools are no JSON"),
    "refused": ('{"messages": [{"role": "system", "content": "a"}]}',
                "the chat template refuses it: System role not supported"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_conversation_is_named_by_its_line(tmp_path, name):
    line, finding = BAD[name]
    good = json.dumps({"messages": [turn("user", "a"), turn("assistant", "b")]})
    path = tmp_path / "chats.jsonl"
    path.write_text(f"{good}\n\n{line}\n{good}\n")
    folder = tokenizer_folder(tmp_path / "gemma", *FAMILIES["Gemma"])
    with pytest.raises(ConfigError) as error:
        open_chats(tmp_path, path, JsonTokenizer(folder))
    assert f"{path}, line 3" in str(error.value) and finding in str(error.value)


def test_conversations_without_an_answer_are_refused_and_the_error_says_what_one_is(tmp_path, chatml):
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join([json.dumps({"messages": [turn("user", "a")]})] * 5))
    with pytest.raises(ConfigError, match="has a turn to learn, which is one of the assistant"):
        open_chats(tmp_path, path, ByteTokenizer(), chat_template=chatml)


def open_chats(tmp_path, path, tokenizer, seq_len=64, **rest):
    data = Data(paths=(str(path),), cache=str(tmp_path / "cache"), **rest)
    return corpus.open_corpus(data, corpus.build(data, tokenizer), tokenizer, seq_len)


def chats_file(path, sizes) -> list[str]:
    """Conversations of one answer each, whose lengths are given."""
    answers = ["x" * int(size) for size in sizes]
    lines = [json.dumps({"prompt": f"{n}?", "completion": text}) for n, text in enumerate(answers)]
    path.write_text("\n".join(lines))
    return answers


@pytest.fixture
def chatml(tmp_path):
    path = tmp_path / "chatml.jinja"
    path.write_text(CHATML)
    return str(path)


def test_samples_hold_whole_conversations_and_learn_each_answer_once(tmp_path, chatml):
    rng = np.random.default_rng(3)
    answers = chats_file(tmp_path / "chats.jsonl", rng.integers(0, 60, 70))
    text = open_chats(tmp_path, tmp_path / "chats.jsonl", ByteTokenizer(), 320, chat_template=chatml)
    (source,), (held_out,) = text.sources, text.sets
    batches = [Batches(text, 0, 1, 320, 256).read(n) for n in range(len(source.packed))]
    batches += validation_batches(held_out, 99, 1, 320)
    found = []
    for batch in batches:
        ids, labels = batch.ids[0], batch.labels[0]
        documents = batch.documents[0] if batch.documents is not None else ids * 0
        assert batch.targets == int((labels != IGNORED).sum()) > 0
        for number in documents.unique():
            whole = bytes(ids[documents == number].tolist()).rstrip(b"\0").decode()
            learned = labels[(documents == number) & (labels != IGNORED)]
            found.append(bytes(learned.tolist()).decode())
            assert whole.startswith("<|im_start|>user\n") and whole.count("<|im_start|>") == 2
    # bytes have no token that ends a turn, so that the line after it belongs to it
    assert sorted(found) == sorted(f"{answer}<|im_end|>\n" for answer in answers)
    assert len(source.train) > 0.85 * 320 * len(source.packed)


def test_long_conversations_lose_their_end_or_are_left_out_and_counted(tmp_path, chatml):
    path = tmp_path / "chats.jsonl"
    long = {"messages": [turn("user", "q" * 90), turn("assistant", "never")]}
    silent = {"messages": [turn("user", "hello")]}
    chats_file(path, [5, 5, 200, 7])
    path.write_text("\n".join([path.read_text(), json.dumps(long), json.dumps(silent)]))
    text = open_chats(tmp_path, path, ByteTokenizer(), 80, chat_template=chatml, val_fraction=0.01)
    assert "1 without a turn to learn were left out" in str(text)
    assert "1 too long for train.seq_len lost their end" in str(text)
    assert "1 without a token to learn before that end were left out" in str(text)
    ((source,), (held_out,)) = text.sources, text.sets
    assert source.packed.conversations + held_out.packed.conversations == 4
    rows = [source.packed.row(n) for n in range(len(source.packed))]
    assert all((row.labels != IGNORED).any() for row in rows)


def test_a_set_whose_targets_are_all_cut_away_is_refused(tmp_path, chatml):
    chats_file(tmp_path / "chats.jsonl", [5, 5, 200, 7])
    with pytest.raises(
        ConfigError, match=r"seq_len=8 cuts all \d conversations .* give a longer train.seq_len"
    ):
        open_chats(tmp_path, tmp_path / "chats.jsonl", ByteTokenizer(), 8, chat_template=chatml)


def test_no_turn_to_learn_at_all_is_refused(tmp_path, chatml):
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": [turn("user", "hello")]}))
    with pytest.raises(ConfigError, match=r"no line of .* has a turn to learn"):
        open_chats(tmp_path, tmp_path / "chats.jsonl", ByteTokenizer(), 8, chat_template=chatml)


def test_text_and_conversations_do_not_mix_in_one_source(tmp_path, chatml):
    folder = tmp_path / "mixed"
    folder.mkdir()
    chats_file(folder / "chats.jsonl", [5, 5])
    (folder / "notes.txt").write_text("some text")
    with pytest.raises(ConfigError, match=r"holds conversations and .*notes.txt text; .* data.weights"):
        open_chats(tmp_path, folder, ByteTokenizer(), chat_template=chatml)
    with pytest.raises(ConfigError, match=r"data.paths names no conversations"):
        open_chats(tmp_path, folder / "notes.txt", ByteTokenizer(), 1, chat_template=chatml)


def test_a_tokenizer_without_a_template_is_refused(tmp_path):
    chats_file(tmp_path / "chats.jsonl", [5, 5])
    with pytest.raises(ConfigError, match=r"bytes has no chat template .* data.chat_template"):
        open_chats(tmp_path, tmp_path / "chats.jsonl", ByteTokenizer())


@pytest.mark.parametrize("kind", ["messages", "prompt"])
def test_tables_hold_the_same_conversations(tmp_path, chatml, kind):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"prompt": f"{n}?", "completion": "x" * n} for n in range(9)]
    if kind == "messages":
        rows = [
            {"messages": [turn("user", row["prompt"]), turn("assistant", row["completion"])]} for row in rows
        ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "chats.parquet", row_group_size=4)
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = [
        open_chats(tmp_path, tmp_path / name, ByteTokenizer(), chat_template=chatml)
        for name in ("chats.parquet", "chats.jsonl")
    ]
    one, other = (
        set(map(tuple, (each.sources[0].packed.row(n).labels for n in range(len(each.sources[0].packed)))))
        for each in found
    )
    assert one == other


def test_tokens_to_learn_are_shown(tmp_path, capsys):
    folder = tokenizer_folder(tmp_path / "model", *FAMILIES["ChatML"])
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"prompt": "the fox", "completion": "lazy"}) + "\n")
    tokenize.main(["--show", "3", "--paths", str(path), "--tokenizer", str(folder)])
    printed = capsys.readouterr().out
    assert f"{path}, line 1: " in printed
    assert printed.replace("·", "").endswith("<|im_start|>assistant⏎\n«lazy<|im_end|>»⏎\n\n\n")


def test_a_folder_of_conversations_is_tokenized_once_and_trained_on(tmp_path, chatml, capsys):
    chats_file(tmp_path / "chats.jsonl", range(3, 30))
    out = tmp_path / "tokens"
    command = [str(out), "--paths", str(tmp_path / "chats.jsonl"), "--chat_template", chatml]
    tokenize.main(command)
    assert "tokens of 27 conversations" in capsys.readouterr().out
    assert TokenShard.open(out / "tokens-00000.bin").is_chat
    tokenize.main(command)
    assert "made earlier" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="another text or tokenizer"):
        tokenize.main([*command, "--targets", "last"])
    text = open_chats(tmp_path, out, ByteTokenizer())
    direct = open_chats(tmp_path, tmp_path / "chats.jsonl", ByteTokenizer(), chat_template=chatml)
    assert text.digests()["the tokens of tokens"] == direct.digests()["the tokens of held_out"]
    (tmp_path / "notes.txt").write_text("text")
    with pytest.raises(ConfigError, match="--targets and --chat_template are for conversations"):
        tokenize.main([str(tmp_path / "b"), "--paths", str(tmp_path / "notes.txt"), "--targets", "last"])


def test_a_template_that_asks_for_an_answer_otherwise_than_it_renders_one_is_refused(tmp_path):
    template = CHATML.replace("{{- '<|im_start|>assistant\\n' }}", "{{- '<|im_start|>assistant\\n<think>' }}")
    encoder = chat_encoder(
        JsonTokenizer(tokenizer_folder(tmp_path, template, FAMILIES["ChatML"][1])), "", "all"
    )
    with pytest.raises(BadConversation, match="not known where the answer begins; mark answers"):
        said(encoder, turn("user", "a"), turn("assistant", "b"))
    assert said(encoder, turn("user", "a"), turn("assistant", "<think>b")) == ["b<|im_end|>"]
