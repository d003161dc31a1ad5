"""What of a prompt's cache has been sent, and what may be sent next."""

from pdserve.core.geometry import KVGeometry
from pdserve.engine.work import Progress
from pdserve.wire.frames import layers_per_frame


class PushCursor:
    """Reads one prompt's progress from its start to its end, chunk after chunk.

    Layers of a chunk that is still being computed are taken when they fill a frame.

    Args:
        held_tokens: leading tokens that decode has already.

    Attributes:
        sent_tokens: how far every layer has been sent.
    """

    def __init__(self, held_tokens: int, geometry: KVGeometry) -> None:
        self.sent_tokens = held_tokens
        self._geometry = geometry
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
        tokens = range(self.sent_tokens, self._chunk_end)
        if not tokens:
            return None
        layers = range(self._sent_layers, self._computed_layers(self._chunk_end))
        is_last = layers.stop == self._geometry.num_layers
        if not is_last and len(layers) < max(1, layers_per_frame(self._geometry, len(tokens))):
            return None
        self._sent_layers = layers.stop
        if is_last:
            self.sent_tokens = self._chunk_end
            self._sent_layers = 0
        return tokens, layers

    def _computed_layers(self, tokens: int) -> int:
        """How many layers have been computed up to there."""
        if tokens <= self._computed_tokens:
            return self._geometry.num_layers
        return (self._ahead.num_layers or 0) if self._ahead else 0
