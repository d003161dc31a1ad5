"""AIPerf, NVIDIA's benchmark: it writes the prompts, counts the tokens and takes the times by itself."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

URL, MODEL, TOKENIZER = sys.argv[1:]
REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 10, 100, 20
ROWS = (
    "Metric",
    "Time to First Token (ms)",
    "Inter Token Latency (ms)",
    "Request Latency (ms)",
    "Output Sequence Length (tokens)",
    "Input Sequence Length (tokens)",
    "Output Token Throughput (tokens/sec)",
    "Request Error Rate (%)",
    "Request Count (requests)",
)
# AIPerf counts the prompt as it is sent; with the template it sends so much less that the model reads PROMPT_TOKENS.
ENDPOINTS = {"completions": [], "chat": ["--apply-chat-template"]}


def profile(endpoint: str, folder: Path) -> None:
    """Run AIPerf; its files lie in the folder then."""
    words = f"""profile --url {URL.removesuffix("/v1")} --endpoint-type {endpoint} --streaming --ui none
        --concurrency 2 --request-count {REQUESTS} --isl {PROMPT_TOKENS} --osl {OUTPUT_TOKENS} --random-seed 1
        --extra-inputs ignore_eos:true --no-gpu-telemetry --no-server-metrics"""
    command = [str(Path(sys.executable).with_name("aiperf")), *words.split(), *ENDPOINTS[endpoint]]
    names = ["--model", MODEL, "--tokenizer", TOKENIZER, "--artifact-dir", str(folder)]
    done = subprocess.run(
        [*command, *names], env=os.environ | {"TMPDIR": str(folder)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


def table(folder: Path) -> list[str]:
    """The rows of AIPerf's table that matter here."""
    console = (folder / "profile_export_console.txt").read_text()
    lines = console[console.rindex("LLM Metrics") :].splitlines()
    return [line for line in lines if line[:1] in {"┏", "┡", "└"} or line.strip("┃│ ").startswith(ROWS)]


if not Path(TOKENIZER, "tokenizer.json").exists():
    sys.exit(
        f"  AIPerf counts tokens with the model's tokenizer, and {TOKENIZER} has none: name its folder by --tokenizer"
    )

for endpoint in ENDPOINTS:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        profile(endpoint, folder)
        records = [json.loads(line) for line in (folder / "profile_export.jsonl").read_text().splitlines()]
        assert len(records) == REQUESTS, records
        counted_tokens = 0
        for record in records:
            counts = {name: metric["value"] for name, metric in record["metrics"].items()}
            assert counts["usage_prompt_tokens"] == PROMPT_TOKENS, counts
            assert counts["usage_completion_tokens"] == OUTPUT_TOKENS, counts
            assert counts["usage_total_tokens"] == PROMPT_TOKENS + OUTPUT_TOKENS, counts
            counted_tokens += counts["output_sequence_length"]
        # It encodes the text again, which now and then gives a token more or fewer than made it.
        assert counted_tokens == pytest.approx(REQUESTS * OUTPUT_TOKENS, rel=0.1), counted_tokens
        print(
            f"  {endpoint}: {REQUESTS} answers, {PROMPT_TOKENS} + {OUTPUT_TOKENS} tokens each by usage; "
            f"{counted_tokens} written by AIPerf's own count"
        )
        print("\n".join(table(folder)))
