"""How fast this engine reads prompts: what the frontends' routing goes by."""

# How much an earlier step still counts, a step later.
_MEMORY = 0.8


class PrefillSpeed:
    """Prompt tokens a second, measured over steps that compute any; the last few count most."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    @property
    def tokens_per_s(self) -> float:
        """0 while nothing was measured."""
        return self._tokens / self._seconds if self._seconds > 0 else 0.0

    def measure(self, prompt_tokens: int, seconds: float) -> None:
        """Learn how long a step took. One that only decodes says nothing."""
        if prompt_tokens:
            self._tokens = self._tokens * _MEMORY + prompt_tokens
            self._seconds = self._seconds * _MEMORY + seconds
