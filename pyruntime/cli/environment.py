"""Reads this process's rank and the number of ranks from torchrun's environment variables."""

from __future__ import annotations

import os

from pyruntime.train.errors import ConfigError, refusing


def started_rank() -> int:
    """Returns this process's rank; 0 without a launcher."""
    value = os.environ.get("RANK", "0")
    return int(value) if value.isdigit() else 0


def check_started() -> None:
    """Raises ConfigError if a launcher started several tasks that do not know of each other."""
    from pyruntime.comm.launcher import check_launcher

    with refusing():
        check_launcher(os.environ)


def started_ranks() -> int:
    """Returns how many ranks started, 1 without a launcher. Raises ConfigError for a wrong WORLD_SIZE."""
    value = os.environ.get("WORLD_SIZE", "1")
    if not value.isdigit() or int(value) < 1:
        raise ConfigError(
            f"WORLD_SIZE={value} is not a number of ranks; start this through torchrun, or unset it."
        )
    return int(value)
