#!/usr/bin/env bash
# Measures everything that needs a GPU: tests/gpu, then encoders, trainers and the loader at real sizes with
# random weights, in 9 minutes at most.
#
#   tests/bench/gpu.sh [--install FOLDER] [--cpu] [--out FOLDER] [STEP...]
#
# LATENTMAKE_PYTHON names the Python (default: python, else python3). It needs torch for CUDA and what
# envs/requirements-dev.lock holds; `--install` first puts what is missing into a virtual environment in
# FOLDER, and keeps a torch for CUDA that the Python has already (PIP_FIND_LINKS and the like hold for it).
# `--cpu` runs every step at tiny sizes on the CPU, to see that it works. Without steps named, all are run:
# tests vae512 vae1024 t5 wan sd_trainer wan_trainer clip loader compile. What is printed also goes to gpu.txt in the
# folder of `--out` (default: here), and rows of a step to its JSON file there. A step has a time limit, and its
# failure stops no other. Exits with 1 if a step failed or took too long, with 2 where there is no GPU.
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

cpu=() out=$PWD wanted=()
while (($#)); do
  case $1 in
    --cpu) cpu=(--cpu) ;;
    --out) out=$(realpath -m "$2"); shift ;;
    *) wanted+=("$1") ;;
  esac
  shift
done
export PYTHONPATH=$root/scripts HF_HUB_OFFLINE=1
if ((${#cpu[@]})); then export CUDA_VISIBLE_DEVICES=; fi
machine=$("$python" -c 'import sys, torch
there = torch.cuda.is_available()
print(torch.cuda.get_device_name() if there else "CPU", "torch", torch.__version__)
sys.exit(not there)') || ((${#cpu[@]})) || { echo "no GPU: torch sees none; --cpu runs every step at tiny sizes" >&2; exit 2; }
mkdir -p "$out"
cd "$root/tests/bench"
echo "$machine" | tee "$out/gpu.txt"

known=() failed=()
step() { # name, seconds, arguments of Python
  local name=$1 limit=$2 status=0 left=$((535 - SECONDS))
  shift 2
  known+=("$name")
  if ((${#wanted[@]})) && [[ " ${wanted[*]} " != *" $name "* ]]; then return; fi
  if ((left < 1)); then
    status="no time left"
  else
    timeout -k 5 $((left < limit ? left : limit)) "$python" "$@" >"$out/$name.log" 2>&1 </dev/null || status=$?
  fi
  { echo; echo "== $name: status $status"; tail -n 60 "$out/$name.log" || true; } 2>/dev/null | tee -a "$out/gpu.txt"
  if [[ $status != 0 ]]; then failed+=("$name"); fi
}
encoder() { step "$1" "$2" gpu_encoders.py "$1" "${cpu[@]}" --json "$out/$1.json"; }
wan=(--frames 17 --steps 3 --only train)
loader=(--items 4000 --threads 1 4)
if ((${#cpu[@]})); then
  wan=(--model tiny --frames 5 --height 32 --width 48)
  loader=(--items 400 --threads 1)
fi
step tests 240 -m pytest -n 0 -vv -rs --durations=10 "$root/tests/gpu"
encoder vae512 90
encoder vae1024 90
encoder t5 120
encoder wan 90
step sd_trainer 120 gpu_trainers.py "${cpu[@]}" --json "$out/sd_trainer.json"
step wan_trainer 90 wan.py "${wan[@]}" --json "$out/wan_trainer.json"
encoder clip 60
step loader 60 loader.py "${loader[@]}" --batch-size 8 --rounds 1
if ((!${#cpu[@]})); then step compile 180 gpu_trainers.py --ways compile --json "$out/compile.json"; fi
for name in "${wanted[@]}"; do
  if [[ " ${known[*]} " != *" $name "* ]]; then failed+=("$name is no step of ${known[*]}"); fi
done
if ((${#failed[@]})); then
  echo "failed: ${failed[*]}" | tee -a "$out/gpu.txt" >&2
  exit 1
fi
