"""From an HTTP request to the JSON of its body: what may come, how long, and how fast."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from aiohttp import ClientPayloadError, web
from aiohttp.http_exceptions import HttpProcessingError

from pdserve.config import FrontendConfig
from pdserve.core.errors import ErrorCode, PdserveError
from services.frontend.strict_json import parse_body
from services.frontend.tokenizer import TokenizerPool

# A longer body is parsed off the loop.
_LONG_BODY_BYTES = 64 << 10
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Intake:
    """Reads bodies.

    Attributes:
        threads: where long bodies are parsed.
    """

    config: FrontendConfig
    threads: TokenizerPool

    async def read(self, request: web.Request, parse: Callable[[Mapping[str, Any]], T]) -> T:
        """The body's JSON, parsed.

        Raises:
            PdserveError: it is no JSON, too long or too slow, or `parse` refuses it.
        """
        if request.headers.get("Content-Type") and not _is_json(request.content_type):
            raise PdserveError(
                ErrorCode.unsupported_media_type,
                f"the body must be application/json, not {request.content_type[:200]}",
            )
        body = await self._read(request)
        if len(body) > _LONG_BODY_BYTES:
            return await self.threads.run(lambda _: parse(parse_body(body)))
        return parse(parse_body(body))

    async def _read(self, request: web.Request) -> bytes:
        limit_s = self.config.body_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await request.read()
        except TimeoutError:
            raise PdserveError(ErrorCode.body_timeout, f"the body did not come within {limit_s:g} s") from None
        except web.HTTPRequestEntityTooLarge:
            limit_bytes = self.config.max_body_bytes
            raise PdserveError(ErrorCode.body_too_large, f"the body is longer than {limit_bytes} bytes") from None
        except (web.RequestPayloadError, ClientPayloadError, HttpProcessingError) as error:
            reason = " ".join(str(error).split())[:200]
            raise PdserveError(ErrorCode.invalid_request, f"the body cannot be read: {reason}") from error


def _is_json(media_type: str) -> bool:
    return media_type == "application/json" or media_type.endswith("+json")
