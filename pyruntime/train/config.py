"""The options of a training run: frozen dataclasses, one for each section of a TOML file.

Every field states its unit in its docstring; `python -m pyruntime train --help` prints these docstrings. The
module uses only the standard library, but importing it imports the package `pyruntime` and so torch.
`pyruntime.train.config_file` reads the options from TOML and the command line; `pyruntime.train.validate`
checks them.
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
    """The Llama model to train."""

    preset: str = ""
    """Name of a shape in pyruntime.llama.PRESETS; the fields below override single sizes of it. Empty: 3m, or
    the shape of init_from."""
    init_from: str = ""
    """Hugging Face checkpoint of a Llama or a relative (docs/how-to/finetune.md) to start from; it sets the
    shape in place of preset and the fields below. Empty: random weights."""
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
    """Size of the vocabulary, in tokens; None: the tokenizer's, rounded up to a multiple of 128."""
    tie_word_embeddings: bool | None = None
    """Whether the head uses the embedding's weights; None: as in the preset."""
    rope_theta: float | None = None
    """Base of the rotary frequencies, dimensionless; None: the preset's."""
    qk_norm: bool | None = None
    """Whether the features of every query and key head are normalised, as in Qwen3; None: as in the
    preset."""
    experts: int | None = None
    """Experts of a layer, which take the place of its feed-forward network and are spread over parallel.ep
    ranks (docs/how-to/train-experts.md). 0: none. None: the preset's."""
    experts_per_token: int | None = None
    """Experts that a token goes to; None: the preset's, else 2."""
    expert_size: int | None = None
    """Width of an expert, in features; None: the preset's, else intermediate_size."""
    shared_expert_size: int | None = None
    """Width of an expert that all tokens go to, in features. 0: none. None: the preset's."""
    dense_layers: int | None = None
    """The first layers, which have one feed-forward network of intermediate_size in place of experts; None:
    the preset's."""
    norm_topk_prob: bool | None = None
    """Whether the weights of a token's experts, softmax over all of them, are divided by their sum; None: as
    in the preset, else true."""
    sigmoid_router: bool | None = None
    """Whether experts are chosen by sigmoids with a bias that train.router_bias_rate moves (DeepSeek-V3), not
    by a softmax; with a shared expert, and qk_norm or the preset's latent attention. None: as in the preset,
    else false."""
    expert_groups: int | None = None
    """With sigmoid_router, groups of experts, of which a token goes only to the best; None: the preset's,
    else 1."""
    expert_groups_per_token: int | None = None
    """Groups that a token may go to; None: the preset's, else 1."""
    routed_scaling_factor: float | None = None
    """With sigmoid_router, factor of the weights of a token's experts; None: the preset's, else 1."""


@dataclasses.dataclass(frozen=True)
class Data:
    """The text to read, and how it becomes tokens."""

    paths: tuple[str, ...] = ()
    """Text files, folders of text (read recursively), and folders written by `python -m pyruntime tokenize`;
    empty: the *.py files of the running Python's standard library. A document is a line of a .jsonl or
    .ndjson file, a row of a .parquet or .arrow file, or the whole of any other file."""
    weights: tuple[float, ...] = ()
    """Share of the samples that each of paths gets, any positive numbers; empty: in proportion to their
    size."""
    val_paths: tuple[str, ...] = ()
    """More files and folders, as in paths. Each is a validation set of its own, called by its name."""
    pattern: str = "*"
    """Shell pattern; in folders only files whose name matches it are read."""
    field: str = "text"
    """Key (.jsonl) or column (tables) that holds the text. Files without it may hold conversations
    (docs/how-to/finetune.md)."""
    targets: choices.LearnedTurns = "all"
    """Turns of a conversation whose tokens are learned."""
    chat_template: str = ""
    """File of the chat template (Jinja) that renders conversations; empty: that in the tokenizer's folder."""
    tokenizer: str = ""
    """Path of a tokenizer.json or of a folder with a Hugging Face tokenizer, or "bytes" (one token a byte,
    256 tokens). Empty: the tokenizer of model.init_from; else that of the tokens in paths; else bytes."""
    cache: str = ""
    """Folder that keeps the tokens of a text for other runs; empty: pyruntime/tokens in the user's cache
    folder (XDG_CACHE_HOME, ~/.cache)."""
    verify: bool = False
    """Whether all token files are read and compared with their digests before the first step. If false, only
    their indices and a few blocks of each file are."""
    val_fraction: float = 0.05
    """Share of the tokens held out for validation, in whole documents: above 0 and at most 0.5. It may be 0
    only with val_paths."""
    document_masks: bool = True
    """Whether a token attends only to its own document when a sequence holds several."""


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """The optimizer, the learning rate, and which steps count."""

    name: choices.OptimizerName = "adamw"
    """The optimizer."""
    lr: float = 1e-3
    """Peak learning rate, in parameter units per step."""
    schedule: choices.RateSchedule = "cosine"
    """Decay of the learning rate after the warm-up."""
    min_lr_fraction: float = 0.1
    """Learning rate at the last step, as a share of the peak, 0 to 1."""
    decay_fraction: float = 0.2
    """Share of the steps, 0 to 1, at the end of the run, in which the learning rate of wsd falls."""
    warmup_steps: int | None = None
    """Steps over which the learning rate rises linearly to its peak, at most all steps; None: set by
    warmup_fraction."""
    warmup_fraction: float | None = None
    """The warm-up as a share of the steps, 0 to 1; None: 20 steps, or a tenth of the steps if that is
    less."""
    beta1: float = 0.9
    """Decay per step of the running mean of the gradient, from 0 to below 1."""
    beta2: float = 0.95
    """Decay per step of the running mean of the squared gradient, from 0 to below 1."""
    momentum: float = 0.95
    """Decay per step of Muon's running mean of the gradient, from 0 to below 1."""
    eps: float = 1e-8
    """Added to the root of the mean squared gradient, in gradient units."""
    weight_decay: float = 0.1
    """Decoupled decay of matrices (not of vectors), as a share of the weight per unit of lr."""
    rounding: choices.Rounding = "nearest"
    """Rounding of bf16 weights in the update."""
    offload: choices.Offloading = "none"
    """Optimizer states that lie elsewhere than the weights (docs/how-to/zero.md). Not with Muon, nor with
    replicas that synchronize rarely."""
    offload_dir: str = ""
    """Folder, best on a local disk, of the file in which a CPU rank keeps these states while it runs; empty:
    the run folder."""
    clip_grad_norm: float = 1.0
    """Largest global gradient norm, in gradient units; 0 turns clipping off."""
    on_bad_step: choices.OnBadStep = "stop"
    """Reaction to a step whose loss or gradient is not finite, or spikes."""
    spike_factor: float = 0.0
    """A step is a spike if its gradient norm exceeds this factor times the mean norm of the last 20 steps
    that counted. 0: never."""


@dataclasses.dataclass(frozen=True)
class Lora:
    """Low-rank adapters (LoRA), which train in place of the model's weights (docs/how-to/finetune.md)."""

    rank: int = 0
    """Columns of an adapter's matrices, such as 16; 0: no adapters, all weights train."""
    alpha: float = 32.0
    """Scale of the adapters, dimensionless: an adapter counts alpha / rank times."""
    targets: tuple[str, ...] = choices.LORA_TARGETS
    """Linears of the layers that get an adapter, by peft's names."""
    rslora: bool = False
    """Whether an adapter counts alpha / sqrt(rank) times instead (arXiv 2312.03732)."""
    init_from: str = ""
    """Folder with adapters in peft's format to start from; rank, alpha and targets must be theirs. Empty: new
    adapters, which begin without effect."""


@dataclasses.dataclass(frozen=True)
class Dpo:
    """Direct preference optimization (DPO, arXiv 2305.18290), which learns from pairs of a chosen and a
    rejected answer (docs/how-to/finetune.md)."""

    beta: float = 0.0
    """How strongly the model is held to the reference, such as 0.1; the loss is equation 7 of the paper.
    0: no DPO."""
    reference: str = ""
    """File of the reference's log-probabilities, written if it does not exist. The reference is the model as
    the run begins, without adapters. Empty: RUN_DIR/reference.safetensors."""


@dataclasses.dataclass(frozen=True)
class Train:
    """The length of the run, the batch, and how ranks compute."""

    steps: int = 200
    """Number of optimizer steps."""
    tokens: int = 0
    """Tokens to learn from, in place of steps: the run takes as many steps as they need; 0: train.steps."""
    batch_size: int = 8
    """Sequences per optimizer step, over all micro-batches."""
    micro_batch_size: int = 8
    """Sequences per forward and backward pass of a rank. This times dp divides batch_size; the quotient is
    the number of passes whose gradients are accumulated."""
    micro_batches: tuple[int, ...] = ()
    """Micro-batches of each data-parallel rank in a step, for ranks of unequal speed; empty: equal
    numbers."""
    seq_len: int = 256
    """Tokens per sequence."""
    dtype: choices.Dtype = "bf16"
    """Type of weights, activations and gradients; for bf16 see optimizer.rounding."""
    device: choices.DeviceName = "auto"
    """Device of the ranks."""
    activation_checkpointing: choices.Recomputation = "none"
    """Activations that the backward pass computes again instead of keeping them
    (docs/figures/one-network.md)."""
    compile: bool = False
    """Compile with torch.compile what a layer computes between its linears and attention (norms, rotary
    embedding, SwiGLU), in place of this project's kernels, which are faster on CPUs
    (docs/figures/one-network.md)."""
    z_loss: float = 0.0
    """Weight of the mean squared log-sum-exp of the logits, which training adds to the loss so that logits do
    not drift; 1e-4, for example. 0: none."""
    balance_loss: float = 0.01
    """Weight of the loss that spreads tokens evenly over experts, for each layer that has some; it is 1 where
    they are spread evenly. It counts the tokens of all ranks of a micro-batch. 0: none."""
    router_z_loss: float = 0.0
    """Weight of the mean squared log-sum-exp of the routers' logits, for each layer with experts; 1e-3, for
    example. 0: none."""
    router_bias_rate: float = 0.001
    """With model.sigmoid_router: by how much an expert's bias, beside scores from 0 to 1, moves in a step
    towards an even load (arXiv 2408.15664). 0: it stays."""
    seed: int = 0
    """Seed of the weights, the batches and the sample. The same seed gives bitwise the same run."""
    val_every: int = 50
    """Steps between two validations; 0: only after the last step."""
    val_sequences: int = 64
    """Sequences of seq_len tokens in one validation, spread evenly over the held-out text."""
    patience: int = 0
    """Validations in a row without a lower loss after which the run ends; 0: it takes all steps."""
    ledger: bool = False
    """Record what every rank computes, waits for, reads and sends. The last 20 steps are kept in
    RUN_DIR/ledger for `python -m pyruntime report RUN_DIR`."""
    profile: str = ""
    """Steps to trace, "10-12" or "10": every rank writes RUN_DIR/profile/rank-N.json for ui.perfetto.dev
    (docs/how-to/measure-overlap.md). Empty: none. Short form: `--profile 10-12`."""
    peak_flops: float | None = None
    """Peak FLOP/s of one rank, the denominator of MFU. None: a known GPU's data sheet; on CPU ranks, the rate
    of GEMMs of dtype measured at the start."""
    slow_every: int | None = None
    """Steps between two looks for a rank that computes, or a link that sends, slower than the others
    (docs/how-to/failures.md), at least 5; 0: none. None: 20."""
    check_types: bool = False
    """Check in every step that tensors which differ between ranks, or are partial sums, are not used as if
    all ranks had the same (docs/explanation/correctness.md); slower."""
    threads: int = 0
    """CPU threads per rank; 0: as torchrun or OMP_NUM_THREADS set, else the cores divided by the ranks."""


@dataclasses.dataclass(frozen=True)
class Grid:
    """Axes of 4D tensor parallelism (docs/explanation/primitives.md), as {x = 2, y = 2, z = 2}."""

    x: int = 1
    """Ranks that share heads, feed-forward columns and the vocabulary. A plain number for tp is this axis."""
    y: int = 1
    """Ranks that share the features of the residual stream."""
    z: int = 1
    """Ranks that share the sequences, and keep shards of the weights as ZeRO 3 does."""

    def __str__(self) -> str:
        sizes = ", ".join(f"{axis} = {size}" for axis, size in vars(self).items() if size != 1)
        return f"{{{sizes or 'x = 1'}}}"


@dataclasses.dataclass(frozen=True)
class Parallel:
    """Sizes of the axes over which the model is spread."""

    tp: int | Grid | None = None
    """Tensor-parallel ranks, with sequence parallelism; or {x = 2, y = 2, z = 2}, the axes of 4D tensor
    parallelism (docs/explanation/primitives.md). None: the ranks that torchrun started, divided by the other
    axes."""
    pp: int = 1
    """Pipeline ranks, which share the layers. The section [pipeline] sets their schedule."""
    cp: int = 1
    """Context-parallel ranks, which share every sequence. With zigzag, 2 * cp divides seq_len."""
    dp: int = 1
    """Data-parallel ranks, which share the sequences of a step. The job has pp * dp * cp * tp ranks."""
    ep: int | None = None
    """Expert-parallel ranks, which share the experts: any number that divides tp * cp * dp
    (docs/how-to/train-experts.md). None: the tensor-parallel ranks."""
    zero: Literal[0, 1, 2, 3] = 1
    """ZeRO stage over the data- and context-parallel ranks: 0 cuts nothing, 1 and 2 optimizer states and
    gradients, 3 also the weights. If tp has z, all of it is cut over z (3) and replicated over dp."""
    tp_slices: Literal["auto", 1, 2, 3, 4] = 1
    """Causal slices of every sequence: one computes while the rows of another travel to tensor-parallel ranks
    or to experts. auto: 2 if tensor-parallel ranks are on several hosts, or on devices if they are 8 or more,
    or an expert gets 4096 rows of a micro-batch (bf16 on Hopper: 1024), with selective recomputation or tp 1;
    else, and where it is forbidden or sequences are cut over ranks, 1."""
    tp_wire: choices.WireFormat = "same"
    """Rounding of the rows (activations and their gradients) that tensor-parallel ranks gather. All ranks
    compute with the rounded values. Sums are not rounded."""
    tp_speeds: tuple[float, ...] = ()
    """Relative speeds of the tensor-parallel ranks, which hold heads, MLP features and vocabulary in
    proportion, as 1 0.5 (docs/how-to/failures.md). Empty: equal parts."""
    hosts: choices.HostOrder = "started"
    """Order in which hosts fill the mesh."""
    rebalance: Literal["off", "on"] = "off"
    """on: if a rank stays slow, work moves away from it when a checkpoint is saved
    (docs/how-to/failures.md): layers of a pipeline, whatever pipeline.layers says; else micro-batches,
    whatever train.micro_batches says; with dp=1 parts of layers of the tensor-parallel ranks, whatever
    tp_speeds says."""
    dp_replicate: int = 1
    """Groups of data-parallel ranks that each hold a whole copy of the model (hybrid sharding); divides
    dp."""


@dataclasses.dataclass(frozen=True)
class DataParallel:
    """Exchange of gradients between data-parallel ranks, or of displacements between replicas that
    synchronize rarely, for slow networks (docs/how-to/slow-network.md). An option left out takes the method's
    default."""

    method: choices.ReplicaMethod = "every_step"
    """Rule by which replicas synchronize. With all methods except every_step they train separately, each with
    its own gradient norm. Their number is parallel.dp_replicate if it is above 1, else parallel.dp."""
    members: str = ""
    """Address (HOST:PORT) of `python -m pyruntime members`, if replicas may join and leave and this job is
    one of them. tau is then a number and train.batch_size is per replica. Not with streaming_diloco. Empty:
    the replicas are ranks of this job."""
    tau: Literal["auto"] | int = "auto"
    """Steps between two synchronizations. auto (co2 and overlapped_local_sgd): the exchange is measured, and
    the smallest number that hides it is used."""
    outer_lr: float | None = None
    """Outer learning rate, dimensionless."""
    outer_momentum: float | None = None
    """Outer momentum, from 0 to below 1."""
    penalty: bool = True
    """co2: whether a displacement that is one round old counts less, the further replicas have moved
    since."""
    clip: float | None = None
    """co2: largest absolute value of an element of the outer momentum, in parameter units; None: no limit."""
    pull: float | None = None
    """overlapped_local_sgd and streaming_diloco: how far replicas move to their common parameters, above 0
    and at most 1."""
    delay: int | None = None
    """streaming_diloco: steps that hide an exchange; less than tau."""
    fragments: int | None = None
    """streaming_diloco: number of parts of the model, in whole layers, that synchronize in turn."""
    compression: choices.CompressionMethod = "none"
    """Compression of matrix gradients. If replicas do not synchronize in every step, quantize or top_k
    compresses what they send each other instead."""
    compression_bits: int = 4
    """quantize: bits of a value, 1 to 8."""
    compression_density: float = 0.01
    """top_k: share of a matrix's values that is sent, above 0 and at most 1."""
    compression_rank: int = 4
    """power_sgd: rank of the approximation of a matrix."""
    error_feedback: bool = True
    """Add what compression loses to the next gradient. If false (quantize only), values are rounded at
    random, so that nothing is lost on average."""
    compression_plan_every: int = 0
    """Steps between two plans (L-GreCo), which give each matrix bits, a density or a rank of its own: the
    fewest bytes for the error of one setting for all. 0: one setting for all."""
    weight_wire: choices.WireFormat = "same"
    """Rounding of matrices when ranks gather them for use (parallel.zero = 3). All ranks compute with the
    rounded values; updates change the unrounded shards."""


@dataclasses.dataclass(frozen=True)
class PipelineParallel:
    """The order in which pipeline stages compute; `python -m pyruntime schedule` draws it."""

    kind: choices.PipelineKind = "1f1b"
    """Schedule."""
    virtual: int = 1
    """interleaved: stages per rank."""
    slices: int = 1
    """Sliced schedules: parts of every sequence, with token counts as equal as possible. 0: the slices that
    the file of `costs` found best."""
    slice_tokens: tuple[int, ...] = ()
    """Tokens of each slice, in order, one number per slice; empty: as equal as possible."""
    layers: tuple[int, ...] = ()
    """Layers of each stage, in order. Empty: balanced by `costs`, or without it by the GEMMs of layers and
    head."""
    skip: int = 0
    """1f1b: stages between the first and the last that every micro-batch leaves out
    (docs/how-to/long-sequences-and-pipelines.md). It changes the model that is trained; validation and
    generation use all layers. 0: none."""
    speeds: tuple[float, ...] = ()
    """1f1b with data parallelism: relative speeds of the pp * dp replicas of stages, those of the first stage
    first. A micro-batch then goes to the replica of each stage that would end it first
    (docs/how-to/failures.md). Empty, or equal in each stage: fixed columns."""
    wire: choices.WireFormat = "same"
    """Rounding of activations and their gradients between stages."""
    costs: str = ""
    """File that `python -m pyruntime profile --json` wrote for this model on this machine; empty: none."""


@dataclasses.dataclass(frozen=True)
class ContextParallel:
    """Distribution of sequences over the context-parallel ranks."""

    layout: choices.ContextLayout = "zigzag"
    """Assignment of tokens to ranks."""
    variant: choices.ContextVariant = "ring"
    """Path by which queries reach the keys of other ranks."""
    wire: choices.WireFormat = "same"
    """ring: rounding of keys and values, the same on all ranks. Their gradients are not rounded."""


@dataclasses.dataclass(frozen=True)
class Comm:
    """Communication between the ranks."""

    tier: choices.Tier = "chunked"
    """Tier (docs/reference/glossary.md) of every parallel linear."""
    deadline_s: float = 120.0
    """Longest wait for a peer, in seconds; after it the run ends with an error that names the peer."""
    rings: tuple[str, ...] = ()
    """Orders of the tensor-parallel ranks, such as "0-1-3-2", in each of which every GPU has a direct link to
    the next, and the last to the first. Gathered rows travel along these rings. Empty: directly to each
    peer."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Checkpoints below the run folder, and the one to resume from."""

    resume: str = ""
    """Run folder, or one of its checkpoints/step-N folders, to resume from. auto: the newest whole checkpoint
    of output.run_dir, or a fresh start if there is none, for jobs that a launcher restarts. Empty: a fresh
    start."""
    every_steps: int = 0
    """Steps between two resumable checkpoints; 0: only at the end."""
    keep: int = 2
    """Number of newest resumable checkpoints to keep, at least 1. With 2, a run can still resume if the
    newest is damaged."""
    keep_every_h: float = 0.0
    """Hours between checkpoints that are also kept, for good; 0: none."""
    keep_best: bool = False
    """Whether each validation with a lower loss than all before leaves a checkpoint, of which the best is
    kept and becomes RUN_DIR/model."""
    save_on_stop: bool = True
    """Whether Ctrl-C or SIGTERM leaves a resumable checkpoint."""


@dataclasses.dataclass(frozen=True)
class Output:
    """Files and lines that the run writes."""

    run_dir: str = ""
    """Folder of metrics, plot and checkpoints; empty: runs/<configuration>-<n>, the first free n."""
    progress: choices.ProgressMode = "auto"
    """Display of the steps."""
    tensorboard: bool = False
    """Also write the figures of metrics.jsonl to RUN_DIR/tensorboard (extra tensorboard)."""
    wandb: str = ""
    """Project of Weights & Biases that also gets these figures (extra wandb). With WANDB_MODE=offline they
    stay in RUN_DIR/wandb. Empty: none."""
    cluster: str = ""
    """TOML file of `plan --measure`, or the name of a known cluster. With it the planner predicts the seconds
    of a step, shown beside the measured ones, and --dry_run compares the run with its memory. Empty:
    neither."""
    log_every: int = 10
    """Steps between two printed lines if there is no bar (metrics.jsonl holds every step)."""
    sample_tokens: int = 200
    """Most tokens of the text generated at the end, or of the answers to three held-out questions, together,
    which a run on conversations also generates before the first step, unless it has stages. 0: none.
    `python -m pyruntime generate` makes others."""


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """All options of a run."""

    model: Model = Model()
    data: Data = Data()
    optimizer: Optimizer = Optimizer()
    lora: Lora = Lora()
    dpo: Dpo = Dpo()
    train: Train = Train()
    parallel: Parallel = Parallel()
    data_parallel: DataParallel = DataParallel()
    pipeline: PipelineParallel = PipelineParallel()
    context: ContextParallel = ContextParallel()
    comm: Comm = Comm()
    checkpoint: Checkpoint = Checkpoint()
    output: Output = Output()


GONE = {
    "comm.tuning": ("on", "comm.tier=chunked ignores what `python -m pyruntime tune` found"),
    "output.sample_prompt": ("def ", "`python -m pyruntime generate --prompt` continues any text"),
    "output.temperature": (0.8, "use `python -m pyruntime generate --temperature`"),
    "parallel.slices": (1, "it is now called parallel.tp_slices"),
}
"""Removed options: the old default, which a configuration may still hold, and what to write instead."""


def why_gone(name: str) -> str:
    """A sentence about the removed option `name`; empty if it never was one."""
    return f"{name} was removed: {GONE[name][1]}." if name in GONE else ""


def changed(config: RunConfig, names: str) -> list[tuple[str, Any, Any]]:
    """Returns (name, value, default) of the options in `names`, "section.key section.key", that differ from
    their default."""
    found = []
    for name in names.split():
        section, key = name.split(".")
        value, usual = (getattr(getattr(each, section), key) for each in (config, RunConfig()))
        found += [(name, value, usual)] if value != usual else []
    return found


def ring_orders(comm: Comm) -> list[list[int]]:
    """Returns comm.rings as lists of ranks. Raises ValueError for an entry that is no order of ranks."""
    return [[int(rank) for rank in order.split("-")] for order in comm.rings]


def steps_of(profile: str) -> range:
    """Returns the steps that train.profile names. Raises ValueError if it names none."""
    found = re.fullmatch(r"(\d{1,10})(?:-(\d{1,10}))?", profile, re.ASCII)
    steps = range(0) if found is None else range(int(found[1]), int(found[2] or found[1]) + 1)
    if not steps or steps[0] < 1:
        raise ValueError(f"{short_repr(profile)} names no steps; write them as 10, or 10-12.")
    return steps


def meets_every_step(config: RunConfig) -> bool:
    """Whether data-parallel ranks sum their gradients in every step."""
    return config.data_parallel.method == "every_step"


def replicas(config: RunConfig) -> int:
    """The number of groups of data-parallel ranks that each hold the whole model. If replicas synchronize
    rarely, it is dp, unless parallel.dp_replicate is set; if they join and leave, it counts only this one's
    groups."""
    parallel = config.parallel
    if meets_every_step(config) or parallel.dp_replicate > 1 or config.data_parallel.members:
        return parallel.dp_replicate
    return parallel.dp


def micro_batches(config: RunConfig) -> int:
    """Forward and backward passes of a rank per optimizer step; their mean, if ranks take unequal numbers."""
    return config.train.batch_size // (config.train.micro_batch_size * config.parallel.dp)


@dataclasses.dataclass(frozen=True)
class MeshSizes:
    """Ranks on every axis of a run, as `Runtime.start` takes them."""

    pp: int = 1
    dp: int = 1
    """All data-parallel ranks, replicas included."""
    dp_replicate: int = 1
    """Groups of data-parallel ranks that each hold the whole model."""
    cp: int = 1
    tp: int = 1
    """Ranks of tensor parallelism; with two axes, of the first (x)."""
    tp_y: int = 1
    ep: int | None = None
    """Ranks over which experts lie, neighbours among those of a pipeline stage; None: those of tp."""

    @property
    def experts_over(self) -> int:
        """Ranks over which experts lie."""
        return self.tp if self.ep is None else self.ep

    @property
    def axes(self) -> dict[str, int]:
        """Sizes by axis name, both axes of tensor parallelism as one, in the order of `Runtime.sizes`."""
        return {"pp": self.pp, "dp": self.dp, "cp": self.cp, "tp": self.tp * self.tp_y}

    @property
    def ranks(self) -> int:
        return math.prod(self.axes.values())


def mesh_of(config: RunConfig, world_size: int) -> MeshSizes:
    """Returns the mesh of a configuration that `spelled_out` returned. If parallel.tp is None, tp takes the
    ranks that the other axes leave."""
    asked = config.parallel
    others = {"pp": asked.pp, "dp": asked.dp, "dp_replicate": replicas(config), "cp": asked.cp}
    if isinstance(asked.tp, Grid):
        return MeshSizes(**others, tp=asked.tp.x, tp_y=asked.tp.y, ep=asked.ep)
    tp = asked.tp or max(1, world_size // (asked.pp * asked.cp * asked.dp))
    return MeshSizes(**others, tp=tp, ep=asked.ep)


def with_pieces(config: RunConfig) -> RunConfig:
    """Returns the configuration with axis z of parallel.tp written as ZeRO 3 over groups of z data-parallel
    ranks, parallel.dp groups in all; and with {x = n} written as the number n.

    Raises ConfigError if an axis has no ranks, or another option also cuts weights or makes replicas.
    """
    parallel = config.parallel
    grid = parallel.tp
    if not isinstance(grid, Grid):
        return config
    if min(grid.x, grid.y, grid.z) < 1:
        raise ConfigError(f"parallel.tp={grid} must have at least 1 rank on each axis.")
    if grid.z > 1 and not meets_every_step(config):
        raise ConfigError(
            f"parallel.tp={grid} has an axis z, whose ranks exchange gradients in every step, which "
            f"data_parallel.method={config.data_parallel.method} does not; leave out z or the method."
        )
    for name, value, usual in (
        ("zero", parallel.zero, (1, 3)),
        ("dp_replicate", parallel.dp_replicate, (1,)),
    ):
        if grid.z > 1 and value not in usual:
            raise ConfigError(
                f"parallel.{name}={value} with parallel.tp={grid}: axis z cuts weights, gradients and "
                f"states already, and ranks of dp hold copies; leave out parallel.{name}."
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
    """Returns the configuration with train.tokens, if given, written as train.steps."""
    if not config.train.tokens:
        return config
    steps = -(-config.train.tokens // tokens_per_step(config))
    return dataclasses.replace(config, train=dataclasses.replace(config.train, steps=steps, tokens=0))


def spelled_out(config: RunConfig) -> RunConfig:
    """Returns the configuration with its shorthands (z in parallel.tp, train.tokens) written out. Raises
    ConfigError as `with_pieces` does."""
    return with_steps(with_pieces(config))


def warmup_steps(optimizer: Optimizer, steps: int) -> int:
    """Returns the number of warm-up steps in a run of `steps`."""
    if optimizer.warmup_steps is not None:
        return min(optimizer.warmup_steps, steps)
    if optimizer.warmup_fraction is not None:
        return round(optimizer.warmup_fraction * steps)
    return min(20, steps // 10)


def learning_rate(step: int, steps: int, optimizer: Optimizer) -> float:
    """Returns the learning rate of step `step` (from 1 to `steps`): linear warm-up to the peak, then decay.

        step <= warmup:   lr * step / warmup
        later:            lr * (f + (1 - f) * left(p)),   p = (step - begin) / (steps - begin)

    with f = min_lr_fraction: step `warmup` has the peak, step `steps` f times the peak. left(p) is (1 +
    cos(pi p)) / 2 for cosine (Loshchilov and Hutter 2017, equation 5, without restarts) and 1 - p for linear,
    both with begin = warmup. For wsd it is 1 - sqrt(p) in the last decay_fraction of the steps, 1 before that
    (Haegele et al. 2024, arXiv 2405.18392).
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
