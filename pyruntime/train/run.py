"""A whole training run: data, model, training, and the files it leaves.

RUN_DIR/config.toml      the configuration as given
RUN_DIR/resolved.json    what follows from it: mesh, stages, shape of the model
RUN_DIR/metrics.jsonl    one object a step
RUN_DIR/checkpoints/     resumable checkpoints
RUN_DIR/reference.safetensors   of a run that learns preferences: the reference's log-probabilities
RUN_DIR/model/           the weights in Hugging Face's format, with the tokenizer
RUN_DIR/adapter/         in place of model/, if adapters were trained: these, in peft's format
RUN_DIR/came_with/       files of model.init_from besides weights; copied into model/
RUN_DIR/lock             names the process that writes here, while it lives
RUN_DIR/ledger/          what every rank waited for, and behind what bytes were hidden (train.ledger)
RUN_DIR/profile/         traces of single steps (train.profile)
RUN_DIR/tensorboard/, wandb/
RUN_DIR/loss.png, scorecard.json, scorecard.txt, samples.jsonl
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import math
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from pyruntime import comm
from pyruntime.comm import Runtime
from pyruntime.comm.exchange import first_line
from pyruntime.llama import Llama, origin, save_hf
from pyruntime.llama.adapter_files import adapter_files, save_adapters
from pyruntime.llama.hf import weight_files
from pyruntime.overlap.account import table
from pyruntime.overlap.files import RankLedger
from pyruntime.overlap.steps import StepLedger
from pyruntime.plan.cluster import find_cluster
from pyruntime.train import (
    agreement,
    checkpoint,
    checkpoint_folder,
    metrics,
    resolved,
    run_folder,
    samples,
    scorecard,
)
from pyruntime.train.config import RunConfig, meets_every_step, spelled_out
from pyruntime.train.data import corpus
from pyruntime.train.data.chat_template import give_template
from pyruntime.train.data.tokenizer import FILE_NAME as TOKENIZER_FILE
from pyruntime.train.data.tokenizer import Tokenizer
from pyruntime.train.disk import writing
from pyruntime.train.errors import TrainingError, refusing
from pyruntime.train.loop import Trainer
from pyruntime.train.manifest import DamagedError
from pyruntime.train.metrics import MetricsFile
from pyruntime.train.model_of_run import make_model, whole_model, words_of_dtype, words_of_positions
from pyruntime.train.planned import planned, predicted
from pyruntime.train.progress import Progress
from pyruntime.train.ranks import on_every_rank, on_rank_0, told_to_all
from pyruntime.train.resolved import ResolvedRun, resolve
from pyruntime.train.run_folder import Beginning
from pyruntime.train.samples import Sampler
from pyruntime.train.shape import open_model
from pyruntime.train.signals import StopRequest
from pyruntime.train.watching.heading import first_lines
from pyruntime.train.watching.log import StepLog, recorded
from pyruntime.train.watching.peak import peak_of
from pyruntime.train.watching.sinks import Sink, open_sinks
from pyruntime.train.watching.watch import Watch
from pyruntime.tuning.apply import Found, device_name, find, library, use
from pyruntime.tuning.cache import default_path

MODEL_FOLDER, ADAPTER_FOLDER = "model", "adapter"


def run(config: RunConfig, name: str, runtime: Runtime, stop: StopRequest) -> Path:
    """Trains as `config` says over the mesh of `runtime` and returns the run folder. Every rank calls it.

    `name` is the configuration's name, used for the folder. Raises ConfigError, `Stopped`, TrainingError,
    torch.OutOfMemoryError, or the communication errors of `pyruntime`.
    """
    with memory_told(config), contextlib.ExitStack() as held:
        job = prepare(config, name, runtime, stop, held)
        if joined(job):
            train(job, held)
            finish(job)
    return job.run_dir


@contextlib.contextmanager
def memory_told(config: RunConfig) -> Iterator[None]:
    """Adds to a device's OutOfMemoryError of the block which options need less memory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        train, ways = config.train, []
        if train.micro_batch_size > 1:
            ways.append(f"lower train.micro_batch_size={train.micro_batch_size}")
        if train.activation_checkpointing != "full":
            ways.append("set train.activation_checkpointing to full")
        if config.parallel.zero < 3 and (config.parallel.dp or 1) * config.parallel.cp > 1:
            ways.append(f"raise parallel.zero={config.parallel.zero}")
        optimizer = config.optimizer
        if optimizer.name == "adamw" and optimizer.offload == "none" and meets_every_step(config):
            ways.append("set optimizer.offload to states")
        ways.append("train on more ranks")
        raise torch.OutOfMemoryError(
            f"The run needs more memory than its device has: {', or '.join(ways)}. {first_line(error)}."
        ) from error


@dataclasses.dataclass
class RankRun:
    """State of a run on this rank, from its preparation to its end."""

    run: ResolvedRun
    """The current run: layers may have moved between stages, or micro-batches between ranks."""
    runtime: Runtime
    stop: StopRequest
    run_dir: Path
    progress: Progress
    tokenizer: Tokenizer
    text: corpus.Corpus
    model: Llama = dataclasses.field(init=False)
    """This rank's part of the model."""
    trainer: Trainer = dataclasses.field(init=False)
    watch: Watch = dataclasses.field(init=False)
    sampler: Sampler = dataclasses.field(init=False)
    answers: list[str] | None = None
    """What the model answered before training, if it was asked."""
    first: int = 0
    """The step after which this process began."""
    bytes_moved: int = 0
    """Bytes that this rank read from others in the steps of this process."""
    ledger: StepLedger | None = None

    @property
    def result(self) -> Path:
        """The folder of what was trained: a model, or adapters."""
        return self.run_dir / (ADAPTER_FOLDER if self.run.config.lora.rank else MODEL_FOLDER)

    @property
    def is_rank_0(self) -> bool:
        return self.runtime.world.rank() == 0

    def say(self, line: str) -> None:
        """Prints a line on rank 0; does nothing if it is empty."""
        if line and self.is_rank_0:
            self.progress.say(line)

    def make_model(self, doing: str) -> None:
        self.model = on_every_rank(self.runtime.world, doing, lambda: make_model(self.run, self.runtime))

    def make_trainer(self) -> None:
        self.trainer = Trainer(self.run, self.model, self.text, self.runtime, self.run_dir, self.stop)

    def write_resolved(self) -> None:
        """Writes resolved.json, on rank 0."""
        if self.is_rank_0:
            path = self.run_dir / resolved.FILE_NAME
            with told_to_all(), writing(path, self.trainer.what_is_saved()):
                path.write_text(self.run.to_json(), encoding="utf-8")

    def go_on_as(self, run: ResolvedRun, folder: Path) -> None:
        """Continues from the checkpoint in `folder` as `run`, whose `work` is divided otherwise."""
        self.run = run
        self.trainer.close()
        del self.trainer, self.model
        gc.collect()  # frees weights and states of the old stages before the new ones are made
        self.make_model("Moving work away from slow ranks")
        self.make_trainer()
        self.trainer.resume(folder)
        self.write_resolved()


# -- before the first step


def prepare(
    config: RunConfig, name: str, runtime: Runtime, stop: StopRequest, held: contextlib.ExitStack
) -> RankRun:
    """Prepares everything up to the first step. The caller closes `held` when the run ends."""
    tokenizer, asked = _resolved(config, runtime)
    begun, run_dir = _folder(asked, name, runtime, held)
    if begun.start_at:
        stop.says(f"before the first step; go on with --checkpoint.resume {begun.start_at}.")
    run = _with_work_of(begun.start_at, asked, runtime)
    progress = _progress(run.config, runtime, stop)
    text = corpus.open_everywhere(run.config, tokenizer, runtime.world, progress.say)
    _compare_first_weights(run.config, runtime)
    job = RankRun(run, runtime, stop, run_dir, progress, tokenizer, text)
    job.make_model("Making the model")
    _introduce(job, begun, _use_tuning(run, runtime))
    _ask(job)
    job.watch = _watch(job)
    job.make_trainer()
    job.trainer.refer(job.say)
    if begun.saved:
        _go_on(job, asked, begun.saved)
    job.write_resolved()
    return job


def joined(job: RankRun) -> bool:
    """Joins a run whose replicas come and go. Returns False if no step is left to take."""
    if not job.trainer.join():
        job.say("The replicas have taken the last step; nothing is left to do.")
        job.trainer.close()
        return False
    if job.trainer.member is not None:
        job.say(f"joins  {job.run.config.data_parallel.members} after step {job.trainer.step}")
    return True


def _resolved(config: RunConfig, runtime: Runtime) -> tuple[Tokenizer, ResolvedRun]:
    """Resolves the run on every rank. Raises ConfigError if the ranks do not agree on it."""
    ranks, config = runtime.world, spelled_out(config)
    agreement.check(ranks, "Comparing the configurations", agreement.of_config(config))
    tokenizer, shape = on_every_rank(ranks, "Opening the tokenizer", lambda: open_model(config, ranks.size()))
    agreement.check(ranks, "Comparing the models", agreement.of_shape(shape, tokenizer.fingerprint))
    settled = on_rank_0(ranks, "Settling the pipeline", lambda: resolved.settled(config, shape), RunConfig)
    return tokenizer, resolve(settled, shape, ranks.size())


def _folder(
    run: ResolvedRun, name: str, runtime: Runtime, held: contextlib.ExitStack
) -> tuple[Beginning, Path]:
    """Finds the checkpoint to resume from, and makes the run folder, which every rank must see."""
    ranks = runtime.world
    begun = on_rank_0(ranks, "Finding the checkpoint", lambda: run_folder.beginning_of(run), Beginning)
    run_dir = on_rank_0(
        ranks,
        "Making the run folder",
        lambda: run_folder.make(run.config, name, begun.start_at, held, begun.before),
        Path,
    )
    on_every_rank(ranks, "Opening the run folder", lambda: run_folder.check_seen(run_dir, ranks))
    return begun, run_dir


def _with_work_of(start_at: Path | None, asked: ResolvedRun, runtime: Runtime) -> ResolvedRun:
    """Returns the run with the work of the checkpoint in `start_at`, if it had moved and fits; else `asked`.
    Every rank calls it."""
    if start_at is None or asked.config.parallel.rebalance == "off":
        return asked
    work = on_rank_0(
        runtime.world,
        "Settling who does which work",
        lambda: list(asked.moved_before(checkpoint_folder.read(start_at))),
        list[int],
    )
    return asked.with_work(work) if work else asked


def _progress(config: RunConfig, runtime: Runtime, stop: StopRequest) -> Progress:
    mode = config.output.progress if runtime.world.rank() == 0 else "off"
    shown = config.train.steps, mode, config.output.log_every
    return Progress(*shown, on_closed=lambda: stop.note(signal.SIGPIPE))


def _compare_first_weights(config: RunConfig, runtime: Runtime) -> None:
    """Raises ConfigError on all ranks if the files of model.init_from or lora.init_from differ between
    hosts."""
    for option, source, files_of in (
        ("model.init_from", config.model.init_from, weight_files),
        ("lora.init_from", config.lora.init_from, adapter_files),
    ):
        if not source:
            continue
        doing = f"Comparing the files of {source}"
        look = functools.partial(_files, option, source, files_of)
        found = on_every_rank(runtime.world, doing, look)
        agreement.check_files(runtime.world, doing, f"{option}={source}", found)


def _files(option: str, source: str, files_of: Callable[[Path], set[Path]]) -> list[Path]:
    with refusing(f"{option}: ", (ValueError, OSError)):
        return sorted(files_of(Path(source)))


def _introduce(job: RankRun, begun: Beginning, tuned: str) -> None:
    """Prints what the run is, and what it resumes from."""
    run, before, start_at = job.run, begun.before, begun.start_at
    job.say(first_lines(run, job.text, job.run_dir, job.runtime))
    job.say(tuned and f"tuning {tuned}")
    job.say(words_of_dtype(run.config))
    job.say(words_of_positions(run.config))
    if before:
        goes = f"goes on with {start_at}" if start_at else f"begins anew in {before.run_dir}"
        job.say(f"again  its launcher has started this job anew, which {goes}")
    if not run.config.model.init_from:
        job.say(begun.not_with_it)
    job.say(begun.left_out and f"{begun.left_out} The run goes on with {start_at}.")


def _ask(job: RankRun) -> None:
    """Chooses the prompts of the run, and asks those that are questions, unless stages have parts of the
    model. Every rank calls it."""
    config, tokenizer = job.run.config, job.tokenizer
    ending = on_rank_0(
        job.runtime.world, "Reading the chat template", lambda: samples.ending_of(config, tokenizer), str
    )
    job.sampler = Sampler(config, job.text, tokenizer, ending, job.model.config.max_position_embeddings)
    job.say(str(job.sampler))
    if job.sampler.asks and job.run.mesh.pp == 1:
        job.answers = job.sampler.answers(job.model)


def _go_on(job: RankRun, asked: ResolvedRun, saved: Sequence[Path]) -> None:
    """Loads the first complete checkpoint of `saved`, with its distribution of work."""
    start_at = _resume(job.trainer, saved, job.say)
    if start_at != saved[0] and (run := _with_work_of(start_at, asked, job.runtime)) != job.run:
        job.go_on_as(run, start_at)
    job.say(job.trainer.what_is_not_resumed(start_at))


def _resume(trainer: Trainer, saved: Sequence[Path], say: Callable[[str], None]) -> Path:
    """Resumes from the first whole checkpoint of `saved`, and returns it. Raises DamagedError if none is."""
    for folder, older in itertools.zip_longest(saved, saved[1:]):
        try:
            trainer.resume(folder)
            return folder
        except DamagedError as error:
            if older is None:
                raise
            say(f"{error} The run goes on with {older}.")
    raise ValueError("There is no checkpoint to go on with.")


def _watch(job: RankRun) -> Watch:
    """Returns the peak and the prediction that steps are compared with. Every rank calls it."""
    run, output = job.run, job.run.config.output
    peak = peak_of(run.config, job.runtime)
    job.say(f"peak   {peak.words if peak else 'not known, so no MFU is; train.peak_flops states it'}")
    predicted_s = None
    if output.cluster and run.config.lora.rank:
        job.say("plan   the seconds of a step are not predicted for low-rank adapters")
    elif output.cluster:
        cluster = find_cluster(output.cluster)
        predicted_s = predicted(*planned(run, cluster)).total
        job.say(f"plan   {predicted_s:.3g} s a step, by {output.cluster} ({cluster.description})")
    return Watch(run.config.train.steps, run.mesh.ranks, run.flops_per_token, peak, predicted_s)


def _use_tuning(run: ResolvedRun, runtime: Runtime) -> str:
    """Gives the ops this machine's tuned choices, the same on all ranks. Returns a line about them for the
    log; empty if the run does not use them or there are none."""
    config, tp = run.config.comm, run.mesh.tp
    use({})
    if config.tier != "auto" or tp == 1:
        return ""
    device = device_name(runtime.device.type, torch.get_num_threads())
    found = on_rank_0(
        runtime.world, "Reading what was tuned", lambda: find(default_path(), device, tp, library()), Found
    )
    use(found.places)
    return found.words


# -- the steps


def train(job: RankRun, held: contextlib.ExitStack) -> None:
    """Takes the remaining steps, with a new trainer whenever work has moved."""
    job.first = job.trainer.step
    sinks = _sinks(job, held)
    bytes_before = _bytes_read()
    with (
        _metrics_file(job) if job.is_rank_0 else contextlib.nullcontext() as file,
        recorded(job.run.config, job.runtime, job.run_dir) as (job.ledger, profile),
    ):
        log = StepLog(job.watch, job.progress, job.say, [file, *sinks] if file else [])
        while True:
            for measured in job.trainer.fit(job.ledger, profile):
                log.add(measured, job.trainer)
            if job.trainer.move is None:
                break
            assert job.trainer.saved is not None  # that is where work moves
            job.go_on_as(job.run.with_work(job.trainer.move.after), job.trainer.saved)
    job.bytes_moved = _bytes_read() - bytes_before
    steps, lowest = job.run.config.train.steps, job.trainer.lowest
    if job.trainer.step < steps and lowest.has_ended:
        found = f"the lowest was {lowest.loss:.4f}" if math.isfinite(lowest.loss) else "none was finite"
        job.say(
            f"Ended after step {job.trainer.step} of {steps}: the validation loss was not lower in "
            f"{lowest.since} validations (train.patience); {found}."
        )


def _sinks(job: RankRun, held: contextlib.ExitStack) -> list[Sink]:
    """Opens TensorBoard and Weights & Biases on rank 0 until `held` is closed. Every rank calls it."""
    sinks: list[Sink] = []

    def open_them() -> None:
        with writing(job.run_dir, job.trainer.what_is_saved()):
            sinks.extend(open_sinks(job.run.config, job.run_dir, job.trainer.step, held))

    on_rank_0(job.runtime.world, "Opening what the run is watched by", open_them)
    return sinks


def _metrics_file(job: RankRun) -> MetricsFile:
    with told_to_all(), writing(job.run_dir / metrics.FILE_NAME, job.trainer.what_is_saved()):
        return MetricsFile(job.run_dir, resume_at=job.trainer.step)


def _bytes_read() -> int:
    return sum(figures.bytes_read for figures in comm.traffic().values())


# -- after the last step


def finish(job: RankRun) -> None:
    """Writes the final model, the report, the ledger and a sample."""
    runtime, is_pipeline = job.runtime, job.run.mesh.pp > 1
    # Groups of tensor parallelism and of experts that share ranks with the first ones.
    count = math.lcm(runtime.sizes.tp, runtime.ep.size)
    has_whole = runtime.world.rank() < count
    job.trainer.close()
    best = _best(job)
    if is_pipeline and has_whole:
        source = best or job.trainer.checkpoint
        assert source is not None  # a run that takes no step has been resumed
        job.model = whole_model(job.run, runtime, source)
    elif best and has_whole:
        checkpoint.load_weights(best, job.model, comm.process_group(runtime.tp))
    if has_whole:
        _save_model(job)
    on_rank_0(runtime.world, "Writing the report", lambda: _write_report(job))
    if job.ledger is not None:
        _write_ledger(job, job.ledger)
    answers = job.sampler.answers(job.model) if has_whole or not is_pipeline else []
    if job.is_rank_0:
        with writing(job.run_dir / samples.FILE_NAME, job.trainer.what_is_saved()):
            _close(job, job.sampler.samples(job.answers, answers))


def _best(job: RankRun) -> Path | None:
    """Returns the whole checkpoint with the lowest validation loss, if the run keeps it and went on behind
    it. Says so if that is not the lowest loss of all."""
    if not job.run.config.checkpoint.keep_best:
        return None
    world, lowest = job.runtime.world, job.trainer.lowest.loss

    def find() -> list[tuple[str, float]]:
        return [(str(path), loss) for path, loss in checkpoint_folder.by_loss(job.run_dir, lowest)]

    for name, loss in on_rank_0(world, "Finding the best checkpoint", find, list[tuple[str, float]]):
        path = Path(name)
        is_last = checkpoint_folder.step_of(path) == job.trainer.step
        try:
            if not is_last:
                checkpoint.check_files(path, world, job.run.facts)
        except DamagedError as error:
            job.say(str(error))
            continue
        whose = "whose validation loss was the lowest"
        if loss > lowest:
            whose = (
                f"whose validation loss is {loss:.4f}; the checkpoint with the lowest, {lowest:.4f}, is "
                f"damaged or not in {job.run_dir}"
            )
        if loss > lowest or not is_last:
            job.say(f"The model has the weights of {path.name}, {whose}.")
        return None if is_last else path
    if math.isfinite(lowest):
        job.say("No whole checkpoint has a validation loss; the model has the weights of the last step.")
    return None


def _save_model(job: RankRun) -> None:
    tokenizer, source = job.tokenizer, job.run.config.model.init_from
    with told_to_all(), writing(job.result, job.trainer.what_is_saved()):
        if job.run.config.lora.rank:
            save_adapters(job.model, job.result, str(Path(source).resolve()) if source else None)
            return
        begin = next(iter(tokenizer.begin), None)
        save_hf(job.model, job.result, separator=tokenizer.separator, begin=begin)


def _write_report(job: RankRun) -> None:
    """Writes the plot and the scorecard, and copies tokenizer and other files beside the weights."""
    run_dir, kept = job.run_dir, job.run_dir / origin.FOLDER
    with writing(run_dir, job.trainer.what_is_saved()):
        if kept.is_dir() and not job.run.config.lora.rank:
            try:
                origin.give_back(kept, job.result)
            except ValueError as error:  # the weights are there, and training is done
                job.say(f"{job.result} lacks the files that came with its model: {error}")
        if job.run.config.data.tokenizer or not (kept / TOKENIZER_FILE).is_file():
            job.tokenizer.save(job.result)
        give_template(run_dir, job.result)
        lines = metrics.read(run_dir / metrics.FILE_NAME)
        scorecard.plot_loss(lines, run_dir / scorecard.PLOT_FILE)
        if own := [line for line in lines if line["step"] > job.first]:
            tiers = [dataclasses.asdict(row) for row in job.trainer.tiers.rows]
            card = scorecard.scorecard(
                own, job.run.mesh.ranks, job.bytes_moved, job.run.flops_per_token, tiers
            )
            scorecard.write_scorecard(card, run_dir)
            job.say("\n" + scorecard.format_scorecard(card))


def _write_ledger(job: RankRun, entered: StepLedger) -> None:
    def write() -> RankLedger | None:
        try:
            return entered.write(job.run_dir, job.runtime)
        except OSError as error:
            raise TrainingError(f"{error.filename} cannot be written: {error.strerror}.") from error

    kept = on_every_rank(job.runtime.world, "Writing the ledger", write)
    if kept:
        job.say(f"\nLedger of rank 0, {kept.steps} steps\n{table(kept.account)}")
        if kept.saved:
            job.say(f"\nLedger of rank 0, {kept.saves} savings of a checkpoint\n{table(kept.saved)}")


def _close(job: RankRun, found: list[dict[str, str | None]]) -> None:
    """Writes and prints the samples, and prints where everything is."""
    samples.write(found, job.run_dir)
    if found:
        job.progress.say(f"\n{samples.as_text(found)}")
    config = job.run.config
    what = "adapters" if config.lora.rank else "weights"
    job.progress.say(
        f"\nEverything is in {job.run_dir}: {what} in {job.result.name}/ ({config.train.dtype}), "
        f"{scorecard.PLOT_FILE}, {metrics.FILE_NAME}."
    )
