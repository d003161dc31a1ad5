"""`pdserve generate`: one question, and whether its answer came whole."""

import argparse
import ipaddress
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx

from pdserve.core.errors import ErrorCode, PdserveError

# A long prompt may compute for minutes before its first token.
_TIMEOUT = httpx.Timeout(600.0, connect=5.0)


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
    url = url.rstrip("/")
    # A proxy that the environment names does not know what listens on this machine.
    async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT, trust_env=not _is_loopback(url)) as client:
        try:
            if "model" not in body:
                body["model"] = await _first_model(client)
            body |= {"messages": [{"role": "user", "content": prompt}], "stream": stream}
            pieces = _streamed(client, body) if stream else _whole(client, body)
            async for text in pieces:
                yield text
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            message = f"no whole answer from {url} ({reason}): is `pdserve up` running there?"
            raise PdserveError(ErrorCode.worker_lost, message) from error


async def _first_model(client: httpx.AsyncClient) -> str:
    return str((await _read(await client.get("/v1/models")))["data"][0]["id"])


async def _whole(client: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[str]:
    choice = (await _read(await client.post("/v1/chat/completions", json=body)))["choices"][0]
    if not choice["finish_reason"]:
        raise _cut()
    yield choice["message"]["content"]


async def _streamed(client: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[str]:
    finished = done = False
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != httpx.codes.OK:
            await response.aread()
            await _read(response)
        async for line in response.aiter_lines():
            if not line.startswith("data:"):
                continue
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                done = True
                break
            event = json.loads(data)
            _raise_error(event)
            for choice in event["choices"]:
                if text := choice["delta"].get("content"):
                    yield text
                finished = finished or bool(choice["finish_reason"])
    if not (finished and done):
        raise _cut()


async def _read(response: httpx.Response) -> dict[str, Any]:
    try:
        content = response.json()
    except ValueError:
        content = None
    if isinstance(content, dict):
        _raise_error(content)
        if response.is_success:
            return content
    message = f"{response.url} answers {response.status_code} with something that is not OpenAI's API: check --url"
    raise PdserveError(ErrorCode.internal, message)


def _raise_error(content: dict[str, Any]) -> None:
    error = content.get("error")
    if error:
        code = error.get("code") if isinstance(error, dict) else None
        message = error.get("message") if isinstance(error, dict) else error
        raise PdserveError(ErrorCode(code) if code in set(ErrorCode) else ErrorCode.internal, str(message))


def _cut() -> PdserveError:
    return PdserveError(ErrorCode.worker_lost, "the answer was cut: it ended without finish_reason and [DONE]")


def _is_loopback(url: str) -> bool:
    host = httpx.URL(url).host
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
