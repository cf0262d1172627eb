"""What is installed: the four packages with their data, and the console script."""

from __future__ import annotations

import configparser
import json
import os
import subprocess
import sys
import zipfile
from email.parser import Parser
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("profiles", "planner", "launcher", "tui")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built with what is installed here: nothing is fetched."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    done = subprocess.run([*command, "-w", str(folder), str(ROOT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def test_only_the_four_packages(wheel: Path, names: set[str]) -> None:
    assert wheel.name == "trlfit-0.1.0-py3-none-any.whl"
    assert {name.partition("/")[0] for name in names} == {*PACKAGES, "trlfit-0.1.0.dist-info"}


def test_every_file_of_the_packages(names: set[str]) -> None:
    here = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert here == {name for name in names if not name.startswith("trlfit-")}


@pytest.mark.parametrize(
    "name",
    [
        "profiles/cards.json",
        "profiles/models/index.json",
        "profiles/models/Qwen--Qwen3-8B.json",
        "profiles/releases.toml",
        "profiles/stacks.toml",
        "launcher/children/inspect_stack.py",
        "launcher/children/check_data.py",
        "launcher/children/validate_run.py",
        "launcher/children/make_tiny_model.py",
        "launcher/templates/train.py.tmpl",
    ],
)
def test_data_and_scripts_are_there(name: str, names: set[str]) -> None:
    assert name in names


def test_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        metadata = Parser().parsestr(archive.read("trlfit-0.1.0.dist-info/METADATA").decode())
        entry_points = configparser.ConfigParser()
        entry_points.read_string(archive.read("trlfit-0.1.0.dist-info/entry_points.txt").decode())
        assert "trlfit-0.1.0.dist-info/licenses/LICENSE" in archive.namelist()
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    # Who plans needs no torch: the training stack is an extra.
    plain = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert not [line for line in plain if line.startswith(("torch", "transformers", "trl", "accelerate", "datasets"))]
    assert dict(entry_points["console_scripts"]) == {"trlfit": "tui.__main__:main"}


def test_the_console_script_is_a_function() -> None:
    assert callable(import_module("tui.__main__").main)


def test_it_works_from_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    where = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}

    def trlfit(*arguments: str) -> str:
        command = [sys.executable, "-P", "-c", "import sys; from tui.__main__ import main; sys.exit(main())"]
        done = subprocess.run([*command, *arguments], cwd=tmp_path, env=where, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    assert len(json.loads(trlfit("models", "--json"))) == 73
    assert len(json.loads(trlfit("cards", "--json"))) == 36
    plan = json.loads(trlfit("plan", "Qwen/Qwen3-8B", "--machine", "8xH100-80GB", "--json"))
    assert plan["best"]["fits"]
