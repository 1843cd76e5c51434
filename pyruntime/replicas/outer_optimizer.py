"""The outer optimizer: what replicas that train alone do where they meet."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pyruntime import ops
from pyruntime.comm import Axis, Group
from pyruntime.comm.ranges import marked
from pyruntime.data_parallel.compression import Compression
from pyruntime.plan.co2 import least_tau, usual_tau
from pyruntime.replicas.averaging import Averaging, Sums
from pyruntime.replicas.fragment import Fragment
from pyruntime.replicas.methods import Method, fragments_of, refuse_for_members
from pyruntime.replicas.weights import ModuleWeights, Weights

MEASURED_STEPS = 4
"""Of the first round where tau is measured; the first of them warms up and does not count."""


class OuterOptimizer:
    """Makes replicas of `module`, one on each of the G ranks of `mesh`, train alone for rounds of tau steps
    and meet between them. Around any inner optimizer:

        outer = pyruntime.OuterOptimizer(model, mesh["dp"], pyruntime.replicas.co2(tau=12))
        for batch in batches:                     # of this replica
            loss(model, batch).backward()
            optimizer.step()
            outer.step()
        outer.finish()                            # all replicas are one model again

    x_i: the parameters of replica i. z: the outer iterate, m: the outer momentum, the same on all replicas.
    In round t, from x_i = z_t, with the settings of `Method`:

        x_i     tau steps of the inner optimizer, while mean(d_{t-1}) = 1/G sum_i d_{t-1,i} is on its way
        d_t,i = z_t - x_i                                     the displacement; a snapshot, which leaves now
        L     = penalty(gap, reach)                           1 without one
        m_t   = clip(beta m_{t-1} + mean(d_{t-1}) / L, -phi, +phi)
        z_t+1 = z_t - alpha m_t                               Nesterov: z_t - alpha (mean(d) / L + beta m_t)
        x_i   = z_t+1                                         pull < 1: x_i + pull (z_t+1 - x_i)
        gap   = ||z_t - (z_{t-1} - mean(d_{t-1}))||           z_{t-1} - mean(d_{t-1}) is the mean of the x_i
        reach = tau sqrt(1/G sum_i ||first step of round t-1 of replica i||^2)

    That is CO2 (Sun et al. 2024, arXiv 2401.16265, algorithm 1; averages of displacements in place of those
    of parameters, which are the same number and keep more digits). With delay = 0 replicas wait for mean(d_t)
    and use it at once; with another delay it is used after so many steps. Where pull < 1 and the delay is a
    whole round, d_t is measured after the pull. In the first round there is no average yet: z_1 = z_0, m_0 =
    0.

    Displacements travel as the parameters are (bf16 as bf16); z and m are fp32 (fp64 of doubles). Per
    parameter they take 4 + 4 bytes, and what travels 2 or 4. Buffers of the module (running statistics of
    batches) stay each replica's own. Hooks on modules take what has come and let more go, so the module runs
    without torch.compile.

    Args:
        module: the same parameters on every rank of `mesh`; those that require a gradient are averaged.
        mesh: one dimension; None: one replica, whose outer step averages nothing.
        method: from `pyruntime.replicas.co2`, `local_sgd`, `slowmo`, `diloco`, `overlapped_local_sgd`,
            `streaming_diloco`, or a `Method` of your own.
        weights: what is averaged, where another optimizer than torch's holds it; by default the parameters.
        parts: groups over which one replica is cut (tensor-parallel ranks, say): norms of the penalty are
            over all of it.
        sums: what takes the sums over the replicas, where these come and go (`pyruntime.replicas.Member`); by
            default the ranks of `mesh` do.
        compression: how displacements travel in fewer bytes, by "quantize" or "top_k"; what is lost of them,
            fp32, is added to the next round's (docs/how-to/slow-network.md). None: as they are.

    Raises ValueError for a module without trainable parameters, parameters on a device or not contiguous,
    fragments without a layer, and a method that averages amid a round where replicas come and go;
    CommTimeout and PeerLost, on all ranks, as its methods do.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: DeviceMesh | Axis | None,
        method: Method,
        *,
        weights: Weights | None = None,
        parts: Sequence[Group] = (),
        sums: Sums | None = None,
        compression: Compression | None = None,
    ):
        self.method, self._parts = method, tuple(parts)
        self._weights = ModuleWeights(module) if weights is None else weights
        values = self._weights.current()
        of = fragments_of([value.name for value in values], method.fragments)
        if not self._parts and len(set(of)) < method.fragments:
            raise ValueError(
                f"fragments={method.fragments} were asked for and the module has {len(set(of))} layer(s), by "
                "the numbers in its parameters' names; use no more fragments than layers."
            )
        self._fragments = [
            Fragment([value for value, at in zip(values, of, strict=True) if at == number], method)
            for number in range(method.fragments)
        ]
        self.tau: int | None = None if method.tau == "auto" else method.tau
        """None until it has been measured."""
        for number, fragment in enumerate(self._fragments):
            fragment.length = MEASURED_STEPS if self.tau is None else method.length(self.tau, number)
        if isinstance(mesh, Axis):
            mesh = mesh.mesh
        self._averaging: Sums
        self._lost: list[Tensor] = []
        """Of each fragment what compression has lost of its displacements."""
        self._compression = compression
        if sums is None:
            sizes = [(each.sent.numel(), each.sent.dtype) for each in self._fragments]
            self._averaging = averaging = Averaging(mesh, sizes, compression)
            lost = [averaging.lost_of(each.sent) for each in self._fragments]
            self._lost = [each for each in lost if each is not None]
        else:
            refuse_for_members(method)
            if compression is not None:
                raise ValueError(
                    "compression was asked for, and replicas that come and go send displacements as they "
                    "are; leave it out."
                )
            self._averaging = sums
        self.last_penalty = 1.0
        """Of the last outer step; the same on all ranks."""
        self._groups = [*self._parts, *([] if mesh is None else [mesh])]
        self._step_ends: list[float] = []
        self._measured = ""
        self._hooks: list[Any] = []
        if self._averaging.size > 1:
            self._watch(module)

    @property
    def replicas(self) -> int:
        return self._averaging.size

    def step(self) -> None:
        """After every step of the inner optimizer. At the end of a round it waits for what is still on its
        way of the round before, takes the outer step and begins to send this round's displacement."""
        if self.tau is None:
            self._step_ends.append(time.perf_counter())
        for fragment in self._fragments:
            fragment.steps += 1
            if fragment.steps == 1 and self.method.penalty is not None:
                self._weights.current()
                fragment.first_square = self._over_parts(fragment.square_moved())
            if fragment.is_pending and fragment.steps == self.method.delay:
                self._use(fragment)
            if fragment.steps == fragment.length:
                with marked("outer step"):
                    self._meet(fragment)
        self._averaging.pump()

    def _meet(self, fragment: Fragment) -> None:
        """A round ends."""
        self._weights.current()
        late = self.method.delay is None
        scale = self._awaited(fragment) if late and fragment.is_pending else None
        fragment.pass_(step=scale, pull=late, launch=True)
        if late:
            self._weights.written()
        began = time.perf_counter()
        self._launch(fragment)
        if self.tau is None:
            self._settle_tau(fragment, began)
        if self.method.delay == 0:
            self._use(fragment)
        fragment.length = self._settled_tau()

    def _launch(self, fragment: Fragment) -> None:
        fragment.begin_round()
        self._averaging.begin(fragment.sent)

    def _use(self, fragment: Fragment) -> None:
        """The outer step, where it does not wait for the end of a round."""
        self._weights.current()
        fragment.pass_(step=self._awaited(fragment), pull=True, launch=False)
        fragment.is_pending = False
        self._weights.written()

    def _wait(self, fragment: Fragment) -> None:
        """For the sums of the displacements."""
        if not fragment.has_come:
            self._averaging.wait(fragment.sent)
            fragment.has_come, fragment.count = True, self._averaging.size

    def _awaited(self, fragment: Fragment) -> float | None:
        """Waits for the sums of the displacements. Returns what makes of them the outer gradient; None where
        all that had displacements have left."""
        self._wait(fragment)
        scale = self._scale(fragment) if fragment.count else None
        self._averaging.used(fragment.sent, scale)
        return scale

    def _scale(self, fragment: Fragment) -> float:
        mean = 1.0 / fragment.count
        if self.method.penalty is None:
            return mean
        gap = math.sqrt(self._over_parts(fragment.square_gap(mean)))
        reach = fragment.sent_steps * math.sqrt(fragment.sent_square() * mean)
        if math.isinf(reach) and math.isfinite(gap):
            raise ValueError(
                "The length of a round's first step, squared, is more than "
                f"{fragment.sent.dtype} holds, in which it travels, so its penalty is not known; train in "
                "bfloat16 or float32, or with penalty=None."
            )
        penalty = self.method.penalty(gap, reach)
        if not penalty >= 1:
            raise ValueError(f"penalty(gap={gap}, reach={reach}) is {penalty}; it must be at least 1.")
        self.last_penalty = penalty
        return mean / penalty

    def _over_parts(self, square: float) -> float:
        """The sum over the ranks that one replica is cut over."""
        for group in self._parts:
            mine = torch.tensor([square], dtype=torch.float64)
            square = math.fsum(ops.all_gather_stats(mine, group).flatten().tolist())
        return square

    def _settle_tau(self, fragment: Fragment, began: float) -> None:
        """The first round has been taken: its steps are timed, and its exchange, which nothing hides and
        which has begun at `began`."""
        self._wait(fragment)
        exchange_s = time.perf_counter() - began
        ends = self._step_ends
        steps = sorted(end - start for start, end in itertools.pairwise(ends))
        step_s = steps[len(steps) // 2]
        for group in self._groups:
            told = ops.all_gather_stats(torch.tensor([exchange_s, step_s], dtype=torch.float64), group)
            exchange_s, step_s = float(told[:, 0].max()), float(told[:, 1].min())
        least = least_tau(exchange_s, step_s)
        self.tau = usual_tau(least)
        self._measured = (
            f"a step takes {step_s:.3g} s and the exchange {exchange_s:.3g} s, so tau_min is {least}, and "
            f"the next usual number {self.tau}"
        )

    def _settled_tau(self) -> int:
        assert self.tau is not None
        return self.tau

    def finish(self) -> None:
        """All replicas have the same parameters when it returns: what is on its way is used where replicas
        began anew from before it (co2), and what they have moved since is averaged. Every rank calls it; a
        round begins then."""
        self._weights.current()
        for fragment in self._fragments:
            pending = fragment.is_pending and self.method.restarts
            if fragment.steps == 0 and self.method.meets_at_ends:  # after the last step
                if pending:
                    fragment.pass_(step=self._awaited(fragment), pull=True, launch=False)
                    fragment.is_pending = False
                elif fragment.is_pending:
                    self._finish_with(fragment)
                continue
            if fragment.is_pending:
                self._wait(fragment)
            fragment.pass_(step=self._awaited(fragment) if pending else None, pull=False, launch=True)
            self._launch(fragment)
            self._finish_with(fragment)
        self._weights.written()

    def _finish_with(self, fragment: Fragment) -> None:
        """What is on its way is all that replicas have moved from the outer iterate."""
        self._wait(fragment)
        fragment.take_mean(1.0 / fragment.count if fragment.count else 0.0)

    def settle(self) -> None:
        """What is on its way has come. Every rank calls it."""
        for fragment in self._fragments:
            if fragment.is_pending:
                self._wait(fragment)

    def state_dict(self) -> dict[str, Tensor]:
        """base.NAME (z), momentum.NAME and sent.NAME (the sum of displacements that are to be used), over the
        storage; `progress`, the same on all replicas; `first_steps`, a replica's own, and lost.NUMBER, a
        rank's own: of each fragment what compression has lost, flat. Waits for what is on its way, so every
        rank calls it."""
        state: dict[str, Tensor] = {}
        self.settle()
        for fragment in self._fragments:
            for kind, tensors in fragment.tensors().items():
                state |= {f"{kind}.{name}": tensor for name, tensor in tensors.items()}
        rounds = [number for each in self._fragments for number in each.progress()]
        state["progress"] = torch.tensor([self.tau or 0, *rounds], dtype=torch.float64)
        squares = [each.first_square for each in self._fragments]
        state["first_steps"] = torch.tensor(squares, dtype=torch.float64)
        return state | {f"lost.{number}": lost for number, lost in enumerate(self._lost)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Goes on as the one that gave `state_dict()`, with the parameters of that moment.

        Raises ValueError for the state of another model or method."""
        for fragment in self._fragments:
            for kind, tensors in fragment.tensors().items():
                for name, tensor in tensors.items():
                    found = state.get(f"{kind}.{name}")
                    if found is None or found.shape != tensor.shape:
                        raise ValueError(
                            f"The state has no {kind}.{name} of shape {tuple(tensor.shape)}: it is of "
                            "another model."
                        )
                    tensor.copy_(found)
        tau, *numbers = state["progress"].tolist()
        each = Fragment.NUMBERS
        if len(numbers) != each * len(self._fragments) or (self.tau is not None and self.tau != tau):
            raise ValueError(
                f"The state is of tau={tau:.0f} and {len(numbers) // each} fragment(s), and tau={self.tau} "
                f"and {len(self._fragments)} were asked for; use those that it was taken with."
            )
        self.tau, self._step_ends = int(tau) or None, []
        for number, lost in enumerate(self._lost):
            found = state.get(f"lost.{number}")
            if found is None or found.shape != lost.shape:
                raise ValueError(
                    f"The state has no lost.{number} of {len(lost)} elements: it was taken without "
                    "compression, or over other ranks."
                )
            lost.copy_(found)
        for number, fragment in enumerate(self._fragments):
            fragment.go_on(numbers[number * each : (number + 1) * each])
            fragment.first_square = float(state["first_steps"][number])
            if self.tau is None:  # steps are timed anew
                fragment.length = fragment.steps + MEASURED_STEPS

    def common(self) -> list[Tensor]:
        """What all replicas have alike: outer iterate, outer momentum, and whether the last step moved."""
        return [tensor for each in self._fragments for tensor in (each.base, each.momentum, each.moved)]

    def travelling(self) -> list[Tensor]:
        """What displacements travel in."""
        return [each.sent for each in self._fragments]

    def advance(self, sums: Tensor, scale: float | None) -> None:
        """The outer step that others have taken with `sums`, as in `travelling()`, times `scale`; None: with
        none. `begin_anew` is to follow."""
        (fragment,) = self._fragments
        fragment.sent.copy_(sums)
        fragment.pass_(step=scale, pull=False, launch=False)

    def use_what_has_come(self) -> None:
        """The outer step with the sums that a state which was loaded holds; `begin_anew` is to follow. All
        ranks of the replica call it."""
        self._weights.current()
        for fragment in self._fragments:
            if fragment.is_pending:
                fragment.pass_(step=self._awaited(fragment), pull=False, launch=False)
                fragment.is_pending = False

    def begin_anew(self, behind: bool) -> None:
        """The replica goes to the outer iterate, and a round begins. behind: displacements of others are on
        their way, and it takes part in their sum with nothing of its own. All ranks of the replica call
        it."""
        self._weights.current()
        for fragment in self._fragments:
            fragment.begin_anew(self._settled_tau(), behind)
            if behind:
                self._averaging.begin(fragment.sent)
        self._weights.written()

    def close(self) -> None:
        """Nothing is on its way and nothing watched any more; the parameters are each replica's own. Every
        rank calls it."""
        self._averaging.close()
        for hook in self._hooks:
            hook.remove()

    def stats(self) -> tuple[float, int]:
        """Since the start, seconds that this rank's thread did nothing but wait for other replicas, copy and
        sum, and bytes that it read from them."""
        return self._averaging.stats()

    def describe(self) -> str:
        """For a log, in one line."""
        fragments = f" in {self.method.fragments} fragments" if self.method.fragments > 1 else ""
        tau = "measured" if self.tau is None else self.tau
        packed = "" if self._compression is None else f", displacements {self._compression.words()}"
        measured = f" ({self._measured})" if self._measured else ""
        return f"{self.method.name}: {self.replicas} replica(s){fragments}, tau {tau}{measured}{packed}"

    def _watch(self, module: nn.Module) -> None:
        """Modules with parameters of their own let flights begin and end, before their forward and before
        their backward."""
        weak = weakref.ref(self)

        def pump(*_: object) -> None:
            outer = weak()
            if outer is not None:
                outer._averaging.pump()

        def before_backward(_module: nn.Module, _inputs: object, output: object) -> None:
            outer = weak()
            if outer is None or not outer._averaging.is_busy:
                return
            for tensor in output if isinstance(output, tuple | list) else [output]:
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(pump)
                    return

        for each in module.modules():
            with contextlib.suppress(StopIteration):
                next(each.parameters(recurse=False))
                self._hooks.append(each.register_forward_pre_hook(pump))
                self._hooks.append(each.register_forward_hook(before_backward))
