"""Sampling parameters: parsed once at the border, then valid everywhere."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from pdserve.core.errors import InvalidRequest

MAX_TOP_LOGPROBS = 20
MAX_SIBLINGS = 128
# Below this a temperature leaves nothing but the best token, and dividing logits by it overflows.
_GREEDY_BELOW = 1e-5
_NO_BIAS: Mapping[int, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when a sequence ends.

    Penalties, minimum and maximum count *output* tokens, replayed ones included. A parameter at its default costs
    nothing in the sampler.

    Attributes:
        max_tokens: output tokens at most, ≥ 1.
        min_tokens: output tokens before a stop id may be chosen.
        temperature: 0, and what is as good as 0, is greedy.
        top_k: 0 is off.
        top_p: in (0, 1]; 1 is off.
        min_p: in [0, 1]; 0 is off.
        repetition_penalty: divides (multiplies, if negative) the logits of tokens in prompt and output; in
            [0.001, 1000], so that none overflows; 1 is off.
        presence_penalty, frequency_penalty: OpenAI's, over output tokens; 0 is off.
        logit_bias: token id → addition to its logit, before everything else.
        stop_ids: token ids that end the sequence: the model's end tokens unless they are ignored, and the request's.
        top_logprobs: None reports no logprobs; k ≥ 0 reports the chosen token's and the k best.
        prompt_logprobs: the same for every token of the prompt but its first.
    Raises:
        InvalidRequest: a value is out of its range; names the field.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: _NO_BIAS)
    stop_ids: frozenset[int] = frozenset()
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        _require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        _require(0 <= self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, f"from 0 to {self.max_tokens}")
        _require_within("temperature", self.temperature, 0.0, 2.0)
        _require(self.top_k >= 0, "top_k", self.top_k, "-1, 0 (both off) or more")
        _require(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "above 0 and at most 1")
        _require_within("min_p", self.min_p, 0.0, 1.0)
        _require_within("repetition_penalty", self.repetition_penalty, 1e-3, 1e3)
        _require_within("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _require_within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        for token_id, bias in self.logit_bias.items():
            _require(token_id >= 0, "logit_bias", token_id, "token ids of the vocabulary")
            _require_within("logit_bias", bias, -100.0, 100.0)
        for param, count in (("top_logprobs", self.top_logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None:
                _require_within(param, count, 0, MAX_TOP_LOGPROBS)

    @property
    def greedy(self) -> bool:
        return self.temperature < _GREEDY_BELOW

    @property
    def needs_history(self) -> bool:
        """Whether choosing a token looks at earlier ones."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _require_within(param: str, value: float, low: float, high: float) -> None:
    # The chained comparison is False for NaN.
    _require(low <= value <= high, param, value, f"between {low} and {high}")


def _require(holds: bool, param: str, value: object, allowed: str) -> None:
    if not holds:
        raise InvalidRequest(param, f"{param} must be {allowed}, not {str(value)[:200]}")
