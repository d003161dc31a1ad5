"""Generates the Python code of the wire contract: `python protos/generate.py`, or with `--check` compares only.

Each protos/pdserve/rpc/v1/NAME.proto becomes NAME_pb2 and NAME_pb2_grpc in pdserve/rpc/v1, as .py and .pyi.
"""

import argparse
import filecmp
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "protos"
PACKAGE = Path("pdserve/rpc/v1")
GENERATED = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi")
PLUGINS = ("protoc-gen-mypy", "protoc-gen-mypy_grpc")


def generate(destination: Path) -> None:
    """Write the generated package below `destination`.

    Raises:
        subprocess.CalledProcessError: the compiler refused a proto; it has said why on stderr.
    """
    protos = sorted((SOURCES / PACKAGE).glob("*.proto"))
    # The plugins stand beside the interpreter, which need not be on PATH.
    plugins = [f"--plugin={name}={Path(sys.executable).parent / name}" for name in PLUGINS]
    outputs = [f"--{kind}={destination}" for kind in ("python_out", "grpc_python_out")]
    outputs += [f"--{kind}=quiet:{destination}" for kind in ("mypy_out", "mypy_grpc_out")]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{SOURCES}", *plugins, *outputs, *map(str, protos)]
    subprocess.run(command, check=True)


def generated_files(root: Path) -> set[str]:
    """Names of the generated files of the package below `root`."""
    return {path.name for pattern in GENERATED for path in (root / PACKAGE).glob(pattern)}


def differences(fresh: Path, committed: Path) -> list[str]:
    """Names of files that differ between the packages below the two roots, or that only one of them has."""
    names = sorted(generated_files(fresh) | generated_files(committed))
    _, mismatch, missing = filecmp.cmpfiles(fresh / PACKAGE, committed / PACKAGE, names, shallow=False)
    return sorted(mismatch + missing)


def install(fresh: Path, committed: Path) -> None:
    """Replace the generated files below `committed` by those below `fresh`; unchanged files are left alone."""
    for name in differences(fresh, committed):
        if (fresh / PACKAGE / name).exists():
            shutil.copyfile(fresh / PACKAGE / name, committed / PACKAGE / name)
        else:
            (committed / PACKAGE / name).unlink()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if the committed code is stale")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as temporary:
        fresh = Path(temporary)
        generate(fresh)
        changed = differences(fresh, ROOT)
        if check and changed:
            print(f"Generated code is stale, run `make proto`: {', '.join(changed)}", file=sys.stderr)
            return 1
        if not check:
            install(fresh, ROOT)
            print(f"{len(changed)} files changed" + (f": {', '.join(changed)}" if changed else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
