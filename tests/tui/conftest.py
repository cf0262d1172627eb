from __future__ import annotations

from tests.launcher.conftest import nvml_libraries, nvml_stub

__all__ = ["nvml_libraries", "nvml_stub"]
