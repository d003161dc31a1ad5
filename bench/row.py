"""What a row of the performance table is: a figure of ours beside a peer's, a control's or a floor's, in one run."""

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from bench.cluster import ClusterSource
from bench.statistics import Spread, paired_ratios, spread

COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {"<=": operator.le, ">=": operator.ge}


class NotRunError(Exception):
    """A row, or a part of one, could not be measured here; the message says why and what would change that."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What the ratio must be for the row to count as reached."""

    comparison: Literal["<=", ">="]
    limit: float

    def reached_by(self, ratio: float) -> bool:
        return COMPARISONS[self.comparison](ratio, self.limit)

    def __str__(self) -> str:
        return f"{self.comparison} {self.limit:g}"


@dataclass(frozen=True, slots=True)
class Line:
    """One comparison of a row.

    Attributes:
        what: what is measured.
        against: what it is compared with.
        unit: of `ours` and `peer`.
        goal: None for a control, which is shown but has nothing to reach.
    """

    what: str
    against: str
    unit: str
    ours: Spread
    peer: Spread
    ratio: Spread
    goal: Goal | None

    @property
    def reached(self) -> bool | None:
        return None if self.goal is None else self.goal.reached_by(self.ratio.median)


def paired_line(what: str, against: str, unit: str, ours: list[float], peer: list[float], goal: Goal | None) -> Line:
    """A line of runs made in pairs: the ratio is taken within each pair."""
    return Line(what, against, unit, spread(ours), spread(peer), spread(paired_ratios(ours, peer)), goal)


@dataclass(frozen=True, slots=True)
class RowResult:
    """What a row measured.

    Attributes:
        detail: everything behind the lines, as JSON; what `Row.plot` draws.
        missing: comparisons that could not be made here, and what would make them possible.
    """

    lines: tuple[Line, ...]
    detail: dict[str, Any] = field(default_factory=dict)
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RowOptions:
    """How thoroughly rows are measured: `pairs` is the number of paired runs behind each line."""

    pairs: int = 3


class Row(Protocol):
    """One row of the table. A row with a number of its own is one module of `bench.rows`."""

    number: int
    title: str
    target: str

    async def run(self, cluster: ClusterSource, options: RowOptions) -> RowResult:
        """Measure.

        Raises:
            NotRunError: nothing can be measured here.
        """
        ...

    def plot(self, detail: Mapping[str, Any], path: Path) -> None:
        """Draw `RowResult.detail` into a PNG."""
        ...
