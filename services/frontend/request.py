"""A generation request, as the frontend knows it once its body has been parsed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from pdserve.core.errors import ErrorCode, InvalidRequest
from pdserve.core.sampling import SamplingParams


class Endpoint(StrEnum):
    """Which body a request came in."""

    CHAT = "chat"
    COMPLETION = "completion"


Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A request as the rest of the frontend knows it.

    Attributes:
        messages: the conversation (chat), each with a string `content`.
        prompts: each a text or token ids (completions).
        n: answers to each prompt.
        sampling: complete but for what only the tokenised prompt decides; see `sampling_for`.
        max_tokens: what the client asked for, or None.
        max_tokens_param: the field that it came from.
        seed: in [0, 2**64), or None.
        truncate_prompt_tokens: keep so many of the prompt's last tokens; -1 for as many as fit.
    """

    endpoint: Endpoint
    model: str
    messages: tuple[Mapping[str, Any], ...] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Mapping[str, Any]
    prompts: tuple[Prompt, ...] = ()
    n: int
    sampling: SamplingParams
    max_tokens: int | None
    max_tokens_param: str
    ignore_eos: bool
    seed: int | None
    stops: tuple[str, ...]
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    return_token_ids: bool
    echo: bool = False
    stream: bool
    include_usage: bool
    continuous_usage_stats: bool
    include_timings: bool
    truncate_prompt_tokens: int | None
    cache_salt: str
    priority: int
    user: str | None

    @property
    def prompt_param(self) -> str:
        """The field that the prompt comes from."""
        return "messages" if self.endpoint is Endpoint.CHAT else "prompt"

    def fit_prompt(self, token_ids: Sequence[int], *, vocab_size: int, max_context_tokens: int) -> Sequence[int]:
        """The prompt's ids, truncated as asked.

        Raises:
            InvalidRequest: no tokens, or ids outside the vocabulary.
        """
        param = self.prompt_param
        if not token_ids:
            raise InvalidRequest(param, f"{param} must have at least one token")
        if (largest := max(token_ids)) >= vocab_size:
            raise InvalidRequest(param, f"{param} holds token id {largest}; ids must be below {vocab_size}")
        keep = self.truncate_prompt_tokens
        if keep is None:
            return token_ids
        return token_ids[-(keep if keep > 0 else max(1, max_context_tokens - (self.max_tokens or 1))) :]

    def sampling_for(
        self, prompt_tokens: int, *, max_context_tokens: int, eos_ids: frozenset[int], vocab_size: int
    ) -> SamplingParams:
        """The parameters for a prompt of so many tokens.

        Raises:
            InvalidRequest: it does not fit the context, or an id is outside the vocabulary.
        """
        room = max_context_tokens - prompt_tokens
        if (self.max_tokens or 1) > room:
            asked = (
                f"{self.max_tokens_param} asks for {self.max_tokens}" if self.max_tokens else "needs at least 1 more"
            )
            # Clients that shorten the conversation then know this error by these words, not by its code: the opening is
            # OpenAI's and vLLM's, and "prompt is too long" is Anthropic's.
            raise InvalidRequest(
                self.prompt_param if room < 1 else self.max_tokens_param,
                f"This model's maximum context length is {max_context_tokens} tokens; the prompt "
                f"{'is too long: it has' if room < 1 else 'has'} {prompt_tokens} and {asked} "
                f"({prompt_tokens + (self.max_tokens or 1)} in all)",
                ErrorCode.context_length_exceeded,
            )
        for param, ids in (("logit_bias", self.sampling.logit_bias), ("stop_token_ids", self.sampling.stop_ids)):
            if (largest := max(ids, default=0)) >= vocab_size:
                raise InvalidRequest(param, f"{param} holds token id {largest}; ids must be below {vocab_size}")
        stop_ids = self.sampling.stop_ids if self.ignore_eos else self.sampling.stop_ids | eos_ids
        return replace(self.sampling, max_tokens=min(self.sampling.max_tokens, room), stop_ids=stop_ids)
