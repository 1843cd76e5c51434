"""`python -m pyruntime members`: the service that replicas which come and go are joined by."""

from __future__ import annotations

import dataclasses
import errno
from pathlib import Path

from pyruntime.cli.arguments import check_at_least, parse
from pyruntime.replicas.address import DEFAULT_PORT, LARGEST_PORT, is_host
from pyruntime.replicas.coordinator import Coordinator
from pyruntime.replicas.service import Service, say
from pyruntime.train.errors import ConfigError
from pyruntime.train.signals import Stopped
from pyruntime.train.validate import check_seconds

DESCRIPTION = """Joins replicas that come and go into one run (docs/how-to/failures.md): says who is a member
of a round, when it counts, and whose sequences it takes. Start it once, apart from all replicas, and them
with
--data_parallel.members HOST:PORT. It ends with the run. Whoever reaches the port can take part: keep it
inside a network that you trust."""

WHAT_FOLLOWS = (
    "before the run was over; its replicas end too. Start it again, and them from their checkpoints."
)
"""Of a service that is interrupted."""


@dataclasses.dataclass(frozen=True)
class MembersOptions:
    replicas: int
    """Replicas that the first round waits for."""
    quorum: int = 0
    """Replicas that a round needs to count; 0: more than half of `replicas`."""
    deadline_s: float = 60.0
    """Seconds that replicas which have ended a round wait for the next one to do so, where they are a quorum;
    past it they go on without. Above what replicas differ by in the seconds of a round. A replica of which
    nothing was heard for as long, and at least 3, is put out at any time."""
    port: int = DEFAULT_PORT
    """TCP port to listen on; 0: any that is free, which the first line names."""
    host: str = ""
    """Address to listen on; empty: every one of this host."""
    record: str = ""
    """File that gets a line of JSON for every round, and for every replica that comes or goes; empty:
    none."""


def main(argv: list[str]) -> None:
    options = parse(MembersOptions, argv, "members", DESCRIPTION)
    check_at_least(options, 1, "replicas")
    check_at_least(options, 0, "quorum", "port")
    if options.port > LARGEST_PORT:
        raise ConfigError(f"--port={options.port} is no TCP port; name one up to {LARGEST_PORT}.")
    if options.host and not is_host(options.host):
        raise ConfigError(f"--host={options.host} is no name of a host, and no number of one; correct it.")
    check_seconds("--deadline_s", options.deadline_s)
    quorum = options.quorum or options.replicas // 2 + 1
    if quorum > options.replicas:
        raise ConfigError(
            f"--quorum={quorum} is more than --replicas={options.replicas}; no round would count."
        )
    coordinator = Coordinator(options.replicas, quorum, options.deadline_s)
    record = Path(options.record) if options.record else None
    try:
        service = Service(coordinator, options.host, options.port, record, say)
    except OSError as error:
        what = f"--port={options.port}"
        if error.filename:
            what = f"--record {error.filename}"
        elif options.host and error.errno not in (errno.EADDRINUSE, errno.EACCES):
            what = f"--host={options.host}"
        raise ConfigError(f"{what} cannot be had: {error.strerror}; name another one.") from error
    try:
        say(f"members of a run of {options.replicas} replicas, quorum {quorum}, on port {service.port}")
        service.run()
    except Stopped as stopped:
        raise Stopped(stopped.signum, WHAT_FOLLOWS) from None
    finally:
        service.close()
