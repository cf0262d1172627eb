"""The command line as its users meet it: in this process for speed, in a child where streams and signals matter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from launcher.cli import main

ROOT = Path(__file__).resolve().parents[2]
MODEL = "Qwen/Qwen3-8B"
H100 = ("--machine", "8xH100-80GB")
TINY_CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 1000,
}
"""A config.json of 210,240 parameters: two layers of the Llama family, head and embedding apart."""
DEAD_HUB = "http://127.0.0.1:9"
"""The discard port: nothing listens, and the answer is immediate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """How one command ended."""

    code: int
    out: str
    err: str


def command_environment(home: Path, **more: str) -> dict[str, str]:
    """Our own environment with nothing of the developer's: no hub, no caches, no switches."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRLFIT_", "XDG_"))}
    kept.pop("PYTHONUNBUFFERED", None)
    own = {
        "HF_HOME": str(home / "hf"),
        "HF_HUB_OFFLINE": "1",
        "XDG_STATE_HOME": str(home / "state"),
        "XDG_CACHE_HOME": str(home / "cache"),
        "XDG_DATA_HOME": str(home / "data"),
        "PYTHONPATH": str(ROOT),
    }
    return {**kept, **own, **more}


def here(capsys: pytest.CaptureFixture[str], words: Iterable[str]) -> Said:
    """Run a command in this process."""
    capsys.readouterr()
    code = main([str(word) for word in words])
    captured = capsys.readouterr()
    return Said(code=code, out=captured.out, err=captured.err)


def child(
    words: Iterable[str],
    *,
    cwd: Path,
    env: Mapping[str, str],
    stdin: int | None = subprocess.DEVNULL,
    timeout_s: float = 120.0,
) -> Said:
    """Run a command in a process of its own, the way that the installed script does."""
    done = subprocess.run(
        [sys.executable, "-m", "tui", *words],
        cwd=cwd,
        env=dict(env),
        stdin=stdin,
        capture_output=True,
        timeout=timeout_s,
        check=False,
    )
    return Said(
        code=done.returncode,
        out=done.stdout.decode("utf-8", "surrogateescape"),
        err=done.stderr.decode("utf-8", "surrogateescape"),
    )


def shell(line: str, *, cwd: Path, env: Mapping[str, str]) -> Said:
    """Run a line of bash in which $TRLFIT is the command: pipes, closed streams, full disks."""
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=cwd,
        env={**env, "TRLFIT": f"{sys.executable} -m tui"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=120,
        check=False,
    )
    return Said(code=done.returncode, out=done.stdout.decode(), err=done.stderr.decode())


def write_files(folder: Path, files: Mapping[str, str | bytes]) -> None:
    """Make the files, with the folders above them."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())


def listing(folder: Path) -> set[str]:
    """Every path below a folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def assert_refused(said: Said, code: int, *parts: str) -> None:
    """One line on stderr with all the parts in it, the documented code, and nothing on stdout."""
    assert "Traceback" not in said.err
    lines = said.err.splitlines()
    assert len(lines) == 1, said.err
    assert lines[0].startswith("trlfit: error: "), lines[0]
    for part in parts:
        assert part in lines[0], f"{part!r} is not in {lines[0]!r}"
    assert len(lines[0]) < 500, "a line that nobody reads"
    assert not lines[0].endswith((".", "!")), lines[0]
    assert said.code == code, lines[0]
    assert said.out == ""
