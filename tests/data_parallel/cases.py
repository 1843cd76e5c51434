"""Models and training runs for the tests of data parallelism."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import pyruntime

VOCAB, WIDTH, HIDDEN = 23, 10, 17  # no number of ranks divides them


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """An embedding, two layers and a head. A linear is used twice, one never, one is frozen, one is used or
    not as the data say, unless the model is steady."""

    def __init__(self, tied: bool, steady: bool):
        super().__init__()
        self.steady = steady
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids, labels):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        x = self.frozen(self.twice(torch.tanh(self.twice(x)))) * self.scale
        if not self.steady and ids[0, 0] % 2 == 0:  # on some ranks only, in some steps
            x = x + self.sometimes(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def model(tied: bool, steady: bool, dtype: torch.dtype) -> Model:
    torch.manual_seed(3)
    return Model(tied, steady).to(dtype)


def batches(steps: int, sequences: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        tuple(torch.randint(VOCAB, (sequences, 6), generator=generator) for _ in range(2))
        for _ in range(steps)
    ]


def reference(
    tied: bool, steady: bool, dtype: torch.dtype, steps: int, sequences: int, max_norm: float
) -> tuple[list[float], dict[str, torch.Tensor], list[float]]:
    """Losses, weights and gradient norms of one process, plain torch. A micro-batch is one sequence, because
    what the model reads depends on it."""
    whole = model(tied, steady, dtype)
    parameters = [p for p in whole.parameters() if p.requires_grad]
    matrices = [p for p in parameters if p.dim() >= 2]
    vectors = [p for p in parameters if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=1e-2,
        betas=(0.9, 0.95),
    )
    losses, norms = [], []
    for ids, labels in batches(steps, sequences):
        total = 0.0
        for one in range(sequences):
            loss = whole(ids[one : one + 1], labels[one : one + 1]) / sequences
            loss.backward()
            total += float(loss.detach())
        losses.append(total)
        norms.append(float(nn.utils.clip_grad_norm_(parameters, max_norm or float("inf"))))
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: p.detach() for name, p in whole.state_dict().items()}, norms


def train(
    whole: nn.Module,
    handle: pyruntime.data_parallel.Sharded,
    optimizer: pyruntime.data_parallel.ShardedAdamW,
    data: Sequence[tuple[torch.Tensor, torch.Tensor]],
    rank: int,
    size: int,
) -> tuple[list[float], list[float]]:
    """This rank's share of the loss, and the norms. Rank r takes the sequences r, r + size, ..."""
    losses, norms = [], []
    for ids, labels in data:
        mine = list(range(rank, len(ids), size))
        total = 0.0
        for one in mine:
            loss = whole(ids[one : one + 1], labels[one : one + 1]) / len(mine)
            total += float(loss.detach()) / size
            if one == mine[-1]:
                loss.backward()
            else:
                with handle.accumulate():
                    loss.backward()
        losses.append(total)
        norms.append(optimizer.step().grad_norm)
    return losses, norms


_meshes: dict[int, DeviceMesh] = {}


def two_by_two() -> DeviceMesh:
    """(dp_replicate, dp_shard) of the four ranks of the pool; process groups are made once."""
    if 4 not in _meshes:
        _meshes[4] = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp_replicate", "dp_shard"))
    return _meshes[4]


def mesh_of(group: dist.ProcessGroup, kind: str) -> tuple[DeviceMesh, int, int]:
    """The mesh of `kind`, "hsdp" for `two_by_two` or else all ranks of the group; this rank in it, and its
    size."""
    if kind == "hsdp":
        mesh = two_by_two()
        return mesh, 2 * mesh.get_local_rank(0) + mesh.get_local_rank(1), 4
    mesh = DeviceMesh.from_group(group, "cpu")
    return mesh, mesh.get_rank(), mesh.size()
