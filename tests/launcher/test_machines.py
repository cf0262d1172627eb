from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from launcher.errors import UsageError
from launcher.inputs.machines import machine_from_json, resolve_machine
from planner.machine import Machine
from tests.launcher.nvml_stub.machines import H100, RTX3090, NvmlStub, machine

MIB = 1024**2

RESOLVE = """
import sys
from launcher.inputs.machines import resolve_machine
sys.stdout.write(resolve_machine({spec!r}, {nodes}).model_dump_json(by_alias=True))
"""


def test_a_named_machine() -> None:
    box = resolve_machine("8xH100-80GB", nodes=2)
    assert (box.origin, box.spec, box.nodes) == ("named", "8xH100-80GB", 2)
    assert box.host is None and box.driver_version is None
    assert len(box.cards) == len(box.usable_cards) == 8
    third = box.cards[2]
    assert (third.index, third.card_id, third.name) == (2, "H100-80GB", "NVIDIA H100 80GB HBM3")
    assert third.total_bytes == third.free_bytes + third.reserved_bytes == 81559 * MIB
    # torch.cuda.mem_get_info says 79.11 GiB on such a card: the driver keeps the rest.
    assert third.free_bytes / 2**30 == pytest.approx(79.11, abs=0.001)
    assert third.compute_capability == "9.0"
    assert third.nvlink_peers == [0, 1, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("spec", "resolved"),
    [
        ("h100", "1xH100-80GB"),
        ("4 x a100_80gb", "4xA100-80GB"),
        (" 2X4090 ", "2xRTX4090"),
        ("8\u00d7B200", "8xB200"),
        ("RTX-4060-Ti", "1xRTX4060Ti-16GB"),
        ("128xH100", "128xH100-80GB"),
    ],
)
def test_specs_are_forgiven_their_spelling(spec: str, resolved: str) -> None:
    assert resolve_machine(spec).spec == resolved


def test_cards_with_a_bridge_are_not_taken_for_linked() -> None:
    box = resolve_machine("2xRTX3090")
    assert [card.nvlink_peers for card in box.cards] == [[], []]
    assert any("bridge" in note for note in box.notes)
    assert resolve_machine("RTX5090").notes == []  # Its memory was read on a card.


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("0xH100-80GB", "1 to 128 cards, not 0"),
        ("-1xH100-80GB", "1 to 128 cards, not -1"),
        ("99999xH100-80GB", "1 to 128 cards, not 99999"),
        ("9" * 5000 + "xH100-80GB", "1 to 128 cards"),
        ("8xNOPE", "no card 'NOPE'"),
        ("8xH100-81GB", "H100-80GB"),
        ("8xA100", "may be A100-40GB, "),
        ("8x", "no card '8x'"),
        ("x", "no card 'x'"),
        ("", "is empty"),
        ("8xH100-80GB\nrm -rf", "no machine"),
        ("∞xH100", "no card"),
        ("1.5xH100", "no card"),
    ],
)
def test_hostile_specs_are_one_line(spec: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve_machine(spec)
    message = str(caught.value)
    assert said in message and "--machine" in message
    assert "\n" not in message and len(message) < 300


@pytest.mark.parametrize("nodes", [0, -1, 10**9])
def test_nodes_out_of_range(nodes: int) -> None:
    with pytest.raises(UsageError, match=f"--nodes {nodes}"):
        resolve_machine("8xH100-80GB", nodes=nodes)


def test_the_cpu() -> None:
    box = resolve_machine("CPU")
    assert (box.origin, box.spec, box.cards, box.notes) == ("cpu", "cpu", [], [])
    assert box.host is not None and 0 < box.host.total_bytes <= psutil.virtual_memory().total


def test_local_with_cards(nvml_stub: NvmlStub) -> None:
    shape = machine(*[H100] * 4)
    seen = nvml_stub.ask(RESOLVE.format(spec="local", nodes=1), shape, visible="1,3")
    box = Machine.model_validate(seen)
    assert (box.origin, box.spec) == ("nvml", "local")
    assert [card.physical_index for card in box.cards] == [1, 3]
    assert [card.nvlink_peers for card in box.cards] == [[1], [0]]
    assert (box.driver_version, box.cuda_version) == ("580.65.06", "13.0")
    assert box.host is not None and box.host.cores >= 1


def test_local_without_cards_is_the_cpu_and_says_why(nvml_stub: NvmlStub) -> None:
    for shape, visible, said in (
        (machine(H100, init=18), None, "Driver/library version mismatch"),
        (machine(H100), "", "CUDA_VISIBLE_DEVICES is empty"),
        (machine(), None, "finds no card"),
    ):
        seen = nvml_stub.ask(RESOLVE.format(spec="local", nodes=1), shape, visible=visible)
        box = Machine.model_validate(seen)
        assert (box.origin, box.spec, box.cards) == ("cpu", "local", [])
        assert len(box.notes) == 1 and said in box.notes[0]
        assert "planning for the cpu" in box.notes[0]
        assert box.host is not None


def test_an_inventory_is_read_back_on_another_box(nvml_stub: NvmlStub, tmp_path: Path) -> None:
    busy = RTX3090 | {"processes": "1:20000", "used_mib": 20001}
    seen = nvml_stub.ask(RESOLVE.format(spec="local", nodes=1), machine(RTX3090, busy))
    path = tmp_path / "box.json"
    path.write_text(json.dumps(seen), encoding="utf-8")
    box = resolve_machine(str(path), nodes=3)
    assert (box.origin, box.spec, box.nodes) == ("file", str(path), 3)
    original = Machine.model_validate(seen)
    assert box.cards == original.cards and box.host == original.host
    assert box.cards[1].processes[0].memory_bytes == 20000 * MIB
    again = machine_from_json(box.model_dump_json(by_alias=True), where="again")
    assert again == box


def test_a_file_without_the_word_json_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "H100").mkdir()
    (tmp_path / "box").write_text(resolve_machine("2xL4", nodes=2).model_dump_json(by_alias=True))
    monkeypatch.chdir(tmp_path)
    box = resolve_machine("box")
    assert (box.origin, len(box.cards), box.nodes) == ("file", 2, 2)
    assert resolve_machine("H100").origin == "named"


def changed(**values: Any) -> str:
    box = json.loads(resolve_machine("2xL4").model_dump_json(by_alias=True))
    for path, value in values.items():
        target = box
        *parents, last = [int(part) if part.isdigit() else part for part in path.split("__")]
        for part in parents:
            target = target[part]
        if value is None:
            del target[last]
        else:
            target[last] = value
    return json.dumps(box)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "line 1, column 1: not JSON"),
        ('{"schema": }', "line 1, column 12: not JSON"),
        ("[" * 200_000, "not"),
        ("9" * 5000, "not a machine file"),
        ("[]", "no schema"),
        ("null", "no schema"),
        ("{}", "no schema trlfit.machine/1"),
        ('{"schema": "trlfit.plan/1"}', "schema trlfit.plan/1, not trlfit.machine/1"),
        ('{"schema": ["trlfit.machine/1"]}', "schema"),
        (changed(origin=None), "origin: field required"),
        (changed(cards__1__total_bytes="many"), "cards[1].total_bytes: input should be a valid"),
        (changed(cards__0__total_bytes=-1), "cards[0].total_bytes: input should be greater"),
        (changed(cards__0__total_bytes=0), "cards[0].total_bytes: is 0 for a usable card"),
        (changed(cards__0__total_bytes=0, cards__0__usable=False), "used_bytes or free_bytes"),
        (changed(cards__0__free_bytes=10**15), "cards[0]: used_bytes or free_bytes is more"),
        (changed(cards__1__index=0), "cards[1].index: is 0, write 1"),
        (changed(cards__0__nvlink_peers=[5]), "there is no card 5"),
        (changed(cards__0__colour="green"), "cards[0].colour: extra inputs are not permitted"),
        (changed(nodes=0), "nodes: input should be greater"),
    ],
)  # fmt: skip
def test_broken_files_are_one_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "box.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        resolve_machine(str(path))
    assert said in str(caught.value) and "box.json" in str(caught.value)
    assert len(str(caught.value)) < 400


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere\.json' does not exist; write local"):
        resolve_machine("nowhere.json")
    with pytest.raises(UsageError, match="is a folder"):
        resolve_machine(f"{tmp_path}/")
    with pytest.raises(UsageError, match=r"cannot be read \(embedded null"):
        resolve_machine("a\0.json")
    with pytest.raises(UsageError, match=r"cannot be read \(File name too long"):
        resolve_machine("a" * 5000 + ".json")
    binary = tmp_path / "weights.json"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not a text file"):
        resolve_machine(str(binary))
    big = tmp_path / "big.json"
    big.write_bytes(b" " * (8 * MIB + 1))
    with pytest.raises(UsageError, match="larger than"):
        resolve_machine(str(big))
    # A device has no size to look at, and no end.
    with pytest.raises(UsageError, match="/dev/zero' is larger than"):
        resolve_machine("/dev/zero")
