"""What this machine is: every figure is a ratio within one run on it, and means little without it."""

import os
import platform
import subprocess
from pathlib import Path

ISA_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd", "sve", "bf16")
REPOSITORY = Path(__file__).resolve().parent.parent


def machine_facts() -> dict[str, str | int | float | list[str]]:
    """CPU model, usable cores, instruction sets that matter to a kernel, memory in bytes, system and Python."""
    cpu, flags = _cpu()
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "isa": [flag for flag in ISA_FLAGS if flag in flags],
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
    }


def machine_line() -> str:
    """The facts in one line."""
    facts = machine_facts()
    memory_gib = float(str(facts["memory_bytes"])) / 2**30
    isa = facts["isa"]
    names = " ".join(isa) if isinstance(isa, list) else ""
    return f"machine: {facts['cpu']}, {facts['cores']} cores, {names or 'baseline ISA'}, {memory_gib:.0f} GiB, " + (
        f"{facts['system']}, Python {facts['python']}"
    )


def revision() -> str:
    """The commit that is measured, "-dirty" appended if files differ from it; "unknown" outside a repository."""
    try:
        described = subprocess.run(
            ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return described.stdout.strip()


def _cpu() -> tuple[str, frozenset[str]]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    values = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    model = values.get("model name") or platform.processor() or platform.machine()
    return model, frozenset((values.get("flags") or values.get("Features") or "").split())
