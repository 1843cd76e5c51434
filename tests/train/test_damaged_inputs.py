"""Whatever was changed in configurations, metrics, checkpoints, tokenizers, text: it is read or refused."""

import json
import tomllib
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from pyruntime.train import checkpoint_folder, config_file, manifest, metrics, scorecard, validate
from pyruntime.train.checkpoint_folder import CheckpointFacts
from pyruntime.train.config import Data, RunConfig
from pyruntime.train.data import tokenizing
from pyruntime.train.data.documents import survey
from pyruntime.train.data.tokenizer import ByteTokenizer, JsonTokenizer
from pyruntime.train.errors import ConfigError
from pyruntime.train.metrics import MetricsFile, StepMetrics
from pyruntime.train.shape import llama_config
from tests.mutations import BOUNDED, contents, documents, is_one_sentence
from tests.train.data.texts import halves, open_text

CONFIG = RunConfig()
CONFIG_VALUES = tomllib.loads(config_file.to_toml(CONFIG)) | {
    "model": {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 300, "rope_theta": 1e4},
    "parallel": {"tp": 2, "zero": 1},
}
METRICS = "".join(
    StepMetrics(n, 3.0 / n, 1.0, 1e-3, 10.0, 9.0, None, 10**8, val_loss=2.0 if n == 2 else None).to_json()
    + "\n"
    for n in (1, 2, 3)
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("damaged")


def use(config: RunConfig) -> None:
    """What the trainer does with a configuration before ranks are started, and writes into the run folder."""
    validate.check(config, 2)
    llama_config(config.model, 256, config.train.seq_len, 2)


@given(documents(CONFIG_VALUES))
@example({"output": {"run_dir": "a\0b"}})
@example({"output": {"run_dir": "a" * 5000}})
@example({"data": {"tokenizer": "a" * 5000}})
@example({"data": {"paths": ["\ud800"]}})
@example({"optimizer": {"lr": 10**400}})
@example({"parallel": {"zero": True}})
@example({"train": {"seq_len": 10**30}})
@example({"comm": {"deadline_s": 1e-320}})
@BOUNDED
def test_changed_values_of_a_configuration(values):
    if not isinstance(values, dict):
        return
    try:
        config = config_file.from_dict(values, "mine.toml")
        use(config)
    except ConfigError as error:
        assert is_one_sentence(error)
        return
    assert config_file.from_dict(tomllib.loads(config_file.to_toml(config)), "again") == config


@given(contents(config_file.to_toml(CONFIG).encode()))
@example(b"a = " + b"[" * 100_000)
@BOUNDED
def test_changed_bytes_of_a_configuration(folder, content):
    path = folder / "mine.toml"
    path.write_bytes(content)
    try:
        use(config_file.load(path))
    except ConfigError as error:
        assert is_one_sentence(error)


@given(st.text(max_size=20))
@example("\x7f")
@BOUNDED
def test_any_text_survives_toml(text):
    values = {"data": {"paths": [text]}, "output": {"wandb": text}}
    config = config_file.from_dict(values, "mine.toml")
    assert config_file.from_dict(tomllib.loads(config_file.to_toml(config)), "again") == config


@given(contents(METRICS.encode()))
@example(METRICS.encode().replace(b'"step": 2', b'"step": "2"'))
@example(METRICS.encode().replace(b'"loss": 3.0', b'"loss": null'))
@example(b"[1]\n" + METRICS.encode())
@example(b"3\n")
@example(b"\xff\xfe\n" + METRICS.encode())
@BOUNDED
def test_changed_bytes_of_metrics(folder, content):
    path = folder / metrics.FILE_NAME
    path.write_bytes(content)
    try:
        with MetricsFile(folder, resume_at=2):
            pass
    except ConfigError as error:
        assert is_one_sentence(error) and str(path) in str(error)
        assert path.read_bytes() == content
        return
    kept = metrics.read(path)
    assert all(line["step"] <= 2 for line in kept)
    assert len(kept) <= content.count(b"\n") + 1


@given(documents([json.loads(line) for line in METRICS.splitlines()]))
@BOUNDED
def test_changed_values_of_metrics(folder, lines):
    path = folder / metrics.FILE_NAME
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) if isinstance(lines, list) else "[]\n")
    try:
        found = metrics.read(path)
    except ConfigError as error:
        assert is_one_sentence(error) and "is damaged" in str(error)
        return
    for line in found:
        assert isinstance(line["step"], int) and isinstance(line["loss"], float)


def test_metrics_that_are_read_are_drawn(folder):
    path = folder / metrics.FILE_NAME
    path.write_text('{"step": 1, "loss": NaN}\n{"step": 2147483647, "loss": 1e30, "val_loss": -Infinity}\n')
    scorecard.plot_loss(metrics.read(path), folder / "loss.png")


WANTED = CheckpointFacts(step=0, dtype="fp32", model={"hidden_size": 64})


@pytest.fixture(scope="module")
def checkpoint(folder):
    """What a checkpoint says of itself, and its manifest."""
    facts = json.loads(checkpoint_folder.to_json(CheckpointFacts(3, "fp32", {"hidden_size": 64})))
    path = folder / "step-000003"
    path.mkdir()
    (path / checkpoint_folder.FACTS_FILE).write_text(json.dumps(facts))
    manifest.write(path, {"run.json": manifest.checksum(path / "run.json")})
    return path, facts, json.loads((path / manifest.MANIFEST).read_text())


def read_checkpoint(path: Path) -> CheckpointFacts | None:
    try:
        return checkpoint_folder.read_matching(path, WANTED)
    except ConfigError as error:
        assert is_one_sentence(error) and str(path) in str(error)
        return None


@given(st.data())
@BOUNDED
def test_changed_bytes_of_a_checkpoints_facts_or_manifest(checkpoint, data):
    path, _, _ = checkpoint
    name = data.draw(st.sampled_from(["run.json", manifest.MANIFEST]))
    whole = (path / name).read_bytes()
    (path / name).write_bytes(data.draw(contents(whole)))
    try:
        found = read_checkpoint(path)
        assert found is None or found == CheckpointFacts(
            3, "fp32", {"hidden_size": 64}, norms=[], deal=[], layers=[], micro_batches=[], tp_parts=[]
        )
    finally:
        (path / name).write_bytes(whole)


@given(st.data())
@BOUNDED
def test_changed_values_of_a_checkpoints_facts_with_a_manifest_that_fits(checkpoint, data):
    """What another program wrote, checksums and all."""
    path, facts, saved = checkpoint
    if data.draw(st.booleans()):
        (path / "run.json").write_text(json.dumps(data.draw(documents(facts))))
        manifest.write(path, {"run.json": manifest.checksum(path / "run.json")})
    else:
        (path / manifest.MANIFEST).write_text(json.dumps(data.draw(documents(saved))))
    try:
        found = read_checkpoint(path)
        assert found is None or (
            type(found.step) is int and found.step >= 0 and found.model["hidden_size"] == 64
        )
    finally:
        (path / "run.json").write_text(json.dumps(facts))
        (path / manifest.MANIFEST).write_text(json.dumps(saved))


def small_tokenizer() -> dict:
    engine = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2, "</s>": 3}, [("a", "b")]))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.add_special_tokens(["</s>", "<pad>"])
    return json.loads(engine.to_str())


def use_tokenizer(path: Path) -> None:
    try:
        tokenizer = JsonTokenizer(path)
        text = path.with_name("text.txt")
        text.write_bytes(b"abba ab\xff " * 9)
        data = Data(paths=(str(text),), cache=str(path.with_name("tokens")), val_fraction=0.5)
        tokens = open_text(data, tokenizer, seq_len=1)
    except ConfigError as error:
        assert is_one_sentence(error)
        return
    for part in halves(tokens):
        assert part.max() < tokenizer.vocab_size
    tokenizer.decode(halves(tokens)[0].tolist())


@given(documents(small_tokenizer()))
@BOUNDED
def test_changed_values_of_a_tokenizer(folder, content):
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(content))
    use_tokenizer(path)


@given(contents(json.dumps(small_tokenizer()).encode()))
@BOUNDED
def test_changed_bytes_of_a_tokenizer(folder, content):
    path = folder / "tokenizer.json"
    path.write_bytes(content)
    use_tokenizer(path)


@given(contents(b"".join(json.dumps({"text": f"some text {n}", "id": n}).encode() + b"\n" for n in range(6))))
@BOUNDED
def test_changed_bytes_of_text(folder, content):
    path = folder / "text.jsonl"
    path.write_bytes(content)
    try:
        data = Data(paths=(str(path),), cache=str(folder / "tokens"), val_fraction=0.5)
        text = open_text(data, seq_len=1)
    except ConfigError as error:
        assert is_one_sentence(error)
        return
    assert text.sources[0].text.facts.documents <= content.count(b"\n") + 1


@pytest.fixture(scope="module")
def tables(folder):
    """Text as files of a table, by their suffix."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"text": [f"some text {n}" for n in range(30)], "id": list(range(30))})
    parquet.write_table(table, folder / "a.parquet", row_group_size=8)
    with (
        pyarrow.OSFile(str(folder / "a.arrow"), "wb") as file,
        pyarrow.ipc.new_stream(file, table.schema) as out,
    ):
        out.write_table(table)
    return {suffix: (folder / f"a{suffix}").read_bytes() for suffix in (".parquet", ".arrow")}


def use_text(folder, *paths, **rest) -> None:
    try:
        data = Data(paths=tuple(map(str, paths)), cache=str(folder / "tokens"), val_fraction=0.5, **rest)
        halves(open_text(data, seq_len=1))
    except ConfigError as error:
        assert is_one_sentence(error)


def test_a_table_with_two_columns_of_one_name_is_refused(folder):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"])
    parquet.write_table(table, folder / "twice.parquet")
    with pytest.raises(ConfigError, match=r"twice\.parquet has 2 columns text; rename all but one"):
        open_text(Data(paths=(str(folder / "twice.parquet"),), cache=str(folder / "tokens")), seq_len=1)


@given(st.data())
@BOUNDED
def test_changed_bytes_of_a_table(folder, tables, data):
    suffix = data.draw(st.sampled_from(sorted(tables)))
    path = folder / f"table{suffix}"
    path.write_bytes(data.draw(contents(tables[suffix]) | st.binary(max_size=60)))
    use_text(folder, path)


@given(st.data())
@BOUNDED
def test_changed_files_of_a_folder_of_tokens(folder, data):
    tokens = folder / "a folder of tokens"
    if not tokens.exists():
        (folder / "words.txt").write_text("some words " * 20)
        tokens.mkdir()
        tokenizing.write(tokens, *survey([str(folder / "words.txt")], "*"), ByteTokenizer(), "text")
    path = data.draw(st.sampled_from(sorted(tokens.iterdir())))
    whole = path.read_bytes()
    how = data.draw(st.sampled_from(["bytes", "values", "gone"]))
    path.unlink()
    try:
        if how == "values" and path.suffix == ".json":
            path.write_text(json.dumps(data.draw(documents(json.loads(whole)))))
        elif how != "gone":
            path.write_bytes(data.draw(contents(whole)))
        use_text(folder, tokens)
    finally:
        path.write_bytes(whole)
