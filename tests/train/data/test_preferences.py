"""Pairs of answers become tokens: both answers behind one prompt, in one sample, each a document."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from pyruntime.cli import tokenize
from pyruntime.train.config import Data, Dpo, RunConfig
from pyruntime.train.data import corpus
from pyruntime.train.data.batches import IGNORED, Batches, validation_batches
from pyruntime.train.data.chat_template import BadConversation
from pyruntime.train.data.preferences import pair_of
from pyruntime.train.data.tokenizer import ByteTokenizer
from pyruntime.train.errors import ConfigError
from tests.train.data.test_conversations import CHATML, turn

USER, GOOD, BAD = turn("user", "why?"), turn("assistant", "so"), turn("assistant", "no idea")
SHAPES = {
    "text": {"prompt": "why?", "chosen": "so", "rejected": "no idea"},
    "messages": {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
    "whole conversations": {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    "both": {"prompt": "why?", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
    "one message": {"messages": [USER], "chosen": GOOD, "rejected": BAD},
    "ShareGPT": {
        "conversations": [{"from": "human", "value": "why?"}],
        "chosen": {"from": "gpt", "value": "so"},
        "rejected": {"from": "gpt", "value": "no idea"},
    },
    "with columns of a table": {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD], "messages": None},
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_that_others_have_are_read(name):
    asked = USER | {"weight": 0}
    assert json.loads(pair_of(SHAPES[name])) == {
        "chosen": {"messages": [asked, GOOD], "tools": None},
        "rejected": {"messages": [asked, BAD], "tools": None},
    }


def test_equal_answers_share_all_but_their_last_turn():
    found = json.loads(pair_of({"chosen": [USER, GOOD, USER, BAD], "rejected": [USER, GOOD, USER, BAD]}))
    assert [each.get("weight", 1) for each in found["chosen"]["messages"]] == [0, 0, 0, 1]
    assert found["chosen"] == found["rejected"]


BAD_PAIRS = {
    'it holds no "rejected"': {"prompt": "a", "chosen": "b", "rejected": None},
    'holds no "prompt"': {"chosen": "b", "rejected": "c"},
    "different questions": {"chosen": [USER, GOOD], "rejected": [turn("user", "where?"), BAD]},
    'do not hold its "prompt"': {"prompt": "where?", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
    "the other does not": {"prompt": "why?", "chosen": [USER, GOOD], "rejected": [BAD]},
    'its "chosen" is no list of turns': {"prompt": "why?", "chosen": 3, "rejected": "b"},
}


@pytest.mark.parametrize("words", BAD_PAIRS)
def test_what_is_no_pair_is_refused(words):
    with pytest.raises(BadConversation, match=words):
        pair_of(BAD_PAIRS[words])


def opened(folder, path, seq_len, **options):
    template = folder / "chatml.jinja"
    template.write_text(CHATML)
    data = Data(
        paths=(str(path),), cache=str(folder / "cache"), chat_template=str(template),
        **{"val_fraction": 0.2} | options,
    )  # fmt: skip
    texts = corpus.build(data, ByteTokenizer())
    return corpus.open_corpus(data, texts, ByteTokenizer(), seq_len)


def write(path, pairs):
    rows = [{"prompt": f"{n}?", "chosen": a, "rejected": b} for n, (a, b) in enumerate(pairs)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return rows


def text_of(prompt, answer):
    return f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"


def test_a_sample_holds_both_answers_of_its_pairs(tmp_path):
    rng = np.random.default_rng(4)
    rows = write(
        tmp_path / "p.jsonl", [("x" * int(a), "y" * int(b)) for a, b in rng.integers(0, 60, (40, 2))]
    )
    text = opened(tmp_path, tmp_path / "p.jsonl", 400)
    ((source,), (held_out,)) = text.sources, text.sets
    batches = [Batches(text, 0, 1, 400, 256).read(n) for n in range(len(source.packed))]
    batches += validation_batches(held_out, 99, 1, 400)
    found = []
    for batch in batches:
        answers = batch.preferences.answers[0]
        assert batch.targets == batch.preferences.pairs == len(answers.unique()) // 2
        texts = []
        for number in answers.unique():
            ids, labels = batch.ids[0][answers == number], batch.labels[0][answers == number]
            learned = bytes(labels[labels != IGNORED].tolist()).decode()
            texts.append((bytes(ids.tolist()).rstrip(b"\0").decode(), learned))
        found += list(zip(texts[::2], texts[1::2], strict=True))
    expected = [
        tuple(
            (text_of(row["prompt"], row[key])[:-1], f"{row[key]}<|im_end|>\n")
            for key in ("chosen", "rejected")
        )
        for row in rows
    ]
    assert sorted(found) == sorted(expected)
    assert f"{len(rows)} pairs of answers in {len(batches)} samples" in str(text)
    assert source.text.facts.documents == len(rows)


def test_batches_split_into_micro_batches_with_the_pairs_of_their_sequences(tmp_path):
    write(tmp_path / "p.jsonl", [("x" * (n % 50), "y" * (n % 7)) for n in range(60)])
    text = opened(tmp_path, tmp_path / "p.jsonl", 300)
    for packed in text.pairs.values():
        packed.reference = np.random.default_rng(1).random((packed.pairs, 2))
    whole = Batches(text, 0, 6, 300, 256).read(0)
    parts = whole.split(2)
    assert sum(part.targets for part in parts) == whole.targets == whole.of_step[1]
    references = np.concatenate([part.preferences.reference for part in parts])
    assert (references == whole.preferences.reference.numpy()).all()
    assert all(int(part.preferences.answers.min()) == 0 for part in parts)
    assert math.fsum(part.weight for part in parts) == pytest.approx(3)


def test_long_pairs_lose_the_end_of_the_longer_answer_or_are_left_out_and_counted(tmp_path):
    before = len(text_of("0?", "").removesuffix("<|im_end|>\n"))
    room = 2 * before + 100
    rows = write(tmp_path / "p.jsonl", [("a" * 5, "b" * 300), ("c" * 300, "d" * 300), ("e", "f"), ("g", "h")])
    never = {"prompt": "q" * 400, "chosen": "never", "rejected": "seen"}
    silent = {"chosen": [USER, USER], "rejected": [USER, turn("user", "else")]}
    rows += [never, silent]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    text = opened(tmp_path, tmp_path / "p.jsonl", room, val_fraction=0.01)
    assert "1 without a turn to learn were left out" in str(text)
    assert "2 too long for train.seq_len lost their end" in str(text)
    assert "1 without a token to learn before that end were left out" in str(text)
    kept = {}
    for packed in text.pairs.values():
        for sample in range(len(packed)):
            row = packed.row(sample)
            assert (row.labels != IGNORED).any()
            for answer in range(2 * len(packed.members(sample))):
                labels = row.labels[row.documents == answer]
                learned = bytes(labels[labels != IGNORED].tolist()).decode()
                kept[learned[0]] = learned
    whole = before + len("aaaaa<|im_end|>")  # positions of the short answer, whose pair has the others
    half = room // 2 + 1 - before
    assert kept == {
        "b": "b" * (room - whole + 1 - before), "c": "c" * half, "d": "d" * half,
        **{answer[0]: f"{answer}<|im_end|>\n" for answer in ("aaaaa", "e", "f", "g", "h")},
    }  # fmt: skip


def test_a_set_of_pairs_that_are_all_cut_away_is_refused(tmp_path):
    write(tmp_path / "p.jsonl", [("x", "y")] * 5)
    with pytest.raises(
        ConfigError, match=r"seq_len=8 holds both answers .* all \d pairs .* a longer train.seq"
    ):
        opened(tmp_path, tmp_path / "p.jsonl", 8)


def test_tables_hold_the_same_pairs(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = write(tmp_path / "p.jsonl", [("x" * n, "y" * (9 - n)) for n in range(9)])
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "p.parquet", row_group_size=4)
    one, other = (
        opened(tmp_path, tmp_path / name, 300).sources[0].packed for name in ("p.jsonl", "p.parquet")
    )
    assert {tuple(one.row(n).labels) for n in range(len(one))} == {
        tuple(other.row(n).labels) for n in range(len(other))
    }


def test_pairs_and_conversations_do_not_mix_and_need_their_option(tmp_path):
    folder = tmp_path / "mixed"
    folder.mkdir()
    write(folder / "pairs.jsonl", [("x", "y")] * 3)
    (folder / "chats.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}))
    with pytest.raises(ConfigError, match=r"conversations and .*pairs.jsonl pairs of answers; give each"):
        opened(tmp_path, folder, 99)
    data = Data(paths=(str(folder / "pairs.jsonl"),), chat_template=str(tmp_path / "chatml.jinja"))
    texts = corpus.build(data, ByteTokenizer())
    with pytest.raises(ConfigError, match=r"holds pairs of answers .* set dpo.beta"):
        corpus.check_pairs(RunConfig(data=data), texts)
    corpus.check_pairs(RunConfig(data=data, dpo=Dpo(beta=0.1)), texts)
    data = Data(paths=(str(folder / "chats.jsonl"),), chat_template=str(tmp_path / "chatml.jinja"))
    with pytest.raises(ConfigError, match=r"dpo.beta=0.1 learns from pairs .*, and .*chats.jsonl holds"):
        corpus.check_pairs(RunConfig(data=data, dpo=Dpo(beta=0.1)), corpus.build(data, ByteTokenizer()))


def test_pairs_are_shown_and_tokenized_beforehand(tmp_path, capsys):
    path, template = tmp_path / "p.jsonl", tmp_path / "chatml.jinja"
    write(path, [("so", "no idea"), ("x", "y")])
    template.write_text(CHATML)
    asked = ["--paths", str(path), "--chat_template", str(template)]
    tokenize.main(["--show", "1", *asked])
    shown = capsys.readouterr().out
    assert "line 1, chosen: " in shown and "line 1, rejected: " in shown
    assert "«s·o·<·|·i·m·_·e·n·d" in shown and "«n·o· ·i·d·e·a" in shown
    tokenize.main([str(tmp_path / "out"), *asked])
    assert "tokens of 2 pairs of answers" in capsys.readouterr().out
    data = Data(paths=(str(tmp_path / "out"),), val_fraction=0.5)
    text = corpus.open_corpus(data, corpus.build(data, ByteTokenizer()), ByteTokenizer(), 200)
    assert sum(each.conversations for each in text.pairs.values()) == 2


def test_a_line_that_is_no_pair_is_named(tmp_path):
    rows = write(tmp_path / "p.jsonl", [("x", "y")] * 3)
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, [*rows, {"prompt": "a", "chosen": "b"}])))
    with pytest.raises(ConfigError, match=r'p.jsonl, line 4: it holds no "rejected", found prompt, chosen'):
        opened(tmp_path, tmp_path / "p.jsonl", 99)
