"""Job: what the user wants. Everything else follows from it and can be pinned."""

from __future__ import annotations

from math import isfinite
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from planner.units import parse_tokens
from planner.yaml_slips import mended

Trainer = Literal["sft", "dpo", "kto", "reward", "grpo", "rloo"]
PREFERENCE_PAIRS: tuple[Trainer, ...] = ("dpo", "reward")
"""Trainers whose rows hold two sequences, chosen and rejected (trl/trainer/dpo_trainer.py, reward_trainer.py)."""
Goal = Literal["fastest", "longest", "fewest_gpus", "headroom"]

MAX_SEQ_LEN = 2**27
"""134 million tokens: far beyond any run, small enough that byte counts stay sane."""
MAX_GLOBAL_BATCH = 1_000_000
MAX_DEPTH = 16
"""Levels of mappings and lists in a value that is passed through."""


def rows_per_example(trainer: str) -> int:
    """Rows that one training example makes: chosen and rejected of a preference pair."""
    return 2 if trainer in PREFERENCE_PAIRS else 1


class _Document(BaseModel):
    # Empty defaults are values, which pydantic copies for each document; to call `dict` it parses a signature, 5 ms.
    # Strict: `nodes: true` is a slip, not one node. Numbers with a fraction are not: YAML reads 5e-2 as text.
    model_config = ConfigDict(extra="forbid", strict=True)


class LoraSpec(_Document):
    """Adapter shape, as PEFT's LoraConfig takes it."""

    r: int = Field(default=16, ge=1, le=65536, description="Rank of the adapter.")
    alpha: int | None = Field(default=None, ge=1, description="Scaling numerator; 2 x r when left out.")
    dropout: float = Field(default=0.0, ge=0, lt=1, strict=False, description="Dropout before the adapter.")
    target_modules: str | list[str] = Field(
        default="all-linear", description="`all-linear`, or module names such as [q_proj, v_proj]."
    )

    @field_validator("target_modules")
    @classmethod
    def _targets(cls, value: str | list[str]) -> str | list[str]:
        if isinstance(value, str) and value != "all-linear":
            value = [part.strip() for part in value.split(",")]
        if isinstance(value, list) and (not value or not all(value)):
            raise ValueError("name at least one module, or write all-linear")
        return value


class DataSpec(_Document):
    """Training data and how rows become sequences."""

    dataset: str | None = Field(default=None, description="Hub id, or a local .jsonl, .json, .parquet or .csv file.")
    split: str = Field(default="train", description="Split of a hub data set.")
    packing: bool = Field(default=False, description="Put several rows into one sequence of seq_len tokens.")
    eval_dataset: str | None = Field(
        default=None, description="Data to evaluate on, named like dataset; with eval_split alone it is dataset itself."
    )
    eval_split: str | None = Field(
        default=None, description="Split of the evaluation data; without it test of a hub data set, all of a file."
    )

    @property
    def evaluates(self) -> bool:
        """Whether the run evaluates."""
        return self.eval_dataset is not None or self.eval_split is not None


class Job(_Document):
    """A fine-tuning job. `trlfit schema job` prints this as JSON Schema."""

    model: str = Field(min_length=1, description="Hub id, local folder, or a config.json.")
    trainer: Trainer = "sft"
    method: Literal["full", "lora", "qlora"] = "full"
    lora: LoraSpec = Field(default_factory=LoraSpec)
    quantization: Literal["nf4", "nf4-double", "int8"] = Field(default="nf4", description="Base weights under qlora.")
    data: DataSpec = Field(default_factory=DataSpec)
    seq_len: int = Field(default=4096, ge=8, le=MAX_SEQ_LEN, description="Longest sequence in tokens.")
    global_batch: int = Field(
        default=8, ge=1, le=MAX_GLOBAL_BATCH, description="Sequences per optimizer step over all GPUs."
    )
    machine: str = Field(default="local", min_length=1, description="local, cpu, NxCARD, or a machine.json.")
    nodes: int = Field(default=1, ge=1, le=1024)
    stack: dict[str, str] = Field(default={}, description="Package versions to plan for; others as installed.")
    allow: list[Literal["numerics", "method"]] = Field(
        default=[],
        description="What the planner may alter on its own; otherwise it is only offered.",
    )
    goal: Goal = "fastest"
    reserve: float = Field(default=0.05, ge=0, lt=1, strict=False, description="Share of each card kept free.")
    price_per_hour: float | None = Field(
        default=None,
        ge=0,
        le=1e6,
        strict=False,
        description="Of one GPU, in any currency: plans then say what a run costs.",
    )
    trl: dict[str, Any] = Field(default={}, description="Passed through to the trainer's config.")
    pins: dict[str, Any] = Field(default={}, description="Knob -> value that the planner must keep.")

    @field_validator("seq_len", mode="before")
    @classmethod
    def _tokens(cls, value: Any) -> Any:
        """``128k`` and ``1M`` are lengths in a file as on the command line."""
        return parse_tokens(value) if isinstance(value, str) else value

    @field_validator("reserve", "price_per_hour", mode="before")
    @classmethod
    def _no_switch(cls, value: Any) -> Any:
        # A field that takes text as a number would take true for 1.
        if isinstance(value, bool):
            raise ValueError(f"give a number, not {str(value).lower()}")
        return value

    @field_validator("stack", mode="before")
    @classmethod
    def _stack_text(cls, value: Any) -> Any:
        # YAML reads 1.16 as a float; a version written that way has already lost its zeros.
        if isinstance(value, dict):
            for package, version in value.items():  # pyright: ignore[reportUnknownVariableType]
                if not isinstance(version, str):
                    raise ValueError(f"put the version of {package} in quotes: '{version}'")
        return value  # pyright: ignore[reportUnknownVariableType]

    @field_validator("trl", "pins")
    @classmethod
    def _plain_values(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name, item in value.items():
            _check_plain(item, name)
        return value

    @field_validator("trl")
    @classmethod
    def _run_length(cls, value: dict[str, Any]) -> dict[str, Any]:
        _check_length("max_steps", value.get("max_steps"), whole=True)
        _check_length("num_train_epochs", value.get("num_train_epochs"), whole=False)
        return value

    @model_validator(mode="after")
    def _unique(self) -> Job:
        self.allow = list(dict.fromkeys(self.allow))
        return self


def _check_length(name: str, given: Any, *, whole: bool) -> None:
    """Hold the length of a run to a number: the trainer meets any other only after it has loaded the model."""
    value = mended(given, name)
    if value is None:
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or (whole and value != int(value)):  # type: ignore[call-overload]
        raise ValueError(f"{name} is {str(given)[:40]!r}; give a {'whole number' if whole else 'number'}")


def _check_plain(value: Any, where: str, depth: int = 0) -> None:
    """Hold a free value to what JSON can say, so that every job can be written down and read back."""
    if depth > MAX_DEPTH:
        raise ValueError(f"{where} is nested more than {MAX_DEPTH} deep")
    if isinstance(value, dict):
        for name, item in value.items():  # pyright: ignore[reportUnknownVariableType]
            if not isinstance(name, str):
                raise ValueError(f"{where} has a name that is not text; put it in quotes")
            _check_plain(item, f"{where}.{name}", depth + 1)
    elif isinstance(value, (list, tuple)):
        for item in value:  # pyright: ignore[reportUnknownVariableType]
            _check_plain(item, where, depth + 1)
    elif isinstance(value, float) and not isfinite(value):
        raise ValueError(f"{where} is {value}, which no document can hold")
    elif isinstance(value, int) and abs(value) >= 2**63:
        raise ValueError(f"{where} is a number beyond 64 bits")
    elif value is not None and not isinstance(value, (str, int, float)):
        raise ValueError(f"{where} is a {type(value).__name__}; put it in quotes")
