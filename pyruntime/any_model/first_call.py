"""Compares the first call of a model that parallelize() has cut with the whole model; raises if they differ.

The code between a column and a row linear is the model's own. Only running it tells whether it works on a
rank's features as it does on all of them: a view with the whole number of heads, or a chunk of a fused
linear, runs without an error and computes something else. So the first forward in training, and the first in
evaluation, runs twice more without gradients: with whole weights, gathered layer by layer, and with this
rank's shards. In both runs every row linear returns the output of the whole weights. So the inputs of each
region (the code between column and row linears) are bitwise the same, and its result, the row linear's input,
is compared by random projections. The inputs of linears that read whole activations ("column_gather",
"row_split") are compared too. Dropout is off; buffers, random states and arguments are restored.

Under a plan that gives way ("auto"), linears around a mismatch become "column_gather" and "row_split" in all
layers of their kind, and the comparison is repeated."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyruntime import ops
from pyruntime.any_model import head_counts
from pyruntime.any_model.activations.row_form import RowForm
from pyruntime.any_model.activations.shared_input import SeenInputs
from pyruntime.any_model.comparing import (
    TOLERANCES,
    check_same_arguments,
    copied,
    first_difference,
    forwards,
    untouched,
)
from pyruntime.any_model.head_counts import Mismatch
from pyruntime.any_model.layer_hooks import LinearHook
from pyruntime.comm import CommError
from pyruntime.nn.cut import memory_of
from pyruntime.nn.gather import gather_whole
from pyruntime.nn.linear import ColumnParallelLinear, ParallelLinear, RowParallelLinear
from pyruntime.nn.parameters import shard_bounds
from pyruntime.text import block_name

_DIRECTIONS = 8  # the number of random projections of an input


class FirstCall:
    """A forward pre-hook for a module that holds parallel layers of parallelize(). form: the RowForm that the
    first call decides on; None unless the module is the one that parallelize() was given."""

    def __init__(self, form: RowForm | None = None) -> None:
        self.form = form
        self.seen: set[bool] = set()

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if module.training not in self.seen:
            _first_call(self, module, args, kwargs)


@dataclasses.dataclass(eq=False)
class _Call:
    """One call of a parallel linear during the check."""

    layer: ParallelLinear
    shape: tuple[int, ...] = ()
    projected: Tensor = dataclasses.field(default_factory=lambda: torch.empty(0))  # its input
    tolerance: float = 0.0
    output: Tensor = dataclasses.field(default_factory=lambda: torch.empty(0))  # of the whole weights


def _check_first_call(hook: FirstCall, module: nn.Module, args: tuple, kwargs: dict) -> None:
    watched = _watched(module)
    mode = module.training
    if any(each.in_check for _, each in watched):
        hook.seen.add(mode)  # an outer module's comparison covers it, and its arguments may not be copyable
        return
    if not all(mode in each.checked for _, each in watched):
        for _, each in watched:
            each.in_check = True
        try:
            called = _check(module, [layer for layer, _ in watched], args, kwargs, hook.form)
        except BaseException:
            _forget(module, mode)
            raise
        finally:
            for _, each in watched:
                each.in_check = False
        for layer, each in watched:
            if layer in called:  # the others are compared when a module that holds them is called
                each.checked.add(mode)
    hook.seen.add(mode)


def _forget(module: nn.Module, mode: bool) -> None:
    """Resets the hooks of modules that ran inside a failed check: they have not been compared."""
    for holder in module.modules():
        for hook in holder._forward_pre_hooks.values():
            if isinstance(hook, FirstCall):
                hook.seen.discard(mode)


_first_call = torch.compiler.disable(
    _check_first_call,
    reason="the first call of a parallel model is compared with that of the whole one: run one forward pass "
    "before torch.compile, or compile without fullgraph=True",
)


def _watched(module: nn.Module) -> list[tuple[ParallelLinear, LinearHook]]:
    """Returns the linears inside `module` that parallelize() made, each with its hook."""
    linears = [m for m in module.modules() if isinstance(m, ParallelLinear)]
    return [(linear, linear.hook) for linear in linears if isinstance(linear.hook, LinearHook)]


def _hook_of(layer: ParallelLinear) -> LinearHook:
    assert isinstance(layer.hook, LinearHook)  # true of all linears from `_watched`
    return layer.hook


def _check(
    module: nn.Module, layers: list[ParallelLinear], args: tuple, kwargs: dict, form: RowForm | None
) -> set:
    """Returns the layers that were called. Raises ValueError on every rank where the ranks were given
    different arguments, or one of them finds a mismatch that cannot be repaired."""
    check_same_arguments(layers[0].group, layers[0].weight.device, args, kwargs)
    called: set[ParallelLinear] = set()

    def run(forward_of: Callable[[ParallelLinear], Callable]) -> Any:
        with untouched(module) as mode, forwards(layers, forward_of):
            result = module(*copied(args), **copied(kwargs))
        if mode.has_drawn and module.training:
            for layer in layers:
                _hook_of(layer).model.streams.draws = True
        return result

    inputs = SeenInputs()

    def run_whole() -> tuple[Any, list[_Call]]:
        nonlocal inputs
        calls: list[_Call] = []
        inputs = SeenInputs()
        with head_counts.whole(module):
            return run(lambda layer: _whole_forward(layer, calls, inputs)), calls

    expected, whole = run_whole()

    def compare() -> Mismatch | None:
        cut = _CutRun(whole)
        try:
            found = run(cut.forward_of)
        except (CommError, torch.OutOfMemoryError):  # not caused by the plan
            raise
        except _OutOfStep:
            return cut.mismatch() or cut.out_of_step()
        except Exception as error:
            return cut.mismatch() or cut.failed(module, error)
        called.update(call.layer for call in cut.calls)
        return cut.mismatch() or cut.out_of_step() or _compare_outputs(cut, expected, found)

    def give_way(mismatch: Mismatch) -> list[ParallelLinear]:
        nonlocal expected, whole
        if changed := _make_whole(layers, mismatch):
            expected, whole = run_whole()  # its notes depend on which linears read whole activations
        return changed

    def agreed() -> Mismatch | None:
        return _agreed(compare(), layers)

    if found := head_counts.settled(module, agreed, layers[0].group.size, give_way):
        raise ValueError(found.message)
    inputs.connect()
    trains = (module.training or torch.is_grad_enabled()) and not torch.is_inference_mode_enabled()
    if form is not None and not form.said and trains:

        def run_on_rows() -> Any:
            with untouched(module), torch.enable_grad():
                return module(*copied(args), **copied(kwargs))

        form.decide(module, run_on_rows, expected)
    return called


def _make_whole(layers: list[ParallelLinear], mismatch: Mismatch) -> list[ParallelLinear]:
    """Makes the linears around the mismatch, and their counterparts in other blocks, give and take whole
    activations, where the plan allows it. Returns the changed linears. If some columns there are narrower
    than others (keys of a head that all queries read), only those change."""
    around = [layer for layer in mismatch.layers if isinstance(layer, ParallelLinear) and _is_cut(layer)]
    widths = {layer: layer.out_features for layer in around if isinstance(layer, ColumnParallelLinear)}
    narrow = [layer for layer, width in widths.items() if width < max(widths.values())]
    kinds = {block_name(layer.label) for layer in narrow or around}
    changed = []
    for layer in layers:
        hook = _hook_of(layer)
        if hook.model.gives_way and not hook.whole and block_name(layer.label) in kinds:
            hook.whole, hook.gave_way = True, mismatch.fact
            changed.append(layer)
    return changed


def _is_cut(layer: ParallelLinear) -> bool:
    """Whether the layer gives (column) or takes (row) only a rank's features."""
    return not _hook_of(layer).whole


def _agreed(mismatch: Mismatch | None, layers: list[ParallelLinear]) -> Mismatch | None:
    """Returns the mismatch of the lowest rank that has one, so that all ranks act alike."""
    numbers = [layers.index(layer) for layer in mismatch.layers] if mismatch else []
    mine = torch.zeros(2 + len(layers), dtype=torch.float64)
    if mismatch is not None:
        mine[0], mine[1] = 1, mismatch.position
    mine[[2 + i for i in numbers]] = 1
    device = layers[0].weight.device
    everyone = ops.all_gather_stats(mine.to(device), layers[0].group.name).cpu()
    failed = everyone[:, 0].nonzero().flatten().tolist()
    if not failed:
        return None
    first = everyone[failed[0]]
    there = tuple(layers[i] for i in first[2:].nonzero().flatten().tolist())
    if mismatch is None:
        fact = f"Rank {failed[0]} computes other numbers around {_names(there)} than the whole model does"
        mismatch = Mismatch(fact, "its own error says what to do", there)
    return dataclasses.replace(mismatch, layers=there, position=int(first[1]))


def _whole_forward(layer: ParallelLinear, calls: list[_Call], inputs: SeenInputs) -> Callable:
    """Makes a forward of the layer with its whole weight. It notes the input of column linears, and the input
    and output of linears behind which activations are whole."""

    def forward(x: Tensor, rows: int | None = None) -> Tensor:
        if isinstance(layer, ColumnParallelLinear):
            inputs.note(layer, x)
        weight = _whole(layer, "weight")
        assert weight is not None
        y = F.linear(x, weight.t() if layer.transposed else weight, _whole(layer, "bias"))
        if isinstance(layer, RowParallelLinear) or not _is_cut(layer):
            calls.append(_noted(layer, _given(layer, x)))
            calls[-1].output = y.clone()  # the model may write into y
        return y

    return forward


def _given(layer: ParallelLinear, x: Tensor) -> Tensor:
    """Takes from whole x the input that the layer gets when the model is cut."""
    if not (isinstance(layer, RowParallelLinear) and _is_cut(layer)):
        return x
    start, stop = shard_bounds(layer.in_features, layer.group.size, layer.group.rank)
    return x[..., start:stop]


class _OutOfStep(Exception):
    """Raised where the cut run calls other layers than the whole run."""


class _CutRun:
    """A run of column linears on this rank's shards. Where activations become whole again, linears return
    their outputs of the `whole` run."""

    def __init__(self, whole: list[_Call]) -> None:
        self.whole = whole
        self.calls: list[_Call] = []  # all linears, in order
        self.noted: list[_Call] = []  # those that are in `whole`
        self.stray: ParallelLinear | None = None  # called where the whole run calls another or none

    @property
    def position(self) -> int:
        return len(self.noted)

    def forward_of(self, layer: ParallelLinear) -> Callable:
        def forward(x: Tensor, rows: int | None = None) -> Tensor:
            if isinstance(layer, RowParallelLinear) or not _is_cut(layer):
                return self._whole_output(layer, x)
            self.calls.append(_Call(layer))
            return F.linear(x, _own_columns(layer), layer.bias)

        return forward

    def _whole_output(self, layer: ParallelLinear, x: Tensor) -> Tensor:
        number = len(self.noted)
        if number >= len(self.whole) or self.whole[number].layer is not layer:
            self.stray = layer
            raise _OutOfStep
        self.calls.append(_noted(layer, x))
        self.noted.append(self.calls[-1])
        return self.whole[number].output.clone()

    def open_columns(self) -> list[ParallelLinear]:
        """The cut column linears that were called after the last row linear."""
        return _last_columns(self.calls)

    def mismatch(self) -> Mismatch | None:
        """Describes the first input that differs from the whole run's."""
        for position, (mine, whole) in enumerate(zip(self.noted, self.whole, strict=False)):
            if difference := _difference(mine, whole):
                feeding = _last_columns(self.calls[: self.calls.index(mine)])
                return _wrong_input(mine.layer, feeding, difference, position)
        return None

    def out_of_step(self) -> Mismatch | None:
        """Describes the first linear that is called in only one of the two runs."""
        layer = self.stray
        if layer is None and len(self.noted) < len(self.whole):
            layer = self.whole[len(self.noted)].layer
        if layer is None:
            return None
        return Mismatch(
            f"{layer.label} is called in another place with the plan than without it: the model's control "
            "flow depends on activations that are cut",
            "leave it and the column linears before it out of the plan",
            (*self.open_columns(), layer),
            self.position,
        )

    def failed(self, module: nn.Module, error: Exception) -> Mismatch:
        """Describes an error that the model's own code raised on cut activations."""
        open_columns = self.open_columns()
        names = _names(open_columns) or "its parallel layers"
        place = _place_of(error, module)
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        return Mismatch(
            f"{place} cannot work on a rank's features of {names} ({type(error).__name__}: {first_line}): "
            "it needs all features, or counts heads or features of the whole model",
            "leave those linears out of the plan, or make them 'column_gather'",
            tuple(open_columns) or tuple({call.layer: None for call in self.calls}),
            self.position,
        )


def _wrong_input(
    layer: ParallelLinear, feeding: list[ParallelLinear], difference: str, position: int
) -> Mismatch:
    if not _is_cut(layer):
        return Mismatch(
            f"With the plan, {layer.label}, which reads whole activations, is given {difference}, made from "
            f"a rank's features of {_names(feeding) or 'other layers'}",
            "make them 'column_gather', or leave them out of the plan",
            tuple(feeding) or (layer,),
            position,
        )
    if not feeding:
        return Mismatch(
            f"{layer.label} is a 'row' linear and is given {difference}: no 'column' linear's output reaches "
            "it",
            "name the linears that feed it in the plan, make it 'row_split', or leave it out",
            (layer,),
            position,
        )
    return Mismatch(
        f"With the plan, {layer.label} is given {difference}: the code between {_names(feeding)} and it does "
        "not work feature by feature or head by head (a view with the whole number of heads? a fused linear "
        "that is split afterwards?)",
        "leave them out of the plan",
        (*feeding, layer),
        position,
    )


def _last_columns(calls: list[_Call]) -> list[ParallelLinear]:
    """Returns the cut column linears that were called after the last cut row linear."""
    found: dict[ParallelLinear, None] = {}
    for call in calls:
        if not _is_cut(call.layer):
            continue
        if isinstance(call.layer, RowParallelLinear):
            found = {}
        else:
            found[call.layer] = None
    return list(found)


def _noted(layer: ParallelLinear, x: Tensor) -> _Call:
    dtype = torch.bfloat16 if torch.is_autocast_enabled(x.device.type) else x.dtype
    wide = x.double() if x.dtype == torch.float64 else x.float()
    draw = torch.Generator().manual_seed(x.shape[-1])
    directions = torch.randn(x.shape[-1], _DIRECTIONS, generator=draw, dtype=wide.dtype, device="cpu").to(
        x.device
    )
    return _Call(
        layer, tuple(x.shape), torch.nan_to_num(wide, 0.0, 0.0, 0.0) @ directions, TOLERANCES.get(dtype, 1e-3)
    )


def _difference(mine: _Call, whole: _Call) -> str:
    """Says what is wrong with the input; "" where it is right."""
    if mine.shape != whole.shape:
        return f"an input of shape {list(mine.shape)} instead of {list(whole.shape)}"
    error, norm = (mine.projected - whole.projected).norm().item(), whole.projected.norm().item()
    if error <= whole.tolerance * norm:
        return ""
    return f"other numbers than the whole model's ({error / max(norm, 1e-30):.0%} off)"


def _compare_outputs(cut: _CutRun, expected: Any, found: Any) -> Mismatch | None:
    """Compares the tensors at the top level of the output. Deeper ones may differ: caches hold only a rank's
    heads."""
    if (difference := first_difference(expected, found)) is None:
        return None
    name, whole, mine = difference
    what = "is missing" if mine is None else f"has shape {list(mine.shape)}"
    if mine is not None and mine.shape == whole.shape:
        what = "holds other numbers"
    columns = cut.open_columns()
    cause = "the model reads cut weights itself"
    if names := _names(columns):
        cause = f"code that reads {names} gets only a rank's features"
    return Mismatch(
        f"With the plan, the model's output{name} {what}, without it the shape is {list(whole.shape)}: "
        f"{cause}",
        "a column linear without a row linear behind it must be 'column_gather'",
        tuple(columns),
        cut.position,
    )


def _names(layers: Iterable[ParallelLinear]) -> str:
    return ", ".join(layer.label for layer in layers)


def _place_of(error: Exception, module: nn.Module) -> str:
    """Returns the name of the innermost module whose code raised the error."""
    names = {id(m): name for name, m in module.named_modules()}
    place, trace = type(module).__name__, error.__traceback__
    while trace is not None:
        place = names.get(id(trace.tb_frame.f_locals.get("self")), place) or place
        trace = trace.tb_next
    return place


def _own_columns(layer: ParallelLinear) -> Tensor:
    """Returns this rank's weight as [out_features, in_features]. in_features that y cuts are gathered."""
    if layer.group.y is None:
        return layer.matrix
    layout = layer._layouts["weight"]
    weight = gather_whole(memory_of(layer.weight), layout.cuts_of(layout.parts[0])[1:])
    return weight.t() if layer.transposed else weight


def _whole(layer: ParallelLinear, name: str) -> Tensor | None:
    parameter = getattr(layer, name)
    if parameter is None:
        return None
    layout = layer._layouts[name]
    return gather_whole(memory_of(parameter), layout.cuts_of(layout.parts[0]))
