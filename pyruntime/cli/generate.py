"""`python -m pyruntime generate`: continues a prompt with a trained checkpoint, or answers a person."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pyruntime.choices import DeviceName
from pyruntime.cli.arguments import check_at_least, parse
from pyruntime.cli.chat import Chat, questions
from pyruntime.cli.environment import check_started, started_ranks
from pyruntime.train import validate
from pyruntime.train.data.tokenizer import Tokenizer, load_beside, prompt_ids
from pyruntime.train.errors import ConfigError, refusing
from pyruntime.train.validate.model_folder import check_model_folder

if TYPE_CHECKING:
    import torch

    from pyruntime.llama import Llama

DESCRIPTION = """Continues a prompt with a Hugging Face Llama checkpoint, such as the model folder of a run.
Under torchrun the model is cut over all ranks; all draw the same text, and rank 0 prints it.
With --chat True the prompt is a question, which the model answers by its chat template; without a prompt each
line of the standard input is one, and the model remembers the lines before."""


EMPTY = (
    "pyruntime: the model added nothing to the prompt: its first token ends a document or is no text. "
    "Try another --seed, a higher --temperature, or a prompt that stops in the middle of a sentence."
)
NO_ANSWER = (
    "pyruntime: the model's answer is empty: its first token ends its turn. Try another --seed or a higher "
    "--temperature."
)


@dataclasses.dataclass(frozen=True)
class GenerateOptions:
    checkpoint: str
    """Folder with config.json, safetensors and, unless the model reads bytes, tokenizer.json."""
    prompt: str = ""
    """Text to continue; empty: the start of a document, or with chat the lines of the standard input."""
    chat: bool = False
    """Whether the prompt is a question, for an answer by the model's chat template."""
    tokens: int = 200
    """Most tokens to generate; it stops earlier at the end of a document."""
    temperature: float = 0.8
    """Divisor of the logits, without unit; 0 takes the likeliest token."""
    top_k: int | None = None
    """Draw only from this many of the likeliest tokens; None: all."""
    top_p: float | None = None
    """Draw from the fewest tokens whose probabilities reach this sum, 0 to 1; None: all."""
    seed: int = 0
    """Seed of the draws: the same seed, checkpoint and number of ranks give the same text."""
    device: DeviceName = "auto"
    """Device that the ranks compute on."""
    threads: int = 0
    """CPU threads per rank; 0: what torchrun or OMP_NUM_THREADS set, else the cores divided by the ranks."""
    deadline_s: float = 120.0
    """Longest wait for a peer, in seconds."""


def main(argv: list[str]) -> None:
    options = parse(GenerateOptions, argv, "generate", DESCRIPTION)
    check(options)
    check_started()
    check_model_folder("--checkpoint", options.checkpoint)
    world_size = started_ranks()
    if options.chat and not options.prompt and world_size > 1:
        raise ConfigError(
            f"--chat without --prompt reads questions from the standard input, which {world_size} ranks "
            "cannot share; give --prompt, or start one rank."
        )

    import torch

    from pyruntime.cli.train import device_of, threads
    from pyruntime.comm import Runtime

    torch.set_num_threads(threads(options.threads, world_size))
    device = device_of("--device", options.device)
    with Runtime.start(tp=world_size, device=device, deadline_s=options.deadline_s) as runtime:
        model, tokenizer = load(Path(options.checkpoint), runtime.tp, runtime.device)
        if options.chat:
            chat = Chat(Path(options.checkpoint), tokenizer)
            for question in [options.prompt] if options.prompt else questions():
                ids = torch.tensor([chat.ask(question)], device=runtime.device)
                _print(model, chat.answer(continue_text(model, tokenizer, ids, options)), world_size)
            return
        ids = torch.tensor([_prompt_ids(options.prompt, tokenizer)], device=runtime.device)
        _print(model, continue_text(model, tokenizer, ids, options), world_size, options.prompt)


def _print(model: Llama, pieces: Iterator[str], world_size: int, prompt: str | None = None) -> None:
    """Prints the text that is drawn, on rank 0, behind the prompt that it continues; None: it is an
    answer."""
    shown, is_empty = model.group.rank == 0, True
    shown = shown and _show(prompt or "", alone=world_size == 1)
    for piece in pieces:
        is_empty = is_empty and not piece
        shown = shown and _show(piece, alone=world_size == 1)
    shown = shown and _show("\n", alone=world_size == 1)
    if is_empty and model.group.rank == 0:
        print(EMPTY if prompt is not None else NO_ANSWER, file=sys.stderr, flush=True)


def _show(piece: str, *, alone: bool) -> bool:
    """Prints text. Returns False if nobody reads it any more but other ranks still need this one."""
    try:
        print(piece, end="", flush=True)
    except BrokenPipeError:
        if alone:
            raise
        return False
    return True


def check(options: GenerateOptions) -> None:
    """Raises ConfigError for options that are wrong by themselves."""
    check_at_least(options, 1, "tokens")
    check_at_least(options, 0, "threads")
    validate.check_seed("--seed", options.seed)
    validate.check_seconds("--deadline_s", options.deadline_s)


def load(folder: Path, group, device: torch.device | str = "cpu") -> tuple[Llama, Tokenizer]:
    """Loads a checkpoint's model and tokenizer. Raises ConfigError if damaged or unfit for the ranks."""
    from pyruntime.llama import load_hf

    with refusing(f"--checkpoint {folder}: ", (ValueError, OSError)):
        # Fixed: measured tiers could differ next time, and with them the text.
        model = load_hf(folder, group, tier="chunked", device=device)
    return model, load_beside(folder, model.config.vocab_size)


def _prompt_ids(prompt: str, tokenizer: Tokenizer) -> list[int]:
    ids = prompt_ids(tokenizer, prompt.encode("utf-8", errors="surrogateescape"))
    if not ids:
        raise ConfigError(
            "--prompt is empty, and the tokenizer has no token that starts a document; give a prompt."
        )
    return ids


def continue_text(
    model: Llama, tokenizer: Tokenizer, ids: torch.Tensor, options: GenerateOptions
) -> Iterator[str]:
    """Yields the text after the prompt as it is drawn. Raises ConfigError for impossible sampling."""
    from pyruntime.llama import generate_steps

    with refusing():
        steps = generate_steps(
            model,
            ids,
            options.tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            seed=options.seed,
            eos_token_id=tokenizer.separator,
        )
    new = (int(token) for token in _named(steps))
    kept = (token for token in new if token != tokenizer.separator)
    return _decoded(kept, tokenizer)


def _named(steps: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yields the tokens; turns errors of the model into a ConfigError."""
    with refusing():
        yield from steps


def _decoded(tokens: Iterator[int], tokenizer: Tokenizer) -> Iterator[str]:
    """Yields the text that each token adds; an incomplete character waits for the next token."""
    seen: list[int] = []
    shown = 0
    for token in tokens:
        seen.append(token)
        text = tokenizer.decode(seen)
        if not text.endswith("\ufffd"):
            yield text[shown:]
            shown = len(text)
    yield tokenizer.decode(seen)[shown:]
