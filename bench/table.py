"""The table of all rows: kept row by row, so that a run that was stopped goes on where it was."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.row import Line, Row, RowResult
from bench.statistics import spread_document

BUSY_LOAD = 0.7
"""Load average of the last minute above which a row's figures carry a warning."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """What must be the same for rows to stand in one table."""

    machine: Mapping[str, Any]
    revision: str
    settings: Mapping[str, Any]

    def document(self) -> dict[str, Any]:
        return {"machine": dict(self.machine), "revision": self.revision, "settings": dict(self.settings)}


@dataclass(frozen=True, slots=True)
class Results:
    """The folder of results: `row-N.json` and `row-N.png` for each row, and `table.json` made from them."""

    folder: Path
    conditions: Conditions

    def finished(self, row: Row) -> dict[str, Any] | None:
        """The stored document of a row that was measured under these conditions; None if it must be measured."""
        document = self._read(row)
        if document is None or document.get("not_run"):
            return None
        same = all(document.get(key) == value for key, value in self._comparable().items())
        return document if same else None

    def store(
        self, row: Row, result: RowResult | None, not_run: str = "", *, load_average: float = 0.0
    ) -> dict[str, Any]:
        """Keep what a row measured, or why it could not, and draw it.

        Args:
            load_average: of the machine when the row began; a busy machine's ratios are spread wider.
        Returns: the stored document.
        """
        lines = [] if result is None else [line_document(row, line) for line in result.lines]
        document = {
            "row": row.number,
            "title": row.title,
            "target": row.target,
            **self._comparable(),
            "lines": lines or [empty_line(row)],
            "missing": [] if result is None else list(result.missing),
            "not_run": not_run,
            "load_average": load_average,
            "detail": {} if result is None else result.detail,
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        _write(self.folder / f"row-{row.number}.json", document)
        if result is not None and result.lines:
            row.plot(result.detail, self.folder / f"row-{row.number}.png")
        return document

    def write_table(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """Write `table.json`: the lines of every row that has a document of these conditions, in order of rows."""
        documents = [self.finished(row) or self._unmeasured(row) for row in rows]
        table = [line for document in documents if document is not None for line in document["lines"]]
        self.folder.mkdir(parents=True, exist_ok=True)
        _write(self.folder / "table.json", table)
        return table

    def _unmeasured(self, row: Row) -> dict[str, Any] | None:
        document = self._read(row)
        return document if document is not None and document.get("not_run") else None

    def _read(self, row: Row) -> dict[str, Any] | None:
        try:
            document = json.loads((self.folder / f"row-{row.number}.json").read_text())
        except (OSError, ValueError):
            return None
        return document if isinstance(document, dict) else None

    def _comparable(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(json.dumps(self.conditions.document()))
        return document


def line_document(row: Row, line: Line) -> dict[str, Any]:
    """One entry of table.json. `ours`, `peer` and `ratio` are medians; the spreads stand beside them."""
    return {
        "row": row.number,
        "what": line.what,
        "against": line.against,
        "unit": line.unit,
        "ours": line.ours.median,
        "peer": line.peer.median,
        "ratio": line.ratio.median,
        "target": None if line.goal is None else str(line.goal),
        "reached": line.reached,
        "spread": {name: spread_document(getattr(line, name)) for name in ("ours", "peer", "ratio")},
    }


def empty_line(row: Row) -> dict[str, Any]:
    """The entry of a row that could not be measured: nulls, never a figure."""
    keys = ("against", "unit", "ours", "peer", "ratio", "reached", "spread")
    return {"row": row.number, "what": row.title, "target": row.target} | dict.fromkeys(keys)


def printed(document: Mapping[str, Any]) -> str:
    """A row for people: a line for each comparison, then what is missing."""
    rows = [f"row {document['row']}: {document['title']} (target {document['target']})"]
    if document["not_run"]:
        rows.append(f"  not run: {document['not_run']}")
    else:
        rows += [_printed_line(line) for line in document["lines"]]
    if document["load_average"] > BUSY_LOAD:
        rows.append(f"  the machine was busy with other work (load {document['load_average']:.1f}): not to be quoted")
    rows += [f"  missing: {missing}" for missing in document["missing"]]
    return "\n".join(rows)


def _printed_line(line: Mapping[str, Any]) -> str:
    ratio = line["spread"]["ratio"]
    verdict = {True: "reached", False: "NOT reached", None: "control"}[line["reached"]]
    goal = f", target {line['target']}" if line["target"] else ""
    return (
        f"  {line['what']}\n"
        f"    ours {shown(line['ours'], line['unit'])}   {line['against']} {shown(line['peer'], line['unit'])}   "
        f"ratio {line['ratio']:.3f} (min {ratio['min']:.3f}, median {ratio['median']:.3f}, max {ratio['max']:.3f} "
        f"of {ratio['runs']} paired runs){goal}: {verdict}"
    )


def shown(value: float, unit: str) -> str:
    """A value with its unit, in milliseconds or gigabytes a second where that reads better."""
    if unit == "s":
        return f"{value * 1e3:.1f} ms"
    if unit == "B/s":
        return f"{value / 1e9:.2f} GB/s"
    return f"{value:.4g} {unit}"


def _write(path: Path, document: object) -> None:
    """Whole or not at all: a run may be stopped at any moment."""
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps(document, indent=1) + "\n")
    draft.replace(path)
