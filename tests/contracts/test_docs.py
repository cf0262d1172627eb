"""The pages and the help agree with the code: constants, knobs, fields, flags, keys, paths, rules, links, pictures."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from statistics import mean
from typing import Any, get_args

import pytest

from benchmarks.times import everything
from launcher import cli
from launcher.commands import measure, route
from launcher.ending.history import HistoryRow
from launcher.ending.log_evidence import Shortage
from launcher.ending.outcomes import Outcome
from launcher.ending.run_metrics import Metrics, Predicted
from launcher.errors import UsageError
from launcher.flags import FLAG_FIELDS, KNOBS
from launcher.running.run_record import RunRecord
from planner import choice
from planner.advice.comparison import compare
from planner.advice.old_plan import OldPlan, held_against
from planner.job import Job
from planner.pins import PARSERS
from planner.plan import Plan
from planner.planning import make_plan
from profiles.releases import newest_known
from tests.planner.replay import inputs_of
from tui.keys import EVERYWHERE, SCREENS, Key, shown_key

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    *sorted(DOCS.glob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]
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
    names = ("time.step", "time.loss", "time.rates", "time.links", "hardware", "machine_hardware")
    modules = [import_module(f"planner.{name}") for name in names]
    numbers = {
        name
        for module in modules
        for name, value in vars(module).items()
        if name.isupper() and isinstance(value, float)
    }
    listed = {name for _, name, _ in CONSTANT.findall(text_of("time.md"))}
    assert numbers == listed


def test_the_error_of_the_fit_is_what_the_page_says() -> None:
    errors = [abs(timed.error) for timed in everything() if timed.fitted and not timed.group.startswith("mle")]
    said = f"fitted together to {len(errors)} published step times"
    page = " ".join(text_of("time.md").split())
    assert said in page
    assert f"mean error {100 * mean(errors):.1f} %, worst {100 * max(errors):.1f} %" in page


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


ROOMS = {"planner": "Rooms of the planner:", "launcher": "Rooms of the launcher:", "tui": "Rooms of the screens:"}


@pytest.mark.parametrize("package", ROOMS)
def test_every_module_has_its_room(package: str) -> None:
    """Modules of a package and its folders are named, and what a row names is there or in the row's folders."""
    table = text_of("architecture.md").partition(ROOMS[package])[2].strip().partition("\n\n")[0]
    named = {row: re.findall(r"`([a-z_0-9]+/?)`", row) for row in table.splitlines()}
    here = {p.stem for p in (ROOT / package).glob("*.py") if not p.stem.startswith("_")}
    here |= {f"{p.parent.name}/" for p in (ROOT / package).glob("*/__init__.py")}
    assert here - {name for names in named.values() for name in names} == set()
    for names in named.values():
        folders = [name for name in names if name.endswith("/")]
        inside = {p.stem for folder in folders for p in (ROOT / package / folder).glob("*.py")}
        assert set(names) - here - inside == set()


def test_names_of_modules_lead_somewhere() -> None:
    """Dotted names in prose, of a module or of what it holds: in backticks, of what is raised, and on pages."""
    package = r"(?:profiles|planner|launcher|tui)(?:\.\w+)+"
    modules = [
        p for name in (*ROOMS, "profiles", "tests", "benchmarks", "scripts") for p in (ROOT / name).rglob("*.py")
    ]
    prose = [(p, rf"``?({package})`|^ +({package}): ") for p in modules]
    prose += [(p, rf"(?<![\w./-])({package})") for p in PAGES]
    lost = [
        f"{path.name}: {name}"
        for path, pattern in prose
        for found in re.finditer(pattern, path.read_text(encoding="utf-8"), re.MULTILINE)
        if not _is_there(name := found[1] or found[2])
    ]
    assert lost == []


def _is_there(dotted: str) -> bool:
    *path, name = dotted.split(".")
    if (ROOT.joinpath(*path, name)).is_dir() or ROOT.joinpath(*path, f"{name}.py").is_file():
        return True
    module = ROOT.joinpath(*path).with_suffix(".py")
    return module.is_file() and re.search(rf"\b{name}\b", module.read_text(encoding="utf-8")) is not None


@pytest.mark.parametrize(
    "kind", [HistoryRow, Outcome, Metrics, Predicted, Shortage, RunRecord], ids=lambda k: k.__name__
)
def test_every_field_of_a_run_is_explained(kind: type) -> None:
    page = text_of("run-folder.md")
    assert [field.name for field in fields(kind) if f"`{field.name}`" not in page] == []


def test_every_format_is_named() -> None:
    """Those that somebody else may read; traces are between us and our child, and our cache."""
    modules = [p.read_text(encoding="utf-8") for name in ("planner", "launcher") for p in (ROOT / name).rglob("*.py")]
    formats = {found for text in modules for found in re.findall(r"\"(trlfit\.[a-z-]+/\d)\"", text)}
    named = set(re.findall(r"`(trlfit\.[a-z-]+/\d)`", text_of("architecture.md")))
    assert named == formats - {"trlfit.trace/1", "trlfit.coefficients/1"}


def test_every_variable_of_ours_is_named() -> None:
    """But for the one by which the screens ask a command of theirs for events."""
    modules = [p for name in ("launcher", "tui") for p in (ROOT / name).rglob("*.py")]
    ours = {found for p in modules for found in re.findall(r"\bTRLFIT_[A-Z]+\b", p.read_text(encoding="utf-8"))}
    pages = text_of("commands.md") + text_of("run-folder.md")
    assert {name for name in ours if f"`{name}" not in pages} == {"TRLFIT_STEPS"}


def test_every_page_is_linked() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [page.name for page in DOCS.glob("*.md") if f"(docs/{page.name})" not in readme] == []


def test_the_rules_page_is_current() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/rules_page.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_table_of_probes_is_current() -> None:
    done = subprocess.run([sys.executable, "benchmarks/probe_depth.py", "--check"], cwd=ROOT, check=False)
    assert done.returncode == 0, "python benchmarks/probe_depth.py --markdown"


def words_of(picture: Path) -> str:
    """All text of an SVG, with plain spaces."""
    root = ElementTree.parse(picture).getroot()
    found = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    return " ".join(" ".join(found).split())


def test_the_picture_is_drawn_from_the_app(tmp_path: Path) -> None:
    drawn = tmp_path / "tui.svg"
    subprocess.run([sys.executable, "scripts/picture.py", "-o", str(drawn)], cwd=ROOT, check=True, timeout=300)
    new, kept = words_of(drawn), words_of(DOCS / "tui.svg")
    for words in ("Qwen3-8B · sft full · 1,048,576 · 8xH100-80GB", "# train shard recompute offload", "Peak in "):
        assert words in new
        assert words in kept
    assert "url(" not in re.sub(r"url\(#[\w-]+\)", "", drawn.read_text(encoding="utf-8"))


def test_the_figure_of_accuracy_and_the_readmes_numbers_are_current() -> None:
    """`make accuracy` renews them."""
    done = subprocess.run(
        [sys.executable, "scripts/accuracy_figure.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_figure_of_accuracy_shows_every_run_twice_and_needs_no_colour() -> None:
    """A marker in each panel and one in the legend for each kind; kinds differ by shape and filling."""
    text = (DOCS / "accuracy.svg").read_text(encoding="utf-8")
    assert "prefers-color-scheme: dark" in text
    assert "url(" not in text and "href" not in text
    kinds: dict[tuple[str, str, int], int] = {}
    for element in ElementTree.fromstring(text).iter():
        kind, _, filling = element.get("class", "").partition(" ")
        if filling in ("one", "several"):
            corners = len(element.get("points", "").split())
            kinds[kind, filling, corners] = kinds.get((kind, filling, corners), 0) + 1
    shapes = {"full": 0, "lora": 3, "qlora": 4}
    assert set(kinds) == {(kind, filling, n) for kind, n in shapes.items() for filling in ("one", "several")}
    assert sum(kinds.values()) == 2 * 49 + len(kinds)


def test_every_field_of_an_old_plan_and_of_a_comparison() -> None:
    inputs = inputs_of({"model": "Qwen/Qwen3-0.6B", "machine": "1xH100-80GB"}, stack=dict(newest_known()))
    best = make_plan(inputs).document["best"]
    sizes = {name: best["memory"][name] for name in ("device_bytes", "allocated_bytes")}
    chosen = choice.Choice.from_json(best["choice"])
    old = OldPlan(job={}, machine={}, versions={}, choice=chosen, step_s=None, **sizes)
    page = text_of("plan.md")
    sections = re.split(r"^## ", page, flags=re.MULTILINE)
    for title, document in (("An old plan", held_against(inputs, old)), ("Two candidates", compare(inputs, 1, 2))):
        section = next(text for text in sections if text.startswith(title))
        assert {
            name for name in document if f"`{name}`" not in section and document[name] != document["schema"]
        } == set()
        assert document["schema"] in section


def flags_of(name: str) -> dict[str, argparse.Action]:
    """Every flag of a command."""
    command, parser = cli.COMMANDS[name], argparse.ArgumentParser()
    command.flags(parser)
    if command.json:
        parser.add_argument("--json", help="as `build_parser` gives it")
    return parser._option_string_actions  # pyright: ignore[reportPrivateUsage]


COMMAND_LINE = re.compile(r"(?:^|`)(?:trlfit )?(" + "|".join(cli.COMMANDS) + r")\b([^`\n]*?)(?=`|   |$)", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_command_has_the_flags_that_a_page_gives_it(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    wrong = [
        f"{name} {flag}"
        for name, words in COMMAND_LINE.findall(text)
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]*", words)
        if flag not in flags_of(name)
    ]
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_file_that_a_page_names_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    folders = "planner|launcher|tui|profiles|scripts|benchmarks|tests|examples"
    named = set(re.findall(rf"`((?:{folders})/[\w./*-]+)", text))
    named = {name for name in named if "CARD-DATE" not in name}  # written by a card's own benchmark
    assert [name for name in sorted(named) if not any(ROOT.glob(name.rstrip("/.")))] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_module_that_a_page_names_is_there(page: Path) -> None:
    for name in set(re.findall(r"`((?:planner|launcher|tui|profiles)(?:\.\w+)+)", page.read_text(encoding="utf-8"))):
        module, _, attribute = name.rpartition(".")
        found = ROOT / (name.replace(".", "/") + ".py"), ROOT / name.replace(".", "/")
        assert any(path.exists() for path in found) or hasattr(import_module(module), attribute), name


def test_the_keys_of_the_page_of_screens_are_those_of_the_app() -> None:
    def rows(keys: tuple[Key, ...]) -> list[tuple[str, str, str]]:
        return [(shown_key(key.key), key.word, key.says) for key in keys]

    page = text_of("screens.md")
    keys = page[page.index("## Keys") : page.index("## The line at the foot")]
    sections = dict(re.findall(r"^### (?:\d )?(\w+)$(.*?)(?=^###|\Z)", keys, re.MULTILINE | re.DOTALL))
    tables = {
        name: re.findall(r"^\| `(.+)` \| (.+?) \| (.+?) \|$", text, re.MULTILINE) for name, text in sections.items()
    }
    assert tables == {"Everywhere": rows(EVERYWHERE), **{name: rows(found) for name, found in SCREENS.items()}}


def test_every_screen_is_on_the_page_of_screens() -> None:
    listed = re.findall(r"^\| (\d) (\w+) \|", text_of("screens.md"), re.MULTILINE)
    assert listed == [(str(number), name) for number, name in enumerate(SCREENS, 1)]


# Help


def test_the_help_of_pins_names_every_knob() -> None:
    assert set(KNOBS) == set(PARSERS)


def test_the_defaults_that_the_help_says_are_those_of_a_job() -> None:
    job = Job(model="a/model").model_dump()
    for destination, field in FLAG_FIELDS.items():
        about = flags_of("plan")["--" + destination.replace("_", "-")].help or ""
        said = re.search(r"\(default (\S+)\)", about)
        if said is None:
            continue
        value: Any = job
        for part in field.split("."):
            value = value[part]
        assert said[1] == {"[]": "nothing", "False": "off"}.get(str(value), str(value)), field


def test_the_limits_that_the_help_of_probe_says() -> None:
    said = re.findall(r"\d+", flags_of("probe")["--limit"].help or "")
    assert [float(number) for number in said] == [measure.RATES_LIMIT_S, route.LIMIT_S, measure.JOB_LIMIT_S]


@pytest.mark.parametrize(
    "line", [line for command in cli.COMMANDS.values() for line in command.examples if line.startswith("trlfit ")]
)
def test_an_example_of_the_help_is_understood(line: str) -> None:
    try:
        cli.build_parser().parse_args(shlex.split(line)[1:])
    except UsageError as error:
        pytest.fail(str(error))


def test_help_keeps_to_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for words in ([], *([name] for name in cli.COMMANDS)):
        assert cli.main([*words, "--help"]) == 0
        assert [line for line in capsys.readouterr().out.splitlines() if len(line) > 80] == []


def test_every_flag_has_a_word_of_help() -> None:
    mute = [f"{name} {flag}" for name in cli.COMMANDS for flag, action in flags_of(name).items() if not action.help]
    assert mute == []
