from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launcher.fake_run import sweep
from tests.launcher.nvml_stub.machines import NvmlStub, build


@pytest.fixture(scope="session")
def nvml_libraries(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders with libnvidia-ml.so.1 as of a new and of an old driver."""
    folder = tmp_path_factory.mktemp("nvml")
    return build(folder / "new"), build(folder / "old", "-DOLD_DRIVER")


@pytest.fixture
def nvml_stub(nvml_libraries: tuple[Path, Path], tmp_path: Path) -> NvmlStub:
    """Runs Python on a described machine; see tests/launcher/nvml_stub/machines.py."""
    new, old = nvml_libraries
    return NvmlStub(new=new, old=old, folder=tmp_path)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("file systems can be mounted by root only")
    yield disk
    sweep(disk)
    subprocess.run(["umount", "-l", str(disk)], check=True)
