"""Named machines: cards of the table that need not be here, idle and all alike."""

from __future__ import annotations

from planner.machine import Card, Machine
from profiles.cards import CardProfile


def named_machine(profile: CardProfile, num_cards: int, nodes: int = 1) -> Machine:
    """``8xH100-80GB`` as a machine that nobody else uses.

    Args:
        profile: the card.
        num_cards: cards of one node.
        nodes: nodes of that kind.
    """
    return Machine(
        origin="named",
        spec=f"{num_cards}x{profile.id}",
        cards=[_card(profile, index, num_cards) for index in range(num_cards)],
        nodes=nodes,
        notes=_notes(profile, num_cards),
    )


def _card(profile: CardProfile, index: int, num_cards: int) -> Card:
    linked = [i for i in range(num_cards) if i != index] if profile.nvlink == "all" else []
    return Card(
        index=index,
        name=profile.product_name,
        card_id=profile.id,
        total_bytes=profile.nvml_bytes,
        free_bytes=profile.nvml_bytes - profile.driver_bytes,
        reserved_bytes=profile.driver_bytes,
        compute_capability=profile.compute_capability,
        nvlink_peers=linked,
    )


def _notes(profile: CardProfile, num_cards: int) -> list[str]:
    notes: list[str] = []
    if not profile.verified:
        notes.append(
            f"the memory of {profile.id} was not read on a card; what NVML reports there may "
            "differ by a few hundred MiB"
        )
    if num_cards > 1 and profile.nvlink == "bridge":
        notes.append(f"{profile.id} may be linked in pairs by a bridge; this plan takes them without one")
    return notes
