"""Checks the options of a model with experts, normalised heads, or a window of attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyruntime.train.config import Grid, MeshSizes, RunConfig, meets_every_step
from pyruntime.train.errors import require

if TYPE_CHECKING:
    from pyruntime.llama.config import LlamaConfig


def check_shape(config: RunConfig, shape: LlamaConfig) -> None:
    """Raises ConfigError for options that a model of that shape does not support."""
    window, costs = shape.sliding_window, config.pipeline.costs
    require(
        window is None or window >= config.train.seq_len or not costs,
        f"pipeline.costs={costs} was measured without a window of attention, and this model has one of "
        f"{window} tokens; set pipeline.layers.",
    )
    if shape.mixture is not None or shape.qk_norm:
        _check_cuts(config, "experts" if shape.mixture else "normalised heads")
    if shape.mixture is None:
        return
    experts = f"a model with {shape.mixture.experts} experts"
    parallel, counts = config.parallel, config.train.micro_batches
    for name, is_asked, instead in (
        (f"train.micro_batches={list(counts)}", bool(counts), "leave it out"),
        (
            "parallel.rebalance=on without a pipeline",
            parallel.rebalance == "on" and parallel.pp == 1,
            "leave it out",
        ),
        ("train.check_types=true", config.train.check_types, "leave it out"),
        (f"parallel.tp_wire={config.parallel.tp_wire}", config.parallel.tp_wire != "same", "leave it out"),
        (f"pipeline.costs={config.pipeline.costs}", bool(config.pipeline.costs), "set pipeline.layers"),
    ):
        require(not is_asked, f"{name} does not support {experts} yet; {instead}.")
    is_rare = not meets_every_step(config) or bool(config.data_parallel.members)
    require(
        not (shape.mixture.sigmoid and is_rare),
        "model.sigmoid_router moves a bias by the rows of all ranks in every step, and replicas that do not "
        "synchronize in every step do not count them; leave out one of the two.",
    )
    slices, train = config.pipeline.slices, config.train
    for name, weight in (("balance_loss", train.balance_loss), ("router_z_loss", train.router_z_loss)):
        require(
            slices == 1 or weight == 0,
            f"train.{name}={weight:g} counts the tokens of whole sequences, and pipeline.slices={slices} "
            f"cuts them in {experts}; set train.{name}=0, or leave out pipeline.slices.",
        )


def check_experts_over(config: RunConfig, shape: LlamaConfig, mesh: MeshSizes) -> None:
    """Raises ConfigError if experts cannot lie over the ranks that parallel.ep says."""
    ep, tp = mesh.ep, mesh.tp
    if ep is None:
        return
    asked = f"parallel.ep={ep}"
    require(
        shape.mixture is not None,
        f"{asked} says over how many ranks experts lie, and the model has none; leave it out.",
    )
    ranks, parts = tp * mesh.dp * mesh.cp // mesh.dp_replicate, ""
    if mesh.dp_replicate > 1:
        parts = f", divided by parallel.dp_replicate={mesh.dp_replicate}"
    fitting = ", ".join(str(each) for each in range(1, ranks + 1) if ranks % each == 0)
    require(
        ep == tp or ranks % ep == 0,
        f"{asked} does not divide the {ranks} ranks that share experts: parallel.tp={tp} times "
        f"parallel.cp={mesh.cp} times parallel.dp={mesh.dp}{parts}; use one of {fitting}.",
    )
    of_replicas = config.data_parallel
    for name, is_asked in (
        (f"data_parallel.method={of_replicas.method}", not meets_every_step(config)),
        (f"data_parallel.members={of_replicas.members}", bool(of_replicas.members)),
        (f"data_parallel.compression={of_replicas.compression}", of_replicas.compression != "none"),
    ):
        require(
            ep == tp or not is_asked,
            f"{name} supports experts over the tensor-parallel ranks, and {asked} with parallel.tp={tp}; "
            "leave one of them out.",
        )


def check_slices_of(config: RunConfig, shape: LlamaConfig, mesh: MeshSizes) -> None:
    """Raises ConfigError if a model of that shape does not take the slices of parallel.tp_slices."""
    slices = config.parallel.tp_slices
    if slices in ("auto", 1):
        return
    why = shape.why_no_slices(int(slices), mesh.tp, over_tp=mesh.experts_over == mesh.tp)
    require(not why, f"parallel.tp_slices={slices} does not support a model with {why}; leave it out.")


def _check_cuts(config: RunConfig, what: str) -> None:
    parallel = config.parallel
    require(
        not isinstance(parallel.tp, Grid),
        f"parallel.tp={parallel.tp} cuts features over y, which a model with {what} does not support; use "
        "one number.",
    )
