"""Parses command lines into dataclasses through tyro, and turns its errors into one sentence."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import functools
import inspect
import io
import itertools
import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, get_args, get_type_hints

import tyro
from tyro import constructors as rules

from pyruntime.choices import described
from pyruntime.cli.environment import started_rank
from pyruntime.text import toml_value
from pyruntime.train import config_file
from pyruntime.train.config import Grid, why_gone
from pyruntime.train.errors import ConfigError

Options = TypeVar("Options")
TRUTH = {"true": "True", "false": "False"}


class HelpShown(Exception):
    """Raised after --help was printed."""


def parse(
    cls: type[Options],
    argv: list[str],
    command: str,
    description: str,
    default: Options | None = None,
    others: Sequence[str] = (),
) -> Options:
    """Returns the `argv` of a command as an instance of the dataclass `cls`. Every flag takes a value
    (`--section.key value`). `others` are flags that the caller already took out of `argv`.

    Raises ConfigError with the name nearest to an unknown flag, or with tyro's message in one sentence.
    Raises HelpShown after --help was printed (on rank 0).
    """
    program = f"python -m pyruntime {command}"
    known = dict(_names(cls))
    _check_names(argv, [*known, *others], program)
    switches = [name for name, kind in known.items() if kind in (bool, bool | None)]
    for argument, following in itertools.pairwise([*argv, "--"]):
        if flag_name(argument) in switches and "=" not in argument and following.startswith("--"):
            raise ConfigError(f"{argument} needs a value, true or false; see {program} --help.")
    argv = _with_python_s_truth(argv, switches)
    out, err = io.StringIO(), io.StringIO()
    start: dict[str, Any] = {} if default is None else {"default": default}
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _tables():
            return tyro.cli(
                cls,
                args=argv,
                prog=program,
                description=description,
                use_underscores=True,
                config=(tyro.conf.FlagConversionOff,),
                **start,
            )
    except SystemExit as end:
        if not end.code:
            if started_rank() == 0:
                print(out.getvalue(), end="")
            raise HelpShown from None
        finding = first_finding(err.getvalue()) or "the command line cannot be read"
        raise ConfigError(f"{finding}; see {program} --help.") from None


def _tables() -> rules.ConstructorRegistry:
    """Returns tyro's rules for our dataclasses, whose help explains the values of a choice, and for fields
    that may be a TOML table, which is one argument here."""
    registry = rules.ConstructorRegistry()

    @registry.primitive_rule
    def number_or_grid(info: rules.PrimitiveTypeInfo) -> rules.PrimitiveConstructorSpec | None:
        if Grid not in get_args(info.type):
            return None
        return rules.PrimitiveConstructorSpec(
            nargs=1,
            metavar="{None}|INT|{x=INT,y=INT,z=INT}",
            instance_from_str=lambda arguments: _number_or_grid(arguments[0]),
            is_instance=lambda value: value is None or isinstance(value, int | Grid),
            str_from_instance=lambda value: ["None" if value is None else toml_value(value)],
        )

    @registry.struct_rule
    def section(info: rules.StructTypeInfo) -> rules.StructConstructorSpec | None:
        if info.type is Grid or not dataclasses.is_dataclass(info.type):
            return None
        hints, docs = get_type_hints(info.type, include_extras=True), _docs(info.type)
        fields = []
        for field in dataclasses.fields(info.type):
            given = isinstance(info.default, info.type)
            default = getattr(info.default, field.name) if given else field.default
            kind, required = hints[field.name], default is dataclasses.MISSING
            words = f"{docs.get(field.name, '')} {described(kind)}".strip()
            start = tyro.MISSING if required else default
            fields.append(rules.StructFieldSpec(field.name, kind, start, helptext=words or None))
        return rules.StructConstructorSpec(info.type, tuple(fields))

    return registry


@functools.cache
def _docs(cls: type) -> dict[str, str]:
    """Returns the docstring below each field of a dataclass."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(body, ast.ClassDef)
    return {
        ast.unparse(field.target): " ".join(ast.literal_eval(below.value).split())
        for field, below in itertools.pairwise(body.body)
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr)
    }


def _number_or_grid(text: str) -> int | Grid | None:
    if text == "None":
        return None
    return config_file.grid(text) if text.startswith("{") else int(text)


def check_at_least(options: object, least: int, *names: str) -> None:
    """Raises ConfigError if an option of these names is below `least`."""
    for name in names:
        if getattr(options, name) < least:
            must = f"be at least {least}" if least else "not be negative"
            raise ConfigError(f"--{name} must {must}, found {getattr(options, name)}.")


@contextlib.contextmanager
def writing(what: str) -> Iterator[None]:
    """Turns an OSError of the block into the ConfigError "WHAT cannot be written: ..."."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{what} cannot be written: {error.strerror}.") from error


def _names(cls: type) -> Iterator[tuple[str, Any]]:
    """Yields the flags of a dataclass and their types; a section's flags as `section.name`."""
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        hint: Any = hints[field.name]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            yield from ((f"{field.name}.{name}", kind) for name, kind in _names(hint))
        else:
            yield field.name, hint


def _with_python_s_truth(argv: list[str], switches: Sequence[str]) -> list[str]:
    """Replaces `--a.switch true`, as TOML files spell it, by the True that tyro wants."""
    result: list[str] = []
    for argument in argv:
        name, equals, value = argument.partition("=")
        if equals and flag_name(argument) in switches and value in TRUTH:
            argument = f"{name}={TRUTH[value]}"
        elif result and argument in TRUTH and flag_name(result[-1]) in switches:
            argument = TRUTH[argument]
        result.append(argument)
    return result


def _check_names(argv: list[str], known: Sequence[str], program: str) -> None:
    for argument in argv:
        asked = flag_name(argument)
        if asked and asked not in ("help", *known):
            if why := why_gone(asked):
                raise ConfigError(why)
            close = _nearest(asked, known)
            nearest = f"; the nearest is --{close}" if close else ""
            raise ConfigError(f"There is no option --{asked}{nearest}; see {program} --help.")


def _nearest(asked: str, known: Sequence[str]) -> str:
    """Returns the name whose last part resembles that of `asked`; of several, the most similar as a whole. If
    `asked` has one part, a very similar name of one part comes first."""
    if "." not in asked:
        alone = [name for name in known if "." not in name]
        if close := difflib.get_close_matches(asked, alone, n=1, cutoff=0.8):
            return close[0]
    ends = {name: name.rpartition(".")[2] for name in known}
    close = difflib.get_close_matches(asked.rpartition(".")[2], sorted(set(ends.values())), n=1, cutoff=0.7)
    alike = [name for name in known if ends[name] in close]
    return max(alike, key=lambda name: difflib.SequenceMatcher(None, asked, name).ratio(), default="")


def flag_name(argument: str) -> str:
    """Returns section.a_key for `--section.a-key` or `--section.a_key=3`, and "" for a value."""
    return argument[2:].partition("=")[0].replace("-", "_") if argument.startswith("--") else ""


def take_option(argv: list[str], name: str) -> tuple[str | None, list[str]]:
    """Returns the value of `--name VALUE` or `--name=VALUE` in `argv` (or None), and the other arguments."""
    value, rest, arguments = None, [], iter(argv)
    for argument in arguments:
        if argument == f"--{name}":
            value = next(arguments, None)
            if value is None or value.startswith("--"):
                raise ConfigError(f"--{name} needs a value.")
        elif argument.startswith(f"--{name}="):
            value = argument.partition("=")[2]
        else:
            rest.append(argument)
    return value, rest


def take_count(argv: list[str], name: str) -> tuple[int | None, list[str]]:
    """Returns the number, at least 1, of `--name N` or `--na-me N` in `argv` (or None), and the other
    arguments."""
    value, rest = take_option(argv, name)
    if value is None:
        value, rest = take_option(argv, name.replace("_", "-"))
    if value is not None and (not value.isdigit() or int(value) < 1):
        raise ConfigError(f"--{name} must be a number of at least 1, found {value}.")
    return None if value is None else int(value), rest


def first_finding(box: str) -> str:
    """Returns the first paragraph of a message of tyro, as one line without a full stop.

    A message is a box with its title in the upper edge. On a terminal without box characters it is text with
    the title as first line. Rules separate its paragraphs.
    """
    drawn = "│" in box
    lines = [line.strip("│ \t") for line in re.sub(r"\x1b\[[0-9;]*m", "", box).splitlines()]
    body = [line for line in lines if line][1:]
    rules = [index for index, line in enumerate(body) if re.match(r"[─╰-]{3}", line)]
    if not drawn and rules and rules[0] == 0:  # the rule below the title
        rules, body = [index - 1 for index in rules[1:]], body[1:]
    sentence = " ".join(body[: rules[0]] if rules else body)
    return sentence.partition(" Got errors:")[0].rstrip(".")
