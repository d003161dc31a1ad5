"""The `llm` command-line tool, which knows the server from its own configuration file."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

URL, MODEL = sys.argv[1:]
QUESTION = "What is the capital of France?"
MODELS = f"""\
- {{model_id: pdserve, model_name: {MODEL}, api_base: "{URL}", supports_tools: true}}
- {{model_id: pdserve-text, model_name: {MODEL}, api_base: "{URL}", completion: true}}
- {{model_id: unknown, model_name: another, api_base: "{URL}"}}
"""


def llm(*arguments: str, status: int = 0) -> str:
    """What a command prints; its standard error where it has to fail."""
    done = subprocess.run(
        [sys.executable, "-m", "llm", *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.returncode == status, (arguments, done.stdout, done.stderr)
    return (done.stderr if status else done.stdout).removesuffix("\n")


with tempfile.TemporaryDirectory() as folder:
    os.environ["LLM_USER_PATH"] = folder
    Path(folder, "extra-openai-models.yaml").write_text(MODELS)

    models = llm("openai", "endpoint", URL, "--models")
    assert models == MODEL, models
    print(f"  models: {models}")

    plain = llm("-m", "pdserve", "-o", "temperature", "0", "--no-stream", QUESTION)
    assert "Paris" in plain, plain
    print(f"  plain: {plain!r}")

    streamed = llm("-m", "pdserve", "-o", "temperature", "0", QUESTION)
    assert streamed == plain, streamed
    print(f"  streamed: {streamed!r}")

    logged = json.loads(llm("logs", "--count", "1", "--json"))[0]
    total = logged["response_json"]["usage"]["total_tokens"]
    assert logged["response_json"]["object"] == "chat.completion.chunk", logged
    assert logged["input_tokens"] + logged["output_tokens"] == total > 0, logged
    print(f"  usage in its log: {logged['input_tokens']} + {logged['output_tokens']} = {total} tokens")

    continued = llm("--continue", "-o", "temperature", "0", "And of Italy?")
    input_tokens = json.loads(llm("logs", "--count", "1", "--json"))[0]["input_tokens"]
    assert continued
    assert input_tokens > total, input_tokens
    print(f"  conversation: {continued!r}, after {input_tokens} tokens")

    stopped = llm("-m", "pdserve", "-o", "temperature", "0", "-o", "stop", "Paris", QUESTION)
    assert stopped == plain[: plain.index("Paris")], stopped
    print(f"  stop 'Paris': {stopped!r}")

    completed = llm("-m", "pdserve-text", "-o", "temperature", "0", "-o", "max_tokens", "4", "The capital of France is")
    assert "Paris" in completed, completed
    print(f"  completion: {completed!r}")

    refused = llm("-m", "pdserve", "--tool", "llm_version", QUESTION, status=1)
    assert "tools is not supported by this server" in refused, refused
    print(f"  tools: {refused}")

    unknown = llm("-m", "unknown", QUESTION, status=1)
    assert "'another' is not served here" in unknown, unknown
    print(f"  another model: {unknown}")
