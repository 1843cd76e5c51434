"""Shows what a rank waited for and which bytes were hidden behind what, as text and as an HTML page.

torchrun --nproc-per-node 2 examples/ledger.py
"""

import tempfile

import torch
from torch.nn import ReLU, Sequential

import pyruntime
from pyruntime.nn import ColumnParallelLinear, RowParallelLinear
from pyruntime.overlap import table, write_page

with pyruntime.Runtime.start() as runtime:
    up = ColumnParallelLinear(256, 1024, group=runtime.tp)
    mlp = Sequential(up, ReLU(), RowParallelLinear(1024, 256, group=runtime.tp))
    x = torch.randn(512, 256)  # this rank's rows
    mlp(x).sum().backward()  # sets up what the ranks share
    with pyruntime.ledger() as ledger:
        mlp(x).sum().backward()
    page = f"{tempfile.gettempdir()}/ledger.html"
    write_page(page, ledger, runtime)  # every rank calls it, rank 0 writes
    if runtime.rank == 0:
        print(table(ledger.account()), page, sep="\n")
