"""`make demo`: it fails when the training did not learn, and it runs from end to end."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """scripts/demo.py, looking at a folder of its own."""
    spec = importlib.util.spec_from_file_location("demo", ROOT / "scripts" / "demo.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    return module


def finished(folder: Path, losses: list[float], *, kind: str = "done") -> None:
    """What a run leaves, as far as the demo reads it."""
    run = folder / "demo-runs" / "run"
    run.mkdir(parents=True)
    rows: list[dict[str, Any]] = [{"event": "start"}]
    rows += [{"event": "step", "loss": loss} for loss in losses]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    predicted = {"allocated_bytes": 500 * 2**20, "low_bytes": 490 * 2**20, "high_bytes": 510 * 2**20}
    outcome = {
        "kind": kind,
        "sentence": f"it is {kind}",
        "predicted": {**predicted, "step_s": 2.0, "low_s": 0.5, "high_s": 8.0},
        "seen": {"memory_basis": "rss_growth", "memory_bytes": 600 * 2**20, "step_s": 1.0},
    }
    (run / "outcome.json").write_text(json.dumps(outcome))


def test_predicted_against_seen(demo: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finished(tmp_path, [8.3, 7.0, 6.1])
    demo.compare()
    shown = capsys.readouterr().out
    (memory,) = [line for line in shown.splitlines() if line.startswith("peak memory")]
    assert "500 MiB (490 to 510)" in memory and "600 MiB" in memory and memory.endswith("1.20")
    (time,) = [line for line in shown.splitlines() if line.startswith("step time")]
    assert "2.000 s (0.500 to 8.000)" in time and time.endswith("0.50")
    assert "first step 8.300, last step 6.100 (3 steps)" in shown


@pytest.mark.parametrize(
    ("losses", "kind", "why"),
    [
        ([6.1, 7.0, 8.3], "done", "the loss did not fall"),
        ([6.1, 6.1], "done", "the loss did not fall"),
        ([8.3, float("nan")], "done", "the loss did not fall"),
        ([8.3, 6.1], "out_of_memory", "the run is not done: it is out_of_memory"),
        ([8.3], "done", "the run is not done"),
    ],
)
def test_it_fails(losses: list[float], kind: str, why: str, demo: ModuleType, tmp_path: Path) -> None:
    finished(tmp_path, losses, kind=kind)
    with pytest.raises(demo.DemoFailed, match=why):
        demo.compare()


def test_a_failing_command_is_an_exit_code(demo: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "ROOT", ROOT)
    with pytest.raises(demo.DemoFailed, match="exit code 2"):
        demo.trlfit("plan", "--seq-len", "none", capture=True)
    assert json.loads(demo.trlfit("gpus", "--json", capture=True))["schema"] == "trlfit.machine/1"


@pytest.mark.launch
def test_the_whole_demo_with_a_smaller_model(tmp_path: Path) -> None:
    """In a folder of its own, so that nobody's demo-runs is touched."""
    for name in ("profiles", "planner", "launcher", "tui", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    code = "import sys; sys.path.insert(0, 'scripts'); import demo\n"
    code += "demo.SIZES = '--hidden 64 --intermediate 128 --layers 2 --vocab 512'.split()\n"
    code += "sys.exit(demo.main())"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("$ ")]
    assert [line.split()[2] for line in said if line.startswith("$ trlfit")][:2] == ["plan", "gpus"]
    assert {"write", "launch", "runs"} <= {line.split()[2] for line in said}
    assert "(30 steps)" in done.stdout and "demo done in" in done.stdout
