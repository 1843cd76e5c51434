"""The job script for Frontier (examples/slurm/frontier.sbatch), with a made-up Slurm, and what the planner
knows of its nodes."""

from __future__ import annotations

import collections
import json
import os
import re
import subprocess
import sys
from itertools import pairwise

import pytest

from pyruntime.cli.plan_facts import Asked, settings
from pyruntime.comm.launcher import check_launcher
from pyruntime.plan.cluster import find_cluster
from pyruntime.plan.mesh import Mesh
from tests.plan.jobs import job
from tools.build_cuda import ROOT

LINKS = {
    frozenset(pair): bandwidth
    for bandwidth, pairs in {
        200e9: [(0, 1), (2, 3), (4, 5), (6, 7)],
        100e9: [(2, 4), (0, 6)],
        50e9: [(0, 2), (1, 3), (4, 6), (5, 7), (1, 5), (3, 7)],
    }.items()
    for pair in pairs
}
"""Bytes/s each way between two GCDs of a node; other pairs have no link (OLCF's user documentation)."""
GCD_OF_CORES = [4, 5, 2, 3, 6, 7, 0, 1]
"""Of each group of 8 cores, from core 0 on."""

SRUN = f"""#!{sys.executable}
# Runs the tasks of the last of the nodes, and prints how each was bound.
import itertools, os, subprocess, sys
options = list(itertools.takewhile(lambda argument: argument.startswith("--"), sys.argv[1:]))
command = sys.argv[1 + len(options):]
(bind,) = [option for option in options if option.startswith("--cpu-bind=mask_cpu:")]
nodes = int(os.environ["SLURM_JOB_NUM_NODES"])
for local in range(8):
    task = dict(SLURM_NTASKS=str(8 * nodes), SLURM_STEP_NUM_TASKS=str(8 * nodes), SLURM_LOCALID=str(local),
                SLURM_PROCID=str(8 * nodes - 8 + local), MASK=bind.split(":")[1].split(",")[local])
    subprocess.run(command, env=os.environ | task, check=True)
"""
PYTHON = f"""#!{sys.executable}
import json, os, sys
print(json.dumps([sys.argv[1:], dict(os.environ)]))
"""


def gcds_of_local_ranks() -> list[int]:
    """Which GCD each local rank has."""
    script = (ROOT / "examples/slurm/frontier.sbatch").read_text()
    (found,) = re.findall(r"HIP_VISIBLE_DEVICES=([\d,]+)", script)
    return [int(gcd) for gcd in found.split(",")]


@pytest.fixture
def tasks(tmp_path):
    """(arguments, environment) of each `python` that the script starts on its last node."""

    def run(nodes: int, *arguments: str) -> list[tuple[list[str], dict[str, str]]]:
        for name, text in (
            ("srun", SRUN),
            ("python", PYTHON),
            ("scontrol", "#!/bin/sh\nprintf 'frontier%05d\\n' $(seq 1 2000)\n"),
        ):
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)
        slurm = {
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NUM_NODES": str(nodes),
            "SLURM_JOB_NODELIST": "frontier[1-9]",
        }
        path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        inherited = {"PATH": path, "TMPDIR": str(tmp_path)}
        done = subprocess.run(
            ["bash", str(ROOT / "examples/slurm/frontier.sbatch"), *arguments],
            env=inherited | slurm,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return [tuple(json.loads(line)) for line in done.stdout.splitlines()]

    return run


def test_every_rank_is_bound_to_the_cores_beside_its_gcd(tasks):
    for local, (_, environment) in enumerate(tasks(1)):
        gcd = int(environment["HIP_VISIBLE_DEVICES"].split(",")[local])
        cores = [core for core in range(64) if int(environment["MASK"], 16) >> core & 1]
        assert len(cores) == 7 == int(environment["OMP_NUM_THREADS"])
        assert {GCD_OF_CORES[core // 8] for core in cores} == {gcd}


def test_neighbours_have_links_and_pairs_share_a_package(tasks):
    order = [int(gcd) for gcd in tasks(1)[0][1]["HIP_VISIBLE_DEVICES"].split(",")]
    assert sorted(order) == list(range(8))
    assert all(frozenset(pair) in LINKS for pair in pairwise([*order, order[0]]))  # tp 8
    assert all(LINKS[frozenset(order[i : i + 2])] == 200e9 for i in range(0, 8, 2))  # tp 2


def test_ranks_find_each_other_as_torchrun_s_do(tasks):
    for local, (arguments, environment) in enumerate(tasks(2, "--config", "a b.toml")):
        assert arguments == ["-m", "pyruntime", "train", "--config", "a b.toml"]
        check_launcher(environment)
        named = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
        assert [environment[name] for name in named] == [
            f"{8 + local}",
            "16",
            f"{local}",
            "8",
            "frontier00001",
        ]


def test_rccl_takes_the_network_between_nodes_alone(tasks):
    assert "NCCL_NET" not in tasks(1)[0][1]
    assert tasks(2)[0][1]["NCCL_NET"] == "OFI"


def test_the_planner_knows_which_groups_have_good_links():
    frontier = find_cluster("frontier")
    pair, four, node = (frontier.bandwidth(1, size) for size in (2, 4, 8))
    assert pair > 2 * four and node > 2 * four  # tp 2 on package pairs, tp 8 on rings


def test_the_planner_s_rings_are_made_of_direct_links():
    """Both, both ways, with 50 GB/s for each: no link carries more than it has."""
    gcds, used = gcds_of_local_ranks(), collections.Counter()
    rings = find_cluster("frontier").rings
    for order in rings:
        ring = [gcds[int(local)] for local in order.split("-")]
        assert sorted(ring) == list(range(8))
        used.update(frozenset(pair) for pair in pairwise([*ring, ring[0]]))
    assert all(count * 50e9 <= LINKS.get(link, 0) for link, count in used.items())
    assert sum(used.values()) * 50e9 == 2 * 8 * 50e9 and len(rings) == 2


def test_a_plan_with_a_whole_node_a_group_names_them():
    wanted = job("llama3-8b", "frontier", 16, 16, 8192)
    rings = list(find_cluster("frontier").rings)
    assert settings(wanted, Mesh(tp=8, dp=2))["comm"] == {"rings": rings}
    assert "comm" not in settings(wanted, Mesh(tp=2, dp=8))
    assert Asked(wanted).refusal(Mesh(tp=8, dp=2)) is None
