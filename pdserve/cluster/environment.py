"""What Ray reads from the environment. It has to be there before Ray is imported, in the head and in every driver."""

import os
import secrets
from pathlib import Path

LOOPBACK = "127.0.0.1"

# Actors of other nodes outlive a head that is gone for less than this.
RECONNECT_S = 3600


def local_ray_environment(token_path: Path) -> dict[str, str]:
    """For a Ray that lives on this machine alone: token authentication, loopback addresses, no usage reports.

    Args:
        token_path: file that holds the cluster's token; see `write_token`.
    """
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_path),
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray replaces 127.0.0.1 by the machine's outward address wherever it is given, unless it believes that the
        # platform has no clusters.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_gcs_rpc_server_reconnect_timeout_s": str(RECONNECT_S),
        "RAY_DEDUP_LOGS": "0",
    }


def write_token(path: Path) -> None:
    """A fresh random token, readable by this user alone."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
