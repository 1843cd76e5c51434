"""The page about a run, and its timeline for other tools."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pyruntime.overlap import Entry, EntryKind, account
from pyruntime.overlap.files import RankLedger, read
from pyruntime.overlap.page import Prediction, page, write_page
from pyruntime.overlap.trace import chrome_trace
from pyruntime.overlap.verdict import verdict
from tests import browser

METRICS = [{"step": n, "loss": 5.0 / n, "step_time_s": 0.01, "exposed_comm_s": 0.001} for n in (1, 2, 3)]


def rank_ledger(rank: int, lost: int = 0) -> RankLedger:
    entries = (
        Entry(EntryKind.OP, "", "aten::mm", "layers.0.</script>", -1, 7, 0, 50.0, 50.0, 50.006),
        Entry(EntryKind.WAIT, "tp", "all_gather_matmul", "layers.0.up", 1, 7, 0, 50.006, 50.006, 50.007),
        Entry(EntryKind.READ, "tp", "all_gather_matmul", "layers.0.up", 1, 7, 4096, 50.001, 50.006, 50.007),
        Entry(EntryKind.SENT, "tp", "all_gather_matmul", "layers.0.up", 1, 3, 4096, 50.001, 50.001, 50.004),
    )
    found = account(entries, 50.0, 50.01, 7, lost)
    place = {"pp": 0, "dp": rank, "cp": 0, "tp": 0}
    saved = account([entry for entry in entries if entry.axis], 50.0, 50.01, 7)
    return RankLedger(
        rank, place, 5, found, 6, 50.0, 50.01, 7, entries, 2 * (rank == 1), saved if rank == 1 else None
    )


def test_a_rank_s_file_is_read_as_it_was_written(tmp_path):
    written = [rank_ledger(rank) for rank in (0, 1, 10)]
    for ledger in reversed(written):
        ledger.write(tmp_path)
    assert read(tmp_path) == written
    assert read(tmp_path / "other") == []


def test_a_file_that_holds_no_ledger_is_named(tmp_path):
    rank_ledger(0).write(tmp_path)
    (tmp_path / "ledger" / "rank-0.json").write_text('{"rank": 0}')
    with pytest.raises(ValueError, match=r"rank-0\.json does not hold the ledger of a rank"):
        read(tmp_path)


def data_of(text: str) -> dict:
    (data,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    return json.loads(data)


def test_the_page_holds_all_of_it_and_asks_for_nothing_else():
    text = page("main-1", {"ranks": "2 ranks"}, METRICS, [rank_ledger(0), rank_ledger(1)])
    data = data_of(text)
    assert [rank["rank"] for rank in data["ranks"]] == [0, 1]
    assert data["metrics"] == METRICS and data["facts"] == {"ranks": "2 ranks"} and data["plan"] is None
    (place,) = data["places"]
    assert (place["axis"], place["name"]) == ("tp", "layers.*.up")
    (line,) = place["lines"]  # of both ranks, a mean of their five steps
    assert line["exposed_s"] == place["exposed_s"] == pytest.approx(0.001 / 5)
    assert (line["most_rank"], line["bytes"]) == (0, 4096 / 5)
    read_entry = data["ranks"][0]["timeline"][2]
    assert (read_entry["kind"], read_entry["begin"], read_entry["wanted"]) == ("READ", 0.001, 0.006)
    assert not re.search(r"(?:src|href)\s*=|https?://|import\(|fetch\(", text)


def test_the_page_says_when_a_chunk_left_by_the_clock_of_its_reader():
    def exchanged(rank: int) -> RankLedger:
        begin, of_sender = (90.0, 50.0) if rank else (50.0, 90.0)  # hosts with clocks of their own
        came = {"sender": 1 - rank, "left": of_sender + 0.002, "arrived": begin + 0.003}
        times = {"begin": begin + 0.001, "wanted": begin + 0.004, "end": begin + 0.005}
        entries = (Entry(EntryKind.READ, "tp", "all_gather", "", 1 - rank, 7, 4096, **times, **came),)
        found = account(entries, begin, begin + 0.01, 7)
        return RankLedger(rank, {"tp": rank}, 1, found, 6, begin, begin + 0.01, 7, entries)

    ledgers = [exchanged(0), exchanged(1)]
    (chunk,) = data_of(page("main-1", {}, METRICS, ledgers))["ranks"][1]["timeline"]
    assert (chunk["wanted"], chunk["sender"], chunk["left"], chunk["arrived"], chunk["end"]) == (
        0.004,
        0,
        0.002,
        0.003,
        0.005,
    )
    (alone,) = data_of(page("main-1", {}, METRICS, ledgers[:1]))["ranks"][0]["timeline"]
    assert (alone["sender"], alone["left"], alone["arrived"]) == (None, None, 0.003)


def test_the_timeline_for_other_tools_has_a_row_for_computing_and_one_for_each_axis():
    events = chrome_trace([rank_ledger(0), rank_ledger(1)])["traceEvents"]
    rows = {(event["pid"], event.get("tid")) for event in events if event["ph"] != "M"}
    assert rows == {(rank, row) for rank in (0, 1) for row in ("computing", "tp")}
    (chunk,) = [event for event in events if event["ph"] == "b" and event["pid"] == 1]
    assert chunk["args"] == {"bytes": 4096, "peer": "tp 1", "waited_us": pytest.approx(1000)}
    assert chunk["ts"] == pytest.approx(1000)


def test_a_page_about_no_step_is_refused(tmp_path):
    with pytest.raises(ValueError, match="steps=0"):
        write_page(tmp_path / "report.html", None, None, steps=0)


def drawn(text: str, folder: Path) -> str:
    """The document after its program has run in a browser."""
    (folder / "report.html").write_text(text)
    shown = browser.document(folder / "report.html", folder / "profile")
    return re.sub(r"<script.*?</script>", "", shown, flags=re.DOTALL)


@browser.needed
@pytest.mark.second_tier
def test_a_browser_draws_the_page(tmp_path):
    """Its parts are made by the page's own program, the timeline last: its title says that it ran through."""
    ledgers = [rank_ledger(0), rank_ledger(1, lost=2)]
    plan = Prediction("", {"weights": 2e6, "logits": 1e6, "heap": 0.0}, 4e6)
    facts = {"repeat": "torchrun -m pyruntime"}
    shown = drawn(page("main-1", facts, METRICS, ledgers, plan), tmp_path)
    assert "Timeline of step 6" in shown
    assert "-25.0 % against the measured value" in shown
    assert ", and of 2 savings of a checkpoint" in shown
    assert "dp1 cp0 tp0, saving" in shown
    assert "layers.0.up: all_gather_matmul" in shown
    assert "the ledger had no room for some entries" in shown
    assert verdict(ledgers, METRICS) in shown and "tok/s" not in shown
    assert shown.count("<figure>") == 3  # loss, a step, exposed
    labels = re.findall(r'aria-label="(rank [^"]*)"', shown)
    assert labels[0] == "rank 0: computing 60.0 %, waiting tp 10.0 %, Python and the rest 30.0 %"
    assert "torchrun" in shown.partition("</dl>")[0]


SAMPLES = [
    {"prompt": "<user>1 + 1?", "before": "</td>\n", "after": "2", "wanted": "2"},
    {"prompt": "<user>2 + 1?", "before": "", "after": "4", "wanted": "3"},
]


def test_the_page_holds_samples_of_the_model():
    text = page("main-1", {}, METRICS, [], samples=SAMPLES)
    assert data_of(text)["samples"] == SAMPLES and "</td>" not in text.partition("</script>")[0]
    assert data_of(page("main-1", {}, METRICS, []))["samples"] == []


@browser.needed
@pytest.mark.second_tier
def test_a_browser_draws_samples_as_text(tmp_path):
    shown = drawn(page("main-1", {}, METRICS, [], samples=SAMPLES), tmp_path)
    cells = re.findall(r"<td[^>]*>(.*?)</td>", shown.partition('id="said"')[2], re.DOTALL)
    assert cells[:4] == ["&lt;user&gt;1 + 1?", "&lt;/td&gt;\n", "2", "2"]
    alone = [{**each, "before": None, "wanted": None} for each in SAMPLES]
    shown = drawn(page("main-1", {}, METRICS, [], samples=alone), tmp_path)
    assert "after training" in shown and "before training" not in shown and "in the data" not in shown
    assert "Samples" not in drawn(page("main-1", {}, METRICS, []), tmp_path)


@browser.needed
@pytest.mark.second_tier
def test_a_browser_draws_what_there_is_of_a_run_without_a_ledger(tmp_path):
    shown = drawn(page("main-1", {}, METRICS, []), tmp_path)
    assert "10 % of a step is exposed" in shown and shown.count("<figure>") == 3
    assert "Timeline" not in shown and "Predicted" not in shown
