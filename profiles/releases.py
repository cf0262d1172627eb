"""What each release of TRL, transformers, accelerate and their companions does, as data."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from profiles.stacks import load_packages

OLDEST_TRL = "0.20.0"
TOLD_APART = ("torch", "transformers", "trl", "accelerate", "peft")
"""Core packages whose releases behave differently; `datasets` is core and does not."""
_RELEASE = re.compile(r"v?(?:\d+!)?(\d+(?:\.\d+)*)")
_RANGE = re.compile(r"(>=|<=|==|!=|<|>)(\d+(?:\.\d+)*)(\.\*)?")
_WIDTH = 4
"""Numbers of a release that are compared: 1.16 is 1.16.0.0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Availability:
    """Whether a feature can be used with a set of versions."""

    available: bool
    since: str
    """What it needs, whole: ``accelerate >= 1.11.0, != 1.12.0 and torch >= 2.6.0``."""
    source: str
    lacking: str = ""
    """The first need that is not met, with what is there instead; empty when available."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitMetrics:
    """What the trainer's entropy and accuracy hold beside full logits, each in the dtype the model returned."""

    entropy_rows: int
    """Rows whose softmax is made at once, three times their logits; 0 for a whole sequence."""
    entropy_copies: int
    """Copies of all logits alive while the entropy is made, in batches above one."""
    accuracy_copies: int
    """The same while the accuracy is made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrlRelease:
    """How one release of TRL loads a model and computes its loss."""

    version: str
    """The version asked for."""
    since: str
    """First release that behaves so."""
    checked: str
    """Last release whose source was read."""
    loss_paths: tuple[str, ...]
    """Loss paths of SFT, by the names of ``planner.choice.LossPath``; the default first."""
    paths_by_trainer: Mapping[str, tuple[str, ...]] = field(hash=False)
    loss_types: tuple[str, ...]
    """Values that ``SFTConfig.loss_type`` takes; none before 0.23."""
    loss_type_arguments: Mapping[str, str] = field(hash=False)
    liger_arguments: Mapping[str, str] = field(hash=False)
    liger_kernel: str
    """Range of ``liger-kernel`` that the Liger path asks for."""
    load_dtype_default: str
    """Dtype of the loaded weights unless asked otherwise: ``float32``, ``auto`` (the checkpoint's),
    or ``transformers`` (nothing passed: float32 before transformers 5, the checkpoint's since)."""
    logit_metrics: LogitMetrics
    """What the metrics of SFT hold beside full logits."""
    qlora_adapters_bf16: bool
    """Adapters on a quantised base are cast to bfloat16, whatever the mixed precision."""
    requires: Mapping[str, str] = field(hash=False)
    """Ranges that it states for the packages beneath it."""
    notes: tuple[str, ...]
    source: str

    @property
    def default_loss_path(self) -> str:
        """What SFT runs when nothing is asked for."""
        return self.loss_paths[0]

    def loss_paths_for(self, trainer: str) -> tuple[str, ...]:
        """Loss paths of ``trainer``, the default first.

        A reward model scores with one output and has no vocabulary head: it is listed with SFT's
        default alone, so that the knob has exactly one value.
        """
        return self.paths_by_trainer.get(trainer, (self.default_loss_path,))

    def loss_type_argument(self, path: str) -> str | None:
        """``SFTConfig.loss_type`` that selects ``path``, None when it must be left out.

        Raises:
            ValueError: this release does not have ``path``.
        """
        if path not in self.loss_paths:
            raise ValueError(f"trl {self.version} has no loss path {path!r}; it has {', '.join(self.loss_paths)}")
        return self.loss_type_arguments.get(path)

    def liger_argument(self, path: str, trainer: str = "sft") -> str | None:
        """Name of the argument to set to True for ``path``, None when no Liger loss is involved."""
        return self.liger_arguments.get(trainer) if path == "liger" else None

    def nll_bytes(self, micro_batch: int) -> int:
        """Peak bytes per element of fp32 full logits with ``micro_batch`` rows, rounded up.

        Backward holds log-softmax, its gradient and the logits' own: 12. The metrics hold logits, log-softmax and what
        they make of them.
        """
        held = self.logit_metrics
        entropy, accuracy = (held.entropy_copies, held.accuracy_copies) if micro_batch > 1 else (0, 0)
        softmax = 0 if held.entropy_rows else -(-12 // micro_batch)
        return max(12, 8 + 4 * entropy + softmax, 8 + 4 * accuracy)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerNeeds:
    """What one optimizer asks of the environment."""

    package: str | None
    """Distribution that provides it; None when torch or transformers do."""
    whole_matrices: bool
    """It projects each weight matrix and cannot work on a shard of one."""
    layerwise: bool
    """It steps inside backward, layer by layer."""
    cpu_equivalent: bool
    """DeepSpeed runs the same update rule on the host."""
    other_device: bool
    """It is written for an accelerator that is neither a CPU nor CUDA."""


@cache
def release_numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version, padded; pre-releases and local labels count as their release.

    Raises:
        ValueError: ``version`` does not begin with a release number.
    """
    match = _RELEASE.match(version.strip())
    if match is None:
        raise ValueError(f"{version!r} is not a version; write for example 1.16.0")
    numbers = [int(part) for part in match[1].split(".")][:_WIDTH]
    return tuple(numbers + [0] * (_WIDTH - len(numbers)))


def within(version: str, ranges: tuple[str, ...]) -> bool:
    """Whether a version lies in every range, such as ``(">=1.11.0", "!=1.12.0")``."""
    numbers = release_numbers(version)
    return all(_in_range(numbers, *_parse_range(text)) for text in ranges)


def _in_range(numbers: tuple[int, ...], operator: str, bound: tuple[int, ...], prefix: int) -> bool:
    if operator == "==":
        return numbers[:prefix] == bound[:prefix]
    if operator == "!=":
        return numbers[:prefix] != bound[:prefix]
    if operator == ">=":
        return numbers >= bound
    if operator == "<":
        return numbers < bound
    return numbers <= bound if operator == "<=" else numbers > bound


@cache
def _parse_range(text: str) -> tuple[str, tuple[int, ...], int]:
    match = _RANGE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a version range")
    prefix = match[2].count(".") + 1 if match[3] else _WIDTH
    return match[1], release_numbers(match[2]), prefix


@cache
def _document() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("releases.toml").read_text(encoding="utf-8"))


@cache
def _trl_rows() -> tuple[dict[str, Any], ...]:
    """Rows completed with what they inherit from the row before; notes are a row's own."""
    rows: list[dict[str, Any]] = []
    for change in _document()["trl"]:
        before: dict[str, Any] = rows[-1] if rows else {"paths": {}}
        paths: dict[str, list[str]] = {**before["paths"], **change.get("paths", {})}
        rows.append({**before, "notes": [], **change, "paths": paths})
    return tuple(rows)


@cache
def trl_release(version: str) -> TrlRelease:
    """The behaviour of ``trl==version``; outside the known range, the nearest row and a note.

    An empty version stands for a stack without TRL and is answered as the newest known.

    Raises:
        ValueError: ``version`` is not a version.
    """
    version = version or newest_known()["trl"]
    rows = _trl_rows()
    numbers = release_numbers(version)
    row = rows[0]
    for candidate in rows:
        if numbers >= release_numbers(candidate["since"]):
            row = candidate
    paths = {trainer: tuple(names) for trainer, names in row["paths"].items()}
    return TrlRelease(
        version=version,
        since=row["since"],
        checked=row["checked"],
        loss_paths=paths["sft"],
        paths_by_trainer=MappingProxyType(paths),
        loss_types=tuple(row["loss_types"]),
        loss_type_arguments=MappingProxyType(row["arguments"]),
        liger_arguments=MappingProxyType(row["liger"]),
        liger_kernel=row["liger_kernel"],
        load_dtype_default=row["load_dtype"],
        logit_metrics=LogitMetrics(**row["logit_metrics"]),
        qlora_adapters_bf16=row["qlora_adapters_bf16"],
        requires=MappingProxyType(row["requires"]),
        notes=tuple(row["notes"]) + _distance_note(version, numbers),
        source=row["source"],
    )


def known_trl_releases() -> tuple[TrlRelease, ...]:
    """One release for each row of the table, the oldest first."""
    return tuple(trl_release(row["since"]) for row in _trl_rows())


def _distance_note(version: str, numbers: tuple[int, ...]) -> tuple[str, ...]:
    newest = newest_known()["trl"]
    if numbers < release_numbers(OLDEST_TRL):
        return (f"trl {version} is older than the known range; planned as {OLDEST_TRL}",)
    if numbers > release_numbers(newest):
        return (f"trl {version} is newer than the known range; planned as {newest}",)
    return ()


def newest_known() -> Mapping[str, str]:
    """The newest version of each package that releases are told apart by: the ones omitted are planned for these."""
    packages = load_packages()
    return {name: packages[name].newest for name in TOLD_APART}


def feature_names() -> tuple[str, ...]:
    """Every feature that ``feature`` knows."""
    return tuple(_document()["feature"])


def feature(name: str, versions: Mapping[str, str]) -> Availability:
    """Whether ``versions`` (package -> version, absent ones left out) have a feature.

    Raises:
        ValueError: there is no such feature, or a version is not a version.
    """
    row = _document()["feature"].get(name)
    if row is None:
        raise ValueError(f"feature {name!r} is not known; known: {', '.join(feature_names())}")
    unmet = [_first_unmet(way, versions) for way in _ways(row)]
    available = None in unmet
    if available:
        lacking = ""
    elif "needs" in row:
        lacking = unmet[0] or ""
    else:
        # Several ways: which one is nearest is for the reader to judge, by what is there.
        lacking = f"{row['advice']}, the stack has {_have(row, versions)}"
    return Availability(available=available, since=_since(name), source=row["source"], lacking=lacking)


def _ways(row: Mapping[str, Any]) -> list[dict[str, list[str]]]:
    ways: list[dict[str, list[str]]] = row.get("any") or [row["needs"]]
    return ways


def _first_unmet(needs: Mapping[str, list[str]], versions: Mapping[str, str]) -> str | None:
    for package, ranges in needs.items():
        have = versions.get(package)
        if have is None or not within(have, tuple(ranges)):
            return f"{_requirement(package, ranges)}, the stack has {have or 'none'}"
    return None


def _have(row: Mapping[str, Any], versions: Mapping[str, str]) -> str:
    packages = dict.fromkeys(package for way in _ways(row) for package in way)
    return ", ".join(
        f"{package} {versions[package]}" if package in versions else f"no {package}" for package in packages
    )


@cache
def _since(name: str) -> str:
    return " or ".join(
        " and ".join(_requirement(package, ranges) for package, ranges in way.items())
        for way in _ways(_document()["feature"][name])
    )


def _requirement(package: str, ranges: list[str]) -> str:
    return f"{package} " + ", ".join(re.sub(r"^([<>=!]+)", r"\1 ", text) for text in ranges)


@cache
def optimizer_needs(name: str) -> OptimizerNeeds | None:
    """What the optimizer of Hugging Face's ``optim`` name needs; None when there is none."""
    table = _document()["optimizers"]
    for group, names in table.items():
        if group in ("source", "cpu_equivalent") or name not in names:
            continue
        plain = group in ("plain", "other_devices")
        return OptimizerNeeds(
            package=None if plain else group,
            whole_matrices=group in ("galore-torch", "apollo-torch"),
            layerwise=name.endswith("layerwise"),
            cpu_equivalent=name in table["cpu_equivalent"],
            other_device=group == "other_devices",
        )
    return None


@cache
def families(trait: str) -> frozenset[str]:
    """``model_type`` values with a trait: no_sdpa, no_flash, flash_sinks or no_recompute.

    Raises:
        KeyError: there is no such trait.
    """
    return frozenset(_document()["families"][trait])


@cache
def context_parallel_blocker(model_type: str) -> str | None:
    """The layer type for which accelerate refuses context parallelism in a whole family, or None.

    Only families whose own config class supplies that layer type are listed; for the others the
    model's config decides.
    """
    table: dict[str, list[str]] = _document()["families"]["context_parallel_refused"]
    return next((layer for layer, names in table.items() if model_type in names), None)
