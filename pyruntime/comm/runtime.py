"""The Runtime: owns the mesh and what its groups hold, from start to close."""

from __future__ import annotations

import os
import tempfile
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pyruntime.comm.core import _C
from pyruntime.comm.groups import group_name, group_size, set_deadline, stats

DEFAULT_DEADLINE_S = 120.0


class Runtime:
    """Owns a mesh, the deadline of every wait on its axes, and their workspaces.

        with Runtime.start(tp=2) as runtime:
            model = Llama(config, runtime.tp)

    Args:
        mesh: a DeviceMesh with named axes, one of them "tp".
        deadline_s: seconds that any wait on a peer may last before it raises CommTimeout.
    """

    def __init__(self, mesh: DeviceMesh, *, deadline_s: float = DEFAULT_DEADLINE_S) -> None:
        if "tp" not in (mesh.mesh_dim_names or ()):
            raise ValueError(f"The mesh has axes {mesh.mesh_dim_names}; name one of them 'tp'.")
        self.mesh = mesh
        self.deadline_s = deadline_s
        self._owns_process_groups = False
        self._groups = [group_name(mesh[axis]) for axis in mesh.mesh_dim_names]
        for name in self._groups:
            set_deadline(name, deadline_s)
        _C.set_symmetric_memory_deadline(float(deadline_s))

    @classmethod
    def start(
        cls, *, tp: int | None = None, device: str = "cpu", deadline_s: float = DEFAULT_DEADLINE_S
    ) -> Runtime:
        """Joins the job that torchrun describes in the environment, or makes a job of one process where it
        does not.

        tp: ranks in the tensor-parallel group; the world size by default, and today no other size.
        Raises ValueError when tp is not the world size, CommTimeout when the other ranks do not come.
        """
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        tp = world_size if tp is None else tp
        if tp != world_size:
            raise ValueError(
                f"tp={tp} was asked for and {world_size} rank(s) were started; "
                f"start as many as tp (torchrun --nproc-per-node {tp}) or leave tp out."
            )
        timeout = timedelta(seconds=deadline_s)
        if "RANK" in os.environ:
            dist.init_process_group("gloo", timeout=timeout)
        else:
            with tempfile.TemporaryDirectory() as folder:
                store = dist.FileStore(os.path.join(folder, "store"), 1)
                dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timeout)
        runtime = cls(init_device_mesh(device, (tp,), mesh_dim_names=("tp",)), deadline_s=deadline_s)
        runtime._owns_process_groups = True
        return runtime

    @property
    def tp(self) -> DeviceMesh:
        """The tensor-parallel axis."""
        return self.mesh["tp"]

    @property
    def rank(self) -> int:
        """This process's rank in the job."""
        return dist.get_rank()

    @property
    def tp_size(self) -> int:
        """Ranks in the tensor-parallel group."""
        return group_size(self.tp)

    def stats(self) -> _C.CommStats:
        """Cumulative communication figures of the tensor-parallel group on this rank."""
        return stats(self.tp)

    def close(self) -> None:
        """May be called again. Frees the workspaces; ends the process groups too where start() made them."""
        for name in self._groups:
            _C.close_group(name)
        if self._owns_process_groups and dist.is_initialized():
            dist.destroy_process_group()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
