"""Text becomes shards: the same with any number of processes, going on after an interruption, and every bad
request is one sentence."""

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import multiprocessing
import os
import stat
import sys
from multiprocessing import forkserver
from pathlib import Path

import numpy as np
import pytest

from pyruntime.cli import main
from pyruntime.cli.tokenize import TokenizeProgress
from pyruntime.train import disk
from pyruntime.train.config import Data
from pyruntime.train.data import documents, tables, tokenizing
from pyruntime.train.data.token_shards import TokenShard
from pyruntime.train.data.tokenizer import ByteTokenizer, JsonTokenizer
from pyruntime.train.data.workers import Workers
from pyruntime.train.errors import ConfigError
from tests.train import jobs
from tests.train.data.tasks import squared
from tests.train.data.texts import array, byte_level_bpe, halves, lines_file, open_text, words


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    byte_level_bpe(Path(__file__).read_text(), 400).save(str(path))
    return path


@pytest.fixture
def small_parts(monkeypatch):
    """Many units and several shards of little text."""
    monkeypatch.setattr(documents, "LEAST_UNIT", 6000)
    monkeypatch.setattr(documents, "PIECE_BYTES", 2000)
    monkeypatch.setattr(tokenizing, "SHARD_TOKENS", 4000)
    monkeypatch.setattr(tokenizing, "OPEN_RUNS", 2)


def mixed(folder: Path) -> tuple[list[str], list[bytes]]:
    """Lines, files and a file of several units; all documents, with copies among them."""
    texts = words(60)
    folder.mkdir()
    lines_file(folder, [*texts[:40], texts[3], "", texts[3]], "lines.jsonl")
    for number, text in enumerate(texts[40:]):
        (folder / f"{number}.txt").write_text(text)
    long = " ".join(words(120))
    (folder / "long.txt").write_text(long)
    (folder / "copy.txt").write_text(long)
    return [str(folder)], [text.encode() for text in [*texts, texts[3], texts[3], long, long]]


def write(out: Path, paths, tokenizer, workers: int = 0, field: str = "text") -> tokenizing.CorpusFacts:
    out.mkdir(exist_ok=True)
    return tokenizing.write(out, *documents.survey(paths, "*"), tokenizer, field, workers=workers)


def content(folder: Path) -> dict[str, bytes]:
    """Of the files of a folder, but for its lock."""
    found = (path for path in sorted(folder.iterdir()) if path.is_file() and path.name != disk.LOCK)
    return {path.name: path.read_bytes() for path in found}


def stream(folder: Path) -> list[int]:
    return np.concatenate([TokenShard.open(path).tokens for path in sorted(folder.glob("*.bin"))]).tolist()


@pytest.mark.parametrize("begin", [(), (7, 8)])
@pytest.mark.second_tier("begin0")
def test_documents_stand_in_the_order_of_their_hash_each_once(tmp_path, bpe, small_parts, begin):
    paths, expected = mixed(tmp_path / "text")
    tokenizer = JsonTokenizer(bpe)
    tokenizer.begin = begin
    facts = write(tmp_path / "out", paths, tokenizer)
    expected.sort(key=lambda text: hashlib.blake2b(text, digest_size=16).digest())
    whole = [[*begin, *tokenizer.encode(text).tolist(), tokenizer.separator] for text in expected]
    assert stream(tmp_path / "out") == [token for ids in whole for token in ids]
    assert (facts.documents, len(facts.shards) > 3) == (len(expected), True)
    assert facts.bytes == sum(len(text) + 1 for text in expected)
    shards = [TokenShard.open(path) for path in sorted((tmp_path / "out").glob("*.bin"))]
    ends = np.concatenate([np.diff(shard.index[0], prepend=0) for shard in shards])
    assert ends.tolist() == [len(ids) for ids in whole]


def test_processes_write_the_same_bytes_and_a_run_reads_them_with_their_tokenizer(tmp_path, bpe, small_parts,
                                                                                  monkeypatch):  # fmt: skip
    paths, _ = mixed(tmp_path / "text")
    tokenizer = JsonTokenizer(bpe)
    alone = write(tmp_path / "alone", paths, tokenizer)
    monkeypatch.setattr(tokenizing, "SMALL_BYTES", 0)
    assert (
        main(
            ["tokenize", str(tmp_path / "out"), "--paths", *paths, "--tokenizer", str(bpe), "--workers", "2"]
        )
        == 0
    )
    assert content(tmp_path / "out") == content(tmp_path / "alone")
    data = Data(paths=(str(tmp_path / "out"),))
    found = jobs.opened(dataclasses.replace(jobs.RunConfig(), data=data))
    assert sum(len(source.train) for source in found.sources) == alone.tokens - round(0.05 * alone.tokens)
    again = halves(open_text(Data(paths=tuple(paths), cache=str(tmp_path / "cache")), tokenizer, 256))
    assert np.array_equal(array(found.sources[0].train), again[0])


def test_what_was_interrupted_goes_on_and_other_text_starts_cleanly(tmp_path, small_parts, monkeypatch):
    paths, _ = mixed(tmp_path / "text")
    write(tmp_path / "whole", paths, ByteTokenizer())
    original, done = tokenizing.Work.__call__, []

    def until(count):
        def call(work, task):
            if len(done) == count:
                raise KeyboardInterrupt
            done.append(task)
            return original(work, task)

        return call

    out = tmp_path / "out"
    for count in (3, 6, 10):
        monkeypatch.setattr(tokenizing.Work, "__call__", until(count))
        with pytest.raises(KeyboardInterrupt):
            write(out, paths, ByteTokenizer())
        with pytest.raises(
            ConfigError, match=r"the tokens in .*out are not finished; repeat the same call of `python -m"
        ):
            open_text(Data(paths=(str(out),)))
    damaged = out / "runs" / "000001.run"
    damaged.write_bytes(damaged.read_bytes()[:-9])
    for name in (f"runs/000002.run.{'0f' * 16}.partial", f"tokens-00000.bin.{'0f' * 16}.partial"):
        (out / name).write_bytes(b"of a process that was killed")
    monkeypatch.setattr(tokenizing.Work, "__call__", until(-1))
    write(out, paths, ByteTokenizer())
    assert content(out) == content(tmp_path / "whole")
    assert len(done) == len(set(done)) + 1  # the damaged one twice

    other = tmp_path / "other"
    monkeypatch.setattr(tokenizing.Work, "__call__", until(len(done) + 3))
    with pytest.raises(KeyboardInterrupt):
        write(other, paths, ByteTokenizer())
    (tmp_path / "text" / "0.txt").write_text("changed meanwhile")
    monkeypatch.setattr(tokenizing.Work, "__call__", original)
    write(other, paths, ByteTokenizer())
    assert sorted(bytes(stream(other)).split(b"\0")[:-1]).count(b"changed meanwhile") == 1
    assert not (other / "runs").exists()


def refused(capsys, *argv) -> str:
    assert main(["tokenize", *map(str, argv)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("pyruntime: ") and err.count("\n") == 1, err
    return err


def test_bad_requests_are_one_sentence_and_lose_nothing(tmp_path, capsys, bpe):
    path = lines_file(tmp_path, words(20))
    out = tmp_path / "out"
    assert f"--paths: {tmp_path}/none is neither a file nor a folder" in refused(
        capsys, out, "--paths", tmp_path / "none"
    )
    assert "--workers must not be negative" in refused(capsys, out, "--paths", path, "--workers", "-1")
    (tmp_path / "empty.jsonl").write_text("\n")
    assert "holds text." in refused(capsys, out, "--paths", tmp_path / "empty.jsonl")
    (tmp_path / "nothing").mkdir()
    assert "there is no text in" in refused(capsys, out, "--paths", tmp_path / "nothing")
    assert "no.json is no file and no folder" in refused(
        capsys, out, "--paths", path, "--tokenizer", tmp_path / "no.json"
    )
    broken = tmp_path / "tokenizer.json"
    broken.write_bytes(bpe.read_bytes()[:500])
    assert "is not a tokenizer.json that" in refused(capsys, out, "--paths", path, "--tokenizer", broken)
    assert f'--paths: {path}, line 1 holds no string "body", found only id, text' in refused(
        capsys, out, "--paths", path, "--field", "body"
    )
    (tmp_path / "file").write_text("")
    assert "cannot be written: " in refused(capsys, tmp_path / "file", "--paths", path)

    assert main(["tokenize", str(out), "--paths", str(path)]) == 0
    assert f"Train on them with --data.paths {out}" in capsys.readouterr().out
    before = content(out)
    assert main(["tokenize", str(out), "--paths", str(path)]) == 0
    assert "made earlier" in capsys.readouterr().out
    assert "holds tokens of another text or tokenizer" in refused(
        capsys, out, "--paths", path, "--tokenizer", bpe
    )
    with contextlib.ExitStack() as held:
        disk.lock(out, held)
        assert f"{out} is in use by process {os.getpid()} on" in refused(capsys, out, "--paths", path)
    assert content(out) == before


@pytest.mark.parametrize("with_plan", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "thesis.tex",
        "tokens-mine.bin",
        "tokens-00000.binary",
        "tokenizer.py",
        "corpus.json.bak",
        "runs/2026.log",
    ],
)
def test_a_folder_with_a_users_files_is_refused_and_keeps_them(tmp_path, capsys, name, with_plan):
    path, out = lines_file(tmp_path, words(20)), tmp_path / "mine"
    (out / "runs").mkdir(parents=True)
    if with_plan:
        (out / "runs" / "plan").write_text("0f" * 16)
    (out / name).write_text("years of work")
    assert "holds files that are not tokens" in refused(capsys, out, "--paths", path)
    assert (out / name).read_text() == "years of work"


@pytest.mark.parametrize("name", ["tokens-00000.bin", "tokenizer.json", "runs/2026.log"])
def test_without_a_plan_nothing_is_taken_for_ours(tmp_path, capsys, name):
    path, out = lines_file(tmp_path, words(20)), tmp_path / "mine"
    (out / "runs").mkdir(parents=True)
    (out / name).write_text("years of work")
    assert "holds files that are not tokens" in refused(capsys, out, "--paths", path)
    assert (out / name).read_text() == "years of work"
    (out / name).unlink()
    assert main(["tokenize", str(out), "--paths", str(path)]) == 0


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP])
def test_where_there_are_no_locks_text_becomes_tokens_all_the_same(tmp_path, monkeypatch, caplog, number):
    def flock(descriptor, _):
        assert not stat.S_ISDIR(os.fstat(descriptor).st_mode)  # which NFS does not lock
        raise OSError(number, os.strerror(number))

    path, cache = lines_file(tmp_path, words(20)), tmp_path / "cache"
    partial = cache / f"{'0f' * 16}.{'0f' * 16}.partial"
    partial.mkdir(parents=True)
    monkeypatch.setattr(fcntl, "flock", flock)
    assert main(["tokenize", str(tmp_path / "out"), "--paths", str(path)]) == 0
    assert f"cannot be locked ({os.strerror(number)}); let no other process use" in caplog.text
    open_text(Data(paths=(str(path),), cache=str(cache)))
    assert partial.is_dir()  # it may be in use
    monkeypatch.undo()
    lines_file(tmp_path, words(20))
    with contextlib.ExitStack() as held:
        disk.lock(partial, held)
        open_text(Data(paths=(str(path),), cache=str(cache)))
        assert partial.is_dir()
    lines_file(tmp_path, words(20))
    open_text(Data(paths=(str(path),), cache=str(cache)))
    assert not partial.exists()


@pytest.mark.parametrize(
    ("damage", "finding"),
    [
        (lambda out: (out / "tokens-00000.bin").write_bytes((out / "tokens-00000.bin").read_bytes()[:-7]),
         "tokens-00000.bin: it has"),
        (lambda out: (out / "tokens-00000.bin").unlink(), "tokens-00000.bin: it cannot be read: No such"),
        (lambda out: (out / "corpus.json").write_text('{"format": 3}'), "corpus.json is damaged"),
    ],
)  # fmt: skip
def test_damaged_tokens_are_refused_in_a_sentence(tmp_path, damage, finding):
    out = tmp_path / "out"
    write(out, [str(lines_file(tmp_path, words(50)))], ByteTokenizer())
    damage(out)
    with pytest.raises(ConfigError, match=finding):
        open_text(Data(paths=(str(out),)))


def test_tokens_of_another_tokenizer_are_refused(tmp_path, bpe):
    out = tmp_path / "out"
    write(out, [str(lines_file(tmp_path, words(50)))], ByteTokenizer())
    with pytest.raises(ConfigError, match="holds tokens of another tokenizer than the run's; leave"):
        open_text(Data(paths=(str(out),)), JsonTokenizer(bpe))


def test_tables_are_a_document_a_row(tmp_path, bpe):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = words(50)
    table = pyarrow.table({"body": [texts[0], None, "", *texts[1:]], "id": list(range(52))})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    path = str(tmp_path / "a.arrow")
    with pyarrow.OSFile(path, "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as out:
        out.write_table(table, max_chunksize=11)
    lines = lines_file(tmp_path, texts)
    expected = write(tmp_path / "lines", [str(lines)], JsonTokenizer(bpe))
    for suffix in ("parquet", "arrow"):
        found = write(tmp_path / suffix, [str(tmp_path / f"a.{suffix}")], JsonTokenizer(bpe), field="body")
        assert stream(tmp_path / suffix) == stream(tmp_path / "lines")
        assert (found.documents, found.bytes) == (50, expected.bytes)
        path = tmp_path / f"a.{suffix}"
        with pytest.raises(ConfigError, match=r"has no column text, but body, id; name one in data\.field\."):
            write(tmp_path / "none", [str(path)], ByteTokenizer())
        with pytest.raises(ConfigError, match=r"the column id of .* holds int64 and no text"):
            write(tmp_path / "none", [str(path)], ByteTokenizer(), field="id")
        path.write_bytes(path.read_bytes()[:-20])
        with pytest.raises(ConfigError, match=rf"data\.paths: .*a\.{suffix} "):
            write(tmp_path / "none", [str(path)], ByteTokenizer(), field="body")


def test_without_pyarrow_a_table_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1" * 9)
    with pytest.raises(ConfigError, match=r"which is not installed; install pyruntime\[datasets\]\."):
        tables.groups(tmp_path / "a.parquet")


@pytest.mark.second_tier
def test_processes_share_tasks_and_one_that_is_killed_is_told():
    with Workers(2, squared) as pool:
        assert sorted(pool.map(range(4, 30))) == [task * task for task in range(4, 30)]
        with pytest.raises(ConfigError, match=r"No thirty\."):
            list(pool.map([30]))
        assert len(multiprocessing.active_children()) == 2
    assert forkserver._forkserver._forkserver_pid is None  # it is stopped, and another starts
    with (
        Workers(2, squared) as pool,
        pytest.raises(ConfigError, match="has ended by SIGKILL; finished parts are kept"),
    ):
        list(pool.map(range(6)))


def test_progress_tells_share_speed_and_what_is_left(capsys):
    progress = TokenizeProgress(4_000_000, sys.stdout)
    progress.add(1_000_000, 300_000)
    line = str(progress)
    assert line.startswith("[#####...............] 25% 1 MB 0.3 M tokens ") and " MB/s ETA " in line
    assert capsys.readouterr().out == ""  # not a line for every part, where there is no terminal


def trained(group, config):
    return [(step.loss, step.val_loss, step.val_losses) for step in jobs.history(group, config)]


def test_a_run_on_tokens_is_the_run_on_their_text_and_names_its_sets(ranks, tmp_path):
    config = jobs.job(tmp_path, steps=4, val_every=2, batch_size=4)
    path = lines_file(tmp_path, words(200))
    config = jobs.changed(config, "data", paths=(str(path),))
    write(tmp_path / "out", [str(path)], ByteTokenizer())
    of_tokens = jobs.changed(config, "data", paths=(str(tmp_path / "out"),))
    jobs.prepare(config)
    assert ranks.run(trained, 1, config) == ranks.run(trained, 1, of_tokens)

    two = jobs.changed(
        config, "data", paths=(str(path), str(tmp_path / "out")), weights=(1.0, 3.0),
        val_paths=(str(tmp_path / "text.txt"),),
    )  # fmt: skip
    with pytest.raises(ConfigError, match="two of them are called text"):
        jobs.prepare(two)
    two = jobs.changed(two, "data", val_paths=(str(lines_file(tmp_path, words(90), "exam.jsonl")),))
    jobs.prepare(two)
    steps = ranks.run(trained, 1, two)[0]
    sets = steps[-1][2]
    assert list(sets) == ["text", "out", "exam"] and sets["text"] == sets["out"] != sets["exam"]
    assert steps[-1][1] == pytest.approx(sum(sets.values()) / 3)
    parallel = jobs.changed(two, "parallel", dp=2)
    for found, expected in zip(ranks.run(trained, 4, parallel)[0], steps, strict=True):
        assert found[0] == pytest.approx(expected[0], abs=1e-4)
        assert (found[2] or {}) == pytest.approx(expected[2] or {}, abs=1e-4)


def test_metrics_hold_the_loss_of_every_set():
    from pyruntime.train.metrics import StepMetrics

    step = StepMetrics(
        1, 3.0, 1.0, 1e-3, 1.0, 1.0, None, 1, val_loss=2.0, val_losses={"a": 1.0, "b": float("nan")}
    )
    assert json.loads(step.to_json())["val_losses"] == {"a": 1.0, "b": None}


def saved_dataset(folder, texts):
    """As `Dataset.save_to_disk` of `datasets` 4 leaves a folder."""
    pyarrow = pytest.importorskip("pyarrow")
    folder.mkdir(parents=True)
    names = [f"data-{number:05d}-of-00002.arrow" for number in range(2)]
    for name, part in zip(names, (texts[:10], texts[10:]), strict=True):
        table = pyarrow.table({"text": part})
        with (
            pyarrow.OSFile(str(folder / name), "wb") as file,
            pyarrow.ipc.new_stream(file, table.schema) as out,
        ):
            out.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text('{"features": {"text": {"dtype": "string", "_type": "Value"}}}')
    (folder / "cache-0f0f.arrow").write_bytes(b"of a map that nobody asked for")


def test_of_a_dataset_that_was_saved_its_tables_alone_are_read(tmp_path):
    texts = words(30)
    saved_dataset(tmp_path / "saved" / "train", texts)
    facts = write(tmp_path / "out", [str(tmp_path / "saved")], ByteTokenizer())
    assert (facts.files, facts.documents) == (2, 30)
    assert sorted(bytes(stream(tmp_path / "out")).split(b"\0")[:-1]) == sorted(map(str.encode, texts))

    (tmp_path / "saved" / "train" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(ConfigError, match=r"saved/train has no data-00001-of-00002\.arrow, which its state"):
        documents.survey([str(tmp_path / "saved")], "*")
    (tmp_path / "saved" / "train" / "state.json").write_text('{"_data_files": ["data"]}')
    with pytest.raises(ConfigError, match=r"state\.json is damaged: it does not name the tables"):
        documents.survey([str(tmp_path / "saved")], "*")
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    with pytest.raises(ConfigError, match=r"holds several splits of a dataset; name one of .*saved/train\."):
        documents.survey([str(tmp_path / "saved")], "*")


def test_what_datasets_saved_is_read(tmp_path):
    pytest.importorskip("datasets")
    import datasets

    texts = words(30)
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(str(tmp_path / "saved"), num_shards=3)
    sources, skipped = documents.survey([str(tmp_path / "saved")], "*")
    (tmp_path / "out").mkdir()
    facts = tokenizing.write(tmp_path / "out", sources, skipped, ByteTokenizer(), "text")
    assert (facts.files, facts.documents) == (3, 30)
    assert sorted(bytes(stream(tmp_path / "out")).split(b"\0")[:-1]) == sorted(
        text.encode() for text in texts
    )
