"""Checks the options of replicas that synchronize rarely, and of compressed gradients."""

from __future__ import annotations

import inspect
from typing import Any

from pyruntime.choices import COMPRESSION_OF_RUNS
from pyruntime.replicas.address import split_address
from pyruntime.replicas.methods import METHODS, Method, refuse_for_members
from pyruntime.train.config import DataParallel, RunConfig, changed, meets_every_step, replicas, with_steps
from pyruntime.train.errors import ConfigError, refusing, require

OF_METHODS = (
    "data_parallel.members data_parallel.tau data_parallel.outer_lr data_parallel.outer_momentum "
    "data_parallel.penalty data_parallel.clip data_parallel.pull data_parallel.delay data_parallel.fragments"
)
"""Options that only apply to replicas that synchronize rarely."""


def outer_method(config: RunConfig) -> Method:
    """Returns the method of rare synchronization. Raises ConfigError for a setting it does not have."""
    asked = config.data_parallel
    given = {
        "tau": asked.tau,
        "lr": asked.outer_lr,
        "momentum": asked.outer_momentum,
        "clip": asked.clip,
        "pull": asked.pull,
        "delay": asked.delay,
        "fragments": asked.fragments,
    }
    settings: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if not asked.penalty:
        settings["penalty"] = None
    make = METHODS[asked.method]
    for name in settings:
        key = {"lr": "outer_lr", "momentum": "outer_momentum"}.get(name, name)
        require(
            name in inspect.signature(make).parameters,
            f"data_parallel.{key} is not a setting of data_parallel.method={asked.method}; leave it out.",
        )
    with refusing("[data_parallel]: "):
        return make(**settings)


def check_data_parallel(config: RunConfig) -> None:
    """Checks the options of replicas that synchronize rarely."""
    asked, parallel = config.data_parallel, config.parallel
    if meets_every_step(config):
        for name, value, _ in changed(config, OF_METHODS):
            raise ConfigError(
                f"{name}={value} needs replicas that do not synchronize in every step; set "
                "data_parallel.method."
            )
        return
    chosen = outer_method(config)
    method = f"data_parallel.method={asked.method}"
    if asked.members:
        _check_members(config, chosen)
    require(
        replicas(config) > 1 or bool(asked.members),
        f"{method} needs several replicas, and parallel.dp={parallel.dp}; set parallel.dp to their number.",
    )
    require(
        parallel.zero < 3,
        f"{method} with parallel.zero=3, which keeps no whole weights for the outer step; use "
        "parallel.zero=0, 1 or 2.",
    )
    asked_of_steps = config.optimizer
    require(
        asked_of_steps.on_bad_step == "stop" and not asked_of_steps.spike_factor,
        f"{method} with optimizer.on_bad_step=skip or optimizer.spike_factor, which need the figures of all "
        "replicas in every step; leave them out.",
    )
    require(
        config.train.patience == 0 and not config.checkpoint.keep_best,
        f"{method} with train.patience or checkpoint.keep_best: between two synchronizations each replica "
        "has weights of its own, which no checkpoint holds; leave them out.",
    )


def _check_members(config: RunConfig, method: Method) -> None:
    """Checks the options of replicas that come and go."""
    address, tau = config.data_parallel.members, method.tau
    with refusing("data_parallel.members: "):
        split_address(address)
        refuse_for_members(method)
    require(
        config.parallel.dp_replicate == 1,
        f"data_parallel.members={address} joins replicas that are separate jobs, and "
        f"parallel.dp_replicate={config.parallel.dp_replicate} makes some in one job; leave one of them out.",
    )
    assert isinstance(tau, int)
    for name, steps in (
        ("train.steps", with_steps(config).train.steps),
        ("checkpoint.every_steps", config.checkpoint.every_steps),
    ):
        require(
            steps % tau == 0,
            f"{name}={steps} ends in the middle of a round of data_parallel.tau={tau} steps, but with "
            f"data_parallel.members rounds must be whole; use {-(-steps // tau) * tau}.",
        )


def check_weight_wire(config: RunConfig) -> None:
    """Checks that weights rounded for gathering suit the other options."""
    parallel, wire = config.parallel, config.data_parallel.weight_wire
    if wire == "same":
        return
    asked = f"data_parallel.weight_wire={wire}"
    require(
        parallel.zero == 3,
        f"{asked} with parallel.zero={parallel.zero}: only at stage 3 are the gathered weights a copy that "
        "may be rounded; use parallel.zero=3, or leave out data_parallel.weight_wire.",
    )
    require(
        parallel.dp * parallel.cp // parallel.dp_replicate > 1,
        f"{asked} needs several ranks that gather weights, and there is one; set parallel.dp, or leave out "
        "data_parallel.weight_wire.",
    )


def check_compression(config: RunConfig) -> None:
    """Checks that compressed gradients suit the other options."""
    parallel, chosen = config.parallel, config.data_parallel
    asked = f"data_parallel.compression={chosen.compression}"
    if chosen.compression == "none":
        names = "data_parallel.error_feedback data_parallel.compression_plan_every"
        for name, value, _ in changed(config, names):
            raise ConfigError(
                f"{name}={value} without data_parallel.compression; set that, or leave out {name}."
            )
        return
    require(
        chosen.error_feedback or chosen.compression == "quantize",
        f"{asked} with data_parallel.error_feedback=false would never send most of a gradient; leave "
        "error_feedback on, or use quantize.",
    )
    if not meets_every_step(config):
        _check_compressed_displacements(chosen)
        return
    require(
        parallel.dp * parallel.cp > 1,
        f"{asked} needs several data-parallel ranks, and there is one; set parallel.dp, or leave out "
        "data_parallel.compression.",
    )
    require(
        parallel.zero < 3,
        f"{asked} with parallel.zero=3, which sends weights uncompressed, twice as many bytes as gradients; "
        "use parallel.zero=0, 1 or 2.",
    )
    require(
        parallel.dp_replicate == 1,
        f"{asked} works over one axis, and parallel.dp_replicate={parallel.dp_replicate} makes two; leave "
        "one of them out.",
    )
    require(
        config.optimizer.on_bad_step == "stop",
        f"{asked} with optimizer.on_bad_step=skip: when a step is known to be bad, its gradient is already "
        "in the compression residuals; leave one of them out.",
    )


def _check_compressed_displacements(chosen: DataParallel) -> None:
    """Checks compression for replicas that synchronize rarely."""
    asked = f"data_parallel.method={chosen.method} with data_parallel.compression={chosen.compression}"
    require(
        not chosen.members,
        f"{asked} and data_parallel.members, whose replicas send displacements uncompressed; leave out "
        "data_parallel.compression.",
    )
    require(
        chosen.compression != "power_sgd",
        f"{asked}, which needs matrices, but displacements are sent as flat runs; use "
        f"{' or '.join(COMPRESSION_OF_RUNS)}.",
    )
    require(
        chosen.error_feedback,
        f"{asked} and data_parallel.error_feedback=false: what a round loses would never be sent; leave "
        "error_feedback on.",
    )
    require(
        chosen.compression_plan_every == 0,
        f"{asked} and data_parallel.compression_plan_every={chosen.compression_plan_every}, which applies to "
        "matrices of gradients; leave out data_parallel.compression_plan_every.",
    )
