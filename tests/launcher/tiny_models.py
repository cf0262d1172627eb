"""Small real model folders, built once a session by the script that `make demo` uses."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "data"
CHILDREN = ROOT / "launcher" / "children"


@functools.cache
def tiny_model(family: str = "qwen3") -> Path:
    """A folder with random weights of two layers and a tokenizer trained on the example text."""
    folder = Path(tempfile.mkdtemp(prefix=f"tiny-{family}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    build(folder, "--family", family)
    return folder


@functools.cache
def templateless_model() -> Path:
    """The same model with no chat template, as base models ship."""
    folder = Path(tempfile.mkdtemp(prefix="tiny-base-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    shutil.copytree(tiny_model(), folder, dirs_exist_ok=True)
    (folder / "chat_template.jinja").unlink()
    return folder


def build(folder: Path, *flags: str) -> dict[str, object]:
    """Run make_tiny_model.py and return what it reports."""
    text = EXAMPLES / "train.jsonl"
    command = [sys.executable, str(CHILDREN / "make_tiny_model.py"), "--out", str(folder)]
    done = subprocess.run([*command, "--text", str(text), *flags], capture_output=True, text=True, check=True)
    report: dict[str, object] = json.loads(done.stdout)
    return report
