"""`python -m pyruntime tune` measures, prints and keeps; the trainer and the doctor take up what it kept."""

import json
import re

import pytest

from pyruntime.cli import doctor, main, tune
from pyruntime.train.errors import ConfigError
from pyruntime.tuning import cache
from pyruntime.tuning.linears import RankLinear
from pyruntime.tuning.measure import Measured
from tests.cli.test_processes import finish, start

pytestmark = pytest.mark.second_tier

SMALL = ["tune", "--model", "debug", "--seq_len", "64", "--rounds", "3", "--budget", "60", "--device", "cpu"]
LINEARS = ("qkv", "o_proj", "gate+up", "down", "head")


@pytest.fixture
def file(monkeypatch, tmp_path):
    path = tmp_path / "cache" / "tuning.json"
    monkeypatch.setenv("PYRUNTIME_TUNING", str(path))
    return path


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "tune needs either --model NAME or --config FILE."),
        (["--model", "3m", "--config", "main"], "tune needs either --model NAME or --config FILE."),
        (["--model", "3x"], "--model: There is no model '3x'; the nearest is"),
        (["--model", "gpt-145.6b"], "--model: gpt-145.6b is not a Llama with a preset of the trainer."),
        (["--config", "no.toml"], "--config no.toml: there is no such file and no such preset;"),
        (["--model", "3m", "--rounds", "2"], "--rounds must be at least 3, found 2."),
        (["--model", "3m", "--budget", "0"], "--budget must be at least 0.001"),
        (
            ["--model", "3m", "--variants", "True", "--device", "cpu"],
            "--variants times GPU kernels",
        ),
        (["--model", "3m", "--seq_len", "-1"], "--seq_len must not be negative, found -1."),
        (["--model", "3m", "--tp", "3"], "tp=3 does not fit the 4 started ranks; tp must"),
        (["--model", "debug", "--tp", "4", "--dtype", "fp16"], "dtype"),
        (["--model", "dim1024", "--tp", "1"], "tp must be at least 2"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(capsys, monkeypatch, file, arguments, sentence):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    assert main(["tune", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("pyruntime: ") and err.count("\n") == 1 and sentence in err


def test_one_rank_has_nothing_to_tune(capsys, monkeypatch, file):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(SMALL) == 2
    assert "one rank sends nothing; start it with torchrun" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", '{"format": "another"}'])
def test_nobody_elses_file_is_written_over(capsys, monkeypatch, file, text):
    file.parent.mkdir()
    file.write_text(text)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(SMALL) == 2
    assert "move it away, or name another file in PYRUNTIME_TUNING." in capsys.readouterr().err
    assert file.read_text() == text


def test_an_old_file_is_written_over(file):
    file.parent.mkdir()
    file.write_text(json.dumps({"format": cache.FORMAT, "version": 0}))
    assert tune.known(file) == {}


def test_sizes_come_from_the_configuration_and_flags_change_them():
    job = tune.job_of(tune.TuneOptions(config="main"), 2)
    assert (job.tp, job.rows, job.dtype, job.shape.hidden_size) == (2, 8 * 256, "bf16", 256)
    asked = tune.TuneOptions(config="main", micro_batch_size=3, seq_len=100, tp=2, dtype="fp32")
    job = tune.job_of(asked, 4)
    assert (job.tp, job.rows, job.dtype) == (2, 300, "fp32")
    job = tune.job_of(tune.TuneOptions(model="Llama-3.1-8B"), 8)
    assert (job.tp, job.rows, job.shape.vocab_size) == (8, 2048, 128256)
    with pytest.raises(ConfigError, match="--model: tp=3 does not divide"):
        tune.job_of(tune.TuneOptions(model="llama-3-8b"), 3)


def test_the_table_has_what_was_measured_and_what_was_not():
    linear = RankLinear("down", "matmul_reduce_scatter", 64, 96, 128)
    both = {"unfused": 0.003, "chunked": 0.002}
    found = [
        Measured(linear, "forward", ("a",), both, {"fused": "there is no kernel."}, 0.001, 0.0015, 5),
        Measured(linear, "backward", ("b",), {"unfused": 0.004}, {"chunked": "no."}, 0.001, 0.0015, 3),
    ]
    head, forward, backward = (re.split(r"  +", line) for line in tune.table(found).splitlines())
    assert head == [
        "linear",
        "pass",
        "rows",
        "n",
        "k",
        "T_g ms",
        "T_c",
        "unfused",
        "chunked",
        "R",
        "E",
        "choice",
    ]
    numbers = ["64", "96", "128", "1.000", "1.500"]
    assert forward == ["down", "forward", *numbers, "3.000", "2.000", "1.333", "0.50", "chunked"]
    assert backward == ["down", "backward", *numbers, "4.000", "-", "2.667", "-1.50", "unfused"]
    said = "\n".join(tune.notes(found, ["head forward"], 7.0))
    assert "Medians of 3 to 5 interleaved rounds" in said
    assert "fused was not measured: there is no kernel." in said
    assert "Not measured, as the budget of 7 s was used up: head forward." in said


def test_numbers_of_chunks_and_tiles_stand_behind_the_choice():
    linear = RankLinear("down", "matmul_reduce_scatter", 64, 96, 128)
    tiers = {"unfused": 0.003, "chunked": 0.002, "chunked:2": 0.001, "chunked:8": 0.0025}
    found = [
        Measured(linear, "forward", ("a", "b"), tiers, {}, 0.001, 0.0015, 5),
        Measured(linear, "backward", ("c",), {"unfused": 0.004, "chunked": 0.001}, {}, 0.001, 0.0015, 5),
    ]
    head, forward, backward = (re.split(r"  +", line) for line in tune.table(found).splitlines())
    assert head[7:] == ["unfused", "chunked", "R", "E", "choice", "also tried"]
    assert forward[7:9] == ["3.000", "2.000"]
    assert forward[-2:] == ["chunked:2", "chunked:2 1.000, chunked:8 2.500"]
    assert backward[-1] == "chunked"
    kept = tune.choices(found)
    assert kept["a"] == kept["b"] and (kept["a"].tier, kept["a"].chunks) == ("chunked", 2)
    assert (kept["c"].tier, kept["c"].chunks, kept["a"].seconds) == ("chunked", 0, tiers)


def test_a_model_is_tuned_and_the_trainer_and_the_doctor_use_it(file, tmp_path):
    figures = tmp_path / "figures.json"
    asked = ["tune", "--config", "tiny", "--rounds", "3", "--device", "cpu", "--json", figures]
    code, out, err = finish(start(2, *asked, cwd=tmp_path))
    assert code == 0, err
    for name in LINEARS:
        for when in ("forward", "backward"):
            assert re.search(rf"^{re.escape(name)} +{when} +512 .* (chunked|unfused)$", out, re.MULTILINE), (
                out
            )
    assert f"10 choices are in {file}" in out and "over symmetric memory, 512 rows, fp32" in out
    ((place, choices),) = cache.read(file).items()
    assert (place.world_size, place.transport, len(choices)) == (2, "symmetric memory", 10)
    for result in json.loads(figures.read_text())["results"]:
        key = cache.Key(**result["keys"][0])
        assert choices[key].seconds == result["tiers"] and choices[key].name == result["best"]

    short = ["--train.steps", "4", "--output.sample_tokens", "0", "--comm.tier", "auto"]
    code, out, err = finish(start(2, "train", "--config", "tiny", *short, cwd=tmp_path))
    assert code == 0, err
    words = r"^tuning 10 choices for 2 ranks over symmetric memory, .*, from .*tuning\.json$"
    assert re.search(words, out, re.MULTILINE), out
    # The scorecard is of the tiers that ran.
    used = re.findall(r"(chunked|unfused) \(tuned: chunked [\d.]+ ms, unfused [\d.]+ ms on \d{4}-", out)
    assert len(used) == 10, out
    ((_, where), (ranks, text)) = doctor.tuning()
    assert where == str(file) and ranks == "2 ranks" and text.startswith("10 choices, ")


def test_the_doctor_says_that_there_is_no_file_or_that_it_is_of_no_use(file):
    ((_, text),) = doctor.tuning()
    assert text.startswith(f"none in {file}: ")
    file.parent.mkdir()
    file.write_text("{")
    ((_, text),) = doctor.tuning()
    assert text.startswith(f"not used: the tuning file {file} is damaged: ")
