from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from launcher.errors import EnvironmentLacks, UsageError
from launcher.inputs.model_config import resolve_architecture
from launcher.run_text.run_files import RunSpec, python_of, render_command, render_run
from launcher.running.processes import create_time, this_host
from launcher.running.run_record import RUN, RunRecord, write_json
from launcher.writing.run_folder import is_run_folder, write_run
from planner.job import Job
from planner.problem import run_file_names
from tests.launcher.run_specs import VARIANTS, cpu, gpus, make_spec

# Stands in for Python: prints how command.sh called it, one JSON document.
RECORDER = """#!/usr/bin/env python3
import json, os, sys
print(json.dumps({"args": sys.argv[1:], "cwd": os.getcwd(), "env": dict(os.environ)}))
"""


def recorder(folder: Path, name: str = "python") -> Path:
    path = folder / name
    path.write_text(RECORDER)
    path.chmod(0o755)
    return path


def called(folder: Path, **environment: str) -> dict[str, object]:
    """How command.sh calls Python when it is run from elsewhere."""
    kept = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
    done = subprocess.run(
        ["bash", str(folder / "command.sh")],
        env={**kept, **environment},
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, object] = json.loads(done.stdout)
    return found


def environment_of(spec: RunSpec, folder: Path, **environment: str) -> dict[str, str]:
    python = recorder(folder)
    write_run(folder / "run", render_run(replace(spec, python=str(python))), overwrite=True)
    found = called(folder / "run", **environment)["env"]
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("python", ["/usr/bin/python3", "/a b/it's}/python", "python"])
def test_the_python_of_a_command_can_be_read_back(python: str) -> None:
    command = render_command(replace(make_spec(), python=python))
    assert python_of(command) == python
    assert python_of(command.replace("PYTHON=${", "PYTHON=$(find-one) # ${")) is None
    assert python_of("PYTHON=${PYTHON:-'half}") is None


LAUNCH = ["-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", "accelerate.yaml"]


@pytest.mark.parametrize("name", VARIANTS)
def test_files_are_those_that_the_plan_names(name: str) -> None:
    spec = VARIANTS[name]
    assert set(render_run(spec)) == set(run_file_names(spec.choice, spec.machine.nodes))


@pytest.mark.parametrize("name", VARIANTS)
def test_same_values_same_bytes(name: str) -> None:
    assert render_run(VARIANTS[name]) == render_run(VARIANTS[name])


def test_plan_is_written_as_it_is() -> None:
    assert render_run(VARIANTS["single"])["plan.json"] == '{"schema": "trlfit.plan/1"}\n'


@pytest.mark.parametrize("name", VARIANTS)
def test_job_reads_back(name: str) -> None:
    job = VARIANTS[name].job
    assert Job.model_validate(yaml.safe_load(render_run(VARIANTS[name])["job.yaml"])) == job


@pytest.mark.parametrize("name", VARIANTS)
def test_shell_scripts_parse(name: str, tmp_path: Path) -> None:
    for file, text in render_run(VARIANTS[name]).items():
        if file.endswith(".sh"):
            (tmp_path / file).write_text(text)
            subprocess.run(["bash", "-n", str(tmp_path / file)], check=True)


# ---- command.sh ----


def test_command_starts_accelerate_in_its_own_folder(tmp_path: Path) -> None:
    home = tmp_path / 'it\'s $(touch owned) "here" 🚀'
    home.mkdir()
    python = recorder(home, "py thon's `touch owned`")
    write_run(home / "run", render_run(replace(VARIANTS["single"], python=str(python))))
    found = called(home / "run")
    assert found["args"] == [*LAUNCH, "train.py"]
    assert found["cwd"] == str(home / "run")
    assert not list(tmp_path.rglob("owned"))


def test_python_is_overridden_by_the_environment(tmp_path: Path) -> None:
    other = recorder(tmp_path, "other python")
    write_run(tmp_path / "run", render_run(replace(VARIANTS["single"], python="/nowhere/python")))
    assert called(tmp_path / "run", PYTHON=str(other))["args"] == [*LAUNCH, "train.py"]


def test_python_of_the_stack_is_the_default(tmp_path: Path) -> None:
    stack = VARIANTS["single"].stack.model_copy(update={"python": str(recorder(tmp_path))})
    write_run(tmp_path / "run", render_run(replace(VARIANTS["single"], stack=stack)))
    assert called(tmp_path / "run")["args"] == [*LAUNCH, "train.py"]


def test_gpu_environment(tmp_path: Path) -> None:
    found = environment_of(VARIANTS["fsdp"], tmp_path)
    assert found["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert found["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    # A named machine is another box: what its scheduler gives out wins.
    found = environment_of(VARIANTS["fsdp"], tmp_path, CUDA_VISIBLE_DEVICES="4,5,6,7")
    assert found["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"


def test_cards_of_this_box_are_named_for_good(tmp_path: Path) -> None:
    machine = gpus(4, origin="nvml")
    cards = [
        card.model_copy(update={"uuid": f"GPU-{i:08x}", "physical_index": i + 2, "usable": i != 1})
        for i, card in enumerate(machine.cards)
    ]
    two = {"sharding": "ddp", "dp_replicate": 2, "micro_batch": 4}
    by_uuid = make_spec(choice=two, machine=machine.model_copy(update={"cards": cards}))
    found = environment_of(by_uuid, tmp_path, CUDA_VISIBLE_DEVICES="7")
    assert found["CUDA_VISIBLE_DEVICES"] == "GPU-00000000,GPU-00000002"
    cards[2] = cards[2].model_copy(update={"uuid": None})
    by_index = make_spec(choice=two, machine=machine.model_copy(update={"cards": cards}))
    found = environment_of(by_index, tmp_path)
    assert found["CUDA_VISIBLE_DEVICES"] == "2,4"
    assert found["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_a_busy_card_is_left_to_its_user(tmp_path: Path) -> None:
    """The plan takes the emptiest cards; the run must name those and no others."""
    machine = gpus(2, origin="nvml")
    cards = [card.model_copy(update={"uuid": f"GPU-{i:08x}"}) for i, card in enumerate(machine.cards)]
    cards[0] = cards[0].model_copy(update={"used_bytes": 20 * 2**30})
    found = environment_of(make_spec(machine=machine.model_copy(update={"cards": cards})), tmp_path)
    assert found["CUDA_VISIBLE_DEVICES"] == "GPU-00000001"


def test_cpu_environment(tmp_path: Path) -> None:
    choice = {"sharding": "ddp", "dp_replicate": 2, "micro_batch": 4}
    spec = make_spec(choice=choice, machine=cpu(cores=12))
    found = environment_of(spec, tmp_path, CUDA_VISIBLE_DEVICES="0")
    assert found["CUDA_VISIBLE_DEVICES"] == "" and found["OMP_NUM_THREADS"] == "6"
    assert "PYTORCH_CUDA_ALLOC_CONF" not in found
    assert environment_of(spec, tmp_path, OMP_NUM_THREADS="1")["OMP_NUM_THREADS"] == "1"
    assert found["OMP_WAIT_POLICY"] == "PASSIVE"


def test_several_nodes(tmp_path: Path) -> None:
    python = recorder(tmp_path)
    write_run(tmp_path / "run", render_run(replace(VARIANTS["two_nodes"], python=str(python))))
    found = called(tmp_path / "run", NODE_RANK="1", MASTER_ADDR="node-a")
    assert found["args"] == [
        *LAUNCH,
        *("--machine_rank", "1", "--main_process_ip", "node-a", "--main_process_port", "29500"),
        "train.py",
    ]
    lacking = subprocess.run(
        ["bash", str(tmp_path / "run" / "command.sh")], capture_output=True, text=True, check=False
    )
    assert lacking.returncode != 0 and "NODE_RANK" in lacking.stderr


def test_slurm_script() -> None:
    text = render_run(VARIANTS["two_nodes"])["slurm.sh"]
    assert "#SBATCH --nodes=2\n" in text and "#SBATCH --gpus-per-node=8\n" in text
    assert "#SBATCH --ntasks-per-node=1\n" in text
    assert "#SBATCH --job-name=trlfit-Qwen3-8B\n" in text
    assert "NODE_RANK=$SLURM_NODEID" in text
    assert "slurm.sh" not in render_run(VARIANTS["fsdp"])


def test_one_node_is_used_where_one_is_enough() -> None:
    spec = make_spec(choice={"sharding": "fsdp", "dp_shard": 8}, machine=gpus(8, nodes=2))
    assert spec.num_nodes == 1 and spec.processes_per_node == 8


def test_more_processes_than_the_machine_has() -> None:
    spec = make_spec(choice={"sharding": "fsdp", "dp_shard": 16}, machine=gpus(8))
    with pytest.raises(UsageError, match="needs 16 GPUs"):
        render_run(spec)


def test_a_lone_config_has_no_weights(tmp_path: Path) -> None:
    spec = make_spec()
    shape = replace(spec.architecture, origin="config.json")
    job = spec.job.model_copy(update={"model": "configs/qwen.json"})
    with pytest.raises(UsageError, match="without weights"):
        render_run(replace(spec, job=job, architecture=shape))
    job = spec.job.model_copy(update={"model": "models/mine/config.json"})
    found = replace(spec, job=job, architecture=shape, base_dir=str(tmp_path))
    assert found.model_source == str(tmp_path / "models" / "mine")


@pytest.mark.parametrize(
    ("asked", "loaded"),
    [
        ("Qwen/Qwen3-8B-Base", "Qwen/Qwen3-8B-Base"),
        ("google/gemma-3-1b-it", "google/gemma-3-1b-it"),
        ("qwen/qwen3-8b", "Qwen/Qwen3-8B"),
    ],
)
def test_the_weights_are_those_that_were_asked_for(asked: str, loaded: str) -> None:
    """A base model shares its shapes with its instruct variant, and nothing else."""
    spec = make_spec()
    shape = resolve_architecture(asked)
    assert shape.origin == "bundled"
    found = replace(spec, job=spec.job.model_copy(update={"model": asked}), architecture=shape)
    assert found.model_source == loaded
    assert f'MODEL = "{loaded}"' in render_run(found)["train.py"]


# ---- the folder ----

FILES = {"train.py": "a", "accelerate.yaml": "b", "command.sh": "c"}


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_write_makes_the_folder_and_its_parents(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b" / "run"
    write_run(target, FILES)
    assert {path.name: path.read_text() for path in target.iterdir()} == FILES
    assert os.access(target / "command.sh", os.X_OK)
    assert not os.access(target / "train.py", os.X_OK)
    assert is_run_folder(target) and left(target.parent) == ["run"]


def test_write_into_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    write_run(tmp_path / "run", FILES)
    assert is_run_folder(tmp_path / "run")


def test_write_leaves_other_peoples_files_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    for overwrite in (False, True):
        with pytest.raises(UsageError, match="holds other files"):
            write_run(tmp_path, FILES, overwrite=overwrite)
    with pytest.raises(UsageError, match="is a file"):
        write_run(tmp_path / "thesis.tex", FILES)
    assert left(tmp_path) == ["thesis.tex"]


def test_overwrite_is_asked_for(tmp_path: Path) -> None:
    target = tmp_path / "run"
    write_run(target, FILES)
    (target / "log.txt").write_text("old")
    with pytest.raises(UsageError, match="holds a run already"):
        write_run(target, FILES)
    write_run(target, {**FILES, "train.py": "new"}, overwrite=True)
    assert (target / "train.py").read_text() == "new" and not (target / "log.txt").exists()
    assert left(tmp_path) == ["run"]


def record(folder: Path, pid: int, start: float) -> None:
    host = this_host()
    kept = RunRecord(
        id="x",
        folder=str(folder),
        command=("bash", "command.sh"),
        started_at="2026-01-01T00:00:00+00:00",
        host=host.name,
        boot_id=host.boot.id,
        boot_time_s=host.boot.time_s,
        pid_namespace=host.pid_namespace,
        supervisor_pid=pid,
        supervisor_start=start,
        oom_kills={},
        grace_s=1.0,
    )
    write_json(folder / RUN, kept.to_json())


def test_a_live_run_is_never_overwritten(tmp_path: Path) -> None:
    target = tmp_path / "run"
    write_run(target, FILES)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        started = create_time(process.pid)
        assert started is not None
        record(target, process.pid, started)
        with pytest.raises(UsageError, match="still going; stop it first"):
            write_run(target, FILES, overwrite=True)
        process.communicate(b"\n")
    write_run(target, FILES, overwrite=True)
    assert not (target / RUN).exists()


def test_a_bad_place_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(EnvironmentLacks, match="a part of the path is a file"):
        write_run(tmp_path / "file" / "run", FILES)
    with pytest.raises(EnvironmentLacks, match="the name is too long"):
        write_run(tmp_path / ("x" * 300), FILES)
    assert left(tmp_path) == ["file"]


def test_a_write_that_fails_halfway_leaves_nothing(tmp_path: Path) -> None:
    """The kernel refuses files beyond the limit, as a full disk would."""
    write_run(tmp_path / "kept", FILES)
    code = (
        "import sys, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "from pathlib import Path\n"
        "from launcher.writing.run_folder import write_run\n"
        "files = {'train.py': 'a', 'accelerate.yaml': 'b', 'command.sh': 'x' * 100_000}\n"
        "write_run(Path(sys.argv[1]), files, overwrite=True)\n"
    )
    limited = 'ulimit -f 16 && exec "$@"'
    for name in ("new", "kept"):
        done = subprocess.run(
            ["bash", "-c", limited, "-", sys.executable, "-B", "-c", code, str(tmp_path / name)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert "EnvironmentLacks: cannot write the run folder" in done.stderr
    assert left(tmp_path) == ["kept"]
    assert (tmp_path / "kept" / "command.sh").read_text() == "c"
