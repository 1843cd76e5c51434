"""The training loop: steps, validation, checkpoints.

A step with A micro-batches, on each rank:

    for each micro-batch:   loss = model(ids, labels);  (loss / A).backward()
    one exchange            every rank's [loss, sums of squares, exposed seconds, memory, stop request]
    one pass                AdamW with the clipping coefficient as a factor on the gradients

All ranks of a tensor-parallel group see the same batches; data-parallel ranks share the sequences of a step,
and context-parallel ranks the tokens of a sequence. All decide on the same exchanged numbers, so they stay in
step without further messages. Over data- and context-parallel ranks the gradients are reduced during the last
micro-batch, and the pass and the norm are those of `pyruntime.data_parallel`. The stages of a pipeline run
the micro-batches as their schedule says (`pipelined.py`); the last one has the losses.

A rank that is alone with its device does not wait for it in every step: loss and norm stay there until the
log wants them (`unread.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pyruntime import comm, ops
from pyruntime.comm.ranges import marked
from pyruntime.context import Context
from pyruntime.data_parallel import NonFiniteGradient, ShardedAdamW, shard
from pyruntime.llama.config import LlamaConfig
from pyruntime.nn.explain import Report, explain
from pyruntime.train import checkpoint
from pyruntime.train.batches import training_batch, validation_batches
from pyruntime.train.checkpoint_folder import Facts
from pyruntime.train.config import RunConfig, micro_batches, tokens_per_step
from pyruntime.train.corpus import Corpus
from pyruntime.train.device import Here
from pyruntime.train.errors import TrainingError
from pyruntime.train.metrics import StepMetrics
from pyruntime.train.optimizer import AdamW, clip_coefficient, global_norm
from pyruntime.train.pipelined import Pipelined, shared_weights
from pyruntime.train.schedule import learning_rate
from pyruntime.train.signals import Stopped, StopRequest
from pyruntime.train.unread import ReadStep, Unread


@dataclasses.dataclass(frozen=True)
class Exchange:
    """What the ranks tell each other in a step, reduced the same way on each of them."""

    loss: float
    squared_norm: tuple[list[float], float]
    """Of every tensor-parallel rank's shards, and of what they all hold; zeros where gradients are reduced
    over other ranks."""
    exposed_comm_s: float | None
    memory_bytes: int
    stop: int
    """Signal that a rank was sent; 0: none."""


class Trainer:
    """Trains `model` of `shape` on `corpus` over the tensor-parallel `group` and the mesh `replicas`, over
    which gradients are reduced: the data-parallel ranks, and with a `context` its ranks too. Every rank makes
    one. With `replicas` or a pipeline `pp`, `world` are all ranks, those of a tensor-parallel group one after
    another, then those of a context, of data parallelism, and of the pipeline. With `pp`, `model` is this
    rank's part of it. `here` is the device that the model is on."""

    def __init__(
        self,
        config: RunConfig,
        model: nn.Module,
        shape: LlamaConfig,
        corpus: Corpus,
        group: comm.Group,
        run_dir: Path,
        stop: StopRequest,
        replicas: DeviceMesh | None = None,
        world: comm.Group | None = None,
        context: Context | None = None,
        pp: comm.Group | None = None,
        here: Here | None = None,
    ):
        train = config.train
        self._here = here = here or Here()
        self._config, self._corpus, self._run_dir = config, corpus, run_dir
        self._stop = stop
        self._tp_size = tp_size = comm.group_size(group)
        self._group = comm.process_group(group if world is None else world)
        self._group_name = comm.group_name(self._group)
        self._context = context
        cp_size = 1 if context is None else context.size
        self._pp_size = 1 if pp is None else comm.group_size(pp)
        self._replicas = self._group.size() // (tp_size * self._pp_size)
        self._dp_size = self._replicas // cp_size
        self._dp_rank = self._group.rank() // (tp_size * cp_size) % self._dp_size
        self.model = model
        self.sharded = None if replicas is None else shard(model, replicas, stage=config.parallel.zero)
        shared = {} if pp is None else shared_weights(config, model, pp)
        self.optimizer: AdamW | ShardedAdamW
        if self.sharded is None:
            self.optimizer = AdamW(model, config.optimizer, shared)
        else:
            self.optimizer = self.sharded.adamw(
                betas=(config.optimizer.beta1, config.optimizer.beta2),
                eps=config.optimizer.eps,
                weight_decay=config.optimizer.weight_decay,
                max_norm=config.optimizer.clip_grad_norm,
                rounding=config.optimizer.rounding,
                parts=pp,
                shared=shared,
            )
        self._pipelined = None if pp is None else Pipelined(config, model, pp, self.sharded)
        self.step = 0
        self.tiers = Report(())
        self._facts = Facts(
            step=0,
            dtype=train.dtype,
            model=dataclasses.asdict(shape),
            rounding=config.optimizer.rounding,
        )
        self.saved: Path | None = None
        """The checkpoint of the last step, where one has been taken."""
        self._saved_at, self._saved_in = 0, run_dir
        self._exposed_s = 0.0
        self._memory_bytes = 0
        self._validation = validation_batches(
            corpus.val, train.val_sequences, train.micro_batch_size, train.seq_len
        )
        self._backward_seed = torch.tensor(1.0 / micro_batches(config), device=here.device)
        alone = here.is_cuda and self._group.size() == 1 and isinstance(self.optimizer, AdamW)
        self._unread = Unread(here.device) if alone and pp is None else None
        self._not_finite: ReadStep | None = None
        """The first step that was read and is not finite; nothing was updated from it on."""
        peak = here.peak_flops(train.dtype)
        self._mfu_of_one = (
            None if peak is None else shape.flops_per_token(train.seq_len) / (peak * self._group.size())
        )
        """MFU at one token per second."""

    def resume(self, folder: Path) -> None:
        """Takes up weights, optimizer state and step of the checkpoint in `folder`."""
        self.step = checkpoint.load(folder, self._facts, self._checkpointed(), self._group)
        self._saved_at, self._saved_in = self.step, folder

    def close(self) -> None:
        """The model is as it was, with its current weights."""
        if self._pipelined is not None:
            self._pipelined.close()
        if self.sharded is not None:
            self.sharded.close()

    def fit(self) -> Iterator[StepMetrics]:
        """Runs the steps that are left, and yields what was measured after each, on every rank.

        Leaves a resumable checkpoint behind. Raises `Stopped` on all ranks after a step in which any of them
        was sent a signal, and TrainingError where loss or gradient are no longer finite.
        """
        train = self._config.train
        comm.keep_freed_memory()
        with self._stop.deferred(self._lost_sentence):
            self._exposed_s = comm.exposed_s()
            while self.step < train.steps:
                with marked("step", str(self.step + 1)):
                    known, signum = self._train_step(self.step + 1)
                self.step += 1
                if self._not_finite is not None:
                    yield from known
                    self._require_finite(
                        self._not_finite.step, self._not_finite.loss, self._not_finite.grad_norm
                    )
                if self.step == train.steps:
                    self.tiers = explain(self.model)  # before validation runs other sizes
                if self._is_due(train.val_every) and not signum:
                    known[-1] = self._with_validation(known[-1])
                yield from known
                wanted = signum and self._config.checkpoint.save_on_stop
                if self._is_due(self._config.checkpoint.every_steps) or wanted:
                    self._save()
                if signum:
                    raise Stopped(signum, self._stop_sentence())
            if signum := self._exchange_stop():  # sent since the last step's exchange
                raise Stopped(signum, self._stop_sentence())

    def _is_due(self, every: int, step: int | None = None) -> bool:
        """Whether something that is done each `every` steps (0: never) and after the last is to be done
        after this step."""
        step = self.step if step is None else step
        return step == self._config.train.steps or (every > 0 and step % every == 0)

    def validate(self) -> float:
        """Mean loss over the validation windows, in nats per token; the same on every rank."""
        total = 0.0
        self.model.eval()
        with torch.no_grad():
            # As many forward passes on every rank: weights may be gathered under them.
            for first in range(0, len(self._validation), self._dp_size):
                index = first + self._dp_rank
                ids, labels = self._shards(*self._validation[min(index, len(self._validation) - 1)])
                loss = self._loss(ids, labels)
                total += loss * ids.numel() if index < len(self._validation) else 0.0
        self.model.train()
        tokens = sum(ids.numel() for ids, _ in self._validation)
        if self._group.size() > self._tp_size:
            shares = ops.all_gather_stats(torch.tensor([total], dtype=torch.float64), self._group_name)
            total = math.fsum(self._of_tp_groups(shares.flatten().tolist()))
        return total / tokens

    def _of_tp_groups(self, of_all: Sequence[float]) -> Sequence[float]:
        """What one rank of each tensor-parallel group has said, of what all ranks have."""
        return of_all[:: self._tp_size]

    def _loss(self, ids: torch.Tensor, labels: torch.Tensor) -> float:
        """Mean loss of a batch, without gradients; in a pipeline its last stage's, and 0 elsewhere."""
        if self._pipelined is not None:
            return self._pipelined.evaluate(self._here.put(ids), self._here.put(labels))
        return float(self.model(self._here.put(ids), self._here.put(labels)))

    def _shards(self, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's tokens of whole sequences."""
        return (
            (ids, labels)
            if self._context is None
            else (self._context.shard(ids), self._context.shard(labels))
        )

    def _train_step(self, step: int) -> tuple[list[StepMetrics], int]:
        """Takes one step. Returns what is known of the steps since the last that were, and a signal."""
        if self._unread is not None:
            return self._unread_step(self._unread, step)
        started = time.perf_counter()
        train = self._config.train
        ids, labels = training_batch(self._corpus.train, step, train.seed, train.batch_size, train.seq_len)
        ids, labels = self._shards(*(whole.chunk(self._dp_size)[self._dp_rank] for whole in (ids, labels)))
        if self._pipelined is None:
            loss = float(self._forward_and_backward(ids, labels))
        else:
            ids, labels = self._here.put(ids), self._here.put(labels)
            loss = self._pipelined.step(ids, labels, float(self._backward_seed))
        seen = self._exchange(loss)
        lr = learning_rate(step, train.steps, self._config.optimizer)
        with marked("update"):
            norm = self._update(step, lr, seen)
        seconds = time.perf_counter() - started
        metrics = self._metrics(
            ReadStep(step, lr, seen.loss, norm, seconds), seen.exposed_comm_s, seen.memory_bytes
        )
        return [metrics], seen.stop

    def _unread_step(self, unread: Unread, step: int) -> tuple[list[StepMetrics], int]:
        """A step of a rank that is alone, after which the device may still be at it."""
        config, train = self._config, self._config.train
        unread.begin()
        ids, labels = training_batch(self._corpus.train, step, train.seed, train.batch_size, train.seq_len)
        loss = self._forward_and_backward(ids, labels)
        lr = learning_rate(step, train.steps, config.optimizer)
        assert isinstance(self.optimizer, AdamW)
        scale = unread.add(step, lr, loss, self.optimizer.squared_norm(), config.optimizer.clip_grad_norm)
        self.optimizer.step(step, lr, scale)
        signum = self._stop.signum
        intervals = (config.output.log_every, train.val_every, config.checkpoint.every_steps)
        if not (signum or step == 1 or any(self._is_due(every, step) for every in intervals)):
            return [], signum
        found = unread.read()
        finite = [each for each in found if math.isfinite(each.loss) and math.isfinite(each.grad_norm)]
        if len(finite) < len(found):  # none after the first that is not: nothing was updated any more
            self._not_finite = next(each for each in found if each not in finite)
            finite = [each for each in finite if each.step < self._not_finite.step]
        memory = self._here.peak_memory_bytes()
        return [self._metrics(each, 0.0, memory) for each in finite], signum

    def _metrics(self, step: ReadStep, exposed_comm_s: float | None, memory_bytes: int) -> StepMetrics:
        tokens_per_second = tokens_per_step(self._config) / step.seconds
        return StepMetrics(
            step=step.step,
            loss=step.loss,
            grad_norm=step.grad_norm,
            lr=step.lr,
            tokens_per_second=tokens_per_second,
            step_time_s=step.seconds,
            exposed_comm_s=exposed_comm_s,
            memory_bytes=memory_bytes,
            mfu=None if self._mfu_of_one is None else tokens_per_second * self._mfu_of_one,
        )

    def _forward_and_backward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Of all micro-batches; their mean loss."""
        ids, labels = self._here.put(ids), self._here.put(labels)
        loss = torch.zeros((), device=self._here.device)
        size = self._config.train.micro_batch_size
        micro = list(zip(ids.split(size), labels.split(size), strict=True))
        for index, (ids_micro, labels_micro) in enumerate(micro):
            with marked("forward"):
                loss_micro = self.model(ids_micro, labels_micro)
            with self._accumulating(more=index + 1 < len(micro)), marked("backward"):
                loss_micro.backward(self._backward_seed)
            loss += loss_micro.detach() * self._backward_seed
        return loss

    def _accumulating(self, more: bool) -> contextlib.AbstractContextManager[None]:
        """Around a backward pass after which `more` follow in this step."""
        return self.sharded.accumulate() if self.sharded is not None and more else contextlib.nullcontext()

    def _update(self, step: int, lr: float, seen: Exchange) -> float:
        """Takes the step, and returns the gradient's norm. Raises TrainingError where it is not finite,
        before anything has changed."""
        if isinstance(self.optimizer, AdamW):
            norm = global_norm(*seen.squared_norm)
            self._require_finite(step, seen.loss, norm)
            self.optimizer.step(step, lr, clip_coefficient(norm, self._config.optimizer.clip_grad_norm))
            return norm
        self._require_finite(step, seen.loss, 0.0)
        self.optimizer.lr = lr
        try:
            return self.optimizer.step().grad_norm
        except NonFiniteGradient as error:
            raise TrainingError(f"Step {step}: {error}") from error

    def _exchange(self, loss: float) -> Exchange:
        """One small all-gather; with it ends what counts as the step's exposed communication."""
        exposed_s = comm.exposed_s()
        # The kernel's figure of the CPU is not exact.
        self._memory_bytes = max(self._memory_bytes, self._here.peak_memory_bytes())
        mine = [
            loss,
            *(self.optimizer.squared_norms() if isinstance(self.optimizer, AdamW) else (0.0, 0.0)),
            exposed_s - self._exposed_s,
            self._memory_bytes,
            self._stop.signum,
        ]
        self._exposed_s = exposed_s
        ranks = ops.all_gather_stats(torch.tensor(mine, dtype=torch.float64), self._group_name).tolist()
        losses, sharded, replicated, exposed, memory, stops = zip(*ranks, strict=True)
        return Exchange(
            loss=math.fsum(self._of_tp_groups(losses)) / self._replicas,
            squared_norm=(list(sharded), math.fsum(self._of_stages(replicated))),
            exposed_comm_s=None if self._here.is_cuda else max(exposed),
            memory_bytes=int(max(memory)),
            stop=int(max(stops)),
        )

    def _of_stages(self, of_all: Sequence[float]) -> Sequence[float]:
        """What the first rank of each stage has said."""
        return of_all[:: len(of_all) // self._pp_size]

    def _exchange_stop(self) -> int:
        """Signal that any rank was sent, the same on all; 0: none."""
        mine = torch.tensor([self._stop.signum], dtype=torch.float64)
        return int(ops.all_gather_stats(mine, self._group_name).max())

    def _require_finite(self, step: int, loss: float, norm: float) -> None:
        if math.isfinite(loss) and math.isfinite(norm):
            return
        raise TrainingError(
            f"Step {step}: the loss is {loss} and the gradient norm {norm}, so training stopped with "
            f"the weights of step {step - 1}; lower optimizer.lr={self._config.optimizer.lr:g} or lengthen "
            "the warm-up."
        )

    def _with_validation(self, metrics: StepMetrics) -> StepMetrics:
        loss = self.validate()
        self._exposed_s = comm.exposed_s()  # waiting in validation is not the next step's
        return dataclasses.replace(
            metrics, val_loss=loss, val_loss_per_byte=loss / self._corpus.val_bytes_per_token
        )

    def _save(self) -> None:
        with self._stop.saving():
            self.saved = checkpoint.save(
                self._run_dir,
                dataclasses.replace(self._facts, step=self.step),
                self._checkpointed(),
                self._group,
                self._config.checkpoint.keep,
            )
        self._saved_at, self._saved_in = self.step, self._run_dir
        self._exposed_s = comm.exposed_s()

    def _checkpointed(self) -> checkpoint.Checkpointed:
        return checkpoint.Checkpointed(self.model, self.optimizer, self.sharded)

    def _stop_sentence(self) -> str:
        return f"after step {self.step} of {self._config.train.steps}; {self.what_is_saved()}."

    def _lost_sentence(self) -> str:
        """Where a signal has not waited for the end of a step."""
        if self.step == self._config.train.steps:
            return self._stop_sentence()
        return f"in the midst of step {self.step + 1} of {self._config.train.steps}; {self.what_is_saved()}."

    def what_is_saved(self) -> str:
        """In words, for a run that ends here."""
        if not self._saved_at:
            return f"nothing was saved but the metrics in {self._run_dir}"
        return f"go on with --checkpoint.resume {self._saved_in} (it holds step {self._saved_at})"
