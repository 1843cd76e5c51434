"""Features of the residual stream cut over a second axis, y: what linears cannot do by themselves.

A group made of a mesh (x, y) gives linears, embeddings and norms both axes (AxoNN's 4D tensor parallelism,
Singh et al. 2023, arXiv 2305.13525). The third axis, z, cuts the same weights into pieces that are gathered
where they are used: `pyruntime.shard` at stage 3, over the ranks of z (docs/4d.md).
"""

from pyruntime.nn.grid.rms_norm import Normed, rms_norm

__all__ = ["Normed", "rms_norm"]
