"""LiteLLM, blocking and asynchronous: any server that speaks OpenAI's API is `openai/` and the model's name."""

import asyncio
import os
import sys
from typing import Any

import pytest

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else importing it fetches a list of prices

import litellm
from litellm.exceptions import BadRequestError, ContextWindowExceededError, NotFoundError

URL, MODEL = sys.argv[1:]
litellm.suppress_debug_info = True


def messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


QUESTION = messages("What is the capital of France?")
SERVER: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": URL, "api_key": "none", "temperature": 0}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}


answer: Any = litellm.completion(messages=QUESTION, **SERVER)
plain, usage = answer.choices[0].message.content, answer.usage
assert "Paris" in plain, answer
print(f"  completion: {plain!r}, finish_reason {answer.choices[0].finish_reason}")

assert usage.prompt_tokens + usage.completion_tokens == usage.total_tokens > 0, usage
print(f"  usage: {usage.prompt_tokens} + {usage.completion_tokens} = {usage.total_tokens} tokens")

chunks = list(litellm.completion(messages=QUESTION, stream=True, stream_options={"include_usage": True}, **SERVER))
whole: Any = litellm.stream_chunk_builder(chunks)
assert whole.choices[0].message.content == plain, whole
assert whole.usage.total_tokens == usage.total_tokens, whole
print(f"  streamed: {whole.choices[0].message.content!r}, the same text and usage in {len(chunks)} chunks")


async def at_once() -> list[str]:
    """Two answers at a time, one of them streamed."""

    async def stream() -> str:
        chunks = await litellm.acompletion(messages=QUESTION, stream=True, **SERVER)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    whole, streamed = await asyncio.gather(litellm.acompletion(messages=QUESTION, **SERVER), stream())
    return [whole.choices[0].message.content, streamed]


answers = asyncio.run(at_once())
assert answers == [plain, plain], answers
print(f"  acompletion, whole and streamed: {answers}")

stopped = litellm.completion(messages=QUESTION, stop=["Paris"], **SERVER).choices[0].message.content
assert stopped == plain[: plain.index("Paris")], stopped
print(f"  stop 'Paris': {stopped!r}")

completed = litellm.text_completion(prompt="The capital of France is", max_tokens=8, **SERVER).choices[0].text
assert "Paris" in completed, completed
print(f"  text_completion: {completed!r}")

with pytest.raises(BadRequestError) as refused:
    litellm.completion(messages=QUESTION, tools=[TOOL], **SERVER)
assert "tools is not supported by this server" in str(refused.value), refused
print(f"  tools: {refused.value}")

with pytest.raises(NotFoundError) as unknown:
    litellm.completion(messages=QUESTION, **SERVER | {"model": "openai/another"})
print(f"  another model: {unknown.value}")

with pytest.raises(ContextWindowExceededError) as overflow:
    litellm.completion(messages=messages("word " * 100_000), **SERVER)
print(f"  too long a prompt: {overflow.value}")
