"""What is shown is run: the README's Python, its commands, and every example."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from pptp.cli import parser

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def fences() -> list[tuple[str, str]]:
    """(language, text) of every fenced block of the README."""
    return re.findall(r"```(\w*)\n(.*?)\n```", README, re.S)


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_example_runs(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for evaluation in module.main(quick=True).values():
        assert 0 <= evaluation.strongest[1].value <= 1


def test_readme_python_runs(capsys):
    (tour,) = [block for language, block in fences() if language == "python" and "pptp.localize" in block]
    assert len(tour.strip().splitlines()) <= 24
    exec(compile(tour.replace("epochs=20", "epochs=2"), "README", "exec"), {"__name__": "readme"})
    assert "AUC" in capsys.readouterr().out


def test_readme_plug_ins_are_complete():
    """The defense and the attack shown there compile as they stand."""
    blocks = [block for language, block in fences() if language == "python" and "pptp.localize" not in block]
    assert len(blocks) >= 2
    for block in blocks:
        exec(compile(block, "README", "exec"), {"__name__": "readme"})


def test_readme_commands_are_understood():
    lines = [line for language, block in fences() if language == "sh" for line in block.splitlines()]
    commands = [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("pptp ")]
    assert len(commands) >= 6
    for command in commands:
        parser().parse_args(command)
