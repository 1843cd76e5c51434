"""What processes of a test are given; it imports little, as each of them imports it."""

import os
import signal

from pyruntime.train.errors import ConfigError


def squared(task: int) -> int:
    """3 is never done, 30 refused."""
    if task == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if task == 30:
        raise ConfigError("No thirty.")
    return task * task
