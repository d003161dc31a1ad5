"""Stop strings in text that arrives in pieces."""

from collections.abc import Sequence
from typing import NamedTuple


class StopHit(NamedTuple):
    """A stop string that was found. `start` and `end` are character offsets in all the text that was pushed."""

    stop: str
    start: int
    end: int


class StopMatcher:
    """Releases text up to the first stop string, and holds back what could still become one.

    The match that starts earliest in the text wins, wherever its string stands in the list; of two that start together,
    the shorter, which is complete first. What is found depends on the text alone, never on how it was split. A match is
    reported as soon as no earlier one can still complete. Searching is Knuth, Morris and Pratt's, one automaton a
    string, its table grown only as far as the text has matched: linear in the text, whatever the strings.

    Args:
        stops: the strings, none empty.
        include: release the stop string itself too.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._searches = [_Search(stop) for stop in stops]
        self._include = include
        self._beginnings = frozenset(stop[0] for stop in stops)
        self._held = ""
        self._released = 0
        self._found: StopHit | None = None

    def push(self, text: str) -> tuple[str, StopHit | None]:
        """The text that is released, and the stop if one is now certain. After a hit, nothing may follow."""
        if not self._held and self._beginnings.isdisjoint(text):
            self._released += len(text)
            return text, None
        start = self._released + len(self._held)
        self._held += text
        for search in self._searches:
            search.advance(text, start)
            self._found = _earlier(self._found, search.hit)
        undecided = min(search.earliest_start for search in self._searches)
        if self._found is not None and self._found.start == undecided:
            return self._end(self._found)
        return self._release(undecided), None

    def flush(self) -> tuple[str, StopHit | None]:
        """The rest, at the end of the text, and a stop that only waited for an earlier one to complete."""
        if self._found is not None:
            return self._end(self._found)
        return self._release(self._released + len(self._held)), None

    def _end(self, hit: StopHit) -> tuple[str, StopHit]:
        released = self._release(hit.end if self._include else hit.start)
        self._held = ""
        return released, hit

    def _release(self, end: int) -> str:
        count = end - self._released
        text, self._held = self._held[:count], self._held[count:]
        self._released = end
        return text


class _Search:
    """The first occurrence of one string."""

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._matched = 0
        # _borders[i] is the length of the longest proper prefix of stop[:i + 1] that is also its suffix.
        self._borders = [0]
        self.hit: StopHit | None = None
        self.earliest_start = 0

    def advance(self, text: str, start: int) -> None:
        """Go on with `text`, whose first character has offset `start`."""
        if self.hit is not None:
            return
        stop, matched, i = self._stop, self._matched, 0
        while i < len(text):
            if matched == 0:
                i = text.find(stop[0], i)
                if i < 0:
                    break
            while matched and stop[matched] != text[i]:
                matched = self._border(matched)
            if stop[matched] == text[i]:
                matched += 1
            i += 1
            if matched == len(stop):
                self.hit = StopHit(stop, start + i - matched, start + i)
                self.earliest_start = self.hit.start
                return
        self._matched = matched
        self.earliest_start = start + len(text) - matched

    def _border(self, length: int) -> int:
        stop, borders = self._stop, self._borders
        while len(borders) < length:
            border = borders[-1]
            character = stop[len(borders)]
            while border and stop[border] != character:
                border = borders[border - 1]
            borders.append(border + (stop[border] == character))
        return borders[length - 1]


def _earlier(one: StopHit | None, other: StopHit | None) -> StopHit | None:
    if one is None or other is None:
        return one or other
    return min(one, other, key=lambda hit: (hit.start, hit.end))
