"""What the monitors show of a run: each file turns a finished run into one section, printed, kept in the run, and shown in the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..runs import Run, read_json, write_json


@dataclass(frozen=True)
class Table:
    """Cells as they are shown."""

    caption: str
    header: list[str]
    rows: list[list[str]]

    def __str__(self) -> str:
        lines = [self.header, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.header))]
        shown = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines]
        return "\n".join([self.caption, *shown])


@dataclass(frozen=True)
class Section:
    """One study of a run: sentences, tables, what figures are drawn from, images by sample id, and what it does not show."""

    name: str
    title: str
    lines: list[str]
    tables: list[Table] = field(default_factory=list)
    caveats: list[str] = field(default_factory=list)
    data: dict = field(default_factory=dict)
    images: list[dict] = field(default_factory=list)  # {"caption": ..., "ids": [...]}
    models: Sequence[str] = ()  # whose weights it is about

    def __str__(self) -> str:
        return "\n\n".join(["\n".join(self.lines), *map(str, self.tables), "\n".join(self.caveats)])


def save(run: Run, section: Section) -> Path:
    """monitors/NAME.json, with what it is about, so that it is not shown of other weights."""
    target = run.path / "monitors" / f"{section.name}.json"
    key = {"splits": run.splits_digest(), "weights": {name: run.model_digest(name) for name in section.models}}
    write_json(target, {**asdict(section), "key": key})
    print(section)
    print(f"\nwrote {target}")
    return target


def load(run: Run) -> tuple[dict[str, dict], list[str]]:
    """(sections of the models as they are now, names of those whose models have changed since)."""
    current, stale = {}, []
    for path in sorted((run.path / "monitors").glob("*.json")):
        found = read_json(path, "")
        weights = found["key"]["weights"]
        there = set(run.trained_names())
        fits = found["key"]["splits"] == run.splits_digest() and all(
            name in there and run.model_digest(name) == digest for name, digest in weights.items()
        )
        if fits:
            current[path.stem] = found
        else:
            stale.append(path.stem)
    return current, stale
