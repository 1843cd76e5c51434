"""Where the service of replicas that come and go listens; without torch."""

import ipaddress

DEFAULT_PORT = 29600
LARGEST_PORT = (1 << 16) - 1


def split_address(address: str) -> tuple[str, int]:
    """HOST:PORT. Raises ValueError for what is none."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) <= LARGEST_PORT:
        raise ValueError(f"{address!r} is no address; write HOST:PORT, such as host1:{DEFAULT_PORT}.")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether `host` is a number of the host that calls it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
