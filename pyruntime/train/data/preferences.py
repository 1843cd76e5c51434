"""Pairs of answers to one prompt, as preference tuning learns from them: the better one and the worse one.

A line or row is one of

    {"prompt": "..", "chosen": "..", "rejected": ".."}, each a text or a list of messages
    {"chosen": [..], "rejected": [..]}, whole conversations; the messages that both begin with are the prompt
    {"messages": [..], "chosen": {..}, "rejected": {..}}, messages; also in ShareGPT's shape

Only turns of the assistant behind the prompt count. A shard holds a pair as two conversations, one after the
other.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from pyruntime.train.data.chat_template import BadConversation
from pyruntime.train.data.conversations import KEYS, ChatEncoder, conversation, messages_of

ANSWERS = ("chosen", "rejected")
PAIR_KEYS = (*KEYS, *ANSWERS)
"""Keys of a line, and columns of a table, that are read."""
ASKS = ("system", "developer", "user")
"""Roles that begin a whole conversation; an answer begins with another."""


def is_pair(keys: Iterable[str]) -> bool:
    """Whether an object with these keys, or a table with these columns, is or holds pairs of answers."""
    return set(ANSWERS) <= set(keys)


def pair_of(content: dict[str, Any]) -> bytes:
    """Returns a line's or row's pair as JSON, {"chosen": .., "rejected": ..}, each as `conversation_of` has
    it. Raises BadConversation if it is none."""
    if missing := [key for key in ANSWERS if content.get(key) is None]:
        raise BadConversation(f'it holds no "{missing[0]}", found {", ".join(content) or "nothing"}')
    answers = [_answer(content[key], key) for key in ANSWERS]
    key = next((key for key in ("messages", "conversations", "prompt") if content.get(key)), "")
    prompt = messages_of(content[key], key, "user") if key else []
    are_whole = [answer[0]["role"] in ASKS for answer in answers]
    if any(are_whole):
        if not all(are_whole):
            raise BadConversation("one of its answers begins with a question, the other does not")
        prompt = _shared(answers, prompt)
        answers = [answer[len(prompt) :] for answer in answers]
    elif not prompt:
        raise BadConversation('it holds no "prompt", and its answers do not begin with one')
    asked = [message | {"weight": 0} for message in prompt]
    return json.dumps(
        {name: conversation(asked + answer, content) for name, answer in zip(ANSWERS, answers, strict=True)}
    ).encode()


def _answer(found: Any, key: str) -> list[dict[str, Any]]:
    return messages_of([found] if isinstance(found, dict) else found, key, "assistant")


def _shared(answers: Sequence[list[dict[str, Any]]], prompt: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages that two conversations begin with, all but the last of each at most."""
    first, second = answers
    shared = 0
    while shared < min(map(len, answers)) - 1 and first[shared] == second[shared]:
        shared += 1
    if not shared:
        raise BadConversation("its answers begin with different questions, so they share no prompt")
    if prompt and prompt[-1]["content"] not in [message["content"] for message in first[:shared]]:
        raise BadConversation('its answers are whole conversations, which do not hold its "prompt"')
    return first[:shared]


class PairEncoder(ChatEncoder):
    """Makes the tokens of pairs with a tokenizer and a template."""

    of_each = 2

    def encode(self, pairs: Sequence[bytes]) -> list[tuple[np.ndarray, int]]:
        """Returns two for each pair (`pair_of`), as `ChatEncoder.encode`: the better answer and the worse
        one, each behind the prompt. Both are nothing if one has no target."""
        contents = [json.loads(pair)[name] for pair in pairs for name in ANSWERS]
        try:
            found = self.encode_all(contents)
        except BadConversation as error:
            error.index //= self.of_each
            raise
        none = np.zeros(0, dtype=np.uint32), 0
        for first in range(0, len(found), 2):
            if not all(len(ids) for ids, _ in found[first : first + 2]):
                found[first : first + 2] = [none, none]
        return found


@dataclasses.dataclass(frozen=True)
class Preferences:
    """The pairs of some sequences of a batch."""

    answers: torch.Tensor
    """[B, S] int64: the answer that a token is part of, with its prompt: 2 k is the better one of pair k, 2 k
    + 1 the worse one. They ascend."""
    reference: torch.Tensor | None
    """[pairs, 2] fp64: the sum of the logarithms of the probabilities that the reference gives to the tokens
    to learn of each answer, in nats; None: not known yet."""

    def rows(self, rows: slice) -> Preferences:
        """Returns those of some sequences, numbered from 0."""
        answers = self.answers[rows]
        first, last = int(answers.min()) // 2, int(answers.max()) // 2
        reference = None if self.reference is None else self.reference[first : last + 1]
        return Preferences(answers - 2 * first, reference)

    @property
    def pairs(self) -> int:
        return int(self.answers.max()) // 2 + 1
