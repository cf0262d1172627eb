"""Fields: checked reading of an untrusted ``config.json``, one refusal for all that does not fit.

Types are as strict as in transformers 5: ``"4096"``, ``4096.0`` and ``true`` are no sizes there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import cast

MAX_SIZE = 2**25
"""Far above any width, vocabulary or head count in use: the largest vocabulary is near 2^18."""
MAX_LAYERS = 4096
MAX_POSITIONS = 2**40
"""Some models declare tens of millions of positions; a few write a placeholder far above."""


class UnreadableConfig(ValueError):
    """A ``config.json`` that cannot be read: one line on what is missing or unknown, and where."""


def shown(value: object) -> str:
    """A value as an error message quotes it, cut to a readable length."""
    text = " ".join(repr(value).split()) if _small(value) else f"a {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."


def _small(value: object) -> bool:
    # repr of a nested or huge value may be megabytes long (and of a very long int an error).
    if isinstance(value, int):
        return abs(value) < 10**30
    return value is None or (isinstance(value, (str, float)) and len(str(value)) < 4096)


class Fields:
    """One level of the config: ``config.json`` itself, its ``text_config``, its ``vision_config``.

    ``defaults`` holds what transformers' config class fills in for a missing key; a key without a
    default is required. ``names`` maps a standard key to the family's own name for it.
    """

    __slots__ = ("_defaults", "_names", "assumed", "values", "where")

    def __init__(
        self,
        values: Mapping[str, object],
        where: str,
        defaults: Mapping[str, object] | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self.values = values
        self.where = where
        self.assumed: dict[str, object] = {}
        """Keys that were not in the config -> the default that was used, in the order of asking."""
        self._defaults = defaults or {}
        self._names = names or {}

    def get(self, key: str) -> object:
        """The value under ``key``, or under the family's name for it; None when absent or null."""
        return self.values.get(self._name(key))

    def _name(self, key: str) -> str:
        own = self._names.get(key, key)
        return own if own in self.values else key

    def has(self, key: str) -> bool:
        """Whether the config states ``key`` with a value other than null."""
        return self.get(key) is not None

    def refuse(self, reason: str) -> UnreadableConfig:
        """The error to raise, with the place in front: ``text_config: hidden_size is -1, ...``."""
        return UnreadableConfig(f"{self.where}: {reason}")

    def size(self, key: str, *, minimum: int = 1, maximum: int = MAX_SIZE) -> int:
        """A required integer, or the family's default for a key that is not there.

        Raises:
            UnreadableConfig: missing without a default, not an integer, or out of range.
        """
        value = self.optional_size(key, minimum=minimum, maximum=maximum)
        if value is None:
            raise self.refuse(f"{self._names.get(key, key)} is missing")
        return value

    def optional_size(self, key: str, *, minimum: int = 1, maximum: int = MAX_SIZE) -> int | None:
        """An integer, or None when the config writes null or neither it nor the family states one.

        Null is not the same as missing: ``"sliding_window": null`` turns a family's window off.
        """
        name = self._name(key)
        value = self.values.get(name)
        if name not in self.values and self._defaults.get(key) is not None:
            value = self.assumed[key] = self._defaults[key]
        return None if value is None else self._integer(name, value, minimum, maximum)

    def _integer(self, name: str, value: object, minimum: int, maximum: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.refuse(f"{name} is {shown(value)}, not an integer")
        if not minimum <= value <= maximum:
            raise self.refuse(f"{name} is {shown(value)}, outside {minimum:,} to {maximum:,}")
        return value

    def flag(self, key: str) -> bool:
        """A boolean; the family's default, else false, when missing; false when null.

        Raises:
            UnreadableConfig: the value is neither true nor false.
        """
        value = self.values[key] if key in self.values else self._defaults.get(key)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.refuse(f"{key} is {shown(value)}, not true or false")
        return value

    def number(self, key: str) -> float | None:
        """A finite number, or None when absent; the family's default counts as present."""
        value = self.values[key] if key in self.values else self._defaults.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.refuse(f"{key} is {shown(value)}, not a number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise self.refuse(f"{key} is not a finite number")
        return number

    def text(self, key: str) -> str | None:
        """A string, or None when absent."""
        value = self.get(key)
        if value is None or isinstance(value, str):
            return value
        raise self.refuse(f"{key} is {shown(value)}, not a string")

    def section(
        self,
        key: str,
        defaults: Mapping[str, object] | None = None,
        names: Mapping[str, str] | None = None,
    ) -> Fields | None:
        """A nested object, or None when absent."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.refuse(f"{key} is {shown(value)}, not an object")
        return Fields(cast("Mapping[str, object]", value), key, defaults, names)

    def strings(self, key: str) -> tuple[str, ...] | None:
        """A list of strings, or None when absent."""
        if not self.has(key):
            return None
        items = [item for item in self.items(key) if isinstance(item, str)]
        if len(items) != len(self.items(key)):
            raise self.refuse(f"{key} holds something other than strings")
        return tuple(items)

    def integers(self, key: str) -> tuple[int, ...] | None:
        """A list of non-negative integers, or None when absent."""
        if not self.has(key):
            return None
        return tuple(self._integer(key, item, 0, MAX_SIZE) for item in self.items(key))

    def items(self, key: str) -> Sequence[object]:
        """A list of no more than ``MAX_LAYERS`` entries of any type.

        Raises:
            UnreadableConfig: absent, not a list, or longer.
        """
        value = self.get(key)
        if not isinstance(value, (list, tuple)):
            raise self.refuse(f"{key} is {shown(value)}, not a list")
        items = cast("Sequence[object]", value)
        if len(items) > MAX_LAYERS:
            raise self.refuse(f"{key} has {len(items):,} entries, more than {MAX_LAYERS:,}")
        return items
