"""The one exception whose text is meant for the user: what was wrong, and what to do."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from pathlib import Path


class UserError(ValueError):
    """Bad input, said in one sentence; the command line prints it without a traceback."""

    def __init__(self, sentence: str):
        """A worker of a DataLoader hands on its whole traceback as the text, which ends with the sentence."""
        super().__init__(sentence.rpartition("UserError: ")[2].strip() if sentence.startswith("Caught ") else sentence)


def own_file(error: Exception) -> str:
    """The user's own file that raised it (a plug-in below this folder), with its line; "" if it was none."""
    home = Path(__file__).resolve().parents[1]
    ours = [home / name for name in ("pptp", "attacks", "defenses")]
    python = [Path(place) for place in (sys.prefix, sys.base_prefix, sysconfig.get_path("stdlib"))]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if any(path.is_relative_to(folder) for folder in ours):
            return ""
        installed = any(path.is_relative_to(place) for place in python)
        if path.suffix == ".py" and not installed and path.resolve().is_relative_to(Path.cwd()):
            return f"{path.name}, line {frame.lineno},"
    return ""
