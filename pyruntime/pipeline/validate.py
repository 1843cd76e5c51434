"""Checks a schedule before a rank runs it."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import product

from pyruntime.pipeline.actions import Action, Kind, Schedule, check_units


class ScheduleError(ValueError):
    """A schedule that cannot run, or that does not compute its step. The message is one sentence."""


def check(
    schedule: Schedule,
    *,
    most_in_flight: Sequence[int] | None = None,
    channel_capacity: int = 4,
    on_action: Callable[[int, Action], None] = lambda rank, action: None,
) -> None:
    """Raises ScheduleError, one sentence, for the first error in `schedule`.

    Every slice of every micro-batch must go once forward and once backward through every stage on its path,
    on the rank of that stage. It must be sent and received exactly where stages that follow each other on the
    path are on different ranks. No order of events may leave ranks waiting for each other. A path begins at
    the first stage, ends at the last, and visits none twice; every stage is on one. Where stages have
    replicas, it visits one replica of each stage, in order.

    most_in_flight: bound on `schedule.peak_in_flight(rank)` by rank, in forwards of a stage for one slice.
    channel_capacity: the number of messages from one rank to another that may be sent and not yet received;
    at that number a send waits. Raises ValueError unless it is at least 1.
    on_action: called with (rank, action) in an order in which the actions can run.
    """
    if channel_capacity < 1:
        raise ValueError(f"channel_capacity must be at least 1, found {channel_capacity}.")
    _check_sizes(schedule)
    _check_paths(schedule)
    for rank in range(schedule.ranks):
        _check_actions(schedule, rank)
    _check_weights_last(schedule)
    _check_order_of_messages(schedule)
    _Execution(schedule, channel_capacity, on_action).run()
    if most_in_flight is not None:
        _check_memory(schedule, most_in_flight)


def _check_sizes(schedule: Schedule) -> None:
    for name in ("micro_batches", "slices", "stages", "ranks", "replicas"):
        value = getattr(schedule, name)
        _require(value >= 1, f"{name} must be at least 1, found {value}.")
    check_units(schedule.stages, schedule.micro_batches, schedule.slices)
    for stage, rank in enumerate(schedule.placement):
        _require(
            0 <= rank < schedule.ranks,
            f"Stage {stage} is placed on rank {rank}, but there are actions for {schedule.ranks} rank(s).",
        )
    for rank in range(schedule.ranks):
        _require(rank in schedule.placement, f"No stage is placed on rank {rank}.")


def _check_paths(schedule: Schedule) -> None:
    paths, last = schedule.paths, schedule.stages - 1
    if not paths:
        _require(schedule.replicas == 1, f"Stages have {schedule.replicas} replicas, but there are no paths.")
        return
    _require(
        len(paths) == schedule.micro_batches,
        f"There are paths of {len(paths)} micro-batches, but {schedule.micro_batches} micro-batches.",
    )
    for number, path in enumerate(paths):
        words = f"Micro-batch {number} visits the stages {list(path)}"
        if schedule.replicas > 1:
            _check_replicas(schedule, path, words)
            continue
        _require(
            bool(path) and path[0] == 0 and path[-1] == last,
            f"{words}; a path begins at stage 0 and ends at stage {last}.",
        )
        strange = [stage for stage in path if not 0 <= stage <= last]
        _require(not strange, f"{words}, but there is no stage {strange[0] if strange else ''}.")
        _require(len(set(path)) == len(path), f"{words}, one of them twice.")
    for stage in range(schedule.stages):
        _require(schedule.visits(stage) > 0, f"No micro-batch visits stage {stage}.")


def _check_replicas(schedule: Schedule, path: Sequence[int], words: str) -> None:
    replicas = schedule.replicas
    wanted = list(range(schedule.stages // replicas))
    _require(
        schedule.stages % replicas == 0 and [stage // replicas for stage in path] == wanted,
        f"{words}; a path visits one of each {replicas} stages in turn, which are replicas of one.",
    )


def _check_actions(schedule: Schedule, rank: int) -> None:
    """Checks that `rank` runs exactly the actions that its stages need, each once."""
    found, route = Counter(schedule.actions[rank]), schedule.route
    for action, times in found.items():
        _check_place(schedule, rank, action)
        _require(times == 1, f"Rank {rank} runs {action} {times} times.")
    slices = product(schedule.stages_of(rank), range(schedule.micro_batches), range(schedule.slices))
    wanted: set[Action] = set()
    for one in slices:
        if one[0] not in schedule.path(one[1]):
            continue
        whole, of_input, of_weight = (
            Action(kind, *one) for kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
        )
        halves = [half for half in (of_input, of_weight) if half in found]
        _require(
            not (whole in found and halves),
            f"Rank {rank} runs {whole} and also its part {' and '.join(map(str, halves))}; run one of both.",
        )
        computes = (Action(Kind.FORWARD, *one), *((of_input, of_weight) if halves else (whole,)))
        for compute in computes:
            send, receive = (find(compute) for find in (route.sent_after, route.received_before))
            wanted.update(action for action in (receive, compute, send) if action is not None)
    _check_same(rank, wanted, found)


def _check_place(schedule: Schedule, rank: int, action: Action) -> None:
    bounds = (
        ("stage", schedule.stages),
        ("micro_batch", schedule.micro_batches),
        ("slice", schedule.slices),
    )
    for name, bound in bounds:
        value = getattr(action, name)
        _require(
            0 <= value < bound,
            f"Rank {rank} runs {action}, whose {name} {value} does not exist: the schedule has {bound}.",
        )
    owner = schedule.placement[action.stage]
    _require(owner == rank, f"Rank {rank} runs {action}, but stage {action.stage} is on rank {owner}.")
    _require(
        action.stage in schedule.path(action.micro_batch),
        f"Rank {rank} runs {action}, but micro-batch {action.micro_batch} skips stage {action.stage}.",
    )


def _check_same(rank: int, wanted: set[Action], found: Counter[Action]) -> None:
    missing = sorted(wanted - found.keys(), key=_place)
    if missing:
        raise ScheduleError(f"Rank {rank} never runs {missing[0]}{_more(missing)}.")
    needless = sorted(found.keys() - wanted, key=_place)
    if needless:
        raise ScheduleError(
            f"Rank {rank} runs {needless[0]}{_more(needless)}, but the stage at the other end is on the same "
            "rank or does not exist."
        )


def _place(action: Action) -> tuple[int, int, int, str]:
    return (action.micro_batch, action.slice, action.stage, action.kind.value)


def _more(actions: list[Action]) -> str:
    return f" (and {len(actions) - 1} more)" if len(actions) > 1 else ""


def _check_weights_last(schedule: Schedule) -> None:
    for rank, actions in enumerate(schedule.actions):
        seen: set[Action] = set()
        for action in actions:
            _require(
                action.kind is not Kind.BACKWARD_WEIGHT or action.as_kind(Kind.BACKWARD_INPUT) in seen,
                f"Rank {rank} runs {action} before {action.as_kind(Kind.BACKWARD_INPUT)}.",
            )
            seen.add(action)


def _check_order_of_messages(schedule: Schedule) -> None:
    sent: defaultdict[tuple[int, int], list[Action]] = defaultdict(list)
    received: defaultdict[tuple[int, int], list[Action]] = defaultdict(list)
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            if action.kind.is_compute:
                continue
            other = schedule.route.peer(action)
            if action.kind.is_send:
                sent[rank, other].append(schedule.route.other_end(action))
            else:
                received[other, rank].append(action)
    for (source, to), order in sent.items():
        for expected, receive in zip(order, received[source, to], strict=True):
            _require(
                expected == receive,
                f"Rank {to} receives {receive}, but the next message from rank {source} is "
                f"{schedule.route.other_end(expected)}.",
            )


def _check_memory(schedule: Schedule, most_in_flight: Sequence[int]) -> None:
    if len(most_in_flight) != schedule.ranks:
        raise ValueError(
            f"most_in_flight has {len(most_in_flight)} bounds, but the schedule {schedule.ranks} ranks; give "
            "one for each rank."
        )
    for rank, bound in enumerate(most_in_flight):
        peak = schedule.peak_in_flight(rank)
        _require(peak <= bound, f"Rank {rank} stores {peak} forwards at once, more than the {bound} allowed.")


class _Execution:
    """Runs the lists without tensors: each rank in turn as far as it can, until no rank can go on."""

    def __init__(
        self, schedule: Schedule, channel_capacity: int, on_action: Callable[[int, Action], None]
    ) -> None:
        self.schedule, self.route = schedule, schedule.route
        self.channel_capacity = channel_capacity
        self.on_action = on_action
        self.next = [0] * schedule.ranks
        """Each rank's place in its list."""
        self.whole = {action for own in schedule.actions for action in own if action.kind is Kind.BACKWARD}
        self.done: set[Action] = set()
        self.channels: defaultdict[tuple[int, int], deque[Action]] = defaultdict(deque)
        """Messages that are sent and not yet received, by (sender, receiver)."""

    def run(self) -> None:
        ranks = range(self.schedule.ranks)
        progress = True
        while progress:
            progress = sum([self._advance(rank) for rank in ranks]) > 0
        stuck = [rank for rank in ranks if self._current(rank) is not None]
        if stuck:
            raise ScheduleError(self._deadlock(stuck[0]))

    def _current(self, rank: int) -> Action | None:
        actions = self.schedule.actions[rank]
        return actions[self.next[rank]] if self.next[rank] < len(actions) else None

    def _advance(self, rank: int) -> int:
        """Runs `rank` until it has to wait. Returns how many actions it ran."""
        start = self.next[rank]
        while (action := self._current(rank)) is not None and self._wait(rank, action) is None:
            if action.kind.is_send:
                self._channel(action).append(action)
            elif action.kind.is_receive:
                self._channel(self.route.other_end(action)).popleft()
            self.done.add(action)
            self.next[rank] += 1
            self.on_action(rank, action)
        return self.next[rank] - start

    def _channel(self, send: Action) -> deque[Action]:
        return self.channels[self.schedule.placement[send.stage], self.route.peer(send)]

    def _wait(self, rank: int, action: Action) -> tuple[str, int] | None:
        """Returns what `rank` must wait for before `action`, and the rank that ends the wait; else None."""
        for need in self._needs(action):
            if need not in self.done:
                owner = self.schedule.placement[need.stage]
                whose = "its own" if owner == rank else f"rank {owner} to run"
                return f"{whose} {need}", owner
        if action.kind.is_send:
            to = self.route.peer(action)
            channel = self._channel(action)
            if len(channel) >= self.channel_capacity:
                return f"rank {to} to receive {channel[0]}", to
        return None

    def _needs(self, action: Action) -> Iterator[Action]:
        """Yields the actions that must have run before `action`."""
        stage, micro_batch, part = action.stage, action.micro_batch, action.slice
        receive = self.route.received_before(action)
        if receive is not None:
            yield receive
        match action.kind:
            case Kind.RECEIVE_ACTIVATION | Kind.RECEIVE_GRADIENT:
                yield self.route.other_end(action)
            case Kind.SEND_ACTIVATION:
                yield action.as_kind(Kind.FORWARD)
            case Kind.SEND_GRADIENT | Kind.BACKWARD_WEIGHT:
                yield self._backward(stage, micro_batch, part)
            case Kind.FORWARD:
                before = self.route.before(stage, micro_batch)
                if receive is None and before is not None:
                    yield Action(Kind.FORWARD, before, micro_batch, part)
                if part > 0:
                    yield Action(Kind.FORWARD, stage, micro_batch, part - 1)
            case Kind.BACKWARD | Kind.BACKWARD_INPUT:
                yield action.as_kind(Kind.FORWARD)
                after = self.route.after(stage, micro_batch)
                if receive is None and after is not None:
                    yield self._backward(after, micro_batch, part)
                if part + 1 < self.schedule.slices:
                    yield self._backward(stage, micro_batch, part + 1)

    def _backward(self, stage: int, micro_batch: int, part: int) -> Action:
        """Returns the schedule's action that makes the input's gradient: a BACKWARD or a BACKWARD_INPUT."""
        whole = Action(Kind.BACKWARD, stage, micro_batch, part)
        return whole if whole in self.whole else whole.as_kind(Kind.BACKWARD_INPUT)

    def _deadlock(self, rank: int) -> str:
        """Describes the circle of ranks that wait for each other."""
        waits: dict[int, str] = {}
        while rank not in waits:
            action = self._current(rank)
            wait = action and self._wait(rank, action)
            assert wait, "a rank that another waits for is stuck itself"
            waits[rank] = f"rank {rank} waits at {action} for {wait[0]}"
            rank = wait[1]
        circle = list(waits)[list(waits).index(rank) :]
        return f"Deadlock: {', '.join(waits[rank] for rank in circle)}."


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise ScheduleError(sentence)
