"""Draw docs/tui.svg: the plans of the real app, with the job of examples/qwen3-8b-1m.yaml."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tui.app import TrlfitApp  # noqa: E402

JOB = ROOT / "examples" / "qwen3-8b-1m.yaml"
SIZE = (120, 36)
TIME_LIMIT_S = 120.0
# Textual's picture loads its font from the network; a monospaced font of the reader does as well.
FONT_FACE = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


async def draw() -> str:
    """The screen once the plan is there, as SVG.

    Raises:
        TimeoutError: the app shows no plan.
    """
    app = TrlfitApp()
    async with app.run_test(size=SIZE) as pilot:
        until = time.monotonic() + TIME_LIMIT_S
        while app.known.plan is None:
            if time.monotonic() > until:
                raise TimeoutError(f"no plan after {TIME_LIMIT_S:.0f} s")
            await pilot.pause(0.05)
        await pilot.pause()
        svg = app.export_screenshot(title="trlfit")
    return FONT_FACE.sub("", svg)


def main() -> int:
    """Draw into the file named, docs/tui.svg by default."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "docs" / "tui.svg")
    output = parser.parse_args().output.resolve()
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(JOB, Path(folder, "job.yaml"))
        os.chdir(folder)
        svg = asyncio.run(draw())
        os.chdir(ROOT)
    # The same picture gives the same file.
    lines = [line.rstrip() for line in svg.splitlines()]
    output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
