"""A trainer's replica that comes and goes: what it tells the service of itself, and what it takes over."""

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
"""Of the [train] section, what all replicas have alike."""
ITS_OWN = ("members",)
"""Of the [data_parallel] section, what they need not."""


def open_member(run: ResolvedRun, corpus: Corpus, runtime: Runtime) -> Member | None:
    """This rank at the service of `data_parallel.members`; None where no replicas come and go. Raises
    PeerLost where the service does not answer."""
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
    """What has to be the same for all replicas, by its key in the configuration where it is there; and how
    many rounds there are. Of each source in order, a hash of its text and of the tokenizer, wherever its
    files lie, and the number of its tokens to learn from."""
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
    """Returns when this replica is a member, with the state of the beginning of a round; False: the run is
    over. step, deal: of what is there already; the steps of a round that has not ended are taken anew, from
    an outer iterate with all sums that had come."""
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
