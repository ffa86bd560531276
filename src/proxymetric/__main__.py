"""Run the command line: `python -m proxymetric`."""

import sys

try:
    from proxymetric.cli import main
except ModuleNotFoundError as error:
    # A machine that only trains for a study may have torch without the packages of the command line.
    if error.name not in ("typer", "rich", "click"):
        raise
    if sys.argv[1:2] != ["study"]:
        sys.exit(f"proxymetric: {error.name} is not installed; without it only `python -m proxymetric study` works")
    from proxymetric.studies.__main__ import main as study

    sys.exit(study(sys.argv[2:]))

main()
