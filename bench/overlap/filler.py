"""Compares weight gradients computed in place and during waits of the backward pass, in one run.

    python -m bench.netlab --hosts 2 --ranks-per-host 1 --rate 160mbit -- python -m bench.overlap.filler

A shape is mlp:MxHxI, as in bench/linear; `--blocks` of them follow each other. Every rank's gradients are
compared bit by bit before the timing."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bench.common.measuring import Report, interleave, parser_of, started
from bench.linear.contenders import Ours, bare_gemms, collectives
from bench.linear.problem import DTYPES, Case, Operands
from pyruntime import comm

HOW = """\
Seconds of the slowest rank, medians over rounds in shuffled order; forward and backward.
  T_g      the GEMMs of a rank alone, torch.mm
  T_c      the collectives alone: gloo's or pyruntime's, whichever is faster
  in place gradients of torch.autograd.grad(), which must be complete when it returns
  filled   gradients of backward()
  R = T / max(T_g, T_c); waits: share of rank 0's time"""


class Blocks:
    """MLPs, one after the other."""

    def __init__(self, case: Case, count: int, mesh):
        operands = Operands.random(case, seed=1)
        made = [Ours(case, operands, mesh, "chunked") for _ in range(count)]
        self.module = nn.Sequential(*(each.module for each in made))
        self.x, self.dy = made[0].x, made[0].dy
        self.group = mesh
        self.waited = {"in place": 0.0, "filled": 0.0}

    def run(self, name: str) -> list[Tensor]:
        leaves = [self.x, *self.module.parameters()]
        for leaf in leaves:
            leaf.grad = None
        before = comm.stats(self.group).waiting_s
        y = self.module(self.x)
        if name == "filled":
            y.backward(self.dy)
            found = [leaf.grad for leaf in leaves]
        else:
            found = list(torch.autograd.grad(y, leaves, self.dy))
        self.waited[name] += comm.stats(self.group).waiting_s - before
        return found


def main() -> None:
    parser = parser_of(__doc__, rounds=15)
    parser.add_argument("--shape", default="mlp:512x1024x2816", help="default %(default)s")
    parser.add_argument("--blocks", type=int, default=1, help="default %(default)s")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="default %(default)s")
    args = parser.parse_args()
    with started({"tp": -1}) as runtime:
        report = Report(args, HOW)
        case = Case.parse(args.shape, DTYPES[args.dtype])
        blocks = Blocks(case, args.blocks, runtime.tp.mesh)
        one, other = blocks.run("in place"), blocks.run("filled")
        if not all(torch.equal(a, b) for a, b in zip(one, other, strict=True)):
            raise SystemExit("Gradients that are computed later have other bits.")
        gemms = bare_gemms(case, Operands.random(case, seed=1), runtime.tp.mesh, backward=True)
        alone = collectives(case, runtime.tp.mesh, backward=True)
        blocks.waited = dict.fromkeys(blocks.waited, 0.0)
        variants = {name: (lambda name=name: blocks.run(name)) for name in blocks.waited}
        variants["gemms"] = lambda: [gemms.run() for _ in range(args.blocks)]
        for owner, run in alone.items():
            variants[f"collective {owner}"] = lambda run=run: [run() for _ in range(args.blocks)]
        samples = interleave(variants, args.rounds, seed=1)
        t_g = samples["gemms"].median
        t_c = min(sample.median for name, sample in samples.items() if name.startswith("collective"))
        seconds = {name: samples[name].median for name in blocks.waited}
        lines = [f"{case}, {args.blocks} blocks, {args.dtype}: T_g {t_g * 1e3:.1f} ms, T_c {t_c * 1e3:.1f}"]
        for name, took in seconds.items():
            waits = blocks.waited[name] / args.rounds / took
            lines.append(
                f"{name:<10}{took * 1e3:>9.1f} ms  R {took / max(t_g, t_c):.3f}  waits {waits:.1%}"
                f"  +- {samples[name].spread:.1%}"
            )
        rounds = {name: list(sample.rounds) for name, sample in samples.items()}
        report.add({"T_g": t_g, "T_c": t_c, **seconds, "rounds": rounds}, "\n".join(lines))
        report.write(args.json)


if __name__ == "__main__":
    main()
