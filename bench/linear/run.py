"""Times tensor-parallel linears and their communication, next to bare GEMMs, no overlap, and DTensor.

    torchrun --nproc-per-node 2 -m bench.linear.run [--json FILE] [--shapes mlp:2048x2048x5632] [--dtype bf16]

A shape is KIND:MxHxI, M rows over all ranks; KIND is mlp (gate and up in one gather, SwiGLU, down), column
(W [I, H]) or row (W [H, I]).
Every result is checked against fp64 before it is timed.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

import pyruntime
from bench.common.limits import Figure, Held, Limits
from bench.common.measuring import Sample, cases_of, facts, interleave, parser_of, rounds_for, write_json
from bench.common.tables import table
from bench.linear.contenders import Ours, activation, bare_gemms, collectives, dtensor
from bench.linear.problem import DTYPES, Case, Operands, check

SHAPES = [f"mlp:{rows}x2048x5632" for rows in (128, 512, 2048, 8192)]
SHAPES += [f"{kind}:{rows}x2048x5632" for rows in (512, 2048) for kind in ("column", "row")]
WARM_UP = 2

HOW = """\
Figures are seconds of the slowest rank, medians over rounds. Within a round all variants run once, in
shuffled order, each started on all ranks at the same moment, on random data, in warm buffers. All keep freed
memory (pyruntime.keep_freed_memory).
  T_g  a rank's GEMMs alone, not split, on all ranks at once, without activation function:
       torch.mm into preallocated memory{onednn}
  T_c  the collectives that the case needs, alone: gloo's or pyruntime's, whichever is faster
       (backward: without the second gather of x, which a column linear needs if it did not keep the first)
  T_u  pyruntime, tier "unfused"
  T_o  pyruntime, tier "{tier}"; +- is half its interquartile range; the last column has the tiers that ran
  T_d  PyTorch DTensor over gloo, sequence-sharded ends, gate and up in one gather
  T_l  between hosts the loaded limit: T_g while as many bytes as ours sends pass unrelated
  act  SwiGLU alone, which T_u, T_o and T_d include
  wait share of T_o in which a rank waited, by the ledger, in separate turns
  R = T_o / max(T_g, T_c)      ECT = T_o - T_g      E = (T_g + T_c - T_o) / min(T_g, T_c)"""


@dataclass(frozen=True)
class Result:
    """One case in one direction: seconds, except R, E and tflops_per_rank."""

    shape: str
    dtype: str
    direction: str
    T_g: float
    T_c: float
    T_u: float
    T_o: float
    T_dtensor: float
    T_activation: float
    R: float
    ECT: float
    E: float
    tflops_per_rank: float
    spread_T_o: float
    tiers: str
    fastest_gemm: str
    fastest_collective: str
    limits: dict[str, Limits]
    peers: dict[str, Figure]
    worst_relative_error: float
    rounds: dict[str, list[float]]

    @classmethod
    def of(
        cls,
        case: Case,
        direction: str,
        samples: dict[str, Sample],
        limits: Limits,
        tiers: str,
        flops: float,
        error: float,
    ) -> Result:
        fastest = {
            kind: min(
                (name for name in samples if name.startswith(kind)), key=lambda name: samples[name].median
            )
            for kind in ("gemm ", "collective ")
        }
        gemm, collective = (samples[name].median for name in fastest.values())
        ours = samples["ours"].median
        return cls(
            shape=str(case),
            dtype=str(case.dtype).removeprefix("torch."),
            direction=direction,
            T_g=gemm,
            T_c=collective,
            T_u=samples["unfused"].median,
            T_o=ours,
            T_dtensor=samples["dtensor"].median,
            T_activation=samples["activation"].median if "activation" in samples else 0.0,
            R=ours / max(gemm, collective),
            ECT=ours - gemm,
            E=(gemm + collective - ours) / min(gemm, collective),
            tflops_per_rank=flops / gemm / 1e12,
            spread_T_o=samples["ours"].spread,
            tiers=tiers,
            fastest_gemm=fastest["gemm "].removeprefix("gemm "),
            fastest_collective=fastest["collective "].removeprefix("collective "),
            limits={"ours": limits},
            peers={"DTensor": Figure.of(samples["dtensor"])},
            worst_relative_error=error,
            rounds={name: list(sample.rounds) for name, sample in samples.items()},
        )


HEAD = ["shape", *("T_g ms", "T_c", "T_u", "T_o", "+-", "T_d", "act", "T_u/T_g", "T_o/T_g", "T_d/T_g")]
HEAD += ["R", "ECT ms", "E", "T_l", "T_o/T_l", "wait", "tiers"]


def row(result: Result) -> list[str]:
    """Returns a line of the table."""
    times = [result.T_g, result.T_c, result.T_u, result.T_o]
    limits = result.limits["ours"]
    return [
        f"{result.shape} {'fwd+bwd' if result.direction == 'forward_backward' else 'fwd'}",
        *(f"{seconds * 1e3:.2f}" for seconds in times),
        f"{result.spread_T_o:.1%}",
        *(f"{seconds * 1e3:.2f}" for seconds in (result.T_dtensor, result.T_activation)),
        *(f"{seconds / result.T_g:.3f}" for seconds in (result.T_u, result.T_o, result.T_dtensor)),
        f"{result.R:.3f}",
        f"{result.ECT * 1e3:.2f}",
        f"{result.E:.2f}",
        f"{limits.loaded.median * 1e3:.2f}" if limits.loaded else "",
        f"{limits.over_loaded.median:.3f}" if limits.over_loaded else "",
        f"{limits.waits.median:.1%}",
        result.tiers,
    ]


def measure(case: Case, mesh: DeviceMesh, tier: str, rounds: int, seconds: float) -> list[Result]:
    """Measures forward, and forward with backward, of one case."""
    operands = Operands.random(case, seed=case.rows)
    contenders = {
        "ours": Ours(case, operands, mesh, tier),
        "unfused": Ours(case, operands, mesh, "unfused"),
        "dtensor": dtensor(case, operands, mesh),
    }
    error = 0.0
    for name, contender in contenders.items():
        found = check(case, operands, contender.outcome(), mesh.get_local_rank(), mesh.size(), name)
        error = found if name == "ours" else error
    return [
        _time(case, operands, mesh, contenders, error, rounds, seconds, backward=backward)
        for backward in (False, True)
    ]


def _time(
    case: Case,
    operands: Operands,
    mesh: DeviceMesh,
    contenders: dict[str, Any],
    error: float,
    rounds: int,
    seconds: float,
    *,
    backward: bool,
) -> Result:
    direction = "forward_backward" if backward else "forward"
    variants = {name: getattr(contender, direction) for name, contender in contenders.items()}
    gemms = bare_gemms(case, operands, mesh, backward=backward)
    variants["gemm torch.mm"] = gemms.run
    if case.dtype == torch.float32 and torch.backends.mkldnn.is_available():
        variants["gemm oneDNN"] = gemms.run_onednn  # torch.mm uses another library in fp32
    for owner, run in collectives(case, mesh, backward=backward).items():
        variants[f"collective {owner}"] = run
    if run := activation(case, mesh, backward=backward):
        variants["activation"] = run

    def one_round() -> None:
        for variant in variants.values():
            variant()

    for _ in range(WARM_UP):
        one_round()
    variants["ours"]()  # a group's tier is known after its first op
    gemm_names, collective_names = (
        [name for name in variants if name.startswith(kind)] for kind in ("gemm ", "collective ")
    )
    held = Held(variants, "ours", gemm_names, collective_names)
    rounds = rounds_for(seconds, rounds, one_round)
    samples = interleave(variants, rounds, seed=case.rows)
    limits = held.limits(samples)
    tiers = contenders["ours"].tiers(backward=backward)
    flops = sum(2.0 * a.shape[0] * a.shape[1] * b.shape[1] for a, b in gemms.pairs)
    return Result.of(case, direction, samples, limits, tiers, flops, error)


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, rounds=7)
    parser.add_argument(
        "--shapes", nargs="+", default=SHAPES, metavar="KIND:MxHxI", help="default: %(default)s"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument(
        "--tier", choices=("auto", "chunked", "fused"), default="auto", help="of T_o; default %(default)s"
    )
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="more rounds if they fit into this time; default 10"
    )
    return parser.parse_args()


def main() -> None:
    args = arguments()
    cases = cases_of("bench/linear", lambda text: Case.parse(text, DTYPES[args.dtype]), args.shapes)
    torch.set_num_threads(1)
    pyruntime.keep_freed_memory()
    with pyruntime.Runtime.start() as runtime:
        where = facts()
        report(args, where, cases, runtime.tp.mesh, first=runtime.rank == 0)


def report(
    args: argparse.Namespace, where: dict[str, Any], cases: list[Case], mesh: DeviceMesh, *, first: bool
) -> None:
    """Measures on all ranks; rank 0 prints and writes."""

    def say(text: str) -> None:
        if first:
            print(text, flush=True)

    onednn = " or oneDNN's linear, whichever is faster" if args.dtype == "fp32" else ""
    how = HOW.format(onednn=onednn, tier=args.tier)
    say(where["machine"])
    say(
        f"{where['ranks']} ranks, {where['threads_per_rank']} thread each, {args.dtype}, "
        f"torch {where['versions']['torch']}, load {where['load_average_at_start']:.1f}, {where['date']}\n"
    )
    say(how + "\n")
    results: list[Result] = []
    for case in cases:
        results += measure(case, mesh, args.tier, args.rounds, args.seconds)
        say(f"{case}: {' and '.join(str(len(done.rounds['ours'])) for done in results[-2:])} rounds")
    say("\n" + table(HEAD, [row(result) for result in results]))
    if args.json and first:
        write_json(args.json, where, {**vars(args), "how": how}, [asdict(result) for result in results])


if __name__ == "__main__":
    main()
