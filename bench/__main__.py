"""Measure the rows of the performance table: `python -m bench`, or one of them with `--row N` or ROW=N."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from bench.cluster import ClusterError, ClusterSource
from bench.launch import Launcher, lower_own_priority
from bench.machine import REPOSITORY, machine_facts, machine_line, revision
from bench.registry import ROWS
from bench.row import NotRunError, Row, RowOptions
from bench.table import Conditions, Results, printed

RESULTS = REPOSITORY / "bench" / "results"
LEAST_PAIRS = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what has not been measured yet. Exit code 1 if a row could not be; a missed target is not an error."""
    parser = _parser()
    options = parser.parse_args(arguments)
    rows = [row for row in ROWS if options.row in (None, row.number)]
    if not rows:
        parser.error(f"there is no row {options.row}; rows: {', '.join(str(row.number) for row in ROWS)}")
    settings = {"pairs": options.pairs, "engine": options.engine or "model", "url": options.url, "peers": options.peer}
    results = Results(options.results, Conditions(machine_facts(), revision(), settings))
    load_average = os.getloadavg()[0]  # before this run adds its own
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a started cluster is stopped then too
    launcher = Launcher()
    lower_own_priority()
    source = ClusterSource(
        launcher, options.results / "logs", options.url, options.engine, dict(options.peer), options.ready_s
    )
    print(machine_line(), flush=True)
    try:
        documents = [_measured(row, source, results, options, load_average) for row in rows]
    except KeyboardInterrupt:
        print("stopped; the same command goes on with the rows that are left", file=sys.stderr)
        return 130
    finally:
        launcher.close()
    results.write_table(ROWS)
    print(f"table: {options.results / 'table.json'}")
    return 1 if any(document["not_run"] for document in documents) else 0


def _measured(
    row: Row, source: ClusterSource, results: Results, options: argparse.Namespace, load_average: float
) -> dict[str, Any]:
    """A row's document: the stored one unless it was asked for by number or does not fit, else a new one."""
    document = None if options.fresh or options.row is not None else results.finished(row)
    if document is None:
        try:
            result = uvloop.run(row.run(source, RowOptions(options.pairs)))
        except (NotRunError, ClusterError, aiohttp.ClientError, OSError) as error:
            document = results.store(row, None, str(error), load_average=load_average)
        else:
            document = results.store(row, result, load_average=load_average)
        results.write_table(ROWS)
    print(printed(document), flush=True)
    return document


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "--row",
        type=int,
        default=os.environ.get("ROW") or None,
        help="measure this row only, again if it has been measured",
    )
    parser.add_argument("--pairs", type=_pairs, default=LEAST_PAIRS, help="paired runs behind each line")
    parser.add_argument("--fresh", action="store_true", help="measure again what has been measured")
    parser.add_argument("--url", default="", help="measure this running server instead of starting one")
    parser.add_argument("--engine", default="", help="of clusters that are started: scripted, or the model (default)")
    parser.add_argument(
        "--peer", action="append", type=_peer, default=[], metavar="NAME=URL", help="also measure this running server"
    )
    parser.add_argument(
        "--ready-s", type=float, default=180.0, help="the longest start of a cluster that is waited for"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of results")
    return parser


def _pairs(text: str) -> int:
    value = int(text)
    if value < LEAST_PAIRS:
        raise argparse.ArgumentTypeError(f"at least {LEAST_PAIRS}: a single run says nothing about its spread")
    return value


def _peer(text: str) -> tuple[str, str]:
    name, equals, url = text.partition("=")
    if not (name and equals and url):
        raise argparse.ArgumentTypeError(f"NAME=URL, not {text}")
    return name, url.rstrip("/")


if __name__ == "__main__":
    sys.exit(main())
