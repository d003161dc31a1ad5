"""One answer as it grows: the positions that were accepted, and the text that waits for its reader."""

from collections.abc import Sequence
from typing import NamedTuple

from pdserve.core.events import FinishReason, Token
from services.frontend.text import ChoiceText, TextDelta, TextToken


class Piece(NamedTuple):
    """What a choice has for its reader: everything since the last piece, however many steps that were."""

    text: str
    tokens: tuple[TextToken, ...]
    finish: FinishReason | None


class Choice:
    """One sibling's answer.

    Args:
        index: which choice of the HTTP response it is.
        sibling: which sequence of its group.
        first_position: the prompt's length.
        text: turns its tokens into text.
    Attributes:
        next_position: of the only token that is accepted next.
        last_token_s: when the last one was, on the loop's clock.
    """

    def __init__(self, index: int, sibling: int, first_position: int, text: ChoiceText) -> None:
        self.index = index
        self.sibling = sibling
        self.next_position = first_position
        self.output_ids: list[int] = []
        self.finish: FinishReason | None = None
        self.last_token_s: float | None = None
        self._text = text
        self._deltas: list[TextDelta] = []
        self._finish_told = False

    @property
    def ended(self) -> bool:
        return self.finish is not None

    @property
    def num_tokens(self) -> int:
        """Output tokens that count."""
        return self._text.num_tokens

    @property
    def has_news(self) -> bool:
        return bool(self._deltas) or (self.ended and not self._finish_told)

    def accept(self, token: Token) -> bool:
        """Take the token at `next_position`. Returns whether the answer has ended."""
        self.next_position += 1
        self.output_ids.append(token.token_id)
        stop_token = token.finish is FinishReason.STOP
        delta = self._text.push(token.token_id, token.logprobs, stop_token=stop_token)
        if delta is not None:
            self._deltas.append(delta)
        if token.finish is None and not self._text.stopped:
            return False
        delta = self._text.finish()
        if delta.text or delta.tokens:
            self._deltas.append(delta)
        self.finish = FinishReason.STOP if self._text.stopped else token.finish
        return True

    def take(self) -> Piece | None:
        """What is new for the reader; None if nothing is."""
        if not self.has_news:
            return None
        deltas, self._deltas = self._deltas, []
        finish = self.finish if not self._finish_told else None
        self._finish_told = self.ended
        return Piece("".join(delta.text for delta in deltas), _joined(deltas), finish)


def _joined(deltas: Sequence[TextDelta]) -> tuple[TextToken, ...]:
    if len(deltas) == 1:
        return deltas[0].tokens
    return tuple(token for delta in deltas for token in delta.tokens)
