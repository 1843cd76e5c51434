"""Joins a trainer's replica to a run with replicas that come and go, by the service `members`."""

from __future__ import annotations

import dataclasses
import os
import socket
import uuid
from typing import Any

import torch
from torch import Tensor

import pyruntime
from pyruntime.comm import Runtime
from pyruntime.data_parallel import Sharded
from pyruntime.replicas.donated import OuterState
from pyruntime.replicas.member import Member
from pyruntime.replicas.sharded_outer import ShardedOuter
from pyruntime.train.data.corpus import Corpus
from pyruntime.train.ranks import on_rank_0
from pyruntime.train.resolved import ResolvedRun

OF_TRAIN = ("steps", "batch_size", "micro_batch_size", "seq_len", "dtype", "z_loss", "seed")
"""Keys of [train] that are the same for all replicas."""
ITS_OWN = ("members",)
"""Keys of [data_parallel] that may differ."""


def open_member(run: ResolvedRun, corpus: Corpus, runtime: Runtime) -> Member | None:
    """Connects this rank to the service of `data_parallel.members`; returns None if no replicas come and go.
    Raises PeerLost if the service does not answer."""
    config = run.config
    if not config.data_parallel.members:
        return None

    def named() -> tuple[str, str]:
        return uuid.uuid4().hex, f"{socket.gethostname()}:{os.getpid()}"

    replica, label = on_rank_0(runtime.world, "Naming the replica", named, tuple[str, str])
    return Member(
        config.data_parallel.members,
        replica,
        job_of(run, corpus),
        place=runtime.world.rank(),
        places=runtime.world.size(),
        label=label,
        deadline_s=config.comm.deadline_s,
    )


def job_of(run: ResolvedRun, corpus: Corpus) -> dict[str, Any]:
    """Returns what must be the same for all replicas, by configuration key if it has one, and the number of
    rounds. For each source in order: a hash of its text and tokenizer, independent of where its files are,
    and its number of training tokens."""
    config, method = run.config, run.outer
    assert method is not None
    tau = method.tau
    assert isinstance(tau, int)
    job = {f"train.{name}": getattr(config.train, name) for name in OF_TRAIN}
    job |= {f"optimizer.{name}": value for name, value in vars(config.optimizer).items()}
    job |= {
        f"data_parallel.{name}": value
        for name, value in vars(config.data_parallel).items()
        if name not in ITS_OWN
    }
    job |= {"data_parallel.outer_lr": method.lr, "data_parallel.outer_momentum": method.momentum}
    job |= {f"parallel.{name}": size for name, size in run.mesh.axes.items()}
    job |= {
        "parallel.zero": config.parallel.zero,
        "data.document_masks": config.data.document_masks,
        "data.weights": list(corpus.weights),
        "data.paths of": [[source.text.facts.name, len(source.train)] for source in corpus.sources],
    }
    job |= {f"model.{name}": value for name, value in dataclasses.asdict(run.shape).items()}
    job |= {"pyruntime": pyruntime.__version__, "torch": str(torch.__version__)}
    return job | {"tau": tau, "rounds": config.train.steps // tau, "late": method.rounds_late}


def join(member: Member, outer: ShardedOuter, sharded: Sharded, step: int, deal: list[int]) -> bool:
    """Joins the run; returns when this replica is a member, at the beginning of a round; False if the run is
    over. step, deal: the state that this replica has. It takes the steps of an unfinished round again, from
    an outer iterate with all sums that had arrived."""
    optimizer = sharded.optimizer
    assert optimizer is not None

    def moments() -> list[Tensor]:
        return [tensor for state in optimizer.current() for tensor in state.moments.values()]

    state, tau = OuterState(outer, moments), outer.tau
    assert tau is not None
    outer.use_what_has_come()
    (sent,) = outer.travelling()
    if not member.join(state, sent, step // tau * tau, deal or [0]):
        return False
    outer.begin_anew(member.is_behind)
    optimizer.resume(member.step)
    return True
