"""`pdserve generate`: one question, and whether its answer came whole."""

import argparse
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, TypeAlias

from pdserve.cli.failures import told
from pdserve.client.answers import Choice, Delta
from pdserve.client.async_client import AsyncClient
from pdserve.client.errors import ClientError
from pdserve.client.policy import Retries
from pdserve.core.errors import ErrorCode, PdserveError

# An answer in words is shorter; a small model that finds no end would fill its whole context.
DEFAULT_MAX_TOKENS = 1024

# Each has text, and the last one a finish_reason.
Piece: TypeAlias = Delta | Choice


async def run_generate(arguments: argparse.Namespace) -> int:
    options = {"max_tokens": arguments.max_tokens, "temperature": arguments.temperature}
    body = {name: value for name, value in options.items() if value is not None}
    if arguments.model:
        body["model"] = arguments.model
    if arguments.max_tokens is not None:
        await _print_answer(arguments, body)
        return 0
    limit = f"it has {DEFAULT_MAX_TOKENS} tokens; --max-tokens N allows more"
    try:
        finish_reason = await _print_answer(arguments, body | {"max_tokens": DEFAULT_MAX_TOKENS})
    except PdserveError as error:
        if error.code is not ErrorCode.context_length_exceeded:
            raise
        # The prompt leaves less than that: without a limit, the answer may have all that is left.
        limit = "the model's context is full"
        finish_reason = await _print_answer(arguments, body)
    if finish_reason == "length":
        sys.stderr.write(f"pdserve: the answer stops here: {limit}\n")
    return 0


async def ask(
    url: str, prompt: str, *, stream: bool, api_key: str | None = None, **body: Any
) -> AsyncGenerator[Piece, None]:
    """The answer to one chat message, piece by piece or whole.

    Args:
        url: of the server, without a path.
        body: further fields of the request; `model` is by default the first that the server names.
    Raises:
        PdserveError: what the server says; or nobody answers, or the answer was cut.
    """
    # A person who asks once is told at once.
    async with AsyncClient(url, api_key=api_key, retries=Retries(count=0)) as client:
        try:
            if not stream:
                for choice in (await client.chat(prompt, **body)).choices:
                    yield choice
                return
            async with client.stream_chat(prompt, **body) as answer:
                async for delta in answer:
                    if delta.text or delta.finish_reason:
                        yield delta
        except ClientError as error:
            raise told(error) from error


async def _print_answer(arguments: argparse.Namespace, body: dict[str, Any]) -> str | None:
    """Returns: why it ended."""
    finish_reason = None
    begun = False
    pieces = ask(arguments.url, arguments.prompt, stream=arguments.stream, api_key=arguments.api_key, **body)
    try:
        async with aclosing(pieces):
            async for piece in pieces:
                sys.stdout.write(piece.text)
                sys.stdout.flush()
                begun = True
                finish_reason = piece.finish_reason
    finally:
        # What comes after it, a failure too, has a line of its own.
        if begun:
            print()
    return finish_reason
