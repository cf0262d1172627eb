from __future__ import annotations

import ctypes.util
import getpass
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.nvml.gpus import Sampler, read_cards
from launcher.nvml.visible import DeviceName, SliceName, visible_units
from planner.machine import Card
from tests.launcher.nvml_stub.machines import A100_SLICED, H100, RTX3090, NvmlStub, machine, uuid

MIB = 1024**2
NOBODYS_PID = 2**22 + 7
"""Above the kernel's largest pid: a process of another container."""

no_driver = pytest.mark.skipif(ctypes.util.find_library("nvidia-ml") is not None, reason="this machine has a driver")


def test_eight_cards_on_switches(nvml_stub: NvmlStub) -> None:
    seen = nvml_stub.cards(machine(*[H100] * 8))
    assert seen["driver"] == "580.65.06"
    assert seen["cuda"] == "13.0"
    assert seen["notes"] == []
    assert seen["left_open"] == 0
    assert [card["index"] for card in seen["cards"]] == list(range(8))
    third = seen["cards"][2]
    assert third == {
        "index": 2,
        "physical_index": 2,
        "uuid": uuid(2),
        "name": "NVIDIA H100 80GB HBM3",
        "card_id": "H100-80GB",
        "total_bytes": 81559 * MIB,
        "used_bytes": 4 * MIB,
        "free_bytes": (81559 - 4 - 551) * MIB,
        "reserved_bytes": 551 * MIB,
        "compute_capability": "9.0",
        "pcie_generation": 5,
        "pcie_width": 16,
        "nvlink_peers": [0, 1, 3, 4, 5, 6, 7],
        "mig_mode": "off",
        "compute_share": 1.0,
        "memory_share": 1.0,
        "virtual": False,
        "utilisation_percent": 0,
        "temperature_c": 31,
        "power_w": 70.12,
        "power_limit_w": 700.0,
        "processes": [],
        "usable": True,
        "problem": None,
        "unknown": {},
    }


def test_a_card_busy_with_another_users_process(nvml_stub: NvmlStub) -> None:
    busy = RTX3090 | {
        "used_mib": 20500,
        "processes": f"{os.getpid()}:500 1:20000",
        "graphics": "1:20000",
        "links": "bus:0x10 off bus:0x10 off",
    }
    seen = nvml_stub.cards(machine(RTX3090 | {"links": "bus:0x11 off bus:0x11 off"}, busy))
    idle, taken = seen["cards"]
    assert (idle["nvlink_peers"], taken["nvlink_peers"]) == ([1], [0])
    assert idle["processes"] == [] and idle["mig_mode"] is None
    assert taken["free_bytes"] == (24576 - 20500 - 317) * MIB
    other, own = sorted(taken["processes"], key=lambda process: process["pid"])
    assert (other["pid"], other["memory_bytes"]) == (1, 20000 * MIB)
    assert own["user"] == getpass.getuser()
    assert own["own"] and own["name"] and own["memory_bytes"] == 500 * MIB
    assert taken["usable"] and "processes" not in taken["unknown"]


def test_cards_without_a_bridge_or_with_one_to_a_hidden_card_have_no_peers(
    nvml_stub: NvmlStub,
) -> None:
    bridged = [RTX3090 | {"links": f"bus:0x{end:02x} off"} for end in (0x12, 0x13, 0x10, 0x11)]
    seen = nvml_stub.cards(machine(*bridged, RTX3090), visible="2,3,0,4")
    assert [card["physical_index"] for card in seen["cards"]] == [2, 3, 0, 4]
    # Card 2 is bridged with 0, which is third now; 3 with 1, which is hidden; 4 has no links.
    assert [card["nvlink_peers"] for card in seen["cards"]] == [[2], [], [0], []]
    assert any("shows 4 of 5 cards" in note for note in seen["notes"])


def test_slices_of_a_mig_card_are_the_cards(nvml_stub: NvmlStub) -> None:
    seen = nvml_stub.cards(machine(A100_SLICED))
    big, small = seen["cards"]
    assert [card["mig_mode"] for card in seen["cards"]] == ["slice", "slice"]
    assert [card["physical_index"] for card in seen["cards"]] == [0, 0]
    assert big["uuid"].startswith("MIG-") and big["card_id"] == "A100-40GB"
    assert (big["total_bytes"], small["total_bytes"]) == (19968 * MIB, 4864 * MIB)
    assert (big["compute_share"], small["compute_share"]) == (4 / 7, 1 / 7)
    assert big["memory_share"] == pytest.approx(19968 / 40960)
    assert big["compute_capability"] == "8.0" and big["power_w"] == 45.0
    assert big["nvlink_peers"] == []
    assert "utilisation_percent" in big["unknown"]
    # Two GiB are taken in the small slice and the driver lists no process.
    assert "outside this container" in small["unknown"]["processes"]
    assert any("one of them" in note for note in seen["notes"])


@pytest.mark.parametrize(
    ("visible", "slices"),
    [
        ("MIG-d184f67c-0000", [4864]),
        ("MIG-d184f67c", []),  # ambiguous
        (f"MIG-{uuid(0)}/9/0", [4864]),
        (f"MIG-{uuid(0)[:12]}/1/0", [19968]),
        ("0", [19968]),
        (uuid(0), [19968]),
    ],
)
def test_slices_by_name(nvml_stub: NvmlStub, visible: str, slices: list[int]) -> None:
    seen = nvml_stub.cards(machine(A100_SLICED), visible=visible)
    assert [card["total_bytes"] // MIB for card in seen["cards"]] == slices


def test_mig_without_slices_cannot_be_used(nvml_stub: NvmlStub) -> None:
    empty = {key: value for key, value in A100_SLICED.items() if not key.startswith("mig.")}
    (card,) = nvml_stub.cards(machine(empty))["cards"]
    assert card["mig_mode"] == "on" and not card["usable"]
    assert "no slice" in card["problem"]


def test_a_driver_that_lacks_functions(nvml_stub: NvmlStub) -> None:
    busy = H100 | {"processes": f"{os.getpid()}:1000", "used_mib": 1004}
    seen = nvml_stub.cards(machine(busy, busy, driver="440.33.01", cuda=10020), old=True)
    assert (seen["driver"], seen["cuda"]) == ("440.33.01", "10.2")
    first = seen["cards"][0]
    # The first version of the memory call counts the driver's own share as used.
    assert first["used_bytes"] == (1004 + 551) * MIB and first["reserved_bytes"] == 0
    assert first["free_bytes"] == (81559 - 1004 - 551) * MIB
    assert first["processes"][0]["memory_bytes"] == 1000 * MIB
    assert first["mig_mode"] is None
    assert first["nvlink_peers"] == [1]  # Ends that are no card here are taken for switches.
    assert first["usable"] and first["unknown"] == {}


def test_a_refused_field_is_a_sentence_and_the_rest_is_read(nvml_stub: NvmlStub) -> None:
    odd = H100 | {
        "error.nvmlDeviceGetPowerUsage": 3,
        "error.nvmlDeviceGetComputeRunningProcesses_v3": 4,
        "error.nvmlDeviceGetNvLinkState": 999,
        "error.nvmlDeviceGetCurrPcieLinkWidth": 12345,
        "temperature": 2**32 - 1,
        "name": "NVIDIA Prototype 9000",
    }
    seen = nvml_stub.cards(machine(odd, H100))
    card = seen["cards"][0]
    assert card["usable"] and card["card_id"] is None
    assert card["power_w"] is None and card["temperature_c"] is None
    assert card["unknown"] == {
        "power_w": "this card or its driver does not report it",
        "processes": "reading it needs more permission",
        "nvlink_peers": "the driver answers with an unknown error",
        "pcie_width": "nvmlDeviceGetCurrPcieLinkWidth failed with NVML error 12345",
        "temperature_c": "the driver has no value for it",
    }
    assert any("CUDA_DEVICE_ORDER" in note for note in seen["notes"])


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ({"error": 15}, "fallen off the bus"),
        ({"handle": 15}, "fallen off the bus"),
        ({"error": 999}, "unknown error"),
        ({"handle": 999}, "unknown error"),
        ({"error": 16}, "reset"),
        ({"error.nvmlDeviceGetMemoryInfo_v2": 3, "error.nvmlDeviceGetMemoryInfo": 3}, "how much"),
    ],
)
def test_a_dead_card_beside_a_healthy_one(nvml_stub: NvmlStub, fault: dict[str, object], sentence: str) -> None:
    seen = nvml_stub.cards(machine(H100, H100 | fault, H100))
    assert [card["usable"] for card in seen["cards"]] == [True, False, True]
    dead = seen["cards"][1]
    assert sentence in dead["problem"] and dead["total_bytes"] == 0
    assert seen["cards"][0]["nvlink_peers"][-1] == 2
    assert seen["left_open"] == 0


def test_a_vgpu(nvml_stub: NvmlStub) -> None:
    vgpu = RTX3090 | {"name": "GRID A100D-40C", "virtualization": 2, "total_mib": 40960}
    seen = nvml_stub.cards(machine(vgpu))
    (card,) = seen["cards"]
    assert card["virtual"] and card["usable"] and card["card_id"] is None
    assert "vGPU" in seen["notes"][0]


def test_process_memory_that_the_driver_does_not_tell(nvml_stub: NvmlStub) -> None:
    (card,) = nvml_stub.cards(machine(RTX3090 | {"processes": f"{NOBODYS_PID}:na", "used_mib": 9000}))["cards"]
    assert card["processes"] == [{"pid": NOBODYS_PID, "name": None, "user": None, "memory_bytes": None, "own": False}]
    assert "WSL2" in card["unknown"]["processes"]
    (card,) = nvml_stub.cards(machine(RTX3090 | {"processes": "none", "graphics": "none"}))["cards"]
    assert card["processes"] == []
    assert card["unknown"]["processes"] == "this card or its driver does not report it"


@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        ({"compute_mode": 2}, "prohibited"),
        ({"compute_mode": 3, "processes": "1:100"}, "exclusive mode and process 1"),
        ({"compute_mode": 3}, None),
    ],
)
def test_compute_modes(nvml_stub: NvmlStub, extra: dict[str, object], problem: str | None) -> None:
    (card,) = nvml_stub.cards(machine(RTX3090 | extra))["cards"]
    assert card["usable"] == (problem is None)
    assert problem is None or problem in card["problem"]


def test_cards_of_other_users_under_slurm_are_not_counted(nvml_stub: NvmlStub) -> None:
    # The device control group hides cards 0 and 2; CUDA numbers what is left.
    seen = nvml_stub.cards(machine(H100 | {"handle": 4}, H100, H100 | {"handle": 4}, H100), visible="1")
    assert [card["physical_index"] for card in seen["cards"]] == [3]
    assert "2 of 4 cards may not be used" in seen["notes"][0]


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        (9, "not loaded"),
        (4, "no permission"),
        (17, "operating system"),
        (18, "Driver/library version mismatch"),
        (999, "NVML error 999"),
    ],
)
def test_a_driver_that_does_not_start(nvml_stub: NvmlStub, code: int, sentence: str) -> None:
    seen = nvml_stub.cards(machine(H100, init=code))
    assert seen["cards"] == [] and not seen["answered"]
    assert len(seen["notes"]) == 1 and sentence in seen["notes"][0]
    assert seen["left_open"] == 0


def test_a_driver_without_cards_or_that_does_not_count_them(nvml_stub: NvmlStub) -> None:
    seen = nvml_stub.cards(machine())
    assert seen["cards"] == [] and seen["answered"]
    assert seen["notes"] == ["the NVIDIA driver is loaded and finds no card"]
    seen = nvml_stub.cards(machine(cards=-999))
    assert seen["cards"] == [] and "does not list its cards" in seen["notes"][0]
    assert seen["left_open"] == 0


@no_driver
def test_no_driver_at_all_costs_no_import() -> None:
    reading = read_cards()
    assert reading.cards == () and not reading.answered
    assert reading.notes == ("no NVIDIA driver here: libnvidia-ml.so.1 is not found",)
    code = "import sys, launcher.nvml.gpus as g; g.read_cards(); print('pynvml' in sys.modules)"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path.cwd())
    assert child.stdout.strip() == "False"


def test_a_foreign_file_under_the_librarys_name(nvml_stub: NvmlStub, tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").write_bytes(b"")
    environ = nvml_stub.environ(machine(H100)) | {"LD_LIBRARY_PATH": str(tmp_path)}
    code = "from launcher.nvml.gpus import read_cards; print(read_cards().notes[0])"
    child = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert "cannot be loaded" in child.stdout and "too short" in child.stdout


def test_a_hidden_machine(nvml_stub: NvmlStub) -> None:
    for visible in ("", "-1", "NoDevFiles", "0,0", "7"):
        seen = nvml_stub.cards(machine(H100, H100), visible=visible)
        assert seen["cards"] == [] and seen["answered"], visible
        assert "CUDA_VISIBLE_DEVICES" in seen["notes"][0]


CARDS = [
    DeviceName(uuid="GPU-18ef14e9-aaaa"),
    DeviceName(uuid="GPU-849d5a8d-bbbb"),
    DeviceName(uuid="GPU-849d0000-cccc"),
    DeviceName(uuid=None),
]

VALUES = [
    None, "0", "1,0", "0, 1", " 2", "3,2,1,0", "0,0", "1,2,1", "-1", "0,-1,1", "4", "0,4,1",
    "0,9,9", "1gpu2,2ampere", "+1", "abc", "0,abc,1", ",0", "0,,1", "0,", "00", "1,01",
    "GPU-18ef14e9", "GPU-18ef14e9,GPU-849d5", "GPU-849d", "GPU-849d5,GPU-849d", "GPU-18,GPU-18",
    "GPU-18,GPU-18ef", "GPU-18,0", "GPU-18, GPU-849d5", "GPU-", "gpu-18ef14e9", "0,GPU-849d5",
    "GPU-nope,GPU-18,GPU-18", "18446744073709551616",
]  # fmt: skip


@pytest.mark.stack
def test_visible_devices_are_read_as_torch_reads_them() -> None:
    """torch imitates the CUDA driver for NVML; its own functions are the reference."""
    code = """
import json, os, sys, torch.cuda as cuda
values, uuids = json.load(sys.stdin)
def units(value):
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    if value is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = value
    parsed = cuda._parse_visible_devices()
    if parsed and isinstance(parsed[0], str):
        return cuda._transform_uuid_to_ordinals(parsed, uuids)
    cut = next((i for i, n in enumerate(parsed) if n >= len(uuids)), len(parsed))
    return parsed[:cut]
print(json.dumps([units(value) for value in values]))
"""
    child = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        input=json.dumps([VALUES, [card.uuid or "unknown" for card in CARDS]]),
        capture_output=True,
        text=True,
        check=True,
    )
    expected: list[list[int]] = json.loads(child.stdout)
    ours = [[unit[0] for unit in visible_units(value, CARDS).units] for value in VALUES]
    assert dict(zip(VALUES, ours, strict=True)) == dict(zip(VALUES, expected, strict=True))


def test_visible_devices_say_what_is_odd() -> None:
    assert visible_units("0,1", CARDS).notes == ()
    assert "'9' is no single card here" in visible_units("0,9", CARDS).notes[0]
    assert "GPU-849d" in visible_units("GPU-849d", CARDS).notes[0]
    assert "twice" in visible_units("1,1", CARDS).notes[0]
    assert "empty" in visible_units("", CARDS).notes[0]


def test_visible_slices_of_several_cards() -> None:
    parts = (SliceName(uuid="MIG-a1"), SliceName(uuid="MIG-b2"))
    cards = [DeviceName(uuid="GPU-1"), DeviceName(uuid="GPU-2", slices=parts)]
    assert visible_units(None, cards).units == ((0, None), (1, 0), (1, 1))
    assert visible_units("MIG-b2,MIG-a1", cards).units == ((1, 1), (1, 0))
    assert visible_units("MIG-b,MIG-b2", cards).units == ()
    assert visible_units("1,0", cards).units == ((1, 0), (0, None))


SAMPLE = """
import json, os, sys
from pathlib import Path
from launcher.nvml.gpus import Sampler, read_cards
shape = Path(os.environ["TRLFIT_NVML_STUB"])
def keep(samples):
    return [{"used": s.used_bytes, "load": s.utilisation_percent, "temperature": s.temperature_c,
             "power": s.power_w, "pids": [p.pid for p in s.processes], "problem": s.problem}
            for s in samples]
def become(key, value):
    lines = [line for line in shape.read_text().splitlines() if not line.startswith(key + "=")]
    shape.write_text("\\n".join([*lines, f"{key}={value}", ""]))
cards = read_cards().cards
import pynvml
out = []
with Sampler(cards) as sampler:
    out.append(keep(sampler.sample()))
    pynvml.nvmlLib.stub_calls()
    for key, value in (("1.used_mib", 9000), ("1.utilisation", 97), ("1.processes", "1:8000"),
                       ("0.error", 15)):
        become(key, value)
    out.append(keep(sampler.sample()))
    calls = pynvml.nvmlLib.stub_calls()
opened = pynvml.nvmlLib.stub_opened()
print(json.dumps({"samples": out, "calls": calls, "opened": opened}))
"""


def test_the_sampler_follows_the_cards(nvml_stub: NvmlStub) -> None:
    seen: dict[str, Any] = nvml_stub.ask(SAMPLE, machine(RTX3090, RTX3090, A100_SLICED))
    before, after = seen["samples"]
    assert len(before) == 4
    assert before[1] == {
        "used": 2 * MIB,
        "load": 0,
        "temperature": 40,
        "power": 22.0,
        "pids": [],
        "problem": None,
    }
    assert after[1]["used"] == 9000 * MIB and after[1]["load"] == 97 and after[1]["pids"] == [1]
    assert "fallen off the bus" in after[0]["problem"]
    # Slices: own memory, the card's temperature.
    assert (after[2]["used"], after[2]["temperature"]) == (19 * MIB, 33)
    assert after[3]["used"] == 2019 * MIB
    assert seen["opened"] == 0
    # Memory, load, temperature, power and two process lists per card; no enumeration, no links.
    assert seen["calls"] <= 7 * 4


@no_driver
def test_the_sampler_without_a_driver_says_so() -> None:
    card = Card(index=3, name="NVIDIA H200", total_bytes=1)
    with Sampler([card]) as sampler:
        (sample,) = sampler.sample()
    assert sample.index == 3 and sample.problem is not None and "no NVIDIA driver" in sample.problem
