"""The processes that bench.training.finetune measures: each finetunes with one contender in its turns."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import multiprocessing
import random
import resource
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from bench.training.workers import (
    BETA1,
    BETA2,
    CLIP,
    KEEP_FREED_MEMORY,
    LEARNING_RATE,
    WEIGHT_DECAY,
    environment,
)

OURS = {"pyruntime, ZeRO 1": 1, "pyruntime, ZeRO 3": 3}
THEIRS = {"TRL, DDP": "ddp", "TRL, FSDP2": "fsdp"}
STEPS = 64
"""Steps of which rows are written; a run takes them again and again."""
MOST_STEPS = 10**6
RANK, ALPHA = 16, 32
TIMEOUT_S = 600.0
TEMPLATE = """{%- for message in messages %}
{{- '<' + message['role'] + '>' + message['content'] + '<end>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<assistant>' }}{%- endif %}
"""


@dataclasses.dataclass(frozen=True)
class Task:
    """The finetuning that every contender does."""

    shape: dict[str, int]
    folder: str
    """Holds the model, the conversations, and the rows that TRL gets."""
    lora: bool
    """Whether low-rank adapters train in place of all weights."""
    rank: int
    ranks: int


def write_task(task: Task) -> None:
    """Writes a model of random weights, conversations of very unequal lengths, and the rows of pyruntime's
    steps."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder, shape = Path(task.folder), task.shape
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=shape["vocab"],
        hidden_size=shape["dim"],
        intermediate_size=shape["ffn"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        max_position_embeddings=shape["seq"],
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "model")
    draw, lines = random.Random(0), []
    sequences = STEPS * shape["micro_batch"] * shape["accumulate"] * task.ranks
    while sum(map(len, lines)) < 1.6 * sequences * shape["seq"]:
        asked, said = (
            " ".join(f"{draw.randrange(10**6)}" for _ in range(draw.randrange(1, 2 + shape["seq"] // most)))
            for most in (40, 14)
        )
        lines.append(json.dumps({"prompt": asked, "completion": said}))
    (folder / "chats.jsonl").write_text("\n".join(lines))
    (folder / "template.jinja").write_text(TEMPLATE)
    _write_rows(task)


def _write_rows(task: Task) -> None:
    from pyruntime.train.data import corpus
    from pyruntime.train.data.batches import Batches
    from pyruntime.train.data.tokenizer import ByteTokenizer

    config, tokenizer = _config(task, 1), ByteTokenizer()
    size, seq = config.train.batch_size, config.train.seq_len
    text = corpus.open_corpus(config.data, corpus.build(config.data, tokenizer), tokenizer, seq)
    batches = Batches(text, config.train.seed, size, seq, task.shape["vocab"])
    rows, targets = [], 0
    for step in range(STEPS):
        batch = batches.read(step * size)
        targets += batch.targets
        documents = torch.zeros_like(batch.ids) if batch.documents is None else batch.documents
        for ids, labels, of_row in zip(batch.ids, batch.labels, documents, strict=True):
            counts = torch.unique_consecutive(of_row, return_counts=True)[1]
            positions = torch.cat([torch.arange(count) for count in counts.tolist()])
            row = {"input_ids": ids, "labels": labels, "shift_labels": labels, "position_ids": positions}
            rows.append({name: each.tolist() for name, each in row.items()})
    Path(task.folder, "rows.json").write_text(json.dumps({"rows": rows, "targets_per_step": targets / STEPS}))


def _config(task: Task, zero: int):
    from pyruntime.train.config import (
        Checkpoint,
        Data,
        Lora,
        Model,
        Optimizer,
        Output,
        Parallel,
        RunConfig,
        Train,
    )

    shape, folder = task.shape, Path(task.folder)
    sequences = shape["micro_batch"] * task.ranks
    return RunConfig(
        model=Model(init_from=str(folder / "model")),
        data=Data(
            paths=(str(folder / "chats.jsonl"),),
            chat_template=str(folder / "template.jinja"),
            tokenizer="bytes",
            cache=str(folder / "tokens"),
        ),
        optimizer=Optimizer(
            lr=LEARNING_RATE,
            schedule="wsd",
            warmup_steps=0,
            beta1=BETA1,
            beta2=BETA2,
            weight_decay=WEIGHT_DECAY,
            clip_grad_norm=CLIP,
        ),
        lora=Lora(rank=RANK, alpha=float(ALPHA)) if task.lora else Lora(),
        train=Train(
            steps=MOST_STEPS,
            batch_size=sequences * shape["accumulate"],
            micro_batch_size=shape["micro_batch"],
            seq_len=shape["seq"],
            device="cpu",
            threads=1,
            val_every=0,
            val_sequences=1,
            peak_flops=1e12,
            slow_every=0,
        ),
        parallel=Parallel(tp=1, dp=task.ranks, zero=zero),
        checkpoint=Checkpoint(save_on_stop=False),
        output=Output(run_dir=str(folder / f"zero{zero}-{task.lora}"), progress="off", sample_tokens=0),
    )


class Worker:
    """The process of one contender on this rank. port: where its ranks find each other, on rank 0's
    host."""

    def __init__(self, name: str, task: Task, port: int):
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        extra = {"MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "TORCHELASTIC_USE_AGENT_STORE": "False"}
        # pyruntime's trainer keeps freed memory by itself.
        extra |= {} if name in OURS else KEEP_FREED_MEMORY
        self._process = context.Process(target=_work, args=(theirs, name, task), daemon=True)
        with environment(extra):
            self._process.start()
        theirs.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._process.terminate()
        self._process.join()

    def turn(self, steps: int) -> list[float]:
        """Takes so many steps; returns their seconds, the loss of the last one, the most memory so far, and
        their processor seconds. Raises RuntimeError with the process's traceback, or if it has died or does
        not answer in time."""
        self._connection.send(steps)
        if not self._connection.poll(TIMEOUT_S):
            raise RuntimeError(f"{self.name}: no answer within {TIMEOUT_S:.0f} s.")
        try:
            found = self._connection.recv()
        except EOFError:
            raise RuntimeError(f"{self.name}: its process died.") from None
        if isinstance(found, str):
            raise RuntimeError(f"{self.name}:\n{found}")
        return found


class Turns:
    """The turns of a process, which it is told through a pipe. memory: bytes that it had before its model."""

    def __init__(self, orders: Connection):
        self._orders, self._left = orders, 0
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self._before = pages * resource.getpagesize()

    def wait(self) -> None:
        """Called before each step; returns when it may begin. Raises EOFError when there is none."""
        if self._left == 0:
            self._left = self._steps = self._orders.recv()
            self._begin, self._cpu = time.perf_counter(), time.process_time()

    def took(self, loss: float) -> None:
        """Called after each step; this rank's losses are averaged over the ranks."""
        self._left -= 1
        if self._left == 0:
            seconds = time.perf_counter() - self._begin
            peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            cpu = time.process_time() - self._cpu
            self._orders.send([seconds, loss, float(peak - self._before), cpu])


def _work(orders: Connection, name: str, task: Task) -> None:
    torch.set_num_threads(1)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            if name in OURS:
                _ours(task, OURS[name], orders)
            else:
                _theirs(task, THEIRS[name], orders)
    except EOFError:
        pass  # the parent has closed the pipe: there are no more turns
    except Exception:  # sent to the parent, which ends the benchmark with it
        orders.send(traceback.format_exc())


def _ours(task: Task, zero: int, orders: Connection) -> None:
    from pyruntime import Runtime
    from pyruntime.train.run import prepare
    from pyruntime.train.signals import StopRequest

    config = _config(task, zero)
    with Runtime.start(tp=1, dp=task.ranks, device="cpu") as runtime, contextlib.ExitStack() as held:
        turns = Turns(orders)
        job = prepare(config, "finetune", runtime, StopRequest(), held)
        turns.wait()
        for metrics in job.trainer.fit():
            turns.took(metrics.loss)
            turns.wait()


def _theirs(task: Task, kind: str, orders: Connection) -> None:
    import datasets
    import peft
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    turns, folder = Turns(orders), Path(task.folder)
    losses: list[float] = []

    class InTurns(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            losses.clear()

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            turns.wait()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            turns.took(sum(losses))
            turns.wait()

    class InOrder(SFTTrainer):
        def _get_train_sampler(self, *_: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

        def training_step(self, *arguments: Any, **named: Any) -> torch.Tensor:
            loss = super().training_step(*arguments, **named)
            losses.append(float(loss))
            return loss

    fsdp = {
        "fsdp": True,
        "fsdp_config": {
            "fsdp_version": 2,
            "reshard_after_forward": True,
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        },
    }
    shape = task.shape
    options = SFTConfig(
        output_dir=str(folder / f"{kind}-{task.lora}"),
        max_steps=MOST_STEPS,
        per_device_train_batch_size=shape["micro_batch"],
        gradient_accumulation_steps=shape["accumulate"],
        max_length=shape["seq"],
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        adam_beta1=BETA1,
        adam_beta2=BETA2,
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=CLIP,
        bf16=True,
        use_cpu=True,
        ddp_find_unused_parameters=False,
        gradient_checkpointing=False,
        remove_unused_columns=False,
        dataset_kwargs={"skip_prepare_dataset": True},
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **(fsdp if kind == "fsdp" else {}),
    )
    rows = datasets.Dataset.from_list(json.loads((folder / "rows.json").read_text())["rows"])
    dtype = torch.bfloat16 if task.lora else torch.float32
    adapters = peft.LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.0
    )

    def collate(found: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        return {name: torch.tensor([row[name] for row in found]) for name in found[0]}

    trainer = InOrder(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=dtype),
        args=options,
        train_dataset=rows,
        data_collator=collate,
        processing_class=_tokenizer(),
        peft_config=adapters if task.lora else None,
        callbacks=[InTurns()],
    )
    trainer.train()


def _tokenizer() -> Any:
    """Returns a tokenizer, which SFTTrainer wants, though the rows are tokens."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    engine = Tokenizer(models.BPE({"<end>": 0}, []))
    return PreTrainedTokenizerFast(tokenizer_object=engine, eos_token="<end>", pad_token="<end>")
