"""What may be typed in a field, to pick from: model ids, files of data, cards, knobs and their values."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import get_args

from launcher.paths import expanded

Choices = Callable[[str], Sequence[str]]
"""What fits the text so far, best first."""
MOST = 200
"""More are not listed: whoever looks for one types another letter."""
MOST_ENTRIES = 2000
"""Of one folder that are looked at for each letter: 10 ms."""
DATA_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")
_COUNT = re.compile(r"(\d+)\s*x\s*(.*)", re.IGNORECASE)


def matching(text: str, names: Iterable[str]) -> list[str]:
    """Names that hold every word of ``text``, letter case ignored; those that begin with the first one first."""
    words = text.lower().split()
    found = [name for name in names if all(word in name.lower() for word in words)]
    if not words:
        return found[:MOST]

    def order(name: str) -> tuple[bool, int]:
        begins = any(part.startswith(words[0]) for part in (name.lower(), name.lower().rpartition("/")[2]))
        return (not begins, len(name))

    return sorted(found, key=order)[:MOST]


def models(text: str) -> list[str]:
    """Bundled ids, those of the hub's cache, and local folders that hold a config.json."""
    from launcher.inputs.model_config import hub_cache
    from profiles.models import model_ids

    local = [name for name in _entries(text) if name.endswith("/")] if _is_path(text) else []
    known = set(model_ids())
    cached = [name for name in _cached_models(hub_cache()) if name not in known]
    return (matching(text, [*cached, *model_ids()]) + local)[:MOST]


def _cached_models(cache: Path) -> list[str]:
    """Ids of the folders ``models--org--name`` that hold a snapshot."""
    try:
        with os.scandir(cache) as entries:
            names = [entry.name for entry in islice(entries, MOST_ENTRIES) if entry.name.startswith("models--")]
    except OSError:
        return []
    return sorted(name.removeprefix("models--").replace("--", "/", 1) for name in names)


def data_files(text: str) -> list[str]:
    """Files of data under the folder that is typed so far, and the folders there."""
    if text and not _is_path(text) and "/" in text:
        return []  # a hub id
    return [name for name in _entries(text) if name.endswith(("/", *DATA_SUFFIXES))][:MOST]


def machines(text: str) -> list[str]:
    """``local``, ``cpu``, and as many of each card as the text says."""
    from profiles.cards import load_cards

    counted = _COUNT.fullmatch(text.strip())
    count, rest = (counted[1], counted[2]) if counted else ("1", text)
    cards = [f"{count}x{name}" for name in matching(rest, (card.id for card in load_cards()))]
    return matching(text, ("local", "cpu")) + cards


def pins(text: str) -> list[str]:
    """Knobs, then the values of the one that is typed."""
    from planner.pins import PARSERS

    knob, sign, value = text.partition("=")
    if not sign:
        return [f"{name}=" for name in matching(knob, PARSERS)]
    return [f"{knob}={name}" for name in matching(value, _values(knob.strip()))]


def more_pins(text: str) -> list[str]:
    """The same for the last of a list of pins."""
    before, comma, last = text.rpartition(", ")
    return [f"{before}{comma}{choice}" for choice in pins(last)]


def _values(knob: str) -> Sequence[str]:
    """Words that a knob may have; none of a knob that takes a number."""
    from planner.choice import LOSS_PATHS, OFFLOAD_TARGETS, RECOMPUTES, SHARDINGS, Attention, MixedPrecision, Weights
    from planner.memory.optimizers import OPTIMIZERS
    from profiles.routes import load_routes

    words: dict[str, Sequence[str]] = {
        "loss_path": LOSS_PATHS,
        "recompute": RECOMPUTES,
        "offload": OFFLOAD_TARGETS,
        "sharding": SHARDINGS,
        "optimizer": list(OPTIMIZERS),
        "weights": get_args(Weights),
        "mixed_precision": get_args(MixedPrecision),
        "attention": get_args(Attention),
        "precision": [route.id for route in load_routes()],
    }
    return words.get(knob, ())


def _is_path(text: str) -> bool:
    """Whether the text starts like a place on this machine."""
    if text.startswith((".", "/", "~")):
        return True
    first = text.partition("/")[0]
    try:
        return bool(first) and Path(first).is_dir()
    except (OSError, ValueError):
        return False


def _entries(text: str) -> Iterator[str]:
    """What stands in the folder that ``text`` is in, in the text's own spelling; folders end in ``/``."""
    folder, _, start = text.rpartition("/")
    where = folder + "/" if "/" in text else ""
    found: list[str] = []
    try:
        with os.scandir(expanded(where or ".")) as entries:
            for entry in islice(entries, MOST_ENTRIES):
                is_hidden = entry.name.startswith(".") and not start.startswith(".")
                if entry.name.startswith(start) and entry.name.isprintable() and not is_hidden:
                    found.append(where + entry.name + ("/" if _is_folder(entry) else ""))
    except (OSError, ValueError):  # no such folder, a NUL
        return iter(())
    return iter(sorted(found, key=lambda name: (not name.endswith("/"), name.lower())))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False
