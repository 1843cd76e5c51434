"""A checkpoint that is not what was saved is refused on every rank, by the name of the file, and changes
nothing."""

import hashlib
import json
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from pyruntime.train import checkpoint_folder, manifest
from pyruntime.train.checkpoint import state_of
from pyruntime.train.config import Checkpoint
from pyruntime.train.errors import ConfigError
from tests.train import jobs

FILES = ("rank-00000.safetensors", "rank-00001.safetensors")


@pytest.fixture(scope="module")
def saved(request, tmp_path_factory):
    """A checkpoint of two steps at tp=2, and the job it is of."""
    ranks = request.getfixturevalue("ranks")
    config = jobs.job(tmp_path_factory.mktemp("job"), steps=2)
    folder = jobs.prepare(config)
    ranks.run(jobs.history, 2, config)
    return checkpoint_folder.find(folder), jobs.changed(config, "train", steps=3)


@pytest.fixture
def copied(saved, tmp_path):
    return shutil.copytree(saved[0], tmp_path / "step-000002"), saved[1]


def refused_unchanged(group, config, checkpoint):
    """What the refusal says; the weights and the step are then as they were."""
    made = jobs.trainer(group, config)
    before = {name: value.clone() for name, value in made.model.named_parameters()}
    with pytest.raises(ConfigError) as refused:
        made.resume(checkpoint)
    assert made.step == 0
    assert all(torch.equal(value, before[name]) for name, value in made.model.named_parameters())
    return str(refused.value)


def test_the_manifest_names_every_file_as_sha256sum_does(saved):
    folder, _ = saved
    files = json.loads((folder / manifest.MANIFEST).read_text())["files"]
    assert set(files) | {manifest.MANIFEST} == {path.name for path in folder.iterdir()}
    assert set(files) == {"run.json", *FILES}
    for name, content in files.items():
        stored = (folder / name).read_bytes()
        assert content == {"size": len(stored), "sha256": hashlib.sha256(stored).hexdigest()}


def damage_64_bytes(path):
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 64] = bytes(byte ^ 0x55 for byte in content[middle : middle + 64])
    path.write_bytes(content)


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[-7] ^= 4
    path.write_bytes(content)


def change_step(path):
    path.write_text(path.read_text().replace('"step": 2', '"step": 1'))


def cut(path):
    path.write_bytes(path.read_bytes()[:500])


@pytest.mark.parametrize(
    ("name", "damage", "finding"),
    [
        (FILES[0], damage_64_bytes, "its content is not what was saved (SHA-256)"),
        (FILES[1], flip_a_bit, "its content is not what was saved (SHA-256)"),
        (FILES[1], cut, "it has 500 bytes and was saved with"),
        (FILES[0], lambda path: path.unlink(), "it cannot be read: No such file or directory"),
        ("run.json", change_step, "its content is not what was saved (SHA-256)"),
        ("run.json", lambda path: path.write_text("{"), "it has 1 bytes and was saved with"),
        ("manifest.json", lambda path: path.write_text("[]"), "it is no list of checksums"),
    ],
)
def test_a_damaged_file_is_refused_by_its_name(ranks, copied, name, damage, finding):
    folder, config = copied
    damage(folder / name)
    messages = ranks.run(refused_unchanged, 2, config, folder)
    assert messages[0] == messages[1]
    assert f"checkpoint.resume: {folder / name} is damaged: {finding}" in messages[0]
    assert messages[0].endswith(
        "; copy the checkpoint again from where it is whole, or resume from an older one."
    )


def test_a_checkpoint_without_a_manifest_is_refused(ranks, copied):
    folder, config = copied
    (folder / manifest.MANIFEST).unlink()
    for message in ranks.run(refused_unchanged, 2, config, folder):
        assert f"{folder} holds no manifest.json, so its files cannot be checked" in message


@pytest.mark.parametrize("number", [None, 2])
def test_a_checkpoint_of_an_older_version_is_refused(copied, number):
    folder, _ = copied
    (folder / manifest.MANIFEST).unlink()
    facts = json.loads((folder / "run.json").read_text())
    assert facts.pop("format") == 3
    (folder / "run.json").write_text(json.dumps(facts if number is None else facts | {"format": number}))
    if number:  # those had checksums
        manifest.write(folder, {"run.json": manifest.checksum(folder / "run.json")})
    with pytest.raises(ConfigError, match="was saved by an older version, in pickles, which are not loaded"):
        checkpoint_folder.read(folder)


def test_more_samples_than_there_can_be_are_damage(copied):
    folder, _ = copied
    facts = json.loads((folder / "run.json").read_text()) | {"samples": 2**70}
    (folder / "run.json").write_text(json.dumps(facts))
    manifest.write(folder, {"run.json": manifest.checksum(folder / "run.json")})
    with pytest.raises(ConfigError, match="it does not say what was saved"):
        checkpoint_folder.read(folder)


def through_torch(group, config, checkpoint):
    """What torch's own reader of safetensors finds, and what ours does."""
    found = []
    for load in (dcp.load, None):
        made = jobs.trainer(group, config)
        if load is None:
            made.resume(checkpoint)
        state = state_of(made.sharded)
        if load is not None:
            load(state, storage_reader=HuggingFaceStorageReader(str(checkpoint)), process_group=group)
        found.append({name: value.full_tensor() for part in state.values() for name, value in part.items()})
    return found


def test_torch_reads_the_files_too(ranks, copied):
    folder, config = copied
    for theirs, ours in ranks.run(through_torch, 2, config, folder):
        assert len(ours) > 20 and theirs.keys() == ours.keys()
        assert all(torch.equal(theirs[name], ours[name]) for name in ours)


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 100), max_size=12), st.integers(1, 5))
@settings(max_examples=50)
def test_every_file_is_read_by_one_rank_and_no_rank_reads_much_more(sizes, ranks):
    shares = [manifest.share(sizes, rank, ranks) for rank in range(ranks)]
    assert sorted(name for share in shares for name in share) == sorted(sizes)
    loads = [sum(sizes[name] for name in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes.values(), default=0)


def folders(tmp_path, *names, saved_at=None):
    for number, name in enumerate(names):
        facts = {} if saved_at is None else {"saved_at": saved_at[number]}
        (tmp_path / checkpoint_folder.FOLDER / name).mkdir(parents=True)
        (tmp_path / checkpoint_folder.FOLDER / name / checkpoint_folder.FACTS_FILE).write_text(
            json.dumps(facts)
        )
    return tmp_path / checkpoint_folder.FOLDER


def test_the_newest_checkpoint_is_that_of_the_greatest_step(tmp_path):
    folder = folders(
        tmp_path, "step-1000000", "step-999999", "step-000002", "step-2000000.partial", "step-old"
    )
    found = [path.name for path in checkpoint_folder.complete(folder)]
    assert found == ["step-000002", "step-999999", "step-1000000"]
    assert checkpoint_folder.newest(tmp_path).name == "step-1000000"


@pytest.mark.parametrize(
    ("saved", "keep", "removed"),
    [(6, 3, [8]), (6, 2, [2, 8]), (4, 1, [2, 6, 8]), (8, 3, [2]), (8, 9, []), (2, 3, [4, 6, 8])],
)
def test_checkpoints_of_a_branch_that_was_left_are_removed_and_the_newest_stay(
    tmp_path, saved, keep, removed
):
    folder = folders(tmp_path, *(f"step-{step:06d}" for step in (2, 4, 6, 8)))
    found = checkpoint_folder.left_over(folder, saved, Checkpoint(keep=keep))
    assert sorted(checkpoint_folder.step_of(path) for path in found) == removed


def test_one_checkpoint_of_every_so_many_hours_stays(tmp_path):
    """As the run would remove them, one after the other."""
    hours, keep, there = [0.0, 0.5, 1.9, 2.0, 2.5, 4.1, 4.2, 4.3], Checkpoint(keep=2, keep_every_h=2.0), []
    for step, hour in enumerate(hours, start=1):
        folder = folders(tmp_path, f"step-{step:06d}", saved_at=[1.7e9 + 3600 * hour])
        for path in checkpoint_folder.left_over(folder, step, keep):
            shutil.rmtree(path)
        there.append([checkpoint_folder.step_of(path) for path in checkpoint_folder.complete(folder)])
    assert there == [
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 3, 4],
        [1, 4, 5],
        [1, 4, 5, 6],
        [1, 4, 6, 7],
        [1, 4, 6, 7, 8],
    ]
