"""Text is read as documents, in pieces, and its tokens are kept for the next run with the same text."""

import dataclasses
import io
import json
import multiprocessing
import os
import re
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyruntime.train.config import Data, RunConfig, Train
from pyruntime.train.data import corpus, documents, token_cache, tokenizing
from pyruntime.train.data.tokenizer import ByteTokenizer, JsonTokenizer
from pyruntime.train.errors import ConfigError
from tests.train.data.texts import build, byte_level_bpe, everything, halves, lines_file


def test_every_line_of_jsonl_is_a_document_of_its_text(tmp_path):
    texts = ["one line", "a\nb \u00fc", "", *(f"document {n} of many" for n in range(40))]
    path = lines_file(tmp_path, texts)
    text = build([path], tmp_path)
    assert sorted(everything(text).split(b"\0")[:-1]) == sorted(each.encode() for each in texts if each)
    facts = text.sources[0].text.facts
    assert (facts.files, facts.documents) == (1, len(texts) - 1)


def test_lines_are_split_by_their_text_whatever_file_they_are_in(tmp_path):
    texts = [f"{n} " + "words " * (n % 7) for n in range(60)]
    one = build([lines_file(tmp_path, texts)], tmp_path)
    halves = [lines_file(tmp_path, part, f"{n}.JSONL") for n, part in enumerate((texts[40:], texts[:40]))]
    assert everything(build(halves, tmp_path)) == everything(one)


@pytest.mark.parametrize(
    ("line", "finding"),
    [
        ('{"content": "a", "id": 3}', 'holds no string "text", found only content, id'),
        ('{"text": 3}', 'holds no string "text", found an int'),
        ("[1]", "holds no object but a list"),
        (r'{"text": "a\u0000b"}', "holds a zero character"),
        ("just words", "is no JSON (Expecting value"),
        ("[" * 100_000, "is no JSON ("),
    ],
)
def test_a_line_without_text_is_refused_by_file_and_number(tmp_path, line, finding):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "fine"}\n\n' + line + "\n")
    with pytest.raises(ConfigError) as refused:
        build([path], tmp_path)
    message = str(refused.value)
    assert message.startswith(f"data.paths: {path}, line 3 {finding}")
    assert 'every line of a .jsonl file must be an object with a string "text" (data.field), or' in message
    assert '"messages"' in message and '"instruction"' in message
    assert not list((tmp_path / "cache").iterdir())


CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
EXAMPLES = {
    "a list.json": json.dumps([{"id": 3} | CHAT] * 3),
    "indented.json": "\ufeff\n" + json.dumps([CHAT] * 3, indent=2),
    "lines.JSON": "\n".join([json.dumps(CHAT)] * 3),
    "Alpaca.json": json.dumps([{"instruction": "a", "input": "", "output": "b"}] * 3),
    "pairs.json": json.dumps([{"prompt": "a", "chosen": "b", "rejected": "c"}] * 3),
    "table.csv": '"prompt","completion"\r\na,b\r\n',
}


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("of_folder", [False, True])
def test_examples_in_files_that_would_be_plain_text_are_refused(tmp_path, name, of_folder):
    path = tmp_path / "data" / name
    path.parent.mkdir()
    path.write_text(EXAMPLES[name])
    with pytest.raises(ConfigError, match="is plain text; write each as a line") as refused:
        build([path.parent if of_folder else path], tmp_path)
    assert str(refused.value).startswith(f"data.paths: {path} holds ")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("settings.json", json.dumps({"name": "a", "prompt": "b", "scripts": ["c"] * 50})),
        ("list.json", json.dumps([{"name": f"package {n}"} for n in range(50)])),
        ("damaged.json", '[{"messages": [' + "words " * 50),
        ("empty list.json", "[]" + " " * 200),
        ("table.csv", "a,b\n" + "1,2\n" * 50),
    ],
)
def test_other_files_of_json_and_csv_are_text(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    assert everything(build([tmp_path / name], tmp_path)) == content.encode() + b"\0"


def test_lines_of_ndjson_are_documents_too(tmp_path):
    texts = [f"document {n} of many" for n in range(40)]
    assert build([lines_file(tmp_path, texts, "text.ndjson")], tmp_path).sources[0].text.facts.documents == 40


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.txt.xz", "a.BZ2"])
def test_a_compressed_file_is_refused(tmp_path, name):
    (tmp_path / name).write_bytes(b"anything" * 100)
    with pytest.raises(ConfigError, match=rf"data\.paths: .*{name} is compressed.*; unpack it first\."):
        build([tmp_path / name], tmp_path)


def test_lines_that_all_hold_no_text_are_refused_and_nothing_is_kept(tmp_path):
    path = lines_file(tmp_path, ["", ""])
    with pytest.raises(ConfigError, match=r"data\.paths: no line of .*text\.jsonl holds text\."):
        build([path], tmp_path)
    assert not list((tmp_path / "cache").iterdir())


@given(
    st.lists(st.sampled_from(["word", " ", "\n", "\n\n", "  x", "\u00fc", "\U0001f600", "abc"]), max_size=60)
)
@settings(max_examples=60)
def test_pieces_are_the_text_and_end_between_characters(parts):
    text = "".join(parts).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "PIECE_BYTES", 16)
        pieces = list(documents.cut(io.BytesIO(text + b"behind"), len(text)))
    assert b"".join(pieces) == text
    assert all(len(piece) <= 16 for piece in pieces)
    for piece in pieces:
        piece.decode()


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    """A BPE whose file also says how a model's input is cut and padded."""
    engine = byte_level_bpe(Path(__file__).read_text(), 400)
    engine.enable_truncation(7)
    engine.enable_padding(length=12)
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    engine.save(str(path))
    return path


def test_pieces_make_the_tokens_of_the_whole_text(tmp_path, bpe, monkeypatch):
    monkeypatch.setattr(documents, "PIECE_BYTES", 2000)
    monkeypatch.setattr(documents, "LEAST_UNIT", 7000)
    monkeypatch.setattr(tokenizing, "BATCH_BYTES", 5000)
    path = tmp_path / "long.txt"
    path.write_text(Path(__file__).read_text() * 3)
    tokenizer = JsonTokenizer(bpe)
    text = build([path], tmp_path, tokenizer)
    expected = [*tokenizer.encode(path.read_bytes()), tokenizer.separator]
    assert len(expected) > 3000  # nothing was truncated
    assert np.concatenate(halves(text)).tolist() == expected
    assert text.sources[0].text.facts.documents == 1
    assert text.sets[0].tokens.bytes == pytest.approx(path.stat().st_size * 0.05, rel=0.05)


def never(*_, **__):
    raise AssertionError("tokenized again")


def test_the_same_text_is_tokenized_once(tmp_path, bpe):
    path = lines_file(tmp_path, [f"some text {n}" for n in range(50)])
    said, tokenizer = [], JsonTokenizer(bpe)
    data = Data(paths=(str(path),), cache=str(tmp_path / "cache"))
    (first,) = corpus.build(data, tokenizer, said.append)
    assert len(said) == 1 and f"kept in {tmp_path / 'cache'}" in said[0]
    moved = shutil.copy(path, tmp_path / "moved.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "encode_batch", never)
        (again,) = corpus.build(dataclasses.replace(data, paths=(str(moved),)), tokenizer, said.append)
    assert again.folder == first.folder and len(said) == 1
    with open(path, "a") as file:
        file.write('\n{"text": "more"}')
    assert corpus.build(data, tokenizer)[0].folder != first.folder
    assert corpus.build(data, ByteTokenizer())[0].folder != first.folder


def test_the_share_held_out_is_no_part_of_what_is_kept(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("letters " * 100)
    texts = [build([path], tmp_path, val_fraction=share) for share in (0.1, 0.4)]
    assert [len(text.sets[0].tokens) for text in texts] == [80, 320]
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_damaged_tokens_are_refused(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("letters " * 100)
    build([path], tmp_path)
    (entry,) = (tmp_path / "cache").iterdir()
    (entry / "corpus.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"The tokens in .* are damaged: .*corpus\.json.*; remove"):
        build([path], tmp_path)


def test_a_file_that_is_written_to_meanwhile_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("letters " * 100)
    encode = ByteTokenizer.encode_batch

    def growing(self, texts):
        with open(path, "a") as file:
            file.write("more")
        return encode(self, texts)

    monkeypatch.setattr(ByteTokenizer, "encode_batch", growing)
    with pytest.raises(ConfigError, match=r"a\.txt was written to while it was read; start again\."):
        build([path], tmp_path)
    assert not list((tmp_path / "cache").iterdir())


def test_lines_that_are_rewritten_meanwhile_are_refused(tmp_path, monkeypatch):
    path = lines_file(tmp_path, ["some text", "more text"])
    survey = documents.survey

    def surveyed_then_rewritten(*arguments):
        found = survey(*arguments)
        path.write_text("x" * 200)
        return found

    monkeypatch.setattr(corpus, "survey", surveyed_then_rewritten)
    with pytest.raises(ConfigError, match=r"text\.jsonl was written to while it was read; start again\."):
        build([path], tmp_path)


def test_where_there_is_no_home_a_cache_is_asked_for(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(ConfigError, match=r"data\.cache: there is no home folder .*; name a folder\."):
        token_cache.default_folder()


def test_a_cache_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "cache").write_text("a file")
    path = tmp_path / "a.txt"
    path.write_text("letters " * 100)
    with pytest.raises(ConfigError, match=r"data\.cache: .*cache.* cannot be written: .*name another folder"):
        build([path], tmp_path)


NAME, OTHER = "0a" * 16, "1b" * 16


def write_slowly(cache, number):
    def write(folder):
        (folder / "a").write_text("x" * 1000)
        time.sleep(0.05 * number)
        (folder / "b").write_text("y")

    token_cache.entry(cache, "name", write)


def test_writers_at_the_same_time_leave_one_whole_entry(tmp_path):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_slowly, args=(tmp_path, n)) for n in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0] * 4
    assert [path.name for path in tmp_path.iterdir()] == ["name"]
    assert ((tmp_path / "name" / "a").read_text(), (tmp_path / "name" / "b").read_text()) == ("x" * 1000, "y")


def test_what_a_killed_writer_leaves_is_no_entry_and_is_removed_by_the_next(tmp_path):
    def killed(folder):
        (folder / "a").write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)

    def living(folder):
        (folder / "a").write_text("still writing")
        time.sleep(60)

    context = multiprocessing.get_context("fork")
    other = context.Process(target=token_cache.entry, args=(tmp_path, OTHER, living))
    other.start()
    writer = context.Process(target=token_cache.entry, args=(tmp_path, NAME, killed))
    writer.start()
    writer.join()
    while len(list(tmp_path.glob("*.partial/a"))) < 2:
        time.sleep(0.01)
    token_cache.entry(tmp_path, NAME, lambda folder: (folder / "a").write_text("whole"))
    left = {path.name.partition(".")[0] for path in tmp_path.iterdir()}
    other.kill()
    other.join()
    assert left == {NAME, OTHER}  # the folder of the writer that lives is left alone
    assert len(list(tmp_path.iterdir())) == 2 and (tmp_path / NAME / "a").read_text() == "whole"


def test_folders_of_others_in_the_cache_are_left_alone(tmp_path):
    names = ["mine.partial", f"{NAME}.partial", f"{NAME}.old.partial"]
    for name in names:
        (tmp_path / name).mkdir()
    token_cache.entry(tmp_path, NAME, lambda folder: None)
    assert {path.name for path in tmp_path.iterdir()} == {NAME, *names}


def on_hosts(group, config, hosts, disks):
    """How often each rank tokenized, and the text, where rank r is on hosts[r] and sees disks[r]."""
    counts = []
    build = corpus.build

    def counted(data, *rest):
        counts.append(1)
        return build(data, *rest)

    host, cache = hosts[group.rank()], f"{config.data.cache}-{disks[group.rank()]}"
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, cache=cache))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "build", counted)
        patch.setattr(corpus, "host_name", lambda: host)
        text = corpus.open_everywhere(config, ByteTokenizer(), group, lambda line: None)
    return len(counts), everything(text)


def small_run(folder):
    path = folder / "a.txt"
    path.write_text("letters " * 100)
    return RunConfig(data=Data(paths=(str(path),), cache=str(folder / "cache")), train=Train(seq_len=8))


@pytest.mark.parametrize(
    ("hosts", "disks", "expected"),
    [
        ("aabb", "0000", [1, 0, 0, 0]),
        ("aabb", "0011", [1, 0, 1, 0]),
        ("aaaa", "0011", [1, 0, 1, 0]),  # two containers that have one name
    ],
)
@pytest.mark.second_tier("aabb-0000-expected0")
def test_one_rank_of_each_host_that_sees_no_tokens_makes_them(ranks, tmp_path, hosts, disks, expected):
    found = ranks.run(on_hosts, 4, small_run(tmp_path), hosts, disks)
    assert [count for count, _ in found] == expected
    assert len({text for _, text in found}) == 1


def test_ranks_of_a_host_that_see_too_many_folders_are_refused(ranks, tmp_path):
    errors = ranks.run(on_hosts, 3, small_run(tmp_path), "aaa", "012", expect_errors=True)
    for error in errors:
        assert isinstance(error, ConfigError)
        assert re.match(r"data\.cache: rank 2 \(.*process \d+ on .*\) does not see ", str(error)), error


def without_a_home_on_rank_1(group, config):
    with pytest.MonkeyPatch.context() as patch:
        if group.rank() == 1:
            patch.delenv("XDG_CACHE_HOME", raising=False)
            patch.setattr(os.path, "expanduser", lambda path: path)
            config = dataclasses.replace(config, data=dataclasses.replace(config.data, cache=""))
        corpus.open_everywhere(config, ByteTokenizer(), group, lambda line: None)


def test_a_rank_without_a_home_is_told_of_on_every_rank(ranks, tmp_path):
    errors = ranks.run(without_a_home_on_rank_1, 2, small_run(tmp_path), expect_errors=True)
    assert [str(error).partition(" to keep")[0] for error in errors] == [
        "data.cache: there is no home folder"
    ] * 2


def test_the_tokenizer_never_gets_more_than_a_batch_whatever_the_size_of_a_file(tmp_path, monkeypatch):
    path, given_at_a_time = tmp_path / "long.txt", []
    monkeypatch.setattr(tokenizing, "SMALL_BYTES", 2**40)
    path.write_text("def function(argument):\n    return argument + 1\n" * 250_000)
    encode = ByteTokenizer.encode_batch

    def watched(self, texts):
        given_at_a_time.append((sum(map(len, texts)), max(map(len, texts))))
        return encode(self, texts)

    monkeypatch.setattr(ByteTokenizer, "encode_batch", watched)
    text = build([path], tmp_path)
    assert len(everything(text)) == path.stat().st_size + 1 > 2.5 * tokenizing.BATCH_BYTES
    assert max(batch for batch, _ in given_at_a_time) < tokenizing.BATCH_BYTES + documents.PIECE_BYTES
    assert max(piece for _, piece in given_at_a_time) <= documents.PIECE_BYTES
