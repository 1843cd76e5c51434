"""Lists the GEMMs that a model computes, as its own layers report them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from pyruntime.comm import Group
from pyruntime.llama import Llama
from pyruntime.llama.config import LlamaConfig
from pyruntime.nn.linear import ParallelLinear

NAMES = {"qkv": "qkv", "out": "o_proj", "gate_up": "gate+up", "down": "down", "head": "head"}
"""Common names of the linears, by the attribute of the layer."""


@dataclass(frozen=True)
class RankLinear:
    """A parallel linear of this rank at a number of rows (tokens, over all ranks)."""

    name: str
    op: str
    """"all_gather_matmul" or "matmul_reduce_scatter"."""
    rows: int
    n: int
    """n and k of this rank's weight [n, k]."""
    k: int

    @property
    def gathers(self) -> bool:
        return self.op == "all_gather_matmul"


def linears_of(config: LlamaConfig, group: Group, rows: int) -> list[RankLinear]:
    """Returns the linears of a layer, and the head, in the order of use. Raises ValueError if `group` does
    not divide the model."""
    model = Llama(dataclasses.replace(config, num_hidden_layers=1), group, device="meta", seed=None)
    found = []
    for label, module in model.named_modules():
        if isinstance(module, ParallelLinear):
            forward = module.op_uses()[0]
            name = NAMES[label.rpartition(".")[2]]
            found.append(RankLinear(name, forward.op, rows, forward.n, forward.k))
    return found
