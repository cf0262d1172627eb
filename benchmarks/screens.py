"""How quick the screens are: first frame, an edit repainted, idle, and two hours of live cards.

    python benchmarks/screens.py [--json]

CPU seconds of this process under Textual's headless driver, so that other work on the machine does not count. The
hours are 7,200 samples of eight cards, posted as fast as they are drawn; in the first one Textual fills its caches.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SIZE = (120, 36)
EDITS = 20
IDLE_S = 10.0
SAMPLES = 7200
JOB = "model: Qwen/Qwen3-8B\nmachine: 8xH100-80GB\n"
FIRST = """
import asyncio, sys, time
from tui.app import TrlfitApp
async def main():
    app = TrlfitApp()
    async with app.run_test(size=(120, 36)) as pilot:
        drawn = time.process_time()
        while app.known.plan is None:
            await pilot.pause(0.005)
        await pilot.pause()
        print(drawn, time.process_time())
asyncio.run(main())
"""


def first_frame(runs: int = 5) -> dict[str, float]:
    """CPU seconds of a fresh process to the first frame, and to the plan on it."""
    found = []
    for _ in range(runs):
        done = subprocess.run(
            [sys.executable, "-c", FIRST], capture_output=True, text=True, check=True, env=environment()
        )
        found.append([float(word) for word in done.stdout.split()])
    return {"first_frame_s": min(row[0] for row in found), "plan_drawn_s": min(row[1] for row in found)}


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}


async def in_one_session() -> dict[str, float]:
    """The rest, in one app."""
    import psutil

    from launcher.nvml.gpus import CardSample
    from launcher.nvml.reading import CardsReading
    from planner.machine import Card
    from tui.app import TrlfitApp
    from tui.messages import CardsRead, CardsSampled

    app = TrlfitApp()
    found: dict[str, float] = {}
    async with app.run_test(size=SIZE) as pilot:
        while app.known.plan is None:
            await pilot.pause(0.01)
        await pilot.press("3", *["right"] * 4, "enter")
        await pilot.pause()
        seconds = []
        for number in range(EDITS):
            began = time.process_time()
            await pilot.press("1" if number % 2 == 0 else "backspace")
            seconds.append(time.process_time() - began)
        found["keystroke_s"] = statistics.median(seconds)
        await pilot.press("escape", "1")
        await pilot.pause()
        began, at = time.process_time(), time.monotonic()
        await pilot.pause(IDLE_S)
        found["idle_share"] = (time.process_time() - began) / (time.monotonic() - at)
        gib = 2**30
        cards = tuple(
            Card(index=i, name="NVIDIA H100 80GB HBM3", total_bytes=80 * gib, free_bytes=80 * gib) for i in range(8)
        )
        app.post_message(CardsRead(CardsReading(cards=cards, driver="580.65")))
        await pilot.pause(0.5)
        sizes = []
        began = time.process_time()
        for second in range(SAMPLES):
            samples = [
                CardSample(index=i, used_bytes=(second * 7 + i) % 80 * gib, temperature_c=second % 50) for i in range(8)
            ]
            app.post_message(CardsSampled(samples))
            if second % 600 == 599:
                await pilot.pause()
                sizes.append(psutil.Process().memory_info().rss)
            elif second % 20 == 0:
                await pilot.pause(0)
        found["sample_s"] = (time.process_time() - began) / SAMPLES
        found["grown_mib_in_the_last_half"] = (sizes[-1] - sizes[len(sizes) // 2 - 1]) / 2**20
        found["rss_mib"] = sizes[-1] / 2**20
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ["TRLFIT_DATA"] = folder
        Path("job.yaml").write_text(JOB, encoding="utf-8")
        found: dict[str, Any] = {**first_frame(), **asyncio.run(in_one_session())}
        os.chdir(ROOT)
    if asked.json:
        print(json.dumps(found))
        return 0
    print(f"first frame       {found['first_frame_s']:.2f} s CPU of a fresh process")
    print(f"plan on it        {found['plan_drawn_s']:.2f} s")
    print(f"keystroke         {found['keystroke_s'] * 1000:.0f} ms CPU in a cell of the ledger, repainted")
    print(f"idle              {found['idle_share']:.1%} of a core")
    print(f"a sample of cards {found['sample_s'] * 1000:.1f} ms CPU for eight")
    grown = found["grown_mib_in_the_last_half"]
    print(f"two hours of them {grown:+.1f} MiB in the second one, {found['rss_mib']:.0f} MiB in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
