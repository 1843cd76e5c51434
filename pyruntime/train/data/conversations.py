"""Conversations as a model learns from them: turns in OpenAI's shape, their tokens, and which are targets.

A line or row is one of

    {"messages": [{"role": "user", "content": ".."}, {"role": "assistant", "content": ".."}], "tools": [..]}
    {"prompt": "..", "completion": ".."}, of text or of lists of messages; only the completion is learned
    {"conversations": [{"from": "human", "value": ".."}, {"from": "gpt", "value": ".."}], "system": ".."}

An assistant's message with "weight": 0 is not learned. A token is a target if a model is to learn to say it:
it is part of an assistant's turn, or ends it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pyruntime.choices import LearnedTurns
from pyruntime.text import short_repr
from pyruntime.train.data.chat_template import BadConversation, ChatTemplate, find_template
from pyruntime.train.data.tokenizer import JsonTokenizer, Tokenizer
from pyruntime.train.errors import ConfigError

KEYS = ("messages", "conversations", "prompt", "completion", "system", "tools")
"""Keys of a line, and columns of a table, that are read."""
SHAPES = (
    '"messages", "conversations", or "prompt" and "completion" (Alpaca\'s "instruction" and "input" are a '
    'prompt, its "output" is a completion)'
)
"""The keys of a line in an error."""
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_ZERO = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")
"""A zero character in JSON, unlike a backslash, which is two there, before the text u0000."""
OF_SHAREGPT = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "observation": "tool"}


def is_conversation(keys: Iterable[str]) -> bool:
    """Whether an object with these keys, or a table with these columns, is or holds conversations."""
    keys = set(keys)
    return bool(keys & {"messages", "conversations"}) or {"prompt", "completion"} <= keys


def is_example(keys: Iterable[str]) -> bool:
    """Whether these are keys of a conversation, of Alpaca's shape, or of an answer and a worse one."""
    keys = set(keys)
    return is_conversation(keys) or {"instruction", "output"} <= keys or {"chosen", "rejected"} <= keys


def conversation_of(content: dict[str, Any]) -> bytes:
    """Returns a line's or row's conversation as JSON, {"messages": [..], "tools": [..] or null}. Raises
    BadConversation if it is none."""
    if "messages" in content:
        messages = messages_of(content["messages"], "messages")
    elif "conversations" in content:
        messages = messages_of(content["conversations"], "conversations")
    elif "prompt" in content and "completion" in content:
        asked = messages_of(content["prompt"], "prompt", "user")
        messages = [message | {"weight": 0} for message in asked]
        messages += messages_of(content["completion"], "completion", "assistant")
    else:
        found = ", ".join(content) or "nothing"
        raise BadConversation(f'it holds no "messages", no "prompt" and "completion", found {found}')
    return json.dumps(conversation(messages, content)).encode()


def conversation(messages: list[dict[str, Any]], content: dict[str, Any]) -> dict[str, Any]:
    """Returns {"messages": [..], "tools": [..] or null} of messages and the other keys of their line. Raises
    BadConversation."""
    system, tools = content.get("system"), content.get("tools")
    if isinstance(system, str) and system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    if isinstance(tools, str):
        tools = _parsed(tools, "tools") if tools.strip() else None
    if not isinstance(tools, list | None):
        raise BadConversation(f'its "tools" are no list, found {short_repr(tools)}')
    found = {"messages": messages, "tools": tools or None}
    if _ZERO.search(json.dumps(found)):
        raise BadConversation("it holds a zero character")
    return found


def messages_of(found: Any, key: str, role: str = "") -> list[dict[str, Any]]:
    """role: of a string in place of a list."""
    if isinstance(found, str) and role:
        return [{"role": role, "content": found}]
    if not isinstance(found, list) or not found:
        raise BadConversation(f'its "{key}" is no list of turns, found {short_repr(found)}')
    return [_message(each, number) for number, each in enumerate(found, 1)]


def _message(found: Any, number: int) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise BadConversation(f"turn {number} is no object, found {short_repr(found)}")
    message = {key: value for key, value in found.items() if value is not None}  # tables have every key
    if "from" in message and "role" not in message:
        said = message.pop("from")
        message = {"role": OF_SHAREGPT.get(str(said), said), "content": message.pop("value", None)} | message
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise BadConversation(
            f"turn {number} is of {short_repr(role)}; a role is one of {', '.join(ROLES)}, or of ShareGPT "
            f"{', '.join(OF_SHAREGPT)}"
        )
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise BadConversation(f"turn {number} holds other content than text, which is not read")
        content = "".join(part["text"] for part in content)
    if content is None and message.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise BadConversation(f"turn {number} has no text as its content, found {short_repr(content)}")
    if message.get("weight", 1) not in (0, 1):
        raise BadConversation(f"the weight of turn {number} is neither 0 nor 1")
    return message | {"content": content} | _calls(message, number)


def _calls(message: dict[str, Any], number: int) -> dict[str, Any]:
    """Templates want the arguments of calls as objects; OpenAI has them as text."""
    calls = message.get("tool_calls")
    if not calls:
        return {}
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise BadConversation(f"the tool_calls of turn {number} are no list of objects")
    found = []
    for call in calls:
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            arguments = _parsed(function["arguments"] or "{}", f"arguments of turn {number}")
            call = call | {"function": function | {"arguments": arguments}}
        found.append(call)
    return {"tool_calls": found}


def _parsed(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadConversation(f"the {what} are no JSON ({error})") from None


class ChatEncoder:
    """Makes the tokens of conversations with a tokenizer and a template. learned: assistant turns that are
    targets."""

    begin: tuple[int, ...] = ()
    separator = None  # a template begins and ends a conversation
    of_each = 1
    """Conversations that a document is stored as."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, learned: LearnedTurns):
        self.tokenizer, self._template, self._learned = tokenizer, template, learned
        self.vocab_size, self.fingerprint = tokenizer.vocab_size, tokenizer.fingerprint
        how = json.dumps([template.source, template.tokens, learned]).encode()
        self.recipe = hashlib.blake2b(how, digest_size=16).digest()
        """Hash of what decides the text and the targets."""

    def encode(self, conversations: Sequence[bytes]) -> list[tuple[np.ndarray, int]]:
        """Returns for each conversation (`conversation_of`) what a shard stores, uint32 [n]: twice the token,
        plus one if it is a target; nothing if no token is. And the bytes of its text, 0 if nothing. Raises
        BadConversation."""
        return self.encode_all([json.loads(each) for each in conversations])

    def encode_all(self, contents: Sequence[dict[str, Any]]) -> list[tuple[np.ndarray, int]]:
        """The same for conversations that are read."""
        found = []
        for index, content in enumerate(contents):
            try:
                found.append(self.rendered(content))
            except BadConversation as error:
                error.index = index
                raise
        encoded = self.tokenizer.encode_with_places([text for text, _ in found])
        return [
            _with_targets(ids, places, text, spans)
            for (text, spans), (ids, places) in zip(found, encoded, strict=True)
        ]

    def rendered(self, content: dict[str, Any]) -> tuple[str, list[tuple[int, int]]]:
        """Returns a conversation's text, and the characters of the turns to learn."""
        messages = [
            {key: value for key, value in message.items() if key != "weight"}
            for message in content["messages"]
        ]
        weights = [
            message.get("weight", 1) for message in content["messages"] if message["role"] == "assistant"
        ]
        text, spans = self._template.turns(messages, content["tools"], self._learned == "last")
        chosen = [span for span, weight in zip(spans, weights[-len(spans) :], strict=True) if weight]
        return text, chosen

    def save(self, folder: Path) -> None:
        self.tokenizer.save(folder)


def _with_targets(
    ids: np.ndarray, places: np.ndarray, text: str, spans: Sequence[tuple[int, int]]
) -> tuple[np.ndarray, int]:
    """A token with characters of a turn is its; the first token of all follows nothing."""
    begins, ends = places.T
    targets = np.zeros(len(ids), dtype=bool)
    for begin, end in spans:
        targets |= (begins < end) & ((ends > begin) | (begins >= begin))
    targets[:1] = False
    if not targets.any():
        return np.zeros(0, dtype=np.uint32), 0
    return (2 * ids.astype(np.uint32) + targets).astype(np.uint32), len(text.encode())


def chat_encoder(
    tokenizer: Tokenizer, template: str, learned: LearnedTurns, kind: type[ChatEncoder] = ChatEncoder
) -> ChatEncoder:
    """template: file of a chat template; empty: that of the tokenizer's folder. Raises ConfigError."""
    folder: Path | None = None
    specials: tuple[str, ...] = ()
    if isinstance(tokenizer, JsonTokenizer):
        folder, specials = tokenizer.folder, tokenizer.special_tokens
    found = find_template(folder, template, specials)
    if found is None:
        where = "a tokenizer of bytes" if folder is None else str(folder)
        raise ConfigError(
            f"data.paths holds conversations, and {where} has no chat template to render them with; name a "
            "file with one in data.chat_template."
        )
    return kind(tokenizer, found, learned)
