"""What the tests of parallel layers share: cutting full tensors, and comparing with references in double
precision."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyruntime.nn import shard_bounds


def my_rows(full: Tensor, group: dist.ProcessGroup, dim: int = 0) -> Tensor:
    """This rank's rows of a full activation, cut as torch.tensor_split cuts."""
    return full.tensor_split(dist.get_world_size(group), dim)[dist.get_rank(group)].clone()


def my_features(full: Tensor, group: dist.ProcessGroup, dim: int = -1) -> Tensor:
    """This rank's features of a full activation or parameter, cut as DTensor's Shard cuts."""
    start, stop = shard_bounds(full.shape[dim], dist.get_world_size(group), dist.get_rank(group))
    return full.narrow(dim, start, stop - start).clone()


def assert_near(found: Tensor, reference: Tensor, what: str, tolerance: float = 1e-5) -> None:
    """Same shape, and no element further from the reference than `tolerance` of the reference's largest (or
    of 1)."""
    assert found.shape == reference.shape, f"{what}: shape {list(found.shape)}, not {list(reference.shape)}"
    if found.numel() == 0:
        return
    error = (found.double() - reference.double()).abs().max().item()
    limit = tolerance * max(1.0, reference.abs().max().item())
    assert error <= limit, f"{what}: off by {error:.3g}, more than {limit:.3g}"


def seeded_linear(in_features: int, out_features: int, bias: bool, seed: int = 0) -> nn.Linear:
    """The same nn.Linear on every rank."""
    torch.manual_seed(seed)
    return nn.Linear(in_features, out_features, bias)


def in_double(module: nn.Module) -> nn.Module:
    """A copy in double precision with the same values."""
    import copy

    return copy.deepcopy(module).double()


def same_on_all_ranks(tensor: Tensor, group: dist.ProcessGroup) -> bool:
    """Bitwise."""
    copies = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(copies, tensor.contiguous(), group=group)
    return all(torch.equal(copy, copies[0]) for copy in copies)
