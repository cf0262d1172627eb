"""A plan on all of its ranks as a probe: on which cards, how much of each, from which files; and asking for it.

accelerate.yaml, deepspeed.json and the trainer's arguments are those of the written run, on the cards that it would
take. Nothing of it outlives whoever asked, and its folder goes with it.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launcher.errors import EnvironmentLacks, UsageError
from launcher.evidence.measured_requests import Room, card_environment, job_request, less_margin, run_spec
from launcher.evidence.measuring import Progress, ask_child
from launcher.run_text.accelerate_config import (
    ACCELERATE_FILE,
    DEEPSPEED_FILE,
    deepspeed_config,
    render_accelerate_yaml,
)
from launcher.run_text.training_script import keeps_fsdp_outputs, refuse_what_no_script_does
from planner.choice import FSDP2, ZERO, Choice
from planner.machine import BUSY_BYTES, Card, Machine
from planner.machine_hardware import cards_by_room
from planner.memory.states import DTYPE_BYTES
from planner.problem import PlanInput, Problem
from planner.units import format_gib


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRooms:
    """Where the ranks of a probe run, and what each may take."""

    device: str
    cards: tuple[Card, ...]
    """In the order of the ranks; empty on the CPU."""
    memory_bytes: tuple[int, ...]
    used_bytes: tuple[int, ...]
    """Already taken on each rank's card."""
    environment: dict[str, str]

    @property
    def place(self) -> str:
        """``cards 0, 1 (NVIDIA H200)`` or ``the host``."""
        if not self.cards:
            return "the host"
        return f"cards {', '.join(str(card.index) for card in self.cards)} ({self.cards[0].name})"


def rooms_of(machine: Machine, choice: Choice) -> RankRooms:
    """The cards that a written run of ``choice`` takes, each with its free memory less a margin.

    Raises:
        UsageError: this machine has fewer cards than the plan takes.
        EnvironmentLacks: others leave less than the margin, or work on one of the cards.
    """
    ranks = choice.num_gpus
    if not machine.usable_cards:
        assert machine.host is not None
        share = less_margin(machine.host.available_bytes, "cpu", "the host") // ranks
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, machine.host.cores // ranks))
        return RankRooms(
            device="cpu", cards=(), memory_bytes=(share,) * ranks, used_bytes=(0,) * ranks,
            # As written runs set them.
            environment={
                "CUDA_VISIBLE_DEVICES": "",
                "OMP_NUM_THREADS": threads,
                "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY") or "PASSIVE",
            },
        )  # fmt: skip
    chosen = sorted(cards_by_room(machine)[:ranks], key=lambda card: card.index)
    if len(chosen) < ranks:
        raise UsageError(
            f"--whole: the plan takes {ranks} ranks and a run here {len(chosen)} card{'s' if len(chosen) > 1 else ''};"
            " a probe runs on one node alone"
        )
    busy = [str(card.index) for card in chosen if card.used_bytes >= BUSY_BYTES]
    if busy:
        raise EnvironmentLacks(
            f"others work on card{'s' if len(busy) > 1 else ''} {', '.join(busy)} of the {ranks} that the plan takes;"
            " nothing is measured"
        )
    return RankRooms(
        device="cuda",
        cards=tuple(chosen),
        memory_bytes=tuple(less_margin(card.free_bytes, "cuda", f"card {card.index}") for card in chosen),
        used_bytes=tuple(card.used_bytes for card in chosen),
        environment=card_environment(chosen),
    )


def check_ranks(inputs: PlanInput, problem: Problem, choice: Choice) -> None:
    """Raise where no probe can run the plan on all of its ranks, or the host would not bear it.

    Raises:
        UsageError: what and why.
        EnvironmentLacks: the ranks' copies of the weights do not fit the host beside what others hold there.
    """
    spec = run_spec(inputs, choice)
    refuse_what_no_script_does(spec)
    if spec.num_nodes > 1:
        raise UsageError(
            f"--whole: the plan runs on {spec.num_nodes} nodes and a probe on one alone; pin"
            f" gpus={spec.processes_per_node}"
        )
    host = inputs.machine.host
    if host is None or not inputs.machine.usable_cards:
        return
    memory = problem.judge.memory
    needs = memory.estimate(choice).host
    # Every rank makes all weights there; ZeRO-3 cuts them as they are made. No checkpoint is saved. Under DDP the
    # policy is on its card before a reference is made.
    reference = memory.job.reference_model and choice.sharding != "ddp"
    reference = reference or (memory.job.reference_before and choice.sharding in FSDP2)
    copies = 0 if choice.sharding == "zero3" else choice.num_gpus * (2 if reference else 1)
    weights = copies * memory.blocks(choice.method).num_parameters * DTYPE_BYTES[choice.weights]
    most = needs.process_bytes + max(weights, needs.pinned_bytes + needs.pageable_bytes)
    left = less_margin(host.available_bytes, "cpu", "the host")
    if most > left:
        raise EnvironmentLacks(
            f"the host has {format_gib(left)} GiB that a probe may take, and {choice.num_gpus} ranks take"
            f" {format_gib(most)} of it; nothing is measured"
        )


def ranks_request(
    inputs: PlanInput, choice: Choice, rooms: RankRooms, cells: list[dict[str, int]], *, limit_s: float
) -> dict[str, Any]:
    """What ``measure_ranks.py`` is asked, but for the folder.

    Raises:
        UsageError: a setting that no run could be written with.
    """
    spec = run_spec(inputs, choice)
    room = Room(
        device=rooms.device, cards=rooms.cards, memory_bytes=min(rooms.memory_bytes), used_bytes=0, environment={}
    )
    rank = job_request(inputs, choice, room, cells, limit_s=limit_s, whole=True)
    rank |= {
        "memory_bytes": list(rooms.memory_bytes),
        "used_bytes": list(rooms.used_bytes),
        "ranks": choice.num_gpus,
        "readers": choice.data_parallel,
        "keeps_outputs": keeps_fsdp_outputs(spec),
    }
    files = {ACCELERATE_FILE: render_accelerate_yaml(spec)}
    if choice.sharding in ZERO:
        files[DEEPSPEED_FILE] = json.dumps(deepspeed_config(spec), indent=2) + "\n"
    return {"ranks": choice.num_gpus, "files": files, "rank": rank}


def ask_ranks(
    request: Mapping[str, Any],
    *,
    python: str | None,
    limit_s: float,
    environment: Mapping[str, str],
    progress: Progress | None = None,
) -> dict[str, Any]:
    """What all ranks saw, as one cell; they and their folder are gone when this returns or raises.

    Raises:
        EnvironmentLacks: the Python cannot be started or lacks a package.
        ProbeFailed: a rank crashed or was killed, or it took too long.
    """
    with tempfile.TemporaryDirectory(prefix="trlfit-ranks-", ignore_cleanup_errors=True) as folder:
        return ask_child(
            "measure_ranks.py",
            {**request, "folder": folder},
            python=python,
            limit_s=limit_s,
            environment=environment,
            progress=progress,
        )
