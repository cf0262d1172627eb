"""Builds the stand-in for NVML and describes machines to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("nvml_stub.c")
ROOT = Path(__file__).resolve().parents[3]

H100: dict[str, object] = {
    "name": "NVIDIA H100 80GB HBM3",
    "total_mib": 81559,
    "reserved_mib": 551,
    "used_mib": 4,
    "capability": "9.0",
    "generation": 5,
    "width": 16,
    "utilisation": 0,
    "temperature": 31,
    "power_mw": 70120,
    "limit_mw": 700000,
    "compute_mode": 0,
    "virtualization": 0,
    "mig": 0,
    "links": " ".join(["switch"] * 18),
}

RTX3090: dict[str, object] = {
    "name": "NVIDIA GeForce RTX 3090",
    "total_mib": 24576,
    "reserved_mib": 317,
    "used_mib": 2,
    "capability": "8.6",
    "generation": 4,
    "width": 16,
    "utilisation": 0,
    "temperature": 40,
    "power_mw": 22000,
    "limit_mw": 350000,
    "compute_mode": 0,
    "virtualization": 0,
}

A100_SLICED: dict[str, object] = {
    "name": "NVIDIA A100-SXM4-40GB",
    "total_mib": 40960,
    "reserved_mib": 429,
    "used_mib": 38,
    "capability": "8.0",
    "generation": 4,
    "width": 16,
    "temperature": 33,
    "power_mw": 45000,
    "limit_mw": 400000,
    "compute_mode": 0,
    "virtualization": 0,
    "mig": 1,
    "links": " ".join(["switch"] * 12),
    # Positions are not consecutive: the second slice was made after one was destroyed.
    "mig.0.uuid": "MIG-d184f67c-c95f-5ef2-a935-195bd0094fbd",
    "mig.0.name": "NVIDIA A100-SXM4-40GB MIG 4g.20gb",
    "mig.0.total_mib": 19968,
    "mig.0.used_mib": 19,
    "mig.0.reserved_mib": 0,
    "mig.0.gpu_instance": 1,
    "mig.0.compute_instance": 0,
    "mig.0.compute_slices": 4,
    "mig.2.uuid": "MIG-d184f67c-0000-5ef2-a935-195bd0094fbd",
    "mig.2.name": "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
    "mig.2.total_mib": 4864,
    "mig.2.used_mib": 2019,
    "mig.2.reserved_mib": 0,
    "mig.2.gpu_instance": 9,
    "mig.2.compute_instance": 0,
    "mig.2.compute_slices": 1,
}


def machine(*cards: dict[str, object], **system: object) -> str:
    """The text that the stub answers from; every card gets a UUID and a PCI bus of its own."""
    lines = {"driver": "580.65.06", "cuda": 13000, "cards": len(cards)} | system
    text = [f"{key}={value}" for key, value in lines.items()]
    for index, card in enumerate(cards):
        own = {"uuid": uuid(index), "bus": f"0x{0x10 + index:02x}"} | card
        text += [f"{index}.{key}={value}" for key, value in own.items()]
    return "\n".join(text) + "\n"


def uuid(index: int) -> str:
    """The UUID that `machine` gives the card."""
    return f"GPU-{index:08x}-aaaa-bbbb-cccc-{index:012x}"


def build(folder: Path, *flags: str) -> Path:
    """Compile the stub as libnvidia-ml.so.1 into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "libnvidia-ml.so.1"
    command = ["gcc", "-Wall", "-Werror", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1"]
    subprocess.run([*command, *flags, "-o", str(library), str(SOURCE)], check=True)
    return folder


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmlStub:
    """Runs Python with the stand-in where the driver's library would be."""

    new: Path
    old: Path
    folder: Path
    extra: dict[str, str] = field(default_factory=dict[str, str])

    def environ(self, text: str, *, visible: str | None = None, old: bool = False) -> dict[str, str]:
        """The environment of a process that finds the machine ``text`` through NVML."""
        shape = self.folder / "machine.txt"
        shape.write_text(text, encoding="utf-8")
        environ = {key: value for key, value in os.environ.items() if "CUDA" not in key}
        environ |= self.extra
        environ["LD_LIBRARY_PATH"] = str(self.old if old else self.new)
        environ["TRLFIT_NVML_STUB"] = str(shape)
        environ["PYTHONPATH"] = str(ROOT)
        if visible is not None:
            environ["CUDA_VISIBLE_DEVICES"] = visible
        return environ

    def ask(self, code: str, text: str, *, visible: str | None = None, old: bool = False) -> Any:
        """What ``code`` prints as JSON in a Python on that machine; it must not write to stderr."""
        child = subprocess.run(
            [sys.executable, "-W", "error", "-c", code],
            env=self.environ(text, visible=visible, old=old),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert child.returncode == 0 and not child.stderr, child.stderr
        return json.loads(child.stdout)

    def cards(self, text: str, *, visible: str | None = None, old: bool = False) -> dict[str, Any]:
        """`read_cards` on that machine, as a dictionary, with the balance of NVML's inits."""
        seen: dict[str, Any] = self.ask(_READ, text, visible=visible, old=old)
        return seen


_READ = """
import json
from launcher.nvml.gpus import read_cards
reading = read_cards()
import pynvml
print(json.dumps({
    "cards": [card.model_dump() for card in reading.cards],
    "driver": reading.driver,
    "cuda": reading.cuda,
    "notes": list(reading.notes),
    "answered": reading.answered,
    "left_open": pynvml.nvmlLib.stub_opened(),
}))
"""
