from __future__ import annotations

import ast
import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher.errors import EnvironmentLacks, UsageError
from launcher.inputs import stack as stack_module
from launcher.inputs.stack import inspect_stack, resolve_stack
from planner.stack import PACKAGES
from profiles.stacks import load_packages

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "launcher/children/inspect_stack.py"

CUDA_BUILD = "from typing import Optional\ncuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n"
ROCM_BUILD = "cuda = None\nhip = '6.4.43482'\n"
CPU_BUILD = "cuda: Optional[str] = None\nhip: Optional[str] = None\n"


@pytest.fixture(autouse=True)
def fresh_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_module, "_seen", {})


@pytest.fixture(scope="session")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment of its own, with nothing installed."""
    folder = tmp_path_factory.mktemp("bare") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return folder / "bin" / "python"


@pytest.fixture
def training_python(tmp_path: Path) -> Path:
    """A Python with a torch of CUDA 12.8 and an older TRL, as pip's metadata tells it."""
    folder = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    install(folder, "torch", "2.9.1+cu128", {"torch/version.py": CUDA_BUILD})
    install(folder, "trl", "1.12.0")
    install(folder, "flash_attn", "2.8.3")
    install(folder, "peft", "not a version")
    return folder / "bin" / "python"


def install(venv: Path, name: str, version: str, files: dict[str, str] | None = None) -> None:
    (site,) = venv.glob("lib/python*/site-packages")
    metadata = site / f"{name}-{version.replace(' ', '')}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    for path, text in (files or {}).items():
        (site / path).parent.mkdir(exist_ok=True)
        (site / path).write_text(text)


def program(folder: Path, text: str, name: str = "python") -> str:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.stack
def test_this_python_is_asked_without_a_child_and_without_torch() -> None:
    code = """
import json, sys
from launcher.inputs.stack import inspect_stack
print(json.dumps([inspect_stack().versions, [m for m in sys.modules if m in
    ("torch", "trl", "transformers", "launcher.inputs.stack_child")]]))
"""
    child = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    versions, loaded = json.loads(child.stdout)
    assert loaded == []
    # pip's own view, through a child of its own.
    code = "import torch, trl; print(torch.__version__, trl.__version__)"
    asked = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert [versions["torch"], versions["trl"]] == asked.stdout.split()


def test_our_own_path_needs_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_module, "_look_there", None)
    assert inspect_stack(sys.executable).python == sys.executable
    assert inspect_stack(None).python_version == ".".join(map(str, sys.version_info[:3]))


def test_another_python_is_asked_in_a_child(training_python: Path) -> None:
    stack = inspect_stack(str(training_python))
    assert stack.python == str(training_python)
    assert stack.versions == {"torch": "2.9.1+cu128", "trl": "1.12.0", "flash-attn": "2.8.3"}
    assert set(stack.origin.values()) == {"installed"}
    assert stack.cuda == "12.8"
    assert stack.python_version == ".".join(map(str, sys.version_info[:3]))
    assert stack.notes == ["peft not a version is no version by the rules of PyPI and is ignored"]


def test_a_python_is_asked_once(training_python: Path) -> None:
    first = inspect_stack(str(training_python))
    first.versions["trl"] = "0.0.1"
    training_python.unlink()
    training_python.write_text("#!/bin/false\n")
    training_python.chmod(0o755)
    assert inspect_stack(str(training_python)).versions["trl"] == "1.12.0"


def test_metadata_without_a_version_is_said(training_python: Path) -> None:
    (metadata,) = training_python.parents[1].glob("lib/*/site-packages/trl-*/METADATA")
    metadata.write_text("Metadata-Version: 2.1\nName: trl\n")
    stack = inspect_stack(str(training_python))
    assert "trl" not in stack.versions
    assert "trl is installed without metadata that says its version" in stack.notes


@pytest.mark.parametrize(
    ("build", "cuda", "note"),
    [
        (CPU_BUILD, None, None),
        (ROCM_BUILD, None, "ROCm"),
        ("cuda = '11.8'", "11.8", None),
        (None, None, "cannot be read"),
    ],
)
def test_builds_of_torch(
    bare_python: Path, tmp_path: Path, build: str | None, cuda: str | None, note: str | None
) -> None:
    folder = tmp_path / "venv"
    subprocess.run([str(bare_python), "-m", "venv", "--without-pip", str(folder)], check=True)
    install(folder, "torch", "2.8.0", {"torch/version.py": build} if build else None)
    stack = inspect_stack(str(folder / "bin" / "python"))
    assert stack.cuda == cuda
    assert len(stack.notes) == (0 if note is None else 1)
    assert note is None or note in stack.notes[0]


def test_stated_beats_installed_and_missing_stays_missing(training_python: Path) -> None:
    stack = resolve_stack({"TRL": " 1.16.0 ", "liger_kernel": "0.8.5"}, str(training_python))
    assert stack.versions == {
        "torch": "2.9.1+cu128",
        "trl": "1.16.0",
        "flash-attn": "2.8.3",
        "liger-kernel": "0.8.5",
    }
    assert stack.origin["trl"] == stack.origin["liger-kernel"] == "stated"
    assert stack.origin["torch"] == "installed"
    # TRL is installed there, so this is a training Python and it really lacks transformers.
    assert stack.origin["transformers"] == stack.origin["deepspeed"] == "absent"
    assert stack.cuda == "12.8"
    assert set(stack.origin) == set(PACKAGES)


def test_a_stated_torch_is_another_build(training_python: Path) -> None:
    assert resolve_stack({"torch": "2.11.0"}, str(training_python)).cuda is None


def test_a_package_is_taken_out(training_python: Path) -> None:
    stack = resolve_stack({"flash-attn": "none"}, str(training_python))
    assert "flash-attn" not in stack.versions and stack.origin["flash-attn"] == "absent"


def test_without_trl_the_newest_known_is_planned_for(bare_python: Path) -> None:
    stack = resolve_stack({"torch": "2.10.0"}, str(bare_python))
    assert stack.versions == {
        "torch": "2.10.0",
        "transformers": "5.24.0",
        "trl": "1.16.0",
        "accelerate": "1.15.0",
        "peft": "0.21.2",
        "datasets": "5.2.0",
    }
    assert stack.origin["torch"] == "stated" and stack.origin["trl"] == "newest known"
    assert stack.origin["deepspeed"] == "absent"
    assert stack.python == str(bare_python)


def test_another_box_may_have_what_this_one_lacks() -> None:
    stack = resolve_stack({}, inspect=False, assume_optional=True)
    assert stack.python is None and stack.python_version is None
    assert stack.versions["deepspeed"] == "0.19.8" and stack.has("bitsandbytes", "0.46")
    assert stack.origin["deepspeed"] == "newest known"
    for package in ("flash-attn", "kernels", "liger-kernel", "torchao", "transformer-engine", "causal-conv1d"):
        assert stack.origin[package] == "absent"


def test_the_table_knows_every_package() -> None:
    packages = load_packages()
    assert tuple(packages) == PACKAGES
    core = [name for name, package in packages.items() if package.role == "core"]
    assert core == ["torch", "transformers", "trl", "accelerate", "peft", "datasets"]


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ({"trl": "abc"}, "--stack trl=abc: not a version; write for example trl=1.16.0"),
        ({"trl": ""}, "--stack trl=: not a version"),
        ({"torch": "2..1"}, "--stack torch=2..1: not a version"),
        ({"torch": "9" * 5000}, "--stack torch=9999"),
        ({"trll": "1.16.0"}, "--stack trll=1.16.0: no package"),
        ({"trll": "1.16.0"}, "did you mean trl"),
        ({"numpy": "2.0"}, "it is one of torch, transformers"),
        ({"": "1"}, "no package"),
        ({"x" * 9999: "1"}, "no package"),
    ],
)  # fmt: skip
def test_bad_stated_versions_name_the_flag(stated: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve_stack(stated, inspect=False)
    assert said in str(caught.value) and "--stack" in str(caught.value)
    assert len(str(caught.value)) < 350


def test_pythons_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentLacks, match="no-such-python: no such command on PATH"):
        inspect_stack("no-such-python")
    with pytest.raises(EnvironmentLacks, match="gone/python is not there"):
        inspect_stack(str(tmp_path / "gone" / "python"))
    dangling = tmp_path / "python3"
    dangling.symlink_to(tmp_path / "uninstalled")
    with pytest.raises(EnvironmentLacks, match=r"a link to .*uninstalled, which is not there"):
        inspect_stack(str(dangling))
    with pytest.raises(EnvironmentLacks, match="is a folder"):
        inspect_stack(str(tmp_path))
    plain = tmp_path / "python.txt"
    plain.write_text("")
    with pytest.raises(EnvironmentLacks, match="is not executable"):
        inspect_stack(str(plain))
    with pytest.raises(EnvironmentLacks, match="--python"):
        inspect_stack("/a\0b")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("exit 0", r"does not answer like a Python \(exit code 0\)"),
        ("echo hello; exit 3", r"does not answer like a Python \(exit code 3\)"),
        ("echo '[1]'", "does not answer like a Python"),
        ('cat "$1"', "does not answer like a Python"),
        ("kill -SEGV $$", "was ended by signal 11"),
        ("printf 'Traceback:\\nImportError: no encodings' >&2; exit 1", "fails .*no encodings"),
        ("yes", "it prints on"),
        ("yes >&2", "it prints on"),
        (
            """echo '{"python_version": 3, "versions": {}, "cuda": null, "notes": []}'""",
            "does not answer like a Python",
        ),
        (
            """echo '{"python_version": "3.11.7", "versions": {"trl": 1}, "notes": []}'""",
            "does not answer like a Python",
        ),
        (
            """echo '{"python_version": "3.8.20", "versions": {}, "cuda": null, "notes": []}'""",
            "is Python 3.8.20; training needs 3.9 or newer",
        ),
    ],
)
def test_programs_that_are_no_python(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(EnvironmentLacks, match=said):
        inspect_stack(program(tmp_path, text))


def test_a_file_that_the_kernel_cannot_run(tmp_path: Path) -> None:
    path = tmp_path / "python"
    path.write_bytes(b"\x7fELF not really")
    path.chmod(0o755)
    with pytest.raises(EnvironmentLacks, match="cannot start the training Python"):
        inspect_stack(str(path))


def test_a_python_that_hangs_is_ended_with_all_it_started(tmp_path: Path) -> None:
    started = tmp_path / "pid"
    path = program(tmp_path, f"sleep 600 & echo $! > {started}; sleep 600")
    begun = time.monotonic()
    with pytest.raises(EnvironmentLacks, match=r"did not say in 0\.5 s"):
        inspect_stack(path, limit_s=0.5)
    assert time.monotonic() - begun < 60
    pid = int(started.read_text())
    for _ in range(50):
        state = Path(f"/proc/{pid}/stat")
        # A killed orphan may stay a zombie where nobody collects it.
        if not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return
        time.sleep(0.1)
    pytest.fail("what the hung Python had started is still running")


def test_a_wrapper_that_talks_first_and_leaves_something_running(tmp_path: Path, training_python: Path) -> None:
    text = f'echo loading modules; sleep 30 & exec {training_python} "$@"'
    begun = time.monotonic()
    assert inspect_stack(program(tmp_path, text, "wrapped")).versions["trl"] == "1.12.0"
    assert time.monotonic() - begun < 20


def test_the_child_runs_in_pythons_that_are_too_old(tmp_path: Path) -> None:
    ast.parse(SCRIPT.read_text(encoding="utf-8"), feature_version=(3, 6))
    code = (
        "import sys, runpy; sys.modules['importlib.metadata'] = None; "
        f"sys.argv = ['x', 'torch']; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    answer = json.loads(child.stdout)
    assert answer["versions"] == {}
    assert answer["python_version"] == ".".join(map(str, sys.version_info[:3]))


def test_files_beside_the_child_do_not_stand_in_for_the_standard_library(tmp_path: Path, training_python: Path) -> None:
    script = tmp_path / "inspect_stack.py"
    script.write_text(SCRIPT.read_text(encoding="utf-8"), encoding="utf-8")
    for name in ("email", "csv", "zipfile"):  # importlib.metadata needs them.
        (tmp_path / f"{name}.py").write_text("raise SystemExit(9)")
    child = subprocess.run([str(training_python), str(script), "trl"], capture_output=True, text=True, check=True)
    assert json.loads(child.stdout)["versions"] == {"trl": "1.12.0"}


def test_metadata_folders_say_what_importlib_says() -> None:
    from importlib import metadata

    here = stack_module._look_here()["versions"]  # pyright: ignore[reportPrivateUsage]
    asked = {}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            asked[package] = metadata.version(package)
    assert here == asked
    assert "torch" in here
