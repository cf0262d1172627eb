"""Where measurements are kept: beside the traced coefficients, one file for each machine, kind and set of options.

Files are written beside and renamed, so writers may run at once and be killed: each leaves its own file whole, and of
two that measured the same the later one stands. A plan that finds no folder asks the system once and reads nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from launcher.diagnostics import report_note
from launcher.errors import EnvironmentLacks, UsageError
from launcher.files import folder_to_keep_in, replace_file
from launcher.inputs.small_file import read_text
from launcher.paths import cache_dir
from planner.stack import Stack, public_versions

if TYPE_CHECKING:
    from planner.architecture import Architecture
    from planner.machine import Machine
    from planner.measured.probes import Measured

PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate")
"""What decides a job's bytes and seconds."""
ZERO_PACKAGES = (*PACKAGES, "deepspeed")
"""The same of a plan that ran under ZeRO on all of its ranks."""
EXPORT_SCHEMA = "trlfit.measurements/1"
ROOM_BYTES = 2**14
"""Four times what a measurement of one rank takes, twice that of eight."""
MAX_FILE_BYTES = 32 * 2**20
_RATES_FIELDS = ("card", "name", "threads", "driver")
Document = Mapping[str, Any]


def measurements_folder() -> Path:
    """Where measurements are kept."""
    return cache_dir() / "measurements"


def keep_measurement(document: Document) -> Path:
    """Keep one measurement in the place of an older one of the same.

    Raises:
        OSError: the cache cannot be written.
    """
    path = folder_to_keep_in(measurements_folder()) / _file_name(document)
    replace_file(path, json.dumps(document, separators=(",", ":")))
    return path


def check_room_to_keep() -> None:
    """Write as much as a measurement takes where measurements are kept, and leave nothing.

    Raises:
        OSError: the cache cannot be written.
    """
    with tempfile.TemporaryFile(dir=folder_to_keep_in(measurements_folder())) as file:
        file.write(bytes(ROOM_BYTES))


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.casefold()).strip("-")[:60] or "unnamed"


def device_slug(card: str | None, cpu: tuple[str, int] | None) -> str:
    """How files of one device begin: its id in the card table, its name, or the CPU's name and threads."""
    if card is not None:
        return f"card-{_slug(card)}"
    name, threads = cpu or ("", 0)
    return f"cpu-{_slug(name)}-{threads}"


def _file_name(document: Document) -> str:
    kind, on_cpu = document["kind"], document["device"] == "cpu"
    cpu = (str(document["name"]), int(document.get("threads") or 0)) if on_cpu else None
    key: list[Any] = [document.get(name) for name in _RATES_FIELDS]
    if kind != "rates":
        versions = public_versions(document["versions"])
        part: Document = document[kind]
        key += [{package: versions.get(package) for package in _packages(document)}]
        key += [part[name] for name in ("trainer", "shape", "vocab", "tied", "options", "lora_r", "choice")]
        key += [part["scored_beside"]] if part.get("scored_beside") else []
        key += [sorted((cell["layers"], cell["sequence"]) for cell in part["cells"])] if kind == "whole" else []
    shape = f"{document[kind]['shape'][:16]}-" if kind != "rates" else ""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    card = None if on_cpu else str(document.get("card") or document["name"])
    return f"{device_slug(card, cpu)}.{kind}.{shape}{digest}.json"


def _packages(document: Document) -> tuple[str, ...]:
    """Whose versions a job or a plan was measured with."""
    choice: Document = document[document["kind"]]["choice"]
    return ZERO_PACKAGES if str(choice["sharding"]).startswith("zero") else PACKAGES


def read_measurements(prefix: str = "") -> list[tuple[Path, dict[str, Any]]]:
    """What is kept, newest first; files that cannot be read are ignored with a note.

    Args:
        prefix: how the names of wanted files begin.
    """
    try:
        names = [entry.name for entry in os.scandir(measurements_folder()) if entry.name.startswith(prefix)]
    except FileNotFoundError:
        return []
    except OSError as error:
        report_note(f"measurements are not read: {measurements_folder()}: {error.strerror}")
        return []
    from planner.measured.check import BadMeasurement, check_measurement  # only plans with a probe pay for it

    found: list[tuple[Path, dict[str, Any]]] = []
    for name in sorted(names):
        if name.startswith(".") or not name.endswith(".json"):
            continue
        path = measurements_folder() / name
        try:
            if path.exists() and not path.is_file():
                raise OSError(None, "no file")  # a pipe would be waited for
            with path.open("rb") as file:
                found.append((path, check_measurement(json.loads(file.read(MAX_FILE_BYTES)))))
        except FileNotFoundError:
            continue  # forgotten by another process meanwhile
        except BadMeasurement as error:
            report_note(f"measurement {path} is ignored: {error}")
        except (OSError, ValueError, RecursionError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not JSON"
            report_note(f"measurement {path} is ignored: {reason}")
    return sorted(found, key=lambda pair: str(pair[1]["taken"]), reverse=True)


def measured_for(machine: Machine, stack: Stack, architecture: Architecture, notes: list[str]) -> Measured | None:
    """What is known by measurement for a plan, None where nothing is.

    Args:
        machine: whose card, driver or CPU must have been measured.
        stack: a job's bytes and seconds count only if they were measured with its versions.
        architecture: the planned model.
        notes: receives a sentence for what is used and for what is not.
    """
    if not measurements_folder().is_dir():
        return None
    card, driver = card_of(machine), machine.driver_version
    cpu = None
    if not machine.usable_cards:
        if machine.origin != "cpu":
            return None  # another box's CPU has no name
        cpu = this_cpu(machine)
    elif card is None:
        return None
    prefix = device_slug(card, cpu)
    documents = [document for _, document in read_measurements(f"{prefix}.")]
    same = [d for d in documents if d["device"] == "cpu" or driver is None or d.get("driver") == driver]
    if not same:
        if documents:
            other = documents[0].get("driver")
            notes.append(f"measured under driver {other}, which is not this machine's {driver}: `trlfit probe` again")
        return None
    from planner.measured.document import job_of, rates_of, whole_of
    from planner.measured.probes import Measured

    rates = next((rates_of(d) for d in same if d["kind"] == "rates"), None)
    usable = list(_of_stack(same, stack, architecture, notes))
    jobs = [job_of(d) for d in usable if d["kind"] == "job"]
    wholes = [whole_of(d) for d in usable if d["kind"] == "whole"]
    if rates is not None:
        notes.append(f"this machine's rates are {rates.source}")
    found = Measured(
        card=card,
        rates=rates,
        jobs=tuple(job for job in jobs if job is not None),
        wholes=tuple(whole for whole in wholes if whole is not None),
    )
    return found if found.rates or found.jobs or found.wholes else None


def _of_stack(
    documents: Iterable[Document], stack: Stack, architecture: Architecture, notes: list[str]
) -> Iterable[Document]:
    """Jobs and plans of the architecture's layers that ran with the stack's versions."""
    from planner.memory.coefficients_json import shape_hash

    shape, here = shape_hash(architecture), public_versions(stack.versions)
    for document in documents:
        kind = document["kind"]
        if kind == "rates" or document[kind]["shape"] != shape:
            continue
        versions = public_versions(document["versions"])
        other = {
            package: version
            for package in _packages(document)
            if (version := here.get(package)) and version != versions.get(package)
        }
        if other:
            listed = ", ".join(f"{package} {versions.get(package) or 'none'}" for package in other)
            again = "--measure" if kind == "job" else "--whole"
            sentence = f"a probe of these layers with {listed} is not used for this stack: `trlfit probe {again}` again"
            if sentence not in notes:
                notes.append(sentence)
            continue
        yield document


def card_of(machine: Machine) -> str | None:
    """The one kind of card of a machine: its id in the card table, else its name; None for none or several."""
    kinds = {card.card_id or card.name for card in machine.usable_cards}
    return kinds.pop() if len(kinds) == 1 else None


def this_cpu(machine: Machine) -> tuple[str, int]:
    """(name, threads that a run takes) of the CPU here."""
    from launcher.inputs.host import cpu_name

    asked = os.environ.get("OMP_NUM_THREADS", "")
    cores = machine.host.cores if machine.host else 1
    return cpu_name(), int(asked) if asked.isdigit() and int(asked) else cores


def forget_measurements(words: Iterable[str]) -> list[dict[str, Any]]:
    """Remove what is kept, all or files whose name has any of ``words``, and return what could be read of it.

    Raises:
        OSError: a file cannot be removed.
    """
    wanted = [word.casefold() for word in words]
    readable = dict(read_measurements())
    removed: list[dict[str, Any]] = []
    for path in sorted(measurements_folder().glob("*.json")) if measurements_folder().is_dir() else []:
        ours = path.is_file() or path.is_symlink()
        if ours and (not wanted or any(word in path.name for word in wanted)):
            with suppress(FileNotFoundError):
                path.unlink()
                removed.append(readable.get(path, {"file": path.name}))
    return removed


def export_measurements(path: Path) -> list[dict[str, Any]]:
    """Write everything that is kept into one file, beside and renamed, or into a pipe or device, and return it.

    Raises:
        UsageError: the path names no file.
        EnvironmentLacks: the file cannot be written.
    """
    if not path.name:
        raise UsageError(f"--export {path}: name a file")
    kept = [document for _, document in read_measurements()]
    text = json.dumps({"schema": EXPORT_SCHEMA, "measurements": kept}, indent=1) + "\n"
    try:
        # Nothing takes the place of a device, or of a link to one.
        if path.is_symlink() or (path.exists() and not path.is_file() and not path.is_dir()):
            path.write_text(text, "utf-8")
        else:
            replace_file(path, text)
    except OSError as error:
        raise EnvironmentLacks(f"--export {path}: {error.strerror}") from None
    return kept


def import_measurements(path: Path) -> list[dict[str, Any]]:
    """Keep what another box exported, nothing of it if any part of it is no measurement.

    What is here already and was taken later stays.

    Returns:
        What was taken in.

    Raises:
        UsageError: the file is not what ``export_measurements`` writes.
        OSError: the cache cannot be written.
    """
    from planner.measured.check import BadMeasurement, check_measurement

    text = read_text(path, "--import", MAX_FILE_BYTES, "write one with `trlfit probe --export FILE`")
    try:
        data: Any = json.loads(text)
    except (ValueError, RecursionError):
        raise UsageError(f"--import {path}: not JSON; write one with `trlfit probe --export FILE`") from None
    if not isinstance(data, dict) or cast("dict[str, Any]", data).get("schema") != EXPORT_SCHEMA:
        raise UsageError(f"--import {path}: its schema is not {EXPORT_SCHEMA}; write one with `trlfit probe --export`")
    listed = cast("dict[str, Any]", data).get("measurements")
    if not isinstance(listed, list):
        raise UsageError(f"--import {path}: it holds no list of measurements")
    documents: list[dict[str, Any]] = []
    for index, entry in enumerate(cast("list[object]", listed)):
        try:
            documents.append(check_measurement(entry))
            _file_name(documents[-1])
        except (BadMeasurement, KeyError, TypeError, ValueError) as error:
            raise UsageError(f"--import {path}: measurements[{index}]: {error}") from None
    here = {path.name: str(kept["taken"]) for path, kept in read_measurements()}
    newer = [document for document in documents if str(document["taken"]) >= here.get(_file_name(document), "")]
    for document in newer:
        keep_measurement(document)
    return newer
