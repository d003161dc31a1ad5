"""Other people's clients, each doing its ordinary work with a running pdserve: llm, LangChain, LiteLLM and AIPerf.

Makes an environment of their own at the first run, so that nothing of theirs enters the project's.
"""

import argparse
import json
import os
import subprocess
import sys
import urllib.request
import venv
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ENVIRONMENT = HERE.parents[1] / ".venv-clients"
REQUIREMENTS = HERE / "requirements.txt"
CLIENTS = ("llm", "langchain", "litellm", "aiperf")


def main() -> None:
    arguments = parse()
    model, version = served(arguments.url)
    python = install()
    print(f"pdserve {version} at {arguments.url} serves {model}")
    print(f"clients: {', '.join(line.replace('==', ' ') for line in pins())}", flush=True)
    failed = []
    for client in arguments.only or CLIENTS:
        print(f"\n{client}", flush=True)
        command = [python, HERE / f"with_{client}.py", arguments.url, model]
        if client == "aiperf":
            command.append(arguments.tokenizer or default_cache() / "models" / model)
        if subprocess.run(command, check=False).returncode:
            failed.append(client)
    if failed:
        sys.exit(f"\nfailed: {', '.join(failed)}")
    print("\nall of them work")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="where the API is (%(default)s)")
    parser.add_argument(
        "--only", choices=CLIENTS, action="append", help="run this client; may be given several times (all of them)"
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        help="the model's folder, for AIPerf (where pdserve keeps its default model)",
    )
    return parser.parse_args()


def served(url: str) -> tuple[str, str]:
    """The model and the version of the server; exits if there is none."""
    try:
        model = fetch(f"{url}/models")["data"][0]["id"]
        return model, fetch(f"{url.removesuffix('/v1')}/version")["version"]
    except (OSError, ValueError, LookupError) as error:
        sys.exit(f"no pdserve answers at {url} ({error}): start one with `make serve`, or say where it is with --url")


def fetch(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as response:
        return json.load(response)


def install() -> Path:
    """The interpreter of the clients' environment, which is made anew when what it must hold has changed."""
    python, installed = ENVIRONMENT / "bin" / "python", ENVIRONMENT / "installed.txt"
    wanted = REQUIREMENTS.read_text()
    if not installed.exists() or installed.read_text() != wanted:
        print(f"installing the clients into {ENVIRONMENT}, 1.5 GB; this takes minutes", flush=True)
        venv.create(ENVIRONMENT, clear=True, symlinks=True, with_pip=True)
        pip = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check", "-r", str(REQUIREMENTS)]
        if subprocess.run(pip, check=False).returncode:
            sys.exit("the clients could not be installed; pip says why above")
        installed.write_text(wanted)
    return python


def pins() -> list[str]:
    return [line for line in REQUIREMENTS.read_text().splitlines() if "==" in line]


def default_cache() -> Path:
    configured = os.environ.get("PDSERVE_CACHE_DIR")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "pdserve"


if __name__ == "__main__":
    main()
