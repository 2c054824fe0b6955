"""The ``vllm-dsv4`` command: one module a subcommand."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from vllm_dsv4 import __version__

COMMANDS = ("doctor", "make_checkpoint", "verify")
"""Modules of this package; each has ``register(subparsers)``, which sets the default ``run(args) -> exit code``."""

EXIT_FAILED = 1
"""The command worked, and its answer is no: something blocks serving, or a check failed."""
EXIT_ERROR = 2
"""The command could not do its work: bad arguments, unreadable or unsupported files."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-dsv4",
        description="Tools around DeepSeek-V4 in vLLM.",
        epilog="Exit codes: 0 yes or done, 1 the answer is no, 2 the command could not do its work.",
    )
    parser.add_argument("--version", action="version", version=f"vllm-dsv4 {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name in COMMANDS:
        import_module(f"vllm_dsv4.cli.{name}").register(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        return args.run(args)
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError) as error:
        # All errors that this package raises on purpose are ValueErrors.
        if args.debug:
            raise
        print(f"vllm-dsv4: error: {error}", file=sys.stderr)
        return EXIT_ERROR


if __name__ == "__main__":
    sys.exit(main())
