"""`python -m pyruntime members`: the service that joins replicas which come and go into one run."""

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

DESCRIPTION = """Joins replicas that come and go into one run (docs/how-to/failures.md). It decides who is a
member of a round, when the round counts, and which sequences each replica takes. Start it once, outside of
all replicas, and each replica with --data_parallel.members HOST:PORT. It ends with the run. Whoever reaches
the port can take part: keep it inside a network that you trust."""

WHAT_FOLLOWS = (
    "before the run was over; its replicas end too. Start it again, and the replicas from their checkpoints."
)
"""The end of the sentence that an interrupted service prints."""


@dataclasses.dataclass(frozen=True)
class MembersOptions:
    replicas: int
    """Replicas that the first round waits for."""
    quorum: int = 0
    """Replicas that a round needs to count; 0: more than half of `replicas`."""
    deadline_s: float = 60.0
    """Seconds that a quorum which has ended a round waits for the next replica to end it; then it goes on
    without. Choose more than replicas differ by in a round. A replica that is silent for as long, and for at
    least 3 s, is removed at any time."""
    port: int = DEFAULT_PORT
    """TCP port to listen on; 0: any free one, which the first line names."""
    host: str = ""
    """Address to listen on; empty: all of this host."""
    record: str = ""
    """File that gets a line of JSON for every round and for every replica that comes or goes; empty: none."""


def main(argv: list[str]) -> None:
    options = parse(MembersOptions, argv, "members", DESCRIPTION)
    check_at_least(options, 1, "replicas")
    check_at_least(options, 0, "quorum", "port")
    if options.port > LARGEST_PORT:
        raise ConfigError(f"--port={options.port} is not a TCP port; use one up to {LARGEST_PORT}.")
    if options.host and not is_host(options.host):
        raise ConfigError(f"--host={options.host} is neither a host name nor an address; correct it.")
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
        raise ConfigError(f"{what} cannot be used: {error.strerror}; name another one.") from error
    try:
        say(f"members of a run of {options.replicas} replicas, quorum {quorum}, on port {service.port}")
        service.run()
    except Stopped as stopped:
        raise Stopped(stopped.signum, WHAT_FOLLOWS) from None
    finally:
        service.close()
