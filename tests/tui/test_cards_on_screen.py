"""Cards on the screen, over the real pynvml and a stand-in library: live values, cards left out, cards taken."""

from __future__ import annotations

import pytest

from tests.launcher.nvml_stub.machines import H100, NvmlStub, machine

WATCH = """
import asyncio, json, os
from pathlib import Path
from tests.tui.screens import screen_text, wait_for
from tui.app import TrlfitApp

def change(later):
    shape = Path(os.environ["TRLFIT_NVML_STUB"])
    beside = shape.with_suffix(".new")
    beside.write_text(later)
    beside.replace(shape)  # the stand-in may read at any moment

async def main():
    app, seen = TrlfitApp(), {}
    async with app.run_test(size=SIZE) as pilot:
        async def planned(before=None):
            await wait_for(pilot, lambda: app.known.plan is not None and app.known.plan is not before)
        await planned()
        seen["first"] = screen_text(app)
        change(LATER)
        await wait_for(pilot, lambda: "66C" in screen_text(app))
        seen["later"] = screen_text(app)
        before = app.known.plan
        await pilot.press("r")
        await planned(before)
        seen["used_bytes"] = [card.used_bytes for card in app.known.reading.cards]
        await wait_for(pilot, lambda: sum(w.group == "sample" and w.is_running for w in app.workers) == 1)
        await REST(app, pilot, seen, planned)
        await pilot.press("q")
    import pynvml
    seen["left_open"] = pynvml.nvmlLib.stub_opened()
    return seen

async def nothing(app, pilot, seen, planned):
    pass

async def leave_out(app, pilot, seen, planned):
    before = app.known.plan
    await pilot.press("shift+tab", "enter")
    await planned(before)
    seen["left_out"] = screen_text(app)
    seen["cards"] = [card["uuid"] for card in app.known.plan["machine"]["cards"]]
    await pilot.press("y")
    seen["command"] = app.clipboard

async def taken(app, pilot, seen, planned):
    change(TAKEN)
    await wait_for(pilot, lambda: "taken by" in screen_text(app))
    seen["taken"] = screen_text(app)
    before = app.known.plan
    await pilot.press("r")
    await planned(before)
    await wait_for(pilot, lambda: "taken by" not in screen_text(app))

async def watch_run(app, pilot, seen, planned):
    import tempfile
    from tests.launcher.fake_run import GIB, make_run, rows
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(Path(folder, "run"))
        (run / "metrics.jsonl").write_text(rows((1, 3.0, 2.0, [40 * GIB, 41 * GIB]), end=False))
        app.show_run(run)
        await wait_for(pilot, lambda: "in use" in screen_text(app))
        seen["run"] = screen_text(app)

print(json.dumps(asyncio.run(main())))
"""
BUSY = {**H100, "used_mib": 12288, "utilisation": 97, "temperature": 66, "power_mw": 655000}
TAKEN = {**BUSY, "used_mib": 60000, "temperature": 70}


def watch(stub: NvmlStub, size: tuple[int, int], rest: str) -> dict[str, object]:
    code = WATCH.replace("SIZE", repr(size)).replace("LATER", repr(machine(H100, BUSY)))
    code = code.replace("TAKEN", repr(machine(TAKEN, BUSY))).replace("REST", rest)
    found: dict[str, object] = stub.ask(code, machine(H100, H100))
    return found


@pytest.mark.parametrize("size", [(80, 24), (120, 36)])
def test_cards_appear_and_change(size: tuple[int, int], nvml_stub: NvmlStub) -> None:
    seen = watch(nvml_stub, size, "nothing")
    first, later = str(seen["first"]), str(seen["later"])
    if size[1] > 30:  # a lower screen has no room for the last fields
        assert "2 x H100-80GB" in " ".join(first.split())
    cards = [line.strip("│ ").split() for line in first.splitlines() if "H100 80GB HBM3" in line]
    assert [card[:2] for card in cards] == [["x", "0"], ["x", "1"]]
    assert all("0.0/79.6" in card and "31C" in card for card in cards)
    cards = [line.strip("│ ").split() for line in later.splitlines() if "H100 80GB HBM3" in line]
    assert "0.0/79.6" in cards[0] and "31C" in cards[0]
    assert "12.0/79.6" in cards[1] and "97%" in cards[1] and "66C" in cards[1]
    # Planning again reads the cards again; the older sampler ends and NVML is given back.
    assert seen["used_bytes"] == [4 * 2**20, 12288 * 2**20]
    assert seen["left_open"] == 0


def test_a_card_may_be_left_out(nvml_stub: NvmlStub) -> None:
    seen = watch(nvml_stub, (120, 36), "leave_out")
    assert len(seen["cards"]) == 1  # type: ignore[arg-type]
    rows = [line.strip("│ ") for line in str(seen["left_out"]).splitlines() if "H100 80GB HBM3" in line]
    assert rows and [row[:3] for row in rows] == ["0  ", "x 1"]
    assert str(seen["command"]).startswith(f"CUDA_VISIBLE_DEVICES={seen['cards'][0]} trlfit plan")  # type: ignore[index]


def test_a_card_that_was_taken_is_said_until_it_is_planned_again(nvml_stub: NvmlStub) -> None:
    seen = watch(nvml_stub, (80, 24), "taken")
    assert "GPU 0: 58.6 GiB taken by somebody since planning; r plans again" in " ".join(str(seen["taken"]).split())


def test_a_run_is_shown_beside_what_the_cards_say(nvml_stub: NvmlStub) -> None:
    text = str(watch(nvml_stub, (120, 36), "watch_run")["run"])
    (rank, *_), (first, second) = (
        [line for line in text.splitlines() if name in line and "predicted" in line] for name in ("rank ", "GPU ")
    )
    # Tensors of a rank against the tensors that were planned, the card against what was planned for it.
    assert "40.00  peak   40.00  predicted   50.00" in rank
    assert "0.00  in use" in first and "12.00  in use" in second and "predicted   56.00" in second
