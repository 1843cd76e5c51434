"""Failures that a run foresees; the command line turns each into one sentence."""


class ConfigError(ValueError):
    """What was asked for is impossible: the command line exits with 2. The message is one sentence."""


class TrainingError(RuntimeError):
    """Training cannot go on: the command line exits with 1. The message is one sentence."""
