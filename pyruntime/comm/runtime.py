"""The Runtime: owns the mesh and the resources of its groups, from start to close."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before a group exists: its functions keep the group of that moment
from torch.distributed.device_mesh import DeviceMesh

from pyruntime.choices import HostOrder, check_value, values
from pyruntime.comm import companions
from pyruntime.comm.axis import Axis
from pyruntime.comm.core import _C
from pyruntime.comm.devices import Host, place
from pyruntime.comm.exchange import first_line, is_of_connection, named_failures, raise_for_ended
from pyruntime.comm.groups import (
    check_deadline,
    exposed_by_class,
    group_name,
    job_rank_name,
    process_group,
    set_deadline,
    stats,
)
from pyruntime.comm.launcher import check_launcher
from pyruntime.comm.links import HostLinks, measure
from pyruntime.comm.rendezvous import open_store

DEFAULT_DEADLINE_S = 120.0
AXES = (("pp",), ("dp", "dp_replicate", "dp_shard"), ("cp",), ("tp", "tp_y"))
"""Names of a mesh's dimensions, by the axis that they belong to, in the order of `PerAxis`."""


class PerAxis(NamedTuple):
    """A number for every axis of parallelism; ranks are counted with the last axis fastest."""

    pp: int
    dp: int
    """Replicas included."""
    cp: int
    tp: int
    """Both axes of tensor parallelism, if there are two."""


class Runtime:
    """Owns a mesh, the deadline of every wait on its axes, and their workspaces.

        with Runtime.start(tp=2) as runtime:
            model = Llama(config, runtime.tp)

    Args:
        mesh: a DeviceMesh with named axes, one of them "tp".
        ep: ranks in an expert-parallel group, see `start`; groups other than tp's are made collectively.
        deadline_s: seconds that any wait on a peer may last before it raises CommTimeout.

    Raises ValueError if the mesh has no axis "tp", or `ep` does not fit it.
    """

    def __init__(
        self, mesh: DeviceMesh, *, ep: int | None = None, deadline_s: float = DEFAULT_DEADLINE_S
    ) -> None:
        if "tp" not in (mesh.mesh_dim_names or ()):
            raise ValueError(f"The mesh has axes {mesh.mesh_dim_names}; name one of them 'tp'.")
        self.mesh = mesh
        self.deadline_s = deadline_s
        self.device = _device_of(mesh)
        """The device on which this rank computes."""
        self.why_device = "the mesh's"
        self.links: HostLinks | None = None
        """The links between hosts, if start() has measured them."""
        self._owns_process_groups = False
        self._groups = [group_name(mesh[axis]) for axis in mesh.mesh_dim_names]
        if mesh.ndim > 1:
            self._groups.append(group_name(self.world))
        for name in self._groups:
            set_deadline(name, deadline_s)
        _C.set_symmetric_memory_deadline(float(deadline_s))
        self.places = _places(mesh)
        """The place of each rank of the job on the mesh, "tp 0, dp 1", by its number in the job. Empty if the
        rank is not in the mesh, or if one axis has all ranks, whose numbers are their places."""
        _C.set_coordinates(self.places)
        self._experts: DeviceMesh | None = None
        if ep is not None and ep != self.tp.size:
            self._experts = self._mesh_of_experts(ep)

    @classmethod
    def start(
        cls,
        *,
        tp: int | None = None,
        tp_y: int = 1,
        dp: int = 1,
        dp_replicate: int = 1,
        cp: int = 1,
        pp: int = 1,
        ep: int | None = None,
        device: str = "cpu",
        hosts: str = "started",
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> Runtime:
        """Joins the job that torchrun describes in the environment, or makes a job of one process without it.

        tp: ranks in a tensor-parallel group, neighbours by rank; by default the started ranks divided by the
            other axes.
        tp_y: ranks over which tensor parallelism cuts the residual stream's features
            (docs/explanation/primitives.md); these are then the neighbours, and the ranks of tp lie `tp_y`
            apart.
        dp: ranks in a data-parallel group.
        dp_replicate: the number of parts of that group that each hold everything once.
        cp: ranks in a context-parallel group.
        pp: ranks in a pipeline.
        ep: ranks among which experts are dealt out, neighbours by rank: any number that divides tp * cp * dp,
            the ranks of a pipeline stage (with dp_replicate, those of one replica); by default tp. The ranks
            that hold the same experts are then `edp`. Each expert is on one rank of its group, whole.
        device: "cpu", "cuda" (the GPU of this rank's LOCAL_RANK), or "auto": a GPU if every rank of the host
            has one, else the CPU. On GPUs the process groups use NCCL for tensors there and Gloo for those on
            the CPU; only Gloo if ranks share a GPU.
        hosts: "started", the order of the launcher's ranks, or "measured": hosts that fast links join follow
            each other (`pyruntime.comm.links`). Ranks then have other numbers: RANK changes in this process's
            environment. Rank 0 stays rank 0.

        The mesh is (tp), (dp, tp), or (dp_replicate, dp_shard, tp). Axes above 1 are added: cp before tp,
        tp_y behind it and pp before all. May be called again once the Runtime is closed, on all ranks.

        Raises ValueError if the axes do not make up the world size or differ on another rank, there is no
        such device, or torch.distributed is initialized already. Also if a launcher has started several tasks
        without torchrun's variables. Raises CommTimeout if other ranks do not come, PeerLost if one ended.
        """
        if dist.is_initialized():
            raise ValueError(
                "torch.distributed is initialized already, and Runtime.start() makes groups of its own; "
                "make a DeviceMesh of yours and pass it to Runtime(mesh), or destroy them first."
            )
        check_launcher(os.environ)
        check_deadline(deadline_s)
        check_value("hosts", hosts, values(HostOrder))
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        others = tp_y * dp * cp * pp
        tp = max(1, world_size // others) if tp is None else tp
        if tp * others != world_size or dp % dp_replicate:
            second, times = (f", tp_y={tp_y}", " * tp_y") if tp_y > 1 else ("", "")
            raise ValueError(
                f"tp={tp}{second}, dp={dp}, dp_replicate={dp_replicate}, cp={cp}, pp={pp} were asked for and "
                f"{world_size} rank(s) were started; start tp{times} * dp * cp * pp of them (torchrun "
                f"--nproc-per-node {tp * others}) or leave tp out, and let dp_replicate divide dp."
            )
        if ep is not None and ep != tp:
            check_ep(ep, tp, tp_y, cp * dp, dp_replicate)
        links = None
        if hosts == "measured" and world_size > 1:
            links = cls._number_by_links(world_size, device, deadline_s)
        placement = place(device, Host.here())
        if placement.device.type != "cpu":
            torch.accelerator.set_device_index(placement.device)
        data = (
            {"dp_replicate": dp_replicate, "dp_shard": dp // dp_replicate} if dp_replicate > 1 else {"dp": dp}
        )
        asked = {"pp": pp, **data, "cp": cp, "tp": tp, "tp_y": tp_y}
        axes = {name: size for name, size in asked.items() if size > 1 or name in ("dp_shard", "tp")}
        with _named_failures(world_size, deadline_s):
            _init_process_groups(placement.backend, deadline_s, axes)
            ranks = torch.arange(world_size).view(tuple(axes.values()))
            mesh = _make_mesh(placement.device.type, ranks, tuple(axes), {}, deadline_s)
            if dp > 1 and cp > 1:
                merge_context(mesh, deadline_s)
            runtime = cls(mesh, ep=ep, deadline_s=deadline_s)
        runtime._owns_process_groups = True
        runtime.device, runtime.why_device = placement.device, placement.why
        runtime.links = links
        return runtime

    @classmethod
    def _number_by_links(cls, world_size: int, device: str, deadline_s: float) -> HostLinks:
        """Measures the links between hosts, and gives this process its new number."""
        with cls.start(tp=world_size, device=device, deadline_s=deadline_s) as runtime:
            links = measure(runtime.world, runtime.device)
            os.environ["RANK"] = str(links.number_of(runtime.rank))
        return links

    @functools.cached_property
    def _grid(self) -> torch.Tensor:
        """The ranks of the mesh by their places on its axes, [pp, dp, cp, tp].

        Raises ValueError if the mesh has a dimension of another name.
        """
        mesh, names = self.mesh, list(self.mesh.mesh_dim_names or ())
        known = [[name for name in names if name in of_axis] for of_axis in AXES]
        order = [names.index(name) for of_axis in known for name in of_axis]
        if len(order) < len(names):
            raise ValueError(
                f"The mesh has axes {tuple(names)}; name each of them pp, dp (or dp_replicate and dp_shard), "
                "cp, tp or tp_y."
            )
        ranks = torch.arange(mesh.size()).view(mesh.mesh.shape) if mesh.ndim == 1 else mesh.mesh
        sizes = [math.prod(mesh.size(names.index(name)) for name in of_axis) for of_axis in known]
        return ranks.permute(order).reshape(sizes)

    @property
    def sizes(self) -> PerAxis:
        """Ranks on every axis; 1 if the mesh has none of that name."""
        return PerAxis(*self._grid.shape)

    @functools.cached_property
    def coordinate(self) -> PerAxis:
        """This process's rank on every axis."""
        return PerAxis(*(self._grid == self.world.rank()).nonzero()[0].tolist())

    @property
    def world(self) -> dist.ProcessGroup:
        """All ranks of the mesh."""
        return process_group(self.mesh) if self.mesh.ndim == 1 else dist.group.WORLD

    @property
    def tp(self) -> Axis:
        """The tensor-parallel axis; of two axes the first, x."""
        return self._axis("tp")

    @property
    def tp_y(self) -> Axis:
        """The second axis of tensor parallelism."""
        return self._axis("tp_y")

    @property
    def tp_grid(self) -> DeviceMesh:
        """The mesh that models and layers are cut over: (tp), or with both axes (tp, tp_y)."""
        return self.mesh["tp"] if self.tp_y.mesh is None else self.mesh["tp", "tp_y"]

    @property
    def dp(self) -> Axis:
        """The data-parallel axis, of one dimension (dp) or two (dp_replicate, dp_shard)."""
        names = tuple(name for name in self.mesh.mesh_dim_names or () if name.startswith("dp"))
        return Axis("dp", self.mesh[names] if names else None)

    @property
    def cp(self) -> Axis:
        """The context-parallel axis."""
        return self._axis("cp")

    @property
    def pp(self) -> Axis:
        """The pipeline-parallel axis."""
        return self._axis("pp")

    @property
    def ep(self) -> Axis:
        """The expert-parallel axis, for `pyruntime.nn.ParallelExperts`: that of `start(ep=...)`, or tp."""
        if self._experts is None:
            return Axis("ep", self.tp.mesh)
        return Axis("ep", self._experts["ep"], self.edp.mesh)

    @property
    def edp(self) -> Axis:
        """The ranks of the pipeline stage that hold the same experts, over which their gradients are summed.
        By default `replicas`."""
        if self._experts is None:
            return Axis("edp", self.replicas.mesh)
        names = tuple(name for name in self._experts.mesh_dim_names or () if name.startswith("edp"))
        return Axis("edp", self._experts[names])

    def _mesh_of_experts(self, ep: int) -> DeviceMesh:
        """Makes the mesh (edp, ep) of each pipeline stage: its ranks in their order, tp fastest, then cp and
        dp (parallel folding, arXiv 2504.14960). With dp_replicate (edp_replicate, edp_shard, ep)."""
        mesh, sizes = self.mesh, self.sizes
        names = mesh.mesh_dim_names or ()
        replicate = mesh.size(names.index("dp_replicate")) if "dp_replicate" in names else 1
        check_ep(ep, self.tp.size, self.tp_y.size, sizes.cp * sizes.dp, replicate)
        copies = sizes.tp * sizes.cp * sizes.dp // ep
        shape = {"pp": sizes.pp} if sizes.pp > 1 else {}
        if "dp_replicate" in names:
            shape |= {"edp_replicate": replicate, "edp_shard": copies // replicate, "ep": ep}
        else:
            shape |= {"edp": copies, "ep": ep}
        ranks = self._grid if mesh.ndim > 1 else mesh.mesh[self._grid]
        known = {"pp": mesh.get_group("pp")} if sizes.pp > 1 else {}
        with named_failures(self.world, "Making the groups of ep"):
            made = _make_mesh(
                mesh.device_type, ranks.reshape(tuple(shape.values())), tuple(shape), known, self.deadline_s
            )
        for axis in shape.keys() - known.keys():
            name = group_name(made[axis])
            self._groups.append(name)
            set_deadline(name, self.deadline_s)
        return made

    def _axis(self, name: str) -> Axis:
        return Axis(name, self.mesh[name] if name in (self.mesh.mesh_dim_names or ()) else None)

    @functools.cached_property
    def replicas(self) -> Axis:
        """The ranks over which gradients are reduced: those of `dp`, where each rank of the last dimension
        stands for its ranks of `cp`. If a mesh that was made elsewhere has both, the first call is collective
        over all ranks."""
        if self.dp.mesh is None or self.cp.mesh is None:
            return Axis("replicas", self.cp.mesh if self.dp.mesh is None else self.dp.mesh)
        with named_failures(self.world, "Making the groups of dp and cp"):
            merged = merge_context(self.mesh, self.deadline_s)
        root = merged._get_root_mesh()
        for axis in root.mesh_dim_names or ():
            name = root.get_group(axis).group_name
            self._groups.append(name)
            set_deadline(name, self.deadline_s)
        return Axis("replicas", merged)

    @functools.cached_property
    def pp_and_dp(self) -> dist.ProcessGroup:
        """The ranks of all pipeline stages and all data-parallel ranks that share this rank's place on the
        other axes; dp is fastest. The first call is collective over all ranks. Raises ValueError if the
        mesh does not have pp before dp."""
        each = self._grid.flatten(2).flatten(0, 1).T.tolist()
        if any(ranks != sorted(ranks) for ranks in each):
            raise ValueError(
                f"The mesh has axes {self.mesh.mesh_dim_names}; ranks of pp and dp are numbered with dp "
                "fastest, so let pp come before dp."
            )
        if len(each) == 1:
            return self.world
        with named_failures(self.world, "Making the groups of pp and dp"):
            group, _ = dist.new_subgroups_by_enumeration(
                each, timedelta(seconds=self.deadline_s), group_desc="mesh_pp_dp"
            )
        assert group is not None, "every rank is in one of the groups"
        self._groups.append(group.group_name)
        set_deadline(group, self.deadline_s)
        return group

    def by_axes(self, values: torch.Tensor) -> torch.Tensor:
        """Arranges values of all ranks [world, ...] by the axes of the mesh: [pp, dp, cp, tp, ...]."""
        return values[self._grid]

    @property
    def rank(self) -> int:
        """This process's rank in the job."""
        return dist.get_rank()

    @property
    def tp_size(self) -> int:
        """Ranks in the tensor-parallel group; of two axes, in the first."""
        return self.tp.size

    def exposed_by_axis(self) -> dict[str, float]:
        """Returns the seconds in which this rank has done nothing but wait for peers, copy and sum, over all
        its open groups and their companions: "tp", "cp", "pp", "dp", "checkpoint", and "ep" where
        `start(ep=...)` made it another group than tp's. Exchanges among all ranks of several axes are "all".
        The values add up to `comm.exposed_s()`."""
        seconds = exposed_by_class()
        # A group's own exchanges have the class tp, whatever its axis is.
        groups = {axis.name: axis.mesh for axis in (self.cp, self.pp, self.dp)}
        names = {
            name: group_name(mesh) for name, mesh in groups.items() if mesh is not None and mesh.ndim == 1
        }
        if self._experts is not None:
            names["ep"] = group_name(self.ep)
        if self.mesh.ndim > 1:
            names["all"] = group_name(self.world)
        for axis, name in names.items():
            own = stats(name)
            seconds[axis] = seconds.get(axis, 0.0) + own.waiting_s + own.moving_s
            seconds["tp"] = seconds.get("tp", 0.0) - own.waiting_s - own.moving_s
        if abs(seconds.get("tp", 0.0)) < 1e-9:
            seconds["tp"] = 0.0  # but for rounding
        return seconds

    def stats(self) -> _C.CommStats:
        """Returns cumulative communication figures of the tensor-parallel group on this rank."""
        return stats(self.tp)

    def close(self) -> None:
        """Frees the workspaces, and ends the process groups if start() made them. May be called again."""
        for name in self._groups:
            companions.forget(name)
            _C.close_group(name)
        if self._owns_process_groups and dist.is_initialized():
            _leave_job()
            # DTensor's caches keep the mesh, and the mesh the groups. If these were not freed, gloo's threads
            # would go on, and one that frees a tensor while Python ends aborts the process.
            for mesh in filter(None, (self.mesh, self._experts)):
                getattr(mesh._get_root_mesh(), "_pg_registry", {}).clear()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        try:
            if error is not None and not isinstance(error, Exception):  # usually a signal
                raise_for_ended(f"{job_rank_name(dist.get_rank())} was asked to stop")
        finally:
            self.close()


def check_ep(ep: int, tp: int, tp_y: int, replicas: int, dp_replicate: int) -> None:
    """Raises ValueError unless experts can be dealt out over `ep` ranks, other than tp, of a pipeline stage
    of tp * `replicas` ranks, in `dp_replicate` parts that each hold everything once."""
    if tp_y > 1:
        raise ValueError(
            f"ep={ep} with tp={tp} and tp_y={tp_y}, two axes of tensor parallelism, beside which experts "
            "have no groups of their own; leave out ep."
        )
    ranks = tp * replicas // dp_replicate
    if ep < 1 or ranks % ep:
        fitting = ", ".join(str(each) for each in range(1, ranks + 1) if ranks % each == 0)
        parts = f", in dp_replicate={dp_replicate} parts" if dp_replicate > 1 else ""
        raise ValueError(
            f"ep={ep} does not divide the ranks that share experts, tp={tp} times dp * cp={replicas}{parts}; "
            f"use one of {fitting}."
        )


def _init_process_groups(backend: str, deadline_s: float, axes: Mapping[str, int]) -> None:
    timeout = timedelta(seconds=deadline_s)
    if "RANK" in os.environ:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = open_store(deadline_s, f"{', '.join(f'{name}={axes[name]}' for name in axes)} by {backend}")
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
        return
    with tempfile.TemporaryDirectory() as folder:
        file = dist.FileStore(os.path.join(folder, "store"), 1)
        dist.init_process_group(backend, store=file, rank=0, world_size=1, timeout=timeout)


@contextlib.contextmanager
def _named_failures(world_size: int, deadline_s: float) -> Iterator[None]:
    """Undoes start-up if it fails, and names the missing rank in place of torch's own error."""
    try:
        yield
    except BaseException as error:
        try:
            if world_size > 1 and not isinstance(error, Exception):
                raise_for_ended(f"Start-up, {job_rank_name(int(os.environ['RANK']))} was asked to stop")
            if world_size > 1 and is_of_connection(error):
                rank = int(os.environ["RANK"])
                others = [other for other in range(world_size) if other != rank]
                doing = f"Start-up, rank {rank}"
                _C.raise_for_missing_in_job(others, doing, first_line(error), deadline_s)
            raise
        finally:
            _leave_job()


def _leave_job() -> None:
    _C.leave_job()
    if dist.is_initialized():
        dist.destroy_process_group()


def _places(mesh: DeviceMesh) -> list[str]:
    axes = [axis for axis in range(mesh.ndim) if mesh.mesh.shape[axis] > 1]
    ranks: list[int] = mesh.mesh.flatten().tolist()
    words = [""] * (max(ranks) + 1)
    if len(axes) < 2:
        return words
    names = mesh.mesh_dim_names or ()
    for at in itertools.product(*map(range, mesh.mesh.shape)):
        words[int(mesh.mesh[at])] = ", ".join(f"{names[axis]} {at[axis]}" for axis in reversed(axes))
    return words


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def _make_mesh(
    device_type: str,
    ranks: torch.Tensor,
    names: tuple[str, ...],
    known: Mapping[str, dist.ProcessGroup],
    deadline_s: float,
) -> DeviceMesh:
    """Makes a mesh of the job's `ranks`, with the groups that are `known` by their dimension, and others made
    now, collectively. `deadline_s` bounds that, and torch's later collectives over them. In groups that torch
    makes for a mesh these would wait for 30 minutes."""
    if ranks.ndim == 1 and ranks.numel() == dist.get_world_size():
        return DeviceMesh.from_group(dist.group.WORLD, device_type, mesh_dim_names=names)
    groups = []
    for dim, name in enumerate(names):
        if (group := known.get(name)) is None:
            each = ranks.movedim(dim, -1).reshape(-1, ranks.size(dim)).tolist()
            timeout = timedelta(seconds=deadline_s)
            group, _ = dist.new_subgroups_by_enumeration(each, timeout, group_desc=f"mesh_{name}")
        groups.append(group)
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=names)


def merge_context(mesh: DeviceMesh, deadline_s: float) -> DeviceMesh:
    """Returns for a mesh with axes (.., dp, cp, ..) the mesh (dp_cp) of this rank's pipeline stage and
    tensor-parallel place; with dp_replicate and dp_shard, (dp_replicate, dp_shard_cp). The first call for a
    mesh is collective, and bounded by `deadline_s`.

    Raises ValueError unless cp follows the last data-parallel axis.
    """
    known = getattr(mesh, "_pyruntime_replicas", None)  # its process groups live as long as the mesh's
    if known is not None:
        return known
    names = list(mesh.mesh_dim_names or ())
    at = names.index("cp")
    if at == 0 or not names[at - 1].startswith("dp"):
        raise ValueError(
            f"The mesh has axes {tuple(names)}; gradients are reduced over the data-parallel axes and cp, so "
            "let cp follow the last of them, as in (dp, cp, tp)."
        )
    merged = f"{names[at - 1]}_cp"
    ranks = mesh.mesh.flatten(at - 1, at)
    names[at - 1 : at + 1] = [merged]
    known = {name: mesh.get_group(name) for name in mesh.mesh_dim_names or () if name in names}
    whole = _make_mesh(mesh.device_type, ranks, tuple(names), known, deadline_s)
    mesh._pyruntime_replicas = whole[tuple(name for name in names if name.startswith("dp"))]
    return mesh._pyruntime_replicas
