"""What the model of a run says before and after training.

Of a run on conversations or pairs of answers: greedy answers to a few held-out questions. Of other runs: one
text that goes on, after training.

RUN_DIR/samples.jsonl   an object a sample: "prompt", "before" (null: not made), "after", and "wanted", the
                        answer in the data (null for text)
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from pyruntime.llama import Llama
from pyruntime.llama.generation import generate_steps
from pyruntime.text import short_repr
from pyruntime.train.config import RunConfig
from pyruntime.train.data.chat_template import BadConversation, find_template
from pyruntime.train.data.corpus import Corpus, Packed
from pyruntime.train.data.corpus_tokens import Tokens
from pyruntime.train.data.packed_pairs import PackedPairs
from pyruntime.train.data.tokenizer import JsonTokenizer, Tokenizer, prompt_ids

FILE_NAME = "samples.jsonl"
QUESTIONS = 3
"""Most questions that are asked."""
TEXT, TEMPERATURE = b"def ", 0.8
"""The text to go on with begins a function in Python, the default data; small models ramble at temperature
1."""
KEYS = ("prompt", "before", "after", "wanted")


class Prompt(NamedTuple):
    ids: list[int]
    wanted: list[int] | None
    """Tokens of the answer in the data; None: the prompt is a text to go on with."""


class Sampler:
    """Lets the model of a run answer. ending: what ends an answer, as `ending_of` returns it; positions: the
    model's. Each answer has a share of output.sample_tokens."""

    def __init__(self, config: RunConfig, corpus: Corpus, tokenizer: Tokenizer, ending: str, positions: int):
        self._tokenizer, self._ending, self._seed = tokenizer, ending, config.train.seed
        tokens = config.output.sample_tokens
        found = list(
            itertools.islice(_questions(corpus, min(config.train.seq_len, positions - 1)), QUESTIONS)
        )
        self.asks = bool(found)
        """Whether the prompts are questions."""
        found = found or [Prompt(prompt_ids(tokenizer, TEXT), None)]
        self.prompts = [each for each in found if tokens and each.ids and len(each.ids) < positions]
        self._tokens = -(-tokens // len(found))
        self._positions = positions

    def __str__(self) -> str:
        """A line for the log; empty where no question is asked."""
        if not (self.asks and self.prompts):
            return ""
        return (
            f"sample {len(self.prompts)} held-out questions, answered before and after training with at most "
            f"{self._tokens} tokens each"
        )

    def answers(self, model: Llama) -> list[str]:
        """Returns what the model adds to each prompt. Every rank of its group calls it."""
        was_training = model.training
        model.eval()
        found = [self._answer(model, prompt) for prompt in self.prompts]
        model.train(was_training)
        return found

    def _answer(self, model: Llama, prompt: Prompt) -> str:
        steps = generate_steps(
            model,
            torch.tensor([prompt.ids], device=model.embed.weight.device),
            min(self._tokens, self._positions - len(prompt.ids)),
            temperature=TEMPERATURE if prompt.wanted is None else 0.0,
            seed=self._seed,
            eos_token_id=self._tokenizer.separator,
        )
        said: list[int] = []
        for token in map(int, steps):
            said.append(token)
            if prompt.wanted is not None and self._ending and self._ending in self._behind(prompt, said):
                break
        return self._behind(prompt, said)

    def _behind(self, prompt: Prompt, ids: Sequence[int]) -> str:
        """Returns the text of tokens that follow a prompt, up to what ends an answer."""
        kept = list(itertools.takewhile(lambda token: token != self._tokenizer.separator, ids))
        text = self._tokenizer.decode([*prompt.ids, *kept])[len(self._tokenizer.decode(prompt.ids)) :]
        return text.partition(self._ending)[0] if self._ending and prompt.wanted is not None else text

    def samples(self, before: Sequence[str] | None, after: Sequence[str]) -> list[dict[str, str | None]]:
        """Returns the objects of the file."""
        found = []
        for number, prompt in enumerate(self.prompts):
            begin = 0 if prompt.wanted else len(self._tokenizer.begin)
            found.append(
                {
                    "prompt": self._tokenizer.decode(prompt.ids[begin:]),
                    "before": before[number] if before else None,
                    "after": after[number],
                    "wanted": None if prompt.wanted is None else self._behind(prompt, prompt.wanted),
                }
            )
        return found


def _questions(corpus: Corpus, most: int) -> Iterator[Prompt]:
    """Yields the beginnings of held-out conversations, of at most so many tokens, up to where the first
    answer begins; of each validation set in turn."""
    for of_sets in itertools.zip_longest(*(_of_set(each.tokens, each.packed) for each in corpus.sets)):
        yield from (prompt for prompt in of_sets if prompt is not None and len(prompt.ids) <= most)


def _of_set(tokens: Tokens, packed: Packed | None) -> Iterator[Prompt]:
    if packed is None:
        return
    ends, _ = tokens.conversations()
    begins = np.concatenate([[0], ends[:-1]])
    of_each = 2 if isinstance(packed, PackedPairs) else 1  # of a pair the chosen answer
    for begin, end in zip(begins[::of_each].tolist(), ends[::of_each].tolist(), strict=True):
        stored = tokens.read(begin, end).astype(np.int64)
        is_target, ids = stored & 1, stored >> 1
        first = int(is_target.argmax()) if len(stored) else 0
        if first == 0:  # nothing is learned of it, or nothing asked
            continue
        behind = np.flatnonzero(is_target[first:] == 0)
        last = first + int(behind[0]) if len(behind) else len(ids)
        yield Prompt(ids[:first].tolist(), ids[first:last].tolist())


def ending_of(config: RunConfig, tokenizer: Tokenizer) -> str:
    """Returns the text that ends an answer by the run's chat template; empty if it is not known. Raises
    ConfigError for a damaged template."""
    folder: Path | None = None
    specials: tuple[str, ...] = ()
    if isinstance(tokenizer, JsonTokenizer):
        folder, specials = tokenizer.folder, tokenizer.special_tokens
    found = find_template(folder, config.data.chat_template, specials)
    try:
        return "" if found is None else found.ending()
    except BadConversation:
        return ""


def as_text(samples: Sequence[dict[str, str | None]]) -> str:
    """Returns the samples as the log shows them."""
    found = []
    for each in samples:
        if each["wanted"] is None:
            found.append(f"Sample\n{each['prompt']}{each['after']}")
            continue
        lines = [f"{name:<7} {each[name]}" for name in KEYS[1:] if each[name] is not None]
        found.append("\n".join([f"Sample\n{each['prompt']}", *lines]))
    return "\n\n".join(found)


def write(samples: Sequence[dict[str, str | None]], run_dir: Path) -> None:
    lines = "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in samples)
    (run_dir / FILE_NAME).write_text(lines, encoding="utf-8")


def read(run_dir: Path) -> list[dict[str, str | None]]:
    """Returns the samples that a run left, none if it has made none. Raises ValueError for another file."""
    path = run_dir / FILE_NAME
    if not path.is_file():
        return []
    found = []
    for number, line in enumerate(filter(None, path.read_text(encoding="utf-8").split("\n")), 1):
        try:
            each = json.loads(line)
            if not (isinstance(each, dict) and all(isinstance(each[key], str | None) for key in KEYS)):
                raise ValueError("a sample has texts")
        except (ValueError, KeyError, RecursionError) as error:
            raise ValueError(
                f"{path} does not hold the samples of a run: line {number} is {short_repr(line)}; remove it."
            ) from error
        found.append({key: each[key] for key in KEYS})
    return found
