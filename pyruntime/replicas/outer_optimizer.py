"""The outer optimizer: averages replicas that train without each other, once a round of steps."""

from __future__ import annotations

import collections
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
from pyruntime.replicas.fragment import Fragment, Number
from pyruntime.replicas.host_copy import HostCopy
from pyruntime.replicas.methods import Method, fragments_of, refuse_for_members
from pyruntime.replicas.weights import ModuleWeights, Weights

MEASURED_STEPS = 4
"""Steps of the first round while tau is measured; the first of them warms up and does not count."""


class OuterOptimizer:
    """Lets replicas of `module`, one on each of the G ranks of `mesh`, train alone for rounds of tau steps
    and averages them between rounds. Works around any inner optimizer:

        outer = pyruntime.OuterOptimizer(model, mesh["dp"], pyruntime.replicas.co2(tau=12))
        for batch in batches:                     # of this replica
            loss(model, batch).backward()
            optimizer.step()
            outer.step()
        outer.finish()                            # all replicas are one model again

    x_i are the parameters of replica i. z is the outer iterate, m the outer momentum; all replicas have the
    same z and m. In round t, from x_i = z_t, with the settings of `Method`:

        x_i     tau steps of the inner optimizer, while mean(d_{t-1}) = 1/G sum_i d_{t-1,i} is being summed
        d_t,i = z_t - x_i                                     the displacement: a snapshot, sent from now on
        L     = penalty(gap, reach)                           1 without one
        m_t   = clip(beta m_{t-1} + mean(d_{t-1}) / L, -phi, +phi)
        z_t+1 = z_t - alpha m_t                               Nesterov: z_t - alpha (mean(d) / L + beta m_t)
        x_i   = z_t+1                                         pull < 1: x_i + pull (z_t+1 - x_i)
        gap   = ||z_t - (z_{t-1} - mean(d_{t-1}))||           z_{t-1} - mean(d_{t-1}) is the mean of the x_i
        reach = tau sqrt(1/G sum_i ||first step of round t-1 of replica i||^2)

    That is CO2 (Sun et al. 2024, arXiv 2401.16265, algorithm 1). It averages displacements, not parameters:
    the result is the same number and keeps more digits. With delay = 0 replicas wait for mean(d_t) and use it
    at once; with another delay they use it after that many steps. If pull < 1 and the delay is a whole round,
    d_t is measured after the pull. In the first round there is no average yet: z_1 = z_0, m_0 = 0.

    Displacements travel in the parameters' dtype (bf16 as bf16); z and m are fp32 (fp64 for doubles). Per
    parameter z and m take 4 + 4 bytes, and the buffer that travels 2 or 4. Buffers of the module (running
    statistics of batches) stay each replica's own. Hooks on modules receive and send parts of the sums, so
    the module must run without torch.compile.

    Args:
        module: the same parameters on every rank of `mesh`; those that require a gradient are averaged.
        mesh: one dimension; None: one replica, whose outer step averages nothing.
        method: from `pyruntime.replicas.co2`, `local_sgd`, `slowmo`, `diloco`, `overlapped_local_sgd`,
            `streaming_diloco`, or a `Method` of your own.
        weights: the tensors to average, if another optimizer than torch's has them; default: the parameters.
        parts: groups over which one replica is cut (tensor-parallel ranks, say); the norms of the penalty
            cover all parts.
        sums: takes the sums over replicas that come and go (`pyruntime.replicas.member.Member`); by default
            the ranks of `mesh` do.
        compression: packs displacements by "quantize" or "top_k". What is lost of them, fp32, is added to the
            next round's (docs/how-to/slow-network.md). None: they travel unpacked.

    On a device the passes are queued on the current stream, the sums on one of their own, and the host waits
    for neither. A penalty then gets, and returns, float64 tensors without dimensions; one that is refused, or
    that overflows, raises in a later step.

    Raises ValueError for a module without trainable parameters, parameters that are not contiguous or on
    several devices, fragments without a layer, and a method that averages within a round where replicas come
    and go. Its methods and the constructor raise CommTimeout and PeerLost on all ranks.
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
                f"fragments={method.fragments} is more than the module's {len(set(of))} layer(s), counted by "
                "the numbers in parameter names; use no more fragments than layers."
            )
        self._device = values[0].tensor.device
        self._fragments = [
            Fragment(
                [value for value, at in zip(values, of, strict=True) if at == number], method, self._device
            )
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
        """Values that compression has lost, for each fragment."""
        self._compression = compression
        if sums is None:
            sizes = [(each.sent.numel(), each.sent.dtype) for each in self._fragments]
            self._averaging = averaging = Averaging(mesh, sizes, compression, self._device)
            lost = [averaging.lost_of(each.sent) for each in self._fragments]
            self._lost = [each for each in lost if each is not None]
        else:
            refuse_for_members(method)
            if compression is not None:
                raise ValueError(
                    "compression was set, but replicas that come and go send displacements uncompressed; "
                    "leave compression out."
                )
            self._averaging = sums
        self.last_penalty = 1.0
        """The penalty of the last outer step; the same on all ranks. On a device, of the last one that is
        known."""
        self._told: collections.deque[HostCopy] = collections.deque()
        """Gap, reach and penalty of outer steps, on their way from the device."""
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
        """Call it after every step of the inner optimizer. At the end of a round it waits for the sums of the
        round before, takes the outer step and begins to send this round's displacement."""
        if self.tau is None:
            self._step_ends.append(self._now())
        while self._told and self._told[0].is_there():
            self._take_penalty()
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
        """Ends a round."""
        self._weights.current()
        late = self.method.delay is None
        scale = self._awaited(fragment) if late and fragment.is_pending else None
        fragment.pass_(step=scale, pull=late, launch=True)
        if late:
            self._weights.written()
        began = self._now() if self.tau is None else 0.0
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
        """Takes an outer step that is due before the end of a round."""
        self._weights.current()
        fragment.pass_(step=self._awaited(fragment), pull=True, launch=False)
        fragment.is_pending = False
        self._weights.written()

    def _wait(self, fragment: Fragment) -> None:
        """Waits for the sums of the displacements."""
        if not fragment.has_come:
            self._averaging.wait(fragment.sent)
            fragment.has_come, fragment.count = True, self._averaging.size

    def _awaited(self, fragment: Fragment) -> Number | None:
        """Waits for the sums of the displacements. Returns the factor that makes them the outer gradient;
        None if all replicas that had displacements have left."""
        self._wait(fragment)
        scale = self._scale(fragment) if fragment.count else None
        self._averaging.used(fragment.sent, scale)
        return scale

    def _scale(self, fragment: Fragment) -> Number:
        mean = 1.0 / fragment.count
        if self.method.penalty is None:
            return mean
        gap: Any = _root(self._over_parts(fragment.square_gap(mean)))
        reach: Any = fragment.sent_steps * _root(fragment.sent_square() * mean)
        penalty = self.method.penalty(gap, reach)
        if isinstance(gap, Tensor):
            numbers = [torch.as_tensor(each).to(gap) for each in (gap, reach, penalty)]
            self._told.append(HostCopy([torch.stack(numbers)]))
        else:
            self._check_penalty(gap, reach, penalty)
        return mean / penalty

    def _check_penalty(self, gap: float, reach: float, penalty: float) -> None:
        if math.isinf(reach) and math.isfinite(gap):
            raise ValueError(
                f"The squared length of a round's first step overflows {self._fragments[0].sent.dtype}, the "
                "dtype it travels in, so the penalty cannot be computed; train in bfloat16 or float32, or "
                "set penalty=None."
            )
        if not penalty >= 1:
            raise ValueError(f"penalty(gap={gap}, reach={reach}) is {penalty}; it must be at least 1.")
        self.last_penalty = penalty

    def _take_penalty(self) -> None:
        """Checks the oldest penalty that was on its way from the device."""
        (told,) = self._told.popleft().take()
        self._check_penalty(*told.tolist())

    def _over_parts(self, square: Number) -> Number:
        """Returns the sum over the ranks that share one replica."""
        for group in self._parts:
            if isinstance(square, Tensor):
                square = ops.all_gather_stats(square[None], group).sum()
            else:
                mine = torch.tensor([square], dtype=torch.float64)
                square = math.fsum(ops.all_gather_stats(mine, group).flatten().tolist())
        return square

    def _now(self) -> float:
        """Returns the time when all steps so far have been taken. On a device the host waits for them."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()

    def _settle_tau(self, fragment: Fragment, began: float) -> None:
        """Sets tau after the first round, from the times of its steps and of its exchange, which nothing
        hides and which began at `began`."""
        self._wait(fragment)
        exchange_s = self._now() - began
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
        """Gives all replicas the same parameters. Methods that restart from the outer iterate (co2) first use
        the average under way. Then what replicas have moved since is averaged, and a new round begins. Every
        rank calls it."""
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
        while self._told:
            self._take_penalty()

    def _finish_with(self, fragment: Fragment) -> None:
        """Averages in what the sums hold: all that replicas have moved from the outer iterate."""
        self._wait(fragment)
        fragment.take_mean(1.0 / fragment.count if fragment.count else 0.0)

    def settle(self) -> None:
        """Waits for all sums under way. Every rank calls it."""
        for fragment in self._fragments:
            if fragment.is_pending:
                self._wait(fragment)

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the state, over the storage: base.NAME (z), momentum.NAME, and sent.NAME (the sum of
        displacements not used yet). `progress` is the same on all replicas. `first_steps` is a replica's own,
        and lost.NUMBER a rank's own: what compression has lost of each fragment, flat. Waits for all sums
        under way, so every rank calls it."""
        state: dict[str, Tensor] = {}
        self.settle()
        for fragment in self._fragments:
            for kind, tensors in fragment.tensors().items():
                state |= {f"{kind}.{name}": tensor for name, tensor in tensors.items()}
        rounds = [number for each in self._fragments for number in each.progress()]
        state["progress"] = torch.tensor([self.tau or 0, *rounds], dtype=torch.float64)
        squares = [torch.as_tensor(each.first_square, dtype=torch.float64) for each in self._fragments]
        state["first_steps"] = torch.stack(squares)
        return state | {f"lost.{number}": lost for number, lost in enumerate(self._lost)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continues from a `state_dict()`; the parameters must be those of the same moment.

        Raises ValueError for the state of another model or method."""
        for fragment in self._fragments:
            for kind, tensors in fragment.tensors().items():
                for name, tensor in tensors.items():
                    found = state.get(f"{kind}.{name}")
                    if found is None or found.shape != tensor.shape:
                        raise ValueError(
                            f"The state has no {kind}.{name} of shape {tuple(tensor.shape)}: it belongs to "
                            "another model."
                        )
                    tensor.copy_(found)
        tau, *numbers = state["progress"].tolist()
        each = Fragment.NUMBERS
        if len(numbers) != each * len(self._fragments) or (self.tau is not None and self.tau != tau):
            raise ValueError(
                f"The state was saved with tau={tau:.0f} and {len(numbers) // each} fragment(s), and this "
                f"run has tau={self.tau} and {len(self._fragments)}; use the tau and fragments of the state."
            )
        self.tau, self._step_ends = int(tau) or None, []
        for number, lost in enumerate(self._lost):
            found = state.get(f"lost.{number}")
            if found is None or found.shape != lost.shape:
                raise ValueError(
                    f"The state has no lost.{number} of {len(lost)} elements: it was saved without "
                    "compression, or on other ranks."
                )
            lost.copy_(found)
        for number, fragment in enumerate(self._fragments):
            fragment.go_on(numbers[number * each : (number + 1) * each])
            fragment.take_first_square(state["first_steps"][number])
            if self.tau is None:  # steps are timed anew
                fragment.length = fragment.steps + MEASURED_STEPS

    def common(self) -> list[Tensor]:
        """Returns what is equal on all replicas: z, m, and whether the last step moved z."""
        return [tensor for each in self._fragments for tensor in (each.base, each.momentum, each.moved)]

    def travelling(self) -> list[Tensor]:
        """Returns the buffers that displacements travel in."""
        return [each.sent for each in self._fragments]

    def advance(self, sums: Tensor, scale: Number | None) -> None:
        """Repeats the outer step that others have taken with `sums`, shaped as in `travelling()`, times
        `scale`; None: without sums. Call `begin_anew` next."""
        (fragment,) = self._fragments
        fragment.sent.copy_(sums)
        fragment.pass_(step=scale, pull=False, launch=False)

    def use_what_has_come(self) -> None:
        """Takes the outer step with the sums that a loaded state holds; call `begin_anew` next. All ranks of
        the replica call it."""
        self._weights.current()
        for fragment in self._fragments:
            if fragment.is_pending:
                fragment.pass_(step=self._awaited(fragment), pull=False, launch=False)
                fragment.is_pending = False

    def begin_anew(self, behind: bool) -> None:
        """Sets the replica to the outer iterate and begins a round. behind: others have displacements under
        way, and this replica takes part in their sum with zeros. All ranks of the replica call it."""
        self._weights.current()
        for fragment in self._fragments:
            fragment.begin_anew(self._settled_tau(), behind)
            if behind:
                self._averaging.begin(fragment.sent)
        self._weights.written()

    def close(self) -> None:
        """Waits for all sums under way and removes the hooks; the parameters stay each replica's own. Every
        rank calls it."""
        self._averaging.close()
        for hook in self._hooks:
            hook.remove()

    def stats(self) -> tuple[float, int]:
        """Returns two totals since the start: seconds in which this rank's thread only waited for other
        replicas, copied or summed, and bytes that it read from them."""
        return self._averaging.stats()

    def describe(self) -> str:
        """Returns one line for a log."""
        fragments = f" in {self.method.fragments} fragments" if self.method.fragments > 1 else ""
        tau = "measured" if self.tau is None else self.tau
        packed = "" if self._compression is None else f", displacements {self._compression.words()}"
        measured = f" ({self._measured})" if self._measured else ""
        return f"{self.method.name}: {self.replicas} replica(s){fragments}, tau {tau}{measured}{packed}"

    def _watch(self, module: nn.Module) -> None:
        """Makes modules with own parameters begin and end flights before forward and backward."""
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


def _root(square: Number) -> Number:
    return square.sqrt() if isinstance(square, Tensor) else math.sqrt(square)
