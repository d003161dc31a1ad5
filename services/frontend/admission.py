"""From a parsed request to an Answer: tokens, parameters and ids, fixed once for all attempts."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from pdserve.core.errors import ErrorCode, InvalidRequest
from pdserve.core.ids import GroupIdMint, random_id
from services.frontend.answers import Answer, Prompt
from services.frontend.attempts import AttemptsContext
from services.frontend.choices import Choice
from services.frontend.groups import Group
from services.frontend.prompt_scores import PromptScores
from services.frontend.request import Endpoint, GenerateRequest
from services.frontend.text import ChoiceText
from services.frontend.tokenizer import Tokenizer, TokenizerPool


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What clients may ask for.

    Attributes:
        created: when this frontend began to serve it, in seconds since 1970.
    """

    name: str
    vocab_size: int
    max_context_tokens: int
    created: int

    def check(self, model: str) -> None:
        """
        Raises:
            InvalidRequest: another model is asked for.
        """
        if model != self.name:
            raise InvalidRequest(
                "model", f"the model {model[:200]!r} is not served here; {self.name!r} is", ErrorCode.model_not_found
            )


class TokenizedPrompt(NamedTuple):
    """A prompt's token ids; where the answer repeats it, also where each of them begins in its text, and the text."""

    token_ids: Sequence[int]
    offsets: Sequence[int] = ()
    text: str = ""


class Admission:
    """Turns requests into Answers.

    Args:
        tokenizers: the model's tokenizer, off the event loop.
        mint: ids of groups.
    """

    def __init__(
        self, model: ServedModel, tokenizers: TokenizerPool, mint: GroupIdMint, context: AttemptsContext
    ) -> None:
        self.model = model
        self._tokenizers = tokenizers
        self._mint = mint
        self._context = context

    @property
    def queue_depth(self) -> int:
        """Requests that wait for a worker."""
        return len(self._context.dispatcher.line)

    async def admit(self, request: GenerateRequest, arrival_s: float) -> Answer:
        """
        Args:
            arrival_s: when the request came, on the loop's clock.
        Raises:
            InvalidRequest: what is asked for cannot be done, or not by this model.
        """
        self.model.check(request.model)
        self._check_choices(request)
        prompts = await self._tokenizers.run(lambda tokenizer: _tokenized(tokenizer, request))
        seed = random_id() if request.seed is None else request.seed
        deadline_s = arrival_s + self._context.config.total_timeout_s
        groups = [
            self._group(request, index, prompt, seed, arrival_s, deadline_s) for index, prompt in enumerate(prompts)
        ]
        return Answer(groups, self._context)

    def _check_choices(self, request: GenerateRequest) -> None:
        num_prompts = max(1, len(request.prompts))
        limit = self._context.config.max_choices
        if num_prompts * request.n > limit:
            raise InvalidRequest(
                "n",
                f"{num_prompts} prompts with n = {request.n} answers each are {num_prompts * request.n} answers; "
                f"a request may have {limit}",
            )

    def _group(
        self,
        request: GenerateRequest,
        index: int,
        prompt: TokenizedPrompt,
        seed: int,
        arrival_s: float,
        deadline_s: float,
    ) -> Prompt:
        model = self.model
        tokenizer = self._tokenizers.tokenizer
        prompt_ids = request.fit_prompt(
            prompt.token_ids, vocab_size=model.vocab_size, max_context_tokens=model.max_context_tokens
        )
        params = request.sampling_for(
            len(prompt_ids),
            max_context_tokens=model.max_context_tokens,
            eos_ids=tokenizer.eos_ids,
            vocab_size=model.vocab_size,
        )
        group = Group(
            group=self._mint.mint(),
            prompt_ids=prompt_ids,
            params=params,
            seed=seed,
            model=model.name,
            cache_scope=request.cache_salt,
            priority=request.priority,
            arrival_s=arrival_s,
            deadline_s=deadline_s,
            attempt_numbers=count(1),
            scores=PromptScores(0 if params.prompt_logprobs is None else len(prompt_ids)),
        )
        choices = [
            Choice(
                index * request.n + sibling,
                sibling,
                len(prompt_ids),
                ChoiceText(
                    tokenizer.plan,
                    prompt_ids,
                    stops=request.stops,
                    include_stop=request.include_stop_str_in_output,
                    skip_special_tokens=request.skip_special_tokens,
                    min_tokens=params.min_tokens,
                ),
                keeps_tokens=request.return_token_ids or params.top_logprobs is not None,
            )
            for sibling in range(request.n)
        ]
        return Prompt(group, choices, prompt.text, prompt.offsets[-len(prompt_ids) :])


def _tokenized(tokenizer: Tokenizer, request: GenerateRequest) -> list[TokenizedPrompt]:
    if request.endpoint is Endpoint.CHAT:
        ids = tokenizer.render_chat(
            request.messages,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            chat_template_kwargs=request.chat_template_kwargs,
        )
        return [TokenizedPrompt(ids)]
    if not request.echo:
        return [
            TokenizedPrompt(tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
            for prompt in request.prompts
        ]
    return [
        TokenizedPrompt(*tokenizer.encode_with_offsets(prompt), prompt)
        if isinstance(prompt, str)
        else TokenizedPrompt(prompt, *tokenizer.decode_with_offsets(prompt))
        for prompt in request.prompts
    ]
