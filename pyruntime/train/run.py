"""A whole run: data, model, training, and what it leaves behind.

RUN_DIR/config.toml      the configuration as it was
RUN_DIR/metrics.jsonl    one object a step
RUN_DIR/checkpoints/     resumable checkpoints
RUN_DIR/model/           the weights in Hugging Face's format, with the tokenizer
RUN_DIR/loss.png, scorecard.json, scorecard.txt, sample.txt
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pyruntime import comm
from pyruntime.context import Context
from pyruntime.llama import Llama, generate, load_weights, save_hf
from pyruntime.llama.config import LlamaConfig
from pyruntime.llama.model import Part
from pyruntime.train import (
    checkpoint,
    checkpoint_folder,
    config_file,
    corpus_of_ranks,
    metrics,
    report,
    shape,
)
from pyruntime.train.config import RunConfig, tokens_per_step
from pyruntime.train.corpus import Corpus
from pyruntime.train.device import Here
from pyruntime.train.durable import writing
from pyruntime.train.errors import ConfigError, TrainingError
from pyruntime.train.first_rank import on_every_rank, on_first_rank
from pyruntime.train.loop import Trainer
from pyruntime.train.metrics import MetricsFile, StepMetrics
from pyruntime.train.pipelined import part_of, resolved
from pyruntime.train.progress import Progress
from pyruntime.train.signals import StopRequest
from pyruntime.train.tokenizer import Tokenizer, open_tokenizer
from pyruntime.tuning.cache import default_path
from pyruntime.tuning.place import device_name, library
from pyruntime.tuning.take_up import find, hand_over

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
MODEL_FOLDER, SAMPLE_FILE = "model", "sample.txt"


def run(
    config: RunConfig,
    name: str,
    group: comm.Group,
    stop: StopRequest,
    replicas: DeviceMesh | None = None,
    cp: comm.Group | None = None,
    pp: comm.Group | None = None,
    here: Here | None = None,
) -> Path:
    """Trains as `config` says over the tensor-parallel `group`, the mesh `replicas` over which gradients are
    reduced, the context-parallel group `cp` and the pipeline `pp`, on every rank of which it is called, on
    the device `here` (the CPU unless given), and returns the run folder.

    `name` is the configuration's, for the folder. Raises ConfigError, `Stopped`, TrainingError, or the
    communication errors of `pyruntime`.
    """
    here = here or Here()
    tp = comm.group_size(group)
    ranks = comm.process_group(group) if replicas is None and pp is None else dist.group.WORLD
    context = None if cp is None else Context(cp, config.context.layout, config.context.variant)
    first = ranks.rank() == 0
    tokenizer = open_tokenizer(config.data.tokenizer, config.model.init_from)
    wanted = shape.llama_config(config.model, tokenizer.vocab_size, config.train.seq_len, tp)
    config = on_first_rank(ranks, "Settling the pipeline", lambda: resolved(config, wanted))
    part = None if pp is None else part_of(config, wanted, comm.group_rank(pp))
    start_at, steps_done = on_first_rank(ranks, "Finding the checkpoint", lambda: _checkpoint(config, wanted))
    run_dir = on_first_rank(ranks, "Making the run folder", lambda: _make_run_dir(config, name, start_at))
    on_every_rank(ranks, "Opening the run folder", lambda: _check_seen(run_dir, ranks.rank()))
    progress = Progress(
        config.train.steps,
        config.output.progress if first else "off",
        config.output.log_every,
        on_closed=lambda: stop.note(signal.SIGPIPE),
    )
    if first and start_at and checkpoint_folder.is_unchecked(start_at):
        progress.say(f"{start_at} was saved before there were checksums; it is not checked")
    text = corpus_of_ranks.open_everywhere(config, tokenizer, ranks, progress.say)
    model = on_every_rank(
        ranks, "Making the model", lambda: _model(config, wanted, group, context, part, here.device)
    )
    tuned = _take_up_tuning(config, here.device.type, group, ranks)
    if first:
        progress.say(_opening(config, wanted, text, run_dir, tp, here))
        if tuned:
            progress.say(f"tuning {tuned}")

    trainer = Trainer(config, model, wanted, text, group, run_dir, stop, replicas, ranks, context, pp, here)
    if start_at:
        trainer.resume(start_at)
    history: list[StepMetrics] = []
    bytes_before = _bytes_read()
    with _metrics_file(run_dir, steps_done, trainer) if first else contextlib.nullcontext() as file:
        for step in trainer.fit():
            history.append(step)
            if file:
                with _told_to_all(), writing(run_dir / metrics.FILE_NAME, trainer.what_is_saved()):
                    file.write(step)
                progress.show(step)
    bytes_moved = _bytes_read() - bytes_before
    trainer.close()
    is_first_group = ranks.rank() < tp
    if pp is not None and is_first_group:
        model = _whole_model(config, wanted, group, trainer.saved or start_at, here.device)
    if is_first_group:
        with _told_to_all(), writing(run_dir / MODEL_FOLDER, trainer.what_is_saved()):
            save_hf(model, run_dir / MODEL_FOLDER, separator=tokenizer.separator)

    def report_training() -> None:
        with writing(run_dir, trainer.what_is_saved()):
            write_report()

    def write_report() -> None:
        tokenizer.save(run_dir / MODEL_FOLDER)
        card = _scorecard(config, trainer, history, bytes_moved, ranks.size()) if history else None
        _report(run_dir, card, progress)

    on_first_rank(ranks, "Writing the report", report_training)
    sample = _sample(config, model, tokenizer) if pp is None or is_first_group else None
    if first:
        with writing(run_dir / SAMPLE_FILE, trainer.what_is_saved()):
            _close(run_dir, sample, progress)
    return run_dir


def _metrics_file(run_dir: Path, steps_done: int, trainer: Trainer) -> MetricsFile:
    with _told_to_all(), writing(run_dir / metrics.FILE_NAME, trainer.what_is_saved()):
        return MetricsFile(run_dir, resume_at=steps_done)


@contextlib.contextmanager
def _told_to_all() -> Iterator[None]:
    """Around what one rank does while others wait for it inside a step: they end with its reason."""
    try:
        yield
    except TrainingError as error:
        comm.post_failure(str(error))
        raise


def _bytes_read() -> int:
    return sum(figures.bytes_read for figures in comm.traffic().values())


def _checkpoint(config: RunConfig, wanted: LlamaConfig) -> tuple[Path | None, int]:
    """The checkpoint to go on with, if any, and its step."""
    resume = config.checkpoint.resume
    if resume == checkpoint_folder.AUTO:
        folder = checkpoint_folder.newest(Path(config.output.run_dir))
    else:
        folder = checkpoint_folder.find(Path(resume)) if resume else None
    if folder is None:
        return None, 0
    facts = checkpoint_folder.Facts(
        step=0,
        dtype=config.train.dtype,
        model=dataclasses.asdict(wanted),
        rounding=config.optimizer.rounding,
    )
    return folder, checkpoint_folder.read_matching(folder, facts).step


def _make_run_dir(config: RunConfig, name: str, start_at: Path | None) -> Path:
    """Rank 0 makes the run folder: the one asked for, that of the checkpoint, or the first free
    runs/<name>-<n>."""
    try:
        if config.output.run_dir:
            run_dir = Path(config.output.run_dir)
            same = start_at is not None and start_at.resolve().is_relative_to(run_dir.resolve())
            again = config.checkpoint.resume == checkpoint_folder.AUTO
            if (run_dir / metrics.FILE_NAME).exists() and not same and not again:
                raise ConfigError(
                    f"output.run_dir: {run_dir} holds a run already; name another folder, or go on with it "
                    f"through --checkpoint.resume {run_dir}."
                )
            run_dir.mkdir(parents=True, exist_ok=True)
        elif start_at:
            run_dir = start_at.parent.parent
        else:
            run_dir = _first_free(Path("runs"), name)
        if (run_dir / metrics.FILE_NAME).exists():
            metrics.read(
                run_dir / metrics.FILE_NAME
            )  # which the run goes on with, so all ranks hear of damage
        (run_dir / "config.toml").write_text(config_file.to_toml(config), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"output.run_dir: {error.filename} cannot be written: {error.strerror}.") from error
    return run_dir


def _first_free(parent: Path, name: str) -> Path:
    parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        run_dir = parent / f"{name}-{number}"
        try:
            run_dir.mkdir()
        except FileExistsError:
            continue
        return run_dir
    raise AssertionError("count() does not end")


def _check_seen(run_dir: Path, rank: int) -> None:
    if not run_dir.is_dir():
        raise ConfigError(
            f"output.run_dir: rank {rank} on host {socket.gethostname()} does not see {run_dir}, which rank "
            "0 has made; all hosts need one run folder: name one on shared storage."
        )


def _whole_model(
    config: RunConfig, wanted: LlamaConfig, group: comm.Group, folder: Path | None, device: torch.device
) -> Llama:
    """All stages' weights, from the checkpoint in `folder`, which the last step left."""
    assert folder is not None  # a run that takes no step has been resumed
    dtype, tier = DTYPES[config.train.dtype], config.comm.tier
    model = Llama(wanted, group, dtype=dtype, device=device, tier=tier, seed=None)
    checkpoint.load_weights(folder, model, comm.process_group(group))
    return model


def _take_up_tuning(config: RunConfig, device_type: str, group: comm.Group, ranks: dist.ProcessGroup) -> str:
    """Hands the measured choices of this machine to the ops, the same on all ranks, and says so in a line for
    the log; empty where nothing asks for them or there are none."""
    tp = comm.group_size(group)
    hand_over({})
    if config.comm.tier != "auto" or config.comm.tuning == "off" or tp == 1:
        return ""
    device = device_name(device_type, torch.get_num_threads())
    found = on_first_rank(
        ranks, "Reading what was tuned", lambda: find(default_path(), device, tp, library())
    )
    hand_over(found.places)
    return found.words


def _model(
    config: RunConfig,
    wanted: LlamaConfig,
    group: comm.Group,
    context: Context | None,
    part: Part | None,
    device: torch.device,
) -> Llama:
    options = {
        "device": device,
        "dtype": DTYPES[config.train.dtype],
        "tier": config.comm.tier,
        "context": context,
        "recompute": config.train.activation_checkpointing,
        "part": part,
    }
    if context is not None and context.variant == "ulysses":
        heads = wanted.num_key_value_heads // comm.group_size(group)
        if heads % context.size:
            raise ConfigError(
                f"context.variant=ulysses deals out heads, and parallel.cp={context.size} does not divide "
                f"the {heads} key/value heads of a tensor-parallel rank; use ring or all_gather_kv."
            )
    if not config.model.init_from:
        return Llama(wanted, group, seed=config.train.seed, **options)
    model = Llama(wanted, group, seed=None, **options)
    try:
        load_weights(model, config.model.init_from)
    except (ValueError, OSError) as error:
        raise ConfigError(f"model.init_from: {error}") from error
    return model


def _sample(config: RunConfig, model: Llama, tokenizer: Tokenizer) -> str | None:
    """The prompt and what the model makes of it, or None where no sample is wanted. Every rank calls this."""
    output = config.output
    prompt = tokenizer.encode(output.sample_prompt.encode()).tolist()
    if not prompt and tokenizer.separator is not None:
        prompt = [tokenizer.separator]
    tokens = min(output.sample_tokens, model.config.max_position_embeddings - len(prompt))
    if tokens < 1 or not prompt:
        return None
    ids = generate(
        model.eval(),
        torch.tensor([prompt], device=model.embed.weight.device),
        tokens,
        temperature=output.temperature,
        seed=config.train.seed,
        eos_token_id=tokenizer.separator,
    )
    return tokenizer.decode(ids[0].tolist())


def _opening(config: RunConfig, wanted: LlamaConfig, text: Corpus, run_dir: Path, tp: int, here: Here) -> str:
    facts, train, parallel = text.facts, config.train, config.parallel
    dp = f", dp={parallel.dp} at zero {parallel.zero}" if parallel.dp > 1 else ""
    if parallel.dp_replicate > 1:
        dp += f" in {parallel.dp_replicate} replicas"
    if parallel.pp > 1:
        dp += f", pp={parallel.pp} ({config.pipeline.kind})"
    if parallel.cp > 1:
        dp += f", cp={parallel.cp} ({config.context.layout}, {config.context.variant})"
    lines = f" of {facts.documents:,} documents" if facts.documents != facts.files else ""
    skipped = f" ({facts.skipped} without text left out)" if facts.skipped else ""
    return "\n".join(
        [
            f"model  {wanted.parameter_count() / 1e6:.1f} M parameters, {train.dtype}, tp={tp} with "
            f"sequence parallelism{dp}, {torch.get_num_threads()} thread(s) a rank",
            f"device {here.describe()}",
            f"text   {facts.files} files{lines}{skipped}, {facts.tokens - facts.val_tokens:,} tokens to "
            f"learn from, {facts.val_tokens:,} held out",
            f"steps  {train.steps} of {tokens_per_step(config):,} tokens, in micro-batches of "
            f"{train.micro_batch_size} x {train.seq_len}",
            f"run    {run_dir}",
        ]
    )


def _scorecard(
    config: RunConfig, trainer: Trainer, history: list[StepMetrics], bytes_moved: int, ranks: int
) -> report.Scorecard:
    flops = trainer.model.config.flops_per_token(config.train.seq_len)
    tiers = [dataclasses.asdict(use) for use in trainer.tiers.rows]
    return report.scorecard(history, ranks, bytes_moved, flops, tiers)


def _report(run_dir: Path, card: report.Scorecard | None, progress: Progress) -> None:
    """Writes and prints how the training went."""
    report.plot_loss(metrics.read(run_dir / metrics.FILE_NAME), run_dir / report.PLOT_FILE)
    if card:
        report.write_scorecard(card, run_dir)
        progress.say("\n" + report.format_scorecard(card))


def _close(run_dir: Path, sample: str | None, progress: Progress) -> None:
    """Writes and prints the sample, and says where everything is."""
    if sample is not None:
        (run_dir / SAMPLE_FILE).write_text(sample + "\n", encoding="utf-8")
        progress.say(f"\nSample\n{sample}")
    progress.say(
        f"\nEverything is in {run_dir}: weights in {MODEL_FOLDER}/, {report.PLOT_FILE}, {metrics.FILE_NAME}."
    )
