"""A process that carries out orders imports what they need."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from latentmake.plan.orders import Order
from order_world import key_of, order, put_image
from trainer_world import make_vae

SCRIPTS = Path(__file__).parents[3] / "scripts"
JOB = """
import json, runpy, sys
from types import SimpleNamespace as Values

folder, log, *orders = sys.argv[1:]
sys.path.append(folder)
orders = Values(orders=orders)
job = Values(scriptdir=folder, log=[log], threads=1, output=["a.receipt.json"], input=orders)
runpy.run_path(f"{folder}/encode.py", {"snakemake": job})
print(json.dumps(sorted(sys.modules)))
"""


def imported(order: Order) -> set[str]:
    """Return the modules that a job of an order has imported when it ends."""
    order.write()
    command = [sys.executable, "-c", JOB, str(SCRIPTS), "log.txt", str(order.path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def test_a_job_imports_encoders_only_where_something_is_to_be_encoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_vae(tmp_path / "vae")
    image = put_image(tmp_path / "a.png", (1, 2, 3))
    made = order("latents", {"a": image})
    assert {"torch", "diffusers"} <= imported(made)

    fresh = order("latents", {"a": image}, found={"16/a": f"{key_of(made, image, '16')}@0"})
    assert not imported(fresh) & {"av", "torch", "diffusers", "transformers"}
