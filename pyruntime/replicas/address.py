"""The address of the service of replicas that come and go; without torch."""

import ipaddress

DEFAULT_PORT = 29600
LARGEST_PORT = (1 << 16) - 1


def split_address(address: str) -> tuple[str, int]:
    """Splits HOST:PORT. Raises ValueError for another form."""
    host, _, port = address.rpartition(":")
    if not (is_host(host) and _is_port(port)):
        raise ValueError(f"{address!r} is no address; write HOST:PORT, such as host1:{DEFAULT_PORT}.")
    return host, int(port)


def is_host(text: str) -> bool:
    """Whether it can be a host's name or IP address."""
    try:
        return bool(text) and bool(text.encode("idna"))
    except UnicodeError:
        return False


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 5 and 0 < int(text) <= LARGEST_PORT


def is_loopback(host: str) -> bool:
    """Whether `host` is a loopback address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
