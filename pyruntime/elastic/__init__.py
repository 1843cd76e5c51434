"""Replicas that come and go at outer boundaries.

Each replica (one process, or the ranks of one torchrun) is a job of its own, as strict inside as any. What
joins them is a service, `python -m pyruntime members`, which is no replica and outlives the death of all:

    coordinator.py   what the service decides: pure, events in, orders out
    service.py       its sockets
    member.py        a rank's side: joins, arrives at the end of a round, and hears what became of it
    exchange.py      the sum of displacements over the members of a round, on connections made for it
    transfer.py      weights and states on their way to a replica that comes
    deal.py          which sequences a replica takes in a round
    checks.py        what a rank may tell the service

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
nothing of its own, adds zeros to its sum, and takes steps from t + 1 on; docs/elastic.md derives why. Where
nobody is left who has displacements, those that enter begin a round of steps from the state that they have,
as at the start of a run.

**Data.** Block k stands for the sequences of steps k tau + 1 to (k + 1) tau of a single replica's run: blocks
cut the order of all sequences into parts that do not overlap. The service deals them out in order; the block
of a replica that leaves a round before its displacement has counted is dealt again first. So every block
below the highest one that was dealt has counted once, is in work, or waits to be dealt again.

Torch's process groups are not used between replicas: they cannot lose a member, nor be interrupted.
"""
