"""What one `plan --json` of a bundled model loads, and what it costs: nothing that only other commands need."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OWN = tuple(f"{ROOT / package}{os.sep}" for package in ("profiles", "planner", "launcher", "tui"))
PLAN = ["plan", "Qwen/Qwen3-8B", "--machine", "8xH100-80GB", "--json"]
NEVER = (
    "torch",
    "transformers",
    "trl",
    "accelerate",
    "peft",
    "datasets",
    "textual",
    "rich",
    "yaml",
    "huggingface_hub",
    "importlib.metadata",
    "psutil",
    "pynvml",
    "jinja2",
    "platformdirs",
    "subprocess",
    "asyncio",
    "email",
    "logging",
    "difflib",
)
"""Modules that a plan without a job file has no use for."""
MOST_CALLS = 110_000
"""Of our own functions. A tenth of a microsecond each would be 12 ms; an idle machine of 2024 needs 0.26 s in all."""


def environment(tmp_path: Path) -> dict[str, str]:
    """Bytecode is written and read, as in any installation."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HF_", "COV"))}
    return {**kept, "PYTHONPATH": str(ROOT), "PYTHONPYCACHEPREFIX": str(tmp_path / "bytecode")}


def loaded(words: list[str], tmp_path: Path) -> set[str]:
    """Modules in a process that has run the console script's entry with ``words``."""
    code = (
        "import sys\n"
        f"sys.argv = ['trlfit', *{words!r}]\n"
        "from tui.__main__ import main\n"
        "code = main()\n"
        "print('\\n'.join(sorted(sys.modules)), file=sys.stderr)\n"
        "sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout)["best"] is not None
    return set(done.stderr.split("\n"))


def test_a_plan_loads_only_what_it_needs(tmp_path: Path) -> None:
    found = loaded(PLAN, tmp_path)
    assert {"pydantic", "planner.search.search", "launcher.cli", "tui.__main__"} <= found
    assert sorted(found & set(NEVER)) == []


@pytest.mark.parametrize(
    ("more", "module"),
    [
        (["--method", "lora"], "planner.memory.adapters"),
        (["--trl", "max_steps=5"], "yaml"),
        (["--goal", "longest"], "planner.search.longest"),
    ],
    ids=["lora", "trl", "longest"],
)
def test_other_plans_load_what_they_need(more: list[str], module: str, tmp_path: Path) -> None:
    """The probe sees modules, and a flag that needs one finds it."""
    assert module in loaded([*PLAN, *more], tmp_path)


def test_other_commands_modules_stay_out(tmp_path: Path) -> None:
    found = {name for name in loaded(PLAN, tmp_path) if name.startswith(("launcher.", "tui."))}
    assert found.isdisjoint(
        {
            "launcher.commands.run",
            "launcher.commands.ledger",
            "launcher.commands.info",
            "launcher.running.runs",
            "launcher.writing.data",
            "launcher.text.plan",
            "launcher.nvml.gpus",
            "launcher.inputs.host",
            "launcher.inputs.strict_yaml",
            "launcher.inputs.stack_child",
            "tui.app",
        }
    )


def test_a_plan_is_little_work(tmp_path: Path) -> None:
    """Calls of our own functions, imports included: the same number on any machine, however busy.

    What they take in seconds, `benchmarks/cold_start.py` measures.
    """
    code = (
        "import sys\n"
        "calls = 0\n"
        "def count(frame, event, arg):\n"
        "    global calls\n"
        f"    calls += event == 'call' and frame.f_code.co_filename.startswith({OWN!r})\n"
        f"sys.argv = ['trlfit', *{PLAN!r}]\n"
        "sys.setprofile(count)\n"
        "from tui.__main__ import main\n"
        "code = main()\n"
        "sys.setprofile(None)\n"
        "print(calls, file=sys.stderr)\n"
        "sys.exit(code)"
    )
    words = [sys.executable, "-c", code]
    done = subprocess.run(
        words, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, check=True, timeout=60
    )
    assert 1_000 < int(done.stderr) < MOST_CALLS
