"""Machine specs: `local`, `cpu`, `8xH100-80GB` or a machine.json become a Machine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from launcher.errors import UsageError
from launcher.inputs.small_file import read_text
from launcher.inputs.validation_text import short
from launcher.paths import expanded
from planner.machine import MACHINE_SCHEMA, MAX_NODES, Machine
from planner.named_machine import named_machine
from profiles.cards import CardNotFound, find_card

MAX_CARDS = 128
"""Cards of one node; the largest link domain sold has 72."""

_MAX_FILE_BYTES = 8 * 1024**2
_NAMED = re.compile(r"(?:(?P<count>[+-]?\d+)\s*[xX\u00d7*]\s*)?(?P<card>.+)")
_HINT = "write local, cpu, NxCARD such as 8xH100-80GB, or a machine.json of `trlfit gpus --json`"


def resolve_machine(spec: str, nodes: int = 1) -> Machine:
    """The machine that a spec means.

    Args:
        spec: ``local``, ``cpu``, ``NxCARD``, ``CARD`` (one card), or the path of a machine file.
        nodes: Nodes of that kind. A file's own count stands when this is 1.

    Raises:
        UsageError: The spec means no machine, or the file is not one.
    """
    if not 1 <= nodes <= MAX_NODES:
        raise UsageError(f"--nodes {nodes}: write a number from 1 to {MAX_NODES}")
    text = spec.strip()
    if not text:
        raise UsageError(f"--machine is empty: {_HINT}")
    if text.casefold() == "local":
        return _local(nodes)
    if text.casefold() == "cpu":
        return _cpu("cpu", nodes, [])
    if _is_path(text):
        return _from_file(text, nodes)
    return _named(text, nodes)


def _local(nodes: int) -> Machine:
    # NVML and psutil cost 20 ms that planning for a named machine does not pay.
    from launcher.inputs.host import read_host
    from launcher.nvml.gpus import read_cards

    reading = read_cards()
    notes = list(reading.notes)
    if not reading.cards:
        if not notes:
            notes.append("no card is visible")
        notes[-1] += "; planning for the cpu (--machine NxCARD plans for other hardware)"
        machine = _cpu("local", nodes, notes)
        machine.driver_version, machine.cuda_version = reading.driver, reading.cuda
        return machine
    return Machine(
        origin="nvml",
        spec="local",
        cards=list(reading.cards),
        host=read_host(),
        nodes=nodes,
        driver_version=reading.driver,
        cuda_version=reading.cuda,
        notes=notes,
    )


def _cpu(spec: str, nodes: int, notes: list[str]) -> Machine:
    from launcher.inputs.host import read_host

    return Machine(origin="cpu", spec=spec, host=read_host(), nodes=nodes, notes=notes)


def _named(text: str, nodes: int) -> Machine:
    match = _NAMED.fullmatch(text)
    if match is None:
        raise UsageError(f"--machine {text!r} names no machine: {_HINT}")
    count = match["count"]
    num_cards = int(count[:12]) if count else 1
    if not 1 <= num_cards <= MAX_CARDS:
        raise UsageError(
            f"--machine {short(text)}: a node has 1 to {MAX_CARDS} cards, not {short(count)}; more of them take --nodes"
        )
    try:
        profile = find_card(match["card"])
    except CardNotFound as missing:
        raise UsageError(_not_found(text, match["card"], missing)) from None
    return named_machine(profile, num_cards, nodes)


def _not_found(text: str, card: str, missing: CardNotFound) -> str:
    where = f"--machine {short(text)}"
    if missing.ambiguous:
        return f"{where}: {short(card)!r} may be {', '.join(missing.candidates)}; write one of them"
    if missing.candidates:
        return f"{where}: no card {short(card)!r}; nearest: {', '.join(missing.candidates)} (`trlfit cards` lists all)"
    return f"{where}: no card {short(card)!r} (`trlfit cards` lists them); {_HINT}"


def _is_path(text: str) -> bool:
    if text.endswith(".json") or "/" in text or "\\" in text:
        return True
    try:
        # A folder called `H100` in the way is no reason to refuse the card.
        return Path(text).is_file()
    except (OSError, ValueError):
        return False


def _from_file(text: str, nodes: int) -> Machine:
    document = read_text(expanded(text), "machine file", _MAX_FILE_BYTES, _HINT)
    machine = machine_from_json(document, where=text)
    machine.origin = "file"
    machine.spec = text
    if nodes != 1:
        machine.nodes = nodes
    return machine


def machine_from_json(document: str, where: str) -> Machine:
    """Read a machine document.

    Args:
        document: JSON text.
        where: The file's name, for messages.

    Raises:
        UsageError: Broken JSON, another schema, or a field that is missing, unknown or impossible.
    """
    try:
        data: Any = json.loads(document)
    except json.JSONDecodeError as error:
        raise UsageError(f"{where}, line {error.lineno}, column {error.colno}: not JSON ({error.msg})") from None
    except (RecursionError, ValueError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise UsageError(f"{where}: not a machine file: {reason}") from None
    if not isinstance(data, dict) or "schema" not in data:
        raise UsageError(f"{where} is no machine file: it has no schema {MACHINE_SCHEMA}; {_HINT}")
    schema: Any = data["schema"]  # pyright: ignore[reportUnknownVariableType]
    if schema != MACHINE_SCHEMA:
        raise UsageError(
            f"{where} has schema {short(str(schema))}, not {MACHINE_SCHEMA}: "  # pyright: ignore[reportUnknownArgumentType]
            "take one with `trlfit gpus --json`"
        )
    try:
        machine = Machine.model_validate(data)
    except ValidationError as error:
        raise UsageError(f"{where}: {_first_error(error)}") from None
    _check_cards(machine, where)
    return machine


def _first_error(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    at = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
    more = error.error_count() - 1
    rest = f" (and {more} more)" if more else ""
    return f"{at.lstrip('.')}: {first['msg'][:1].lower()}{first['msg'][1:]}{rest}"


def _check_cards(machine: Machine, where: str) -> None:
    """What the types alone do not say, and planning relies on."""
    if len(machine.cards) > MAX_CARDS:
        raise UsageError(f"{where}: {len(machine.cards)} cards, and a node has {MAX_CARDS} at most")
    for position, card in enumerate(machine.cards):
        at = f"{where}: cards[{position}]"
        if card.index != position:
            raise UsageError(f"{at}.index: is {card.index}, write {position}: cards are in order")
        if card.usable and card.total_bytes == 0:
            raise UsageError(f"{at}.total_bytes: is 0 for a usable card")
        if max(card.free_bytes, card.used_bytes, card.reserved_bytes) > card.total_bytes:
            raise UsageError(f"{at}: used_bytes or free_bytes is more than total_bytes")
        wrong = [peer for peer in card.nvlink_peers if not 0 <= peer < len(machine.cards)]
        if wrong:
            raise UsageError(f"{at}.nvlink_peers: there is no card {wrong[0]}")
