"""The newest known release of each package of a training stack, and which a plan may assume."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

_TABLE = Path(__file__).with_name("stacks.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownPackage:
    """A distribution on PyPI."""

    name: str
    newest: str
    """The newest release that this version of trlfit knows."""
    role: Literal["core", "elsewhere", "optional"]
    """``core`` every run needs, ``elsewhere`` is assumed on other boxes, ``optional`` never."""


@cache
def load_packages() -> dict[str, KnownPackage]:
    """Every package by its name on PyPI."""
    table = tomllib.loads(_TABLE.read_text(encoding="utf-8"))
    return {name: KnownPackage(name=name, newest=entry["newest"], role=entry["role"]) for name, entry in table.items()}
