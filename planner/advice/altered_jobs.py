"""Alterations: other jobs and machines that would be asked when nothing fits, least intrusive first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from planner.choice import Alters, Method
from planner.machine import MAX_NODES, Machine
from planner.named_machine import named_machine
from planner.problem import PlanInput, method_label, with_job
from planner.search.methods import LIGHTER, methods_of
from planner.search.space import ALONE
from profiles.cards import load_cards
from profiles.releases import newest_known
from profiles.stacks import load_packages

SHORTEST_OFFERED = 256
MAX_NODE_CARDS = 8
"""More cards than the usual node holds are offered as more nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One altered job on its machine."""

    flags: str
    """What to add to the command line."""
    what: str
    """The start of a sentence."""
    inputs: PlanInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Alteration:
    """One lever. Of its ``asked`` the first that fits is the smallest that would."""

    lever: str
    alters: Alters
    asked: Iterator[Asked]


def alterations(inputs: PlanInput) -> Iterator[Alteration]:
    """Each lever on its own, what alters least first: a newer TRL, numerics, method, other machines, fewer tokens."""
    yield Alteration(lever="idle cards", alters="nothing", asked=idle_cards(inputs))
    yield Alteration(lever="newer TRL", alters="nothing", asked=_newer_trl(inputs))
    yield Alteration(lever="states on the host", alters="nothing", asked=_states_on_host(inputs))
    yield Alteration(lever="no pins", alters="nothing", asked=_unpinned(inputs))
    yield Alteration(lever="numerics", alters="numerics", asked=_numerics(inputs))
    yield from lighter_methods(inputs)
    yield Alteration(lever="more GPUs", alters="nothing", asked=_more_cards(inputs))
    yield Alteration(lever="another card", alters="nothing", asked=other_cards(inputs))
    yield Alteration(lever="fewer tokens", alters="nothing", asked=_shorter(inputs))


def lighter_methods(inputs: PlanInput) -> Iterator[Alteration]:
    """Methods that train fewer states and are not tried anyway."""
    tried = methods_of(inputs.job)
    for method in LIGHTER[inputs.job.method]:
        if method not in tried:
            yield Alteration(lever=method, alters="method", asked=_method(inputs, method))


def all_together(inputs: PlanInput) -> Alteration:
    """The lightest numerics and method with more cards: for jobs that no lever alone makes fit."""
    lighter = () if "method" in inputs.job.allow else LIGHTER[inputs.job.method]
    method = (lighter or (inputs.job.method,))[-1]
    light = with_job(inputs, method=method, allow=sorted({*inputs.job.allow, "numerics"}))
    flags = allow_flag(light) + ("" if method == inputs.job.method else f" --method {method}")
    what = "lighter numerics" + ("" if method == inputs.job.method else f" and {method_label(method)}")
    asked = (replace(more, flags=f"{flags} {more.flags}", what=f"{what} on {more.what}") for more in _more_cards(light))
    return Alteration(lever="all together", alters="method", asked=asked)


def allow_flag(inputs: PlanInput) -> str:
    """The flag that says what the job allows; it stands for the whole list."""
    return f"--allow {','.join(inputs.job.allow)}"


def idle_cards(inputs: PlanInput) -> Iterator[Asked]:
    """The same machine without what other processes hold of its cards."""
    machine = inputs.machine
    busy = [card.index for card in machine.busy_cards]
    if busy:
        cards = [card.model_copy(update={"used_bytes": 0, "processes": []}) for card in machine.cards]
        names = f"card{'s' if len(busy) > 1 else ''} {', '.join(map(str, busy))}"
        idle = machine.model_copy(update={"cards": cards})
        yield Asked(flags="(once idle)", what=f"with {names} to itself", inputs=replace(inputs, machine=idle))


def _newer_trl(inputs: PlanInput) -> Iterator[Asked]:
    newest = newest_known()["trl"]
    if inputs.stack.has("trl") and not inputs.stack.has("trl", newest):
        stack = inputs.stack.model_copy(update={"versions": {**inputs.stack.versions, "trl": newest}})
        yield Asked(flags=f"--stack trl={newest}", what=f"TRL {newest}", inputs=replace(inputs, stack=stack))


def _states_on_host(inputs: PlanInput) -> Iterator[Asked]:
    """ZeRO on one card: asked for where nobody knows what the host holds, or DeepSpeed is not installed."""
    stack, cards = inputs.stack, inputs.machine.usable_cards
    if len(cards) * inputs.machine.nodes != 1 or {"sharding", "offload"} & inputs.job.pins.keys():
        return
    flags, what = "", "states on the host"
    if not stack.has("deepspeed"):
        newest = load_packages()["deepspeed"].newest
        stack = stack.model_copy(update={"versions": {**stack.versions, "deepspeed": newest}})
        flags, what = f" --stack deepspeed={newest}", f"{what} by DeepSpeed {newest}"
    for sharding, target in ALONE.items():
        offload = "optimizer" if target == "optimizer" else f"optimizer,{target}"
        asked = with_job(inputs, pins={**inputs.job.pins, "sharding": sharding, "offload": offload.split(",")})
        words = f"--pin sharding={sharding} --pin offload={offload}{flags}"
        yield Asked(flags=words, what=what, inputs=replace(asked, stack=stack))


def _unpinned(inputs: PlanInput) -> Iterator[Asked]:
    """Without each pin alone, then without all of them."""
    pins = {knob: value for knob, value in inputs.job.pins.items() if value is not None}
    for knob, value in pins.items():
        rest = {name: kept for name, kept in inputs.job.pins.items() if name != knob}
        yield _without(inputs, {knob: value}, rest)
    if len(pins) > 1:
        yield _without(inputs, pins, {})


def _without(inputs: PlanInput, dropped: dict[str, Any], rest: dict[str, Any]) -> Asked:
    words = " ".join(f"--pin {knob}={pin_text(value)}" for knob, value in dropped.items())
    return Asked(flags=f"(drop {words})", what=f"without {words}", inputs=with_job(inputs, pins=rest))


def pin_text(value: Any) -> str:
    """A pinned value as ``--pin KNOB=`` takes it."""
    return ",".join(map(str, value)) if isinstance(value, (list, tuple, set, frozenset)) else str(value)  # pyright: ignore[reportUnknownArgumentType]


def _numerics(inputs: PlanInput) -> Iterator[Asked]:
    job = inputs.job
    if "numerics" not in job.allow:
        allowed = with_job(inputs, allow=[*job.allow, "numerics"])
        yield Asked(flags=allow_flag(allowed), what="lighter weights or optimizer states", inputs=allowed)


def _method(inputs: PlanInput, method: Method) -> Iterator[Asked]:
    what = f"{method_label(method)} instead of {method_label(inputs.job.method)}"
    yield Asked(flags=f"--method {method}", what=what, inputs=with_job(inputs, method=method))


def _more_cards(inputs: PlanInput) -> Iterator[Asked]:
    """Twice, four and eight times as many of the machine's own card: on one node up to eight, then on more nodes."""
    machine, profile = inputs.machine, inputs.profile
    have = len(machine.usable_cards)
    for factor in (2, 4, 8) if have else ():
        nodes = machine.nodes
        count = have * factor
        if count > MAX_NODE_CARDS or nodes > 1:
            count, nodes = have, nodes * factor
        if nodes > MAX_NODES:
            return
        larger = named_machine(profile, count, nodes) if profile else _copied(machine, count, nodes)
        flags = f"--machine {count}x{profile.id if profile else 'CARD'}" + (f" --nodes {nodes}" if nodes > 1 else "")
        what = f"{count} such GPUs" + (f" on each of {nodes} nodes" if nodes > 1 else "")
        changed = with_job(inputs, machine=larger.spec, nodes=nodes)
        yield Asked(flags=flags, what=what, inputs=replace(changed, machine=larger))


def _copied(machine: Machine, count: int, nodes: int) -> Machine:
    """More of a card that is not in the table."""
    have = machine.usable_cards
    cards = [have[i % len(have)].model_copy(update={"index": i, "uuid": None}) for i in range(count)]
    return machine.model_copy(update={"cards": cards, "nodes": nodes, "origin": "named"})


def other_cards(inputs: PlanInput) -> Iterator[Asked]:
    """As many cards of each larger memory in the table, smallest first; of one size the oldest. One for a CPU."""
    machine = inputs.machine
    largest = max((card.total_bytes for card in machine.usable_cards), default=0)
    count = len(machine.usable_cards) or 1
    for card in sorted(load_cards(), key=lambda card: card.nvml_bytes):
        if card.nvml_bytes <= largest:
            continue
        largest = card.nvml_bytes
        other = named_machine(card, count, machine.nodes)
        changed = with_job(inputs, machine=other.spec)
        flags = f"--machine {other.spec}"
        yield Asked(flags=flags, what=f"{count} x {card.id}", inputs=replace(changed, machine=other, profile=card))


def _shorter(inputs: PlanInput) -> Iterator[Asked]:
    """Power-of-two fractions of the sequence, longest first."""
    length = inputs.job.seq_len // 2
    while length >= SHORTEST_OFFERED:
        what = f"sequences of {length:,} tokens"
        yield Asked(flags=f"--seq-len {length}", what=what, inputs=with_job(inputs, seq_len=length))
        length //= 2
