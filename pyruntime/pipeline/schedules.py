"""Pipeline schedules by name: the order in which each rank computes.

Sources: GPipe arXiv 1811.06965; 1F1B and interleaved 1F1B arXiv 2104.04473 (Megatron-LM); ZB-H1
arXiv 2401.10241 (zero bubble); ZB-V arXiv 2405.15362 (V schedules); TeraPipe arXiv 2102.07988; Seq1F1B
arXiv 2406.03488; SkipPipe arXiv 2502.19913; SWARM arXiv 2301.11913. In all but TeraPipe, SkipPipe and SWARM a
stage adds the weight gradients of the micro-batches in ascending order, so their sums are the same to the
last bit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import product

from pyruntime.choices import SLICED_KINDS, PipelineKind, values
from pyruntime.pipeline.actions import Action, Kind, Schedule, check_units, with_transfers
from pyruntime.pipeline.list_schedule import list_schedule
from pyruntime.pipeline.routing import Speeds, by_stage, costs_of_replicas, routes
from pyruntime.pipeline.simulated import Costs, simulate
from pyruntime.pipeline.skipping import best_paths, check_skip
from pyruntime.pipeline.v_schedule import zb_v
from pyruntime.pipeline.validate import ScheduleError, check

KINDS = values(PipelineKind)


def make_schedule(
    kind: str,
    ranks: int,
    micro_batches: int,
    *,
    virtual: int = 1,
    slices: int = 1,
    skip: int = 0,
    speeds: Sequence[float] = (),
    costs: Costs | None = None,
) -> Schedule:
    """Returns the schedule `kind`, one of KINDS, for one step of `micro_batches` over `ranks` ranks.

    virtual: stages of each rank, for "interleaved"; rank r holds stages r, r + ranks, ... "zb-v" has two,
    r and 2 ranks - 1 - r; the other kinds have one.
    slices: parts that each sequence is cut into, for "terapipe" and "seq1f1b". Slices go backward from last
    to first, because the gradients of a slice's keys and values come from the slices after it.
    skip: stages that every micro-batch leaves out, for "1f1b" (`pyruntime.pipeline.skipping`); rank r then
    stores at most ranks - r micro-batches, as without.
    speeds: for "1f1b", relative speeds of the replicas of every stage, first those of the first stage; the
    micro-batches are those of all replicas, and the schedule is for `ranks` times their number of ranks
    (`pyruntime.pipeline.routing`), each of which stores at most `ranks` micro-batches more than without.
    costs: seconds of the stages, with speeds those at speed 1, for which the order of skip and speeds is the
    best that was found; None: all the same, and a backward twice a forward.

    Raises ValueError for an unknown kind and for numbers that the kind has no schedule for.
    """
    placement = placement_of(kind, ranks, micro_batches, virtual=virtual, slices=slices, skip=skip)
    if speeds:
        _check_routed(kind, skip, speeds)
        return _routed(by_stage(speeds, ranks), micro_batches, costs or Costs())
    if skip:
        return _skipping(placement, micro_batches, skip, costs or Costs())
    match kind:
        case "gpipe":
            computes = [_all_forwards_first(rank, micro_batches) for rank in range(ranks)]
        case "terapipe":
            computes = [_terapipe(rank, micro_batches, slices) for rank in range(ranks)]
        case "interleaved" if virtual > 1:
            computes = [_interleaved(rank, ranks, micro_batches, virtual) for rank in range(ranks)]
        case "zb-h1":
            computes = [_zb_h1(rank, ranks, micro_batches) for rank in range(ranks)]
        case "zb-v":
            computes = zb_v(ranks, micro_batches)
        case "1f1b" | "interleaved" | "seq1f1b":
            # Interleaved 1F1B with one stage a rank is 1F1B, and so is Seq1F1B with one slice.
            computes = [_seq1f1b(rank, ranks, micro_batches, slices) for rank in range(ranks)]
        case _:  # A kind that was added without a branch here: _check has refused all other names.
            raise NotImplementedError(f"{kind} is a PipelineKind, but make_schedule has no branch for it.")
    return Schedule(kind, micro_batches, slices, placement, with_transfers(computes, placement))


def _skipping(placement: tuple[int, ...], micro_batches: int, skip: int, costs: Costs) -> Schedule:
    most_stored = [len(placement) - rank for rank in placement]
    paths = best_paths(placement, micro_batches, skip, costs, most_stored)
    made = list_schedule(placement, paths, costs, most_stored)
    assert made is not None
    computes, seconds = made
    whole = simulate(make_schedule("1f1b", len(placement), micro_batches), costs).makespan
    if seconds >= whole:
        raise ValueError(
            f"skip={skip} does not shorten a step: {seconds:g} s, and {whole:g} s through all stages; "
            "leave it at 0."
        )
    return Schedule("1f1b", micro_batches, 1, placement, with_transfers(computes, placement, paths), paths)


def _check_routed(kind: str, skip: int, speeds: Sequence[float]) -> None:
    if kind != "1f1b" or skip:
        asked = f"skip={skip}" if skip else kind
        raise ValueError(
            f"{asked} takes micro-batches through fixed ranks, so speeds={list(speeds)} are not possible; "
            "leave them out, or use 1f1b without skip."
        )


def _routed(speeds: Speeds, micro_batches: int, costs: Costs) -> Schedule:
    """Returns the shortest schedule, of several the one that stores least: a replica that waits for others
    needs micro-batches in store."""
    stages, replicas = len(speeds), len(speeds[0])
    placement, paths = tuple(range(stages * replicas)), routes(speeds, micro_batches)
    of_places = costs_of_replicas(costs, speeds)
    found: list[tuple[float, int, Schedule]] = []
    for more in range(stages + 1):
        most_stored = [stages - rank // replicas + more for rank in placement]
        made = list_schedule(placement, paths, of_places, most_stored)
        assert made is not None, "stages in ascending order do not wait for each other in a circle"
        actions = with_transfers(made[0], placement, paths)
        schedule = Schedule("1f1b", micro_batches, 1, placement, actions, paths, replicas)
        try:
            check(schedule)
        except ScheduleError:  # more messages would be under way than channels hold
            continue
        found.append((made[1], more, schedule))
    if not found:
        raise ValueError(
            f"speeds={[list(each) for each in speeds]} have no schedule of {micro_batches} micro-batches in "
            "which channels between ranks hold all messages; use fewer stages or fewer micro-batches."
        )
    return min(found, key=lambda each: each[:2])[2]


def placement_of(
    kind: str, ranks: int, micro_batches: int, *, virtual: int = 1, slices: int = 1, skip: int = 0
) -> tuple[int, ...]:
    """Returns the rank of each stage of that schedule, without making its actions, which may be millions.

    Raises ValueError as `make_schedule` does."""
    _check(kind, ranks, micro_batches, virtual, slices)
    if skip:
        if kind != "1f1b":
            raise ValueError(
                f"{kind} takes every micro-batch through all stages, so skip={skip} is not possible; leave "
                "it at 0, or use 1f1b."
            )
        check_skip(ranks, micro_batches, skip)
    if kind == "zb-v":
        return (*range(ranks), *reversed(range(ranks)))
    return tuple(rank for _ in range(virtual) for rank in range(ranks))


def _check(kind: str, ranks: int, micro_batches: int, virtual: int, slices: int) -> None:
    if kind not in KINDS:
        raise ValueError(f"There is no schedule {kind}; use one of {', '.join(KINDS)}.")
    sizes = {"ranks": ranks, "micro_batches": micro_batches, "virtual": virtual, "slices": slices}
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, found {value}.")
    check_units(ranks * virtual, micro_batches, slices)
    if virtual > 1 and kind != "interleaved":
        raise ValueError(
            f"{kind} fixes the number of stages a rank has, so virtual={virtual} is not possible; leave it "
            "at 1, or use interleaved."
        )
    if slices > 1 and kind not in SLICED_KINDS:
        raise ValueError(
            f"{kind} does not cut sequences, so slices={slices} is not possible; leave it at 1, or use "
            f"{' or '.join(SLICED_KINDS)}."
        )
    if kind == "interleaved" and micro_batches % ranks:
        raise ValueError(
            f"interleaved runs micro-batches in groups of ranks={ranks}, which does not divide "
            f"micro_batches={micro_batches}; use {-(-micro_batches // ranks) * ranks}."
        )


def _all(kind: Kind, stage: int, micro_batches: int, slices: int = 1) -> list[Action]:
    return [Action(kind, stage, *place) for place in product(range(micro_batches), range(slices))]


def _all_forwards_first(stage: int, micro_batches: int) -> list[Action]:
    """GPipe, figure 2c, but with the backwards in ascending order, which costs the same."""
    return _all(Kind.FORWARD, stage, micro_batches) + _all(Kind.BACKWARD, stage, micro_batches)


def _terapipe(stage: int, micro_batches: int, slices: int) -> list[Action]:
    backwards = _all(Kind.BACKWARD, stage, micro_batches, slices)
    return _all(Kind.FORWARD, stage, micro_batches, slices) + backwards[::-1]


def _seq1f1b(rank: int, ranks: int, micro_batches: int, slices: int) -> list[Action]:
    """Seq1F1B, section 3.2. With one slice it is 1F1B: warm-up, then one forward, one backward."""
    forwards = _all(Kind.FORWARD, rank, micro_batches, slices)
    places = product(range(micro_batches), reversed(range(slices)))
    backwards = [Action(Kind.BACKWARD, rank, *place) for place in places]
    return _alternate(forwards, backwards, ranks - rank - 2 + slices)


def _interleaved(rank: int, ranks: int, micro_batches: int, virtual: int) -> list[Action]:
    """Megatron-LM, section 2.2: groups of `ranks` micro-batches go through the stages of a rank in turn."""
    group = ranks * virtual

    def action(kind: Kind, number: int) -> Action:
        chunk = number % group // ranks
        if kind is Kind.BACKWARD:
            chunk = virtual - 1 - chunk
        return Action(kind, chunk * ranks + rank, number // group * ranks + number % ranks)

    numbers = range(micro_batches * virtual)
    forwards = [action(Kind.FORWARD, number) for number in numbers]
    backwards = [action(Kind.BACKWARD, number) for number in numbers]
    return _alternate(forwards, backwards, 2 * (ranks - rank - 1) + (virtual - 1) * ranks)


def _alternate(forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int) -> list[Action]:
    """`warm_up` forwards, then one forward and one backward in turn, then the remaining backwards."""
    warm_up = min(warm_up, len(forwards))
    pairs = zip(forwards[warm_up:], backwards, strict=False)
    steady = [action for pair in pairs for action in pair]
    return [*forwards[:warm_up], *steady, *backwards[len(forwards) - warm_up :]]


def _zb_h1(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """1F1B with delayed weight gradients: rank r delays those of the newest r micro-batches (arXiv
    2401.10241, section 2.1, in the form that its authors ship for Megatron-LM)."""
    if rank == 0:  # No rank waits for the input's gradient of stage 0.
        return _seq1f1b(rank, ranks, micro_batches, 1)
    computes: list[Action] = []
    waiting: deque[Action] = deque()
    for action in _seq1f1b(rank, ranks, micro_batches, 1):
        if action.kind is Kind.FORWARD:
            computes.append(action)
            continue
        computes.append(action.as_kind(Kind.BACKWARD_INPUT))
        waiting.append(action.as_kind(Kind.BACKWARD_WEIGHT))
        if len(waiting) > rank:
            computes.append(waiting.popleft())
    return [*computes, *waiting]
