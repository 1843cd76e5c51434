"""Numbers on the pages of figures equal those of the result files that they name."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

import pytest

from bench.overlap import rates

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
FIGURES = ROOT / "docs" / "figures"
AXES = {
    "mlp": "mlp",
    "tp": "tp",
    "tp, 2 slices": "tp-slices",
    "cp": "cp",
    "ZeRO 1": "zero1",
    "ZeRO 3": "zero3",
    "ring, 4 hosts": "ring",
}


def table(page: str, heading: str, number: int = 0) -> list[list[str]]:
    """The rows of a table below a heading, without bold; `number` counts the heading's tables."""
    section = (FIGURES / page).read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = section.split("\n|---")[number + 1].partition("\n\n")[0].replace("**", "").splitlines()[1:]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def rows(page: str, heading: str, number: int = 0) -> dict[str, list[str]]:
    """The same by their first cell."""
    return {first: others for first, *others in table(page, heading, number)}


def results(name: str) -> list[dict]:
    return json.loads((RESULTS / name).read_text())["results"]


def linear(name: str, shape: str, direction: str = "forward_backward") -> dict:
    """One result of bench.linear.run."""
    (found,) = (each for each in results(name) if each["shape"] == shape and each["direction"] == direction)
    return found


def line(result: dict, name: str) -> dict:
    (found,) = (each for each in result["lines"] if each["name"] == name)
    return found


def prose(page: str) -> str:
    """A page as one line."""
    return " ".join((FIGURES / page).read_text().split())


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f}"


def mb(line: dict) -> str:
    return f"{line['memory_bytes'] / 1e6:.0f}"


def test_the_parts_of_a_gain_are_those_of_the_comparison():
    (found,) = (
        each
        for each in json.loads((RESULTS / "compare.json").read_text())["linear"]["1gbit"]["results"]
        if each["direction"] == "forward_backward"
    )
    shown = rows("results.md", "Against what people use")
    times = {"DTensor": "T_dtensor", "pyruntime, unfused": "T_u", "pyruntime": "T_o"}
    times |= {"GEMMs alone, no communication": "T_g"}
    assert {name: row[0] for name, row in shown.items()} == {
        name: ms(found[key]) for name, key in times.items()
    }
    gloo = sorted(found["rounds"]["collective gloo"])[2]
    assert f"({ms(found['T_c'])} ms where gloo's take {ms(gloo)})" in shown["pyruntime, unfused"][1]
    hidden = int(ms(found["T_u"])) - int(ms(found["T_o"]))
    assert shown["pyruntime"][1] == f"overlap: {hidden} ms of {ms(found['T_c'])} are gone"


def test_every_axis_at_equality_is_that_of_the_rates():
    kept = json.loads((RESULTS / "overlap" / "rates.json").read_text())["rows"]
    measured = {each["axis"]: rates.cells(each) for each in kept if each["ratio"] == 1}
    shown = rows("results.md", "Every axis at every rate")
    assert shown.keys() == AXES.keys()
    for name, (share, time, over_loaded, ratio, waits, peers) in shown.items():
        row = [cell.partition(" ±")[0] for cell in measured[AXES[name]]]
        assert [share, time, over_loaded, ratio] == [f"{float(row[2]):.2f}", row[5], row[6], row[7]], name
        assert waits == f"{float(row[8].rstrip('%')):.0f} %", name
        assert all(time in row[9:] for time in re.findall(r"\d{3,}", peers)), name


@pytest.mark.parametrize("rate", ["10gbit", "3gbit", "1gbit", "300mbit", "100mbit"])
def test_co2_is_that_of_its_runs(rate):
    (run,) = json.loads((RESULTS / "thin" / f"dim1024_{rate}.json").read_text())["results"]
    found = {line["name"]: line for line in run["lines"]}
    spelled = rate.replace("gbit", " Gbit/s").replace("mbit", " Mbit/s")
    shown = rows("slow-network-and-planning.md", "CO2 by the rate of the link")[spelled]
    times = [ms(found[name]["step_s"]) for name in ("CO2", "zero 1", "DDP")]
    assert [shown[0], shown[2], *shown[4:]] == [str(run["tau"]), *times]
    assert float(shown[3]) == pytest.approx(found["CO2"]["of_loaded"], abs=0.5 * 10 ** -len(shown[3][2:]))


MLP = "mlp:2048x2048x5632"


def test_both_dates_of_the_mlp_on_one_host_are_those_of_their_files():
    compared = json.loads((RESULTS / "compare.json").read_text())["linear"]["host"]["results"][-1]
    shown = table("results.md", "Against what people use", 1)
    for (_, *cells), found in zip(shown, [compared, linear("linear/mlp_rows.json", MLP)], strict=True):
        gemms, ours, theirs = (found[key] for key in ("T_g", "T_o", "T_dtensor"))
        over = [f"{each / gemms:.3f}" for each in (ours, theirs)]
        assert cells == [ms(gemms), ms(ours), over[0], ms(theirs), over[1]]
    assert f"takes {ours / theirs:.2f} of DTensor's time" in (ROOT / "README.md").read_text()


def test_what_is_won_is_in_the_files_that_are_named():
    found = table("results.md", "What is won")
    for *_, where, _ in found:
        date, _, file = where.partition(", ")
        assert not file or f'"date": "{date}T' in (RESULTS / file.strip("`")).read_text(), where
    here, there = (linear(f"linear/{name}.json", MLP) for name in ("mlp_rows", "network_120mbit"))
    training = results("training/train_dim1024_bf16.json")[0]["lines"]
    tp, one, peer = (
        training[name] for name in ("pyruntime tp=2", "pyruntime, one rank", "PyTorch DTensor tp=2")
    )
    (steps,) = results("data_parallel/data_parallel_dim1024_bf16.json")
    zero1, ddp = (line(steps, name)["of_alone"] for name in ("pyruntime zero 1", "DDP"))
    (steps,) = json.loads((RESULTS / "compare.json").read_text())["data-parallel"]["host"]["results"]
    zero3, fsdp = (line(steps, name) for name in ("pyruntime zero 3", "FSDP2 zero 3"))
    ring = line(results("context/ring_attention.json")[0], "ring zigzag")
    (stages,) = results("pipeline/pipeline.json")
    bubbles = [line(stages, name)["of_limit"] for name in ("zb-h1", "torch 1F1B", "torch zero bubble")]
    waits = {each["case"]: each["wait_p99_s"] for each in results("transport/arbiter_1gbit.json")}
    (thin,) = results("thin/dim1024_100mbit.json")
    rare = [ms(line(thin, name)["step_s"]) for name in ("CO2", "zero 1", "DDP")]
    experts = linear("moe/one_host.json", "1024x1024x768:32k4")
    exchanges = [ms(experts["peers"][name]) for name in ("all_gather", "all_to_all")]
    tuned = next(each for each in results("training/finetune_lora.json") if each["shape_name"] == "dim1024")
    lora = [line(tuned, name) for name in ("pyruntime, ZeRO 1, lora", "TRL, DDP, lora")]
    assert [cells[1:3] for cells in found] == [
        [f"{here['T_o'] / here['T_g']:.3f} T_g", f"DTensor {here['T_dtensor'] / here['T_g']:.3f}"],
        [
            f"R {there['R']:.2f}, {ms(there['T_o'])} ms",
            f"unfused {ms(there['T_u'])}, DTensor {ms(there['T_dtensor'])}",
        ],
        [
            f"{tp['tokens_per_second']:.0f} tokens/s, {tp['of_limit']:.3f} of its limit",
            f"DTensor {peer['tokens_per_second']:.0f} tokens/s",
        ],
        [f"{one['of_plain_memory_kept']:.2f} times plain PyTorch", ""],
        [f"{zero1:.3f} of its limit", f"DDP {ddp:.3f} of its"],
        [
            f"{ms(zero3['step_s'])} ms, {zero3['of_alone']:.2f}",
            f"FSDP2 {ms(fsdp['step_s'])} ms, {fsdp['of_alone']:.2f}",
        ],
        [f"{ring['E']:.2f} of its limit", ""],
        [f"{bubbles[0]:.3f} of its limit", f"torch's best {max(bubbles[1:]):.3f} of its"],
        [
            f"{ms(experts['T_o'])} ms, R {experts['R']:.2f}",
            f"all-gather {exchanges[0]}, all-to-all {exchanges[1]}",
        ],
        [
            f"{ms(lora[0]['step_s'])} ms, {mb(lora[0])} MB",
            f"TRL with DDP {ms(lora[1]['step_s'])} ms, {mb(lora[1])} MB",
        ],
        [f"{waits['arbiter'] * 1e3:.1f} ms", f"{ms(waits['fifo'])} ms without the arbiter"],
        [f"{rare[0]} ms a step", f"ZeRO 1 {rare[1]}, DDP {rare[2]}"],
    ]


def test_what_hides_at_120_mbit_is_that_of_the_run():
    text = prose("results.md")
    column = [
        linear("linear/network_120mbit.json", f"column{MLP[3:]}", each)["E"]
        for each in ("forward", "forward_backward")
    ]
    row, mlp = (linear("linear/network_120mbit.json", f"{each}{MLP[3:]}")["E"] for each in ("row", "mlp"))
    assert f"hides {column[0]:.0%}".replace("%", " %") in text
    assert f"forward pass and {column[1]:.0%} in both.".replace("%", " %") in text
    assert f"hides {row:.0%} in both, an MLP {mlp:.0%}.".replace("%", " %") in text


def test_linears_on_one_host_are_those_of_their_file():
    for shown, *cells, _ in table("one-network.md", "Linears on one host"):
        found = linear("linear/mlp_rows.json", f"mlp:{shown}x2048x5632")
        over = [found[key] / found["T_g"] for key in ("T_o", "T_u", "T_dtensor")]
        assert cells == [f"{each:.3f}" for each in over], shown


def test_linears_between_hosts_are_those_of_their_files():
    rate = ""
    for at, case, *cells in table("one-network.md", "Linears between hosts"):
        rate = at.replace(" Mbit/s", "mbit") or rate
        found = linear(f"linear/network_{rate}.json", f"{case.split()[0].lower()}{MLP[3:]}")
        t_g, t_c, t_o, unfused, peer = (ms(found[key]) for key in ("T_g", "T_c", "T_o", "T_u", "T_dtensor"))
        assert cells == [t_g, t_c, t_o, f"{found['R']:.2f}", f"{found['E']:.2f}", unfused, peer], (rate, case)


def test_collectives_between_hosts_are_those_of_their_file():
    gather, scatter = (
        [ms(each["ours_s"]), ms(each["backend_s"])]
        for each in results("transport/collectives_1gbit.json")
        if each["megabytes"] == 64
    )
    told = "all-gather {} ms (gloo {}), reduce-scatter {} (gloo {})"
    assert told.format(*gather, *scatter) in prose("one-network.md")


def test_training_steps_are_those_of_their_files():
    for name, *cells, where in table("one-network.md", "Training steps"):
        (shape, dtype), (date, _, file) = name.replace("dim ", "dim").split(), where.partition(", ")
        path = RESULTS / "training" / file.strip("`")
        assert f'"date": "{date}T' in path.read_text()
        (run,) = (
            each
            for each in json.loads(path.read_text())["results"]
            if (each["shape_name"], each["dtype"]) == (shape, dtype)
        )
        lines, (of_limit, *_) = run["lines"], run["targets"]
        one, peer = lines["pyruntime, one rank"], lines["PyTorch DTensor tp=2"]
        assert cells == [
            f"{of_limit['reached']:.3f} +- {100 * of_limit['spread']:.1f} %",
            f"{of_limit['least']}",
            f"{one['of_plain_memory_kept']:.2f}",
            f"{peer['of_limit']:.2f}",
        ], name


def test_activation_checkpointing_is_that_of_its_file():
    over = {
        name: statistics.median(each[name] / each["none"] for each in results("training/activations.json"))
        for name in ("selective", "full", "none, compiled")
    }
    text = prose("one-network.md")
    assert f"45.3 MB at {over['selective']:.2f} of the time, `full` 4.3 MB at {over['full']:.2f}" in text
    assert f"`train.compile` takes {over['none, compiled']:.2f} on the CPU" in text


def test_plan_auto_is_that_of_its_files():
    lines = [
        {name: ms(each["median"]) for name, each in results(f"training/{file}.json")[0]["lines"].items()}
        for file in ("auto", "auto_1gbit")
    ]
    names = ("auto", "transformers' tp_plan", "DTensor, compiled", "our Llama")
    shown = [row[1:] for row in table("one-network.md", "Training steps", 1)]
    assert shown == [[each[name] for each in lines] for name in names]


def test_data_parallel_steps_are_those_of_their_files():
    shown = rows("one-network.md", "Data parallelism")
    runs = [*results("data_parallel/data_parallel_dim256.json")]
    runs += results("data_parallel/data_parallel_dim1024_bf16.json")
    for column, run in enumerate(runs):
        shares = {each["name"]: f"{each['of_alone']:.2f}" for each in run["lines"]}
        ours = [shares[f"pyruntime zero {stage}"] for stage in range(4)]
        assert shown["ZeRO 0 / 1 / 2 / 3"][column] == " / ".join(ours)
        assert shown["DDP"][column] == shares["DDP"]
        fsdp = [shares[name] for name in ("FSDP2 zero 2", "FSDP2 zero 3") if name in shares]
        assert shown["FSDP2 ZeRO 2 / 3"][column] == " / ".join(fsdp)
    names = ("pyruntime, each rank alone", "pyruntime zero 1", "pyruntime zero 3", "DDP", "FSDP2 zero 2")
    for rate, *cells in table("one-network.md", "Data parallelism", 1):
        (run,) = results(f"data_parallel/data_parallel_dim1024_{rate.replace(' Mbit/s', 'mbit')}.json")
        steps = {each["name"]: ms(each["step_s"]) for each in run["lines"]}
        assert cells == [steps.get(name, "") for name in names], rate


def test_ring_attention_is_that_of_its_files():
    text, (at_8k, *_) = prose("one-network.md"), results("context/ring_attention.json")
    names = ("ring zigzag", "ring striped", "ring contiguous", "all_gather_kv zigzag", "ulysses zigzag")
    shares = [f"{line(at_8k, name)['E']:.2f}" for name in names]
    told = "zigzag and striped reach {} and {} of the ideal, contiguous {}, all-gather of keys {}, Ulysses {}"
    assert told.format(*shares) in text
    at_32k = line(results("context/ring_attention_32k.json")[0], "ring zigzag")["E"]
    assert f"zigzag at 32k reaches {at_32k:.2f}" in text
    between = line(results("context/ring_attention_700mbit.json")[0], "ring zigzag")
    assert f"R is {between['R']:.3f} with a spread of {100 * between['spread']:.0f} %" in text


def test_pipelines_are_those_of_their_files():
    text = prose("one-network.md")
    (here,), (there,) = (results(f"pipeline/{name}.json") for name in ("pipeline", "pipeline_2hosts"))
    names = ("1f1b", "interleaved", "zb-h1", "torch 1F1B", "torch zero bubble")
    told = "1F1B {} of its limit, interleaved {}, ZB-H1 {}; torch's 1F1B {} and zero bubble {} of their own"
    assert told.format(*(f"{line(here, name)['of_limit']:.3f}" for name in names)) in text
    told = "1F1B {:.3f}, ZB-H1 {:.3f}"
    assert told.format(*(line(there, name)["of_limit"] for name in ("1f1b", "zb-h1"))) in text
    (slices,) = results("pipeline/terapipe.json")
    assert f"{line(slices, 'best slices')['speed_up']:.2f} times as fast as whole" in text


def test_losses_of_methods_are_those_of_their_runs():
    runs = results("thin/quality.json")
    every_step = {run["seed"]: run["val_loss"] for run in runs if run["name"] == "AdamW, every step"}
    names = {
        "CO2": "CO2 {}",
        "CO2 without the penalty": "CO2 {}, no penalty",
        "DiLoCo": "DiLoCo {}",
        "Streaming DiLoCo": "Streaming DiLoCo {}",
        "local SGD (one seed)": "Local SGD {}",
    }
    shown = rows("slow-network-and-planning.md", "What it costs in loss")
    assert shown.keys() == names.keys()
    for method, cells in shown.items():
        for tau, cell in zip((4, 12, 48), cells, strict=True):
            found = [
                run["val_loss"] / every_step[run["seed"]] - 1
                for run in runs
                if run["name"] == names[method].format(tau)
            ]
            assert cell == (f"{100 * statistics.mean(found):+.1f} %" if found else ""), (method, tau)
    goodput = json.loads((RESULTS / "thin" / "goodput.json").read_text())["results"][0]
    told = "Goodput is {:.2f} without the seconds of absence, {:.2f} with them; the loss {:.4f} is between"
    assert told.format(*(goodput[key] for key in ("goodput", "goodput_all_time", "loss"))) in prose(
        "slow-network-and-planning.md"
    )


def test_compressed_gradients_are_those_of_their_runs():
    shown = rows("slow-network-and-planning.md", "Compressed gradients")
    runs = results("data_parallel/compression.json")
    for run, (name, cells) in zip(runs, shown.items(), strict=True):
        assert name.partition(",")[2] == run["name"].partition(",")[2]
        share = f"{run['bytes_of_uniform']:.2f}" if "bytes_of_uniform" in run else ""
        assert cells == [f"{run['val_loss']:.3f}", f"{run['bytes'] / 1e6:.2f}", share], name
    text = prose("slow-network-and-planning.md")
    speeds = {each["name"]: each["of_copy"] for each in results("data_parallel/packing.json")}
    for kind, words in (
        ("quantize", "Packing in bits runs at {:.1f} to {:.1f}"),
        ("add", "adding at {:.1f} to {:.1f}"),
    ):
        of_kind = [speed for name, speed in speeds.items() if name.startswith(kind)]
        assert words.format(min(of_kind), max(of_kind)) in text
    nearest, at_random = (
        each["kept"]
        for each in results("data_parallel/residuals.json")
        if each["bits"] == 4 and not each["heavy"]
    )
    assert f"{nearest:.3f} of the gradient's mean square when rounded to the nearest, {at_random:.3f}" in text


def test_predictions_are_as_good_as_their_files_say():
    shown = [row[1] for row in table("slow-network-and-planning.md", "Predictions of the planner")]
    published = [
        abs(float(error))
        for error in re.findall(r"\| ([+-][\d.]+)% \|$", (RESULTS / "planning.md").read_text(), re.MULTILINE)
    ][:10]
    others = max(published[1:-1])
    assert shown[0] == f"all within {max(published)} %, the eight others within {others} %"
    memory = {
        name: (RESULTS / "planning" / f"{name}.txt").read_text().strip().rpartition("\n")[2]
        for name in ("plan_memory", "plan_memory_recompute")
    }
    assert memory["plan_memory"].startswith(shown[2])
    assert memory["plan_memory_recompute"].startswith(shown[3].partition(",")[0])
    errors = {
        name: [each["error"] for each in results(f"planning/{name}.json")]
        for name in ("plan_time_2", "plan_time_1gbit_2", "plan_time_4", "plan_time_grids_4")
    }
    of_two = errors["plan_time_2"] + errors["plan_time_1gbit_2"]

    def within(found: list[float]) -> str:
        return f"{sum(abs(each) <= 0.15 for each in found)} of {len(found)} within 15 %"

    assert shown[4] == f"{within(of_two)}, median {100 * statistics.median(map(abs, of_two)):.1f} %"
    assert shown[5].startswith(
        f"{within(errors['plan_time_4'])}; cp4 {100 * min(errors['plan_time_4']):.0f} %"
    )
    assert shown[6].startswith(within(errors["plan_time_grids_4"]))
