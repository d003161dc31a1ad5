"""`pdserve generate`: one question, and whether its answer came whole."""

import argparse
import sys
from collections.abc import AsyncIterator
from typing import Any

from pdserve.client.async_client import AsyncClient
from pdserve.client.errors import BadResponse, ClientError, NoConnection, ServerError
from pdserve.client.policy import Retries
from pdserve.core.errors import ErrorCode, PdserveError


async def run_generate(arguments: argparse.Namespace) -> int:
    options = {"max_tokens": arguments.max_tokens, "temperature": arguments.temperature}
    body = {name: value for name, value in options.items() if value is not None}
    if arguments.model:
        body["model"] = arguments.model
    async for text in ask(arguments.url, arguments.prompt, stream=arguments.stream, **body):
        sys.stdout.write(text)
        sys.stdout.flush()
    print()
    return 0


async def ask(url: str, prompt: str, *, stream: bool, **body: Any) -> AsyncIterator[str]:
    """The answer to one chat message, piece by piece or whole.

    Args:
        url: of the server, without a path.
        body: further fields of the request; `model` is by default the first that the server names.
    Raises:
        PdserveError: what the server says; or nobody answers, or the answer was cut.
    """
    # A person who asks once is told at once.
    async with AsyncClient(url, retries=Retries(count=0)) as client:
        try:
            if not stream:
                yield (await client.chat(prompt, **body)).text
                return
            async with client.stream_chat(prompt, **body) as answer:
                async for delta in answer:
                    if delta.text:
                        yield delta.text
        except ClientError as error:
            raise _as_told(error, client.url) from error


def _as_told(error: ClientError, url: str) -> PdserveError:
    """For the one line that a command fails with."""
    match error:
        case ServerError():
            return PdserveError(
                ErrorCode(error.code) if error.code in set(ErrorCode) else ErrorCode.internal, str(error)
            )
        case NoConnection():
            message = f"no whole answer from {url} ({error}): is `pdserve up` running there?"
            return PdserveError(ErrorCode.worker_lost, message)
        case BadResponse():
            return PdserveError(ErrorCode.internal, f"{error}: check --url")
    return PdserveError(ErrorCode.worker_lost, str(error))
