"""`python -m proxymetric`."""

import sys

try:
    from proxymetric.cli import main
except ModuleNotFoundError as error:
    # A bare machine that trains for a study has torch, but perhaps not what draws the command line.
    if error.name not in ("typer", "rich", "click"):
        raise
    if sys.argv[1:2] != ["study"]:
        sys.exit(f"proxymetric: {error.name} is not installed; without it there is only `python -m proxymetric study`")
    from proxymetric.studies.__main__ import main as study

    sys.exit(study(sys.argv[2:]))

main()
