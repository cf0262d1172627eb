"""What is loaded at run time. The import graph itself is import-linter's: see `make check`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STACK = {"torch", "transformers", "trl", "accelerate", "peft", "datasets", "deepspeed"}
SCREEN = {"textual", "rich"}


def loaded(code: str) -> set[str]:
    """Top-level modules in a fresh Python after ``code``."""
    probe = f"{code}\nimport json, sys\nprint(json.dumps(sorted({{m.partition('.')[0] for m in sys.modules}})))"
    done = subprocess.run(
        [sys.executable, "-c", probe],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def modules(package: str) -> list[str]:
    """Every module of a package but the scripts for the training Python."""
    found = [path.relative_to(ROOT) for path in (ROOT / package).rglob("*.py")]
    names = [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in found]
    outside = ("launcher.children", "launcher.templates", "launcher.__main__", "tui.__main__")
    return sorted(name for name in names if not name.startswith(outside))


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("profiles", {"planner", "launcher", "tui", "pydantic", "yaml"} | SCREEN | STACK),
        ("planner", {"launcher", "tui", "yaml", "psutil", "pynvml"} | SCREEN | STACK),
        ("launcher", {"tui"} | SCREEN | STACK),
        ("tui", STACK),
    ],
)
def test_a_whole_package_loads_nothing_from_above_and_no_training_stack(package: str, forbidden: set[str]) -> None:
    names = modules(package)
    assert names
    found = loaded("\n".join(f"import {name}" for name in names))
    assert package in found
    assert found & forbidden == set()


def test_the_command_line_loads_no_textual() -> None:
    found = loaded("import launcher.cli")
    assert "launcher" in found
    assert found & (SCREEN | STACK) == set()


def test_the_console_script_loads_neither_textual_nor_the_commands() -> None:
    found = loaded("import tui.__main__")
    assert "tui" in found
    assert found & (SCREEN | STACK | {"launcher"}) == set()


@pytest.mark.parametrize("door", ["tui.__main__", "launcher.__main__"])
def test_next_to_nothing_is_imported_before_ctrl_c_is_caught(door: str) -> None:
    package = door.partition(".")[0]
    code = (
        "import sys\nbefore = set(sys.modules)\n"
        f"from {door} import main\n"
        "new = set(sys.modules) - before\n"
        f"assert new <= {{'__future__', 'gc', {package!r}, {door!r}}}, new\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'argparse':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "sys.argv = ['trlfit', 'plan']\n"
        "sys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_the_probe_sees_what_is_loaded() -> None:
    assert {"textual", "rich"} <= loaded("import tui.app")


def test_a_whole_plan_loads_no_training_stack() -> None:
    command = ["plan", "Qwen/Qwen3-8B", "--machine", "8xH100-80GB", "--json"]
    code = "import contextlib, io, launcher.cli\nwith contextlib.redirect_stdout(io.StringIO()):\n"
    code += f"    assert launcher.cli.main({command!r}) == 0"
    assert loaded(code) & (SCREEN | STACK | {"tui"}) == set()
