"""Machine: the cards and the host of one node type, read live, named, or from an inventory."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

MACHINE_SCHEMA = "trlfit.machine/1"
MAX_NODES = 1024
BUSY_BYTES = 2**30
"""Less than this on a card is its driver's or a desktop's."""
MAX_BYTES = 2**50
"""A pebibyte: far beyond any card or host, small enough that sums stay exact as floats."""


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class GpuProcess(_Document):
    """A process that holds memory on a card."""

    pid: int
    name: str | None = None
    user: str | None = None
    memory_bytes: int | None = Field(
        default=None, ge=0, le=MAX_BYTES, description="None where the driver does not tell (WSL2, containers)."
    )
    own: bool = Field(default=False, description="Started by this user.")


class Card(_Document):
    """One GPU, or one MIG slice, as a process would see it."""

    index: int = Field(ge=0, description="Position among the cards that CUDA_VISIBLE_DEVICES leaves visible.")
    physical_index: int | None = Field(default=None, description="NVML's own index.")
    uuid: str | None = None
    name: str = Field(description="NVML's product name.")
    card_id: str | None = Field(
        default=None,
        description="Id in the card table (`trlfit cards`), None when it is not known.",
    )
    total_bytes: int = Field(ge=0, le=MAX_BYTES)
    used_bytes: int = Field(default=0, ge=0, le=MAX_BYTES)
    free_bytes: int = Field(default=0, ge=0, le=MAX_BYTES)
    reserved_bytes: int = Field(
        default=0, ge=0, le=MAX_BYTES, description="Kept by the driver: in the total, neither used nor free."
    )
    compute_capability: str | None = Field(default=None, pattern=r"^\d{1,3}\.\d{1,3}$")
    pcie_generation: int | None = Field(default=None, ge=0, le=99)
    pcie_width: int | None = Field(default=None, ge=0, le=99)
    nvlink_peers: list[int] = Field(default=[], description="Indices of cards with an active NVLink to this one.")
    mig_mode: Literal["off", "on", "slice"] | None = None
    compute_share: float = Field(
        default=1.0,
        ge=0.001,
        le=1,
        description="Share of the card's compute units, below 1 for a slice.",
    )
    memory_share: float = Field(
        default=1.0,
        ge=0.001,
        le=1,
        description="Share of its memory and bandwidth, below 1 for a slice.",
    )
    virtual: bool = Field(default=False, description="A vGPU: the hypervisor owns part of the card.")
    utilisation_percent: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    processes: list[GpuProcess] = Field(default=[])
    usable: bool = True
    problem: str | None = Field(default=None, description="One sentence when the card cannot be used.")
    unknown: dict[str, str] = Field(default={}, description="Field that could not be read -> why, in a sentence.")


class Host(_Document):
    """Memory and cores of one node."""

    total_bytes: int = Field(ge=0, le=MAX_BYTES)
    available_bytes: int = Field(ge=0, le=MAX_BYTES)
    cores: int = Field(ge=1, le=2**20)
    bf16: bool | None = Field(
        default=None,
        description="Whether torch has kernels for bf16 products on this CPU; null if not known.",
    )
    limits: list[str] = Field(default=[], description="What keeps a process below the whole host, in sentences.")


class Machine(_Document):
    """What a run can use. `trlfit gpus --json` prints one; `--machine FILE` reads it back."""

    schema_: Literal["trlfit.machine/1"] = Field(default="trlfit.machine/1", alias="schema")
    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    origin: Literal["nvml", "named", "file", "cpu"]
    spec: str = Field(description="How the user named it: `local`, `cpu`, `8xH100-80GB`, a file name.")
    cards: list[Card] = Field(default=[])
    host: Host | None = Field(default=None, description="None for a named machine: the host's memory is not known.")
    nodes: int = Field(default=1, ge=1, le=MAX_NODES)
    driver_version: str | None = None
    cuda_version: str | None = None
    notes: list[str] = Field(default=[], description="Sentences about what could not be read, and why.")

    @property
    def busy_cards(self) -> list[Card]:
        """Usable cards of which other processes hold something worth mentioning."""
        return [card for card in self.usable_cards if card.used_bytes >= BUSY_BYTES]

    @property
    def usable_cards(self) -> list[Card]:
        """Cards of one node that a run may be placed on."""
        return [card for card in self.cards if card.usable]
