"""The kernels that one rank runs alone, on tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_void_p

import torch
from torch import Tensor

from pyruntime.cuda import library as abi
from pyruntime.cuda.library import Library

DTYPES = {torch.bfloat16: abi.BF16, torch.float16: abi.FP16, torch.float32: abi.FP32}
LAYOUTS = {"NT": abi.NT, "NN": abi.NN, "TN": abi.TN}


def dtype_code(tensor: Tensor) -> int:
    if tensor.dtype not in DTYPES:
        raise ValueError(
            f"a tensor has dtype {tensor.dtype}; the kernels take bfloat16, float16 and float32."
        )
    return DTYPES[tensor.dtype]


def address(tensor: Tensor | None) -> int | None:
    """Of the first element; None (a null pointer) for no tensor or an empty one."""
    return None if tensor is None or tensor.numel() == 0 else tensor.data_ptr()


def pitch(matrix: Tensor, name: str) -> int:
    """Elements from row to row. Raises ValueError where the elements of a row do not lie side by side."""
    if matrix.dim() != 2 or (matrix.size(1) > 1 and matrix.stride(1) != 1):
        raise ValueError(
            f"{name} has shape {list(matrix.shape)} and strides {list(matrix.stride())}; it must be a matrix "
            "whose rows are contiguous."
        )
    return matrix.stride(0) if matrix.size(0) > 1 else max(matrix.size(1), 1)


def stream_of(tensor: Tensor) -> int | None:
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else None


def product_sizes(layout: str, a: Tensor, b: Tensor) -> tuple[int, int, int]:
    """(m, n, k) of A B in a layout, m of A as it is given. Raises ValueError where they do not fit."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r}; use 'NT', 'NN' or 'TN'.")
    m, k = a.shape if layout != "TN" else a.shape[::-1]
    n, depth = b.shape if layout == "NT" else b.shape[::-1]
    if k != depth:
        raise ValueError(f"in layout {layout}, A {list(a.shape)} and B {list(b.shape)} do not share k.")
    return m, n, k


class Kernels:
    """matmul, reduce, adamw_ and lse_merge_. Raises as `Library` does."""

    def __init__(self, library: Library) -> None:
        self.library = library

    def check_device(self, tensor: Tensor) -> None:
        wanted = "cpu" if self.library.dialect == "host" else "cuda"
        if tensor.device.type != wanted:
            raise ValueError(
                f"a tensor lies on {tensor.device}, and the {self.library.dialect} kernels take {wanted}."
            )

    def request(
        self, layout: str, a: Tensor, b: Tensor, bias: Tensor | None, c: Tensor, m: int, tiles: int
    ) -> abi.Matmul:
        """A product as the launchers take it; m over all ranks, where a or c hold the rows of one."""
        for tensor in (a, b, c) if bias is None else (a, b, c, bias):
            self.check_device(tensor)
            if tensor.dtype != a.dtype:
                raise ValueError(f"a tensor has dtype {tensor.dtype} and another {a.dtype}; they must agree.")
        _, n, k = product_sizes(layout, a, b)
        if bias is not None and (list(bias.shape) != [n] or not bias.is_contiguous()):
            raise ValueError(f"bias has shape {list(bias.shape)}; it must be contiguous, [{n}].")
        return abi.Matmul(
            dtype=dtype_code(a),
            layout=LAYOUTS[layout],
            tiles=tiles,
            m=m,
            n=n,
            k=k,
            a=address(a),
            b=address(b),
            bias=address(bias),
            c=address(c),
            lda=pitch(a, "A"),
            ldb=pitch(b, "B"),
            ldc=pitch(c, "C"),
        )

    def matmul(self, a: Tensor, b: Tensor, layout: str = "NT", bias: Tensor | None = None) -> Tensor:
        """C [m, n] = A B (+ bias [n]), summed in fp32; a and b bf16 or fp16.

        NT: a [m, k], b [n, k]. NN: a [m, k], b [k, n]. TN: a [k, m], b [k, n].
        """
        m, n, _ = product_sizes(layout, a, b)
        c = a.new_empty(m, n)
        request = self.request(layout, a, b, bias, c, m, self.library.choose_tiles(m, m, n))
        self.library.call("matmul", byref(request), stream_of(a))
        return c

    def reduce(self, parts: Sequence[Tensor], bias: Tensor | None = None) -> Tensor:
        """round(parts[0] + parts[1] + ... [+ bias, along the last dimension]), in that order, in fp32."""
        if not parts:
            raise ValueError("there are no parts to sum.")
        first = parts[0]
        for part in parts:
            self.check_device(part)
            if part.shape != first.shape or part.dtype != first.dtype or not part.is_contiguous():
                raise ValueError("the parts must be contiguous and have one shape and one dtype.")
        width = first.size(-1) if first.dim() else 1
        if bias is not None and (list(bias.shape) != [width] or bias.dtype != first.dtype):
            raise ValueError(f"bias is {bias.dtype} {list(bias.shape)}; it must be {first.dtype} [{width}].")
        out = torch.empty_like(first)
        pointers = (c_void_p * len(parts))(*(part.data_ptr() for part in parts))
        self.library.call(
            "reduce",
            address(out),
            pointers,
            len(parts),
            first.numel(),
            dtype_code(first),
            address(bias),
            max(width, 1),
            stream_of(first),
        )
        return out

    def adamw_(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        masters: Sequence[Tensor],
        exp_avg: Sequence[Tensor],
        exp_avg_sq: Sequence[Tensor],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: Sequence[float],
        step: int,
        grad_scale: Tensor | None = None,
    ) -> None:
        """One AdamW step in place: the equations of csrc/cuda/portable/adamw.cu.

        params bf16 or fp16, of one dtype; grads of one dtype; masters and moments fp32. grad_scale: one fp32
        element on the device.
        """
        lists = {"grads": grads, "masters": masters, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        for name, tensors in [*lists.items(), ("weight_decay", weight_decay)]:
            if len(tensors) != len(params):
                raise ValueError(f"{len(params)} params came with {len(tensors)} {name}.")
        for i, param in enumerate(params):
            for name, tensors in [("params", params), *lists.items()]:
                tensor = tensors[i]
                wanted = {"params": params[0].dtype, "grads": grads[0].dtype}.get(name, torch.float32)
                self.check_device(tensor)
                if tensor.shape != param.shape or tensor.dtype != wanted or not tensor.is_contiguous():
                    raise ValueError(
                        f"{name}[{i}] is {tensor.dtype} {list(tensor.shape)}; it must be contiguous, "
                        f"{wanted} {list(param.shape)}."
                    )
        if grad_scale is not None and (grad_scale.dtype != torch.float32 or grad_scale.numel() != 1):
            raise ValueError("grad_scale must be one float32 element.")
        if not params:
            return
        entries = (abi.AdamwTensor * len(params))(
            *(
                abi.AdamwTensor(*map(address, tensors), tensors[0].numel(), decay)
                for *tensors, decay in zip(
                    params, masters, grads, exp_avg, exp_avg_sq, weight_decay, strict=True
                )
            )
        )
        options = abi.AdamwOptions(lr, *betas, eps, step)
        codes = dtype_code(params[0]), dtype_code(grads[0])
        self.library.call(
            "adamw",
            entries,
            len(params),
            *codes,
            byref(options),
            None,
            address(grad_scale),
            stream_of(params[0]),
        )

    def lse_merge_(self, out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
        """Attention over some keys (out, lse) becomes that over others (block_out, block_lse) too.

        out fp32 and block_out [B, S, heads, d]; lse and block_lse fp32 [B, heads, S], -inf where there were
        no keys.
        """
        batch, tokens, heads, width = out.shape
        statistics = [batch, heads, tokens]
        for tensor, shape, dtype in (
            (out, list(out.shape), torch.float32),
            (block_out, list(out.shape), block_out.dtype),
            (lse, statistics, torch.float32),
            (block_lse, statistics, torch.float32),
        ):
            self.check_device(tensor)
            if list(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
                raise ValueError(
                    f"lse_merge_: a tensor is {tensor.dtype} {list(tensor.shape)}; it must be contiguous, "
                    f"{dtype} {shape}."
                )
        pointers = [ctypes.c_void_p(address(tensor)) for tensor in (out, lse, block_out, block_lse)]
        self.library.call(
            "lse_merge", *pointers, batch, tokens, heads, width, dtype_code(block_out), stream_of(out)
        )
