"""table.json has one shape, holds only what was measured under the same conditions, and survives a stop."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from bench.cluster import ClusterSource
from bench.row import Goal, RowOptions, RowResult, paired_line
from bench.table import Conditions, Results, printed

CONDITIONS = Conditions({"cpu": "x", "cores": 2}, "abc", {"pairs": 3, "peers": [("a", "b")]})
LINE = paired_line("a step", "a floor", "s", [2.0, 4.0, 3.0], [2.0, 2.0, 2.0], Goal("<=", 1.1))
CONTROL = paired_line("a control", "a floor", "s", [1.0] * 3, [2.0] * 3, None)


@dataclass
class FakeRow:
    number: int = 1
    title: str = "a step over its floor"
    target: str = "<= 1.1"

    async def run(self, cluster: ClusterSource, options: RowOptions) -> RowResult:
        return RowResult((LINE,))

    def plot(self, detail: Mapping[str, Any], path: Path) -> None:
        path.write_bytes(b"picture")


@pytest.fixture
def results(tmp_path: Path) -> Results:
    return Results(tmp_path / "results", CONDITIONS)


def table(results: Results) -> list[dict[str, Any]]:
    document: list[dict[str, Any]] = json.loads((results.folder / "table.json").read_text())
    return document


def test_each_entry_compares_ours_with_a_peer(results: Results) -> None:
    results.store(FakeRow(), RowResult((LINE, CONTROL), {"runs": [1]}))
    results.write_table([FakeRow()])
    first, control = table(results)
    assert {key: first[key] for key in ("row", "ours", "peer", "ratio", "target", "reached")} == {
        "row": 1,
        "ours": 3.0,
        "peer": 2.0,
        "ratio": 1.5,
        "target": "<= 1.1",
        "reached": False,
    }
    assert first["spread"]["ratio"] == {"min": 1.0, "median": 1.5, "max": 2.0, "runs": 3}
    assert (control["target"], control["reached"]) == (None, None)
    assert first.keys() == control.keys()


def test_a_row_that_was_not_run_is_listed_without_figures(results: Results) -> None:
    document = results.store(FakeRow(), None, not_run="no cluster: install it")
    (entry,) = results.write_table([FakeRow()])
    assert (entry["row"], entry["ours"], entry["ratio"], entry["reached"]) == (1, None, None, None)
    assert "no cluster: install it" in printed(document)
    results.store(FakeRow(), RowResult((LINE,)))
    assert results.write_table([FakeRow()])[0].keys() == entry.keys()


def test_what_was_measured_is_not_measured_again(results: Results) -> None:
    assert results.finished(FakeRow()) is None
    stored = results.store(FakeRow(), RowResult((LINE,)))
    assert results.finished(FakeRow()) == json.loads(json.dumps(stored))
    results.store(FakeRow(), None, not_run="why")
    assert results.finished(FakeRow()) is None


@pytest.mark.parametrize("other", [{"revision": "def"}, {"machine": {"cpu": "y"}}, {"settings": {"pairs": 5}}])
def test_rows_of_other_conditions_stay_out(results: Results, other: dict[str, Any]) -> None:
    results.store(FakeRow(), RowResult((LINE,)))
    changed = Results(results.folder, replace(CONDITIONS, **other))
    assert changed.finished(FakeRow()) is None
    assert changed.write_table([FakeRow()]) == []


def test_a_half_written_document_counts_for_nothing(results: Results) -> None:
    results.folder.mkdir()
    (results.folder / "row-1.json").write_text('{"row": 1, ')
    assert results.finished(FakeRow()) is None


def test_a_row_is_printed_with_its_spread_and_what_is_missing(results: Results) -> None:
    text = printed(results.store(FakeRow(), RowResult((LINE, CONTROL), missing=("vLLM: not installed (pip …)",))))
    assert "min 1.000, median 1.500, max 2.000 of 3 paired runs" in text
    assert "NOT reached" in text
    assert "vLLM: not installed" in text
    assert (results.folder / "row-1.png").exists()


@pytest.mark.parametrize(
    ("goal", "ratio", "reached"),
    [(Goal("<=", 1.1), 1.1, True), (Goal("<=", 1.1), 1.2, False), (Goal(">=", 0.4), 0.4, True)],
)
def test_a_goal_may_be_met_exactly(goal: Goal, ratio: float, reached: bool) -> None:
    assert goal.reached_by(ratio) is reached


def test_a_row_measured_on_a_busy_machine_says_so(results: Results) -> None:
    assert "busy" in printed(results.store(FakeRow(), RowResult((LINE,)), load_average=2.0))
    assert "busy" not in printed(results.store(FakeRow(), RowResult((LINE,)), load_average=0.1))
