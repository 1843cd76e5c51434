"""The training loop: steps, validation, checkpoints.

A step with A micro-batches, on each rank:

    for each micro-batch:   loss = model(ids, labels);  (weight * loss / A).backward()
    reduce                  the gradients not yet summed, over data- and context-parallel ranks
    one exchange            every rank's [loss, sum of squares, exposed shares, memory, stop request]
    one pass                AdamW, or Muon, with the clipping coefficient as a factor on the gradients

All ranks of a tensor-parallel group see the same batches. Data-parallel ranks share the sequences of a step,
and context-parallel ranks the tokens of a sequence. All ranks decide from the same exchanged numbers, so they
stay in step without further messages. `passes` runs the micro-batches; pipeline stages run them in the order
of their schedule, and the last stage has the losses. `figures.py` says when the numbers are read.

If data_parallel.method lets replicas synchronize rarely, all of this happens within one replica, and
`OuterOptimizer.step` follows every step. After the last step the replicas are one model again. If replicas
join and leave (data_parallel.members), the job first joins the run, and the service deals out sequences.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from pyruntime import comm
from pyruntime.any_model import Report, explain
from pyruntime.comm import Runtime
from pyruntime.comm.ranges import marked
from pyruntime.data_parallel import NonFiniteGradient, OffloadError
from pyruntime.data_parallel.replicated import check_replicated
from pyruntime.llama import Llama
from pyruntime.llama.adapters import without_adapters
from pyruntime.nn import SigmoidRouter
from pyruntime.overlap.steps import StepLedger
from pyruntime.train import checkpoint, checkpoint_folder
from pyruntime.train.assembly import (
    batches_of,
    check_trains,
    data_axes,
    figures_of,
    optimizer_of,
    outer_of,
    passes_of,
    placement_check,
    preferences_of,
    sharded_of,
    validation_of,
)
from pyruntime.train.config import learning_rate
from pyruntime.train.data.batches import Batch
from pyruntime.train.data.corpus import Corpus
from pyruntime.train.data.preferences import Preferences
from pyruntime.train.device import Device
from pyruntime.train.errors import TrainingError
from pyruntime.train.figures import MOST_IN_A_ROW, Guard, StepFigures, exchange
from pyruntime.train.metrics import StepMetrics
from pyruntime.train.passes.reference import give_reference
from pyruntime.train.ranks import on_every_rank, told_to_all
from pyruntime.train.replicas import join, open_member
from pyruntime.train.resolved import ResolvedRun
from pyruntime.train.saving.saver import Saver
from pyruntime.train.signals import Stopped, StopRequest
from pyruntime.train.slow.judge import Finding
from pyruntime.train.slow.rebalance import Move, move_of
from pyruntime.train.watching.lowest import LowestLoss
from pyruntime.train.watching.step_profile import StepProfile

MOST_NAMES = 3
"""Parameters named in the error about a gradient that is not finite."""
SAVING_FAILED = 1000
"""Sent in place of a signal, and greater than any: ranks exchange it, and all end after the same step."""


class Trainer:
    """Trains `model` on `corpus` over the mesh of `runtime`; every rank makes one. In a pipeline `model` is
    this rank's part. Checkpoints are saved in `run_dir`. Raises ConfigError on every rank if one has nothing
    to train."""

    def __init__(
        self,
        run: ResolvedRun,
        model: Llama,
        corpus: Corpus,
        runtime: Runtime,
        run_dir: Path,
        stop: StopRequest,
    ):
        self._run, self._config, self.model, self._corpus = run, run.config, model, corpus
        self._runtime, self._run_dir, self._stop = runtime, run_dir, stop
        self._device = Device(runtime.device, runtime.why_device)
        on_every_rank(runtime.world, "Sharding the model", lambda: check_trains(model, runtime))
        within, between = data_axes(run, runtime)
        self.sharded = sharded_of(run, model, within)
        self.optimizer = on_every_rank(
            runtime.world,
            "Making the optimizer",
            lambda: optimizer_of(run, model, self.sharded, runtime, run_dir),
        )
        self.member = open_member(run, corpus, runtime)
        """This replica's membership, if replicas join and leave."""
        self.outer = outer_of(run, self.sharded, within, between, self.member, runtime)
        """The outer optimizer; None if replicas synchronize in every step."""
        self._preferences = preferences_of(run, runtime)
        self._passes, self._slow = passes_of(run, model, self.sharded, runtime, self._preferences)
        self._types = placement_check(run, model, self.sharded, runtime)
        self._figures = figures_of(
            run, model, within, self.outer, runtime, self._slow is not None, self._preferences
        )
        routers = [each for each in model.modules() if isinstance(each, SigmoidRouter)]
        self._routers = [each for each in routers if each.weight.requires_grad]
        """Those whose bias moves: a frozen router's does not."""
        self._guard = Guard(run.config.optimizer.spike_factor)
        self.lowest = LowestLoss(run.config.train.patience)
        self._val_loss: float | None = None
        """The validation loss after this step, if it was measured."""
        self._val_rewards: dict[str, float] | None = None
        """Rewards of the answers of the last validation, if the run learns preferences."""
        self._is_lowest = False
        """Whether that is the lowest so far."""
        self._skips = run.config.optimizer.on_bad_step == "skip"
        self._saver = Saver(run_dir, self.sharded, runtime.world, run.config.checkpoint, self.outer)
        self._batches, self._validation = batches_of(run, corpus, runtime), validation_of(run, corpus)
        self._moved: Sequence[int] = ()
        """The run's `work`, if it has moved."""
        self.move: Move | None = None
        """Work about to move, for which `fit` ended early; the saved checkpoint records it."""
        self.step = self._samples = 0
        self.tiers = Report(())
        self._deal: Sequence[int] = ()
        """The deal of the resumed checkpoint, if replicas join and leave."""
        self._resumed: tuple[Path, int] | None = None

    def resume(self, folder: Path) -> None:
        """Loads weights, optimizer state, compression residuals and step from the checkpoint in `folder`."""
        found = checkpoint.load(folder, self._run.facts, self.sharded, self._runtime.world, self.outer)
        self.step, self._deal = found.step, found.deal
        self._samples = found.samples
        self._guard.resume(found.norms, found.skipped, found.in_a_row)
        self.lowest.since = found.since_lowest
        self.lowest.loss = math.inf if found.lowest_loss is None else found.lowest_loss
        if self._config.parallel.rebalance == "on" and self._run.moved_before(found) == self._run.work:
            self._moved = self._run.work
        self._resumed = folder, self.step

    def refer(self, say: Callable[[str], None] = lambda line: None) -> None:
        """Gives the pairs of answers, if the run learns preferences, the reference's log-probabilities: those
        of the model as it is, without adapters, or of the run's file. Every rank calls it, before `resume`.
        Raises ConfigError as `give_reference` does."""
        if self._preferences is None:
            return

        def evaluate(batch: Batch) -> torch.Tensor:
            with without_adapters(self.model):
                return self._passes.log_probabilities(self._mine(batch))

        self.model.eval()
        give_reference(self._run, self._corpus, self._runtime, self._run_dir, evaluate, say)
        self.model.train()
        self._validation = validation_of(self._run, self._corpus)

    @property
    def saved(self) -> Path | None:
        """The newest checkpoint that this run has saved; None if there is none."""
        return self._saver.newest

    @property
    def checkpoint(self) -> Path | None:
        """The newest checkpoint that this run has saved, else the one that it resumed from."""
        return self.saved or (self._resumed and self._resumed[0])

    def join(self) -> bool:
        """Joins the run if replicas join and leave, and returns at its step. Returns False if the others have
        taken the last step. Raises the errors of `Member`."""
        if self.member is None:
            return True
        assert self.outer is not None
        if not join(self.member, self.outer, self.sharded, self.step, list(self._deal)):
            return False
        self.step = self.member.step
        if self.step == self._config.train.steps:
            self.outer.finish()  # too late for a step, but not for the last sum
            return False
        return True

    @property
    def save_took(self) -> tuple[int, float] | None:
        """Step and seconds of this run's newest checkpoint; None if there is none, or a stop does not
        save."""
        return self._saver.took if self._config.checkpoint.save_on_stop else None

    def what_is_not_resumed(self, folder: Path) -> str:
        """Says what the run cannot load from the checkpoint in `folder`; empty if it loads everything."""
        return checkpoint_folder.why_residuals_are_left(folder, self._run.facts)

    def close(self) -> None:
        """Restores the unsharded model, with its current weights."""
        if self._slow is not None:
            self._slow.close()
        self._passes.close()
        if self.outer is not None:
            self.outer.close()
        self.sharded.close()

    def fit(
        self, ledger: StepLedger | None = None, profile: StepProfile | None = None
    ) -> Iterator[StepMetrics]:
        """Takes the remaining steps and yields each one's metrics, on every rank. `ledger` enters every step,
        `profile` records those it wants. Ends early, at a checkpoint, if work must move (`move`), or where
        the validation loss no longer falls (`lowest`).

        Leaves a resumable checkpoint. Raises `Stopped` on all ranks after a step in which any of them
        received a signal. Raises TrainingError if a step is bad (loss or gradient not finite, or a spike) and
        bad steps are not skipped, or too many were.
        """
        train, keep = self._config.train, self._config.checkpoint
        every_steps = keep.every_steps
        comm.keep_freed_memory()
        with self._stop.deferred(self._lost_sentence), self._saver:
            self._figures.forget_exposed()
            has_ended = False
            while self.step < train.steps and not has_ended:
                number = self.step + 1
                entered = contextlib.nullcontext() if ledger is None else ledger.step(number)
                recorded = contextlib.nullcontext() if profile is None else profile.step(number)
                timed = contextlib.nullcontext() if self._slow is None else self._slow.step()
                with recorded, entered, marked("step", str(number)), timed, self._states_read():
                    known, signum = self._train_step(number)
                self.step, self._val_loss, self._is_lowest = self.step + 1, None, False
                news = [] if signum else self._look_for_slow()
                if self.step == train.steps or (train.patience and self._is_due(train.val_every)):
                    self.tiers = explain(self.model)  # before validation runs other sizes
                if self.step == train.steps and self.outer is not None:
                    self.outer.finish()
                for figures in known:
                    if not (figures.is_finite or self._skips):
                        raise self._bad(figures, self._guard.why_bad(figures))
                    metrics = self._metrics(figures)
                    if figures.step == self.step:
                        metrics = self._with_news(metrics, news)
                    if figures.step == self.step and self._is_due(train.val_every) and not signum:
                        metrics = self._with_validation(metrics)
                        has_ended = self.lowest.has_ended
                        self.move = None if has_ended else self.move
                    yield metrics
                if signum == SAVING_FAILED:
                    self._saver.finish()
                wants = self._is_due(every_steps) or has_ended or (self._is_lowest and keep.keep_best)
                if wants or (signum and keep.save_on_stop):
                    with contextlib.nullcontext() if ledger is None else ledger.saving(self.step):
                        is_last = signum or self.move is not None or self.step == train.steps or has_ended
                        self._save(and_wait=bool(is_last))
                if signum:
                    with self._stop.saving():
                        self._saver.finish()
                    raise Stopped(signum, self._stop_sentence())
                if self.move is not None:
                    break
            if signum := int(exchange([self._stop.signum], self._runtime).max()):  # since the last exchange
                raise Stopped(signum, self._stop_sentence())

    @contextlib.contextmanager
    def _states_read(self) -> Iterator[None]:
        """Makes an OffloadError of the block the TrainingError with which all ranks end."""
        try:
            yield
        except OffloadError as error:
            what = str(error).rstrip(".")
            with told_to_all():
                raise TrainingError(f"Step {self.step + 1}: {what}; {self._what_is_kept()}.") from error

    def _look_for_slow(self) -> list[Finding]:
        """Returns new findings about slow ranks and links, if a look is due after this step. If a checkpoint
        is also due, and the run continues, decides whether work moves."""
        slow, every_steps = self._slow, self._config.checkpoint.every_steps
        if slow is None:
            return []
        news = []
        if self.step % slow.every == 0:
            news = slow.look()
            self._figures.forget_exposed()  # the next step does not count waiting in the look
        is_last = self.step == self._config.train.steps
        if self._config.parallel.rebalance == "on" and self._is_due(every_steps) and not is_last:
            is_moved = bool(self._moved)
            self.move = move_of(self._run, self._runtime, slow, is_moved)
        return news

    def _train_step(self, step: int) -> tuple[list[StepFigures], int]:
        """Takes one step. Returns the figures of the steps since the last read, and a signal."""
        figures = self._figures
        figures.begin()
        # Set before the backward pass, which may update weights before the norm is known.
        self.optimizer.lr = lr = learning_rate(step, self._config.train.steps, self._config.optimizer)
        loss = self._forward_and_backward(step)
        square = self.optimizer.squared_norm()
        if self._types is not None:
            self._check_replicated()
        wish = SAVING_FAILED if self._saver.has_failed else self._stop.signum
        norm = figures.add(step, lr, loss, square, wish)
        with marked("update"):
            self._update(norm)
            if self.outer is not None:
                self.outer.step()
        if figures.is_late and not (figures.signum or step == 1 or self._is_wanted(step)):
            return [], 0
        return figures.read(), figures.signum

    def _update(self, norm: float | torch.Tensor) -> None:
        """Takes or skips the step. If the step is known to be bad and bad steps are not skipped, raises
        TrainingError before anything changes."""
        if self._figures.is_late:
            try:
                self.optimizer.step(norm)
            except NonFiniteGradient as error:
                own = self._figures.own()
                refusal = self._bad(own, self._guard.why_bad(own), error.parameters)
                comm.post_failure(str(refusal))  # other replicas do not see this one's gradient
                raise refusal from error
            self._move_biases()
            return
        (figures,) = self._figures.read()
        why = self._guard.why_bad(figures)
        if not why:
            self.optimizer.step(norm)
            self._move_biases()
            self._guard.counted(figures)
        elif self._skips:
            self.optimizer.step(math.nan)
            self._guard.skip()
            if self._guard.is_lost:
                raise self._bad(figures, f"{why}, and {MOST_IN_A_ROW} steps in a row were skipped")
        else:
            try:
                self.optimizer.step(math.nan)
            except NonFiniteGradient as error:
                names = () if figures.is_finite else error.parameters
                raise self._bad(figures, why, names) from error

    def _move_biases(self) -> None:
        for router in self._routers:
            router.move_bias(self._config.train.router_bias_rate)

    def _forward_and_backward(self, step: int) -> torch.Tensor:
        """Runs all micro-batches; returns their loss, in a pipeline on the last stage. Each counts by
        its targets, so that the mean over ranks is the mean over the targets of all."""
        train = self._config.train
        if self.member is not None:
            self._samples = (self.member.step_of_data(step) - 1) * train.batch_size
        batch = self._batches.take(self._samples)
        self._samples += train.batch_size
        micro = [self._mine(each) for each in batch.split(train.micro_batch_size)]
        return self._passes.step(micro, self._types)

    def _mine(self, batch: Batch) -> Batch:
        """Returns this rank's tokens of whole sequences, on its device, and the documents of all."""
        context = self.model.context

        def own(tokens: torch.Tensor) -> torch.Tensor:
            return self._device.put(tokens if context is None else context.shard(tokens, batch.documents))

        ids, labels, preferences = own(batch.ids), own(batch.labels), batch.preferences
        if preferences is not None:
            reference = preferences.reference
            reference = None if reference is None else self._device.put(reference)
            preferences = Preferences(own(preferences.answers), reference)
        if self._types is not None:
            for tokens in (ids, labels):
                self._types.mark(tokens, cp="sharded")
        return dataclasses.replace(batch, ids=ids, labels=labels, preferences=preferences)

    def _check_replicated(self) -> None:
        """Raises PlacementError if ranks are about to take different steps."""
        optimizer = self.optimizer
        numbers = {
            "optimizer.lr": optimizer.lr,
            "optimizer.clip_grad_norm": optimizer.max_norm,
            "the number of the step": self.step,
        }
        check_replicated(optimizer.arrived_rows(), numbers, self._runtime.world)

    def validate(self) -> dict[str, tuple[float, int]]:
        """Returns for each validation set the mean loss, in nats per target, and its targets; of pairs of
        answers the loss of a pair, and the pairs. The same on every rank."""
        sets, dp = self._corpus.sets, self._runtime.sizes.dp
        totals = torch.zeros(len(sets), dtype=torch.float64, device=self._device.device)
        rewards = torch.zeros(5, dtype=torch.float64, device=self._device.device)
        counts = [0] * len(sets)
        for number, batch in self._validation:
            counts[number] += batch.targets
        self.model.eval()
        # Every rank makes the same number of forward passes, since they may gather weights.
        for first in range(0, len(self._validation), dp):
            index = first + self._runtime.coordinate.dp
            number, whole = self._validation[min(index, len(self._validation) - 1)]
            batch = self._mine(whole)
            loss = self._passes.evaluate(batch)
            of_batch = self._preferences.take() if self._preferences is not None else 0.0
            if index < len(self._validation):
                rewards += of_batch
                totals[number] += loss.double() * (batch.targets / self._runtime.sizes.cp)
        self.model.train()
        told = exchange([*totals.tolist(), *rewards.tolist()], self._runtime)[..., 0, :].flatten(0, 2)
        totals, rewards = told.split([len(sets), len(rewards)], -1)
        sums = totals.T.tolist()
        if self._preferences is not None:
            found = self._preferences.figures(rewards)
            self._val_rewards = {name.removeprefix("rewards_"): each for name, each in found.items()}
        return {
            each.name: (math.fsum(parts) / count, count)
            for each, parts, count in zip(sets, sums, counts, strict=True)
        }

    def _is_due(self, every: int, step: int | None = None) -> bool:
        """Whether work that is due each `every` steps (0: never) and after the last step is due after this
        one."""
        step = self.step if step is None else step
        return step == self._config.train.steps or (every > 0 and step % every == 0)

    def _is_wanted(self, step: int) -> bool:
        """Whether the log, a validation or a checkpoint wants the figures of that step."""
        config = self._config
        looks = 0 if self._slow is None else self._slow.every
        intervals = (config.output.log_every, config.train.val_every, config.checkpoint.every_steps, looks)
        return any(self._is_due(every, step) for every in intervals)

    def _metrics(self, figures: StepFigures) -> StepMetrics:
        tokens_per_second = self._run.tokens_per_step / figures.step_time_s
        skipped = self._guard.skipped if self._guard.in_a_row else None
        return StepMetrics(**vars(figures), tokens_per_second=tokens_per_second, skipped=skipped)

    def _with_news(self, metrics: StepMetrics, news: Sequence[Finding]) -> StepMetrics:
        slow = [dataclasses.asdict(each) for each in news]
        moved = None if self.move is None else dataclasses.asdict(self.move)
        return dataclasses.replace(metrics, slow=slow or None, moved=moved)

    def _bad(self, figures: StepFigures, why: str, parameters: Sequence[str] = ()) -> TrainingError:
        names = ", ".join(parameters[:MOST_NAMES])
        more = f" and {len(parameters) - MOST_NAMES} more" if len(parameters) > MOST_NAMES else ""
        last = figures.step - max(1, self._guard.in_a_row)
        return TrainingError(
            f"Step {figures.step}: {why}{names and f' (that of {names}{more} is not finite)'}, so training "
            f"stopped with the weights of step {last}; lower optimizer.lr={self._config.optimizer.lr:g} or "
            "lengthen the warm-up."
        )

    def _with_validation(self, metrics: StepMetrics) -> StepMetrics:
        losses = self.validate()
        self._figures.forget_exposed()  # the next step does not count waiting in validation
        targets = sum(count for _, count in losses.values())
        nats = math.fsum(loss * count for loss, count in losses.values())
        size = math.fsum(losses[each.name][1] * each.bytes_per_token for each in self._corpus.sets)
        per_byte = nats / size if self._preferences is None else None
        by_set = {name: loss for name, (loss, _) in losses.items()} if len(losses) > 1 else None
        self._val_loss = nats / targets
        self._is_lowest = self.lowest.saw(self._val_loss)
        return dataclasses.replace(
            metrics,
            val_loss=nats / targets,
            val_loss_per_byte=per_byte,
            val_rewards=self._val_rewards,
            val_losses=by_set,
        )

    def _save(self, and_wait: bool) -> None:
        """Saves a checkpoint: before it returns if `and_wait`, else while the run continues."""
        guard, lowest = self._guard, self.lowest
        if self.outer is not None:
            self.outer.settle()  # so that the deal belongs to the sums that are saved
        facts = dataclasses.replace(
            self._run.facts,
            step=self.step,
            samples=self._samples,
            skipped=guard.skipped,
            in_a_row=guard.in_a_row,
            norms=tuple(guard.norms),
            deal=() if self.member is None else tuple(self.member.deal),
            val_loss=self._val_loss if self._val_loss is not None and math.isfinite(self._val_loss) else None,
            lowest_loss=lowest.loss if math.isfinite(lowest.loss) else None,
            since_lowest=lowest.since,
        )
        facts = self._run.moving(facts, self._moved if self.move is None else self.move.after)
        with self._stop.saving():
            self._saver.begin(facts)
            if and_wait:
                self._saver.finish()
        self._figures.forget_exposed()

    def _stop_sentence(self) -> str:
        return f"after step {self.step} of {self._config.train.steps}; {self._what_is_kept()}."

    def _lost_sentence(self) -> str:
        """The sentence for a signal that did not wait for the end of a step."""
        if self.step == self._config.train.steps:
            return self._stop_sentence()
        return f"in the midst of step {self.step + 1} of {self._config.train.steps}; {self._what_is_kept()}."

    def _what_is_kept(self) -> str:
        ledger = f"; the ledger is in {self._run_dir}" if self._config.train.ledger else ""
        return self.what_is_saved() + ledger

    def what_is_saved(self) -> str:
        """Says how to resume this run if it ends now."""
        saved = self.saved
        found = (self._run_dir, checkpoint_folder.step_of(saved)) if saved else self._resumed
        if found is None:
            return f"nothing was saved but the metrics in {self._run_dir}"
        return f"go on with --checkpoint.resume {found[0]} (it holds step {found[1]})"
