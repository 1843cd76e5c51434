"""Errors between ranks. Each message names op, group, rank, peer, chunk, and the values expected and seen."""


class CommError(RuntimeError):
    """A group cannot go on: its ranks are out of step since an earlier failure."""


class CommTimeout(CommError):
    """A peer did not answer within the deadline."""


class PeerLost(CommError):
    """A peer's process has ended."""
