"""A configuration survives the way through TOML, and what is wrong with a file is said in one sentence."""

import dataclasses
from pathlib import Path

import pytest

from pyruntime.text import toml_value
from pyruntime.train import config_file, validate
from pyruntime.train.config import (
    GONE,
    Comm,
    Data,
    DataParallel,
    Grid,
    Model,
    Optimizer,
    Output,
    Parallel,
    RunConfig,
    Train,
    with_pieces,
)
from pyruntime.train.errors import ConfigError


def test_a_configuration_survives_toml(tmp_path):
    config = RunConfig(
        model=Model(hidden_size=96, tie_word_embeddings=True, rope_theta=5e5),
        data=Data(paths=("a b", 'quote " and \\ and ü'), val_fraction=0.125),
        optimizer=Optimizer(lr=3.25e-7),
        train=Train(steps=7, dtype="fp32"),
        parallel=Parallel(tp=4),
        data_parallel=DataParallel(method="co2", tau=24, clip=0.5),
        comm=Comm(tier="chunked", deadline_s=0.5),
        output=Output(wandb="tab\tnewline\n"),
    )
    path = tmp_path / "config.toml"
    path.write_text(config_file.to_toml(config), encoding="utf-8")
    assert config_file.load(path) == config
    assert config_file.load(path) != dataclasses.replace(config, parallel=Parallel())


def test_axes_of_tensor_parallelism_are_a_table(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text("[parallel]\ntp = {x = 2, z = 3}\n")
    config = config_file.load(path)
    assert config.parallel.tp == Grid(x=2, y=1, z=3)
    path.write_text(config_file.to_toml(config))
    assert config_file.load(path) == config


def test_x_alone_is_a_number_and_z_is_zero_3():
    for grid, dp, plain in [
        (Grid(x=4), 2, Parallel(tp=4, dp=2)),
        (Grid(z=4), 1, Parallel(tp=1, dp=4, zero=3)),
        (Grid(x=2, z=4), 3, Parallel(tp=2, dp=12, dp_replicate=3, zero=3)),
        (Grid(2, 2, 2), 1, Parallel(tp=Grid(2, 2), dp=2, zero=3)),
    ]:
        assert with_pieces(RunConfig(parallel=Parallel(tp=grid, dp=dp))) == RunConfig(parallel=plain)


@pytest.mark.parametrize(
    ("parallel", "sentence"),
    [
        (Parallel(tp=Grid(2, 0)), "parallel.tp={x = 2, y = 0} must have at least 1 rank on each axis."),
        (
            Parallel(tp=Grid(z=2), zero=2),
            "parallel.zero=2 with parallel.tp={z = 2}: axis z cuts weights, gradients and",
        ),
        (Parallel(tp=Grid(z=2), dp=4, dp_replicate=2), "parallel.dp_replicate=2 with parallel.tp={z = 2}:"),
        (Parallel(tp=Grid(2, 2), dp=2), "parallel.tp={x = 2, y = 2} times parallel.dp=2 but 4 rank(s) were"),
        (
            Parallel(tp=Grid(2, 2), tp_slices=2),
            "parallel.tp_slices=2 cannot be combined with parallel.tp={x = 2,",
        ),
    ],
)
def test_a_grid_that_cannot_be_is_refused(parallel, sentence):
    with pytest.raises(ConfigError) as refused:
        validate.check(RunConfig(train=Train(batch_size=16), parallel=parallel), world_size=4)
    assert sentence in str(refused.value)


@pytest.mark.parametrize("asked", [{"optimizer": Optimizer(name="muon")}, {"train": Train(check_types=True)}])
def test_what_knows_of_one_axis_is_refused_over_two(asked):
    with pytest.raises(ConfigError, match=r"supports one axis of tensor parallelism, and parallel\.tp="):
        validate.check(RunConfig(parallel=Parallel(tp=Grid(2, 2)), **asked), world_size=4)


@pytest.mark.parametrize("name", config_file.preset_names())
def test_every_preset_is_valid(name):
    path = config_file.find(name)
    for ranks in config_file.ranks_of(path) or [2]:
        validate.check(config_file.load(path, ranks), ranks)


def test_the_main_job_is_as_promised():
    config = config_file.load(config_file.find("main"))
    assert config.train.dtype == "bf16"
    assert config.data == Data()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[trian]\n", "there is no section [trian]; the nearest is train."),
        ("[train]\nstps = 3\n", "[train] has no key stps; the nearest is steps."),
        ("[train]\nfrobnicate = 3\n", "[train] has no key frobnicate; there are steps, tokens, batch_size,"),
        ("train = 3\n", "train must be a section of keys, as [train], found 3."),
        ("[train]\nsteps = 1.5\n", "train.steps must be a whole number, found 1.5."),
        ("[train]\nsteps = true\n", "train.steps must be a whole number, found True."),
        ("[parallel]\ntp = {w = 2}\n", "parallel.tp must be a whole number or a table of x, y, z, found"),
        ('[train]\nsteps = "3"\n', "train.steps must be a whole number, found '3'."),
        ('[train]\ndtype = "fp8"\n', "train.dtype must be one of 'bf16', 'fp32', found 'fp8'."),
        ('[optimizer]\nlr = "high"\n', "optimizer.lr must be a number, found 'high'."),
        (
            "[data_parallel]\ntau = 1.5\n",
            "data_parallel.tau must be one of 'auto' or a whole number, found 1.5.",
        ),
        ('[model]\nhidden_size = "big"\n', "model.hidden_size must be a whole number, found 'big'."),
        ('[data]\npaths = "a"\n', "data.paths must be a list, each item a string, found 'a'."),
        ("[data]\npaths = [1]\n", "data.paths must be a list, each item a string, found [1]."),
        ("[checkpoint]\nsave_on_stop = 1\n", "checkpoint.save_on_stop must be true or false, found 1."),
        (
            "[parallel]\nslices = 2\n",
            "parallel.slices was removed: it is now called parallel.tp_slices.",
        ),
        ("[output]\ntemperature = 0\n", "use `python -m pyruntime generate --temperature`."),
        ("[train\n", "is not valid TOML:"),
    ],
)
def test_a_wrong_file_is_refused_in_one_sentence(tmp_path, text, sentence):
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        config_file.load(path)
    message = str(refused.value)
    assert sentence in message
    assert str(path) in message
    assert "\n" not in message and message.endswith(".")


def test_options_of_earlier_versions_pass_in_a_run_s_own_file_where_they_said_nothing(tmp_path):
    path = tmp_path / "config.toml"
    sections: dict[str, dict] = {}
    for name, (default, _) in GONE.items():
        section, key = name.split(".")
        sections.setdefault(section, {})[key] = default
    lines = [
        f"[{section}]\n" + "".join(f"{key} = {toml_value(value)}\n" for key, value in values.items())
        for section, values in sections.items()
    ]
    path.write_text("".join(lines))
    assert config_file.load(path) == RunConfig()


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "binary.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        config_file.load(path)


def test_a_path_and_a_preset_are_found_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text("[train]\nsteps = 3\n")
    assert config_file.load(config_file.find("mine.toml")).train.steps == 3
    assert config_file.find("main").parent == config_file.PRESET_DIR
    with pytest.raises(ConfigError, match=r"nothing\.toml: there is no such file and no such preset; .*main"):
        config_file.find("nothing.toml")


def test_a_file_may_hold_several_numbers_of_ranks(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        "[train]\nsteps = 7\nbatch_size = 4\n"
        "[ranks.2]\nparallel = {dp = 2}\n[ranks.16.train]\nbatch_size = 32\n"
    )
    two, many = config_file.load(path, 2), config_file.load(path, 16)
    assert (two.parallel.dp, two.train.batch_size, two.train.steps) == (2, 4, 7)
    assert (many.parallel.dp, many.train.batch_size, many.train.steps) == (1, 32, 7)
    assert config_file.ranks_of(path) == [2, 16]
    assert config_file.ranks_of(config_file.find("main")) == []
    with pytest.raises(ConfigError, match=r"mine\.toml has tables for 2, 16 ranks, and none for 8"):
        config_file.load(path, 8)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("ranks = 3\n", "ranks must hold a table for each number of ranks, as [ranks.8], found 3."),
        ("[ranks.many]\n", "ranks must hold a table for each number of ranks, as [ranks.8], found {'many'"),
        (
            "[ranks]\n1 = 2\n",
            "ranks must hold a table for each number of ranks, as [ranks.8], found {'1': 2}.",
        ),
        ("[ranks.1.trian]\n", "there is no section [trian]; the nearest is train."),
        (
            "[train]\nsteps = 3\n[ranks.1]\ntrain = 3\n",
            "train must be a section of keys, as [train], found 3.",
        ),
    ],
)
def test_wrong_tables_of_ranks_are_refused_in_one_sentence(tmp_path, text, sentence):
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        config_file.load(path)
    assert sentence in str(refused.value) and str(path) in str(refused.value)
