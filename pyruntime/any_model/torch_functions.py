"""Sorts torch's functions by what they do to a cut dimension, and reads dimensions in their arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

LINEAR = {"clone", "contiguous", "detach", "data", "to", "float", "double", "half", "bfloat16", "neg"}
LINEAR |= {"add", "radd", "iadd", "sub", "rsub", "isub", "expand", "expand_as", "chunk", "split", "narrow"}
SCALED = {"mul", "rmul", "imul", "div", "truediv", "true_divide", "itruediv"}
ELEMENTWISE = {
    *("abs", "relu", "gelu", "silu", "tanh", "sigmoid", "exp", "log", "sqrt", "rsqrt", "square", "pow"),
    *("reciprocal", "rtruediv", "softplus", "elu", "leaky_relu", "mish", "dropout", "clamp", "where"),
    *("masked_fill", "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not"),
    *("maximum", "minimum", "sin", "cos", "erf", "log1p", "expm1", "swiglu", "zeros_like", "ones_like"),
}
PACKED = {"chunk", "split", "narrow", "cat", "swiglu"}
VIEWS = {"view", "reshape", "view_as", "reshape_as", "flatten", "unflatten", "squeeze", "unsqueeze"}
SUMS, MAXIMA = {"sum"}, {"amax"}
WHOLE = {
    *("mean", "softmax", "log_softmax", "logsumexp", "norm", "vector_norm", "var", "std", "var_mean"),
    *("argmax", "argmin", "max", "min", "amin", "prod", "cumsum", "sort", "topk", "normalize", "median"),
}
"""Functions that need all elements along their dimension."""
NORMS = {"layer_norm", "rms_norm", "add_rms_norm"}
PRODUCTS = {"linear", "matmul", "mm", "bmm"}
TRANSPOSES = {"transpose", "swapaxes", "permute", "movedim", "t", "mT", "T"}


def name_of(func: Any) -> str:
    """Returns a function's name without underscores; of a property, that of the property."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    return name.strip("_")


def dims_of(name: str, x: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> set[int]:
    """Returns the dimensions over which a function takes a sum, a maximum or a norm."""
    if name == "layer_norm" or (name == "rms_norm" and isinstance(args[1], list | tuple | torch.Size)):
        shape = args[1] if len(args) > 1 else kwargs["normalized_shape"]
        return set(range(x.dim() - len(shape), x.dim()))
    if name in NORMS:
        return {x.dim() - 1}
    at = 2 if name in ("norm", "vector_norm", "topk", "normalize") else 1
    default = {"topk": -1, "sort": -1, "normalize": 1}.get(name)
    dims = kwargs.get("dim", args[at] if len(args) > at and not isinstance(args[at], bool) else default)
    if dims is None:
        return set(range(x.dim()))
    return {each % x.dim() for each in (dims if isinstance(dims, list | tuple) else [dims])}


def open_dim(name: str, x: Tensor, args: Sequence[Any]) -> int | None:
    """Returns the dimension of a view whose size was given as -1; None: no size was."""
    if name not in ("view", "reshape", "unflatten"):
        return None
    sizes = args[2] if name == "unflatten" else args[1:]
    sizes = sizes[0] if sizes and isinstance(sizes[0], list | tuple) else sizes
    first = args[1] % x.dim() if name == "unflatten" else 0
    return first + sizes.index(-1) if -1 in sizes else None
