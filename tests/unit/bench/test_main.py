"""`python -m bench`: which rows it measures, what it leaves behind, and how it ends."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from bench import __main__ as bench_main
from bench.cluster import ClusterSource
from bench.registry import ROWS
from bench.row import Goal, NotRunError, RowOptions, RowResult, paired_line


@dataclass
class FakeRow:
    number: int
    ratio: float = 1.0
    title: str = "a figure over a floor"
    target: str = "<= 1.1"
    not_run: str = ""
    runs: list[RowOptions] = field(default_factory=list)

    async def run(self, cluster: ClusterSource, options: RowOptions) -> RowResult:
        self.runs.append(options)
        if self.not_run:
            raise NotRunError(self.not_run)
        line = paired_line("a figure", "a floor", "s", [self.ratio] * 3, [1.0] * 3, Goal("<=", 1.1))
        return RowResult((line,))

    def plot(self, detail: Mapping[str, Any], path: Path) -> None:
        path.write_bytes(b"picture")


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> tuple[FakeRow, FakeRow]:
    fakes = (FakeRow(1), FakeRow(5, ratio=2.0))
    monkeypatch.setattr(bench_main, "ROWS", fakes)
    monkeypatch.setattr(bench_main, "lower_own_priority", lambda: None)
    monkeypatch.setattr(bench_main, "revision", lambda: "abc")
    monkeypatch.delenv("ROW", raising=False)
    return fakes


def run(results: Path, *arguments: str) -> int:
    return bench_main.main(["--results", str(results), *arguments])


def table(results: Path) -> list[tuple[int, bool | None]]:
    return [(entry["row"], entry["reached"]) for entry in json.loads((results / "table.json").read_text())]


def test_all_rows_are_measured_once(rows: tuple[FakeRow, FakeRow], tmp_path: Path) -> None:
    assert run(tmp_path) == 0
    assert run(tmp_path) == 0
    assert [len(row.runs) for row in rows] == [1, 1]
    assert table(tmp_path) == [(1, True), (5, False)]


def test_one_row_asked_for_is_measured_again_and_the_others_stay(
    rows: tuple[FakeRow, FakeRow], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path)
    monkeypatch.setenv("ROW", "5")
    assert run(tmp_path) == 0
    assert [len(row.runs) for row in rows] == [1, 2]
    assert table(tmp_path) == [(1, True), (5, False)]


def test_another_number_of_pairs_is_another_measurement(rows: tuple[FakeRow, FakeRow], tmp_path: Path) -> None:
    run(tmp_path, "--row", "1")
    run(tmp_path, "--row", "5", "--pairs", "7")
    assert rows[1].runs == [RowOptions(pairs=7)]
    assert table(tmp_path) == [(5, False)]


def test_a_row_that_cannot_run_is_named_and_fails_the_run(
    rows: tuple[FakeRow, FakeRow], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows[0].not_run = "no cluster: install pdserve"
    assert run(tmp_path) == 1
    assert "not run: no cluster: install pdserve" in capsys.readouterr().out
    assert table(tmp_path) == [(1, None), (5, False)]
    rows[0].not_run = ""
    assert run(tmp_path) == 0
    assert table(tmp_path) == [(1, True), (5, False)]


def test_the_machine_is_stated_first(
    rows: tuple[FakeRow, FakeRow], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path)
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("machine: ")
    assert " cores, " in first


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--row", "99"], "there is no row 99; rows: 1, 5"),
        (["--pairs", "2"], "at least 3"),
        (["--peer", "vllm"], "NAME=URL"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    rows: tuple[FakeRow, FakeRow],
    tmp_path: Path,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        run(tmp_path, *arguments)
    assert message in capsys.readouterr().err


def test_rows_of_this_project_have_numbers_of_their_own() -> None:
    numbers = [row.number for row in ROWS]
    assert len(numbers) == len(set(numbers))
