"""Pins: knobs that the user fixed, read from flags or YAML into typed values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast, get_args

from planner.choice import (
    LOSS_PATHS,
    OFFLOAD_TARGETS,
    RECOMPUTES,
    SHARDINGS,
    Attention,
    MixedPrecision,
    Weights,
)
from planner.memory.optimizers import find_optimizer


class PinError(ValueError):
    """A pin that names no knob, or no value of its knob."""


MAX_SIZE = 1_000_000


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _word(*words: str) -> Callable[[str, Any], str]:
    def parse(knob: str, value: Any) -> str:
        text = str(value).strip()
        # YAML reads a bare no as False; as a precision it is the word.
        if value is False and "no" in words:
            text = "no"
        if text not in words:
            raise PinError(f"{knob}={_short(text)} is not a value of this knob; choose one of {', '.join(words)}")
        return text

    return parse


def _size(knob: str, value: Any) -> int:
    try:
        number = int(str(value))
    except ValueError:
        number = 0
    if isinstance(value, bool) or not 1 <= number <= MAX_SIZE:
        raise PinError(f"{knob}={_short(value)} is not a size; give a whole number from 1 to {MAX_SIZE:,}")
    return number


def _offload(knob: str, value: Any) -> frozenset[str]:
    if isinstance(value, (list, tuple, set, frozenset)):
        given: Iterable[Any] = cast("Iterable[Any]", value)
    else:
        given = str(value).split(",")
    words = frozenset(text for part in given if (text := str(part).strip()))
    unknown = sorted(words - set(OFFLOAD_TARGETS))
    if unknown:
        raise PinError(
            f"{knob}={_short(unknown[0])} is not a value of this knob; use a subset of {', '.join(OFFLOAD_TARGETS)}"
        )
    return words


def _optimizer(knob: str, value: Any) -> str:
    try:
        return find_optimizer(str(value).strip()).name
    except ValueError as error:
        raise PinError(f"{knob}: {error}") from None


def _route(knob: str, value: Any) -> str:
    text = str(value).strip()
    if text != "bf16":
        from planner.precision.routes import asked_route  # most plans do without

        try:
            asked_route({knob: text})
        except LookupError as error:
            raise PinError(f"{knob}={_short(value)}: {error}") from None
    return text


PARSERS: dict[str, Callable[[str, Any], Any]] = {
    "loss_path": _word(*LOSS_PATHS),
    "recompute": _word(*RECOMPUTES),
    "offload": _offload,
    "sharding": _word(*SHARDINGS),
    "cp": _size,
    "sp": _size,
    "tp": _size,
    "dp_shard": _size,
    "dp_replicate": _size,
    "micro_batch": _size,
    "grad_accum": _size,
    "optimizer": _optimizer,
    "weights": _word(*get_args(Weights)),
    "mixed_precision": _word(*get_args(MixedPrecision)),
    "attention": _word(*get_args(Attention)),
    "precision": _route,
    "gpus": _size,
}
"""Knob -> parser. ``gpus`` is the number of cards to use over all nodes."""


def parse_pins(pins: Mapping[str, Any]) -> dict[str, Any]:
    """Typed pins; a pin without a value (YAML null) leaves its knob open.

    Raises:
        PinError: an unknown knob or value; the message names both and what is allowed.
    """
    parsed: dict[str, Any] = {}
    for knob, value in pins.items():
        parser = PARSERS.get(knob)
        if parser is None:
            raise PinError(f"{_short(knob)} is not a knob; knobs: {', '.join(PARSERS)}")
        if value is not None:
            parsed[knob] = parser(knob, value)
    return parsed
