"""`python -m latentmake`: the command of the same name."""

from latentmake.cli import main

main()
