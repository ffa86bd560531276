"""`python -m proxymetric.studies STUDY.toml`: the command `proxymetric study` without typer and rich."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the arguments and run the study; return the exit code."""
    from proxymetric.studies.command import study
    from proxymetric.studies.reporting import Lines

    parser = argparse.ArgumentParser(prog="python -m proxymetric.studies", description=__doc__)
    parser.add_argument("study", type=Path, metavar="STUDY.toml")
    for name in ("out", "data-root", "archive", "results", "embeddings", "tables"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--collect", type=Path, action="append", default=[])
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--only", default="")
    parser.add_argument("--seeds", default="")
    parser.add_argument("--data", default="")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--overwrite", action="store_true")
    options = vars(parser.parse_args(arguments))
    try:
        return study(options.pop("study"), **options, reporter=Lines()).code
    except (ValueError, OSError) as error:
        print(f"proxymetric: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("proxymetric: stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
