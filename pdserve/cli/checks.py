"""What `pdserve up` makes sure of before it starts anything. Each failure is one line that says what to do."""

import errno
import os
import socket

from pdserve.config import EngineConfig, Settings
from pdserve.core.errors import StartupError
from pdserve.engine.pool_memory import Memory
from pdserve.engine.scripted import SCRIPTED_GEOMETRY
from pdserve.model_folder import DEFAULT_MODEL, check_folder, model_path

# A process with torch, and one without; what Ray's own processes take.
_TORCH_BYTES = 600 << 20
_PLAIN_BYTES = 150 << 20
_RAY_BYTES = 500 << 20
# The default model, before its folder has been made.
_DEFAULT_WEIGHTS_BYTES = 280 << 20


def check_ports(settings: Settings) -> None:
    """Raises StartupError if the frontend or the controller could not listen where it is to be reached."""
    frontend, controller = settings.frontend, settings.cluster
    if frontend.port == controller.port:
        message = f"port {frontend.port} cannot be the API's and the controller's, too: choose another one with --port"
        raise StartupError(message)
    check_port(frontend.host, frontend.port, "frontend.host", "--port")
    check_port(controller.host, controller.port, "cluster.host", "--set cluster.port=…")


def check_port(host: str, port: int, host_setting: str, option: str) -> None:
    """
    Args:
        host_setting, option: how to choose another host and another port.
    Raises:
        StartupError: nobody can listen there, or nobody else could know where.
    """
    if port == 0:
        raise StartupError(f"port 0 is any free one, and nobody would know which: choose one with {option}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        # By itself: create_server makes any error of this one like all others.
        socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)
        socket.create_server((host, port), family=family).close()
    except socket.gaierror as error:
        problem = f"{host_setting} is {host!r}, which is no address ({error.strerror})"
        raise StartupError(f"{problem}: give one of this machine's with --set {host_setting}=…") from None
    except OSError as error:
        problem = f"cannot listen on {host}:{port} ({os.strerror(error.errno or 0)})"
        if error.errno == errno.EADDRNOTAVAIL:
            raise StartupError(f"{problem}: give an address of this machine with --set {host_setting}=…") from None
        raise StartupError(f"{problem}: stop what listens there, or choose another port with {option}") from None


def check_roles(settings: Settings) -> None:
    """Raises StartupError if no request could be answered."""
    if settings.cluster.decode == 0:
        raise StartupError("no decode workers, so nothing would be answered: use --decode 1 or more")
    if settings.cluster.prefill == 0 and not settings.worker.colocated:
        raise StartupError("no prefill workers: use --prefill 1 or more, or --colocated")


def check_model(path: str) -> None:
    """Raises StartupError if the model's folder is not whole. The default model may still have to be made."""
    folder = model_path(path)
    if path != DEFAULT_MODEL or folder.is_dir():
        check_folder(folder)


def check_memory(settings: Settings, available_bytes: int | None = None) -> None:
    """Raises StartupError if the workers would not fit into this machine's memory.

    Args:
        available_bytes: what can be had without swapping; None asks the system.
    """
    available = Memory.of_host().free_bytes if available_bytes is None else available_bytes
    workers = settings.cluster.prefill + settings.cluster.decode
    needed = _RAY_BYTES + workers * worker_bytes(settings)
    if needed > available:
        cache = "engine.kv_memory_bytes" if settings.engine.num_blocks is None else "engine.num_blocks"
        raise StartupError(
            f"too little memory: {workers} workers need about {needed / 2**30:,.1f} GiB and {available / 2**30:,.1f} GiB are "
            f"free: use fewer workers, or smaller caches with --set {cache}=…"
        )


def worker_bytes(settings: Settings) -> int:
    """About what one worker takes: its process, its weights, its cache."""
    engine = settings.engine
    if engine.kind == "scripted":
        return _PLAIN_BYTES + _pool_bytes(engine)
    process_bytes = _TORCH_BYTES + _weights_bytes(settings.model.path)
    return process_bytes if engine.device == "cuda" else process_bytes + _pool_bytes(engine)


def _pool_bytes(engine: EngineConfig) -> int:
    if engine.num_blocks is None:
        return engine.kv_memory_bytes
    # How large a real model's blocks are is known when it is loaded: its worker refuses what cannot be.
    return engine.num_blocks * SCRIPTED_GEOMETRY.block_bytes if engine.kind == "scripted" else 0


def _weights_bytes(path: str) -> int:
    folder = model_path(path)
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) or _DEFAULT_WEIGHTS_BYTES
