"""Stack: the package versions of the Python that will train."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from packaging.version import InvalidVersion, Version
from pydantic import BaseModel, ConfigDict, Field, field_validator

PACKAGES: tuple[str, ...] = (
    "torch",
    "transformers",
    "trl",
    "accelerate",
    "peft",
    "datasets",
    "deepspeed",
    "bitsandbytes",
    "flash-attn",
    "kernels",
    "liger-kernel",
    "torchao",
    "transformer-engine",
    "flash-linear-attention",
    "causal-conv1d",
)
"""Distributions that change what a run allocates or may do, by their names on PyPI."""

Origin = Literal["installed", "stated", "newest known", "absent"]


def public_versions(versions: Mapping[str, str]) -> dict[str, str]:
    """Package -> version without its build tag: ``2.13.0`` of ``2.13.0+cpu``."""
    return {package: version.partition("+")[0] for package, version in versions.items()}


class Stack(BaseModel):
    """Versions and where each came from."""

    model_config = ConfigDict(extra="forbid")

    python: str | None = Field(
        default=None,
        description="Path of the training Python, None when the stack was only stated.",
    )
    python_version: str | None = None
    versions: dict[str, str] = Field(default={}, description="Package -> version; absent packages are left out.")
    origin: dict[str, Origin] = Field(default={})
    cuda: str | None = Field(
        default=None,
        description="CUDA version torch was built for; None for a CPU build or when not known.",
    )
    notes: list[str] = Field(default=[])

    @field_validator("versions")
    @classmethod
    def _versions_parse(cls, value: dict[str, str]) -> dict[str, str]:
        for package, text in value.items():
            try:
                Version(text)
            except InvalidVersion:
                raise ValueError(f"{package}={text} is not a version; write for example {package}=1.16.0") from None
        return value

    def version(self, package: str) -> Version | None:
        """The package's version, or None when it is not in the stack."""
        text = self.versions.get(package)
        return Version(text) if text is not None else None

    def has(self, package: str, minimum: str | None = None) -> bool:
        """Whether the package is there, at ``minimum`` or newer."""
        version = self.version(package)
        return version is not None and (minimum is None or version.release >= Version(minimum).release)
