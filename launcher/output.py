"""The only writer to stdout: JSON documents, and tables for people. The same bytes on a pipe and a terminal."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.diagnostics import without_controls


def print_json(document: Any) -> None:
    """One JSON document and nothing else, in UTF-8 whatever the terminal speaks."""
    _write(json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n", "utf-8")


def print_json_lines(document: Mapping[str, Any]) -> None:
    """One large JSON object, as ``json_lines`` writes it."""
    _write(json_lines(document), "utf-8")


def json_lines(document: Mapping[str, Any]) -> str:
    """A JSON object with a line for each field, and for each entry of a field that is a list of objects.

    Indenting every level takes json's Python encoder, 5 ms for a plan, and ten times as many lines.
    """
    fields = (f" {_compact(name)}: {_field(value)}" for name, value in document.items())
    return "{\n" + ",\n".join(fields) + "\n}\n"


def _field(value: Any) -> str:
    if not isinstance(value, list) or not any(isinstance(entry, dict) for entry in value):  # pyright: ignore[reportUnknownVariableType]
        return _compact(value)
    return "[\n" + ",\n".join("  " + _compact(entry) for entry in value) + "\n ]"  # pyright: ignore[reportUnknownVariableType]


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def print_text(text: str) -> None:
    """Text that ends in exactly one newline; what the terminal cannot show, or would obey, is escaped."""
    _write(without_controls(text).rstrip("\n") + "\n", getattr(sys.stdout, "encoding", None) or "utf-8")


def block_character() -> str:
    """What bars of text charts are made of: a full block, or a plain sign where stdout's encoding has none."""
    try:
        "\u2588".encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return "#"
    return "\u2588"


def _write(text: str, encoding: str) -> None:
    if sys.stdout is None:  # pyright: ignore[reportUnnecessaryComparison]  # started with >&-
        raise OSError(errno.EBADF, "stdout is closed")
    # Escaped are also the bytes of file names that are no UTF-8: JSON reads \\udcff back as that byte.
    data = text.encode(encoding, "backslashreplace")
    sys.stdout.flush()
    raw = getattr(sys.stdout, "buffer", None)
    if raw is None:  # a text stream of the caller's
        sys.stdout.write(data.decode(encoding))
    else:
        raw.write(data)
    sys.stdout.flush()


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """Aligned columns with two spaces between; ``right`` lists right-aligned columns."""
    widths = [max([len(headers[i]), *(len(row[i]) for row in rows)]) for i in range(len(headers))]

    def line(cells: Sequence[str]) -> str:
        parts = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return "  ".join(parts).rstrip()

    return "\n".join([line(headers), line(["-" * w for w in widths]), *(line(row) for row in rows)])
