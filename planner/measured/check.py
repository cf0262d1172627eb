"""Whether a JSON document is a sound ``trlfit.measurement/1``, whoever wrote it: what passes can be planned with.

Measurements come from other boxes and other versions, and files get cut: every number that a plan reads is held to what
a machine can have done, so that nothing behind this looks again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast, get_args

from planner.choice import LOSS_PATHS, OFFLOAD_TARGETS, RECOMPUTES, SHARDINGS, Attention, Choice, Method, MixedPrecision
from planner.choice import Weights as WeightsType
from planner.job import rows_per_example
from planner.measured.probes import PHASES, probed_choice
from planner.memory.optimizers import OPTIMIZERS

SCHEMA = "trlfit.measurement/1"
KINDS = ("rates", "job", "whole")
MOST = 2**62
"""Above every byte, second and rate of a machine, and small enough for sums."""
MOST_TEXT = 1000
MOST_DEEP = 16
RATES = ("streaming_bytes_per_s", "host_to_device_bytes_per_s", "device_to_host_bytes_per_s")
_WORDS: Mapping[str, Sequence[str]] = {
    "method": get_args(Method),
    "loss_path": LOSS_PATHS,
    "recompute": RECOMPUTES,
    "sharding": SHARDINGS,
    "weights": get_args(WeightsType),
    "mixed_precision": get_args(MixedPrecision),
    "attention": get_args(Attention),
    "optimizer": tuple(OPTIMIZERS),
    "precision": ("bf16",),
}
"""Knob -> what a probe can have run."""


class BadMeasurement(ValueError):
    """A document that is no ``trlfit.measurement/1``; the message says what is wrong."""


def check_measurement(data: object) -> dict[str, Any]:
    """``data`` as a measurement.

    Raises:
        BadMeasurement: it is something else, of another version, or holds what no machine does.
    """
    if not isinstance(data, dict):
        raise BadMeasurement("no JSON object")
    document = cast("dict[str, Any]", data)
    if document.get("schema") != SCHEMA:
        raise BadMeasurement(f"schema is {str(document.get('schema'))[:40]!r} and not {SCHEMA!r}")
    kind = document.get("kind")
    if kind not in KINDS or not isinstance(document.get(kind), dict):
        raise BadMeasurement(f"kind is {str(kind)[:40]!r}, or it holds nothing of it")
    text = all(isinstance(document.get(name), str) for name in ("device", "name", "taken"))
    if not text or not isinstance(document.get("versions"), dict):
        raise BadMeasurement("device, name, taken or versions is missing")
    _check_values(document, "", 0)
    if document["device"] not in ("cpu", "cuda"):
        raise BadMeasurement(f"device is {document['device'][:40]!r}, not cpu or cuda")
    for name, version in document["versions"].items():
        _need(version, str, f"versions.{name}")
    for name, kind_of in (("card", str), ("driver", str), ("threads", int)):
        if document.get(name) is not None:
            _need(document[name], kind_of, name)
    if kind == "rates":
        _check_rates(document["rates"])
    else:
        _check_job(document[kind], kind)
    return document


def _check_values(value: object, where: str, depth: int) -> None:
    """Every number is finite, none is negative, and nothing is beyond all bounds."""
    if depth > MOST_DEEP:
        raise BadMeasurement(f"{where[:60]} goes on too deep")
    if isinstance(value, dict):
        for name, entry in cast("dict[str, object]", value).items():
            _check_values(entry, f"{where}.{name}".removeprefix("."), depth + 1)
    elif isinstance(value, list):
        for index, entry in enumerate(cast("list[object]", value)):
            _check_values(entry, f"{where}[{index}]", depth + 1)
    elif isinstance(value, str):
        if len(value) > MOST_TEXT:
            raise BadMeasurement(f"{where[:100]} has {len(value):,} characters")
    elif isinstance(value, int | float) and not 0 <= value <= MOST:  # NaN is in no interval
        raise BadMeasurement(f"{where[:100]} is {'beyond all bounds' if value > MOST else str(value)[:40]}")


def _need(value: object, kind: type, where: str, least: int | None = None) -> None:
    """``value`` is of a kind (true is no number), and no less than ``least``."""
    kinds = (int, float) if kind is float else (kind,)
    if type(value) not in kinds or (least is not None and cast("float", value) < least):
        bound = "" if least is None else f" of {least} or more"
        raise BadMeasurement(f"{where} is {str(value)[:40]!r}, no {kind.__name__}{bound}")


def _rows(part: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    rows = part.get(name, [])
    _need(rows, list, name)
    for index, row in enumerate(cast("list[object]", rows)):
        _need(row, dict, f"{name}[{index}]")
    return cast("list[Mapping[str, Any]]", rows)


def _check_rates(rates: Mapping[str, Any]) -> None:
    for index, product in enumerate(_rows(rates, "products")):
        _need(product.get("dtype"), str, f"products[{index}].dtype")
        for name in ("m", "n", "k"):
            _need(product.get(name), int, f"products[{index}].{name}")
        _need(product.get("flops_per_s"), float, f"products[{index}].flops_per_s", 1)
    for index, found in enumerate(_rows(rates, "collectives")):
        _need(found.get("kind"), str, f"collectives[{index}].kind")
        _need(found.get("ranks"), int, f"collectives[{index}].ranks")
        _need(found.get("bytes_per_s"), float, f"collectives[{index}].bytes_per_s", 1)
    for name in RATES:
        if rates.get(name) is not None:
            _need(rates[name], float, name, 1)
    for name in ("context_bytes", "stretched"):
        if rates.get(name) is not None:
            _need(rates[name], float, name)
    _need(rates.get("out_of_memory", []), list, "out_of_memory")


def _check_job(job: Mapping[str, Any], kind: str) -> None:
    for name in ("model", "trainer", "shape", "options"):
        _need(job.get(name), str, name)
    _need(job.get("scored_beside", ""), str, "scored_beside")
    _need(job.get("vocab"), int, "vocab")
    _need(job.get("tied"), bool, "tied")
    _need(job.get("lora_r"), int, "lora_r")
    choice = _choice(job.get("choice"))
    if kind != "whole" and probed_choice(choice) != choice:
        raise BadMeasurement("choice is not what one rank runs alone")
    rows = choice.micro_batch * rows_per_example(job["trainer"])
    cells = _rows(job, "cells")
    for index, cell in enumerate(cells):
        for name in ("layers", "sequence"):
            _need(cell.get(name), int, f"cells[{index}].{name}", 1)
        if "peaks" in cell:
            _check_cell(cell, choice, rows, f"cells[{index}]")
    if kind == "whole":
        return
    grid = sorted((cell["layers"], cell["sequence"]) for cell in cells)
    depths, lengths = sorted({layers for layers, _ in grid}), sorted({tokens for _, tokens in grid})
    if len(depths) != 2 or len(lengths) != 2 or grid != [(layers, tokens) for layers in depths for tokens in lengths]:
        raise BadMeasurement("its cells are not two depths at two lengths")


def _check_cell(cell: Mapping[str, Any], choice: Choice, rows: int, where: str) -> None:
    _need(cell.get("tokens"), int, f"{where}.tokens")
    if cell["tokens"] != rows * cell["sequence"]:
        raise BadMeasurement(f"{where}.tokens is {cell['tokens']}, not {rows} x {cell['sequence']}")
    _check_seen(cell, where)
    ranks = _rows(cell, "ranks")
    if len(ranks) != (choice.num_gpus if choice.num_gpus > 1 else 0):
        raise BadMeasurement(f"{where}.ranks has {len(ranks)} rows of a choice of {choice.num_gpus}")
    for index, rank in enumerate(ranks):
        _check_seen(rank, f"{where}.ranks[{index}]")


def _check_seen(seen: Mapping[str, Any], where: str) -> None:
    """Bytes and seconds by phase, of a cell or of one rank of it."""
    if seen.get("context_bytes") is not None:
        _need(seen["context_bytes"], int, f"{where}.context_bytes")
    for name, phases, number in (("peaks", PHASES, int), ("seconds", (*PHASES, "other"), float)):
        _need(seen.get(name), dict, f"{where}.{name}")
        for phase in phases:
            _need(seen[name].get(phase), number, f"{where}.{name}.{phase}")


def _choice(data: object) -> Choice:
    _need(data, dict, "choice")
    knobs = dict(cast("dict[str, object]", data))
    for knob, words in _WORDS.items():
        if knobs.get(knob) not in words:
            raise BadMeasurement(f"choice.{knob} is {str(knobs.get(knob))[:40]!r}, which no probe runs")
    offload = knobs.setdefault("offload", None)
    if not isinstance(offload, list) or not all(part in OFFLOAD_TARGETS for part in cast("list[object]", offload)):
        raise BadMeasurement(f"choice.offload is {str(knobs['offload'])[:40]!r}, which no probe runs")
    try:
        choice = Choice.from_json(knobs)
    except TypeError as error:
        raise BadMeasurement(f"choice: {error}") from None
    if min(choice.micro_batch, choice.grad_accum, choice.num_gpus) < 1:
        raise BadMeasurement("choice: a size is 0")
    return choice
