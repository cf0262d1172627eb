"""Bundled models: what of popular models' ``config.json`` decides their shapes, one file a model.

Looking one model up reads the index and that model's file only.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).with_name("models")
_INDEX = _FOLDER / "index.json"
"""Every id and alias -> the stem of its file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BundledModel:
    """One model, or one of its aliases, as ``find_model`` was asked for it."""

    id: str
    """Hub id of the file's own model."""
    name: str
    """Hub id that was asked for, in the hub's spelling: ``id`` or one of ``aliases``."""
    aliases: tuple[str, ...]
    """Hub ids with exactly these shapes: instruct and base variants, distillations, mirrors."""
    source: str
    """How the shapes were established."""
    published_parameters: int | None
    """A total counted elsewhere, of what transformers loads; None where none was found."""
    published_source: str | None
    config: dict[str, Any]
    """What of ``config.json`` decides shapes, positions, tying, layer types and dtype."""


def list_models() -> tuple[BundledModel, ...]:
    """Every bundled model under its own id, sorted; aliases are inside."""
    bundled = (_load(stem, None) for stem in set(_index().values()))
    return tuple(sorted(bundled, key=lambda model: model.id.lower()))


def model_ids() -> tuple[str, ...]:
    """Every id and alias, sorted."""
    return tuple(sorted(_index(), key=str.lower))


def find_model(model_id: str) -> BundledModel | None:
    """The bundled model of that hub id or alias, letter case ignored; None when there is none."""
    known = _by_lower_name().get(model_id.lower())
    return None if known is None else _load(_index()[known], known)


def nearest(model_id: str, limit: int = 3) -> list[str]:
    """Bundled ids that look most like ``model_id``, best first: what the user may have meant."""
    # difflib costs a millisecond to import, and only a mistyped id needs it.
    from difflib import SequenceMatcher

    def letters(name: str) -> str:
        return "".join(c for c in name.lower() if c.isalnum())

    def likeness(name: str) -> float:
        # A missing or wrong organisation is the usual slip: the part after the slash counts alone.
        pairs = ((model_id, name), (model_id.rpartition("/")[2], name.rpartition("/")[2]))
        return max(SequenceMatcher(None, letters(a), letters(b), autojunk=False).ratio() for a, b in pairs)

    scored = sorted((-likeness(name), name) for name in _index())
    return [name for score, name in scored[:limit] if score <= -0.6]


@cache
def _index() -> dict[str, str]:
    names: dict[str, str] = json.loads(_INDEX.read_text(encoding="utf-8"))
    return names


@cache
def _by_lower_name() -> dict[str, str]:
    return {name.lower(): name for name in _index()}


def _load(stem: str, name: str | None) -> BundledModel:
    document = json.loads((_FOLDER / f"{stem}.json").read_text(encoding="utf-8"))
    # An alias may differ in positions alone (a base model trained longer), never in sizes.
    overrides = document.get("overrides", {}).get(name, {})
    return BundledModel(
        id=document["id"],
        name=name or document["id"],
        aliases=tuple(document["aliases"]),
        source=document["source"],
        published_parameters=document["published_parameters"],
        published_source=document["published_source"],
        config=document["config"] | overrides,
    )
