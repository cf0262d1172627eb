"""The pages agree with the code: constants, knobs, fields, rules, links, and the picture."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import pytest

from launcher.flags import FLAG_FIELDS
from planner import choice
from planner.job import Job
from planner.pins import PARSERS
from planner.plan import Plan

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.glob("*.md"))]
CONSTANT = re.compile(r"^\| `(planner(?:\.\w+)+)\.([A-Z][A-Z0-9_]*)` \| (\S+) \|", re.MULTILINE)


def text_of(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("page", "module", "name", "value"),
    [(page, *found) for page in ("memory.md", "time.md") for found in CONSTANT.findall(text_of(page))],
)
def test_a_constant_has_the_value_of_the_code(page: str, module: str, name: str, value: str) -> None:
    assert getattr(import_module(module), name) == float(value)


def test_the_constants_of_the_time_model_are_all_there() -> None:
    module = import_module("planner.step_time")
    numbers = {name for name, value in vars(module).items() if name.isupper() and isinstance(value, float)}
    listed = {name for _, name, _ in CONSTANT.findall(text_of("time.md"))}
    assert numbers == listed - {"CPU_CORE_FLOPS", "CPU_BANDWIDTH"}


def test_every_knob_and_its_values() -> None:
    page = text_of("plan.md")
    knobs = page[page.index("## Knobs") : page.index("## Fields")]
    assert {knob for knob in PARSERS if f"`{knob}`" not in knobs} == set()
    words = [
        *choice.LOSS_PATHS,
        *choice.RECOMPUTES,
        *choice.OFFLOAD_TARGETS,
        *choice.SHARDINGS,
        *get_args(choice.Weights),
        *get_args(choice.MixedPrecision),
        *get_args(choice.Attention),
    ]
    assert [word for word in words if f"`{word}`" not in knobs] == []


def test_every_field_of_a_plan() -> None:
    page = text_of("plan.md")
    schema: dict[str, Any] = Plan.model_json_schema(by_alias=True)
    fields = set(schema["properties"])
    for model in ("PlannedCandidate", "Memory", "Time", "PlannedChange"):
        fields |= set(schema["$defs"][model]["properties"])
    fields -= {"schema", "candidate", "sentence"}  # named in words
    assert {field for field in fields if f"`{field}`" not in page} == set()


def test_every_field_of_a_job_and_its_flag() -> None:
    page = text_of("job.md")
    fields = [name for name in Job.model_fields if name not in ("lora", "data")]
    assert [name for name in fields if f"| `{name}` |" not in page] == []
    for destination, field in FLAG_FIELDS.items():
        (row,) = re.findall(rf"^\| `{re.escape(field)}` \| (.*?) \|", page, re.MULTILINE)
        assert f"--{destination.replace('_', '-')}" in row


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    lost = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert lost == []


def test_every_page_is_linked() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [page.name for page in DOCS.glob("*.md") if f"(docs/{page.name})" not in readme] == []


def test_the_rules_page_is_current() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/rules_page.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def words_of(picture: Path) -> str:
    """All text of an SVG, with plain spaces."""
    root = ElementTree.parse(picture).getroot()
    found = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    return " ".join(" ".join(found).split())


def test_the_picture_is_drawn_from_the_app(tmp_path: Path) -> None:
    drawn = tmp_path / "tui.svg"
    subprocess.run([sys.executable, "scripts/picture.py", "-o", str(drawn)], cwd=ROOT, check=True, timeout=300)
    new, kept = words_of(drawn), words_of(DOCS / "tui.svg")
    for words in ("Qwen/Qwen3-8B sft full 1,048,576 tokens", "# GiB free step GPUs shard recompute offload loss"):
        assert words in new
        assert words in kept
    assert "url(" not in re.sub(r"url\(#[\w-]+\)", "", drawn.read_text(encoding="utf-8"))
