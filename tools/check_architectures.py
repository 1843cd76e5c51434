"""Counts which architectures of transformers parallelize() runs correctly, refuses, or computes wrong.

    python tools/check_architectures.py          # plan "auto": all that transformers has a plan for
    python tools/check_architectures.py --only qwen3 opt --verbose
    python tools/check_architectures.py --write bench/results/architectures.md   # with --only: those rows
    python tools/check_architectures.py --plans llama guessed   # causal language models without a plan too

Every architecture is built small, from its own configuration class, with random weights in every parameter;
nothing is downloaded. It is cut over two CPU ranks. Loss, logits and every gradient of one training step are
compared with the whole model's (pyruntime.verify), for plan "auto" to 1e-5 of each tensor's norm. Plan
"guessed" is a mapping from the names of the linears, as a user would write it. Models of several modalities
get text. "refused" is an error that pyruntime raises in a sentence, "bare" any other error, and "wrong" a
difference without an error. The exit status is 1 if any is wrong or bare.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import math
import os
import re
import select
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import transformers  # noqa: E402
from torch import nn  # noqa: E402
from transformers.models.auto import modeling_auto  # noqa: E402
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402

import pyruntime  # noqa: E402
from pyruntime.any_model.verify import VerificationError  # noqa: E402
from pyruntime.nn.linear import ParallelLinear  # noqa: E402
from tools.small_models import batch_of, build, class_of  # noqa: E402

RANKS = 2
TOLERANCE = 1e-5  # as a share of each tensor's norm, for plan "auto"
CASE_S = 120.0  # for one architecture with all plans
ENCODERS = (
    "bert",
    "roberta",
    "distilbert",
    "electra",
    "albert",
    "modernbert",
    "deberta-v2",
    "xlm-roberta",
    "mpnet",
)
SEQ2SEQ = ("t5", "bart", "mbart", "pegasus", "marian", "mt5")

COLUMN = (
    *(
        "q_proj",
        "k_proj",
        "v_proj",
        "query",
        "key",
        "value",
        "q_lin",
        "k_lin",
        "v_lin",
        "q",
        "k",
        "v",
        "wq",
        "wk",
        "wv",
    ),
    *("qkv_proj", "query_key_value", "Wqkv", "c_attn", "att_proj", "q_b_proj", "kv_b_proj"),
    *(
        "gate_proj",
        "up_proj",
        "gate_up_proj",
        "fc1",
        "w1",
        "w3",
        "lin1",
        "wi",
        "wi_0",
        "wi_1",
        "fc_in",
        "c_fc",
        "Wi",
    ),
    *("dense_h_to_4h", "intermediate.dense", "linear_in", "ffn"),
)
ROW = (
    *("o_proj", "out_proj", "out_lin", "o", "wo", "down_proj", "fc2", "w2", "lin2", "fc_out", "c_proj", "Wo"),
    *(
        "dense_4h_to_h",
        "output.dense",
        "linear_out",
        "ffn_output",
        "attention.dense",
        "self_attention.dense",
        "self_attn.dense",
    ),
)


def architectures() -> dict[str, type]:
    """Returns {model type: class} of causal language models and a few encoders and encoder-decoders."""
    found: dict[str, Any] = dict(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    for names, mapping in (
        (ENCODERS, modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
        (SEQ2SEQ, modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
    ):
        found |= {name: mapping[name] for name in names if name in mapping}
    return {name: cls if isinstance(cls, str) else cls[0] for name, cls in sorted(found.items())}


HEADS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_MAPPING_NAMES",
)
"""Mappings of transformers to search for an architecture's class; the first that has one is used."""


def planned() -> dict[str, str]:
    """Returns {model type: class} of all architectures that transformers has a plan for."""
    found = {}
    for model_type, config_class in CONFIG_MAPPING.items():
        if not has_plan(config_class):
            continue
        for names in HEADS:
            cls = getattr(modeling_auto, names).get(model_type)
            if cls:
                found[model_type] = cls if isinstance(cls, str) else cls[0]
                break
    return dict(sorted(found.items()))


def has_plan(config_class: type) -> bool:
    """Whether the configuration, or a configuration inside it, has a plan."""
    if getattr(config_class, "base_model_tp_plan", None):
        return True
    try:
        children = vars(config_class()).values()
    except Exception:  # it has no default
        children = []
    parts = {type(child) for child in children if isinstance(child, transformers.PretrainedConfig)}
    return any(has_plan(part) for part in parts - {config_class})


def guessed(model: nn.Module) -> dict[str, str]:
    """Returns the plan that a user would write from the names of the model's linears."""
    plan: dict[str, str] = {}
    for name, module in model.named_modules():
        if type(module) is not nn.Linear:
            continue
        for style, leaves in (("column", COLUMN), ("row", ROW)):
            for leaf in leaves:
                if name.endswith("." + leaf):
                    plan[f"*.{leaf}"] = style
    head = getattr(model, "lm_head", None)
    if type(head) is nn.Linear and not getattr(model.config, "tie_word_embeddings", False):
        plan["lm_head"] = "column_gather"
    return plan


def judge(class_name: str, plans: list[str]) -> dict[str, tuple[str, str]]:
    """Returns {plan: (right | refused | bare | wrong | not built | not run, why)}, and {"kind": ("dense" |
    "with experts", "")}."""
    try:
        model = build(class_name)
    except Exception as error:
        return dict.fromkeys(plans, ("not built", first_line(error)))
    experts = any("experts" in name.split(".") for name, _ in model.named_modules())
    kind = {"kind": ("with experts" if experts else "dense", "")}
    try:
        batch = batch_of(model)
        pyruntime.verify(copy.deepcopy(model), model, batch)  # it takes a step, and equals its copy
    except Exception as error:
        return dict.fromkeys(plans, ("not run", first_line(error))) | kind
    return {plan: judge_plan(model, plan, batch) for plan in plans} | kind


def judge_plan(whole: nn.Module, name: str, batch: dict[str, torch.Tensor]) -> tuple[str, str]:
    plan: Any = guessed(whole) if name == "guessed" else name
    if not plan:
        return "not run", "no linear has a name that the guess knows"
    if name == "auto" and not whole._tp_plan:
        return "not run", "transformers has no plan for it"
    group = dist.new_group(list(range(RANKS)))  # a new one: after a failed op a group accepts no other op
    model = copy.deepcopy(whole)
    try:
        pyruntime.parallelize(model, group, plan, tier="unfused")
        model(**batch)
        pyruntime.verify(model, whole, batch, tolerance=TOLERANCE if name == "auto" else None)
    except VerificationError as error:
        return "wrong", first_line(error)
    except (ValueError, RuntimeError) as error:
        last = traceback.extract_tb(error.__traceback__)[-1].filename
        return ("refused" if f"{os.sep}pyruntime{os.sep}" in last else "bare"), first_line(error)
    except Exception as error:
        return "bare", first_line(error)
    return "right", shares(model) if name == "auto" else ""


def shares(model: nn.Module) -> str:
    """Returns how the linears' weights are cut, in percent of their elements: cut with the activations
    between them / cut, with whole activations / whole on every rank. Then the form of activations in
    training."""
    sizes = {"cut": 0, "cut, activations whole": 0, "whole": 0}
    head = model.get_output_embeddings()
    for module in model.modules():
        if isinstance(module, ParallelLinear):
            open_ends = getattr(module.hook, "whole", False)
            kind = "cut, activations whole" if open_ends and module is not head else "cut"
            sizes[kind] += math.prod(module._layouts["weight"].parts[0].shape)
        elif type(module) is nn.Linear:
            sizes["whole"] += module.weight.numel()
    for name, p in model.named_parameters():
        if "experts" in name.split(".") and p.dim() == 3:
            sizes["whole"] += p.numel()
    total = sum(sizes.values())
    cut = " / ".join(f"{size / total:.0%}".replace("%", "") for size in sizes.values())
    return f"{cut} | {'rows' if pyruntime.explain(model).form.startswith('norms') else 'whole'}"


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def rank_main(rank: int, store: str, case: tuple[str, list[str]], answer: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    judged = {plan: (status, why[:1000]) for plan, (status, why) in judge(*case).items()}
    os.write(answer, json.dumps(judged).encode() + b"\n")


def run_case(class_name: str, plans: list[str]) -> dict[str, tuple[str, str]]:
    """Forks ranks, which inherit all imports, and returns the worst of their answers for each plan."""
    with contextlib.suppress(Exception):  # the ranks report the error
        class_of(class_name)
    read, write = os.pipe()
    with tempfile.TemporaryDirectory() as folder:
        children = [fork(rank, f"{folder}/store", (class_name, plans), write) for rank in range(RANKS)]
        os.close(write)
        answers = list(hear(read, time.monotonic() + CASE_S))
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    os.close(read)
    if len(answers) < RANKS:
        silent = ("bare", f"only {len(answers)} of {RANKS} ranks answered within {CASE_S:g} s")
        return dict.fromkeys(plans, silent) | {"kind": ("unknown", "")}
    order = ("wrong", "bare", "not built", "not run", "refused", "right")
    worst = {
        plan: tuple(min((a[plan] for a in answers), key=lambda said: order.index(said[0]))) for plan in plans
    }
    return worst | {"kind": tuple(answers[0].get("kind", ("", "")))}


def fork(rank: int, store: str, case: tuple[str, list[str]], answer: int) -> int:
    child = os.fork()
    if child:
        return child
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    try:
        rank_main(rank, store, case, answer)
    finally:
        signal.pause()  # the other rank would notice one that exits first


def hear(read: int, until: float) -> Iterator[dict[str, tuple[str, str]]]:
    heard, text = 0, b""
    while heard < RANKS:
        ready, _, _ = select.select([read], [], [], max(0.0, until - time.monotonic()))
        chunk = os.read(read, 65536) if ready else b""
        if not chunk:
            return
        text += chunk
        *lines, text = text.split(b"\n")
        heard += len(lines)
        yield from map(json.loads, lines)


KINDS = ("dense", "with experts", "unknown")


def table(results: dict[str, dict[str, tuple[str, str]]]) -> str:
    """Returns the page about plan "auto"."""
    said = {name: (each["kind"][0], *each["auto"]) for name, each in results.items() if "auto" in each}
    tried = {name: each for name, each in said.items() if each[1] not in ("not built", "not run")}
    lines = [
        '# Architectures of transformers under plan "auto"',
        "",
        "Made by `python tools/check_architectures.py --write bench/results/architectures.md`: transformers",
        f"{transformers.__version__}, torch {torch.__version__.split('+')[0]}, {RANKS} CPU ranks, fp32, "
        f"{time.strftime('%-d %B %Y')}.",
        "Each is built small with random weights, and logits, loss and every gradient of a step on text are",
        f"compared with one rank's, to {TOLERANCE:g} of each one's norm (of gradients that are smaller than",
        "1e-3 of the largest: of that). Parts that text does not reach, towers for pictures and sound, are",
        "not compared.",
        "",
        "| | right | refused in a sentence | wrong | another error |",
        "|---|---|---|---|---|",
    ]
    for kind in KINDS:
        counts = [
            sum(each[0] == kind and each[1] == status for each in tried.values())
            for status in ("right", "refused", "wrong", "bare")
        ]
        if kind != "unknown" or any(counts):
            lines.append(f"| {kind} | {' | '.join(map(str, counts))} |")
    lines += [
        "",
        "Weights of linears, in percent: cut with the activations between them (a head that gathers logits",
        "counts here) / cut, but given or giving whole activations / whole on every rank. Activations: norms",
        "and residuals in training on a rank's rows, or whole on every rank.",
        "",
        "| architecture | kind | result | weights | activations |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {kind} | {status} | {why if status == 'right' else cell(why) + ' |'} |"
        for name, (kind, status, why) in tried.items()
    ]
    left = {name: each for name, each in said.items() if name not in tried}
    lines += [
        "",
        f"{len(left)} more have a plan and were not tried, because the tool cannot build them small or give",
        "them a batch:",
        "",
        "| architecture | why |",
        "|---|---|",
    ]
    lines += [f"| {name} | {cell(why)} |" for name, (_, _, why) in left.items()]
    return "\n".join(lines) + "\n"


def rows_of(page: str) -> dict[str, dict[str, tuple[str, str]]]:
    """Reads the rows of a page that `table` wrote, to keep them beside new ones."""
    results = {}
    for line in page.splitlines():
        name, *cells = [each.strip() for each in re.split(r"(?<!\\)\|", line)[1:-1]] or [""]
        if not re.fullmatch(r"[a-z]\w*", name) or name == "architecture":
            continue
        if len(cells) == 1:
            results[name] = {"kind": ("", ""), "auto": ("not run", cells[0].replace("\\|", "|"))}
        elif len(cells) == 4 and cells[0] in KINDS:
            kind, status, weights, activations = cells
            why = f"{weights} | {activations}" if status == "right" else weights.replace("\\|", "|")
            results[name] = {"kind": (kind, ""), "auto": (status, why)}
    return results


def cell(text: str) -> str:
    return text.replace("|", "\\|")[:300]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="*", help="model types (default: all)")
    parser.add_argument("--plans", nargs="*", default=["auto"], choices=["auto", "llama", "guessed"])
    parser.add_argument("--seconds", type=float, default=7200.0, help="time limit; the rest is not run")
    parser.add_argument(
        "--write", type=Path, help="page to write for plan auto; with --only its other rows stay"
    )
    parser.add_argument(
        "--verbose", action="store_true", help="print the result and the reason of every architecture"
    )
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    known = planned() if args.plans == ["auto"] else architectures()
    chosen = {name: cls for name, cls in sorted(known.items()) if not args.only or name in args.only}
    until = time.monotonic() + args.seconds
    partly = args.only and args.write and args.write.exists()
    results = rows_of(args.write.read_text()) if partly else {}
    for model_type, class_name in chosen.items():
        if time.monotonic() < until:
            results[model_type] = run_case(class_name, args.plans)
        else:
            results[model_type] = dict.fromkeys(args.plans, ("not run", "no time left")) | {"kind": ("", "")}
        for plan in args.plans:
            status, why = results[model_type][plan]
            if args.verbose:
                print(f"{plan:8} {model_type:24} {status:10} {why}", flush=True)
    failed = False
    for plan in args.plans:
        print(
            f"\nplan {plan!r}, {RANKS} ranks, transformers {transformers.__version__}, {len(results)} "
            "architectures"
        )
        for status in ("right", "refused", "wrong", "bare", "not run", "not built"):
            names = [name for name, each in results.items() if each[plan][0] == status]
            print(f"  {status:10} {len(names):4}  {' '.join(names)}")
            failed |= bool(names) and status in ("wrong", "bare")
    if args.write:
        args.write.write_text(table(dict(sorted(results.items()))))
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
