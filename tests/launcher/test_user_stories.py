"""Users and their machines, through the command line: what they are told, and whether it is true and short.

Each reads the text as it is printed and a script reads the JSON; both say the same.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from planner.machine import Card, GpuProcess, Host, Machine
from planner.plan import Plan
from profiles.cards import find_card
from tests.launcher.command_line import here, write_files

GIB = 2**30
WIDTH = 100


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Story:
    """One question: its exit code, its text, its JSON."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *words: str) -> None:
        said = here(capsys, ("plan", *words))
        assert said.err == ""
        self.code, self.text = said.code, said.out
        self.plan: dict[str, Any] = json.loads(here(capsys, ("plan", *words, "--json")).out)
        Plan.model_validate(self.plan)
        assert (self.plan["best"] is not None) == (self.code == 0)

    def lines(self, label: str) -> list[str]:
        """Lines of the best plan with this label."""
        return re.findall(rf"^  {label} +(.*)$", self.text, re.MULTILINE)

    def block(self, title: str) -> list[str]:
        """Lines under a title, up to the next empty one."""
        found = re.search(rf"^{re.escape(title)}[^\n]*\n(.*?)(?:\n\n|\Z)", self.text, re.MULTILINE | re.DOTALL)
        return found[1].splitlines() if found else []

    @property
    def changes(self) -> dict[str, dict[str, Any]]:
        """Lever -> change."""
        return {change["lever"]: change for change in self.plan["changes"]}

    @property
    def choice(self) -> dict[str, Any]:
        """The best plan's."""
        return dict(self.plan["best"]["choice"])


def said_of(change: dict[str, Any]) -> tuple[float, float]:
    """(GiB per GPU, seconds per step) of a change's sentence."""
    found = re.search(r"fits with ([\d.]+) GiB per GPU.*?, ([\d.]+) s per step", change["sentence"])
    assert found is not None, change["sentence"]
    return float(found[1]), float(found[2])


def workstation(*used_gib: float, user: str = "anna") -> Machine:
    """RTX 3090s in one box with 64 GiB, some of them at work for somebody else."""
    total = find_card("RTX3090").nvml_bytes
    cards = [
        Card(
            index=index,
            name="NVIDIA GeForce RTX 3090",
            card_id="RTX3090",
            total_bytes=total,
            used_bytes=int(used * GIB),
            free_bytes=total - int(used * GIB),
            compute_capability="8.6",
            pcie_generation=4,
            pcie_width=8,
            processes=[GpuProcess(pid=4242, name="python", user=user, memory_bytes=int(used * GIB))]
            if used >= 1
            else [],
        )
        for index, used in enumerate(used_gib)
    ]
    host = Host(total_bytes=64 * GIB, available_bytes=50 * GIB, cores=16)
    return Machine(origin="nvml", spec="local", cards=cards, host=host)


def test_two_rtx_3090_of_which_one_is_busy(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_files(home, {"box.json": workstation(19.0, 0.2).model_dump_json(by_alias=True)})
    box = ("--machine", "box.json")
    full = Story(capsys, "Qwen/Qwen3-8B", *box)
    # Full training does not fit: 16 bytes of 8.2 B parameters, and the host has 50 GiB.
    assert full.code == 3
    assert "note: card 0 is busy: 19.0 of 24.0 GiB are taken by pid 4242 python (anna)" in full.text
    assert all("GiB of host memory per node, of which " in miss["why"][0] for miss in full.plan["near_misses"])
    assert {"lora", "qlora", "more GPUs", "another card"} <= set(full.changes)
    offers = full.block("nothing fits as asked; what would")
    flags = [line.split("  ")[1] for line in offers if line.startswith("  --")]
    assert flags[:2] == ["--method lora", "--method qlora"]
    # What is offered is what then comes: asked for, it fits with the bytes and seconds that were said.
    lora = Story(capsys, "Qwen/Qwen3-8B", *box, "--method", "lora")
    gib, seconds = said_of(full.changes["lora"])
    best = lora.plan["best"]
    assert best["memory"]["device_bytes"] / GIB == pytest.approx(gib, abs=0.06)
    assert best["time"]["step_s"] == pytest.approx(seconds, rel=0.01)
    # It runs on the card that is free, and says so.
    assert best["cards"] == [1]
    assert lora.lines("cards") == ["1 of 0, 1"]
    assert any(line.startswith("without recompute ") for line in lora.lines("why"))
    # The other card would halve the step once it is free.
    idle = lora.changes["idle cards"]
    assert idle["flags"] == "(once idle)"
    assert idle["sentence"].startswith("with card 0 to itself: fits with ")
    assert said_of(idle)[1] < 0.7 * best["time"]["step_s"]
    free = home / "free.json"
    free.write_text(workstation(0.2, 0.2).model_dump_json(by_alias=True), encoding="utf-8")
    later = Story(capsys, "Qwen/Qwen3-8B", "--machine", "free.json", "--method", "lora")
    assert later.plan["best"]["num_gpus"] == 2
    assert "is busy" not in later.text and "idle cards" not in later.changes


def test_one_rtx_4090_and_qlora(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    story = Story(capsys, "meta-llama/Llama-3.1-8B", "--method", "qlora", "--machine", "1xRTX4090")
    assert story.code == 0
    memory = story.plan["best"]["memory"]
    # 4.5 bits of 6.98 B parameters in the layers, bf16 for embedding and head (1.05 B).
    weights = next(phase for phase in memory["phases"] if phase["name"] == memory["peak_phase"])["parts"]["weights"]
    assert weights / GIB == pytest.approx((6.98e9 * 4.5 / 8 + 1.05e9 * 2) / GIB, rel=0.06)
    assert memory["headroom_bytes"] > 0
    assert story.choice["method"] == "qlora" and story.plan["best"]["alters"] == "nothing"
    assert re.search(r"43\.65 M train|41\.94 M train", story.text)
    assert len(story.lines("why")) >= 2
    explained = here(
        capsys, ["plan", "meta-llama/Llama-3.1-8B", "--method", "qlora", "--machine", "1xRTX4090", "--explain"]
    )
    assert "recompute full: frees " in explained.out


def test_four_a100_of_40_gb_and_lora_on_32_billion(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    story = Story(capsys, "Qwen/Qwen3-32B", "--method", "lora", "--machine", "4xA100-40GB")
    assert story.code == 0
    # 32.8 B bf16 parameters are 61 GiB: one card cannot hold them, four hold 15.3 each.
    assert story.plan["best"]["num_gpus"] == 4
    assert story.choice["sharding"] in ("fsdp", "zero3")
    peak = story.plan["best"]["memory"]["peak_phase"]
    phase = next(phase for phase in story.plan["best"]["memory"]["phases"] if phase["name"] == peak)
    assert phase["parts"]["weights"] / GIB == pytest.approx(32.76e9 * 2 / 4 / GIB, rel=0.03)
    assert any(
        re.match(rf"without sharding {story.choice['sharding']}: [\d.]+ GiB over the card", w)
        for w in story.lines("why")
    )
    misses = story.block("does not fit, closest first")
    assert len(misses) >= 4


def test_eight_h100_and_a_mixture_of_experts(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    story = Story(capsys, "Qwen/Qwen3-30B-A3B", "--machine", "8xH100-80GB")
    assert story.code == 0
    assert story.plan["architecture"]["parameters"]["active"] < 0.15 * story.plan["architecture"]["parameters"]["total"]
    # 16 bytes of 30.5 B over eight cards are 57 GiB each: sharded, on all of them.
    assert story.plan["best"]["num_gpus"] == 8
    assert story.plan["best"]["memory"]["device_bytes"] > 57 * GIB
    # Every rank loads 122 GB in fp32: the host needs a terabyte, which a named machine cannot promise.
    assert any("the host of a named machine is not known" in note for note in story.lines("note"))
    assert story.plan["best"]["memory"]["host_bytes"]["load"] > 8 * 0.95 * 122e9


def test_one_t4_without_bf16(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    story = Story(capsys, "Qwen/Qwen3-1.7B", "--machine", "1xT4", "--method", "lora")
    assert story.code == 0
    assert "note: T4 has no bf16 (compute capability 7.5): the run trains in fp16 with a loss scaler" in story.text
    assert (story.choice["weights"], story.choice["mixed_precision"]) == ("fp16", "fp16")
    full = Story(capsys, "Qwen/Qwen3-1.7B", "--machine", "1xT4")
    assert full.code == 3
    assert "lora" in full.changes
    assert all(change["candidate"]["fits"] for change in full.plan["changes"])


def test_a_laptop_without_a_gpu(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    host = Host(total_bytes=32 * GIB, available_bytes=20 * GIB, cores=8)
    laptop = Machine(origin="cpu", spec="local", host=host, notes=["no NVIDIA driver here; planning for the cpu"])
    write_files(home, {"laptop.json": laptop.model_dump_json(by_alias=True)})
    box = ("--machine", "laptop.json")
    small = Story(capsys, "Qwen/Qwen3-0.6B", *box, "--seq-len", "1024")
    assert small.code == 0
    assert "on CPU (8 cores, 20.0 GiB free)" in small.text
    assert "note: no NVIDIA driver here" in small.text
    assert small.choice["mixed_precision"] == "no"
    assert "in tensors per process" in small.lines("memory")[0]
    assert "the card" not in small.text
    # Hours a step: the smallest card that would do it is named with its seconds.
    card = small.changes["another card"]
    assert card["flags"].startswith("--machine 1x")
    assert said_of(card)[1] < 0.1 * small.plan["best"]["time"]["step_s"]
    large = Story(capsys, "Qwen/Qwen3-8B", *box)
    assert large.code == 3
    assert "GiB over what is free of the host" in large.text
    assert "another card" in large.changes and "more GPUs" not in large.changes


def test_what_is_new_is_short(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lines of people's questions have 100 columns at most; those of the table of candidates are as wide as it is."""
    write_files(home, {"box.json": workstation(19.0, 0.2).model_dump_json(by_alias=True)})
    asked = (
        ("Qwen/Qwen3-8B", "--machine", "box.json", "--method", "lora", "--explain"),
        ("Qwen/Qwen3-32B", "--method", "lora", "--machine", "4xA100-40GB", "--explain"),
        ("Qwen/Qwen3-1.7B", "--machine", "1xT4", "--explain"),
    )
    for words in asked:
        text = here(capsys, ["plan", *words]).out
        start = min(text.index(title) for title in ("what binds", "what would make the closest") if title in text)
        new = text[start : text.index("left out by the libraries' rules")]
        assert max(map(len, new.splitlines())) <= WIDTH, words
