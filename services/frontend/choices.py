"""One answer as it grows: the positions that were accepted, and the text that waits for its reader."""

from array import array
from typing import NamedTuple

from pdserve.core.events import FinishReason, Token
from services.frontend.text import ChoiceText, TextDelta, TextToken

# Pieces of text that are held before they become one: for a reader that is far behind.
_HELD_TEXTS = 32
# What one held item takes in this process, about.
_CHARACTER_BYTES = 4
_TOKEN_BYTES = 200
_ALTERNATIVE_BYTES = 100


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
        keeps_tokens: pieces have tokens; without, they have text alone.
    Attributes:
        output_ids: the tokens so far.
        next_position: of the only token that is accepted next.
        last_token_s: when the last one was, on the loop's clock.
        unread_bytes: about what is held for the reader.
    """

    def __init__(
        self, index: int, sibling: int, first_position: int, text: ChoiceText, *, keeps_tokens: bool = True
    ) -> None:
        self.index = index
        self.sibling = sibling
        self.next_position = first_position
        self.output_ids = array("i")
        self.finish: FinishReason | None = None
        self.last_token_s: float | None = None
        self._text = text
        self.unread_bytes = 0
        self._keeps_tokens = keeps_tokens
        self._held_texts: list[str] = []
        self._held_tokens: list[TextToken] = []
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
        return bool(self._held_texts or self._held_tokens) or (self.ended and not self._finish_told)

    def accept(self, token: Token) -> bool:
        """Take the token at `next_position`. Returns whether the answer has ended."""
        self.next_position += 1
        self.output_ids.append(token.token_id)
        stop_token = token.finish is FinishReason.STOP
        delta = self._text.push(token.token_id, token.logprobs, stop_token=stop_token)
        if delta is not None:
            self._hold(delta)
        if token.finish is None and not self._text.stopped:
            return False
        self._hold(self._text.finish())
        self.finish = FinishReason.STOP if self._text.stopped else token.finish
        return True

    def take(self) -> Piece | None:
        """What is new for the reader; None if nothing is."""
        if not self.has_news:
            return None
        texts, self._held_texts = self._held_texts, []
        tokens, self._held_tokens = self._held_tokens, []
        self.unread_bytes = 0
        finish = self.finish if not self._finish_told else None
        self._finish_told = self.ended
        return Piece("".join(texts), tuple(tokens), finish)

    def _hold(self, delta: TextDelta) -> None:
        if delta.text:
            self._held_texts.append(delta.text)
            self.unread_bytes += len(delta.text) * _CHARACTER_BYTES
            if len(self._held_texts) >= _HELD_TEXTS:
                self._held_texts = ["".join(self._held_texts)]
        if self._keeps_tokens:
            self._held_tokens += delta.tokens
            self.unread_bytes += sum(map(_size_bytes, delta.tokens))


def _size_bytes(token: TextToken) -> int:
    alternatives = token.logprobs.top_ids if token.logprobs is not None else ()
    return _TOKEN_BYTES + _ALTERNATIVE_BYTES * len(alternatives)
