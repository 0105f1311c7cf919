"""A process that carries out orders imports what they need, with the same latents for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import world
from latentmake.caches.encoders.device import without
from latentmake.plan.orders import Order
from order_world import carry_out, key_of, order, put_image
from trainer_world import make_vae
from transformers import CLIPTextConfig, CLIPTextModel

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
UNUSED = {
    *("accelerate", "av", "bitsandbytes", "cv2", "fsspec", "jinja2", "matplotlib"),
    *("pandas", "peft", "scipy", "sklearn", "sympy", "tensorboard", "torch._dynamo"),
    *("torch.distributed.tensor", "torchvision", "trio"),
}


def imported(order: Order) -> set[str]:
    """Return the modules that a job of an order has imported when it ends."""
    order.write()
    command = [sys.executable, "-c", JOB, str(SCRIPTS), "log.txt", str(order.path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def test_a_job_of_images_imports_no_more_than_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_vae(tmp_path / "vae")
    image = put_image(tmp_path / "a.png", (1, 2, 3))
    made = order("latents", {"a": image})
    modules = imported(made)
    assert {"torch", "diffusers"} <= modules
    assert not modules & {*UNUSED, "transformers"}
    (path,) = map(Path, made.paths)
    found = path.read_bytes()
    path.unlink()
    carry_out(made)  # by a process that has imported all
    assert path.read_bytes() == found

    fresh = order("latents", {"a": image}, found={"16/a": f"{key_of(made, image, '16')}@0"})
    assert not imported(fresh) & {*UNUSED, "transformers", "torch", "diffusers"}


def test_a_job_of_captions_imports_no_more_than_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = world.make_tokenizer()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    sizes |= {"num_hidden_layers": 1, "vocab_size": len(tokenizer)}
    config = CLIPTextConfig(**sizes, bos_token_id=0, eos_token_id=tokenizer.eos_token_id)
    CLIPTextModel(config).save_pretrained(tmp_path / "text_encoder")
    modules = imported(order("text", {"a": "a cat"}))
    assert {"torch", "transformers"} <= modules
    # transformers' masks take a function from beside torch's compiler, which takes sympy.
    assert modules & {*UNUSED, "diffusers"} <= {"sympy"}


def test_a_package_that_needs_what_is_hidden_gets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_vae(tmp_path / "vae")
    package = tmp_path / "packages/xformers"  # diffusers imports it where it is
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "ops.py").write_text("from torch._dynamo.utils import is_compile_supported")
    (tmp_path / "packages/xformers-0.0.35.dist-info").mkdir()
    told = tmp_path / "packages/xformers-0.0.35.dist-info/METADATA"
    told.write_text("Metadata-Version: 2.1\nName: xformers\nVersion: 0.0.35\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    made = order("latents", {"a": put_image(tmp_path / "a.png", (1, 2, 3))})
    assert {"xformers.ops", "torch._dynamo.utils"} <= imported(made)
    assert Path(*made.paths).exists()


def test_hidden_modules_come_back() -> None:
    with without("tabulate_none", "json"):
        assert sys.modules["json"] is json  # what is imported already stays
        with pytest.raises(ModuleNotFoundError):
            __import__("tabulate_none")
    assert "tabulate_none" not in sys.modules
