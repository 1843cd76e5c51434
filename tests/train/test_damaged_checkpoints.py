"""Whatever was changed in a checkpoint's files, with or without checksums that fit: it is loaded, or refused
in one sentence, and torch logs no traceback."""

import json
import logging
import os
import pickle

from hypothesis import given, settings
from hypothesis import strategies as st

from pyruntime.train import checkpoint_folder, manifest
from pyruntime.train.errors import ConfigError
from tests.mutations import BOUNDED, contents, documents, is_one_sentence
from tests.train import jobs


def cut_off_header(content):
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def with_header(header, rest):
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + rest


@st.composite
def changed_files(draw, whole):
    """A safetensors file with other bytes anywhere, in its header, or with other values there."""
    how = draw(st.sampled_from(["bytes", "header bytes", "header values", "blocks"]))
    header, rest = cut_off_header(whole)
    if how == "bytes":
        return draw(contents(whole))
    if how == "header bytes":
        return draw(contents(whole[: len(whole) - len(rest)])) + rest
    if how == "header values":
        return with_header(draw(documents(header)), rest)
    about = header["__metadata__"]
    blocks = draw(documents(json.loads(about["DCP_SHARDING_INFO"])))
    return with_header(header | {"__metadata__": about | {"DCP_SHARDING_INFO": json.dumps(blocks)}}, rest)


class Tracebacks(logging.Handler):
    """Fails where a traceback is logged."""

    def emit(self, record):
        assert not record.exc_info, record.getMessage()


def resume_each(group, config, checkpoint):
    """How many damaged checkpoints were loaded, and how many refused."""
    name = f"rank-0000{group.rank()}.safetensors"
    path, made = checkpoint / name, jobs.trainer(group, config)
    whole, sums = path.read_bytes(), manifest.read(checkpoint)
    counts = {"loaded": 0, "refused": 0}

    @given(st.data())
    @settings(BOUNDED, max_examples=40, deadline=None)
    def resume(data):
        content = data.draw(changed_files(whole))
        fits = data.draw(st.sampled_from([True, True, False]))
        path.write_bytes(content)
        manifest.write(checkpoint, sums | ({name: manifest.checksum(path)} if fits else {}))
        try:
            made.resume(checkpoint)
            counts["loaded"] += 1
            assert fits or content == whole
        except ConfigError as error:
            counts["refused"] += 1
            assert is_one_sentence(error) and str(checkpoint) in str(error)

    handler = Tracebacks(level=logging.DEBUG)
    logging.getLogger().addHandler(handler)
    try:
        resume()
    finally:
        logging.getLogger().removeHandler(handler)
        path.write_bytes(whole)
        manifest.write(checkpoint, sums)
    made.resume(checkpoint)  # the trainer is none the worse for it
    return counts


def test_changed_files_of_a_checkpoint(ranks, tmp_path):
    config = jobs.job(tmp_path, steps=1)
    folder = jobs.prepare(config)
    ranks.run(jobs.history, 1, config)
    (counts,) = ranks.run(resume_each, 1, config, checkpoint_folder.find(folder))
    assert counts["loaded"] > 3 and counts["refused"] > 20, counts


class Runs:
    """Makes a folder where a pickle of it is loaded."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def resume_with_pickles(group, config, checkpoint, made_by_pickle):
    """What is said where pickles stand in the place of each file, with checksums that fit."""
    bomb, said = pickle.dumps(Runs(made_by_pickle)), []
    sums = manifest.read(checkpoint)
    for name in (".metadata", "__0_0.distcp", *sums):
        path = checkpoint / name
        whole = path.read_bytes() if path.exists() else b""
        path.write_bytes(bomb)
        manifest.write(checkpoint, sums | {name: manifest.checksum(path)})
        try:
            jobs.trainer(group, config).resume(checkpoint)
        except ConfigError as error:
            said.append((name, str(error)))
        path.write_bytes(whole)
        manifest.write(checkpoint, sums)
    return said


def test_no_pickle_is_loaded(ranks, tmp_path):
    config = jobs.job(tmp_path, steps=1)
    folder = jobs.prepare(config)
    ranks.run(jobs.history, 1, config)
    trap = tmp_path / "a pickle was loaded"
    (said,) = ranks.run(resume_with_pickles, 1, config, checkpoint_folder.find(folder), trap)
    assert not trap.exists()
    assert [name for name, _ in said] == ["rank-00000.safetensors", "run.json"]
    assert all(is_one_sentence(message) for _, message in said)
    pickle.loads(pickle.dumps(Runs(trap)))
    assert trap.exists()  # or the trap would catch nothing
