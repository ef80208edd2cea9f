"""Settings as text: config files and key=value, each value given the type of its setting."""

from __future__ import annotations

from pathlib import Path

from .config import check_names, flat_fields
from .errors import UserError


def literals(pairs: list[str]) -> dict:
    """ "key=value" pairs, values as Python reads them."""
    import ast

    from .plugins import parse_settings

    def value(text: str):
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError):
            return text  # a plain word

    return {key: value(text) for key, text in parse_settings(pairs).items()}


def from_yaml(path: str | None) -> dict:
    """The settings of a config file; none without one."""
    if not path:
        return {}
    import yaml

    try:
        loaded = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except UnicodeDecodeError as error:
        raise UserError(f"the config {path} is not UTF-8 text (byte {error.start}): save it as UTF-8") from error
    except OSError as error:
        raise UserError(f"cannot read the config {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark else ""
        raise UserError(f"the config {path} is not YAML{where}: {getattr(error, 'problem', error)}") from error
    if not isinstance(loaded, dict):
        raise UserError(f"the config {path} must be a list of setting: value lines")
    loaded = {str(key).replace("-", "_"): value for key, value in loaded.items()}
    check_names(loaded)
    return {key: typed(key, value) for key, value in loaded.items()}


def typed(key: str, value):
    """YAML reads 1e-3 as text: give every value the type of its setting."""
    kind, _ = flat_fields()[key]
    if kind is str and isinstance(value, bool):  # YAML's no and yes: `amp: no`
        return "yes" if value else "no"
    try:
        typed = value if kind in (dict, bool) else kind(value)
        fits = isinstance(typed, kind) and not (kind is int and float(value) != typed)
        fits = fits and not (kind in (int, float) and isinstance(value, bool))
    except (TypeError, ValueError, OverflowError):
        fits = False
    if not fits:
        raise UserError(f"{key} is {value!r} in the config: it must be of type {kind.__name__}")
    return typed


def one_setting(text: str) -> dict:
    """One SETTING=VALUE as the config takes it."""
    import yaml

    key, equals, value = text.partition("=")
    key = key.strip().replace("-", "_")
    if not equals:
        raise UserError(f"vary is {text!r}: give SETTING=VALUE, e.g. sam_rho=0.05")
    check_names({key: value})
    return {key: typed(key, yaml.safe_load(value))}
