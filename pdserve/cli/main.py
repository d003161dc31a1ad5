"""The command `pdserve`."""

import sys

OLDEST_PYTHON = (3, 11)


def main() -> int:
    """Run one command. Returns: the exit status; a failure that a person can mend is one line on stderr."""
    # Before anything is imported that an older Python could not even parse.
    if sys.version_info[:2] < OLDEST_PYTHON:
        found = ".".join(map(str, sys.version_info[:3]))
        sys.stderr.write(
            f"pdserve: needs Python 3.11 or newer, and this is {found}: make its environment with a newer one\n"
        )
        return 1
    from pdserve.cli.commands import run_command

    return run_command(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
