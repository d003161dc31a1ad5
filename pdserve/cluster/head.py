"""`python -m pdserve.cluster.head`: a Ray head for this machine alone, in the foreground.

It prints its address as one line on stdout, and ends with everything it started on SIGTERM, on SIGINT or when its stdin
ends. If it is killed, the kernel kills the head's own processes, and workers follow their raylet. docs/adr/0001 says why
this is neither `ray start` nor `ray.init`.
"""

import argparse
import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from ray._private.node import Node
from ray._private.parameter import RayParams

from pdserve.cluster.environment import LOOPBACK, RECONNECT_S
from pdserve.config import MAX_WORKERS

# The least that Ray allows: no data goes through its object store.
OBJECT_STORE_BYTES = 80 << 20


class Head(Node):
    """A head without the dashboard's process, which Ray starts even where there is to be no dashboard."""

    def start_api_server(self, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
        """Starts nothing."""


def start_head(temp_dir: Path, port: int, gpus: int, prestarted: int) -> Node:
    """Start Ray's processes, bound to the loopback address.

    Args:
        temp_dir: short: Ray adds about 60 characters to it for its sockets, and these must stay under 108.
        port: that the head is reached at.
        gpus: how many GPUs workers may take.
        prestarted: Python processes that wait to become actors, started side by side.
    """
    # Ray's own annotations of these are wrong in places.
    parameters: dict[str, Any] = {
        "node_ip_address": LOOPBACK,
        "gcs_server_port": port,
        "temp_dir": str(temp_dir),
        "num_cpus": prestarted,
        "num_gpus": gpus,
        "resources": {"prefill": MAX_WORKERS, "decode": MAX_WORKERS},
        "object_store_memory": OBJECT_STORE_BYTES,
        "include_dashboard": False,
        "include_log_monitor": False,
        "no_monitor": True,
        "_system_config": {
            "gcs_rpc_server_reconnect_timeout_s": RECONNECT_S,
            # Nobody scrapes Ray; an idle cluster is to be idle.
            "enable_metrics_collection": False,
            "event_stats": False,
        },
    }
    return Head(RayParams(**parameters), head=True, shutdown_at_exit=True, spawn_reaper=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m pdserve.cluster.head")
    parser.add_argument("--temp-dir", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--prestarted", type=int, default=3)
    arguments = parser.parse_args()

    stop = threading.Event()
    node = start_head(arguments.temp_dir, arguments.port, arguments.gpus, arguments.prestarted)
    # Ray has set handlers of its own while it started.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    threading.Thread(target=_wait_for_end, args=(stop,), daemon=True).start()
    sys.stdout.write(f"{node.address}\n")
    sys.stdout.flush()
    stop.wait()
    # Ray's agents, and an actor that is stuck, would outlive their raylet for a minute.
    family = psutil.Process().children(recursive=True)
    node.kill_all_processes(check_alive=False, allow_graceful=False)
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _wait_for_end(stop: threading.Event) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    stop.set()


if __name__ == "__main__":
    main()
