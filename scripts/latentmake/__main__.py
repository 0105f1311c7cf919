"""Run `python -m latentmake` as the command `latentmake`."""

from latentmake.cli import main

main()
