"""A model's tokenizer and chat template, read from its folder."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer as Backend
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from pdserve.core.errors import ErrorCode, InvalidRequest, PdserveError, StartupError
from services.frontend.detokenizer import DecodingPlan, Detokenizer

T = TypeVar("T")
_FILES = ("tokenizer.json", "tokenizer_config.json")
_SAMPLE = "Hello, world! It isn't 1,234.5 …  naïve 你好 안녕 שלום 👩\u200d👧 e\u0301\n\tend"
# What a request may not set through chat_template_kwargs: a template is a program, and the rest has its own field.
_RESERVED_KWARGS = frozenset(
    (
        "conversation",
        "messages",
        "chat_template",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
        "sanitize_control_tokens",
    )
)
_ECHO_CHARACTERS = 200


class Tokenizer:
    """Text to ids, messages to ids, ids to text. Every method may run on any thread.

    Attributes:
        plan: how its ids become text; for Detokenizer and ChoiceText.
        vocab_size: ids are below this.
        eos_ids: the ids that end an answer: the model's generation settings' and the tokenizer's.
        special_ids: ids whose text `skip_special_tokens` leaves out.
    """

    def __init__(self, fast: PreTrainedTokenizerFast, model_eos_ids: frozenset[int] = frozenset()) -> None:
        self._fast = fast
        self._backend: Backend = fast.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self.plan = DecodingPlan(self._backend, clean_up_spaces=_cleans_up_spaces(fast))
        self.vocab_size = self.plan.vocab_size
        own = () if fast.eos_token_id is None else (int(fast.eos_token_id),)
        self.eos_ids = model_eos_ids.union(own)
        self.special_ids = frozenset(i for i, t in self._backend.get_added_tokens_decoder().items() if t.special)

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Read a model's folder.

        Raises:
            StartupError: a file is missing or cannot be read, or the tokenizer is of a kind that cannot be streamed.
        """
        if not folder.is_dir():
            raise StartupError(f"there is no model folder {folder}: name one that holds {', '.join(_FILES)}")
        for name in _FILES:
            if not (folder / name).is_file():
                raise StartupError(f"the model folder {folder} has no {name}: fetch the model again")
        try:
            fast = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
            tokenizer = cls(fast, _model_eos_ids(folder))
        # The library raises bare Exception for a bad file.
        except Exception as error:
            reason = " ".join(str(error).split())[:_ECHO_CHARACTERS]
            raise StartupError(f"the tokenizer in {folder} cannot be used: {reason}") from error
        tokenizer._check_streaming(folder)
        return tokenizer

    @property
    def has_chat_template(self) -> bool:
        return bool(self._fast.chat_template)

    def encode(self, text: str, *, add_special_tokens: bool = True, param: str = "prompt") -> list[int]:
        """The ids of a text.

        Args:
            param: the request field that the text comes from.
        Raises:
            InvalidRequest: the text holds lone surrogates.
        """
        try:
            # Of the library's ways to encode, only those for several texts let go of the interpreter's lock.
            [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except TypeError as error:
            # What the library says of a str that has no UTF-8.
            raise InvalidRequest(param, f"{param} holds a lone surrogate, which is not text") from error
        ids: list[int] = encoding.ids
        return ids

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[int]]:
        """The ids of a prompt, and the character of `text` at which each begins.

        Raises:
            InvalidRequest: the text holds lone surrogates.
        """
        try:
            # As in `encode`.
            [encoding] = self._backend.encode_batch([text])
        except TypeError as error:
            raise InvalidRequest("prompt", "prompt holds a lone surrogate, which is not text") from error
        # Tokens that the tokenizer adds have no place in the text; they count as where they stand.
        return encoding.ids, list(accumulate((begin for begin, _ in encoding.offsets), max))

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_special_tokens: bool = False,
    ) -> list[int]:
        """The ids of a conversation, by the model's chat template.

        Args:
            add_special_tokens: add the tokenizer's own beside those of the template.
        Raises:
            InvalidRequest: there is no template, it refuses the messages, or the arguments are not allowed.
        """
        if not self.has_chat_template:
            raise InvalidRequest("messages", "this model has no chat template", ErrorCode.unsupported)
        kwargs = dict(chat_template_kwargs or {})
        if reserved := sorted(_RESERVED_KWARGS.intersection(kwargs)):
            raise InvalidRequest("chat_template_kwargs", f"chat_template_kwargs must not set {', '.join(reserved)}")
        try:
            text = self._fast.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **kwargs,
            )
        # The template is a program that runs on the client's messages: whatever it raises is about them.
        except Exception as error:
            reason = str(error)[:_ECHO_CHARACTERS]
            raise InvalidRequest("messages", f"messages do not fit the model's chat template: {reason}") from error
        return self.encode(str(text), add_special_tokens=add_special_tokens, param="messages")

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of ids, all at once."""
        tokens = (self.plan.token(token_id, skip_special_tokens) for token_id in token_ids)
        return self.plan.decode(token for token in tokens if token is not None)

    def decode_with_offsets(self, token_ids: Sequence[int]) -> tuple[list[int], str]:
        """The character at which each id's text begins, and the text of all of them."""
        detokenizer = Detokenizer(self.plan, skip_special_tokens=False)
        pieces = [detokenizer.push(token_id) for token_id in token_ids]
        offsets = [end - len(piece) for piece, end in zip(pieces, accumulate(map(len, pieces)), strict=True)]
        return offsets, "".join(pieces) + detokenizer.flush()

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to a text, as bytes; part of a character, perhaps."""
        return self.plan.token_bytes(token_id)

    def token_string(self, token_id: int) -> str:
        """The token as the vocabulary spells it; empty for an unknown id."""
        return self.plan.token(token_id, skip_special_tokens=False) or ""

    def _check_streaming(self, folder: Path) -> None:
        """The library's own decoder has the last word on what this tokenizer's text is."""
        ids = self._backend.encode(_SAMPLE, add_special_tokens=True).ids
        for skip in (False, True):
            detokenizer = Detokenizer(self.plan, skip_special_tokens=skip)
            streamed = "".join(map(detokenizer.push, ids)) + detokenizer.flush()
            if streamed != self._fast.decode(ids, skip_special_tokens=skip):
                raise StartupError(
                    f"the tokenizer in {folder} decodes in a way that cannot be streamed: use another model"
                )


class TokenizerPool:
    """The tokenizer off the event loop: a few threads and a bounded queue.

    Args:
        num_threads: how many texts are worked on at once.
        max_waiting: how many may wait for a thread.
    """

    def __init__(self, tokenizer: Tokenizer, *, num_threads: int = 2, max_waiting: int = 4096) -> None:
        self.tokenizer = tokenizer
        self._limit = num_threads + max_waiting
        self._pending = 0
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenizer")

    async def run(self, work: Callable[[Tokenizer], T]) -> T:
        """Run `work(tokenizer)` on a thread. Cancelling takes it out of the queue if it has not begun.

        Raises:
            PdserveError: queue_full, when too many wait; and whatever `work` raises.
        """
        if self._pending >= self._limit:
            raise PdserveError(ErrorCode.queue_full, "too many requests wait to be tokenised", retry_after_s=1.0)
        self._pending += 1
        future = asyncio.get_running_loop().run_in_executor(self._executor, work, self.tokenizer)
        future.add_done_callback(self._done)
        return await future

    def close(self) -> None:
        """Drop what waits and let the threads end."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _done(self, _: object) -> None:
        self._pending -= 1


def _cleans_up_spaces(fast: PreTrainedTokenizerFast) -> bool:
    # transformers ignores the setting for BPE, whose text it would damage, unless a second setting insists.
    insists = getattr(fast, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False)
    return bool(fast.clean_up_tokenization_spaces) and (
        not isinstance(fast.backend_tokenizer.model, models.BPE) or bool(insists)
    )


def _model_eos_ids(folder: Path) -> frozenset[int]:
    """`eos_token_id` of the model's generation settings, or of its configuration where there are none."""
    for name in ("generation_config.json", "config.json"):
        if not (folder / name).is_file():
            continue
        eos = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
        if eos is not None:
            return frozenset(eos if isinstance(eos, list) else [eos])
    return frozenset()
