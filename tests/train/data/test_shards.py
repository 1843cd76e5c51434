"""A shard is read as it was written; one that was cut off, changed or is no shard is told."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyruntime.train.data.token_shards import (
    BLOCK_BYTES,
    HEADER_BYTES,
    SAMPLED,
    DamagedShard,
    ShardWriter,
    TokenShard,
    dtype_of,
    mark_of,
)
from tests.mutations import BOUNDED, contents
from tests.train.data.texts import write_shard


@pytest.mark.parametrize("vocab_size", [256, 257, 65536, 65537])
def test_tokens_come_back_in_the_smallest_type(tmp_path, vocab_size):
    rng = np.random.default_rng(random.getrandbits(64))
    documents = [rng.integers(vocab_size, size=int(n)).astype(np.uint32) for n in rng.integers(0, 50, 9)]
    shard = write_shard(tmp_path / "a", documents, dtype_of(vocab_size))
    assert shard.tokens.itemsize == {256: 1, 257: 2, 65536: 2, 65537: 4}[vocab_size]
    assert np.array_equal(shard.tokens, np.concatenate(documents))
    assert np.array_equal(shard.index[0], np.cumsum([len(each) for each in documents]))
    assert shard.mark == mark_of(b"any") != mark_of(b"other")
    shard.check()


def test_it_has_its_name_when_it_is_whole(tmp_path):
    with ShardWriter(tmp_path / "a", np.dtype(np.uint8), b"any") as out:
        out.write(np.arange(9))
        assert not (tmp_path / "a").exists()
    assert not list(tmp_path.iterdir())  # discarded, as it was not published


@pytest.mark.parametrize(
    ("damage", "finding"),
    [
        (lambda content: content[:-1], "it has 239 bytes and was written with 240"),
        (lambda content: content + b"\0", "it has 241 bytes and was written with 240"),
        (lambda content: content[:60], "it is no shard of tokens"),
        (lambda content: b"text " * 50, "it is no shard of tokens"),
        (lambda content: content[:20] + b"\1" + content[21:], "its header is not what was written"),
        (lambda content: content[:205] + b"\7" + content[206:], "its index is not what was written"),
        (lambda content: content[:-1] + b"\7", "its index is not what was written"),
        (lambda content: content[:130] + b"\7" + content[131:], r"its tokens are .* \(BLAKE2b of block 0\)"),
    ],
)
def test_what_is_no_whole_shard_is_told_when_it_is_opened(tmp_path, damage, finding):
    path = tmp_path / "a"
    write_shard(path, [np.arange(20), np.arange(15)])
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DamagedShard, match=finding):
        TokenShard.open(path)


def test_a_changed_token_beside_the_blocks_that_are_sampled_is_found_by_reading_all(tmp_path):
    path = tmp_path / "a"
    write_shard(path, [np.arange(BLOCK_BYTES * 30) % 251], "uint8")
    original = path.read_bytes()
    found = []
    for block in range(30):
        content = bytearray(original)
        content[HEADER_BYTES + block * BLOCK_BYTES + 77] ^= 1
        path.write_bytes(content)
        try:
            shard = TokenShard.open(path)
        except DamagedShard:
            found.append(block)
            continue
        with pytest.raises(DamagedShard, match="its content is not what was written"):
            shard.check()
    assert len(found) == SAMPLED and {0, 29} < set(found)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("shard") / "a"
    write_shard(path, [np.arange(20), np.arange(15)])
    return path


@given(st.data())
@BOUNDED
def test_changed_bytes_are_always_told(whole, data):
    original, other = whole.read_bytes(), whole.with_name("b")
    content = data.draw(contents(original))
    other.write_bytes(content)
    try:
        TokenShard.open(other).check()
    except DamagedShard:
        return
    assert content == original
