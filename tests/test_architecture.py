"""The house rules: dependencies point one way, and every plug-in is found by the tests."""

import ast
import importlib
import inspect
from pathlib import Path

import pptp
from attacks import ATTACKS
from defenses import DEFENSES

ROOT = Path(__file__).resolve().parents[1]
LAYERS = [
    "errors calls",
    "arrays folders",
    "config intervals plugins",
    "models",
    "data",
    "sources splits",
    "canaries",
    "trees",
    "partition",
    "stages",
    "suffix describe norms",
    "fingerprint",
    "checkpoint",
    "training signals cache likelihood",
    "probes gradients boundary outside",
    "monitors",
    "measures",
    "localize retrain evaluate",
    "gate exposure audit outputs",
    "runs procedures",
    "ensemble results",
    "frontier",
    "plots watching",
    "studies charts",
    "report",
    "commands",
    "attacking",
    "demo harden settings",
    "studying",
    "cli",
    "__main__",
]
LEVEL = {module: level for level, names in enumerate(LAYERS) for module in names.split()}


def imports(path: Path, top_level_only: bool = True):
    """Names of modules that a file imports, as "package.module"."""
    tree = ast.parse(path.read_text())
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = path.parents[node.level - 1].name if node.level else node.module
            if node.level and node.module:
                yield f"{base}.{node.module}"
            elif node.level:
                yield from (f"{base}.{alias.name}" for alias in node.names)
            else:
                yield base


def test_plug_ins_do_not_know_each_other_and_pptp_does_not_import_them():
    for package, forbidden in (
        ("attacks", "defenses"),
        ("defenses", "attacks"),
        ("pptp", "attacks"),
        ("pptp", "defenses"),
    ):
        for path in (ROOT / package).glob("*.py"):
            assert not any(name.split(".")[0] == forbidden for name in imports(path, top_level_only=False)), (
                f"{path.name} imports {forbidden}"
            )


def test_modules_import_only_what_lies_below_them():
    for path in (ROOT / "pptp").glob("*.py"):
        _check_level(path, path.stem)
    for package in ("monitors", "studies"):
        for path in (ROOT / "pptp" / package).glob("*.py"):
            _check_level(path, package)


def _check_level(path: Path, own: str):
    for name in imports(path) if own != "__init__" else ():
        module = name.split(".")[1] if name.startswith("pptp.") else None
        if module in LEVEL:
            assert LEVEL[module] < LEVEL[own], f"{path} imports {module}"


def test_every_module_has_a_level_and_a_docstring():
    for path in (ROOT / "pptp").glob("*.py"):
        assert path.stem in LEVEL or path.stem == "__init__", f"{path.stem} has no place in the layers"
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path.stem} does not say what it is for"


def test_every_file_of_a_plug_in_package_is_registered():
    for package, registry in (("attacks", ATTACKS), ("defenses", DEFENSES)):
        homes = {importlib.import_module(inspect.getmodule(plugin).__name__).__name__ for plugin in registry.values()}
        files = {f"{package}.{path.stem}" for path in (ROOT / package).glob("*.py") if path.stem != "__init__"}
        assert files == homes


def test_public_names_resolve_and_functions_win_over_modules():
    for name in pptp.__all__:
        assert getattr(pptp, name) is not None
    importlib.import_module("pptp.localize")
    assert callable(pptp.localize) and callable(pptp.evaluate) and callable(pptp.retrain) and callable(pptp.stages)
