"""Outer steps of a model that `shard` has sharded, and the parts of them that a checkpoint holds."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from pyruntime.comm import Group
from pyruntime.data_parallel import Compression, Sharded
from pyruntime.data_parallel.states import as_dtensor
from pyruntime.replicas.averaging import Sums
from pyruntime.replicas.methods import Method
from pyruntime.replicas.outer_optimizer import OuterOptimizer
from pyruntime.replicas.weights import Value


class ShardedWeights:
    """The rows that a rank's optimizer updates, or their master weights if there are any. So outer iterate
    and momentum are cut as the optimizer's states are."""

    def __init__(self, sharded: Sharded):
        assert sharded.optimizer is not None
        self._optimizer = sharded.optimizer
        self._values = [
            Value(
                state.part.key,
                state.master if state.has_master else state.rows,
                state.rows.dtype,
                self._optimizer.counts(state),
                state.rows if state.has_master else None,
            )
            for state in self._optimizer.current()
        ]

    def current(self) -> list[Value]:
        self._optimizer.current()
        return self._values

    def written(self) -> None:
        self._optimizer.written()


class ShardedOuter(OuterOptimizer):
    """An OuterOptimizer of `sharded`, which has an optimizer; its ranks share one replica.

    replicas: the ranks that hold the same rows, one of each replica; None if `sums` takes the sums. parts,
    sums, compression: see OuterOptimizer.
    """

    def __init__(
        self,
        sharded: Sharded,
        replicas: DeviceMesh | None,
        method: Method,
        parts: Sequence[Group],
        sums: Sums | None = None,
        compression: Compression | None = None,
    ):
        self._sharded = sharded
        weights = ShardedWeights(sharded)
        super().__init__(
            sharded.model, replicas, method, weights=weights, parts=parts, sums=sums, compression=compression
        )
        self.own_name = f"replica-{self._averaging.rank}"
        """Name, in a checkpoint, of what belongs only to this replica."""

    def states_of(self, local: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns what all replicas share of `local`, a `state_dict()`, as DTensors on its memory."""
        wrapped = {"progress": local["progress"]}
        for kind in ("base", "momentum", "sent"):
            wrapped |= self._wrapped({name: local[f"{kind}.{name}"] for name in self._names()}, f"{kind}.")
        return wrapped

    def weights(self) -> dict[str, Tensor]:
        """Returns the outer iterate, which all replicas share, as the model's weights, copied."""
        found = {
            name: tensor
            for fragment in self._fragments
            for name, tensor in fragment.tensors()["base"].items()
        }
        rows = {state.part.key: state.rows for state in self._states()}
        return self._wrapped({name: found[name].to(rows[name].dtype, copy=True) for name in found}, "")

    def _wrapped(self, tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
        return {
            prefix + state.part.key: as_dtensor(
                tensors[state.part.key], state.parameter, state.part, state.axes
            )
            for state in self._states()
        }

    def _names(self) -> list[str]:
        return [state.part.key for state in self._states()]

    def _states(self):
        assert self._sharded.optimizer is not None
        return self._sharded.optimizer.current()
