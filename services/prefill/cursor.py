"""What of a prompt's cache has been sent, and what may be sent next."""

from pdserve.engine.work import Progress


class PushCursor:
    """Reads one prompt's progress from its start to its end, chunk after chunk, each chunk's layers as they come.

    Args:
        held_tokens: leading tokens that decode has already.
        num_layers: of the model.

    Attributes:
        sent_tokens: how far every layer has been sent.
    """

    def __init__(self, held_tokens: int, num_layers: int) -> None:
        self.sent_tokens = held_tokens
        self._num_layers = num_layers
        # The chunk that is being sent ends before this token; its first layers have been sent.
        self._chunk_end = held_tokens
        self._sent_layers = 0
        self._computed_tokens = 0
        self._ahead: Progress | None = None

    def extend(self, progress: Progress) -> None:
        """More may be sent."""
        if progress.num_layers is None:
            self._computed_tokens = progress.computed_tokens
            self._ahead = None
        else:
            self._ahead = progress

    def take(self) -> tuple[range, range] | None:
        """Tokens and layers to send now, taken as sent; None when there is nothing."""
        if not self._sent_layers:
            ends = (self._computed_tokens, self._ahead.computed_tokens if self._ahead else 0)
            self._chunk_end = next((end for end in ends if end > self.sent_tokens), self.sent_tokens)
        layers = range(self._sent_layers, self._computed_layers(self._chunk_end))
        tokens = range(self.sent_tokens, self._chunk_end)
        if not tokens or not layers:
            return None
        self._sent_layers = layers.stop
        if self._sent_layers == self._num_layers:
            self.sent_tokens = self._chunk_end
            self._sent_layers = 0
        return tokens, layers

    def _computed_layers(self, tokens: int) -> int:
        """How many layers have been computed up to there."""
        if tokens <= self._computed_tokens:
            return self._num_layers
        return (self._ahead.num_layers or 0) if self._ahead else 0
