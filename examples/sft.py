"""Supervised finetuning in a loop of one's own: conversations by the model's chat template, ZeRO 2, then a
folder that transformers loads. Without arguments it makes a tiny model and four conversations.

torchrun --nproc-per-node 2 examples/sft.py [MODEL_FOLDER CONVERSATIONS.jsonl OUT_FOLDER]
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

import pyruntime
from pyruntime.train.data.conversations import chat_encoder, conversation_of
from pyruntime.train.data.tokenizer import JsonTokenizer

STEPS, BATCH, TEMPLATE = 3, 2, "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"


def tiny(folder: Path) -> list[str]:
    """Writes a model of random weights with a tokenizer of bytes, and returns what main() takes."""
    special = ["<|user|>", "<|assistant|>", "<|end|>"]
    names = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    engine = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, []))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=engine, eos_token="<|end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    shape = {"vocab_size": len(names), "hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4}
    AutoModelForCausalLM.from_config(LlamaConfig(**shape, num_hidden_layers=2)).save_pretrained(folder)
    lines = [json.dumps({"prompt": f"{n} + {n}?", "completion": f"{2 * n}" * n}) for n in (1, 2, 5, 9)]
    (folder / "chats.jsonl").write_text("\n".join(lines))
    return [str(folder), str(folder / "chats.jsonl"), str(folder / "out")]


def batch_of(samples: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ids [B, S], and labels [B, S] that are -100 where nothing is learned."""
    rows = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)
    return rows // 2, torch.where(rows % 2 == 1, rows // 2, -100)


def main(model_folder: str, chats: str, out: str) -> None:
    ranks = int(os.environ["WORLD_SIZE"])
    with pyruntime.Runtime.start(tp=1, dp=ranks) as runtime:
        rank = runtime.rank
        encoder = chat_encoder(JsonTokenizer(Path(model_folder)), "", "all")
        found = [conversation_of(json.loads(line)) for line in Path(chats).read_text().splitlines()]
        samples = [torch.from_numpy(tokens.astype("int64")) for tokens, _ in encoder.encode(found)]
        samples = [each for each in samples if len(each)]  # twice the token, plus one if it is a target
        model = AutoModelForCausalLM.from_pretrained(model_folder)
        handle = pyruntime.shard(model, runtime.dp, stage=2)
        optimizer = handle.adamw(lr=1e-3, max_norm=1.0)
        for step in range(STEPS):
            first = (step * ranks + rank) * BATCH
            ids, labels = batch_of([samples[(first + i) % len(samples)] for i in range(BATCH)])
            targets = (labels[:, 1:] != -100).sum()  # of this rank; a mean of means would weigh it wrongly
            dist.all_reduce(targets, group=runtime.dp.group)
            logits = model(input_ids=ids).logits[:, :-1].float()
            loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum") / targets
            (loss * ranks).backward()  # gradients are averaged over the ranks
            norm = optimizer.step().grad_norm
            dist.all_reduce(shown := loss.detach(), group=runtime.dp.group)
            print(f"rank {rank}, step {step}: loss {shown:.4f} of {targets} tokens, gradient norm {norm:.4f}")
        handle.complete()
        if rank == 0:
            model.save_pretrained(out)
            AutoTokenizer.from_pretrained(model_folder).save_pretrained(out)


if __name__ == "__main__":
    torch.manual_seed(0)  # the same tiny model on every rank
    with tempfile.TemporaryDirectory() as folder:
        main(*(sys.argv[1:] or tiny(Path(folder))))
