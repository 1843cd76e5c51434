"""What a training run is told: frozen dataclasses, one per section of a TOML file.

Every field carries its unit in its docstring; `python -m pyruntime train --help` prints them. This module
needs nothing but the standard library, though importing it imports the package `pyruntime` and with that
torch. `pyruntime.train.config_file` reads these from TOML and the command line, `pyruntime.train.validate`
says what is wrong with them.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any, Literal

from pyruntime import choices
from pyruntime.text import short_repr
from pyruntime.train.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Model:
    """Which Llama is trained."""

    preset: str = ""
    """Name of the shape in pyruntime.llama.PRESETS; the fields below change single sizes of it. Empty: 3m, or
    the shape of init_from."""
    init_from: str = ""
    """Hugging Face Llama checkpoint to start from, which says the shape in place of a preset and the fields
    below; empty: random weights."""
    hidden_size: int | None = None
    """Width of the residual stream, in features; None: the preset's."""
    num_hidden_layers: int | None = None
    """Number of transformer layers; None: the preset's."""
    num_attention_heads: int | None = None
    """Number of query heads; divides hidden_size; None: the preset's."""
    num_key_value_heads: int | None = None
    """Number of key and value heads; divides num_attention_heads; None: the preset's."""
    intermediate_size: int | None = None
    """Width of the SwiGLU feed-forward network, in features; None: the preset's."""
    vocab_size: int | None = None
    """Size of the vocabulary, in tokens; None: the tokenizer's, up to a multiple of 128."""
    tie_word_embeddings: bool | None = None
    """Whether the head uses the embedding's weights; None: as in the preset."""
    rope_theta: float | None = None
    """Base of the rotary frequencies, without unit; None: the preset's."""


@dataclasses.dataclass(frozen=True)
class Data:
    """Which text is read and how it becomes tokens."""

    paths: tuple[str, ...] = ()
    """Files and folders of text, folders recursively, and folders that `python -m pyruntime tokenize` wrote;
    empty: the running Python's standard library, *.py. Of a .jsonl or .ndjson file every line is a document,
    of a .parquet or .arrow file every row, of others the whole file."""
    weights: tuple[float, ...] = ()
    """Share of the samples of each of paths, any positive numbers; empty: as many as they have."""
    val_paths: tuple[str, ...] = ()
    """Files and folders, as paths, each a further set to validate on, which goes by its name."""
    pattern: str = "*"
    """Only files of a folder whose name matches this shell pattern are read."""
    field: str = "text"
    """Key of a line's object, or column of a table, in which the text is."""
    tokenizer: str = ""
    """"bytes" (one token a byte, 256 tokens), or the path of a tokenizer.json, or of a folder with a Hugging
    Face tokenizer; empty: that of model.init_from, else that of the tokens in paths, else bytes."""
    cache: str = ""
    """Folder in which the tokens of a text are kept for other runs; empty: pyruntime/tokens in the user's
    cache folder (XDG_CACHE_HOME, ~/.cache)."""
    verify: bool = False
    """Whether tokens are read whole and compared with their digests before the first step; else their indices
    are, and a few blocks of each file."""
    val_fraction: float = 0.05
    """Share of the tokens that is held out for validation, above 0 and at most 0.5, in whole documents; 0
    with val_paths alone."""
    document_masks: bool = True
    """Whether attention sees a token's own document alone, of those that lie in one sequence."""


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """Who updates the weights, the learning rate, and which steps count."""

    name: choices.OptimizerName = "adamw"
    """Who updates the weights."""
    lr: float = 1e-3
    """Peak learning rate, in parameter units per step."""
    schedule: choices.RateSchedule = "cosine"
    """How the learning rate falls after the warm-up."""
    min_lr_fraction: float = 0.1
    """Learning rate at the last step, as a share of the peak, 0 to 1."""
    decay_fraction: float = 0.2
    """Share of the steps, the last ones, in which the learning rate of wsd falls, 0 to 1."""
    warmup_steps: int | None = None
    """Steps over which the learning rate rises linearly to its peak, or all where the run has fewer; None: as
    warmup_fraction says."""
    warmup_fraction: float | None = None
    """The same as a share of the steps, 0 to 1; None: 20 steps, or a tenth of all where that is less."""
    beta1: float = 0.9
    """Decay of the running mean of the gradient per step, 0 to below 1."""
    beta2: float = 0.95
    """Decay of the running mean of the squared gradient per step, 0 to below 1."""
    momentum: float = 0.95
    """Decay of Muon's running mean of the gradient per step, 0 to below 1."""
    eps: float = 1e-8
    """Added to the root of the mean squared gradient, in gradient units."""
    weight_decay: float = 0.1
    """Decoupled decay of matrices (vectors are left alone), in shares of the weight per unit of lr."""
    rounding: choices.Rounding = "nearest"
    """Of bf16 weights."""
    clip_grad_norm: float = 1.0
    """Largest global gradient norm, in gradient units; 0 turns clipping off."""
    on_bad_step: choices.OnBadStep = "stop"
    """What becomes of a step whose loss or gradient is not finite, or spikes."""
    spike_factor: float = 0.0
    """A gradient norm above so many times the mean of those of the 20 steps before that counted is a spike;
    0: none is."""


@dataclasses.dataclass(frozen=True)
class Train:
    """How long and on how much at a time."""

    steps: int = 200
    """Number of optimizer steps."""
    tokens: int = 0
    """Tokens to learn from, in place of steps: as many steps as reach them; 0: train.steps."""
    batch_size: int = 8
    """Sequences per optimizer step, over all micro-batches."""
    micro_batch_size: int = 8
    """Sequences per forward and backward pass of a rank; times dp it divides batch_size. The rest is gradient
    accumulation."""
    seq_len: int = 256
    """Tokens per sequence."""
    dtype: choices.Dtype = "bf16"
    """Type of weights, activations and gradients; for bf16 see optimizer.rounding."""
    device: choices.DeviceName = "auto"
    """Where the ranks compute."""
    activation_checkpointing: choices.Recomputation = "none"
    """What the backward pass computes again in place of keeping it (docs/figures/one-network.md)."""
    compile: bool = False
    """Have torch.compile make what a layer computes between its linears and attention (norms, rotary
    embedding, SwiGLU) of plain torch, in place of this project's kernels, which are faster on CPUs
    (docs/figures/one-network.md)."""
    z_loss: float = 0.0
    """Weight of the mean squared log-sum-exp of the logits, which training steps add to their loss so that
    logits do not drift, such as 1e-4; 0: none."""
    seed: int = 0
    """Seed of the weights, the batches and the sample; the same seed gives bitwise the same run."""
    val_every: int = 50
    """Steps between two validations; 0: only after the last step."""
    val_sequences: int = 64
    """Sequences of seq_len tokens, spread evenly over the held-out text, in one validation."""
    ledger: bool = False
    """Enter what every rank computes, waits for, reads and sends; the account of the last 20 steps is kept in
    RUN_DIR/ledger, for `python -m pyruntime report RUN_DIR`. Ranks on the CPU only."""
    profile: str = ""
    """Steps, "10-12" or "10", of which every rank writes a trace for ui.perfetto.dev,
    RUN_DIR/profile/rank-N.json (docs/how-to/measure-overlap.md); empty: none. `--profile 10-12` is short for
    it."""
    peak_flops: float | None = None
    """FLOP/s of one rank at its best, which MFU is a share of; None: a GPU's data sheet, where it is known,
    and of ranks on the CPU what GEMMs of dtype reach, which is measured as the run starts."""
    slow_every: int | None = None
    """Steps between two looks at which rank computes, and which link sends, slower than the others
    (docs/how-to/failures.md), at least 5; 0: none; None: 20, and none where ranks compute on devices, where
    the host does not see for how long."""
    check_types: bool = False
    """Check in every step that nothing which is a rank's own, or its term of a sum, is used as if all ranks
    had it alike (docs/explanation/correctness.md); slower."""
    threads: int = 0
    """CPU threads per rank; 0: what torchrun or OMP_NUM_THREADS set, else the cores divided by the ranks."""


@dataclasses.dataclass(frozen=True)
class Grid:
    """Axes of 4D tensor parallelism (docs/explanation/primitives.md), as {x = 2, y = 2, z = 2}."""

    x: int = 1
    """Ranks over which heads, feed-forward columns and the vocabulary are cut: what a plain number is."""
    y: int = 1
    """Ranks over which the residual stream's features are cut."""
    z: int = 1
    """Ranks over which sequences are dealt out, and weights cut into pieces as by ZeRO 3."""

    def __str__(self) -> str:
        sizes = ", ".join(f"{axis} = {size}" for axis, size in vars(self).items() if size != 1)
        return f"{{{sizes or 'x = 1'}}}"


@dataclasses.dataclass(frozen=True)
class Parallel:
    """How the model is spread over the ranks."""

    tp: int | Grid | None = None
    """Tensor-parallel ranks, with sequence parallelism, or {x = 2, y = 2, z = 2}, those of each axis of 4D
    tensor parallelism (docs/explanation/primitives.md); None: those that torchrun started, divided by the
    others."""
    pp: int = 1
    """Pipeline stages' ranks, which share the layers; the [pipeline] section says how they take turns."""
    cp: int = 1
    """Context-parallel ranks, which share every sequence; seq_len divides by twice as many (zigzag)."""
    dp: int = 1
    """Data-parallel ranks, which share the sequences of a step; pp * dp * cp * tp ranks are started."""
    zero: Literal[0, 1, 2, 3] = 1
    """What is cut over the data- and context-parallel ranks: 0 nothing, 1 and 2 optimizer states and
    gradients, 3 the weights too. With z in tp all of it is cut over z (3), and ranks of dp hold the same."""
    tp_slices: Literal["auto", 1, 2, 3, 4] = 1
    """Causal slices of every sequence inside a tensor-parallel group: one computes while the rows of another
    travel. auto is 2 where tensor-parallel ranks are on several hosts, sequences are not cut over ranks and
    nothing forbids it, else 1."""
    tp_wire: choices.WireFormat = "same"
    """What rows that tensor-parallel ranks gather, activations and gradients of them, are rounded to. All
    ranks compute with these; sums travel as they are."""
    rebalance: Literal["off", "on"] = "off"
    """on: where a rank of a pipeline stays slow, layers move between the stages when a checkpoint is saved
    (docs/how-to/failures.md), wherever they began (pipeline.layers). Ranks on the CPU only."""
    dp_replicate: int = 1
    """Groups of data-parallel ranks that each hold everything once (hybrid sharding); divides dp."""


@dataclasses.dataclass(frozen=True)
class DataParallel:
    """How data-parallel ranks exchange gradients (docs/how-to/slow-network.md), or how seldom they meet, for
    networks that cannot carry a gradient in every step. What is left out is as the method has it
    (docs/how-to/slow-network.md)."""

    method: choices.ReplicaMethod = "every_step"
    """How seldom ranks meet. In all but every_step replicas train alone, with a gradient norm of their own:
    parallel.dp_replicate of them, or where that is 1 as many as parallel.dp."""
    members: str = ""
    """Address (HOST:PORT) of `python -m pyruntime members`, where replicas come and go and this job is one of
    them; tau is then a number, and train.batch_size of one replica. Not of streaming_diloco. Empty: the
    replicas are ranks of this job."""
    tau: Literal["auto"] | int = "auto"
    """Steps between two meetings; auto, of co2 and overlapped_local_sgd: as few as hide the exchange, which
    is measured."""
    outer_lr: float | None = None
    """Outer learning rate, without unit."""
    outer_momentum: float | None = None
    """Outer momentum, 0 to below 1."""
    penalty: bool = True
    """Of co2: whether a displacement that is a round old counts less the further replicas have gone since."""
    clip: float | None = None
    """Of co2: largest absolute value of an element of the outer momentum, in parameter units; None: any."""
    pull: float | None = None
    """Of overlapped_local_sgd and streaming_diloco: how far replicas go to what they have in common, above 0
    to 1."""
    delay: int | None = None
    """Of streaming_diloco: steps behind which an exchange is hidden, below tau."""
    fragments: int | None = None
    """Of streaming_diloco: parts of the model, of whole layers, that meet in turn."""
    compression: choices.CompressionMethod = "none"
    """What gradients of matrices travel as. Of replicas that do not meet in every step it is of what they
    send each other, by quantize or top_k."""
    compression_bits: int = 4
    """Bits of a value that is quantised, 1 to 8."""
    compression_density: float = 0.01
    """Share of a matrix' values that travels, of top_k, above 0 and at most 1."""
    compression_rank: int = 4
    """Rank of what travels for a matrix, of power_sgd."""
    error_feedback: bool = True
    """Add what compression loses to the next gradient; false, of quantize: round at random instead, so that
    nothing is lost on average."""
    compression_plan_every: int = 0
    """Steps between two plans (L-GreCo) that give each matrix bits, a density or a rank of its own, in as few
    bytes as the error of one setting for all allows; 0: that one setting."""
    weight_wire: choices.WireFormat = "same"
    """What matrices are rounded to where ranks gather them for use (parallel.zero = 3). All ranks compute
    with the rounded values and update those that they keep."""


@dataclasses.dataclass(frozen=True)
class PipelineParallel:
    """In which order the stages of a pipeline compute; `python -m pyruntime schedule` draws them."""

    kind: choices.PipelineKind = "1f1b"
    """Schedule."""
    virtual: int = 1
    """Stages of a rank, of the interleaved schedule."""
    slices: int = 1
    """Parts that every sequence is cut into, of the sliced schedules, in tokens as equal as may be; 0: those
    that the file of `costs` found best."""
    slice_tokens: tuple[int, ...] = ()
    """Tokens of each slice, in order, as many as `slices` says; empty: as equal as may be."""
    layers: tuple[int, ...] = ()
    """Layers of each stage, in order; empty: shared out so that the stages take alike, by `costs`, or without
    by the GEMMs that layers and head compute."""
    wire: choices.WireFormat = "same"
    """What activations, and gradients of them, are rounded to between stages."""
    costs: str = ""
    """File that `python -m pyruntime profile --json` wrote for this model on this machine; empty: none."""


@dataclasses.dataclass(frozen=True)
class ContextParallel:
    """How sequences are spread over the context-parallel ranks."""

    layout: choices.ContextLayout = "zigzag"
    """Which tokens a rank holds."""
    variant: choices.ContextVariant = "ring"
    """How queries see the keys of other ranks."""
    wire: choices.WireFormat = "same"
    """Of the ring: what keys and values are rounded to, on all ranks alike. Their gradients travel as they
    are."""


@dataclasses.dataclass(frozen=True)
class Comm:
    """How the ranks talk to each other."""

    tier: choices.Tier = "chunked"
    """Tier of every parallel linear."""
    deadline_s: float = 120.0
    """Longest wait for a peer, in seconds; past it the run ends with an error that names the peer."""
    rings: tuple[str, ...] = ()
    """Orders of the tensor-parallel ranks, such as "0-1-3-2", in each of which a rank's GPU has a direct link
    to the next one's, and the last to the first: what is gathered goes around them. Empty: to each peer."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """What is kept on disk, below the run folder."""

    resume: str = ""
    """Run folder, or one of its checkpoints/step-N folders, to go on with; auto: the newest of output.run_dir
    that is whole, or start there, as a job needs that its launcher restarts; empty: start anew."""
    every_steps: int = 0
    """Steps between two resumable checkpoints; 0: only at the end."""
    keep: int = 2
    """Number of resumable checkpoints that are kept, newest first; at least 1. With 2 there is one to go on
    with where the newest is damaged."""
    keep_every_h: float = 0.0
    """Hours between those that are kept besides, for good; 0: none is."""
    save_on_stop: bool = True
    """Whether Ctrl-C or SIGTERM leaves a resumable checkpoint."""


@dataclasses.dataclass(frozen=True)
class Output:
    """What the run shows and writes."""

    run_dir: str = ""
    """Folder of metrics, plot and checkpoints; empty: runs/<configuration>-<n>, the first free n."""
    progress: choices.ProgressMode = "auto"
    """How steps are shown."""
    tensorboard: bool = False
    """Write what metrics.jsonl has of a step to RUN_DIR/tensorboard as well (extra tensorboard)."""
    wandb: str = ""
    """Project of Weights & Biases that is sent it as well, or with WANDB_MODE=offline keeps it in
    RUN_DIR/wandb (extra wandb); empty: none."""
    cluster: str = ""
    """TOML file of `plan --measure`, or the name of a known cluster, by which the planner predicts a step's
    seconds beside the measured ones, and against whose memory --dry_run judges the run; empty: neither."""
    log_every: int = 10
    """Steps between two printed lines where there is no bar (metrics.jsonl holds every step)."""
    sample_tokens: int = 200
    """Most tokens of the generated sample at the end (the model's positions may end it earlier); 0: none, as
    where no rank could hold the whole model. `python -m pyruntime generate` makes others."""


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Everything that decides a run."""

    model: Model = Model()
    data: Data = Data()
    optimizer: Optimizer = Optimizer()
    train: Train = Train()
    parallel: Parallel = Parallel()
    data_parallel: DataParallel = DataParallel()
    pipeline: PipelineParallel = PipelineParallel()
    context: ContextParallel = ContextParallel()
    comm: Comm = Comm()
    checkpoint: Checkpoint = Checkpoint()
    output: Output = Output()


GONE = {
    "comm.tuning": ("on", "comm.tier=chunked leaves what `python -m pyruntime tune` found alone"),
    "output.sample_prompt": ("def ", "`python -m pyruntime generate --prompt` continues any text"),
    "output.temperature": (0.8, "`python -m pyruntime generate --temperature` has one"),
    "parallel.slices": (1, "it is called parallel.tp_slices"),
}
"""Options of earlier versions: their defaults, which a configuration may still hold, and what to write."""


def why_gone(name: str) -> str:
    """A sentence, where `name` was an option once; else empty."""
    return f"{name} is no option any more: {GONE[name][1]}." if name in GONE else ""


def changed(config: RunConfig, names: str) -> list[tuple[str, Any, Any]]:
    """Of the options `names`, "section.key section.key", those that are not as they are by default: name,
    value, default."""
    found = []
    for name in names.split():
        section, key = name.split(".")
        value, usual = (getattr(getattr(each, section), key) for each in (config, RunConfig()))
        found += [(name, value, usual)] if value != usual else []
    return found


def ring_orders(comm: Comm) -> list[list[int]]:
    """Of comm.rings. Raises ValueError for what is no order of ranks."""
    return [[int(rank) for rank in order.split("-")] for order in comm.rings]


def steps_of(profile: str) -> range:
    """Of train.profile. Raises ValueError for what names no steps."""
    found = re.fullmatch(r"(\d{1,10})(?:-(\d{1,10}))?", profile, re.ASCII)
    steps = range(0) if found is None else range(int(found[1]), int(found[2] or found[1]) + 1)
    if not steps or steps[0] < 1:
        raise ValueError(f"{short_repr(profile)} names no steps; write them as 10, or 10-12.")
    return steps


def meets_every_step(config: RunConfig) -> bool:
    """Whether data-parallel ranks sum their gradients in every step."""
    return config.data_parallel.method == "every_step"


def replicas(config: RunConfig) -> int:
    """Groups of data-parallel ranks that each hold everything once: where they do not meet in every step,
    each rank unless parallel.dp_replicate says so. Where replicas come and go, of this one."""
    parallel = config.parallel
    if meets_every_step(config) or parallel.dp_replicate > 1 or config.data_parallel.members:
        return parallel.dp_replicate
    return parallel.dp


def micro_batches(config: RunConfig) -> int:
    """Forward and backward passes of a rank per optimizer step."""
    return config.train.batch_size // (config.train.micro_batch_size * config.parallel.dp)


@dataclasses.dataclass(frozen=True)
class MeshSizes:
    """Ranks on every axis of a run, as `Runtime.start` takes them."""

    pp: int = 1
    dp: int = 1
    """Replicas included."""
    dp_replicate: int = 1
    """Groups of data-parallel ranks that each hold everything once."""
    cp: int = 1
    tp: int = 1
    """Of two axes of tensor parallelism the first, x."""
    tp_y: int = 1

    @property
    def axes(self) -> dict[str, int]:
        """By the name of the axis, both of tensor parallelism as one, in the order of `Runtime.sizes`."""
        return {"pp": self.pp, "dp": self.dp, "cp": self.cp, "tp": self.tp * self.tp_y}

    @property
    def ranks(self) -> int:
        return math.prod(self.axes.values())


def mesh_of(config: RunConfig, world_size: int) -> MeshSizes:
    """The mesh of a configuration that `spelled_out` has made, on so many ranks. Where parallel.tp is None,
    tensor-parallel are those that the other axes leave."""
    asked = config.parallel
    others = {"pp": asked.pp, "dp": asked.dp, "dp_replicate": replicas(config), "cp": asked.cp}
    if isinstance(asked.tp, Grid):
        return MeshSizes(**others, tp=asked.tp.x, tp_y=asked.tp.y)
    return MeshSizes(**others, tp=asked.tp or max(1, world_size // (asked.pp * asked.cp * asked.dp)))


def with_pieces(config: RunConfig) -> RunConfig:
    """The same configuration with the axis z of parallel.tp written as what it is: ZeRO 3 over groups of z
    data-parallel ranks, of which there are parallel.dp. And {x = n} as the number n.

    Raises ConfigError where an axis has no ranks, or something else cuts weights or makes replicas.
    """
    parallel = config.parallel
    grid = parallel.tp
    if not isinstance(grid, Grid):
        return config
    if min(grid.x, grid.y, grid.z) < 1:
        raise ConfigError(f"parallel.tp={grid} must have at least 1 rank on each axis.")
    if grid.z > 1 and not meets_every_step(config):
        raise ConfigError(
            f"parallel.tp={grid}, whose ranks of z exchange gradients in every step, with "
            f"data_parallel.method={config.data_parallel.method}; leave z or the method out."
        )
    for name, value, usual in (
        ("zero", parallel.zero, (1, 3)),
        ("dp_replicate", parallel.dp_replicate, (1,)),
    ):
        if grid.z > 1 and value not in usual:
            raise ConfigError(
                f"parallel.{name}={value} with parallel.tp={grid}: weights, gradients and states are cut "
                "over z, and ranks of dp hold the same; leave it out."
            )
    parallel = dataclasses.replace(parallel, tp=grid.x if grid.y == 1 else Grid(grid.x, grid.y))
    if grid.z > 1:
        dp = parallel.dp
        parallel = dataclasses.replace(parallel, dp=dp * grid.z, dp_replicate=dp, zero=3)
    return dataclasses.replace(config, parallel=parallel)


def tokens_per_step(config: RunConfig) -> int:
    """Tokens that one optimizer step learns from."""
    return config.train.batch_size * config.train.seq_len


def with_steps(config: RunConfig) -> RunConfig:
    """The same configuration with train.tokens, where it is given, written as train.steps."""
    if not config.train.tokens:
        return config
    steps = -(-config.train.tokens // tokens_per_step(config))
    return dataclasses.replace(config, train=dataclasses.replace(config.train, steps=steps, tokens=0))


def spelled_out(config: RunConfig) -> RunConfig:
    """The same configuration with what stands for something else written as that. Raises ConfigError as
    `with_pieces` does."""
    return with_steps(with_pieces(config))


def warmup_steps(optimizer: Optimizer, steps: int) -> int:
    """Steps of the warm-up of a run of `steps`."""
    if optimizer.warmup_steps is not None:
        return min(optimizer.warmup_steps, steps)
    if optimizer.warmup_fraction is not None:
        return round(optimizer.warmup_fraction * steps)
    return min(20, steps // 10)


def learning_rate(step: int, steps: int, optimizer: Optimizer) -> float:
    """Learning rate of step `step` (from 1 to `steps`): linear warm-up to the peak, then downwards.

        step <= warmup:   lr * step / warmup
        later:            lr * (f + (1 - f) * left(p)),   p = (step - begin) / (steps - begin)

    with f = min_lr_fraction, so that step `warmup` has the peak and step `steps` has f times the peak.
    left(p) is (1 + cos(pi p)) / 2 for cosine (Loshchilov and Hutter 2017, equation 5, without restarts),
    1 - p for linear, both from begin = warmup on; for wsd 1 - sqrt(p) in the last decay_fraction of the
    steps, and 1 before (Haegele et al. 2024, arXiv 2405.18392).
    """
    begin = warmup_steps(optimizer, steps)
    if step <= begin:
        return optimizer.lr * step / begin
    if optimizer.schedule == "wsd":
        begin = max(begin, steps - round(optimizer.decay_fraction * steps))
        if step <= begin:
            return optimizer.lr
    progress = (step - begin) / (steps - begin)
    left = {
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
        "linear": 1 - progress,
        "wsd": 1 - math.sqrt(progress),
    }[optimizer.schedule]
    return optimizer.lr * (optimizer.min_lr_fraction + (1 - optimizer.min_lr_fraction) * left)
