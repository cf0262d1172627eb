"""What was measured of single cards: the best product, as a share of the data sheet's rate."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_TABLE = Path(__file__).with_name("card_shares.toml")


@dataclass(frozen=True, slots=True)
class CardShare:
    """The best matrix product of one card."""

    card: str
    """Its id in the card table."""
    ceiling: float
    """Share of the dense bf16 rate."""
    note: str
    """The measurement."""


@cache
def load_card_shares() -> dict[str, CardShare]:
    """Every measured card by its id; the table's head says who measured."""
    table = tomllib.loads(_TABLE.read_text(encoding="utf-8"))
    return {card: CardShare(card, entry["ceiling"], entry["note"]) for card, entry in table.items()}


def matmul_ceiling(card: str) -> float | None:
    """The measured share of a card by its id, None where there is none."""
    found = load_card_shares().get(card)
    return found.ceiling if found else None
