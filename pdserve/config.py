"""Settings: frozen, one slice a component, and every bad or unknown value named at once before anything starts.

A value comes from the last of these that has it: the default here, the TOML file (`--config`), the environment
(`PDSERVE_SESSION__PULSE_S=0.05`: section, two underscores, field), the command line.
"""

import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pdserve.core.errors import StartupError
from pdserve.core.sampling import MAX_TOP_LOGPROBS

ENV_PREFIX = "PDSERVE_"
# Read where they are used, before or without settings.
RESERVED_ENV = frozenset({"PDSERVE_CACHE_DIR", "PDSERVE_REQUIRE_ALL", "PDSERVE_SCHEMAS"})

# Of each role, on one cluster.
MAX_WORKERS = 1024

Port = Annotated[int, Field(ge=0, le=65535)]


class Slice(BaseModel):
    """One component's settings. Nothing may take forever, so no number is infinite."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ModelConfig(Slice):
    """Which model.

    Attributes:
        path: a folder, or the default model's name: that one comes from an installed package, converted once and cached.
        name: what clients call it.
        max_context_tokens: of a sequence, prompt and output; None is what the model was made for.
    """

    path: str = "SmolLM2-135M-Instruct"
    name: str = "SmolLM2-135M-Instruct"
    dtype: Literal["float32", "float16", "bfloat16"] = "bfloat16"
    max_context_tokens: int | None = Field(default=None, ge=1)


class ScriptedConfig(Slice):
    """How long the scripted engine's work takes, and what it answers.

    Attributes:
        echo: answers repeat their prompts, then end.
    """

    step_s: float = Field(default=0.001, ge=0)
    prefill_token_s: float = Field(default=0.0, ge=0)
    decode_row_s: float = Field(default=0.0, ge=0)
    echo: bool = False


class EngineConfig(Slice):
    """The engine.

    Attributes:
        kind: "torch" computes the model; "scripted" has everything real but tokens and step times.
        device: "cpu" or "cuda".
        core: the processor to which the engine's thread is pinned; None leaves it free.
        num_blocks: blocks of the KV pool; None sizes it by `kv_memory_bytes`.
        step_tokens: prompt tokens that a step computes at most.
        max_running: sequences in a batch at most.
        decode_graphs: whether decode steps on a GPU run as CUDA graphs; of no effect on a CPU.
        max_waiting: attempts that wait for blocks or their turn at most; one more is refused.
        stuck_after_s: a step older than this means that the engine is stuck.
    """

    kind: Literal["torch", "scripted"] = "torch"
    device: Literal["cpu", "cuda"] = "cpu"
    core: int | None = Field(default=None, ge=0)
    num_blocks: int | None = Field(default=None, ge=1)
    kv_memory_bytes: int = Field(default=1 << 30, ge=1 << 20)
    step_tokens: int = Field(default=512, ge=1)
    max_running: int = Field(default=256, ge=1)
    decode_graphs: bool = True
    max_waiting: int = Field(default=1024, ge=1)
    stuck_after_s: float = Field(default=60.0, gt=0)
    scripted: ScriptedConfig = ScriptedConfig()

    @model_validator(mode="after")
    def _batch_fits_a_step(self) -> Self:
        if self.max_running > self.step_tokens:
            raise ValueError(f"max_running ({self.max_running}) must not be above step_tokens ({self.step_tokens})")
        return self


class SessionConfig(Slice):
    """Timers and limits of sessions and pushes, the same on both sides of a wire.

    Attributes:
        pulse_s: each side says so often that it lives.
        quiet_after_s: a peer that has said nothing for so long gets no new work.
        dead_after_s: one that has said nothing for so long is given up, as is a stream that begins with nothing.
        message_bytes: a message stays below this.
        prompt_tokens, prompt_parts: tokens of prompts that may wait for their Run or Reserve in one session, and the parts
            that they may have come in.
        pending_bytes, pending_s: a session with more or older messages waiting is dropped.
        ticket_wait_s: how long a push waits for the reservation that it overtook.
    """

    pulse_s: float = Field(default=1.0, gt=0)
    quiet_after_s: float = Field(default=2.0, gt=0)
    dead_after_s: float = Field(default=5.0, gt=0)
    message_bytes: int = Field(default=1 << 20, ge=1 << 12)
    prompt_tokens: int = Field(default=1 << 24, ge=1)
    prompt_parts: int = Field(default=1 << 15, ge=1)
    pending_bytes: int = Field(default=64 << 20, ge=1 << 16)
    pending_s: float = Field(default=10.0, gt=0)
    ticket_wait_s: float = Field(default=2.0, gt=0)


class WorkerConfig(Slice):
    """A worker's three ports; 0 takes a free one.

    Attributes:
        worker_id: its name; "" makes one from its role and life.
        advertise_host: the address that others are told; "" is `host`.
        drain_s: how long a drain waits for what is held before frontends move it.
        colocated: a decode worker that also prefills what it decodes: the control for measurements.
    """

    worker_id: str = ""
    host: str = "127.0.0.1"
    advertise_host: str = ""
    session_port: Port = 0
    kv_port: Port = 0
    admin_port: Port = 0
    drain_s: float = Field(default=30.0, gt=0)
    colocated: bool = False


class FrontendConfig(Slice):
    """The HTTP side.

    Attributes:
        controller: host:port of the controller that publishes the membership; or
        workers: fixed session addresses of workers, when there is no controller.
        heartbeat_s: a stream that has been silent for so long gets a comment.
        ttft_timeout_s, idle_timeout_s, total_timeout_s: for the first token, for each next one, and for the last.
        stall_timeout_s: a client that has taken nothing for so long, with text waiting for it, is gone.
        vanished_timeout_s: one whose machine has not been heard of for so long is gone; not below a second.
        send_buffer_bytes: of the kernel, for each connection.
        max_unread_bytes: what waits for one stream's reader at most; one that is further behind is gone.
        listen_backlog: connections that wait to be accepted at most; the kernel's own limit (somaxconn) holds too.
        max_attempts: tries at a request, first included.
        retry_backoff_s: before the second try; doubles with each one.
        max_waiting: requests that wait for a worker at most.
        wait_s: how long one waits for a worker at most.
        keepalive_s: a connection on which nothing is going on, or the head of a request comes slowly, is closed after that.
        body_timeout_s: a request's body has come by then, and a response without generated text has been taken.
        max_body_bytes: a body's length at most, and that of a compressed one's text.
        max_choices: answers to one request at most: its prompts times n.
        max_logprobs: alternatives that `logprobs` of a completion may ask for.
        balancer_wait_s: how long a frontend that is stopping is not ready, yet takes requests, until load balancers know.
        shutdown_s: how long it then waits for open requests.
    """

    host: str = "127.0.0.1"
    port: Port = 8000
    controller: str = ""
    workers: tuple[str, ...] = ()
    heartbeat_s: float = Field(default=15.0, gt=0)
    ttft_timeout_s: float = Field(default=600.0, gt=0)
    idle_timeout_s: float = Field(default=120.0, gt=0)
    total_timeout_s: float = Field(default=3600.0, gt=0)
    stall_timeout_s: float = Field(default=30.0, gt=0)
    vanished_timeout_s: float = Field(default=30.0, ge=1)
    send_buffer_bytes: int = Field(default=32 << 10, ge=1 << 12)
    max_unread_bytes: int = Field(default=16 << 20, ge=1 << 12)
    listen_backlog: int = Field(default=4096, ge=1)
    max_attempts: int = Field(default=4, ge=1)
    retry_backoff_s: float = Field(default=0.05, ge=0)
    max_waiting: int = Field(default=1024, ge=0)
    wait_s: float = Field(default=30.0, gt=0)
    keepalive_s: float = Field(default=75.0, gt=0)
    body_timeout_s: float = Field(default=60.0, gt=0)
    max_body_bytes: int = Field(default=32 << 20, ge=1 << 10)
    max_choices: int = Field(default=2048, ge=1)
    max_logprobs: int = Field(default=5, ge=0, le=MAX_TOP_LOGPROBS)
    balancer_wait_s: float = Field(default=1.0, ge=0)
    shutdown_s: float = Field(default=30.0, ge=0)


class ClusterConfig(Slice):
    """What the controller keeps running.

    Attributes:
        address: of a Ray cluster to join; "" starts one on this machine.
        port: where the controller serves frontends and operators.
        watch_s: how often the controller looks at its workers.
        start_s: how long a worker may take to be placed, and then again to be ready.
        keep_workers: whether workers go on when their controller is told to stop.
    """

    address: str = ""
    host: str = "127.0.0.1"
    port: Port = 8100
    namespace: str = "pdserve"
    prefill: int = Field(default=1, ge=0, le=MAX_WORKERS)
    decode: int = Field(default=1, ge=0, le=MAX_WORKERS)
    watch_s: float = Field(default=1.0, gt=0)
    start_s: float = Field(default=300.0, gt=0)
    keep_workers: bool = True


class LogConfig(Slice):
    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    json_lines: bool = True


class Settings(Slice):
    """All slices. A process hands each component its own, never the whole."""

    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    session: SessionConfig = SessionConfig()
    worker: WorkerConfig = WorkerConfig()
    frontend: FrontendConfig = FrontendConfig()
    cluster: ClusterConfig = ClusterConfig()
    log: LogConfig = LogConfig()


def load_settings(
    toml_path: Path | None = None,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Settings:
    """Settings from all their sources.

    Args:
        overrides: nested like the TOML file: {"frontend": {"port": 8000}}.
    Raises:
        StartupError: lists every bad or unknown value.
    """
    values: dict[str, Any] = {}
    _merge(values, _read_toml(toml_path) if toml_path else {})
    _merge(values, _read_environ(os.environ if environ is None else environ))
    _merge(values, overrides or {})
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        problems = "; ".join(_told(detail) for detail in error.errors())
        raise StartupError(f"bad settings: {problems} (pdserve/config.py lists all)") from None


def assign(values: dict[str, Any], path: Sequence[str], text: str) -> None:
    """Put a setting that was given as text where the TOML file would have it.

    Raises:
        StartupError: it is a field of what has a value of its own.
    """
    *sections, leaf = path
    slot = values
    for section in sections:
        slot = slot.setdefault(section, {})
        if not isinstance(slot, dict):
            raise StartupError(
                f"bad settings: {'.'.join(path)} is a field of {section!r}, which has a value of its own"
            )
    # Tuples are written with commas.
    slot[leaf] = text.split(",") if tuple(path) == ("frontend", "workers") else text


def _told(detail: Mapping[str, Any]) -> str:
    name = ".".join(map(str, detail["loc"]))
    match detail["type"]:
        case "extra_forbidden":
            return f"{name}: no such setting"
        case "value_error":
            return f"{name}: {detail['ctx']['error']}"
    return f"{name}: {detail['msg']} (got {str(detail['input'])[:80]})"


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise StartupError(f"cannot read settings from {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StartupError(f"{path} is not TOML: {error}") from None


def _read_environ(environ: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, text in environ.items():
        if not name.startswith(ENV_PREFIX) or name in RESERVED_ENV:
            continue
        assign(values, name.removeprefix(ENV_PREFIX).lower().split("__"), text)
    return values


def _merge(target: dict[str, Any], source: Mapping[str, Any]) -> None:
    for name, value in source.items():
        if isinstance(value, Mapping) and isinstance(target.get(name), dict):
            _merge(target[name], value)
        else:
            target[name] = dict(value) if isinstance(value, Mapping) else value
