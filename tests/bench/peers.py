"""Wall time of caching latents, as a ratio to musubi-tuner's own script on the same pictures.

    LATENTMAKE_MUSUBI=FOLDER LATENTMAKE_TRAINERS_PYTHON=PYTHON python tests/bench/peers.py
        [--pictures 8] [--side 256] [--rounds 3] [--folder FOLDER] [--json FILE]

A Wan VAE of its real size with random weights in bfloat16, in one file that both read. Whole
commands take turns: `snakemake latents_bench` on all cores, and `wan_cache_latents.py --device cpu`
in its own Python, without further flags and with `--skip_existing`; each from an empty cache
(`cold`), again (`nothing`), and after one picture changed (`edit`), whose cache is deleted for the
script, which does not notice. Printed: medians of seconds, and of the ratios within a round, in
time and in processor time; at last how far the latents differ. bfloat16 has 8 bits: numbers that
are computed in it, as the script does on every device, differ from exact ones by 2^-9 at each step.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import encode
from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[2]
CORES = len(os.sched_getaffinity(0))
STAGES = ("cold", "nothing", "edit")
NAMES = ("ours", "script", "--skip_existing")
MODEL = {"task": "t2v-1.3B", "vae": "models/vae.safetensors"}
SITE = f"""
import os, sys
if any(each.endswith(".py") for each in sys.orig_argv):
    import torch
    if not torch.cuda.is_available():
        torch.cuda.current_device = lambda: 0
    sys.path.append({str(ROOT / "tests/trainers")!r})
    sys.path.append({str(ROOT / "tests/workflow")!r})
    import preloaded_trainers
    preloaded_trainers._declare_operators(torch)
"""
"""musubi-tuner asks for a device when it is imported; torchvision may be of another torch."""
WEIGHTS = """
import sys
import torch
from musubi_tuner.wan.modules import vae
from safetensors.torch import save_file

torch.manual_seed(0)
network = vae.WanVAE_(
    dim=96, z_dim=16, dim_mult=[1, 2, 4, 4], num_res_blocks=2, attn_scales=[],
    temperal_downsample=[False, True, True],
)
state = {name: value.to(torch.bfloat16) for name, value in network.state_dict().items()}
save_file(state, sys.argv[1])
"""
Found = dict[tuple[str, str], list[tuple[float, float]]]


def find_musubi() -> tuple[Path, str, dict[str, str]]:
    """Return musubi-tuner's package, its Python and what that needs; exit where one is missing."""
    default = ROOT.parent / "shared/trainers/musubi-tuner"
    package = Path(os.environ.get("LATENTMAKE_MUSUBI", default)).resolve() / "src/musubi_tuner"
    python = os.environ.get("LATENTMAKE_TRAINERS_PYTHON", sys.executable)
    if not (package / "wan_cache_latents.py").is_file():
        sys.exit(f"no musubi-tuner in {package.parents[1]}: set LATENTMAKE_MUSUBI to its folder")
    imports = [python, "-c", "import av, cv2, diffusers, einops, toml, torch, voluptuous"]
    if subprocess.run(imports, capture_output=True, check=False).returncode:
        sys.exit(f"{python} lacks what musubi-tuner needs: set LATENTMAKE_TRAINERS_PYTHON")
    return package, python, {**os.environ, "PYTHONPATH": str(package.parent)}


def make_project(folder: Path, pictures: int, side: int) -> None:
    """Write pictures, the tiny text encoder that planning asks for, and the configuration."""
    sys.path.insert(0, str(ROOT / "scripts"))
    from demo.text import t5_tokenizer, umt5_encoder

    for name in ("Snakefile", "rules", "scripts", "profiles", "envs"):
        (folder / name).symlink_to(ROOT / name)
    for name in ("data", "config", "models"):
        (folder / name).mkdir()
    encode.photographs(folder / "data", pictures, (side, side))
    for number in range(pictures):
        (folder / f"data/{number:06d}.txt").write_text("a picture")
    tokenizer = t5_tokenizer(["a picture"])
    tokenizer.save_pretrained(folder / "models/text")
    umt5_encoder(tokenizer).save_pretrained(folder / "models/text")
    model = {**MODEL, "text": {"path": "models/text", "tokenizer": "models/text"}}
    config = {
        "datasets": {"bench": {"path": "data", "fit": "bucket"}},
        "models": {"bench": model},
        "runs": {"bench": {"datasets": ["bench"], "model": "bench", "resolutions": [side]}},
    }
    (folder / "config/config.yaml").write_text(json.dumps(config))
    (folder / "musubi.toml").write_text(
        f"[[datasets]]\nresolution = [{side}, {side}]\nenable_bucket = true\nbatch_size = 1\n"
        f'caption_extension = ".txt"\nimage_directory = "{folder / "data"}"\n'
        f'cache_directory = "{folder / "musubi"}"\n'
    )


def run(command: list[str], folder: Path, environment: dict[str, str]) -> tuple[float, float]:
    """Return the wall and processor time of a command, in seconds."""
    began, before = time.monotonic(), os.times()
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{command} failed:\n{done.stdout[-2000:]}{done.stderr[-3000:]}")
    return time.monotonic() - began, sum(os.times()[2:4]) - sum(before[2:4])


def measure(
    folder: Path, rounds: int, commands: dict[str, Callable[[], tuple[float, float]]]
) -> Found:
    """Return wall and processor times by stage and command, of each round."""
    found: Found = {(stage, name): [] for stage in STAGES for name in NAMES}
    edited = folder / "data/000000.jpg"
    for number in range(rounds):
        for name in NAMES:
            for place in ("cache", ".latentmake", ".snakemake", "runs", "logs", "musubi"):
                shutil.rmtree(folder / place, ignore_errors=True)
            for stage in STAGES:
                if stage == "edit":
                    width = encode.Image.open(edited).width
                    encode.photographs(edited.parent, 1, (width, width), seed=1000 + number)
                    (edited.parent / f"{1000 + number:06d}.jpg").replace(edited)
                    for path in (folder / "musubi").glob("000000_*"):
                        path.unlink()
                found[stage, name].append(commands[name]())
            if name == "ours":
                shutil.rmtree(folder / "ours", ignore_errors=True)
                shutil.copytree(folder / "cache", folder / "ours")
    return found


def differences(folder: Path) -> list[str]:
    """Return how far our latents are from the script's, tensor by tensor of equal names."""
    from safetensors.torch import load_file

    lines, squares, total, most = [], 0.0, 0.0, 0.0
    theirs = {path.name: load_file(path) for path in (folder / "musubi").glob("*_wan.safetensors")}
    ours = {path.name: load_file(path) for path in (folder / "ours").rglob("*_wan.safetensors")}
    if ours.keys() != theirs.keys():
        lines.append(f"names differ: {sorted(ours.keys() ^ theirs.keys())}")
    for name in sorted(ours.keys() & theirs.keys()):
        if ours[name].keys() != theirs[name].keys():
            lines.append(f"{name}: tensors differ: {[*ours[name]]} and {[*theirs[name]]}")
            continue
        for key, tensor in ours[name].items():
            other = theirs[name][key]
            if (tensor.dtype, tensor.shape) != (other.dtype, other.shape):
                lines.append(f"{name} {key}: {tensor.dtype}, {other.dtype}; {other.shape}")
                continue
            gap = (tensor.float() - other.float()).abs()
            squares += float(gap.square().sum())
            total += float(other.float().square().sum())
            most = max(most, float(gap.max() / other.float().square().mean().sqrt()))
    root = (squares / total) ** 0.5 if total else 0.0
    count = len(ours.keys() & theirs.keys())
    return [*lines, f"{count} files: root mean square of differences {root:.1e}, most {most:.1e}"]


def rows_of(found: Found) -> list[list[Any]]:
    """Return the rows of the table."""
    rows = []
    for stage in STAGES:
        ours = found[stage, "ours"]
        row: list[Any] = [stage, *(statistics.median(x for x, _ in found[stage, n]) for n in NAMES)]
        for clock in (0, 1):
            for name in NAMES[1:]:
                pairs = zip(ours, found[stage, name], strict=True)
                row.append(statistics.median(a[clock] / b[clock] for a, b in pairs))
        rows.append(row)
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pictures", type=int, default=8)
    parser.add_argument("--side", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--folder", type=Path, default=None, help="where to work")
    options = parser.parse_args()
    package, python, environment = find_musubi()
    folder = Path(tempfile.mkdtemp(prefix="latentmake-bench-", dir=options.folder)).resolve()
    try:
        make_project(folder, options.pictures, options.side)
        snakemake = [sys.executable, "-m", "snakemake", "--cores", str(CORES), "--quiet", "all"]
        (folder / "site").mkdir()
        (folder / "site/sitecustomize.py").write_text(SITE)
        environment["PYTHONPATH"] += f"{os.pathsep}{folder / 'site'}"
        vae = folder / MODEL["vae"]
        (folder / "weights.py").write_text(WEIGHTS)
        run([python, "weights.py", str(vae)], folder, environment)
        script = [python, str(package / "wan_cache_latents.py"), "--device", "cpu", "--vae"]
        script += [str(vae), "--dataset_config", str(folder / "musubi.toml")]
        commands = {
            "ours": lambda: run([*snakemake, "--", "latents_bench"], folder, dict(os.environ)),
            "script": lambda: run(script, folder, environment),
            "--skip_existing": lambda: run([*script, "--skip_existing"], folder, environment),
        }
        found = measure(folder, options.rounds, commands)
        head = ["stage", "ours [s]", "script", "--skip_existing", "ours / script"]
        head += ["ours / --skip_existing", "the same in processor time", ""]
        print(tabulate(rows_of(found), headers=head, floatfmt=".2f"))
        print("\n".join(differences(folder)))
        if options.json:
            figures = {" ".join(key): values for key, values in found.items()}
            options.json.write_text(json.dumps(figures, indent=1))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
