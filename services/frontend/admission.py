"""From a parsed request to an Answer: tokens, parameters and ids, fixed once for all attempts."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from pdserve.core.errors import ErrorCode, InvalidRequest
from pdserve.core.ids import GroupIdMint, random_id
from services.frontend.answers import Answer, Prompt
from services.frontend.attempts import AttemptsContext
from services.frontend.choices import Choice
from services.frontend.groups import Group
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
        if request.model != self.model.name:
            raise InvalidRequest(
                "model",
                f"the model {request.model[:200]!r} is not served here; {self.model.name!r} is",
                ErrorCode.model_not_found,
            )
        prompts = await self._tokenizers.run(lambda tokenizer: _tokenized(tokenizer, request))
        seed = random_id() if request.seed is None else request.seed
        deadline_s = arrival_s + self._context.config.total_timeout_s
        groups = [
            self._group(request, index, text, token_ids, seed, arrival_s, deadline_s)
            for index, (text, token_ids) in enumerate(prompts)
        ]
        return Answer(groups, self._context)

    def _group(
        self,
        request: GenerateRequest,
        index: int,
        text: str,
        token_ids: Sequence[int],
        seed: int,
        arrival_s: float,
        deadline_s: float,
    ) -> Prompt:
        model = self.model
        tokenizer = self._tokenizers.tokenizer
        prompt_ids = request.fit_prompt(
            token_ids, vocab_size=model.vocab_size, max_context_tokens=model.max_context_tokens
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
            )
            for sibling in range(request.n)
        ]
        return Prompt(group, choices, text)


def _tokenized(tokenizer: Tokenizer, request: GenerateRequest) -> list[tuple[str, Sequence[int]]]:
    """Each prompt's text, where the answer repeats it, and token ids."""
    if request.endpoint is Endpoint.CHAT:
        ids = tokenizer.render_chat(
            request.messages,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            chat_template_kwargs=request.chat_template_kwargs,
        )
        return [("", ids)]
    prompts: list[tuple[str, Sequence[int]]] = []
    for prompt in request.prompts:
        if isinstance(prompt, str):
            prompts.append((prompt, tokenizer.encode(prompt)))
        else:
            prompts.append((tokenizer.decode(prompt) if request.echo else "", prompt))
    return prompts
