"""Replicas that train without each other for a round of steps, then exchange how far they moved.

    methods.py           the methods (local SGD, SlowMo, DiLoCo, CO2, ...), as data
    outer_optimizer.py   the outer step of one model; sharded_outer.py of one that `shard` has sharded
    fragment.py          the outer step of one part of the model
    weights.py           the tensors that are averaged
    averaging.py         sums over the ranks of a group, beside the steps; packing.py compresses them

Replicas of one torchrun behave like any ranks: if one dies, all end. Replicas that come and go are each a job
of their own (one process, or the ranks of one torchrun), and inside each job the same rule holds. A service
joins them: `python -m pyruntime members`. It is no replica and outlives the death of all:

    coordinator.py      the service's decisions: pure, events in, orders out
    service.py          its sockets
    member.py           a rank's side: joins, arrives at the end of a round, learns whether the round counts
    member_sums.py      the sum of displacements over the members of a round, on connections made for it
    transfer.py         sends weights and states to a joining replica; donated.py lists them
    deal.py             the sequences that a replica trains on in a round
    connection.py       messages and tensors on a connection
    message_checks.py   checks the messages that a rank sends to the service

**A round** t has members, and each member has a block of sequences. A member takes tau steps on its block,
writes its displacement d = z - x into a separate buffer, and reports that it has arrived. Two phases follow:

    1. exchange    The service orders an attempt and names the members that have arrived. They sum over
                   connections of that attempt, into other memory than d, and report that they are done.
    2. commit      Once all of an attempt are done, the round counts. The service says so, with the number of
                   replicas in the sum and the next blocks. Before that nobody has taken the outer step.

A member leaves the round in one of three cases. It dies, which closes its connection to the service. It is
stopped or cut off: the service expects a sign of life from every rank once a second, whatever the rank waits
for. It is slow: it has not arrived by the deadline, or others make no progress with it. The others still have
their d and start a new attempt, so none of their steps is lost. One process decides what became of a round,
so all participants agree; a member that does not hear from the service ends. With fewer members than the
quorum the round stays open until others have joined.

**A joining replica** is sent to a member, its donor. Between two of its steps the donor copies outer iterate,
outer momentum and the inner optimizer's moments. A thread sends the copy, then the sum of every round
committed from then on. With these the newcomer has, bit by bit, what the members have at the beginning of a
round. It joins at the next commit, or at once if the round lacks its quorum. A donor that dies is replaced by
another one.

**Averages that are a round late** (CO2, overlapped local SGD). A thread exchanges round t beside the steps of
round t + 1. A member arrives at the end of t + 1 only after it has heard that t counts. So the service
decides on one round at a time, as above, and d is kept until then. A member has two blocks in work, of t and
of t + 1; a commit gives out those of t + 2. A joining replica enters round t without a displacement, adds
zeros to its sum, and takes steps from t + 1 on (docs/explanation/rare-synchronization.md derives why). If
nobody with displacements remains, the replicas that enter begin a round of steps from the state that they
have, as at the start of a run.

**Data.** Block k stands for the sequences of steps k tau + 1 to (k + 1) tau of a single replica's run. Blocks
cut the order of all sequences into parts that do not overlap. The service deals them out in order. If a
replica leaves a round before its displacement has counted, its block is dealt again first. So every block
below the highest one dealt has counted once, is in work, or waits to be dealt again.

Torch's process groups are not used between replicas: they cannot lose a member, nor be interrupted.
"""

from typing import TYPE_CHECKING

from pyruntime.lazy import names_of
from pyruntime.replicas.methods import (
    METHODS,
    Method,
    co2,
    diloco,
    gap_penalty,
    local_sgd,
    overlapped_local_sgd,
    slowmo,
    streaming_diloco,
)

if TYPE_CHECKING:
    from pyruntime.replicas.outer_optimizer import OuterOptimizer

__all__ = [
    "METHODS",
    "Method",
    "OuterOptimizer",
    "co2",
    "diloco",
    "gap_penalty",
    "local_sgd",
    "overlapped_local_sgd",
    "slowmo",
    "streaming_diloco",
]

__getattr__ = names_of(__name__, {"OuterOptimizer": "pyruntime.replicas.outer_optimizer"})
