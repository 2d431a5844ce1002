"""`python -m thresher info | selftest | bench`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m thresher")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="version, build, backends and devices, as JSON")
    selftest = commands.add_parser("selftest", help="every operation against its definition")
    selftest.add_argument("--quiet", action="store_true", help="only the verdict")
    bench = commands.add_parser("bench", help="the step beside dense attention (source tree only)")
    bench.add_argument("arguments", nargs=argparse.REMAINDER, help="passed on to the benchmark")
    args = parser.parse_args()

    if args.command == "info":
        from . import info

        print(json.dumps(info(), indent=2))
        return 0
    if args.command == "selftest":
        from .selftest import run

        return 0 if run(args.quiet) else 1
    script = Path(__file__).resolve().parents[2] / "bench" / "cpu_step.py"
    if not script.exists():
        print("bench: needs the source tree (bench/cpu_step.py)", file=sys.stderr)
        return 2
    return subprocess.call([sys.executable, str(script), *args.arguments])


if __name__ == "__main__":
    raise SystemExit(main())
