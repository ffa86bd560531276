"""`python -m proxymetric`."""

from proxymetric.cli import main

main()
