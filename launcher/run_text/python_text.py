"""Python source text from values, and a small template language whose templates read as Python.

A template is a script with lines that start with ``#%``: ``#% if NAME``, ``#% if not NAME``,
``#% else`` and ``#% end`` keep or drop what is between them, and ``{{ name }}`` is replaced by text.
A script made this way holds only what its run needs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files

WIDTH = 100

_PLACEHOLDER = re.compile(r"\{\{ (\w+) \}\}")


def literal(value: object, *, indent: int = 0, first: int | None = None) -> str:
    """``value`` as Python source, over several lines when one is too wide.

    Args:
        value: None, bool, int, float, str, and lists, tuples and mappings of these.
        indent: columns that the lines after the first start with.
        first: columns that the first line already holds; ``indent`` when left out.

    Raises:
        TypeError: the value is of another type.
    """
    flat = _flat(value)
    if len(flat) + (indent if first is None else first) < WIDTH:
        return flat
    inner = " " * (indent + 4)
    if isinstance(value, Mapping) and value:
        lines: list[str] = []
        for key, item in value.items():  # pyright: ignore[reportUnknownVariableType]
            head = f"{_flat(key)}: "  # pyright: ignore[reportUnknownArgumentType]
            body = literal(item, indent=indent + 4, first=indent + 4 + len(head))  # pyright: ignore[reportUnknownArgumentType]
            lines.append(f"{inner}{head}{body},")
        return "{\n" + "\n".join(lines) + "\n" + " " * indent + "}"
    if isinstance(value, list) and value:
        items: list[object] = list(value)  # pyright: ignore[reportUnknownArgumentType]
        rows = "".join(f"{inner}{literal(item, indent=indent + 4)},\n" for item in items)
        return "[\n" + rows + " " * indent + "]"
    return flat


def _flat(value: object) -> str:
    if value is None or isinstance(value, bool | int):
        return repr(value)
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else f'float("{value}")'
    if isinstance(value, Mapping):
        pairs = [f"{_flat(k)}: {_flat(v)}" for k, v in value.items()]  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, Sequence):
        body = ", ".join(_flat(item) for item in value)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        if isinstance(value, tuple):
            return f"({body},)" if len(value) == 1 else f"({body})"  # pyright: ignore[reportUnknownArgumentType]
        return f"[{body}]"
    raise TypeError(f"{type(value).__name__} has no literal here")


def _string(value: str) -> str:
    """A string in double quotes where that costs no escapes, as formatters write it."""
    text = repr(value)
    if text[0] == "'" and '"' not in value:
        return f'"{text[1:-1]}"'
    return text


def fill(template: str, conditions: Mapping[str, bool], texts: Mapping[str, str]) -> str:
    """Keep the lines whose conditions hold and put the texts in.

    Raises:
        KeyError: the template asks for a condition or a text that was not given.
        ValueError: an ``#% end`` is missing or left over.
    """
    kept: list[str] = []
    states: list[bool] = []
    for line in template.splitlines():
        mark = line.strip()
        if not mark.startswith("#%"):
            if all(states):
                kept.append(_PLACEHOLDER.sub(lambda found: texts[found[1]], line).rstrip())
            continue
        words = mark[2:].split()
        if words[0] == "if":
            states.append(not conditions[words[2]] if words[1] == "not" else conditions[words[1]])
        elif not states or words not in (["else"], ["end"]):
            raise ValueError(f"template line {line!r} has no beginning")
        elif words == ["else"]:
            states[-1] = not states[-1]
        else:
            states.pop()
    if states:
        raise ValueError("the template has an #% if without an #% end")
    return "\n".join(kept).rstrip() + "\n"


def load_template(name: str) -> str:
    """The text of ``launcher/templates/NAME``."""
    return files("launcher").joinpath("templates", name).read_text(encoding="utf-8")
