from __future__ import annotations

from pathlib import Path

import pytest

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
