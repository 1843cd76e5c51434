"""Text becomes tokens and comes back."""

import json
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, processors

from pyruntime.cli.generate import _decoded
from pyruntime.train.data.tokenizer import (
    ByteTokenizer,
    JsonTokenizer,
    load_beside,
    open_tokenizer,
    prompt_ids,
)
from pyruntime.train.errors import ConfigError
from tests.train.data.texts import byte_level_bpe


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    """A byte-level BPE of a few hundred tokens, as a file."""
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    byte_level_bpe("def main(self):\n    return self\n", 300).save(str(path))
    return path


@given(st.text())
def test_bytes_come_back(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text.encode())
    assert tokenizer.decode(ids.tolist()) == text
    assert len(ids) == len(text.encode())


def test_tokens_that_are_no_bytes_are_nothing():
    assert ByteTokenizer().decode([104, 256, 105, 2047]) == "hi"
    assert "".join(_decoded(iter([104, 256, 0xC3, 2047, 0xBC]), ByteTokenizer())) == "hü"


def test_a_character_is_told_when_all_its_bytes_are_there():
    told = list(_decoded(iter(b"h\xc3\xbc\xff!\xc3"), ByteTokenizer()))
    assert [text for text in told if text] == ["h", "ü", "\ufffd!", "\ufffd"]


def test_a_tokenizer_json_comes_back_and_knows_its_separator(bpe):
    tokenizer = open_tokenizer(str(bpe))
    ids = tokenizer.encode("def größe(self)".encode())
    assert tokenizer.decode(ids.tolist()) == "def größe(self)"
    assert len(ids) < len("def größe(self)".encode())
    assert tokenizer.separator == 0
    assert ids.max() < tokenizer.vocab_size


def test_bytes_that_are_no_utf8_are_kept(bpe):
    tokenizer = JsonTokenizer(bpe)
    assert tokenizer.decode(tokenizer.encode(b"a\xffb").tolist()) == r"a\xffb"


def test_a_checkpoints_tokenizer_is_found_beside_it(bpe, tmp_path):
    assert isinstance(load_beside(tmp_path, 256), ByteTokenizer)
    assert isinstance(load_beside(tmp_path, 2048), ByteTokenizer)
    with pytest.raises(ConfigError, match=r"holds no tokenizer\.json, and its vocabulary of 200 tokens"):
        load_beside(tmp_path, 200)
    JsonTokenizer(bpe).save(tmp_path)
    assert load_beside(tmp_path, 300).vocab_size == JsonTokenizer(bpe).vocab_size


def test_transformers_reads_the_tokenizer_beside_a_checkpoint(bpe, tmp_path):
    from transformers import AutoTokenizer

    ours = JsonTokenizer(bpe)
    ours.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.eos_token_id == theirs.bos_token_id == ours.separator is not None
    assert theirs.encode("a text", add_special_tokens=False) == ours.encode(b"a text").tolist()
    config = tmp_path / "own" / "tokenizer_config.json"
    config.parent.mkdir()
    shutil.copyfile(bpe, config.with_name("tokenizer.json"))
    config.write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "mine": 1}')
    JsonTokenizer(config.with_name("tokenizer.json")).save(tmp_path)
    assert (tmp_path / config.name).read_text() == config.read_text(), "one that is there already is kept"


@pytest.fixture
def like_llama(tmp_path):
    """The folder of a tokenizer that begins texts with a token, and whose end of a text is none of the usual;
    "</s>" is a mark of HTML in it."""
    engine = byte_level_bpe("def main(self):\n    return self\n", 300)
    engine.add_special_tokens(["<begin>", "<end>"])
    engine.post_processor = processors.TemplateProcessing(
        single="<begin> $A", special_tokens=[("<begin>", engine.token_to_id("<begin>"))]
    )
    engine.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        '{"eos_token": {"__type": "AddedToken", "content": "<end>"}}'
    )
    return tmp_path


def test_documents_begin_and_end_as_the_tokenizer_says(like_llama, tmp_path):
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(like_llama)
    for name in (like_llama, like_llama / "tokenizer.json"):
        ours = open_tokenizer(str(name))
        assert [*ours.begin, *ours.encode(b"def main")] == theirs.encode("def main")
        assert ours.separator == theirs.eos_token_id
    (tmp_path / "again").mkdir()
    ours.save(tmp_path / "again")
    again = load_beside(tmp_path / "again", 400)
    assert (again.begin, again.separator, again.fingerprint) == (ours.begin, ours.separator, ours.fingerprint)
    (like_llama / "tokenizer_config.json").unlink()
    other = JsonTokenizer(like_llama)
    assert other.separator == theirs.convert_tokens_to_ids("</s>")
    assert other.fingerprint != ours.fingerprint, "other tokens are made of a text"


def test_a_tokenizer_in_another_form_is_what_transformers_makes_of_it(bpe, tmp_path):
    model = json.loads(bpe.read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [each if isinstance(each, str) else " ".join(each) for each in model["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    config = tmp_path / "tokenizer_config.json"
    config.write_text('{"tokenizer_class": "GPT2Tokenizer", "eos_token": "</s>", "unk_token": "</s>"}')
    ours = open_tokenizer(str(tmp_path))
    text = b"def main(other)"
    assert ours.encode(text).tolist() == JsonTokenizer(bpe).encode(text).tolist()
    assert ours.separator == JsonTokenizer(bpe).separator

    config.write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    with pytest.raises(ConfigError, match=r"holds no tokenizer\.json, and ByT5Tokenizer of transformers"):
        open_tokenizer(str(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        ConfigError, match=r"empty holds no tokenizer\.json, and transformers cannot make one"
    ):
        open_tokenizer(str(tmp_path / "empty"))


@pytest.mark.parametrize("content", ["[]", "{", '"text"', '{"eos_token": "<none>"}', '{"eos_token": 3}'])
def test_a_wrong_tokenizer_config_is_refused_in_a_sentence(bpe, tmp_path, content):
    shutil.copyfile(bpe, tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json (is damaged|ends a text with)"):
        open_tokenizer(str(tmp_path))


def test_a_prompt_begins_as_documents_do(like_llama):
    tokenizer = JsonTokenizer(like_llama)
    assert prompt_ids(tokenizer, b"") == [*tokenizer.begin]
    assert prompt_ids(tokenizer, b"ab") == [*tokenizer.begin, *tokenizer.encode(b"ab").tolist()]


def test_a_damaged_tokenizer_json_is_refused(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(ConfigError, match=r"is not a tokenizer\.json"):
        JsonTokenizer(path)


@pytest.fixture
def checkpoint(bpe, tmp_path):
    """A checkpoint's folder with that tokenizer."""
    (tmp_path / "config.json").write_text('{"vocab_size": 300}')
    JsonTokenizer(bpe).save(tmp_path)
    return tmp_path


def test_the_tokenizer_of_the_checkpoint_to_start_from_is_used(bpe, checkpoint):
    text = b"def main(self)"
    expected = JsonTokenizer(bpe).encode(text).tolist()
    for named in ("", str(bpe)):
        assert open_tokenizer(named, str(checkpoint)).encode(text).tolist() == expected
    assert isinstance(open_tokenizer(""), ByteTokenizer)


def test_another_vocabulary_than_the_checkpoints_is_refused(checkpoint, tmp_path_factory):
    other = tmp_path_factory.mktemp("other") / "tokenizer.json"
    Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(other))
    for named in ("bytes", str(other)):
        with pytest.raises(ConfigError, match=r"has another vocabulary than .*tokenizer\.json, which model"):
            open_tokenizer(named, str(checkpoint))


def test_a_checkpoint_that_does_not_say_what_it_reads_is_refused(checkpoint):
    (checkpoint / "tokenizer.json").unlink()
    with pytest.raises(
        ConfigError, match=r"holds no tokenizer\.json, and its vocabulary of 300 tokens is not"
    ):
        open_tokenizer("", str(checkpoint))
    assert isinstance(open_tokenizer("bytes", str(checkpoint)), ByteTokenizer)  # by name it is
    (checkpoint / "config.json").write_text('{"vocab_size": 256}')
    assert isinstance(open_tokenizer("", str(checkpoint)), ByteTokenizer)


def test_ids_with_gaps_count_up_to_the_largest(tmp_path):
    path = tmp_path / "tokenizer.json"
    Tokenizer(models.WordLevel({"a": 0, "b": 7}, unk_token="a")).save(str(path))
    assert JsonTokenizer(path).vocab_size == 8
