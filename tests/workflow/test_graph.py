"""The graph that Snakemake sees: every cache file, or jobs alone."""

from __future__ import annotations

import world
from project import NOTHING, Counts, Project

ANT = "cache/shapes/micro/text/ant.text.safetensors"


def test_both_graphs_keep_the_laws(built: Project) -> None:
    """What one of them made is fresh in the other."""
    for graph in ("batches", "whole"):
        built.configure(lambda config, graph=graph: config.update(graph=graph))
        assert built.run("caches_tiny").idle
        before = built.snapshot()
        (built / "data/shapes/ant.txt").write_text(f"an ant in a graph of {graph}")
        (built / "data/shapes/bee.txt").touch()
        result = built.run("caches_tiny")
        assert result.encoded() == Counts(encoded=1)
        assert ("graph: batches, for 18 cache files" in result.output) == (graph == "batches")
        assert built.changed(before) == NOTHING._replace(content={ANT})
        picture = (built / "data/shapes/ant.png").read_bytes()
        (built / "data/shapes/ant.png").write_bytes(b"no picture")
        world.draw(built / "data/shapes/bee.png", len(graph))
        failed = built.run("caches_tiny", check=False)
        assert failed.returncode == 1 and "ant.png: is not an image" in failed.output
        assert "Removing output" not in failed.output
        (built / "data/shapes/ant.png").write_bytes(picture)
        assert built.run("caches_tiny").encoded().encoded == 0
        assert built.run("caches_tiny").idle


def test_commands_of_snakemake_tell_of_each_cache_file(trained: Project) -> None:
    caches = {*trained.cache_files()}
    summary = trained.run("--summary", "train_tiny").output.splitlines()
    cells = (line.split("\t") for line in summary)
    rows = {row[0]: (row[2], *row[4:]) for row in cells if len(row) > 4}
    assert caches < rows.keys()
    rules = {(rule, "ok", "no update") for rule in ("latents", "text")}
    assert {rows[path] for path in caches} == rules
    assert rows["runs/tiny/pytorch_lora_weights.safetensors"][0] == "train_tiny"
    dag = trained.run("train_tiny", "--dag").output
    assert dag.count("latents\\n") == len([path for path in caches if "latents" in path])
    untracked = trained.run("--list-untracked", "train_tiny").output.splitlines()
    ours = ("cache/", "runs/", "logs/", "benchmarks/", "reports/")
    assert not [line for line in untracked if line.startswith(ours)]
    # A whole graph names what it is made of; one edit makes one file.
    (trained / "data/shapes/ant.txt").write_text("an edited ant")
    result = trained.run("train_tiny", "--verbose", "--until", "text")
    assert f"output: {ANT}" in result.output and "data/shapes/ant.txt" in result.output
    assert result.encoded() == Counts(encoded=1) and "train" not in result.jobs
    # To touch outputs is to build nothing: content decides.
    trained.run("--touch", "caches_tiny")
    assert "manifest" in trained.run("caches_tiny").jobs
    assert trained.run("caches_tiny").idle
