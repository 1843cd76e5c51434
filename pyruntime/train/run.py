"""A whole run: data, model, training, and what it leaves behind.

RUN_DIR/config.toml      the configuration as it was
RUN_DIR/metrics.jsonl    one object a step
RUN_DIR/checkpoints/     resumable checkpoints
RUN_DIR/model/           the weights in Hugging Face's format, with the tokenizer
RUN_DIR/came_with/       what model.init_from held besides weights, which model/ gets
RUN_DIR/lock             the process that writes all this, while it lives
RUN_DIR/ledger/          what every rank waited for, and behind what bytes were hidden (train.ledger)
RUN_DIR/profile/         traces of single steps (train.profile)
RUN_DIR/tensorboard/, wandb/
RUN_DIR/loss.png, scorecard.json, scorecard.txt, sample.txt
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from pyruntime import comm
from pyruntime.comm import Runtime
from pyruntime.comm.launcher import grace_s
from pyruntime.llama import Llama, generate, origin, save_hf
from pyruntime.llama.config import LlamaConfig
from pyruntime.llama.hf import weight_files
from pyruntime.overlap.account import table
from pyruntime.overlap.files import RankLedger, forget
from pyruntime.overlap.record import ledger
from pyruntime.overlap.steps import StepLedger
from pyruntime.plan.cluster import find_cluster
from pyruntime.train import agreement, checkpoint, checkpoint_folder, config_file, metrics, report
from pyruntime.train.config import (
    RunConfig,
    meets_every_step,
    replicas,
    steps_of,
    tokens_per_step,
    with_steps,
)
from pyruntime.train.data import corpus
from pyruntime.train.data.corpus import Corpus
from pyruntime.train.data.tokenizer import FILE_NAME as TOKENIZER_FILE
from pyruntime.train.data.tokenizer import Tokenizer, open_tokenizer, prompt_ids
from pyruntime.train.device import Device
from pyruntime.train.disk import in_use, writing
from pyruntime.train.errors import ConfigError, TrainingError, refusing
from pyruntime.train.loop import Trainer
from pyruntime.train.manifest import DamagedError
from pyruntime.train.metrics import MetricsFile
from pyruntime.train.model import llama, llama_config, make_model, words_of_dtype
from pyruntime.train.pipelined import resolved, with_layers, with_moved_layers
from pyruntime.train.planned import planned, predicted
from pyruntime.train.progress import Progress
from pyruntime.train.ranks import on_every_rank, on_rank_0
from pyruntime.train.signals import Stopped, StopRequest, why_cut_off
from pyruntime.train.watching.peak import peak_of
from pyruntime.train.watching.profile import StepProfile
from pyruntime.train.watching.sinks import Sink, open_sinks
from pyruntime.train.watching.watch import Watch
from pyruntime.tuning.apply import Found, device_name, find, library, use
from pyruntime.tuning.cache import default_path

MODEL_FOLDER, SAMPLE_FILE = "model", "sample.txt"
LIFE = "run"
"""Under which a job keeps, for the one that its launcher starts in its place, what `Life` says."""


@dataclasses.dataclass(frozen=True)
class Life:
    """A job that its launcher has ended since, to start this one in its place."""

    run_dir: str
    began: float
    """When the first of them made that folder, in seconds since 1970."""


def run(config: RunConfig, name: str, runtime: Runtime, stop: StopRequest) -> Path:
    """Trains as `config` says over the mesh of `runtime`, on every rank of which it is called, and returns
    the run folder.

    `name` is the configuration's, for the folder. Raises ConfigError, `Stopped`, TrainingError, or the
    communication errors of `pyruntime`.
    """
    with contextlib.ExitStack() as held:
        return _run(config, name, runtime, stop, held)


def _run(
    config: RunConfig, name: str, runtime: Runtime, stop: StopRequest, held: contextlib.ExitStack
) -> Path:
    """held: what is the run's own, for as long as it lasts."""
    check_ledger(config, runtime)
    config = with_steps(config)
    ranks = runtime.world
    is_rank_0, is_first_tp = ranks.rank() == 0, ranks.rank() < runtime.sizes.tp
    agreement.check(ranks, "Comparing the configurations", agreement.of_config(config))

    def open_model() -> tuple[Tokenizer, LlamaConfig]:
        opened = open_tokenizer(config.data.tokenizer, config.model.init_from, config.data.paths)
        model = config.model
        return opened, llama_config(model, opened.vocab_size, config.train.seq_len, *runtime.tp_sizes)

    tokenizer, shape = on_every_rank(ranks, "Opening the tokenizer", open_model)
    agreement.check(ranks, "Comparing the models", agreement.of_shape(shape, tokenizer.fingerprint))
    config = on_rank_0(ranks, "Settling the pipeline", lambda: resolved(config, shape), RunConfig)
    before, saved, left = on_rank_0(
        ranks,
        "Finding the checkpoint",
        lambda: _checkpoints(config, shape),
        tuple[Life | None, list[Path], str],
    )
    start_at = saved[0] if saved else None
    without = origin.why_without(start_at) if start_at and is_rank_0 else ""
    run_dir = on_rank_0(
        ranks, "Making the run folder", lambda: _make_run_dir(config, name, start_at, held, before), Path
    )
    asked = config  # as config.toml has it, with the layers that were asked for
    config = _with_layers_of(start_at, asked, runtime)
    on_every_rank(ranks, "Opening the run folder", lambda: _check_seen(run_dir, ranks))
    progress = Progress(
        config.train.steps,
        config.output.progress if is_rank_0 else "off",
        config.output.log_every,
        on_closed=lambda: stop.note(signal.SIGPIPE),
    )
    text = corpus.open_everywhere(config, tokenizer, ranks, progress.say)
    _compare_first_weights(config, runtime)
    model = on_every_rank(ranks, "Making the model", lambda: make_model(config, shape, runtime))
    tuned = _use_tuning(config, runtime)
    if is_rank_0:
        progress.say(_first_lines(config, shape, text, run_dir, runtime))
        if tuned:
            progress.say(f"tuning {tuned}")
        if said := words_of_dtype(config):
            progress.say(said)
        if before:
            progress.say(_words_of_restart(before, start_at))
        if without and not config.model.init_from:
            progress.say(without)
        if left:
            progress.say(f"{left} The run goes on with {start_at}.")
    watch = _watch(config, shape, runtime, progress.say if is_rank_0 else lambda _: None)

    trainer = Trainer(config, model, text, runtime, run_dir, stop)
    if start_at:
        start_at = _resume(trainer, saved, progress.say if is_rank_0 else None)
        if start_at != saved[0] and (found := _with_layers_of(start_at, asked, runtime)) != config:
            config = found
            trainer.close()
            del trainer, model
            gc.collect()
            model, trainer = _anew(config, shape, text, runtime, run_dir, stop, start_at)
        if is_rank_0 and (residuals := trainer.what_is_not_resumed(start_at)):
            progress.say(residuals)
    if not trainer.join():
        if is_rank_0:
            progress.say("The replicas have taken the last step; nothing is left to do.")
        trainer.close()
        return run_dir
    if trainer.member is not None:
        steps_done = trainer.step
        if is_rank_0:
            progress.say(f"joins  {config.data_parallel.members} after step {steps_done}")
    first, said, cut_off, grace = trainer.step, "", "", grace_s(os.environ)
    sinks: list[Sink] = []
    on_rank_0(
        ranks,
        "Opening what the run is watched by",
        lambda: sinks.extend(_opened(config, run_dir, trainer, held)),
    )
    bytes_before = _bytes_read()
    with (
        _metrics_file(run_dir, trainer) if is_rank_0 else contextlib.nullcontext() as file,
        _step_ledger(config, runtime, run_dir) as entered,
        _step_profile(config, runtime, run_dir) as profile,
    ):
        while True:
            for measured in trainer.fit(entered, profile):
                step = watch.complete(measured, trainer.step)
                news = "" if trainer.outer is None else trainer.outer.describe()
                if is_rank_0 and news != said:
                    progress.say(news)
                said = news
                if is_rank_0 and not cut_off and (cut_off := why_cut_off(trainer.save_took, grace)):
                    progress.say(cut_off)
                if file:
                    for sink in (file, *sinks):
                        with _told_to_all(), writing(sink.path, trainer.what_is_saved()):
                            sink.write(step)
                    progress.show(step)
                    for news_of_step in (*(step.slow or ()), *filter(None, (step.moved,))):
                        progress.say(f"step {step.step}: {news_of_step['sentence']}")
            if trainer.move is None:
                break
            start_at = trainer.saved
            assert start_at is not None  # that is where layers move
            config = with_layers(config, trainer.move.after)
            trainer.close()
            del trainer, model
            gc.collect()  # the weights and states of the old stages, before there are those of the new ones
            model, trainer = _anew(config, shape, text, runtime, run_dir, stop, start_at)
    bytes_moved = _bytes_read() - bytes_before
    trainer.close()
    if runtime.pp.mesh is not None and is_first_tp:
        model = _whole_model(config, shape, runtime, trainer.saved or start_at)
    if is_first_tp:
        with _told_to_all(), writing(run_dir / MODEL_FOLDER, trainer.what_is_saved()):
            begin = next(iter(tokenizer.begin), None)
            save_hf(model, run_dir / MODEL_FOLDER, separator=tokenizer.separator, begin=begin)

    def write_report() -> None:
        with writing(run_dir, trainer.what_is_saved()):
            kept = run_dir / origin.FOLDER
            if kept.is_dir():
                try:
                    origin.give_back(kept, run_dir / MODEL_FOLDER)
                except ValueError as error:  # the weights are there, and training is done
                    progress.say(
                        f"{run_dir / MODEL_FOLDER} gets nothing of what came with its model: {error}"
                    )
            if config.data.tokenizer or not (kept / TOKENIZER_FILE).is_file():
                tokenizer.save(run_dir / MODEL_FOLDER)
            lines = metrics.read(run_dir / metrics.FILE_NAME)
            report.plot_loss(lines, run_dir / report.PLOT_FILE)
            if own := [line for line in lines if line["step"] > first]:
                flops = shape.flops_per_token(config.train.seq_len)
                tiers = [dataclasses.asdict(row) for row in trainer.tiers.rows]
                card = report.scorecard(own, ranks.size(), bytes_moved, flops, tiers)
                report.write_scorecard(card, run_dir)
                progress.say("\n" + report.format_scorecard(card))

    on_rank_0(ranks, "Writing the report", write_report)
    if entered:
        kept = on_every_rank(ranks, "Writing the ledger", lambda: _written(entered, run_dir, runtime))
        if is_rank_0 and kept:
            progress.say(f"\nLedger of rank 0, {kept.steps} steps\n{table(kept.account)}")
            if kept.saved:
                progress.say(f"\nLedger of rank 0, {kept.saves} savings of a checkpoint\n{table(kept.saved)}")
    sample = _sample(config, model, tokenizer) if runtime.pp.mesh is None or is_first_tp else None
    if is_rank_0:
        with writing(run_dir / SAMPLE_FILE, trainer.what_is_saved()):
            _close(run_dir, config.train.dtype, sample, progress)
    return run_dir


def _compare_first_weights(config: RunConfig, runtime: Runtime) -> None:
    """Raises ConfigError, on all ranks, where hosts have another content of model.init_from."""
    if source := config.model.init_from:
        doing = f"Comparing the files of {source}"

        def find() -> list[Path]:
            with refusing("model.init_from: ", (ValueError, OSError)):
                return sorted(weight_files(Path(source)))

        found = on_every_rank(runtime.world, doing, find)
        agreement.check_files(runtime.world, doing, f"model.init_from={source}", found)


def _with_layers_of(start_at: Path | None, asked: RunConfig, runtime: Runtime) -> RunConfig:
    """The configuration that was asked for, with the layers of the stages that the checkpoint in `start_at`
    goes on with. Every rank calls it."""
    if start_at is None or asked.parallel.rebalance == "off":
        return asked
    return on_rank_0(
        runtime.world, "Settling the layers", lambda: with_moved_layers(asked, start_at), RunConfig
    )


def _anew(
    config: RunConfig,
    shape: LlamaConfig,
    text: Corpus,
    runtime: Runtime,
    run_dir: Path,
    stop: StopRequest,
    start_at: Path,
) -> tuple[Llama, Trainer]:
    """This rank's part of the model and its trainer, from the checkpoint in `start_at`, as `config` has them
    now."""
    model = on_every_rank(runtime.world, "Moving layers", lambda: make_model(config, shape, runtime))
    trainer = Trainer(config, model, text, runtime, run_dir, stop)
    trainer.resume(start_at)
    return model, trainer


def _written(entered: StepLedger, run_dir: Path, runtime: Runtime) -> RankLedger | None:
    try:
        return entered.write(run_dir, runtime)
    except OSError as error:
        raise TrainingError(f"{error.filename} cannot be written: {error.strerror}.") from error


def check_ledger(config: RunConfig, runtime: Runtime) -> None:
    """Raises ConfigError where ranks compute on devices, and what was asked for is what the host does."""
    asked = {
        "train.ledger": config.train.ledger,
        "train.slow_every": config.train.slow_every,
        "parallel.rebalance": config.parallel.rebalance == "on",
    }
    for name, is_asked in asked.items():
        if is_asked and runtime.device.type != "cpu":
            raise ConfigError(
                f"{name} goes by what the host does, and these ranks compute on {runtime.device}; leave it "
                "out, or add --train.device cpu."
            )


@contextlib.contextmanager
def _step_ledger(config: RunConfig, runtime: Runtime, run_dir: Path) -> Iterator[StepLedger | None]:
    """None where `train.ledger` does not ask for one. A run that is stopped leaves its ledger behind too."""
    if not config.train.ledger:
        yield None
        return
    with ledger() as entered:
        steps = StepLedger(entered)
        try:
            yield steps
        except Stopped:
            steps.write(run_dir, runtime)
            raise


@contextlib.contextmanager
def _step_profile(config: RunConfig, runtime: Runtime, run_dir: Path) -> Iterator[StepProfile | None]:
    """None where `train.profile` does not ask for one. A run that is stopped leaves its trace behind too."""
    if not config.train.profile:
        yield None
        return
    profile = StepProfile(runtime, run_dir, steps_of(config.train.profile))
    try:
        yield profile
    except Stopped:
        profile.write()
        raise


def _watch(config: RunConfig, shape: LlamaConfig, runtime: Runtime, say: Callable[[str], None]) -> Watch:
    """What the run's steps are compared with, which `say` is told. Every rank calls it."""
    ranks = runtime.world.size()
    peak = peak_of(config, runtime)
    say(f"peak   {peak.words if peak else 'not known, so no MFU is; train.peak_flops states it'}")
    predicted_s = None
    if config.output.cluster:
        cluster = find_cluster(config.output.cluster)
        predicted_s = predicted(*planned(config, shape, ranks, cluster)).total
        say(f"plan   {predicted_s:.3g} s a step, by {config.output.cluster} ({cluster.description})")
    flops = shape.flops_per_token(config.train.seq_len)
    return Watch(config.train.steps, ranks, flops, peak, predicted_s)


def _opened(config: RunConfig, run_dir: Path, trainer: Trainer, held: contextlib.ExitStack) -> list[Sink]:
    with writing(run_dir, trainer.what_is_saved()):
        return open_sinks(config, run_dir, trainer.step, held)


def _metrics_file(run_dir: Path, trainer: Trainer) -> MetricsFile:
    with _told_to_all(), writing(run_dir / metrics.FILE_NAME, trainer.what_is_saved()):
        return MetricsFile(run_dir, resume_at=trainer.step)


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


def _checkpoints(config: RunConfig, shape: LlamaConfig) -> tuple[Life | None, list[Path], str]:
    """The job in whose place this one was started, if any, and checkpoints to go on with, the first that is
    whole: those that it has saved, else those that are asked for. And why the newest is left out, if so."""
    resume, before = config.checkpoint.resume, _life_before()
    facts = checkpoint_folder.Facts.of(config, shape)
    if before is not None:
        found, left = checkpoint_folder.to_go_on_with(Path(before.run_dir), facts)
        # Older ones are of a run that this job may have left at an earlier step.
        if own := [path for path in found if checkpoint_folder.read(path).saved_at >= before.began]:
            return before, own, left
    if resume == checkpoint_folder.AUTO:
        return before, *checkpoint_folder.to_go_on_with(Path(config.output.run_dir), facts)
    if not resume:
        return before, [], ""
    folder = checkpoint_folder.find(Path(resume))
    checkpoint_folder.read_matching(folder, facts)
    return before, [folder], ""


def _life_before() -> Life | None:
    kept = comm.kept(LIFE)
    return Life(**json.loads(kept)) if kept else None


def _words_of_restart(before: Life, start_at: Path | None) -> str:
    goes = f"goes on with {start_at}" if start_at else f"begins anew in {before.run_dir}"
    return f"again  its launcher has started this job anew, which {goes}"


def _resume(trainer: Trainer, saved: Sequence[Path], say: Callable[[str], None] | None) -> Path:
    """Goes on with the first of `saved` that is whole, and returns it. Raises DamagedError where none is."""
    for folder, older in itertools.zip_longest(saved, saved[1:]):
        try:
            trainer.resume(folder)
            return folder
        except DamagedError as error:
            if older is None:
                raise
            if say:
                say(f"{error} The run goes on with {older}.")
    raise ValueError("There is no checkpoint to go on with.")


def _make_run_dir(
    config: RunConfig,
    name: str,
    start_at: Path | None,
    held: contextlib.ExitStack,
    before: Life | None = None,
) -> Path:
    """Rank 0 makes the run folder: that of the job in whose place this one was started, the one asked for,
    that of the checkpoint, or the first free runs/<name>-<n>. No other run may use it before `held` is
    closed."""
    try:
        if before:
            run_dir = Path(before.run_dir)
            run_dir.mkdir(parents=True, exist_ok=True)
        elif config.output.run_dir:
            run_dir = Path(config.output.run_dir)
            same = start_at is not None and start_at.resolve().is_relative_to(run_dir.resolve())
            again = config.checkpoint.resume == checkpoint_folder.AUTO
            # A replica that is started again before it has saved anything takes its state from the others.
            of_a_run = not config.data_parallel.members and (run_dir / metrics.FILE_NAME).exists()
            newest = checkpoint_folder.newest(run_dir)
            saved = newest is not None and (newest / checkpoint_folder.FACTS_FILE).is_file()
            if (of_a_run or saved) and not same and not again:
                how = checkpoint_folder.AUTO if config.data_parallel.members else run_dir
                raise ConfigError(
                    f"output.run_dir: {run_dir} holds a run already; name another folder, or go on with it "
                    f"through --checkpoint.resume {how}."
                )
            run_dir.mkdir(parents=True, exist_ok=True)
        elif start_at:
            run_dir = start_at.parent.parent
        else:
            run_dir = _first_free(Path("runs"), name)
        in_use(run_dir, held, "output.run_dir")
        if (run_dir / metrics.FILE_NAME).exists():
            metrics.read(run_dir / metrics.FILE_NAME)  # the run goes on with it: all ranks hear of damage
        if config.train.ledger:
            forget(run_dir)
        (run_dir / "config.toml").write_text(config_file.to_toml(config), encoding="utf-8")
        came = run_dir / origin.FOLDER  # of another run, it would be given to this one's model
        if (config.model.init_from or not start_at) and came.exists():
            shutil.rmtree(came)
        if config.model.init_from:
            origin.keep(Path(config.model.init_from), run_dir / origin.FOLDER)
        elif start_at and not came.exists() and origin.of_checkpoint(start_at).is_dir():
            origin.keep(origin.of_checkpoint(start_at), came)
        if not before:
            comm.keep(LIFE, json.dumps(dataclasses.asdict(Life(str(run_dir), time.time()))))
    except OSError as error:
        raise ConfigError(f"output.run_dir: {error.filename} cannot be written: {error.strerror}.") from error
    return run_dir


def _first_free(parent: Path, name: str) -> Path:
    parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        run_dir = parent / f"{name}-{number}"
        try:
            run_dir.mkdir()
            return run_dir
        except FileExistsError:
            number += 1


def _check_seen(run_dir: Path, ranks: dist.ProcessGroup) -> None:
    if not run_dir.is_dir():
        own, maker = comm.rank_name(ranks, ranks.rank()), comm.rank_name(ranks, 0)
        raise ConfigError(
            f"output.run_dir: {own} does not see {run_dir}, which {maker} has made; all hosts need one run "
            "folder: name one on shared storage."
        )


def _whole_model(config: RunConfig, shape: LlamaConfig, runtime: Runtime, folder: Path | None) -> Llama:
    """All stages' weights, from the checkpoint in `folder`, which the last step left."""
    assert folder is not None  # a run that takes no step has been resumed
    model = llama(config, shape, runtime, seed=None)
    checkpoint.load_weights(folder, model, comm.process_group(runtime.tp))
    return model


def _use_tuning(config: RunConfig, runtime: Runtime) -> str:
    """Hands the measured choices of this machine to the ops, the same on all ranks, and says so in a line for
    the log; empty where nothing asks for them or there are none."""
    tp = runtime.tp_size
    use({})
    if config.comm.tier != "auto" or config.comm.tuning == "off" or tp == 1:
        return ""
    device = device_name(runtime.device.type, torch.get_num_threads())
    found = on_rank_0(
        runtime.world, "Reading what was tuned", lambda: find(default_path(), device, tp, library()), Found
    )
    use(found.places)
    return found.words


def _sample(config: RunConfig, model: Llama, tokenizer: Tokenizer) -> str | None:
    """The prompt and what the model makes of it, or None where no sample is wanted. Every rank calls this."""
    output = config.output
    prompt = prompt_ids(tokenizer, output.sample_prompt.encode())
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
    return tokenizer.decode(ids[0, len(tokenizer.begin) :].tolist())


def _first_lines(config: RunConfig, shape: LlamaConfig, data: Corpus, run_dir: Path, runtime: Runtime) -> str:
    train, parallel = config.train, config.parallel
    axes = f"tp={parallel.tp or runtime.tp_size} with sequence parallelism"
    if parallel.tp_wire != "same":
        axes += f", rows gathered as {parallel.tp_wire}"
    if parallel.dp > 1:
        axes += f", dp={parallel.dp} at zero {parallel.zero}"
    if config.data_parallel.compression != "none":
        what = "gradients" if meets_every_step(config) else "displacements"
        axes += f", {what} by {config.data_parallel.compression}"
    if config.data_parallel.weight_wire != "same":
        axes += f", weights gathered as {config.data_parallel.weight_wire}"
    if replicas(config) > 1:
        axes += f" in {replicas(config)} replicas"
    if config.data_parallel.members:
        axes += ", one of the replicas"
    if not meets_every_step(config):
        axes += f" that meet by {config.data_parallel.method}"
    if parallel.pp > 1:
        wire = config.pipeline.wire
        rounded = "" if wire == "same" else f", activations and their gradients sent as {wire}"
        axes += f", pp={parallel.pp} ({config.pipeline.kind}{rounded})"
    if parallel.cp > 1:
        wire = config.context.wire
        rounded = "" if wire == "same" else f", keys and values as {wire}"
        axes += f", cp={parallel.cp} ({config.context.layout}, {config.context.variant}{rounded})"
    return "\n".join(
        [
            f"model  {shape.parameter_count() / 1e6:.1f} M parameters, {train.dtype}, {axes}, "
            f"{torch.get_num_threads()} thread(s) a rank",
            f"device {Device(runtime.device, runtime.why_device).describe()}",
            f"text   {data}",
            f"steps  {train.steps} of {tokens_per_step(config):,} tokens, in micro-batches of "
            f"{train.micro_batch_size} x {train.seq_len}",
            f"run    {run_dir}",
        ]
    )


def _close(run_dir: Path, dtype: str, sample: str | None, progress: Progress) -> None:
    """Writes and prints the sample, and says where everything is."""
    if sample is not None:
        (run_dir / SAMPLE_FILE).write_text(sample + "\n", encoding="utf-8")
        progress.say(f"\nSample\n{sample}")
    progress.say(
        f"\nEverything is in {run_dir}: weights in {MODEL_FOLDER}/ ({dtype}), {report.PLOT_FILE}, "
        f"{metrics.FILE_NAME}."
    )
