"""Row 6: how much of a raw socket's speed the KV push reaches between two processes of one machine."""

import asyncio
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.cluster import ClusterSource, stop
from bench.launch import Launcher
from bench.plots import plot_bars
from bench.row import Goal, NotRunError, RowOptions, RowResult, paired_line
from bench.statistics import spread

BYTES_TOTAL = 1 << 30
LIMIT_S = 120.0
GRPC_GOAL = Goal(">=", 0.4)
SHARED_MEMORY = "same-host shared-memory path (target >= 0.8): this build has none, gRPC is its only transport"


class KvPush:
    """Bytes a second of the real push client and receiver over loopback, over those of one raw TCP socket."""

    number = 6
    title = "KV push goodput between two processes over loopback, over one raw TCP socket"
    target = f"gRPC {GRPC_GOAL}; shared memory >= 0.8"

    async def run(self, cluster: ClusterSource, options: RowOptions) -> RowResult:
        floor_rates: list[float] = []
        push_rates: list[float] = []
        for _ in range(options.pairs + 1):
            floor_rates.append(await _rate(cluster.launcher, "bench.tcp_floor"))
            try:
                push_rates.append(await _rate(cluster.launcher, "bench.kv_link"))
            except NotRunError as error:
                floor = f"the floor alone, one raw TCP socket: {floor_rates[-1] / 1e9:.2f} GB/s"
                raise NotRunError(f"{error}; {floor}") from error
        del floor_rates[0], push_rates[0]  # the first pair warms up
        line = paired_line("KV push over gRPC", "one raw TCP socket", "B/s", push_rates, floor_rates, GRPC_GOAL)
        detail = {"bytes_total": BYTES_TOTAL, "push_bytes_per_s": push_rates, "floor_bytes_per_s": floor_rates}
        return RowResult((line,), detail, (SHARED_MEMORY,))

    def plot(self, detail: Mapping[str, Any], path: Path) -> None:
        columns = {"KV push over gRPC": "push_bytes_per_s", "raw TCP socket": "floor_bytes_per_s"}
        bars = {name: spread(detail[key]).median / 1e9 for name, key in columns.items()}
        plot_bars(self.title, {"1 GiB, loopback": bars}, "GB/s", path)


async def _rate(launcher: Launcher, module: str) -> float:
    """Run a module that moves `BYTES_TOTAL` between two processes: the bytes a second that it prints."""
    process = launcher.start([sys.executable, "-m", module, str(BYTES_TOTAL)], stderr=subprocess.PIPE)
    try:
        output, errors = await asyncio.to_thread(process.communicate, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        raise NotRunError(f"{module} had not moved {BYTES_TOTAL} bytes after {LIMIT_S:g} s") from None
    finally:
        await asyncio.to_thread(stop, process)
    if process.returncode != 0:
        last = errors.decode(errors="replace").strip().splitlines()[-1:]
        raise NotRunError(last[0] if last else f"{module} ended with {process.returncode}")
    return float(output)


ROW = KvPush()
