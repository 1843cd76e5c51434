"""Checks the options by which a run is watched."""

from __future__ import annotations

from importlib.util import find_spec

from pyruntime.choices import PLANNED_METHODS
from pyruntime.plan.cluster import find_cluster
from pyruntime.train.config import RunConfig, changed, steps_of, with_steps
from pyruntime.train.errors import refusing, require


def check_watching(config: RunConfig) -> None:
    """Raises ConfigError if a package is missing, the steps to record do not exist, or the planner cannot
    predict such a run."""
    _check_sinks(config)
    _check_profile(config)
    _check_predicted(config)
    require(
        not (config.train.check_types and config.train.compile),
        "train.check_types follows tensors from operator to operator, but train.compile fuses operators; "
        "leave one of them out.",
    )


def _check_sinks(config: RunConfig) -> None:
    for name in ("tensorboard", "wandb"):
        asked = getattr(config.output, name)
        require(
            not asked or find_spec(name) is not None,
            f"output.{name} writes through the package {name}, which is not installed; install "
            f"pyruntime[{name}].",
        )


def _check_profile(config: RunConfig) -> None:
    train = config.train
    if not train.profile:
        return
    with refusing("train.profile: "):
        last = steps_of(train.profile)[-1]
    steps = with_steps(config).train.steps
    require(
        last <= steps,
        f"train.profile={train.profile} goes beyond the last step, {steps}; name earlier ones.",
    )
    require(
        not train.ledger,
        f"train.profile={train.profile} records a ledger of its steps, and train.ledger one of all steps; "
        "leave one of them out.",
    )


def _check_predicted(config: RunConfig) -> None:
    cluster = config.output.cluster
    if not cluster:
        return
    with refusing("output.cluster: "):
        find_cluster(cluster)
    why = why_not_predicted(config)
    require(
        not why,
        f"output.cluster={cluster}: {why}, and would predict another step; leave one of them out.",
    )


def why_not_predicted(config: RunConfig) -> str:
    """Names an option that the planner does not know; empty if it can predict the run's steps."""
    names = (
        "train.dtype train.micro_batches parallel.tp_wire parallel.tp_speeds parallel.rebalance "
        "data_parallel.members data_parallel.compression data_parallel.weight_wire "
        "pipeline.slice_tokens pipeline.speeds pipeline.costs pipeline.wire context.wire"
    )
    unknown = [(name, value) for name, value, _ in changed(config, names)]
    tier, method = config.comm.tier, config.data_parallel.method
    unknown += [("comm.tier", tier)] if tier == "unfused" else []
    unknown += [] if method in PLANNED_METHODS else [("data_parallel.method", method)]
    return "".join(f"the planner does not know {name}={value}" for name, value in unknown[:1])
