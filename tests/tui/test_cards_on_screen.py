from __future__ import annotations

import pytest

from tests.launcher.nvml_stub.machines import H100, NvmlStub, machine

WATCH = """
import asyncio, json, os
from pathlib import Path
from tests.tui.screens import screen_text, wait_for
from tui.app import TrlfitApp

async def main():
    app, seen = TrlfitApp(), {}
    async with app.run_test(size=SIZE) as pilot:
        await wait_for(pilot, lambda: app.plan is not None)
        seen["first"] = screen_text(app)
        shape = Path(os.environ["TRLFIT_NVML_STUB"])
        beside = shape.with_suffix(".new")
        beside.write_text(LATER)
        beside.replace(shape)  # the stand-in may read at any moment
        await wait_for(pilot, lambda: "66C" in screen_text(app))
        seen["later"] = screen_text(app)
        before = app.plan
        await pilot.press("r")
        await wait_for(pilot, lambda: app.plan is not before)
        seen["used_bytes"] = [card.used_bytes for card in app.machine.cards]
        await wait_for(pilot, lambda: sum(w.group == "sample" and w.is_running for w in app.workers) == 1)
        await pilot.press("q")
    import pynvml
    seen["left_open"] = pynvml.nvmlLib.stub_opened()
    return seen

print(json.dumps(asyncio.run(main())))
"""
BUSY = {**H100, "used_mib": 12288, "utilisation": 97, "temperature": 66, "power_mw": 655000}


@pytest.mark.parametrize("size", [(80, 24), (120, 36)])
def test_cards_appear_and_change(size: tuple[int, int], nvml_stub: NvmlStub) -> None:
    code = WATCH.replace("SIZE", repr(size)).replace("LATER", repr(machine(H100, BUSY)))
    seen = nvml_stub.ask(code, machine(H100, H100))
    assert "on 2 x H100-80GB" in " ".join(seen["first"].split())
    cards = [line.split() for line in seen["first"].splitlines() if "H100 80GB HBM3" in line]
    assert [card[0] for card in cards] == ["0", "1"]
    assert all("0.0/79.6" in card and "31C" in card for card in cards)
    later = [line.split() for line in seen["later"].splitlines() if "H100 80GB HBM3" in line]
    assert "0.0/79.6" in later[0] and "31C" in later[0]
    assert "12.0/79.6" in later[1] and "97%" in later[1] and "66C" in later[1]
    # Planning again reads the cards again; the older sampler ends and NVML is given back.
    assert seen["used_bytes"] == [4 * 2**20, 12288 * 2**20]
    assert seen["left_open"] == 0
