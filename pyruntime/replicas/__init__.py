"""Replicas that train alone for a round of steps, and meet beside the steps of the next one.

    methods.py           the ways in which they meet (local SGD, SlowMo, DiLoCo, CO2, ...), as data
    outer_optimizer.py   the outer step, of one model; sharded_outer.py of one that `shard` has sharded
    fragment.py          a part of the model that meets at a time
    weights.py           what is averaged
    averaging.py         its sums over the ranks of a group, beside the steps; packing.py compresses them

Replicas of one torchrun are as strict as any ranks: where one dies, all end. Those that come and go are each
a job of its own (one process, or the ranks of one torchrun), as strict inside as any. What
joins them is a service, `python -m pyruntime members`, which is no replica and outlives the death of all:

    coordinator.py      what the service decides: pure, events in, orders out
    service.py          its sockets
    member.py           a rank's side: joins, arrives at the end of a round, and hears what became of it
    member_sums.py      the sum of displacements over the members of a round, on connections made for it
    transfer.py         weights and states on their way to a replica that comes; donated.py says which
    deal.py             which sequences a replica takes in a round
    connection.py       messages and tensors on a connection
    message_checks.py   what a rank may tell the service

**A round** t has members, and each a block of sequences. A member takes tau steps on its block, has its
displacement d = z - x in memory of its own, and says that it has arrived. Then, in two phases:

    1. exchange    the service orders an attempt over those that have arrived, by name. They sum up on
                   connections of that attempt, into other memory than d, and say that they are done.
    2. commit      once all of an attempt are done, the round counts: the service says so, of how many it is,
                   and gives out the next blocks. Before that nobody has taken the outer step.

A member that dies closes its connection to the service; one that is stopped or cut off gives no more signs of
life, of which the service expects one a second of every rank, whatever that waits for; one that is slow has
not arrived by the deadline, or others make no progress with it. It leaves, and what is left of the round is a
new attempt over the others, who still have their d: no step of theirs is lost. All that took part agree on
what became of a round, because one process has decided it; a member that does not hear from the service ends.
With fewer members than the quorum the round is held open until others have come.

**A replica that comes** is sent to a member, its donor, which copies outer iterate, outer momentum and the
inner optimizer's moments between two of its steps and sends the copy from a thread, then the sum of every
round that is committed from then on. Taking those it has what the members have at the beginning of a round,
bit by bit, and joins where the next round is committed; into a round that lacks its quorum it joins at once.
A donor that dies is replaced by another one.

**Averages that are a round late** (CO2, overlapped local SGD). The exchange of round t runs in a thread
beside the steps of round t + 1, and a member arrives at the end of t + 1 once it has heard that t counts: so
the service decides on one round at a time, as above, and d is kept until then. A member has two blocks in
work, of t and of t + 1, and a commit gives out those of t + 2. A replica that comes enters round t with
nothing of its own, adds zeros to its sum, and takes steps from t + 1 on;
docs/explanation/rare-synchronization.md derives why. Where nobody is left who has displacements, those that
enter begin a round of steps from the state that they have, as at the start of a run.

**Data.** Block k stands for the sequences of steps k tau + 1 to (k + 1) tau of a single replica's run: blocks
cut the order of all sequences into parts that do not overlap. The service deals them out in order; the block
of a replica that leaves a round before its displacement has counted is dealt again first. So every block
below the highest one that was dealt has counted once, is in work, or waits to be dealt again.

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
