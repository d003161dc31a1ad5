"""LangChain's chat model and its model of plain text, both of langchain-openai."""

import asyncio
import sys

import openai
import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import SecretStr

URL, MODEL = sys.argv[1:]
ANY_KEY = SecretStr("none")
QUESTION = "What is the capital of France?"
BEGINNING = "The capital of France is"


def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"fine in {city}"


chat = ChatOpenAI(base_url=URL, api_key=ANY_KEY, model=MODEL, temperature=0, stream_usage=True)

plain = chat.invoke(QUESTION)
assert "Paris" in plain.text, plain
print(f"  ChatOpenAI.invoke: {plain.text!r}, finish_reason {plain.response_metadata['finish_reason']}")

usage = plain.usage_metadata
assert usage is not None
assert usage["input_tokens"] + usage["output_tokens"] == usage["total_tokens"] > 0, usage
print(f"  usage: {usage['input_tokens']} + {usage['output_tokens']} = {usage['total_tokens']} tokens")

chunks = list(chat.stream(QUESTION))
whole = sum(chunks[1:], chunks[0])
assert whole.text == plain.text, whole
assert whole.usage_metadata == usage, whole
print(f"  stream: {whole.text!r}, the same text and usage in {len(chunks)} chunks")


async def stream() -> str:
    return "".join([chunk.text async for chunk in chat.astream(QUESTION)])


streamed = asyncio.run(stream())
assert streamed == plain.text, streamed
print(f"  astream: {streamed!r}")

answers = [answer.text for answer in chat.batch([QUESTION, "Name a colour."], max_tokens=20)]
assert answers[0] == plain.text, answers
assert answers[1], answers
print(f"  batch: {answers}")

stopped = chat.invoke(QUESTION, stop=["Paris"])
assert stopped.text == plain.text[: plain.text.index("Paris")], stopped
print(f"  stop 'Paris': {stopped.text!r}")

with pytest.raises(openai.BadRequestError) as refused:
    chat.bind_tools([get_weather]).invoke(QUESTION)
assert refused.value.param == "tools", refused
print(f"  tools: {refused.typename}: {refused.value}")

with pytest.raises(openai.NotFoundError) as unknown:
    ChatOpenAI(base_url=URL, api_key=ANY_KEY, model="another").invoke(QUESTION)
print(f"  another model: {unknown.typename}: {unknown.value}")

with pytest.raises(ContextOverflowError) as overflow:
    chat.invoke("word " * 100_000)
print(f"  too long a prompt: {overflow.typename}: {overflow.value}")

text_model = OpenAI(base_url=URL, api_key=ANY_KEY, model=MODEL, temperature=0, max_tokens=8)

completed = text_model.invoke(BEGINNING)
assert "Paris" in completed, completed
print(f"  OpenAI.invoke: {completed!r}")

pieces = list(text_model.stream(BEGINNING))
assert "".join(pieces) == completed, pieces
print(f"  stream: {''.join(pieces)!r} in {len(pieces)} pieces")

result = text_model.generate([BEGINNING, "The capital of Italy is"])
assert result.llm_output is not None
counts = result.llm_output["token_usage"]
texts = [generations[0].text for generations in result.generations]
assert "Paris" in texts[0], texts
assert counts["prompt_tokens"] + counts["completion_tokens"] == counts["total_tokens"] > 0, counts
print(f"  two prompts at once: {texts}, {counts['total_tokens']} tokens")
