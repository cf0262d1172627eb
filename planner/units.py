"""Units at the edge: everything inside is bytes (int), tokens (int) and seconds (float)."""

from __future__ import annotations

MIB = 1024**2
GIB = 1024**3


def parse_tokens(text: str) -> int:
    """A token count: ``4096``, ``1_048_576``, ``128k`` (1,024s), ``1M``.

    Raises:
        ValueError: it is none; the message says what to write.
    """
    plain = text.strip().replace(",", "").replace("_", "")
    scale = {"k": 1024, "m": 1024**2}.get(plain[-1:].lower(), 1)
    digits = plain[:-1] if scale > 1 else plain
    if not digits.isascii() or not digits.isdigit():
        raise ValueError(f"{text!r} is not a number of tokens; write 4096, 128k or 1M")
    return int(digits) * scale


def format_gib(num_bytes: float, digits: int = 1) -> str:
    """``62914560000`` as ``58.6``: GiB with a fixed number of digits and no unit."""
    return f"{num_bytes / GIB:,.{digits}f}"


def format_bytes(num_bytes: float) -> str:
    """Bytes with the unit that keeps three figures: ``512 B``, ``1.5 KiB``, ``58.6 GiB``."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024 or unit == "GiB":
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable: the last unit always returns")


def format_count(count: float) -> str:
    """A parameter count the way the field writes it: ``8.19 B``, ``596.0 M``, ``12.3 k``."""
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= limit:
            return f"{count / limit:,.2f} {unit}"
    return f"{count:,.0f}"


def format_seconds(seconds: float) -> str:
    """Seconds as people say them: ``42 ms``, ``0.42 s``, ``34.6 s``, ``6 min 20 s``, ``2 h 05 min``."""
    if 0 < seconds < 0.0995:
        return f"{seconds * 1e3:.0f} ms" if seconds >= 1e-3 else "under 1 ms"
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"


def format_rate(per_second: float) -> str:
    """Tokens a second: ``61,238``, and what is below 10 with two digits: ``0.21``."""
    return f"{per_second:,.0f}" if per_second >= 9.95 else f"{per_second:.2g}"
