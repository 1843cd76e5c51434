"""What replicas that do not meet in every step, and compressed gradients, go together with."""

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
"""What only replicas have that do not meet in every step."""


def outer_method(config: RunConfig) -> Method:
    """How replicas meet that do not in every step. Raises ConfigError for what the method does not have."""
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
    """Of replicas that do not meet in every step."""
    asked, parallel = config.data_parallel, config.parallel
    if meets_every_step(config):
        for name, value, _ in changed(config, OF_METHODS):
            raise ConfigError(
                f"{name}={value} without a data_parallel.method that meets less often than in every step; "
                "set one."
            )
        return
    chosen = outer_method(config)
    method = f"data_parallel.method={asked.method}"
    if asked.members:
        _check_members(config, chosen)
    require(
        replicas(config) > 1 or bool(asked.members),
        f"{method} is of several replicas, and parallel.dp={parallel.dp}; set it to their number.",
    )
    require(
        parallel.zero < 3,
        f"{method} with parallel.zero=3, which keeps no whole weights for the outer step; use 0, 1 or 2.",
    )
    asked_of_steps = config.optimizer
    require(
        asked_of_steps.on_bad_step == "stop" and not asked_of_steps.spike_factor,
        f"{method} with optimizer.on_bad_step=skip or optimizer.spike_factor, which take the figures of all "
        "replicas in every step; leave them out.",
    )


def _check_members(config: RunConfig, method: Method) -> None:
    """Of replicas that come and go."""
    address, tau = config.data_parallel.members, method.tau
    with refusing("data_parallel.members: "):
        split_address(address)
        refuse_for_members(method)
    require(
        config.parallel.dp_replicate == 1,
        f"data_parallel.members={address} joins replicas that are jobs of their own, and "
        f"parallel.dp_replicate={config.parallel.dp_replicate} makes some in it; leave one of them out.",
    )
    assert isinstance(tau, int)
    for name, steps in (
        ("train.steps", with_steps(config).train.steps),
        ("checkpoint.every_steps", config.checkpoint.every_steps),
    ):
        require(
            steps % tau == 0,
            f"{name}={steps} ends in the midst of a round of data_parallel.tau={tau} steps, and with "
            f"data_parallel.members rounds are whole; use {-(-steps // tau) * tau}.",
        )


def check_weight_wire(config: RunConfig) -> None:
    """What weights that are rounded where they are gathered do not go together with."""
    parallel, wire = config.parallel, config.data_parallel.weight_wire
    if wire == "same":
        return
    asked = f"data_parallel.weight_wire={wire}"
    require(
        parallel.zero == 3,
        f"{asked} with parallel.zero={parallel.zero}, where what is gathered is what ranks keep; use "
        "parallel.zero=3, or leave it out.",
    )
    require(
        parallel.dp * parallel.cp // parallel.dp_replicate > 1,
        f"{asked} is of weights that several ranks gather, and there is one; set parallel.dp, or leave it "
        "out.",
    )


def check_compression(config: RunConfig) -> None:
    """What compressed gradients do not go together with."""
    parallel, chosen = config.parallel, config.data_parallel
    asked = f"data_parallel.compression={chosen.compression}"
    if chosen.compression == "none":
        names = "data_parallel.error_feedback data_parallel.compression_plan_every"
        for name, value, _ in changed(config, names):
            raise ConfigError(f"{name}={value} without data_parallel.compression; set that, or leave it out.")
        return
    require(
        chosen.error_feedback or chosen.compression == "quantize",
        f"{asked} with data_parallel.error_feedback=false would never send most of a gradient; leave it on, "
        "or use quantize.",
    )
    if not meets_every_step(config):
        _check_compressed_displacements(chosen)
        return
    require(
        parallel.dp * parallel.cp > 1,
        f"{asked} is of gradients that data-parallel ranks exchange, and there is one such rank; set "
        "parallel.dp, or leave it out.",
    )
    require(
        parallel.zero < 3,
        f"{asked} with parallel.zero=3, where weights travel as they are, twice as much as gradients; use 0, "
        "1 or 2.",
    )
    require(
        parallel.dp_replicate == 1,
        f"{asked} is over one axis, and parallel.dp_replicate={parallel.dp_replicate} makes two; leave one "
        "of them out.",
    )
    require(
        config.optimizer.on_bad_step == "stop",
        f"{asked} with optimizer.on_bad_step=skip: when a step is known to be bad, what compression keeps "
        "has it already; leave one of them out.",
    )


def _check_compressed_displacements(chosen: DataParallel) -> None:
    """Of replicas that do not meet in every step."""
    asked = f"data_parallel.method={chosen.method} with data_parallel.compression={chosen.compression}"
    require(
        not chosen.members,
        f"{asked} and data_parallel.members, whose replicas send displacements as they are; leave "
        "compression out.",
    )
    require(
        chosen.compression != "power_sgd",
        f"{asked}, which is of matrices, and displacements travel in runs; use "
        f"{' or '.join(COMPRESSION_OF_RUNS)}.",
    )
    require(
        chosen.error_feedback,
        f"{asked} and data_parallel.error_feedback=false: what a round loses would never be sent; leave it "
        "on.",
    )
    require(
        chosen.compression_plan_every == 0,
        f"{asked} and data_parallel.compression_plan_every={chosen.compression_plan_every}, which is of the "
        "matrices of gradients; leave that out.",
    )
