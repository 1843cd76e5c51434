"""Runs a command on several emulated hosts of this machine with slow links between them.

    python -m bench.netlab --hosts H --ranks-per-host R --rate 1gbit -- COMMAND ...

runs COMMAND once per rank, with torchrun's environment. Every host has its own network namespace, processes,
host name and /dev/shm. A bridge joins the hosts; each host's link carries `--rate` in each direction. It
needs root, or, where user namespaces are allowed, a command that begins with `unshare --user
--map-root-user`. Two hosts with two ranks each, behind 1 Gbit/s:

    sudo .venv/bin/python -m bench.netlab --hosts 2 --ranks-per-host 2 --rate 1gbit --counters bytes.json \\
        -- .venv/bin/python train.py

Rate, bytes and queues are those of such a network: TCP reaches at most 95.6 % of the rate (1448 of a frame's
1514 bytes), and messages queue for up to 10 ms. The rest is this machine: all hosts share its cores and
memory, and a round trip through an idle network takes 0.1 ms. Hosts reach only each other, so data and models
must be on the disk. Host 2 is host2, 10.77.0.3, on eth0. A rank finds its host's counters in
/proc/self/net/dev. `--rate-host 2=300mbit` gives host 2 a slower link. `--islands 0,2/1,3 --between 500mbit`
makes two networks, each with a link of 500 Mbit/s to the other.

`--fail` breaks something at a time after the start of all ranks; it may be given several times:

    --fail link:1@5s            the link of host 1 goes down after 5 s; link:1@5s+3s: comes back 3 s later
    --fail kill:rank2@5s        rank 2 gets SIGKILL
    --fail stop:rank1@5s+3s     rank 1 is stopped and continues 3 s later; without +3s it never does

With `--ready FILE` these times count from the creation of FILE, which a rank makes when all are at work.

The exit code is 0 if every rank's was. Otherwise it is that of the rank that failed first (128 + signal if a
signal ended it, also one of --fail), and a sentence on stderr names the rank. The other ranks then have
`--grace` to end by themselves before SIGTERM, and 5 s more before SIGKILL. Ctrl-C and SIGTERM are passed to
the ranks, which have the same time, and give 130 and 143. 127: COMMAND does not exist. 2: the options are
wrong, or root, namespaces or a tool are missing. 1: the network could not be set up. Nothing is left behind,
even after kill -9 of netlab.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from bench.netlab.network import Lab, NetworkError, missing
from bench.netlab.plan import Fault, Plan, parse_islands, parse_rate, parse_rate_of_host, parse_seconds
from bench.netlab.supervise import CannotStart, Interrupts, Run

USAGE = """python -m bench.netlab --hosts H --ranks-per-host R --rate RATE
       [--rate-host HOST=RATE] [--islands 0,2/1,3 --between RATE] [--fail FAULT] [--ready FILE]
       [--grace 30s] [--log-dir DIR] [--counters FILE] -- COMMAND ..."""


def sentence(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Wraps `parse` for argparse, which shows the sentence of only this kind of exception."""

    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def arguments(argv: list[str]) -> Plan:
    cut = argv.index("--") if "--" in argv else len(argv)
    options, command = argv[:cut], argv[cut + 1 :]
    parser = argparse.ArgumentParser(
        usage=USAGE,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--hosts", type=int, required=True, metavar="H")
    add("--ranks-per-host", type=int, required=True, metavar="R")
    add(
        "--rate",
        type=sentence(parse_rate),
        required=True,
        metavar="RATE",
        help="rate of every link, in kbit, mbit or gbit",
    )
    add(
        "--rate-host",
        type=sentence(parse_rate_of_host),
        action="append",
        default=[],
        metavar="HOST=RATE",
        dest="rate_of_host",
        help="rate of one host's link; may be repeated",
    )
    add(
        "--islands",
        type=sentence(parse_islands),
        default=(),
        metavar="HOSTS/HOSTS",
        help="hosts of each island, such as 0,2/1,3",
    )
    add(
        "--between",
        type=sentence(parse_rate),
        default=0,
        metavar="RATE",
        help="rate of the link between an island and the others",
    )
    add(
        "--fail",
        type=sentence(Fault.parse),
        action="append",
        default=[],
        metavar="FAULT",
        dest="faults",
        help="see above; may be repeated",
    )
    add("--ready", type=Path, metavar="FILE", help="count the times of --fail from its creation")
    add(
        "--grace",
        type=sentence(parse_seconds),
        default=30.0,
        metavar="TIME",
        dest="grace_s",
        help="time for the other ranks after a failure, before SIGTERM; default 30s",
    )
    add("--log-dir", type=Path, metavar="DIR", help="write rankN.out and rankN.err there instead of printing")
    add("--counters", type=Path, metavar="FILE", help="write the bytes over each host's link there, as JSON")
    given = vars(parser.parse_args(options))
    if not command:
        parser.error("COMMAND is missing; write -- and the command at the end, such as -- python train.py")
    try:
        return Plan.make(
            **given
            | {
                "rate_of_host": dict(given["rate_of_host"]),
                "faults": tuple(given["faults"]),
                "command": tuple(command),
            }
        )
    except ValueError as error:
        parser.error(str(error))


def fail(reason: str, code: int) -> NoReturn:
    print(f"bench/netlab: {reason}", file=sys.stderr)
    sys.exit(code)


def main() -> None:
    plan = arguments(sys.argv[1:])
    if lacking := missing():
        fail(lacking, 2)
    if shutil.which(plan.command[0]) is None:
        fail(f"there is no program {plan.command[0]!r}; give a path, or a name that PATH has.", 127)
    if plan.ready is not None and plan.ready.exists():
        fail(f"--ready {plan.ready} exists already, before any rank could make it; remove it.", 2)
    try:
        if plan.log_dir is not None:
            plan.log_dir.mkdir(parents=True, exist_ok=True)
        if plan.counters is not None:
            plan.counters.touch()  # to fail now rather than at the end
    except OSError as error:
        fail(f"--log-dir or --counters cannot be written: {error}; use another path.", 2)
    try:
        with Interrupts() as interrupts, Lab(plan.rates, plan.islands, plan.between) as lab:
            code = Run(plan, lab, interrupts).execute()
    except CannotStart as error:
        fail(str(error), error.code)
    except NetworkError as error:
        fail(f"the network could not be set up: {error}", 1)
    sys.exit(code)


if __name__ == "__main__":
    main()
