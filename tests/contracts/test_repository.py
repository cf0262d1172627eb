"""The files around the code: licence, changes, versions, pins, and what must not be in any of them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from launcher.doctor import REQUIRED
from launcher.inputs.job_file import resolve_job

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
# Put together here, so that this file does not hold them.
MACHINE_PATHS = [f"/{name}/" for name in ("work", "root", "opt/wheels", "opt/pypi", "tmp/pytest-of")]
REGISTRIES = ["pypi" + ".org", "pythonhosted" + ".org", "registry.npmjs" + ".org", "deb.debian" + ".org"]


def tracked() -> list[Path]:
    """Files under version control."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a clone")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


def test_licence() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text and "Version 2.0, January 2004" in text
    assert PROJECT["project"]["license"] == "Apache-2.0"


def test_one_version() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## \[([\d.]+)\] - (\d{4}-\d\d-\d\d|unreleased)$", changes, re.MULTILINE)
    assert versions[0][0] == PROJECT["project"]["version"]
    kinds = set(re.findall(r"^### (\w+)$", changes, re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_no_paths_of_one_machine_and_no_registry_hosts() -> None:
    found: list[str] = []
    for path in tracked():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for word in [*MACHINE_PATHS, *REGISTRIES]:
            if word in text:
                found.append(f"{path.relative_to(ROOT)}: {word}")
    assert found == []


def test_pins_cover_what_is_required() -> None:
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    )
    assert pins["torch"] == "2.13.0"
    project, groups = PROJECT["project"], PROJECT["dependency-groups"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["train"], *groups["dev"]]
    names = {re.split(r"[\[<>=!~ ]", requirement)[0] for requirement in wanted}
    assert names - pins.keys() == set()


def test_example_jobs_load() -> None:
    jobs = sorted((ROOT / "examples").glob("*.yaml"))
    assert len(jobs) >= 3
    for path in jobs:
        job, origins = resolve_job(path, {}, {})
        assert origins["model"] == path.name
        if job.data.dataset is not None:
            assert (ROOT / job.data.dataset).is_file()


def test_example_data_is_what_its_page_says() -> None:
    folder = ROOT / "examples" / "data"
    page = (folder / "README.md").read_text(encoding="utf-8")
    for name, count, named in re.findall(r"^\| `(\w+\.jsonl)` \| (\d+) \| ([^:]+):", page, re.MULTILINE):
        columns = set(re.findall(r"`(\w+)`", named))
        rows = [json.loads(line) for line in (folder / name).read_text(encoding="utf-8").splitlines()]
        assert len(rows) == int(count)
        assert all(set(row) == columns and all(row.values()) for row in rows)
    assert set(re.findall(r"^\| `(\w+\.jsonl)`", page, re.MULTILINE)) == {p.name for p in folder.glob("*.jsonl")}


def test_make_knows_what_the_readme_names() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    pages = [ROOT / "README.md", ROOT / ".ci" / "run", *(ROOT / "docs").glob("*.md")]
    named = {
        word
        for page in pages
        for word in re.findall(
            r"\bmake (demo|test|check|format|docs|\w+)\b(?=`| +#|$)", page.read_text("utf-8"), re.MULTILINE
        )
    }
    assert {"demo", "test", "check"} <= named
    assert named <= targets


def test_the_doctor_asks_for_what_the_package_installs() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    assert dict(line.split(">=") for line in extras["train"]) == {name: least for name, least, _ in REQUIRED}
