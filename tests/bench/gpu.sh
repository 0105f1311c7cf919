#!/usr/bin/env bash
# Measures everything that needs a GPU: tests/gpu, then encoders, trainers and the loader at real sizes with
# random weights, in 9 minutes at most.
#
#   tests/bench/gpu.sh [--install FOLDER] [--cpu] [--minutes 9] [--out FOLDER] [STEP...]
#
# LATENTMAKE_PYTHON names the Python (default: python, else python3). It needs torch for CUDA and what
# envs/requirements-dev.lock holds; `--install` first puts what is missing into a virtual environment in
# FOLDER, and keeps a torch for CUDA that the Python has already (PIP_FIND_LINKS and the like hold for it).
# `--cpu` runs every step at tiny sizes on the CPU, to see that it works. Without steps named, all are run: see
# tests/bench/gpu.py. Tables are printed; all figures also go to gpu.json and gpu.txt in the folder of `--out`
# (default: here). Exits with 1 if a step failed or took too long, with 2 where there is no GPU.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${LATENTMAKE_PYTHON:-}
if [[ -z $python ]]; then
  for python in python python3; do if command -v "$python" >/dev/null; then break; fi; done
fi
if ! command -v "$python" >/dev/null; then
  echo "no Python: set LATENTMAKE_PYTHON to one of version 3.11 or later" >&2
  exit 2
fi
# Prints what of the lock a Python lacks; of torch any version for CUDA will do.
missing() {
  "$1" - "$root/envs/requirements-dev.lock" <<'PYTHON'
import importlib.metadata as metadata
import re
import sys

for line in open(sys.argv[1]):
    if found := re.match(r"([\w.-]+)==(\S+)", line):
        name, version = found.groups()
        try:
            own = metadata.version(name)
        except metadata.PackageNotFoundError:
            own = ""
        if name == "torch" and own:
            import torch

            if torch.version.cuda or torch.version.hip:
                continue
            own = ""
        if own.partition("+")[0] != version:
            print(f"{name}=={version}")
PYTHON
}
if [[ ${1-} == --install ]]; then
  folder=${2:?"--install takes a folder"}
  shift 2
  "$python" -m venv "$folder"
  # What the Python has is seen too, after what is installed there; it may be a virtual environment itself.
  "$python" -c 'import site; print(*site.getsitepackages(), sep="\n")' \
    >"$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/outer.pth"
  python=$folder/bin/python
  mapfile -t wanted < <(missing "$python")
  echo "installing ${#wanted[@]} packages into $folder"
  if ((${#wanted[@]})); then
    # Another torch than the lock's may not do for what depends on it: --no-deps leaves it in place.
    if printf '%s\n' "${wanted[@]}" | grep -q '^torch=='; then deps=(); else deps=(--no-deps); fi
    "$python" -m pip install --quiet "${deps[@]}" "${wanted[@]}"
  fi
fi
exec "$python" "$root/tests/bench/gpu.py" "$@"
