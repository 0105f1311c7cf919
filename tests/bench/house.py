"""Figures of the package's shape: its modules, and the functions on the ways of a build.

    python tests/bench/house.py [CHECKOUT ...] [--no-build] [--json FILE]

For each checkout (default: this one), an older one too, it prints modules, lines, functions with
their lengths, records and imports from the sources; then what runs when the sample is built in a
temporary copy with a training of two steps. It imports nothing of what it measures. Two minutes a
checkout; `--no-build` reads the sources only. A cell has the figure of each checkout: `397 > 120`.

A function counts where it runs after the import of its module, once however often it runs. Class
bodies, lambdas and comprehensions are no functions of their own.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

BOUNDS = {
    "nothing to do": {"functions": 342, "modules loaded": 82, "lines loaded": 17_200},
    "status": {"modules loaded": 79},
    "--help": {"modules loaded": 11},
    "caption: plan and manifest": {"functions": 448, "files": 61},
}
"""Way of a build -> figure -> the most there may be; see tests/workflow/test_ways.py."""

# Stands in each process of a build that is traced, before anything else.
TRACE = """
import atexit, functools, json, os, sys, threading, time
PACKAGE = os.environ["HOUSE_PACKAGE"] + os.sep
KNOWN, SEEN = {}, set()  # by id: the hash of a code is slow, and equal codes are one

@functools.cache
def inside(file):
    file = os.path.normpath(file or "")  # a job has its package as rules/../scripts
    return file[len(PACKAGE):] if file.startswith(PACKAGE) else ""

def imports(frame):
    while frame is not None:
        code = frame.f_code
        # Code of modules and classes has no fast locals.
        if not code.co_flags & 1 and inside(code.co_filename):
            if frame.f_globals.get("__name__") != "__main__":
                return True
        frame = frame.f_back
    return False

def see(frame, event, _):
    if event == "call" and id(code := frame.f_code) not in KNOWN:
        if code.co_flags & 1 and code.co_name[0] != "<" and (file := inside(code.co_filename)):
            if imports(frame):
                return  # it may run later, too
            SEEN.add((file, code.co_firstlineno, code.co_qualname))
        KNOWN[id(code)] = code

def write():
    sys.setprofile(None)
    files = {inside(getattr(each, "__file__", "")) for each in list(sys.modules.values())}
    found = {"command": sys.orig_argv[1:], "functions": list(SEEN), "loaded": list(files - {""})}
    with open(f"{os.environ['HOUSE_INTO']}/{time.time_ns()}-{os.getpid()}.json", "w") as file:
        json.dump(found, file)

atexit.register(write)
threading.setprofile(see)
sys.setprofile(see)
"""

Figures = dict[str, dict[str, float]]
"""Group of figures (a folder, a way of a build) -> name -> figure."""


# -- the sources ----------------------------------------------------------------------------------


class Package:
    """The modules of a package, their imports of each other and what they define."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = {self._name(path): path for path in sorted(folder.rglob("*.py"))}
        self.texts = {name: path.read_text("utf-8") for name, path in self.files.items()}
        self.trees = {name: ast.parse(text) for name, text in self.texts.items()}

    def _name(self, path: Path) -> str:
        parts = path.relative_to(self.folder).with_suffix("").parts
        return ".".join(parts).removesuffix("__init__").removesuffix(".")

    def lines(self, name: str) -> int:
        return self.texts[name].count("\n")

    def imported(self, nodes: Iterable[ast.AST]) -> Iterator[str]:
        """Yield the package's modules that import statements among nodes name."""
        for node in nodes:
            match node:
                case ast.ImportFrom(module=str(base), names=names, level=0):
                    found = [f"{base}.{name.name}" for name in names]
                case ast.Import(names=names):
                    found = [name.name for name in names]
                case _:
                    continue
            for name in found:
                top, _, inner = name.partition(".")
                if top == self.folder.name:
                    yield inner if inner in self.files else inner.rpartition(".")[0]

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """Module -> the modules it imports anywhere, functions included."""
        trees = self.trees.items()
        return {name: set(self.imported(ast.walk(tree))) - {name, ""} for name, tree in trees}

    @cached_property
    def at_import(self) -> dict[str, set[str]]:
        """Module -> the modules it imports when it is imported."""
        trees = self.trees.items()
        return {name: set(self.imported(at_import(tree))) - {name, ""} for name, tree in trees}

    def functions(self, name: str) -> list[ast.FunctionDef]:
        return [node for node in ast.walk(self.trees[name]) if isinstance(node, ast.FunctionDef)]

    def classes(self, name: str) -> list[ast.ClassDef]:
        return [node for node in ast.walk(self.trees[name]) if isinstance(node, ast.ClassDef)]

    @cached_property
    def sections(self) -> set[str]:
        """The names of classes that are pydantic models."""
        classes = [each for name in self.files for each in self.classes(name)]
        found = {"BaseModel"}
        while more := {each.name for each in classes if _names(each.bases) & found} - found:
            found |= more
        return found - {"BaseModel"}


def is_record(node: ast.ClassDef) -> bool:
    """Return whether a class is a dataclass or a NamedTuple."""
    return "dataclass" in _names(node.decorator_list) or "NamedTuple" in _names(node.bases)


def at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a module that run when it is imported."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        if not isinstance(node, ast.FunctionDef | ast.Lambda):
            yield from at_import(node)


def _names(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the last names of expressions: `dataclass` of `@dataclasses.dataclass()`."""
    found = set[str]()
    for node in nodes:
        while isinstance(node, ast.Call | ast.Subscript):
            node = node.func if isinstance(node, ast.Call) else node.value
        found.add(getattr(node, "attr", getattr(node, "id", "")))
    return found


def arguments(function: ast.FunctionDef) -> set[str]:
    """Return the names of a function's arguments, without a method's object."""
    found = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    return {each.arg for each in found} - {"self", "cls"}


def folder_of(name: str) -> str:
    """Return the top folder of a module; a module of the root is a folder of its own."""
    return name.partition(".")[0]


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Return the groups of nodes that reach each other."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        found, todo = set[str](), [start]
        while todo:
            more = graph.get(todo.pop(), set()) - found
            found |= more
            todo += more
        reached[start] = found
    groups = {
        frozenset(other for other in found if name in reached.get(other, ()))
        for name, found in reached.items()
    }
    return sorted(map(set, groups - {frozenset()}), key=sorted)


def folders(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return a graph of modules as one of their folders."""
    found: dict[str, set[str]] = {}
    for name, others in graph.items():
        found.setdefault(folder_of(name), set()).update(map(folder_of, others))
    return {name: others - {name} for name, others in found.items()}


def longest_chain(graph: dict[str, set[str]]) -> int:
    """Return how many modules the longest chain of imports has, of a graph without circles."""
    depth: dict[str, int] = {}
    for name in TopologicalSorter(graph).static_order():
        depth[name] = 1 + max((depth[other] for other in graph.get(name, ())), default=0)
    return max(depth.values(), default=0)


def source_figures(package: Package) -> Figures:
    """Return the figures of a package and of each of its folders."""
    every = list(package.files)
    groups: dict[str, list[str]] = {}
    for name in every:
        groups.setdefault(folder_of(name) or "__init__", []).append(name)
    figures = {"package": _of_modules(package, every)}
    files, tops = circles(package.at_import), circles(folders(package.at_import))
    figures["package"] |= {
        "fan-out over 12": sum(len(found) > 12 for found in package.imports.values()),
        "longest chain": 0 if files else longest_chain(package.at_import),
        "circles of files": len(files),
        "circles of folders": len(tops),
    }
    return figures | {name: _of_modules(package, groups[name]) for name in sorted(groups)}


def _of_modules(package: Package, names: list[str]) -> dict[str, float]:
    functions = [each for name in names for each in package.functions(name)]
    lengths = sorted((each.end_lineno or 0) - each.lineno + 1 for each in functions) or [0]
    classes = [each for name in names for each in package.classes(name)]
    return {
        "modules": len(names),
        "lines": sum(map(package.lines, names)),
        "functions": len(functions),
        "median": statistics.median_low(lengths),
        "p90": lengths[int(len(lengths) * 0.9)],
        "max": lengths[-1],
        "over 100 lines": sum(each > 100 for each in lengths),
        "over 5 arguments": sum(len(each) > 5 for each in map(arguments, functions)),
        "records": sum(map(is_record, classes)),
        "sections": sum(each.name in package.sections for each in classes),
    }


# -- the ways of a build --------------------------------------------------------------------------


class Sample:
    """The sample of a checkout in a folder of its own, with a training of two steps.

    `environment` holds further variables of the builds that are not traced.
    """

    def __init__(self, checkout: Path, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder, self.site = folder / "sample", folder / "site"
        self.environment = environment
        ignored = shutil.ignore_patterns("__pycache__")
        for part in ("scripts", "rules", "profiles", "envs", "config", "data"):
            shutil.copytree(checkout / part, self.folder / part, ignore=ignored)
        shutil.copy2(checkout / "Snakefile", self.folder)
        config = self.folder / "config/config.yaml"
        text = re.sub(r"(\n +steps:) \d+\n", r"\1 2\n", config.read_text("utf-8"))
        config.write_text(text, "utf-8")
        self.site.mkdir()
        (self.site / "sitecustomize.py").write_text(TRACE)

    def run(
        self,
        *words: str,
        says: str = "",
        program: Sequence[str] = ("snakemake", "--cores", "1"),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        more = self.environment if environment is None else environment
        ours = ("SNAKEMAKE", "PYTEST", "PYTHON", "LATENTMAKE")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        done = subprocess.run(
            [sys.executable, "-m", *program, *words],
            cwd=self.folder,
            env={**kept, "SLURM_CONF": os.devnull, "OMP_NUM_THREADS": "1", **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode or says not in done.stdout:
            sys.exit(f"{done.stdout}\n{' '.join(words)}: failed, or did not say {says!r}")

    def trace(self, *words: str, **options: Any) -> dict[str, dict[str, Any]]:
        """Run Snakemake; return what ran in its own process (`plan`) and in each kind of job."""
        with tempfile.TemporaryDirectory() as into:
            scripts = self.folder / "scripts"
            variables = {
                "PYTHONPATH": f"{self.site}:{scripts}",
                "HOUSE_INTO": into,
                "HOUSE_PACKAGE": str(scripts / "latentmake"),
            }
            self.run(*words, environment=variables, **options)
            read = [json.loads(path.read_bytes()) for path in sorted(Path(into).iterdir())]
        found: dict[str, dict[str, Any]] = {}
        for each in read:
            if not each["loaded"]:
                continue
            process = _process(each["command"])
            here = found.setdefault(process, {"functions": set(), "loaded": set()})
            here["functions"] |= {tuple(function) for function in each["functions"]}
            here["loaded"] |= set(each["loaded"])
        return found


def _process(command: list[str]) -> str:
    """Return what a process is called: a job by its script or module."""
    match command:
        case ["-m", "snakemake" | "latentmake", *_]:
            return "plan"
        case ["-m", module, *_]:
            return module.rpartition(".")[2]
        case [script, *_] if script.endswith(".py"):
            return f"job {Path(script).stem.rpartition('.')[2]}"
    return "other"


def way_figures(
    checkout: Path, *, bounded: bool = False, environment: Mapping[str, str] = {}
) -> tuple[Figures, dict[str, list[str]]]:
    """Build the sample of a checkout; return figures and functions of each way and process.

    With `bounded`, only the ways of `BOUNDS` are traced; builds that are not traced get the
    variables of `environment`.
    """
    from PIL import Image, ImageOps

    figures: Figures = {}
    listed: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory(prefix="house-") as folder:
        sample = Sample(checkout, Path(folder), environment)
        package = Package(sample.folder / "scripts/latentmake")
        lines = {str(path.relative_to(package.folder)): package.lines(name)
                 for name, path in package.files.items()}  # fmt: skip

        def add(way: str, *processes: dict[str, Any]) -> None:
            functions = set.union(*(each["functions"] for each in processes))
            loaded = set.union(*(each["loaded"] for each in processes))
            listed[way] = [f"{file}:{line} {name}" for file, line, name in sorted(functions)]
            figures[way] = {
                "functions": len(functions),
                "files": len({file for file, *_ in functions}),
                "modules loaded": len(loaded),
                "lines loaded": sum(lines[file] for file in loaded),
            }

        def add_all(way: str, found: dict[str, dict[str, Any]]) -> None:
            for process in found:
                add(f"{way}: {process}", found[process])
            add(f"{way}: together", *found.values())

        sample.run("caches_michael_gove")
        if bounded:
            sample.run("train_michael_gove")
        else:
            add_all("training", sample.trace("train_michael_gove"))
        idle = "Nothing to be done"
        sample.run("-n", "train_michael_gove", says=idle)  # it learns what the build left
        add("nothing to do", sample.trace("-n", "train_michael_gove", says=idle)["plan"])
        for word in ("status", "--help"):
            add(word, sample.trace(word, program=["latentmake"])["plan"])
        data = sample.folder / "data/michael_gove"
        (data / "black_arrow.txt").write_text("a dark arrow, michael_gove style\n", "utf-8")
        found = sample.trace("caches_michael_gove")
        add_all("caption", found)
        add("caption: plan and manifest", found["plan"], found["job manifest"])
        if bounded:
            return figures, listed
        with Image.open(data / "black_arrow.png") as image:
            ImageOps.mirror(image).save(data / "black_arrow.png")
        add_all("image", sample.trace("caches_michael_gove"))
    return figures, listed


# -- the command ----------------------------------------------------------------------------------


def table(columns: list[Figures]) -> str:
    """Return a table of each kind of group; a cell has a figure of each checkout, in order."""
    rows: list[list[str]] = []
    before: list[str] = []
    for group in dict.fromkeys(group for figures in columns for group in figures):
        found = [figures.get(group, {}) for figures in columns]
        names = list(dict.fromkeys(name for each in found for name in each))
        if names != before:
            rows += [[""], ["", *(before := names)]]
        cells = [" > ".join(f"{each[name]:,}" if name in each else "." for each in found)
                 for name in names]  # fmt: skip
        rows.append([group, *cells])
    for group, bounds in BOUNDS.items():
        rows += [[f"{group}: at most {bound:,} {name}"] for name, bound in bounds.items()]
    return "\n".join(f"{row[0]:26}" + "".join(f"{cell:>20}" for cell in row[1:]) for row in rows)


def main() -> None:
    """Measure the checkouts of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkouts", nargs="*", type=Path, default=[ROOT])
    parser.add_argument("--no-build", action="store_true", help="read the sources only")
    parser.add_argument("--json", type=Path, help="write them, and the functions of each way")
    options = parser.parse_args()
    columns: list[Figures] = []
    written: dict[str, dict[str, Any]] = {}
    for checkout in options.checkouts:
        columns.append(source_figures(Package(checkout.resolve() / "scripts/latentmake")))
        ways, listed = ({}, {}) if options.no_build else way_figures(checkout.resolve())
        columns[-1] |= ways
        written[str(checkout)] = {"figures": columns[-1], "functions": listed}
    if options.json:
        options.json.write_text(json.dumps(written, indent=1) + "\n", "utf-8")
    print(" > ".join(written))
    print(table(columns))


if __name__ == "__main__":
    main()
