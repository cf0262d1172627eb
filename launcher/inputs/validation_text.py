"""What pydantic found wrong with a job, as one line in the user's words: the field, what it may be, what was given."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from planner.job import Job

MAX_SHOWN = 60
"""Characters of the user's own text that an error line repeats."""
MAX_SHORT = 40
"""Characters of a name or a version that was typed."""
MAX_PATH = 200
"""Characters of a path: whoever typed it must recognise it."""

WANTED = {
    "int_type": "give a whole number",
    "int_parsing": "give a whole number",
    "int_from_float": "give a whole number",
    "int_parsing_size": "give a smaller number",
    "float_type": "give a number",
    "float_parsing": "give a number",
    "finite_number": "give a finite number",
    "bool_type": "give true or false",
    "bool_parsing": "give true or false",
    "string_type": "give text, in quotes where YAML would read a number or a date",
    "string_too_short": "is empty",
    "string_unicode": "is no UTF-8; rename it, or set a locale such as LC_ALL=C.UTF-8",
    "list_type": "give a list",
    "dict_type": "give a mapping",
    "model_type": "give a mapping",
    "model_attributes_type": "give a mapping",
    "missing": "is missing",
}
"""pydantic's error type -> what to do instead of its own wording."""
EXAMPLES = {
    "lora": "{r: 16}",
    "lora.target_modules": "[q_proj, v_proj]",
    "data": "{dataset: train.jsonl}",
    "stack": "{trl: '1.16.0'}",
    "allow": "[numerics]",
    "trl": "{learning_rate: 2.0e-5}",
    "pins": "{recompute: full}",
}
"""Fields that hold more than one value, as a job file writes them."""


def short(text: str) -> str:
    """``text`` without quotes, cut, and without signs that would move a terminal's cursor."""
    cut = text if len(text) <= MAX_SHORT else text[: MAX_SHORT - 3] + "..."
    return cut if cut.isprintable() else repr(cut)[1:-1]


def shown(value: object, limit: int = MAX_SHOWN) -> str:
    """``value`` as Python writes it, cut to what fits on a line: a Path at its beginning, all else at the end."""
    limit = MAX_PATH if isinstance(value, Path) else limit
    try:
        text = repr(str(value) if isinstance(value, Path) else value)
    except (ValueError, RecursionError):  # more digits than Python prints
        return "something too long to print"
    if len(text) <= limit:
        return text
    return f"{text[0]}...{text[4 - limit :]}" if isinstance(value, Path) else text[: limit - 3] + "..."


def validation_line(error: ValidationError, where: str, flag_names: Mapping[str, str] | None = None) -> str:
    """The first problem of a validation.

    Args:
        error: what pydantic raised for a job.
        where: the document, such as ``job file 'job.yaml'``.
        flag_names: dotted field -> flag that set it; such a flag is named in place of ``where``.
    """
    first = error.errors(include_url=False)[0]
    field = _field(first["loc"])
    flag = (flag_names or {}).get(field)
    place = flag if flag is not None else f"{where}: {field}" if field else where
    if first["type"] == "extra_forbidden":
        return f"{where}: {field} is not a field of a job; {_nearest(first['loc'])}"
    given = "" if first["type"] == "missing" else _given(first.get("input"))
    return f"{place}: {_wanted(first, field)}{given}"


def _field(loc: tuple[int | str, ...]) -> str:
    """Dotted name in the document, without what pydantic adds: list positions, branches of a union, key markers."""
    parts: list[str] = []
    kind: Any = Job
    for part in loc:
        fields = getattr(kind, "model_fields", None)
        known = fields is None or part in fields
        if isinstance(part, int) or part == "[key]" or (parts and fields is None and kind is not dict):
            break
        parts.append(str(part))
        annotation = fields[part].annotation if fields is not None and known else None
        kind = typing.get_origin(annotation) or annotation
    return ".".join(parts)


def _wanted(problem: Mapping[str, Any], field: str) -> str:
    if "[key]" in problem["loc"]:
        return "its names must be text; put this one in quotes"
    wanted = WANTED.get(problem["type"])
    if wanted is not None:
        return f"{wanted}, such as {EXAMPLES[field]}" if field in EXAMPLES else wanted
    message: str = problem["msg"].removeprefix("Value error, ")
    message = message.replace("Input should be", "must be").replace("greater than or equal to", "at least")
    return message.replace("less than or equal to", "at most")


def _given(value: object) -> str:
    return f" (given {shown(value)})" if isinstance(value, (str, int, float)) else ""


def _nearest(loc: tuple[int | str, ...]) -> str:
    """The field that was meant, or where all are listed."""
    import difflib  # 1 ms that only mistyped fields need

    model: Any = Job
    for part in loc[:-1]:
        fields = getattr(model, "model_fields", {})
        model = fields[part].annotation if part in fields else None
    known = list(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else []
    near = difflib.get_close_matches(str(loc[-1])[:MAX_SHOWN], known, n=1)
    if near:
        return f"did you mean {near[0]}?"
    return f"there are {', '.join(known)}" if 0 < len(known) < 8 else "`trlfit schema job` lists them"
