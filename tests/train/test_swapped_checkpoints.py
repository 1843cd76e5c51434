"""Files of a checkpoint that are exchanged, are another one's, or are links that lead elsewhere: refused in a
sentence on every rank, or harmless."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import pytest

from pyruntime.train import checkpoint, disk, manifest
from pyruntime.train.errors import ConfigError, TrainingError
from pyruntime.train.saving.saver import Saver
from tests.mutations import is_one_sentence
from tests.train import jobs

FILES = ["rank-00000.safetensors", "rank-00001.safetensors"]
STEP_1, STEP_2, OTHERS_2 = "run/checkpoints/step-000001", "run/checkpoints/step-000002", "other/step-000002"


def exchange(folder: Path) -> None:
    first, second = (folder / STEP_2 / name for name in FILES)
    first.rename(folder / "aside")
    second.rename(first)
    (folder / "aside").rename(second)


def exchange_and_sum(folder: Path) -> None:
    """Also the checksums: each block says itself which one it is."""
    exchange(folder)
    sums = manifest.read(folder / STEP_2)
    manifest.write(
        folder / STEP_2, sums | {name: manifest.checksum(folder / STEP_2 / name) for name in FILES}
    )


def copied(*names: str, of: str):
    def attack(folder: Path) -> None:
        for name in names:
            shutil.copyfile(folder / of / name, folder / STEP_2 / name)

    return attack


def linked(name: str, to: str):
    """`to`: in the test's folder, or absolute."""

    def attack(folder: Path) -> None:
        path = folder / STEP_2 / name
        path.rename(folder / "aside")
        path.symlink_to(folder / to)

    return attack


def pipe(folder: Path) -> None:
    for name in ("rank-00000.safetensors", "run.json", manifest.MANIFEST):
        (folder / STEP_2 / name).unlink()
        os.mkfifo(folder / STEP_2 / name)


def folder_of_another_step(folder: Path) -> None:
    shutil.rmtree(folder / STEP_2)
    (folder / STEP_2).symlink_to(folder / STEP_1)


def folder_elsewhere(folder: Path) -> None:
    (folder / STEP_2).rename(folder / "moved")
    (folder / STEP_2).symlink_to(folder / "moved")


HARMLESS = {
    "two shards, and their checksums": exchange_and_sum,
    "a shard that lies elsewhere": linked(FILES[0], "aside"),
    "the folder lies elsewhere": folder_elsewhere,
}
REFUSED = {
    "two shards": (exchange, FILES[0]),
    "a shard of another step": (copied(FILES[1], of=STEP_1), FILES[1]),
    "a shard of another run": (copied(FILES[0], of=OTHERS_2), FILES[0]),
    "the manifest of another step": (copied(manifest.MANIFEST, of=STEP_1), "run.json"),
    "the manifest of another run": (copied(manifest.MANIFEST, of=OTHERS_2), "run.json"),
    "run.json of another step": (copied("run.json", of=STEP_1), "run.json"),
    "all but the shards of another step": (copied("run.json", manifest.MANIFEST, of=STEP_1), "run.json"),
    "a link to a shard of another step": (linked(FILES[0], f"{STEP_1}/{FILES[0]}"), FILES[0]),
    "a link to nothing": (linked(FILES[0], "nowhere"), FILES[0]),
    "a link to itself": (linked(FILES[0], f"{STEP_2}/{FILES[0]}"), FILES[0]),
    "a link to what has no end": (linked(FILES[1], "/dev/zero"), FILES[1]),
    "a manifest without an end": (linked(manifest.MANIFEST, "/dev/zero"), manifest.MANIFEST),
    "pipes that nobody writes to": (pipe, manifest.MANIFEST),
    "the folder of another step": (folder_of_another_step, "run.json"),
}


def digest(state: dict) -> str:
    found = hashlib.sha256()
    for name, value in sorted(state.items()):
        found.update(name.encode() + value.cpu().numpy().tobytes())
    return found.hexdigest()


def resumed(group, config, folder):
    """A digest of what was loaded, or what was said."""
    made = jobs.trainer(group, config)
    try:
        made.resume(folder)
    except ConfigError as error:
        return "", str(error)
    state = checkpoint.state_of(made.sharded)
    return digest(
        {name: each.full_tensor() for name, each in (state["model"] | state["optimizer"]).items()}
    ), ""


@pytest.fixture(scope="module")
def runs(ranks, tmp_path_factory):
    """Two runs of one shape, and what the first one has saved in step 2."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "other text").mkdir()
    config = jobs.changed(jobs.job(folder, steps=2), "checkpoint", every_steps=1)
    other = jobs.changed(jobs.job(folder / "other text", steps=2), "checkpoint", every_steps=1)
    for each in (config, other):
        jobs.prepare(each)
        ranks.run(jobs.history, 2, each)
    shutil.copytree(folder / "other text/run/checkpoints/step-000002", folder / OTHERS_2)
    (whole, _), _ = ranks.run(resumed, 2, config, folder / STEP_2)
    return folder, config, whole


@pytest.fixture
def attacked(runs, tmp_path):
    folder, config, whole = runs
    for name in ("run/checkpoints", "other"):
        shutil.copytree(folder / name, tmp_path / name)
    return tmp_path, config, whole


@pytest.mark.parametrize("attack", REFUSED)
@pytest.mark.second_tier("two shards")
def test_what_is_not_of_this_checkpoint_is_refused_on_every_rank(ranks, attacked, attack):
    folder, config, _ = attacked
    do, blamed = REFUSED[attack]
    do(folder)
    told = ranks.run(resumed, 2, config, folder / STEP_2)
    assert told[0] == told[1]
    loaded, said = told[0]
    assert not loaded and is_one_sentence(said) and blamed in said and str(folder / STEP_2) in said, said


@pytest.mark.parametrize("attack", HARMLESS)
def test_what_holds_the_same_blocks_loads_the_same(ranks, attacked, attack):
    folder, config, whole = attacked
    HARMLESS[attack](folder)
    assert ranks.run(resumed, 2, config, folder / STEP_2) == [(whole, "")] * 2


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def goes_on(group, config, at):
    """Steps after the checkpoint `at`. What ended them, if anything."""
    try:
        jobs.history(group, config, at)
    except TrainingError as error:
        return str(error)
    return ""


def test_a_link_in_the_place_of_what_is_written_leads_nowhere(ranks, attacked):
    folder, config, _ = attacked
    before = contents(folder / OTHERS_2)
    config = jobs.changed(jobs.changed(config, "train", steps=4), "output", run_dir=str(folder / "run"))
    config = jobs.changed(config, "checkpoint", keep=1)
    partial = folder / "run/checkpoints/step-000003.partial"
    partial.symlink_to(folder / OTHERS_2)
    (folder / STEP_1).rename(folder / "moved")
    (folder / STEP_1).symlink_to(folder / "moved")  # to be removed: of it the link alone
    moved = contents(folder / "moved")
    assert ranks.run(goes_on, 2, config, folder / STEP_2) == [""] * 2
    assert [path.name for path in (folder / "run/checkpoints").iterdir()] == ["step-000004"]
    assert contents(folder / OTHERS_2) == before and contents(folder / "moved") == moved


def planted(group, config, at, elsewhere):
    """A link in the place of step 4, which is made after step 3 was begun."""
    real = Saver.begin

    def begin(saver, facts):
        if facts.step == 4 and group.rank() == 0:
            saver.finish()
            (saver._run_dir / "checkpoints/step-000004.partial").symlink_to(elsewhere)
        real(saver, facts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Saver, "begin", begin)
        return goes_on(group, config, at)


def test_nothing_is_written_through_a_link(ranks, attacked):
    folder, config, _ = attacked
    before = contents(folder / OTHERS_2)
    config = jobs.changed(jobs.changed(config, "train", steps=4), "output", run_dir=str(folder / "run"))
    for said in ranks.run(planted, 2, config, folder / STEP_2, folder / OTHERS_2):
        assert is_one_sentence(said) and "step-000004.partial is a link that leads elsewhere" in said, said
    assert contents(folder / OTHERS_2) == before


def test_a_file_is_not_written_through_a_link(tmp_path):
    (tmp_path / "kept").write_text("x")
    (tmp_path / "file").symlink_to(tmp_path / "kept")
    with pytest.raises(OSError), open(tmp_path / "file", "wb", opener=disk.without_links) as _:
        pass
    assert (tmp_path / "kept").read_text() == "x"
