"""Names to objects: "relaxloss" or "my.module:Thing", plus field=value settings, with good errors."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import importlib
import inspect
import os
import sys
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path

from .errors import UserError


def registry(package: str) -> Mapping[str, object]:
    """ATTACKS or DEFENSES of the package that lies beside this one."""
    module = importlib.import_module(package)
    home = Path(__file__).resolve().parents[1]
    if not module.__file__ or Path(module.__file__).resolve().parents[1] != home:
        raise UserError(
            f"another module called {package!r} ({module.__file__}) hides the one that pptp brings: rename it, or start from another folder"
        )
    return getattr(module, package.upper())


def find(package: str, name: str):
    """The plug-in of that name, or what "module:attribute" points at."""
    if ":" in name:
        module_name, _, attribute = name.partition(":")
        if os.getcwd() not in sys.path:  # a console command does not look there by itself
            sys.path.append(os.getcwd())
        try:
            return getattr(importlib.import_module(module_name), attribute)
        except Exception as error:  # whatever a user's own module does when it is imported
            hint = ": write my_module:Name, for my_module.py in this folder" if "/" in module_name else ""
            raise UserError(f"cannot load {name!r} ({type(error).__name__}: {error}){hint}") from error
    known = registry(package)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
        hint = f"did you mean {', '.join(near)}?" if near else f"it is one of {', '.join(sorted(known))}"
        raise UserError(
            f"no {package.rstrip('s')} called {name!r}: {hint} (or your own, as module:name)"
        )
    return known[name]


def build(package: str, name: str, settings: Sequence[str] = ()):
    """An instance of the plug-in class, its dataclass fields set from "field=value" strings."""
    cls = find(package, name)
    values = parse_settings(settings)
    if not inspect.isclass(cls):
        if values:
            raise UserError(f"{name!r} takes no settings")
        return cls
    if not dataclasses.is_dataclass(cls):
        raise UserError(f"{name!r} is not a dataclass: put @dataclass(frozen=True) above the class")
    fields = {f.name: f for f in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    for key in values:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1) or sorted(fields)
            raise UserError(
                f"{name} has no setting {key!r}: " + (f"it has {', '.join(near)}" if near else "it has none")
            )
    absent = [n for n, f in fields.items() if n not in values and f.init and not _has_default(f)]
    if absent:
        raise UserError(f"{name} needs a value for {', '.join(absent)}: give it as {absent[0]}=VALUE, or a default in the class")
    return cls(**{key: convert(key, text, hints[key]) for key, text in values.items()})


def _has_default(field: dataclasses.Field) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def code_of(plugin: object) -> str:
    """Short hash of the file that a plug-in comes from, so that results of an edited one are not taken for its own."""
    try:
        source = inspect.getsource(inspect.getmodule(plugin))
    except (OSError, TypeError):
        return ""
    return hashlib.sha256(source.encode()).hexdigest()[:16]


HOW_ONLY = {"how_only": True}  # metadata of a field that says how something is made, not what


def settings_of(plugin: object) -> list[str]:
    """All fields that decide what comes out, as "field=value", in one spelling whatever was typed."""
    decisive = [f for f in dataclasses.fields(plugin) if f.init and not f.metadata.get("how_only")]
    return [f"{f.name}={getattr(plugin, f.name)}" for f in decisive]


def check_written(name: str, plugin: object) -> None:
    """Refuse a plug-in whose settings, which are kept as text, could not be read back."""
    hints = typing.get_type_hints(type(plugin))
    for text in settings_of(plugin):
        key, _, written = text.partition("=")
        try:
            same = convert(key, written, hints[key]) == getattr(plugin, key)
        except UserError:
            same = False
        if not same:
            raise UserError(
                f"{name} has the setting {text}, which cannot be read back from text as {_kind(hints[key])}: "
                "let it be a number, true or false, or a text, with a default of that type"
            )


def share_out(package: str, names: Sequence[str], settings: Sequence[str]) -> dict[str, list[str]]:
    """Which settings go to which plug-in: "name.field=value" to that one, "field=value" to all that have the field."""
    shares: dict[str, list[str]] = {name: [] for name in names}
    for text in settings:
        key = text.partition("=")[0]
        owner, dot, field = key.rpartition(".")
        if dot and owner not in shares:
            raise UserError(f"{text!r} is for {owner!r}, which is not among {', '.join(shares)}")
        takers = [owner] if dot else [name for name in shares if key in _fields(package, name)] or list(shares)[:1]
        for name in takers:  # one that lacks the field refuses it by name
            shares[name].append(text.removeprefix(f"{owner}.") if dot else text)
    return shares


def _kind(kind: object) -> str:
    return getattr(kind, "__name__", str(kind))


def _fields(package: str, name: str) -> list[str]:
    found = find(package, name)
    return [f.name for f in dataclasses.fields(found)] if dataclasses.is_dataclass(found) else []


def parse_settings(settings: Sequence[str]) -> dict[str, str]:
    values = {}
    for text in settings:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UserError(f"{text!r} is not a setting: write field=value")
        if key in values:
            raise UserError(f"{key} is given twice, as {values[key]} and {value}: give it once")
        values[key] = value
    return values


def convert(key: str, text: str, kind: type):
    """Text to the field's type; of one that may be missing, `None` to None."""
    options = typing.get_args(kind)
    if type(None) in options:
        rest = [option for option in options if option is not type(None)]
        return None if text == "None" else convert(key, text, rest[0] if len(rest) == 1 else str)
    if kind is bool:
        if text.lower() not in ("true", "false", "1", "0", "yes", "no"):
            raise UserError(f"{key} is {text!r}: write true or false")
        return text.lower() in ("true", "1", "yes")
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            raise UserError(
                f"{key} is {text!r}: it must be {'a whole number' if kind is int else 'a number'}"
            ) from None
    return text
