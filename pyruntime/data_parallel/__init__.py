"""Data parallelism: gradients are sent while backward computes them, weights are gathered before they are
read, optimizer states are sharded.

The way of a gradient, file by file::

    nn/weight_sinks.py           the linears whose weight has a sink
    csrc/ops/weight_gradient.h   in backward, the sink gets (dY, X) instead of dW
    reducer.py                   GradientReducer: `_on_gemm` is that sink, `_on_gradient` autograd's hook for
                                 other parameters; `_leave` launches buckets in one order
    bucket_sum.py                launch: writes and publishes a bucket's chunks, sums them later (compressed:
                                 compression/compressor.py)
    csrc/ops/line_exchange.h     LineScatter, its reduce-scatter
    axes.py                      FlightAxis: at most three such flights under way; completes the oldest
    shard.py                     Sharded._hand_to_optimizer: this rank's rows of the sum
    optimizer.py                 ShardedOptimizer.take: now, ahead of the norm, or in step()
    update.py                    Update: AdamW's states of these rows (Muon: muon.py; in a file: offload.py)
    ops/layers.py                adamw_, adamw_ahead_
    csrc/cpu/layers/adamw.cpp    their kernel (on GPUs csrc/ops/device/device_adamw.cpp)
    weight_gathers.py            sends the new rows to the ranks that read them

With one rank, local.py takes the reducer's place and nothing is sent.
"""

from pyruntime.data_parallel.adamw import ShardedAdamW
from pyruntime.data_parallel.compression import Compression
from pyruntime.data_parallel.muon import Muon
from pyruntime.data_parallel.offload import Offload, OffloadError
from pyruntime.data_parallel.optimizer import NonFiniteGradient, ShardedOptimizer, StepReport
from pyruntime.data_parallel.shard import Sharded, shard

__all__ = [
    "Compression",
    "Muon",
    "NonFiniteGradient",
    "Offload",
    "OffloadError",
    "Sharded",
    "ShardedAdamW",
    "ShardedOptimizer",
    "StepReport",
    "shard",
]
