"""Draws docs/accuracy.svg, predicted against measured, and writes the README's figures of accuracy.

`python scripts/accuracy_figure.py` writes both; `--check` exits 1 when one of them is not what it would write; `-o`
writes the drawing alone to a file. Made from the published runs that measured allocated memory, priced as a plan does.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator
from html import escape
from math import log10
from pathlib import Path
from statistics import median
from textwrap import fill

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.accuracy_page import evaluation  # noqa: E402
from benchmarks.accuracy_tables import HEADLINE, percent  # noqa: E402
from tests.planner.replay import Replay, quantile  # noqa: E402

PICTURE = ROOT / "docs" / "accuracy.svg"
README = ROOT / "README.md"
BLOCK = re.compile(r"(?<=<!-- scripts/accuracy_figure.py -->\n).*?(?=<!-- end -->)", re.DOTALL)

LOW, HIGH = 4.0, 100.0
"""GB at the ends of both axes."""
TICKS = (5, 10, 20, 50, 100)
BAND = 0.05
WORST = 0.12
"""The lower panel's ends."""
LEFT, TOP, SIDE = 64, 44, 420
BELOW, STRIP = 40, 120
WIDTH, HEIGHT = LEFT + SIDE + 240, TOP + SIDE + BELOW + STRIP + 52

KINDS = {"full": "full training", "lora": "LoRA", "qlora": "QLoRA"}
LIGHT = {
    "paper": "#ffffff",
    "ink": "#1f2328",
    "faint": "#59636e",
    "grid": "#d8dee4",
    "band": "#e7ecf1",
    "full": "#0969da",
    "lora": "#bc4c00",
    "qlora": "#116329",
}
DARK = {
    "paper": "#0d1117",
    "ink": "#e6edf3",
    "faint": "#9198a1",
    "grid": "#30363d",
    "band": "#21262d",
    "full": "#58a6ff",
    "lora": "#f0883e",
    "qlora": "#56d364",
}


def rules(colours: dict[str, str], indent: str) -> str:
    """Colours as CSS; no variables, which not every viewer of SVG knows."""
    found = [
        f"text {{ fill: {colours['ink']}; }}",
        f".faint {{ fill: {colours['faint']}; }}",
        f".paper, .several {{ fill: {colours['paper']}; }}",
        f".band {{ fill: {colours['band']}; }}",
        f".grid {{ stroke: {colours['grid']}; }}",
        f".axis, .identity {{ stroke: {colours['faint']}; fill: none; }}",
        *(f".{kind} {{ stroke: {colours[kind]}; }} .{kind}.one {{ fill: {colours[kind]}; }}" for kind in KINDS),
    ]
    return "".join(f"{indent}{rule}\n" for rule in found)


def style() -> str:
    """The sheet, light unless the viewer prefers dark."""
    font = 'ui-sans-serif, system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif'
    return (
        f"\n    text {{ font: 12px {font}; }}\n"
        "    .title { font-size: 14px; font-weight: 600; }\n"
        "    .one, .several { stroke-width: 1.6; fill-opacity: 0.7; }\n"
        f"{rules(LIGHT, '    ')}"
        "    @media (prefers-color-scheme: dark) {\n"
        f"{rules(DARK, '      ')}    }}\n"
    )


def x_of(gb: float) -> float:
    """Where that many GB are from the left."""
    return LEFT + SIDE * (log10(gb) - log10(LOW)) / (log10(HIGH) - log10(LOW))


def y_of(gb: float) -> float:
    """Where that many GB are from the top, in the upper panel."""
    return TOP + SIDE - (x_of(gb) - LEFT)


def strip_y(error: float) -> float:
    """Where an error is from the top, in the lower panel."""
    return TOP + SIDE + BELOW + STRIP / 2 * (1 - error / WORST)


def marker(kind: str, several: bool, x: float, y: float, says: str = "") -> str:
    """A circle, triangle or diamond for the method; filled on one GPU, hollow on several."""
    title = f"<title>{escape(says)}</title>" if says else ""
    look = f'class="{kind} {"several" if several else "one"}"'
    if kind == "full":
        return f'<circle {look} cx="{x:.1f}" cy="{y:.1f}" r="4.5">{title}</circle>'
    corners = ((0, -5.5), (5.2, 4), (-5.2, 4)) if kind == "lora" else ((0, -5.8), (5, 0), (0, 5.8), (-5, 0))
    points = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners)
    return f'<polygon {look} points="{points}">{title}</polygon>'


def line(look: str, x1: float, y1: float, x2: float, y2: float, more: str = "") -> str:
    """A straight line."""
    return f'<line class="{look}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"{more}/>'


def text(words: str, x: float, y: float, anchor: str = "start", look: str = "") -> str:
    """A line of text."""
    styled = f' class="{look}"' if look else ""
    return f'<text{styled} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def frame() -> Iterator[str]:
    """Panels, ticks, band and identity."""
    right, bottom, strip = LEFT + SIDE, TOP + SIDE, TOP + SIDE + BELOW
    above, below = 1 + BAND, 1 - BAND
    corners = [(LOW, LOW), (LOW, LOW * above), (HIGH / above, HIGH), (HIGH, HIGH), (HIGH, HIGH * below)]
    corners.append((LOW / below, LOW))
    yield f'<polygon class="band" points="{" ".join(f"{x_of(a):.1f},{y_of(b):.1f}" for a, b in corners)}"/>'
    yield (
        f'<rect class="band" x="{LEFT}" y="{strip_y(BAND):.1f}" width="{SIDE}" '
        f'height="{strip_y(-BAND) - strip_y(BAND):.1f}"/>'
    )
    for gb in TICKS:
        yield line("grid", x_of(gb), TOP, x_of(gb), bottom)
        yield line("grid", LEFT, y_of(gb), right, y_of(gb))
        yield line("grid", x_of(gb), strip, x_of(gb), strip + STRIP)
        yield text(str(gb), LEFT - 8, y_of(gb) + 4, "end", "faint")
        yield text(str(gb), x_of(gb), strip + STRIP + 18, "middle", "faint")
    for error in (-0.1, -0.05, 0.0, 0.05, 0.1):
        yield text(f"{100 * error:+.0f} %" if error else "0", LEFT - 8, strip_y(error) + 4, "end", "faint")
    yield line("identity", LEFT, bottom, right, TOP, ' stroke-dasharray="5 4"')
    yield line("identity", LEFT, strip_y(0), right, strip_y(0), ' stroke-dasharray="5 4"')
    for top, height in ((TOP, SIDE), (strip, STRIP)):
        yield f'<rect class="axis" x="{LEFT}" y="{top}" width="{SIDE}" height="{height}"/>'
    yield text("predicted GB", LEFT, TOP - 10, look="faint")
    yield text("error", LEFT, strip - 10, look="faint")
    yield text("measured GB, highest allocated on one GPU", right, strip + STRIP + 38, "end", "faint")


def legend(runs: list[Replay]) -> Iterator[str]:
    """What the markers and lines mean, and how many there are."""
    x, y = LEFT + SIDE + 26, TOP + 16
    for kind, words in KINDS.items():
        for several in (False, True):
            number = sum(r.choice.method == kind and r.single_gpu != several for r in runs)
            if number:
                yield marker(kind, several, x, y - 4)
                yield text(f"{words}, {'several GPUs' if several else 'one GPU'} ({number})", x + 14, y)
                y += 22
    y += 8
    yield line("identity", x - 7, y - 4, x + 7, y - 4, ' stroke-dasharray="5 4"')
    yield text("as measured", x + 14, y)
    yield f'<rect class="band" x="{x - 7}" y="{y + 10}" width="14" height="14"/>'
    yield text("5 % either way", x + 14, y + 22)
    yield text("both axes logarithmic", x - 7, y + 50, look="faint")


def drawing(runs: list[Replay]) -> str:
    """The whole picture."""
    parts = [*frame()]
    for r in sorted(runs, key=lambda run: run.row["id"]):
        seen, said, error = r.row["measured"]["bytes"] / 1e9, r.predicted_bytes / 1e9, r.error or 0.0
        if min(seen, said) < LOW or max(seen, said) > HIGH or abs(error) > WORST:
            raise SystemExit(f"{r.row['id']}: {said:.2f} for {seen:.2f} GB is outside of the axes")
        says = f"{r.row['id']}: {said:.2f} GB for {seen:.2f} GB, {percent(error, signed=True)}"
        several = not r.single_gpu
        parts.append(marker(r.choice.method, several, x_of(seen), y_of(said), says))
        parts.append(marker(r.choice.method, several, x_of(seen), strip_y(error), says))
    title = f"Peak memory of {len(runs)} published runs, predicted and measured"
    body = "\n  ".join([text(title, LEFT, 20, look="title"), *parts, *legend(runs)])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" aria-label="{escape(title)}">\n  <style>{style()}  </style>\n'
        f'  <rect class="paper" width="{WIDTH}" height="{HEIGHT}" rx="6"/>\n  {body}\n</svg>\n'
    )


def sizes(errors: Iterable[float | None]) -> list[float]:
    """Sizes of the errors that there are."""
    return [abs(error) for error in errors if error is not None]


def readme_block(runs: list[Replay]) -> str:
    """Table, picture and sentence of the README."""
    found = evaluation()
    traced, measured = sizes(error for _, error in found.traced[HEADLINE]), sizes(r.error for r in runs)
    failed = [r for r in found.runs[HEADLINE] if r.row["measured"].get("oom")]
    called = sum(r.memory.fits for r in failed)
    rows = [
        "| compared with | rows | median | worst |",
        "| --- | --- | --- | --- |",
        f"| whole-model traces of the real classes, five families, one card: peak of tensors | {len(traced)} "
        f"| {percent(median(traced))} | {percent(max(traced))} |",
        f"| published measurements (`max_memory_allocated`) of other people's runs | {len(measured)} "
        f"| {percent(median(measured))} | {percent(max(measured))} |",
    ]
    sentence = (
        f"Of these {len(measured)} published runs nine in ten are predicted within "
        f"{percent(quantile(measured, 0.9))}; of {len(failed)} that were recorded as out of memory "
        f"{called or 'none'} {'are' if called > 1 else 'is'} called fitting."
    )
    picture = f"![Predicted against measured peak memory of {len(measured)} published runs](docs/accuracy.svg)"
    return "\n".join((*rows, "", picture, "", fill(sentence, 120), ""))


def main() -> int:
    """Write or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit 1 when drawing or README are out of date")
    parser.add_argument("-o", "--output", type=Path, help="write the drawing there, and nothing else")
    args = parser.parse_args()
    runs = evaluation().with_bytes(metric="max_allocated")
    picture, readme = drawing(runs), README.read_text(encoding="utf-8")
    if args.output:
        args.output.write_text(picture, encoding="utf-8")
        return 0
    renewed, places = BLOCK.subn(lambda _: readme_block(runs), readme)
    if places != 1:
        print(f"{README.name} has {places} places for the figures of accuracy and not one", file=sys.stderr)
        return 1
    if args.check:
        current = PICTURE.is_file() and PICTURE.read_text(encoding="utf-8") == picture
        return 0 if current and renewed == readme else 1
    PICTURE.write_text(picture, encoding="utf-8")
    README.write_text(renewed, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
