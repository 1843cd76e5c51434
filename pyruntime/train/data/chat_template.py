"""The chat template of a model: renders a conversation to text, and finds the assistant's turns in it.

A template is Jinja, run in jinja2's sandbox as transformers runs it. Where it marks what the assistant says
({% generation %}), these marks count. Else a turn begins behind what the template renders before it with the
prompt for an answer (`add_generation_prompt`), and ends where the conversation rendered up to it does.
"""

from __future__ import annotations

import datetime
import functools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from pyruntime.train.errors import ConfigError

TEMPLATE_FILE, CONFIG_FILE, TOKENS_FILE = (
    "chat_template.jinja",
    "tokenizer_config.json",
    "special_tokens_map.json",
)
TODAY = datetime.datetime(2024, 7, 26)
"""The day that templates are told, Llama's default: with another one each day a text would have other tokens
each day."""
MARK = "\0"
"""Around what is inside {% generation %}; no text holds it."""

Span = tuple[int, int]
"""Characters begin to end of a text."""


class BadConversation(ValueError):
    """A conversation that cannot be rendered; the message follows "line 3: ", without full stop."""

    def __init__(self, why: str, index: int = 0):
        super().__init__(why)
        self.index = index
        """Its place among the conversations of one call."""


class ChatTemplate:
    """A template, with the names of special tokens that it may ask for (`bos_token`, ..).

    source: its text. tokens: special tokens by name. ends: special tokens that may end a turn.
    """

    def __init__(self, source: str, tokens: dict[str, str], ends: Sequence[str] = ()):
        self.source, self.tokens, self._ends = source, tokens, tuple(ends)
        self._marks = _compiled(source)[1]

    def _render(self, messages: Sequence[dict], tools: list | None, prompt: bool = False) -> str:
        names = self.tokens | {"add_generation_prompt": prompt, "documents": None, "tools": tools}
        try:
            text = _compiled(self.source)[0].render(messages=list(messages), **names)
        except Exception as error:  # a template may raise whatever Python does
            first = (str(error).splitlines() or [""])[0].rstrip(".") or type(error).__name__
            raise BadConversation(f"the chat template refuses it: {first}") from None
        return text.encode("utf-8", errors="backslashreplace").decode()

    def turns(self, messages: Sequence[dict], tools: list | None, only_last: bool) -> tuple[str, list[Span]]:
        """Returns the text of a conversation, and where each assistant turn is in it, or the last one, with
        the token that ends it. Raises BadConversation if the template refuses the conversation."""
        marked = self._render(messages, tools)
        numbers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if not self._marks:
            wanted = numbers[-1:] if only_last else numbers
            return marked, [self._turn(messages, tools, number, marked) for number in wanted]
        spans, at = [], 0
        for number, part in enumerate(marked.split(MARK)):
            if number % 2:
                spans.append((at, at + len(part)))
            at += len(part)
        if len(spans) != len(numbers):
            raise BadConversation(
                f"the chat template marks {len(spans)} passages as the assistant's, but the conversation has "
                f"{len(numbers)} turns of it"
            )
        return marked.replace(MARK, ""), spans[-1:] if only_last else spans

    def prompt(self, messages: Sequence[dict]) -> str:
        """Returns the text of a conversation up to where the assistant's answer begins. Raises
        BadConversation if the template refuses it."""
        return self._render(messages, None, prompt=True).replace(MARK, "")

    def ending(self) -> str:
        """Returns what the template writes behind an answer, which a model says to end it; empty if
        nothing. Raises BadConversation if the template refuses a question and an answer."""
        answer = "pyruntime"
        text, ((begin, end),) = self.turns(
            [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}], None, only_last=True
        )
        return text[begin:end].rpartition(answer)[2].strip()

    def _turn(self, messages: Sequence[dict], tools: list | None, number: int, text: str) -> Span:
        before = self._render(messages[:number], tools, prompt=True)
        if not text.startswith(before):
            raise BadConversation(
                f"the chat template renders what precedes turn {number + 1} otherwise when an answer is "
                "asked for, so it is not known where the answer begins; mark answers with {% generation %} "
                "in a copy of the template and name it in data.chat_template"
            )
        until = self._render(messages[: number + 1], tools)
        if text.startswith(until):
            return len(before), self._end(text, len(before), len(until))
        # The template renders an earlier turn otherwise: those of models that think drop their thoughts.
        closing = max(
            self._ends, key=lambda end: until.rfind(end) + len(end) if end in until else 0, default=""
        )
        end = text.find(closing, len(before)) if closing in until[len(before) :] else -1
        if not closing or end < 0:
            raise BadConversation(
                f"the chat template renders turn {number + 1} otherwise when the conversation goes on, so it "
                "is not known where the turn ends; take data.targets=last, or mark answers with "
                "{% generation %} in a copy of the template and name it in data.chat_template"
            )
        return len(before), end + len(closing)

    def _end(self, text: str, begin: int, end: int) -> int:
        """Leaves out the white space behind the token that ends a turn: nobody generates it."""
        turn = text[begin:end].rstrip()
        return begin + len(turn) if turn.endswith(self._ends or ("\0",)) else end


@functools.lru_cache(maxsize=8)
def _compiled(source: str) -> tuple[jinja2.Template, bool]:
    """Returns a template, and whether it marks what the assistant says. Raises ConfigError."""

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": refuse, "strftime_now": TODAY.strftime}
    try:
        is_marked = any(
            True for _ in environment.parse(source).find_all(jinja2.nodes.CallBlock) if _is_mark(_)
        )
        return environment.from_string(source), is_marked
    except jinja2.TemplateError as error:
        line = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise ConfigError(f"The chat template is no Jinja: {error.message}{line}.") from error


def _is_mark(block: jinja2.nodes.CallBlock) -> bool:
    return isinstance(block.call.node, jinja2.nodes.ExtensionAttribute)


class _Generation(jinja2.ext.Extension):
    """{% generation %} .. {% endgeneration %}, around what the assistant says."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> str:
        return MARK + caller() + MARK


def find_template(folder: Path | None, named: str, ends: Sequence[str]) -> ChatTemplate | None:
    """Returns the template in the file `named`, or if that is empty, of the model in `folder`:
    chat_template.jinja, else the one in tokenizer_config.json; None if there is none. ends: the special
    tokens. Raises ConfigError for a damaged file."""
    config = {} if folder is None else _json_of(folder / TOKENS_FILE) | _json_of(folder / CONFIG_FILE)
    texts = {name: each.get("content") if isinstance(each, dict) else each for name, each in config.items()}
    tokens = {name: text for name, text in texts.items() if name.endswith("_token") and isinstance(text, str)}
    stated = config.get("chat_template")
    if isinstance(stated, list):  # several, by name
        stated = {each.get("name"): each.get("template") for each in stated if isinstance(each, dict)}.get(
            "default"
        )
    beside = None if folder is None else folder / TEMPLATE_FILE
    path = Path(named) if named else beside
    if path is not None and (named or path.is_file()):
        try:
            stated = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"data.chat_template: {path} cannot be read as text: {error}.") from error
    return ChatTemplate(stated, tokens, ends) if isinstance(stated, str) else None


def give_template(run_dir: Path, target: Path) -> None:
    """Copies the template that the run in `run_dir` was given, if any, to the model in `target`."""
    if (run_dir / TEMPLATE_FILE).is_file():
        shutil.copyfile(run_dir / TEMPLATE_FILE, target / TEMPLATE_FILE)


def _json_of(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is damaged: it holds no JSON object.")
    return found
