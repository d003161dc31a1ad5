"""One choice's text: token ids in, text deltas out."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pdserve.core.events import TokenLogprobs
from services.frontend.detokenizer import DecodingPlan, Detokenizer
from services.frontend.stops import StopHit, StopMatcher


class TextToken(NamedTuple):
    """A token of a delta. `offset` is where its text begins, in characters of the choice's whole text."""

    token_id: int
    logprobs: TokenLogprobs | None
    offset: int


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of text with its tokens.

    A token belongs to the delta that releases the first character of its text; one without text goes with the next
    that has some. Over all deltas every counted token appears once, in order.
    """

    text: str
    tokens: tuple[TextToken, ...]


class ChoiceText:
    """Detokenisation and stop strings of one choice.

    Push each token as it is accepted. `push` gives a delta when there is text to send, never an empty one. Once
    `stopped` is set, or the engine has ended the sequence, call `finish` once: it gives what is left, for the finish
    chunk, and alone may have tokens without text.

    Args:
        plan: the tokenizer's.
        prompt_ids: the prompt, context for the first characters.
        stops: stop strings.
        include_stop: keep the stop string, and the text of a stop token.
        skip_special_tokens: special tokens have no text.
        min_tokens: the text of so many first tokens is not searched for stop strings.
    """

    def __init__(
        self,
        plan: DecodingPlan,
        prompt_ids: Sequence[int],
        *,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = Detokenizer(plan, prompt_ids, skip_special_tokens=skip_special_tokens)
        self._matcher = StopMatcher(stops, include_stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._waiting: deque[TextToken] = deque()
        self._decoded = 0
        self._unsearched = 0
        self._released = 0
        self._pushed = 0
        self._hit: StopHit | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self._hit is not None

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text."""
        return self._hit.stop if self._hit else None

    @property
    def num_tokens(self) -> int:
        """Tokens that count: all that were pushed, or those through the one that completed the stop string."""
        return self._pushed

    def push(
        self, token_id: int, logprobs: TokenLogprobs | None = None, *, stop_token: bool = False
    ) -> TextDelta | None:
        """The delta that this token releases, if any.

        Args:
            stop_token: the sequence ends with this token because of its id; its text is left out unless stops are kept.
        Raises:
            RuntimeError: the text has already ended.
        """
        if self._hit is not None:
            raise RuntimeError("a token was pushed after the stop string")
        self._waiting.append(TextToken(token_id, logprobs, self._decoded))
        self._pushed += 1
        text = "" if stop_token and not self._include_stop else self._detokenizer.push(token_id)
        released = self._search(text)
        return self._delta(released) if released else None

    def finish(self) -> TextDelta:
        """What is left once the sequence has ended: held text, if no stop string was hit, and the other tokens."""
        released = ""
        if self._hit is None:
            released = self._search(self._detokenizer.flush())
        if self._hit is None:
            rest, hit = self._matcher.flush()
            released += rest
            self._end_at(hit)
        delta = TextDelta(released, tuple(self._waiting))
        self._waiting.clear()
        return delta

    def _search(self, text: str) -> str:
        self._decoded += len(text)
        if self._pushed <= self._min_tokens:
            self._unsearched += len(text)
            return text
        released, hit = self._matcher.push(text)
        self._end_at(hit)
        return released

    def _end_at(self, hit: StopHit | None) -> None:
        """Tokens beyond the one at which the text first held the stop string no longer count."""
        if hit is None:
            return
        self._hit = hit
        end = hit.end + self._unsearched
        while self._waiting and self._waiting[-1].offset >= end:
            self._waiting.pop()
            self._pushed -= 1

    def _delta(self, text: str) -> TextDelta:
        self._released += len(text)
        tokens = []
        while self._waiting and self._waiting[0].offset < self._released:
            tokens.append(self._waiting.popleft())
        return TextDelta(text, tuple(tokens))
