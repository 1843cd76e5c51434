"""A run takes up what was tuned on this machine: rank 0 reads, all ranks have the same."""

import os

import pytest
import torch

from pyruntime import ops
from pyruntime.train import run
from pyruntime.train.config import Comm, RunConfig
from pyruntime.tuning import cache
from pyruntime.tuning.apply import device_name, library, use
from pyruntime.tuning.cache import Choice, Key, Place
from tests.train import jobs

CHOICE = Choice("unfused", {"unfused": 0.001, "chunked": 0.002}, rounds=5, date="2026-11-21")
SHAPE = (24, 8, 8, torch.float32)


def taken_up(group, path, config):
    """The line for the log, and what the op then takes, where rank 0 alone knows of the file."""
    os.environ["PYRUNTIME_TUNING"] = str(path) if group.rank() == 0 else "/nowhere/tuning.json"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    ops.all_gather(torch.ones(1, 1), group)
    try:
        words = run._use_tuning(jobs.resolved(config, group.size()), jobs.runtime(group, config))
        return words, ops.tier_of("all_gather_matmul", *SHAPE, group)[0]
    finally:
        use({})
        torch.set_num_threads(threads)
        del os.environ["PYRUNTIME_TUNING"]


@pytest.mark.parametrize(
    ("settings", "tier"),
    [
        (Comm(tier="auto"), "unfused"),
        (Comm(tier="chunked"), "chunked"),  # nothing asks for it
    ],
)
def test_all_ranks_start_from_the_file_of_rank_0(ranks, tmp_path, settings, tier):
    path, key = tmp_path / "tuning.json", Key("all_gather_matmul", *SHAPE[:3], "float32", "cpu")
    cache.write(path, {Place(device_name("cpu", 1), 2, "symmetric memory", library()): {key: CHOICE}})
    words = (
        f"1 choices for 2 ranks over symmetric memory, 2026-11-21, from {path}" if tier == "unfused" else ""
    )
    assert ranks.run(taken_up, 2, path, RunConfig(comm=settings)) == [(words, tier)] * 2


def test_a_damaged_file_is_said_and_the_run_goes_on(ranks, tmp_path):
    path = tmp_path / "tuning.json"
    path.write_text("{")
    for words, tier in ranks.run(taken_up, 2, path, RunConfig(comm=Comm(tier="auto"))):
        assert words.startswith(f"not used: the tuning file {path} is damaged: ") and tier == "chunked"
