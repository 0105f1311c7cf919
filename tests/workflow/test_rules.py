"""The rules and their scripts as texts: what is declared, and how long they are."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from project import ROOT

RULE_FILES = sorted((ROOT / "rules").glob("*.smk"))
ENTRIES = sorted((ROOT / "scripts").glob("*.py"))
_RULE = re.compile(r"^( *)rule(?: (\w+))?:$")


def rules() -> list[tuple[str, list[str]]]:
    """Return (where, lines) of every rule."""
    found = []
    for path in RULE_FILES:
        lines = path.read_text().splitlines()
        for start, line in enumerate(lines):
            if match := _RULE.match(line):
                inner = f"{match[1]}    "
                end = start + 1
                while end < len(lines) and (not lines[end] or lines[end].startswith(inner)):
                    end += 1
                body = lines[start:end]
                while not body[-1]:
                    body.pop()
                found.append((f"{path.name}:{start + 1} {match[2] or ''}".strip(), body))
    return found


def sections(body: list[str]) -> dict[str, str]:
    """Return directive -> text of a rule."""
    depth = len(body[0]) - len(body[0].lstrip()) + 4
    found: dict[str, str] = {}
    name = ""
    for line in body[1:]:
        if match := re.match(rf" {{{depth}}}(\w+):(.*)$", line):
            name = match[1]
            found[name] = match[2].strip()
        elif name:
            found[name] += f"\n{line}"
    return found


def _functions() -> dict[str, list[ast.FunctionDef]]:
    """Return the functions that give rules their inputs, by name; two may share one."""
    common = re.findall(
        r"^def \w+\(.*?(?=^\S)", (ROOT / "rules/common.smk").read_text() + "\nend", re.M | re.S
    )
    graph = (ROOT / "scripts/latentmake/graph.py").read_text()
    trees = [*map(ast.parse, common), ast.parse(graph)]
    found: dict[str, list[ast.FunctionDef]] = {}
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef):
            found.setdefault(node.name, []).append(node)
    return {**found, "Inputs": found["inputs"]}


def keys_of(name: str, functions: dict[str, list[ast.FunctionDef]], seen: set[str]) -> set[str]:
    """Return the keys of all dictionaries that a function, or one it calls, makes."""
    if name in seen or name not in functions:
        return set()
    seen.add(name)
    keys: set[str] = set()
    for node in (node for each in functions[name] for node in ast.walk(each)):
        if isinstance(node, ast.Dict):
            keys |= {key.value for key in node.keys if isinstance(key, ast.Constant)}
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func
            called = called.id if isinstance(called, ast.Name) else called
            if isinstance(called, str):
                keys |= keys_of(called, functions, seen)
    return keys


def declared(body: list[str]) -> dict[str, set[str]]:
    """Return kind (input, output, params) -> names that a rule declares."""
    functions = _functions()
    names: dict[str, set[str]] = {}
    for kind, text in sections(body).items():
        names[kind] = set(re.findall(r"^\s*(\w+)=", text, re.M))
        for function in re.findall(r"\w+", text):
            names[kind] |= keys_of(function, functions, set())
    return names


def reads(entry: Path) -> set[tuple[str, str | None]]:
    """Return (kind, name) of every `snakemake.{kind}.{name}` that an entry reads."""
    found: set[tuple[str, str | None]] = set()
    inner: set[int] = set()
    for node in ast.walk(ast.parse(entry.read_text())):
        if not isinstance(node, ast.Attribute) or id(node) in inner:
            continue
        below = node.value
        if isinstance(below, ast.Attribute) and getattr(below.value, "id", "") == "snakemake":
            found.add((below.attr, node.attr))
            inner.add(id(below))
        elif getattr(below, "id", "") == "snakemake":
            found.add((node.attr, None))
    return found - {("scriptdir", None)}  # of every script


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda path: path.name)
def test_an_entry_reads_only_what_its_rules_declare(entry: Path) -> None:
    users = [(where, body) for where, body in rules() if f"/scripts/{entry.name}" in str(body)]
    assert users, f"no rule runs {entry.name}"
    read = reads(entry)
    assert read
    for where, body in users:
        known = declared(body)
        for kind, name in read:
            assert kind in known, f"{where} has no {kind}"
            assert name is None or name in known[kind], f"{where} declares no {kind}.{name}"


def test_every_script_of_a_rule_is_there() -> None:
    for where, body in rules():
        for name in re.findall(r'"\.\./(scripts/\S+)"', "\n".join(body)):
            assert (ROOT / name).is_file(), f"{where} names {name}"


def test_every_rule_that_runs_something_names_its_log_and_its_environment() -> None:
    for where, body in rules():
        found = sections(body)
        if {"script", "shell", "run", "notebook"} & found.keys():
            assert {"log", "conda"} <= found.keys(), where
            (environment,) = re.findall(r'"\.\./(envs/\S+)"', found["conda"])
            assert (ROOT / environment).is_file(), f"{where} names {environment}"


def test_every_rule_file_opens_with_its_contract() -> None:
    for path in RULE_FILES:
        first, second = path.read_text().splitlines()[:2]
        assert first.startswith("# Needs:"), path.name
        assert second.startswith(("# Makes:", "#  ")), path.name
