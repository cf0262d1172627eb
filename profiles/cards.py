"""The card table: rates, memory and links of NVIDIA cards, found by id or by NVML name."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

_TABLE = Path(__file__).with_name("cards.json")
_MIB = 1024**2

_VENDOR = re.compile(r"^(?:nvidia|tesla|geforce)+")
# What may follow a family name and still mean that family: memory size and form factor. `Ti`,
# `SUPER`, `Laptop GPU` or the `S` of L40S are other products.
_FORM_FACTOR = re.compile(r"(?:\d+gb|pcie|nvl|sxm\d?|hbm\d\w?|server)*")
# What NVML may print after a name of the table: memory size and the profile of a MIG slice.
_NVML_SUFFIX = re.compile(r"(?: \d+ ?gb| hbm\d\w?)*(?: mig .*)?")

DRIVER_BYTES = 600 * _MIB
"""Kept by the driver of a card that no report tells of: 0.4 to 0.9 GiB on 22 others, the median 0.5."""
MEMORY_TOLERANCE = 0.12
"""Two totals of one product differ by up to 7 % (ECC on or off) and 10 to 12 GB by 20 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardProfile:
    """What is known of one product. Rates are dense, in TFLOP/s; bandwidths in GB/s (1e9 bytes)."""

    id: str
    """The name in machine specs: ``H100-80GB``."""
    nvml_names: tuple[str, ...]
    """How NVML names it, without what may follow (memory size, MIG profile)."""
    aliases: tuple[str, ...]
    """Other ways to write the id."""
    compute_capability: str
    """``9.0`` for Hopper."""
    bf16_tflops: float | None
    """Tensor rate with fp32 accumulation; None where the card has no bf16 units."""
    fp16_tflops: float | None
    fp8_tflops: float | None
    fp4_tflops: float | None
    fp32_tflops: float
    """Rate off the tensor cores."""
    hbm_gb_s: float
    """Bandwidth of the card's memory."""
    nvml_bytes: int
    """NVML's total, which includes what the driver keeps for itself."""
    driver_bytes: int
    """Of ``nvml_bytes``, what the driver keeps and CUDA never offers."""
    verified: bool
    """Whether ``nvml_bytes`` was read on a card; otherwise a live reading is the better one."""
    nvlink_total_gb_s: float
    """Both directions over all links; 0 without NVLink."""
    nvlink: Literal["none", "bridge", "all"]
    """``all`` cards of a node are linked, two by a ``bridge`` that may not be fitted, or none."""
    host_link_gb_s: float
    """To host memory, one way."""
    tdp_w: float
    sources: tuple[str, ...]
    """Where the figures are from, one sentence each."""
    note: str

    @property
    def product_name(self) -> str:
        """NVML's name of the usual variant."""
        return self.nvml_names[0]


class CardNotFound(LookupError):
    """No single card goes by that name.

    Attributes:
        text: What was asked for.
        candidates: Ids it may mean (ambiguous), or the nearest ids.
        ambiguous: Whether the text names a family of several cards.
    """

    def __init__(self, text: str, candidates: tuple[str, ...], *, ambiguous: bool) -> None:
        self.text = text
        self.candidates = candidates
        self.ambiguous = ambiguous
        if ambiguous:
            message = f"{text!r} may be {', '.join(candidates)}"
        elif candidates:
            message = f"no card {text!r}; nearest: {', '.join(candidates)}"
        else:
            message = f"no card {text!r}; for example H100-80GB, A100-80GB, RTX4090"
        super().__init__(message)


@cache
def _table() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(_TABLE.read_text(encoding="utf-8"))
    return document


@cache
def load_cards() -> tuple[CardProfile, ...]:
    """Every card of the table, from old to new."""
    table = _table()
    return tuple(_profile(entry, table["sources"]) for entry in table["gpus"])


def _profile(entry: dict[str, Any], sources: dict[str, str]) -> CardProfile:
    return CardProfile(
        id=entry["id"],
        nvml_names=tuple(entry["nvml_names"]),
        aliases=tuple(entry["aliases"]),
        compute_capability=entry["compute_capability"],
        bf16_tflops=entry["bf16_tflops"],
        fp16_tflops=entry["fp16_tflops"],
        fp8_tflops=entry["fp8_tflops"],
        fp4_tflops=entry["fp4_tflops"],
        fp32_tflops=entry["fp32_tflops"],
        hbm_gb_s=entry["hbm_gb_s"],
        nvml_bytes=entry["nvml_mib"] * _MIB,
        driver_bytes=_driver_bytes(entry["nvml_mib"] * _MIB, entry["cuda_gib"]),
        verified=entry["nvml_verified"],
        nvlink_total_gb_s=entry["nvlink_total_gb_s"],
        nvlink=entry["nvlink"],
        host_link_gb_s=entry["host_link_gb_s_one_way"],
        tdp_w=entry["tdp_w"],
        sources=tuple(sources[key] for key in entry["sources"]),
        note=entry["note"],
    )


def _driver_bytes(nvml_bytes: int, cuda_gib: float | None) -> int:
    return DRIVER_BYTES if cuda_gib is None else nvml_bytes - int(cuda_gib * 1024 * _MIB)


def _key(text: str) -> str:
    """``NVIDIA GeForce RTX 4090``, ``rtx-4090`` and ``RTX4090`` become one."""
    return _VENDOR.sub("", re.sub(r"[\s_\-./]+", "", text).casefold())


@cache
def _by_key() -> dict[str, CardProfile]:
    keys: dict[str, CardProfile] = {}
    for card in load_cards():
        for text in (card.id, *card.aliases, *card.nvml_names):
            # The first entry of the table keeps a name that two share (`RTX 4060 Ti`).
            keys.setdefault(_key(text), card)
    for key, card in list(keys.items()):
        if key.startswith("rtx"):
            keys.setdefault(key.removeprefix("rtx"), card)
    return keys


def find_card(text: str) -> CardProfile:
    """The card that ``text`` names: an id, an alias, NVML's name, or an unambiguous family.

    Letter case, ``-``, ``_`` and spaces do not matter; ``4090`` is ``RTX4090``, ``H100`` is the SXM
    card that most H100 machines have.

    Raises:
        CardNotFound: With the ids that ``text`` may mean, or the nearest ones.
    """
    key = _key(text)
    keys = _by_key()
    found = keys.get(key) or keys.get(key + "gb")
    if found is not None:
        return found
    family = _family(key)
    if len(family) == 1:
        return family[0]
    if family:
        raise CardNotFound(text, tuple(card.id for card in family), ambiguous=True)
    raise CardNotFound(text, nearest(text), ambiguous=False)


def _family(key: str) -> list[CardProfile]:
    """Cards whose id is ``key`` with a memory size or a form factor behind it."""
    if not key:
        return []
    ids = ((_key(card.id), card) for card in load_cards())
    return [card for own, card in ids if own.startswith(key) and _FORM_FACTOR.fullmatch(own.removeprefix(key))]


def nearest(text: str, count: int = 3) -> tuple[str, ...]:
    """Ids that look like ``text``, the most alike first; empty when nothing does."""
    import difflib  # Only mistyped names need it.

    keys = _by_key()
    alike = difflib.get_close_matches(_key(text)[:64], keys, n=4 * count, cutoff=0.55)
    return tuple(dict.fromkeys(keys[key].id for key in alike))[:count]


def card_for_nvml_name(name: str, total_bytes: int | None = None) -> CardProfile | None:
    """The profile of the product that NVML calls ``name``.

    Args:
        name: NVML's product name, of a card or of a MIG slice (``... MIG 3g.40gb``).
        total_bytes: NVML's total of the whole card. Products that share a name and differ in memory
            are told apart by it; None (and a slice's name) skips that check.

    Returns:
        The profile whose name is the longest beginning of ``name`` and whose memory agrees, or None
        when the product is not in the table.
    """
    text = _spoken(name)
    is_slice = " mig " in f"{text} "
    best: tuple[int, CardProfile] | None = None
    for card in load_cards():
        if total_bytes is not None and not is_slice and not _same_memory(card, total_bytes):
            continue
        for own in map(_spoken, card.nvml_names):
            matches = text.startswith(own) and _NVML_SUFFIX.fullmatch(text.removeprefix(own))
            if matches and (best is None or len(own) > best[0]):
                best = (len(own), card)
    return best[1] if best else None


def _spoken(name: str) -> str:
    """Old drivers leave out `NVIDIA`, newer ones `Tesla`."""
    words = name.casefold().split()
    while words and words[0] in ("nvidia", "tesla", "geforce"):
        words.pop(0)
    return " ".join(words)


def _same_memory(card: CardProfile, total_bytes: int) -> bool:
    return abs(total_bytes - card.nvml_bytes) <= MEMORY_TOLERANCE * card.nvml_bytes
