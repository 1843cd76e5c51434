"""A tensor class that gathers its elements only when something reads them.

A head's whole logits [T, V] are the largest activation of a model, and in training nothing reads them: the
loss takes each rank's own (causal_loss.py). So such a head gives a tensor of the full shape without elements.
The first operator that reads it gathers them, and every rank must reach that operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class GatheredWhenRead(Tensor):
    """A contiguous tensor of `shape` with the dtype and device of `like`; `gather()` gives its elements."""

    _gather: Callable[[], Tensor]
    _whole: Tensor | None

    @staticmethod
    def __new__(cls, shape: Sequence[int], like: Tensor, gather: Callable[[], Tensor]) -> GatheredWhenRead:
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
        made._gather, made._whole = gather, None
        return made

    def whole(self) -> Tensor:
        """Returns the elements, without a graph. The first call gathers them, so all ranks of the group must
        call this, or none."""
        if self._whole is None:
            with torch.no_grad():
                self._whole = self._gather().contiguous()  # as this tensor's strides tell callers
        return self._whole

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(
        cls, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map_only(cls, cls.whole, (args, kwargs or {}))
        return op(*args, **kwargs)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if function in _OF_MEMORY:  # these do not reach __torch_dispatch__
                args = tuple(each.detach() if isinstance(each, cls) else each for each in args)
            return function(*args, **(kwargs or {}))


_OF_MEMORY = frozenset(
    {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.data_ptr, Tensor.untyped_storage, Tensor.__repr__}
)
