"""The fields of the goal form: label, how text becomes a value, what may be chosen."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

from launcher.flags import tokens, word_list
from planner.job import Goal, Job, Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One row of the form."""

    path: str
    """Dotted field of the job."""
    label: str
    parse: Callable[[str], Any] = str
    choices: tuple[str, ...] = ()
    """What Enter steps through; empty for a field that is typed."""
    says: str = ""
    """What the field is, where nothing was found out about it."""
    shown_for: tuple[str, ...] = ("full", "lora", "qlora")
    """Methods that have it."""

    def text(self, job: Job) -> str:
        """The value of ``job`` as it would be typed."""
        value: Any = job.model_dump(mode="json")
        for part in self.path.split(".", 1) if self.path.startswith("trl.") else self.path.split("."):
            value = value.get(part) if isinstance(value, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        if value is None:
            return ""
        if isinstance(value, bool):
            return "on" if value else "off"
        if isinstance(value, dict):
            return ", ".join(f"{knob}={_pin_text(pin)}" for knob, pin in value.items())  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        if isinstance(value, list):
            return ",".join(map(str, value))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        return f"{value:,}" if isinstance(value, int) else str(value)  # pyright: ignore[reportUnknownArgumentType]

    def next(self, current: str) -> str:
        """The choice after ``current``."""
        place = self.choices.index(current) if current in self.choices else -1
        return self.choices[(place + 1) % len(self.choices)]

    def value(self, text: str) -> Any:
        """The value that ``text`` means.

        Raises:
            ValueError: it is none.
        """
        try:
            return self.parse(text.strip())
        except ArgumentTypeError as error:
            raise ValueError(str(error)) from None
        except ValueError:
            raise ValueError(f"{text.strip()!r} is no value of {self.label}") from None


def _number(text: str) -> int:
    return int(text.replace(",", "").replace("_", ""))


def _count(text: str) -> int:
    number = _number(text)
    if number < 1:
        raise ValueError(text)
    return number


def _switch(text: str) -> bool:
    return {"on": True, "yes": True, "true": True, "off": False, "no": False, "false": False}[text.lower()]


def _switched(text: str) -> bool:
    try:
        return _switch(text)
    except KeyError:
        raise ValueError(text) from None


def _share(text: str) -> float:
    return float(text.rstrip("% ")) / 100 if text.endswith("%") else float(text)


def _above_zero(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise ValueError(text)
    return number


def _pin_text(pin: Any) -> str:
    if isinstance(pin, list):
        return ",".join(map(str, pin))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return "" if pin is None else str(pin)


def pins(text: str) -> dict[str, str]:
    """``recompute=full, offload=act,opt`` as knobs and their values.

    Raises:
        ArgumentTypeError: it is no such list, or a knob has no such value.
    """
    from planner.pins import PinError, parse_pins  # not before somebody pins

    pairs = [part.partition("=") for part in _BETWEEN_PINS.split(text) if part.strip()]
    if any(not sign for _, sign, _ in pairs):
        raise ArgumentTypeError("knob=value, such as recompute=full; a comma before the next one")
    found = {knob.strip(): value.strip() for knob, _, value in pairs}
    try:
        parse_pins(found)
    except PinError as error:
        raise ArgumentTypeError(str(error)) from None
    return found


def _optional(text: str) -> str | None:
    return text or None


_BETWEEN_PINS = re.compile(r",\s*(?=[a-z_]+\s*=)")
"""Values may be lists themselves."""
FIELDS = (
    Field(path="model", label="model", says="hub id, folder, or config.json"),
    Field(path="trainer", label="trainer", choices=get_args(Trainer), says="TRL's trainer"),
    Field(path="method", label="method", choices=("full", "lora", "qlora"), says="what is trained"),
    Field(path="lora.r", label="LoRA rank", parse=_number, says="rank of the adapters", shown_for=("lora", "qlora")),
    Field(
        path="quantization",
        label="quantization",
        choices=("nf4", "nf4-double", "int8"),
        says="of the base weights",
        shown_for=("qlora",),
    ),
    Field(path="data.dataset", label="data", parse=_optional, says="hub id, or a .jsonl, .json, .parquet or .csv"),
    Field(path="seq_len", label="max length", parse=tokens, says="tokens; 128k and 1M are understood"),
    Field(path="data.packing", label="packing", parse=_switched, choices=("off", "on"), says="several rows in one"),
    Field(path="global_batch", label="global batch", parse=_number, says="sequences per step over all GPUs"),
    Field(path="trl.num_train_epochs", label="epochs", parse=_above_zero, says="trainer's default where empty"),
    Field(path="trl.max_steps", label="steps at most", parse=_count, says="as many as the epochs have, where empty"),
    Field(path="trl.learning_rate", label="learning rate", parse=_above_zero, says="trainer's default where empty"),
    Field(path="machine", label="machine", says="local, cpu, 8xH100-80GB, or a machine.json"),
    Field(path="nodes", label="nodes", parse=_number, says="of such a machine"),
    Field(path="goal", label="goal", choices=get_args(Goal), says="what the ranking is for"),
    Field(path="reserve", label="kept free", parse=_share, says="share of each card"),
    Field(path="allow", label="may alter", parse=word_list, says="numerics, method: else only offered"),
    Field(path="pins", label="pins", parse=pins, says="knobs to keep: recompute=full, cp=8"),
)


def fields_for(method: str) -> tuple[Field, ...]:
    """Rows of the form for a method."""
    return tuple(field for field in FIELDS if method in field.shown_for)
