"""Where the service of replicas that come and go listens; without torch."""

DEFAULT_PORT = 29600


def split_address(address: str) -> tuple[str, int]:
    """HOST:PORT. Raises ValueError for what is none."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"{address!r} is no address; write HOST:PORT, such as host1:{DEFAULT_PORT}.")
    return host, int(port)
