"""Writes tiny random weights of a family into a folder; run by the trainers' forked Python."""

import sys
from pathlib import Path

import tiny

name, folder = sys.argv[1:]
tiny.write(name, Path(folder))
