"""What the README and the page of commands show is true: commands run, job files are jobs, figures are computed."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest
import yaml

from launcher import cli
from launcher.errors import ExitCode
from planner.job import DataSpec, Job
from profiles.cards import load_cards
from profiles.models import find_model, list_models
from tests.planner.test_memory_measured import ALLOCATED
from tests.planner.test_memory_traced import RAN, peak_error

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
REFERENCE = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")


def blocks(page: str) -> list[tuple[str, str]]:
    """(language, text) of the fenced blocks."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def commands(page: str) -> list[str]:
    """Lines of its blocks that call trlfit."""
    shown = "".join(text for language, text in blocks(page) if not language)
    return [line for line in shown.splitlines() if "trlfit " in line]


COMMANDS = list(dict.fromkeys(commands(README) + commands(REFERENCE)))
OF_A_RUN = [line for line in COMMANDS if line.split()[1] in ("write", "launch", "watch", "stop", "runs")]
OTHERS = [line for line in COMMANDS if line not in OF_A_RUN]
JOBS = sorted((ROOT / "examples").glob("*.yaml"))
ANSWERS = {
    # 8 B parameters in fp32 fit few hosts.
    "trlfit plan Qwen/Qwen3-8B --machine cpu --seq-len 512": {0, 3},
    # A planner without the training stack lacks it.
    "trlfit doctor": {0, 4},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the repository's examples, and a history of its own."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRLFIT_DATA", str(tmp_path / "history"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


def test_every_command_is_shown() -> None:
    assert {line.split()[1] for line in COMMANDS} == set(cli.COMMANDS) - {"models", "schema"}
    assert "`trlfit models`" in README
    assert "`trlfit schema job`" in (ROOT / "docs" / "job.md").read_text(encoding="utf-8")


def test_the_commands_are_said_as_their_help_says_them() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*?)(?: \(\[.*\))? \|$", REFERENCE, re.MULTILINE)
    listed = [row for row in rows if row[0] in cli.COMMANDS]
    assert listed == [(name, command.help) for name, command in cli.COMMANDS.items()]


@pytest.mark.parametrize("line", OTHERS)
def test_a_command_runs(line: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(line)
    assert words[0] == "trlfit"
    code = cli.main(words[1:])
    shown = capsys.readouterr()
    assert code in ANSWERS.get(line, {0}), shown.err
    assert shown.out.strip() and "bug in trlfit" not in shown.err


@pytest.mark.launch
def test_the_commands_of_a_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the order of the page, on a smaller model than the demo's."""
    assert [line.split()[1] for line in OF_A_RUN] == ["write", "launch", "watch", "stop", "runs"]
    sizes = ["--hidden", "64", "--intermediate", "128", "--layers", "2", "--vocab", "512"]
    maker = ["launcher/children/make_tiny_model.py", "--out", str(folder / "demo-runs" / "tiny")]
    text = ["--text", "examples/data/train.jsonl"]
    subprocess.run([sys.executable, *maker, *text, *sizes], cwd=ROOT, check=True, capture_output=True)
    said: list[str] = []
    for line in OF_A_RUN:
        code = cli.main(shlex.split(line)[1:])
        shown = capsys.readouterr()
        assert code == 0, f"{line}\n{shown.out}\n{shown.err}"
        said.append(shown.out)
    assert "command.sh" in said[0]
    assert (folder / "demo-runs" / "written" / "train.py").is_file()
    assert not (folder / "demo-runs" / "written" / "metrics.jsonl").exists()
    assert "finished after 30 steps" in said[2]
    assert "already over" in said[3]
    assert "done" in said[4]


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_an_example_plans(path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As examples/README.md says; `make demo` makes the model of one, and two are of whatever machine is here."""
    if path.stem == "demo":
        shapes = find_model("HuggingFaceTB/SmolLM2-135M")
        assert shapes is not None
        (folder / "demo-runs" / "tiny").mkdir(parents=True)
        (folder / "demo-runs" / "tiny" / "config.json").write_text(json.dumps(shapes.config), encoding="utf-8")
    code = cli.main(["plan", "--job", f"examples/{path.name}", "--no-trace"])
    shown = capsys.readouterr()
    assert code in ({0, 3} if yaml.safe_load(path.read_text("utf-8")).get("machine") == "local" else {0}), shown.err
    assert "best plan" in shown.out or "closest first" in shown.out


def test_as_much_is_bundled_as_is_said() -> None:
    models, cards = len(list_models()), len(load_cards())
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"{models} models are bundled" in README and f"lists {cards}." in README
    assert f"{cards} ids" in REFERENCE and f"{models} models, {cards} cards" in changes


def test_every_example_is_listed() -> None:
    page = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| `([\w.-]+\.yaml)` \|", page, re.MULTILINE)) == [path.name for path in JOBS]


def test_the_job_file_of_the_readme_is_a_job() -> None:
    (block,) = [block for language, block in blocks(README) if language == "yaml"]
    assert Job.model_validate(yaml.safe_load(block)).method == "lora"


def test_the_page_of_the_job_shows_every_default() -> None:
    page = (ROOT / "docs" / "job.md").read_text(encoding="utf-8")
    (block,) = [block for language, block in blocks(page) if language == "yaml"]
    shown = yaml.safe_load(block)
    assert list(shown) == list(Job.model_fields)
    assert Job.model_validate(shown) == Job(model="Qwen/Qwen3-8B")
    assert set(shown["lora"]) == set(Job.model_fields["lora"].default_factory().model_dump())  # type: ignore[misc, call-arg, union-attr]
    assert set(shown["data"]) == set(DataSpec.model_fields)


def test_the_commands_without_json() -> None:
    """`schema` prints nothing else than JSON."""
    without = [name for name, command in cli.COMMANDS.items() if not command.json]
    (said,) = re.findall(r"all but (.*?) take", REFERENCE.replace("\n", " "))
    assert re.findall(r"`(\w+)`", said) == without


def test_the_exit_codes() -> None:
    codes = [int(code) for code in re.findall(r"^\| (\d+) \|", REFERENCE, re.MULTILINE)]
    assert codes == [int(code) for code in ExitCode]


def test_the_block_of_numbers_has_the_shape_of_the_output(capsys: pytest.CaptureFixture[str]) -> None:
    found = re.search(r"<!-- shape of: (.+) -->\n```\n(.*?)```", README, re.DOTALL)
    assert found is not None
    assert cli.main(shlex.split(found[1])[1:]) == 0
    printed = capsys.readouterr().out

    def shapes(text: str) -> dict[str, str]:
        """Label of a line -> the line without its numbers, of the lines whose words do not depend on the plan."""
        lines = [re.sub(r"[\d.,]+", "0", line).strip() for line in text[text.index("best plan") :].splitlines()]
        return {label: next(x for x in lines if x.startswith(label)) for label in ("memory", "time", "why")}

    shown, real = shapes(found[2]), shapes(printed)
    assert shown["memory"] == real["memory"]
    assert shown["time"].split("  [")[1] == real["time"].split("  [")[1]
    assert re.sub(r" in \w+;.*", "", shown["why"]) == re.sub(r" in \w+;.*", "", real["why"])

    def numbers(text: str) -> list[float]:
        return [float(found.replace(",", "")) for found in re.findall(r"\d[\d,]*(?:\.\d+)?", text)]

    written = found[2][found[2].index("best plan") :].strip()
    said = printed[printed.index("best plan") :].splitlines()[: len(written.splitlines())]
    assert numbers(written) == pytest.approx(numbers("\n".join(said)), rel=0.03)


def test_the_staircase_is_what_its_command_says(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    (line,) = [line for line in commands(page) if "--goal longest" in line]
    assert cli.main([*shlex.split(line)[1:], "--json"]) == 0
    stairs = json.loads(capsys.readouterr().out)["staircase"]
    table = page[page.index("| recorded by TRL |") :]
    shown = re.findall(r"^\| .* \| ([\d,]+) \|$", table, re.MULTILINE)
    lengths = [stair["tokens"] for stair in stairs if stair["lever"] != "no lever"]
    assert lengths == pytest.approx([int(cell.replace(",", "")) for cell in shown], rel=0.03)


def test_the_accuracy_that_is_claimed() -> None:
    claimed = re.findall(r"^\| .* \| (\d+) \| ([\d.]+) % \| ([\d.]+) % \|$", README, re.MULTILINE)
    traced = [abs(peak_error(row)) for row in RAN]
    measured = [abs(run.error) for run in ALLOCATED if run.error is not None]
    assert claimed == [
        (str(len(errors)), f"{100 * median(errors):.1f}", f"{100 * max(errors):.1f}") for errors in (traced, measured)
    ]
