from __future__ import annotations

import functools
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.errors import EnvironmentLacks, UsageError
from launcher.run_text.run_files import render_run
from launcher.writing.run_folder import write_run
from launcher.writing.validate import validate_run
from tests.launcher.run_specs import VARIANTS, cpu, make_spec
from tests.launcher.tiny_models import CHILDREN, tiny_model

# As in the accelerate tests: many folders for the price of one start of the libraries.
MANY = """
import contextlib, json, os, sys
sys.path.insert(0, sys.argv[1])
import validate_run
with contextlib.redirect_stdout(sys.stderr):
    found = {os.path.basename(f): validate_run.validate(validate_run.Path(f), True) for f in sys.argv[2:]}
print(json.dumps(found))
"""


def edit(file: str, old: str, new: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        text = (folder / file).read_text()
        assert old in text
        (folder / file).write_text(text.replace(old, new))

    return apply


def bare_model(folder: Path) -> None:
    """A model folder whose weights were never downloaded."""
    bare = folder / "bare"
    bare.mkdir()
    (bare / "config.json").write_text("{}")
    edit("train.py", 'MODEL = "Qwen/Qwen3-8B"', f"MODEL = {str(bare)!r}")(folder)


BROKEN: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "misspelt fsdp key": (
        "fsdp",
        edit("accelerate.yaml", "fsdp_offload_params", "fsdp_ofload_params"),
        "accelerate.yaml fsdp_config.fsdp_ofload_params is no setting of this accelerate",
    ),
    "misspelt mesh key": (
        "million",
        edit("accelerate.yaml", "parallelism_config_cp_size", "parallelism_config_cpsize"),
        "parallelism_config.parallelism_config_cpsize is no setting",
    ),
    "misspelt deepspeed key": (
        "zero2",
        edit("accelerate.yaml", "zero3_init_flag", "zero3_flag"),
        "deepspeed_config.zero3_flag is no setting",
    ),
    "unknown key": (
        "single",
        edit("accelerate.yaml", "num_machines", "num_machnes"),
        "unknown keys (['num_machnes'])",
    ),
    "no yaml": ("single", edit("accelerate.yaml", "use_cpu: false", "{"), "accelerate.yaml: "),
    "wrong mesh": (
        "million",
        edit("accelerate.yaml", "num_processes: 8", "num_processes: 6"),
        "the sizes make 8 processes, num_processes is 6",
    ),
    "fsdp 1": (
        "fsdp",
        edit("accelerate.yaml", "fsdp_version: 2", "fsdp_version: 1"),
        "fsdp_version is 1, the run was planned for 2",
    ),
    "offload without recompute": (
        "million",
        edit(
            "accelerate.yaml",
            "fsdp_activation_checkpointing: true",
            "fsdp_activation_checkpointing: false",
        ),
        "`activation_checkpointing_offload=True` requires",
    ),
    "unknown setting": (
        "single",
        edit("train.py", "seed=42", "seeed=42"),
        "SFTConfig of this TRL has no setting seeed",
    ),
    "bad value": (
        "single",
        edit("train.py", 'save_strategy="epoch"', 'save_strategy="sometimes"'),
        "SFTConfig: sometimes is not a valid",
    ),
    "bad optimizer": (
        "single",
        edit("train.py", '"adamw_torch_fused"', '"adamw_bnb_8bits"'),
        "SFTConfig: adamw_bnb_8bits is not a valid",
    ),
    "missing package": (
        "single",
        edit("train.py", '"adamw_torch_fused"', '"galore_adamw"'),
        "has no galore_torch, which optim galore_adamw needs",
    ),
    "does not load": (
        "single",
        edit("train.py", "import json", "import no_such_module"),
        "train.py does not load: ModuleNotFoundError: No module named 'no_such_module'",
    ),
    "no data": (
        "single",
        edit("train.py", "train.jsonl", "gone.jsonl"),
        "gone.jsonl does not exist",
    ),
    "no weights": ("single", bare_model, "has a config but no weights"),
}


@functools.cache
def found() -> dict[str, list[str]]:
    """Problems of every broken folder, and of two that are right but for the cards."""
    with tempfile.TemporaryDirectory() as temporary:
        folders: list[str] = []
        for name, (variant, change, _) in BROKEN.items():
            folder = Path(temporary) / name
            write_run(folder, render_run(VARIANTS[variant]))
            change(folder)
            folders.append(str(folder))
        for name in ("single", "cpu"):
            write_run(Path(temporary) / name, render_run(VARIANTS[name]))
            folders.append(str(Path(temporary) / name))
        command = [sys.executable, "-c", MANY, str(CHILDREN), *folders]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    problems: dict[str, list[str]] = json.loads(done.stdout)
    return problems


@pytest.mark.stack
@pytest.mark.parametrize("name", BROKEN)
def test_broken_runs_are_told(name: str) -> None:
    problems = found()[name]
    assert any(BROKEN[name][2] in problem for problem in problems), problems
    assert all("\n" not in problem and len(problem) < 700 for problem in problems)


@pytest.mark.stack
def test_cards_are_counted_when_asked() -> None:
    import torch

    assert found()["cpu"] == []
    if torch.cuda.device_count() == 0:
        assert found()["single"] == [
            "the run starts 1 processes here, torch sees 0 GPUs; check driver and CUDA_VISIBLE_DEVICES"
        ]


@pytest.mark.stack
def test_a_good_run_has_no_problems(tmp_path: Path) -> None:
    """End to end, with a setting that only a card could judge."""
    spec = make_spec(
        {"model": str(tiny_model()), "seq_len": 64, "trl": {"max_steps": 1}},
        {"micro_batch": 8},
        cpu(),
    )
    write_run(tmp_path / "run", render_run(spec))
    before = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert validate_run(tmp_path / "run", python=sys.executable) == []
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == before


def test_only_run_folders(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a run folder"):
        validate_run(tmp_path, python=None)


def test_a_python_that_is_none(tmp_path: Path) -> None:
    write_run(tmp_path / "run", render_run(VARIANTS["cpu"]))
    with pytest.raises(EnvironmentLacks, match=r"validate_run\.py failed in /bin/true"):
        validate_run(tmp_path / "run", python="/bin/true")
