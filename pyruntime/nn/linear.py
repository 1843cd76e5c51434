"""Linear layers whose weights are cut over a tensor-parallel group.

x is [M, K] and W [N, K], as in nn.Linear. Rank r of P holds rows x_r of x (sequence parallel) or all of x:

    column, W_r [N/P, K]
        sequence parallel   y_r [M, N/P] = gather(x) @ W_r^T            all_gather_matmul
        replicated x        y_r [M, N/P] = x @ W_r^T                    replicated_matmul
    row, W_r [N, K/P]
        sequence parallel   y_r [M/P, N] = scatter(sum_r x_r @ W_r^T)   matmul_reduce_scatter
        replicated y        y   [M, N]   = sum_r x_r @ W_r^T            matmul_all_reduce

A column layer followed by a row layer is a whole MLP or attention block with one communication at each end.
Features are cut as DTensor cuts them (parameters.py), or by `shares`, for ranks of unequal speed; rows as
torch.tensor_split does. P need divide neither.

With a group of two axes, x and y, the residual stream's features are cut over y, and W both ways (AxoNN,
arXiv 2305.13525, algorithm 1). Rank (r, s) of X x Y ranks holds features s of its x:

    column, W_rs [N/X, K/Y]    y_r [M, N/X]     = sum over s of gather_x(x_s) @ W_rs^T
    row, W_sr [N/Y, K/X]       y_s [M/X, N/Y]   = scatter_x(sum over r of x_r @ W_sr^T)

A column layer's result and a row layer's input are the same for every s. So a row layer's dX is summed over
y, and a column layer's dX over x, as without y. The primitives take both groups: while rows arrive over x,
the rows before them are multiplied, and sums of earlier rows travel over y."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from pyruntime.choices import WireFormat, check_value, values
from pyruntime.nn.cut import as_plain
from pyruntime.nn.gather import gather_features, split_features
from pyruntime.nn.module import LayerHook, ParallelModule
from pyruntime.nn.parameters import Group, Part, TensorGroup
from pyruntime.nn.tiers import OpUse, check_tier, refuse_slow_tier
from pyruntime.ops import primitives


def is_transposed(module: nn.Module) -> bool:
    """Whether the module is transformers' Conv1D (GPT-2), whose weight is [in_features, out_features]."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def features_of(linear: nn.Module) -> tuple[int, int]:
    """(in_features, out_features) of an nn.Linear or a Conv1D."""
    rows, columns = linear.weight.shape
    return (rows, columns) if is_transposed(linear) else (columns, rows)


class ParallelLinear(ParallelModule):
    """The base of column and row linears. out_features: those of the nn.Linear that it stands for, or {name:
    out_features} of several nn.Linears that read the same x.

    Options: sequence_parallel (True); dim (0): the dimension along which rows are cut under
    sequence_parallel; tier: "auto" (tuned, else chunked), "unfused", "chunked" or "fused"; wire ("same"):
    "bf16" or "fp8" rounds the gathered rows (x of a column linear, dy of a row linear), and all ranks compute
    with the rounded rows (docs/how-to/slow-network.md); strict (False): raise where a slower tier would run;
    transposed (False): store weights as [in_features, out_features], as transformers' Conv1D does; packed
    (()): sizes of the parts (q, k and v) that make up the out_features of a column linear, each cut by
    itself, so that a rank holds [part0_r | part1_r | ..]; shares (()): how many of the features that are cut
    each rank holds, for several linears by their names; dtype; device; hook (None): see ParallelModule.
    Raises ValueError for packed or shares over two axes, for shares that do not cut the features, and for a
    wire where no rows are gathered.

    Initialisation draws the full weights as nn.Linear does, and each rank keeps its shard: the model is the
    same for every tp, provided that all ranks have the same seed."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    out_features: Any  # int, or dict[str, int]

    def __init__(
        self,
        in_features: int,
        out_features: int | Mapping[str, int],
        bias: bool,
        *,
        cut: tuple[int, int | None],
        group: Group | TensorGroup | None,
        sequence_parallel: bool = True,
        dim: int = 0,
        tier: str = "auto",
        wire: WireFormat = "same",
        strict: bool = False,
        transposed: bool = False,
        packed: Sequence[int] = (),
        shares: Sequence[int] | Mapping[str, Sequence[int]] = (),
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        hook: LayerHook | None = None,
    ):
        super().__init__(group, hook)
        self.in_features = in_features
        if isinstance(out_features, Mapping):
            self.out_features = dict(out_features)
            parts = {f"{name}.": size for name, size in out_features.items()}
        else:
            self.out_features, parts = out_features, {"": out_features}
        if not parts:
            raise ValueError(
                "A merged column linear needs at least one part, such as {'q': 64, 'k': 64, 'v': 64}."
            )
        self.packed = tuple(packed) if self.group.size > 1 else ()
        self.transposed = transposed
        self.sequence_parallel = sequence_parallel
        self.dim = dim
        self.tier = check_tier(tier)
        self.wire = self._check_wire(wire)
        self.strict = strict
        self._accepted_rows: set[int] = set()
        self.last_cut_rows, self.last_features = sequence_parallel, 0
        self._alone = not self.group.name  # group=None: there is no process group to name
        # The group over which the residual stream's features are cut.
        self._sums = "" if self.group.y is None else self.group.y.name
        # Sizes of the parts of the out_features; each part is cut by itself.
        self.sizes = self.packed or tuple(parts.values())
        weight_cut, bias_cut = cut
        if self.packed and [sum(self.packed)] != list(parts.values()):
            raise ValueError(
                f"The parts {list(self.packed)} have {sum(self.packed)} features together, but the linear "
                f"has out_features={list(parts.values())}; name all of its parts, in order."
            )
        if self.packed and self.group.y is not None:
            raise ValueError(
                f"A linear of the parts {list(self.packed)} is cut part by part, which works over one axis "
                "only; use a mesh of one dimension."
            )
        self.shares = self._shares_of(parts, shares)
        weight_cut = 1 - weight_cut if transposed else weight_cut
        weights = [
            Part(
                f"{prefix}weight",
                (in_features, n) if transposed else (n, in_features),
                self.packed,
                self.shares[prefix],
            )
            for prefix, n in parts.items()
        ]
        self.add_parameter("weight", weight_cut, weights, dtype, device, dim_y=1 - weight_cut)
        if bias:
            cut_as_weights = {} if bias_cut is None else self.shares
            biases = [
                Part(f"{prefix}bias", (size,), self.packed, cut_as_weights.get(prefix, ()))
                for prefix, size in parts.items()
            ]
            bias_cut_y = 0 if bias_cut is None else None
            self.add_parameter("bias", bias_cut, biases, dtype, device, dim_y=bias_cut_y)
        else:
            self.register_parameter("bias", None)
        self._width = self.matrix.size(1)  # this rank's in_features
        self.reset_parameters()

    @classmethod
    def from_linear(cls, linear: nn.Linear, group: Group | TensorGroup | None, **options) -> Self:
        """Builds the parallel form of `linear`, an nn.Linear or transformers' Conv1D that every rank holds
        whole. options: as in the constructor."""
        return cls._of_whole(features_of(linear)[1], {"": linear}, group, options)

    @classmethod
    def _of_whole(cls, out_features, parts: Mapping[str, nn.Linear], group, options: dict) -> Self:
        """Takes linears that every rank holds whole. They differ only in their out_features."""
        first = next(iter(parts.values()))
        options = {"dtype": first.weight.dtype, **options, "group": group, "device": "meta"}
        options["transposed"] = is_transposed(first)
        return cls(features_of(first)[0], out_features, first.bias is not None, **options)._take(parts)

    def _shares_of(
        self, parts: Mapping[str, int], shares: Sequence[int] | Mapping[str, Sequence[int]]
    ) -> dict[str, tuple[int, ...]]:
        """Returns the shares of each part, by the prefix of its keys; () without any."""
        if isinstance(shares, Mapping):
            given = {f"{name}.": each for name, each in shares.items()}
        else:
            given = {"": shares} if shares else {}
        if unknown := given.keys() - parts.keys():
            raise ValueError(
                f"shares name the parts {sorted(unknown)}, and the linear has {list(parts)}; name those."
            )
        found = {prefix: tuple(given.get(prefix, ())) for prefix in parts}
        if any(found.values()) and (self.packed or self.group.y is not None):
            raise ValueError(
                "A linear that is cut part by part, or over two axes, is cut equally; leave out its shares."
            )
        return found

    def _check_wire(self, wire: WireFormat) -> WireFormat:
        check_value("wire", wire, values(WireFormat))
        if wire == "same":
            return wire
        asked = f'wire="{wire}" was asked for, and'
        if self.group.size == 1:
            raise ValueError(f"{asked} one rank alone gathers nothing; leave it out.")
        if not self.sequence_parallel:
            raise ValueError(f"{asked} without sequence_parallel no rows are gathered; leave it out.")
        return wire

    @property
    def matrix(self) -> Tensor:
        """This rank's weight as [out_features, in_features], also where it is stored transposed."""
        if not self.transposed:
            return self.weight
        with as_plain():
            return self.weight.t()

    def reset_parameters(self) -> None:
        if self.weight.is_meta:
            return
        like = {"dtype": self.weight.dtype, "device": self.weight.device}
        bound = 1 / math.sqrt(self.in_features)
        of_linears = zip(*(layout.parts for layout in self._layouts.values()), strict=True)
        every = (part for parts in of_linears for part in parts)  # weight, bias, weight, bias, ...
        self.load_full({p.key: torch.empty(p.shape, **like).uniform_(-bound, bound) for p in every})

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns x, weight and bias, cast to autocast's dtype where torch.autocast is on."""
        weight, bias = self.matrix, self.bias
        device = x.device.type
        if not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
            return x, weight, bias
        dtype = torch.get_autocast_dtype(device)
        return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)

    def op_uses(self) -> list[OpUse]:
        """The primitives that one forward and one backward of this layer run."""
        # Abstract: nn.Module and abc.ABC do not mix.
        raise NotImplementedError(f"{type(self).__name__} does not define op_uses().")

    def note(self, rows: int, cut_rows: bool, features: int = 0) -> None:
        """Records a call for explain(). Under strict, raises for a slower tier than requested (checked once
        per shape). features: the out_features of the op, those of other layers too; 0: only this layer's."""
        if is_compiling():
            return
        self.__dict__.update(last_rows=rows, last_cut_rows=cut_rows, last_features=features, last_loss="")
        if self.strict and rows not in self._accepted_rows and refuse_slow_tier(self):
            self._accepted_rows.add(rows)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, group=({self.group}), "
            f"sequence_parallel={self.sequence_parallel}, dim={self.dim}, "
            f"tier={self.tier!r}, wire={self.wire!r}"
        )


class ColumnParallelLinear(ParallelLinear):
    """y_r = x @ W_r^T + b_r: an nn.Linear whose out_features are cut over the group.

    Input: x_r [..., rows_r, ..., K], cut along `dim` (sequence_parallel), or x [..., K]. Result: [..., N/P]
    with all rows; [..., N] with gather_output. State dict: "weight" and "bias", DTensors with Shard(0).

    Options as in ParallelLinear, and keep_gathered: keep the gathered x [rows, K] for the backward instead of
    gathering it again; None: keep it where the group spans hosts. A call takes `rows` too: the number of rows
    of all ranks along `dim`, which saves an exchange of counts; ignored without sequence_parallel. Raises
    ValueError where the group leaves a rank without features, and for an input that is not K wide."""

    def __init__(
        self,
        in_features: int,
        out_features: int | Mapping[str, int],
        bias: bool = False,
        *,
        group: Group | TensorGroup | None,
        gather_output: bool = False,
        keep_gathered: bool | None = None,
        **options,
    ):
        super().__init__(in_features, out_features, bias, cut=(0, 0), group=group, **options)
        self.gather_output, self.keep_gathered = gather_output, keep_gathered
        self.last_loss: Literal["", "whole", "by chunks"] = ""

    def compute(self, x: Tensor, rows: int | None = None) -> Tensor:
        self.check_width(x, self._width)
        (y,) = self.multiply(x, rows)
        self.note(y.numel() // y.size(-1), self.sequence_parallel)
        if not self.gather_output:
            return y
        return gather_features(y, self.group, *self.sizes, shares=self.shares.get("", ()))

    def check_width(self, x: Tensor, width: int) -> None:
        """Raises ValueError unless x has `width` features."""
        if x.size(-1) != width:
            of = "" if width == self.in_features else f"{width} of "
            raise ValueError(
                f"{self.label or type(self).__name__} takes {of}in_features={self.in_features}, but its "
                f"input is {list(x.shape)}; a column-parallel linear needs every feature of x (only rows may "
                "be cut), or this rank's over y where its group has that axis."
            )

    def multiply(
        self,
        x: Tensor,
        rows: int | None = None,
        *,
        others: Sequence[ColumnParallelLinear] = (),
        cut_rows: bool = False,
    ) -> list[Tensor]:
        """Returns x @ W_i^T + b_i of this linear and of `others`, computed by one op. x may be whole over the
        group's second axis. cut_rows: x holds only this rank's rows, even without sequence_parallel."""
        core, group = torch.ops.pyruntime, self.group.name
        x, weight, bias = self.operands(x)
        if self._alone:
            return [primitives.linear(x, weight, bias)]
        if x.size(-1) != self._width and self.group.y is not None:
            x = split_features(x, self.group.y, self.in_features)
        theirs = [each.operands(x)[1:] for each in others]
        weights, biases = map(list, zip((weight, bias), *theirs, strict=True))
        if not (cut_rows or self.sequence_parallel):
            return core.replicated_matmul(x, weights, biases, group, self.tier, self._sums)
        return core.all_gather_matmul(
            x,
            weights,
            biases,
            group,
            self.dim,
            primitives.ROWS_UNKNOWN if rows is None else rows,
            False,  # do not return the gathered x
            self.keep_gathered,
            self.tier,
            self._sums,
            self.wire,
        )

    def op_uses(self) -> list[OpUse]:
        n, k = self.matrix.shape
        n, cut_rows = self.last_features or n, self.last_cut_rows
        op = "all_gather_matmul" if cut_rows else "replicated_matmul"
        uses = [OpUse("forward", op, n, k, travels=cut_rows), OpUse("backward", f"{op}_backward", n, k)]
        if self.group.y is not None:
            uses.append(OpUse("forward", "matmul_all_reduce", n, k, group=self.group.y))
        if self.last_loss:
            why = "three numbers for each row travel; by chunks of rows, while the next ones are multiplied"
            uses.append(OpUse("forward", "cross_entropy", n, k, collective=why))
        return uses

    def note_loss(self, form: Literal["whole", "by chunks"]) -> None:
        """Records for explain() that the last call's logits went into a cross-entropy: all of them at once,
        or some rows at a time, whose gathered x is kept."""
        self.__dict__["last_loss"] = form

    @property
    def vocab_start(self) -> int:
        """The first output feature of this rank: the `vocab_start` of vocab_parallel_cross_entropy."""
        layout = self._layouts["weight"]
        return layout.ranges(layout.parts[0])[int(self.transposed)][0][0]


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several column-parallel linears that read the same x, as one gather and one GEMM.

    MergedColumnParallelLinear(K, {"q": N_q, "k": N_k, "v": N_v}, group=g) holds one local weight [sum_i
    N_i/P, K]. Result: [..., sum_i N_i/P]; its last dimension is [part0_r | part1_r | ...] with the widths
    `local_features`. State dict: one DTensor per part, "q.weight", "k.weight", ... Otherwise as
    ColumnParallelLinear."""

    @property
    def local_features(self) -> dict[str, int]:
        """The width of each part of a result on this rank."""
        layout = self._layouts["weight"]
        widths = (layout.local_shape_of(part)[0] for part in layout.parts)
        return dict(zip(self.out_features, widths, strict=True))

    @classmethod
    def from_linears(
        cls, linears: Mapping[str, nn.Linear], group: Group | TensorGroup | None, **options
    ) -> Self:
        """Builds one layer from `linears`, {part name: nn.Linear}, which every rank holds whole."""
        first = next(iter(linears.values()))
        for name, linear in linears.items():
            if linear.in_features != first.in_features or (linear.bias is None) != (first.bias is None):
                raise ValueError(
                    f"Linears merged into one must agree on in_features and bias: {name!r} has "
                    f"in_features={linear.in_features}, bias={linear.bias is not None}, the first has "
                    f"{first.in_features} and {first.bias is not None}."
                )
        sizes = {name: linear.out_features for name, linear in linears.items()}
        parts = {f"{name}.": linear for name, linear in linears.items()}
        return cls._of_whole(sizes, parts, group, options)


class RowParallelLinear(ParallelLinear):
    """y = sum_r x_r @ W_r^T + b: an nn.Linear whose in_features are cut over the group.

    Input: x_r [..., K/P], this rank's features of all rows, as a column-parallel linear gives them. Result:
    this rank's rows [..., rows_r, ..., N], cut along `dim` (sequence_parallel), or all rows. State dict:
    "weight", DTensor with Shard(1), and "bias", replicated.

    With split_input the input is x [..., K], whole on every rank, and each rank takes its own features.

    Options as in ParallelLinear. Raises ValueError where the group leaves a rank without features, and for an
    input that is not K/P (split_input: K) wide."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        group: Group | TensorGroup | None,
        split_input: bool = False,
        **options,
    ):
        super().__init__(in_features, out_features, bias, cut=(1, None), group=group, **options)
        self.split_input = split_input

    def compute(self, x: Tensor) -> Tensor:
        if self.split_input:
            x = self.own_features(x)
        self.check_width(x)
        return self.multiply(x)

    def own_features(self, x: Tensor) -> Tensor:
        """Takes this rank's features of x [..., K], which is whole on every rank."""
        if x.size(-1) != self.in_features:
            raise ValueError(
                f"{self.label or type(self).__name__} takes in_features={self.in_features}, but its "
                f"input is {list(x.shape)}; with split_input it needs every feature of x."
            )
        return split_features(x, self.group, self.in_features, self.shares[""])

    def check_width(self, x: Tensor) -> None:
        """Raises ValueError unless x has as many features as this rank holds."""
        if x.size(-1) != self._width:
            raise ValueError(
                f"{self.label or type(self).__name__} holds {self._width} of "
                f"in_features={self.in_features} on rank {self.group.rank} of {self.group.size}, but its "
                f"input is {list(x.shape)}; a row-parallel linear takes the output of a column-parallel one "
                "that is not gathered."
            )

    def multiply(self, x: Tensor, *, cut_rows: bool = False) -> Tensor:
        """Returns y for x [..., K/P]; with cut_rows this rank's rows of y, even without sequence_parallel."""
        cut_rows = cut_rows or self.sequence_parallel
        x, weight, bias = self.operands(x)
        core, group, tier, sums = torch.ops.pyruntime, self.group.name, self.tier, self._sums
        if self._alone:
            y = primitives.linear(x, weight, bias)
        elif cut_rows:
            y = core.matmul_reduce_scatter(x, weight, bias, group, self.dim, tier, sums, self.wire)
        else:
            y = core.matmul_all_reduce(x, weight, bias, group, tier, sums)
        self.note(x.numel() // x.size(-1), cut_rows)
        return y

    def op_uses(self) -> list[OpUse]:
        (n, k), cut_rows = self.matrix.shape, self.last_cut_rows
        op = "matmul_reduce_scatter" if cut_rows else "matmul_all_reduce"
        uses = [OpUse("forward", op, n, k), OpUse("backward", f"{op}_backward", n, k, travels=cut_rows)]
        if self.group.y is not None:
            uses.append(OpUse("backward", "replicated_matmul_backward", n, k, group=self.group.y))
        return uses
