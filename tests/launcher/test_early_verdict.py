"""The early verdict, on a plan whose numbers are round: 40 GiB rest, 10 grow with the tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.running.early_verdict import BatchMemory, Seen, early_verdict
from launcher.running.follow import narrate
from launcher.running.progress import live
from tests.launcher.fake_run import GIB, PLAN, make_run

PHASES = [
    {"name": "forward", "parts": {"weights": 40 * GIB, "saved_activations": 10 * GIB, "context": GIB}},
    {"name": "step", "parts": {"weights": 40 * GIB, "moment1": 4 * GIB, "context": GIB}},
]
MEMORY = {
    "allocated_bytes": 50 * GIB, "reserved_bytes": 50 * GIB, "device_bytes": 51 * GIB, "low_bytes": 49 * GIB,
    "high_bytes": 51 * GIB, "peak_phase": "forward", "capacity_bytes": 60 * GIB, "phases": PHASES,
}  # fmt: skip


def plan(**choice: Any) -> dict[str, Any]:
    knobs = {"method": "full", "loss_path": "fused", "micro_batch": 2, "cp": 1, "sp": 1, **choice}
    return {"job": {"trainer": "sft", "seq_len": 4096}, "best": {"choice": knobs, "memory": MEMORY}}


def data(longest: int, rows: int = 100, sampled: int = 100) -> dict[str, Any]:
    return {"tokens_max": longest, "num_rows": rows, "sampled_rows": sampled}


SEEN = Seen(
    rows=3, epoch=0.1, peak_bytes=45 * GIB, reserved_bytes=45 * GIB, device_bytes=46 * GIB, batch_tokens=2 * 2048
)


def test_memory_grows_with_the_tokens_down_to_what_rests() -> None:
    batch = BatchMemory(plan())
    assert batch.at(2 * 4096) == 50 * GIB
    assert batch.at(2 * 2048) == 45 * GIB
    assert batch.at(2 * 64) == 44 * GIB, "the step's moments are the peak then"
    assert batch.tokens(4096) == 8192
    assert BatchMemory(plan(cp=4)).tokens(4096) == 2048, "each of four ranks has a quarter of every row"


def test_it_will_hold() -> None:
    found = early_verdict(BatchMemory(plan()), data(4096), SEEN)
    assert found is not None
    assert (found.kind, found.expected_bytes) == ("holds", 50 * GIB)
    assert found.sentence == "peak 45.0 of 50.0 GiB predicted, will hold: 50.0 GiB when its longest rows come"
    done = early_verdict(BatchMemory(plan()), data(2048), SEEN)
    assert done is not None and done.sentence == "peak 45.0 of 50.0 GiB predicted, will hold"


def test_heading_over_because_longer_rows_come() -> None:
    """54 GiB at half the tokens, a fifth more than predicted there: 5 GiB of growth are 6, and 59 is the room."""
    found = early_verdict(BatchMemory(plan()), data(4096), replace(SEEN, peak_bytes=54 * GIB))
    assert found is not None
    assert (found.kind, found.expected_bytes, found.room_bytes) == ("over", 60 * GIB, 59 * GIB)
    assert found.sentence == (
        "peak 54.0 of 50.0 GiB predicted, heading over in epoch 1: rows of 4,096 tokens come (the longest so far"
        " 2,048), for which about 60.0 GiB are needed, and 59.0 GiB is there"
    )


@pytest.mark.parametrize(
    ("known", "kind"),
    [
        (data(2048, rows=100_000), "unsure"),  # a sample: longer rows may come
        (None, "unsure"),  # nobody has looked
        (data(2048), "holds"),  # all rows were looked at
        (data(9000, rows=100_000), "over"),  # cut to 4,096, which certainly come
    ],
)
def test_what_is_known_of_the_lengths_decides(known: dict[str, Any] | None, kind: str) -> None:
    found = early_verdict(BatchMemory(plan()), known, replace(SEEN, peak_bytes=54 * GIB))
    assert found is not None and found.kind == kind, found
    after = early_verdict(BatchMemory(plan()), known, replace(SEEN, peak_bytes=54 * GIB, epoch=1.2))
    assert after is not None and after.kind == "holds", "every row has been there"


def test_other_processes_take_room() -> None:
    crowded = replace(SEEN, device_bytes=56 * GIB)
    found = early_verdict(BatchMemory(plan()), data(4096), crowded)
    assert found is not None and (found.kind, found.room_bytes) == ("over", 49 * GIB)


def test_packed_rows_are_full_from_the_first() -> None:
    found = early_verdict(BatchMemory(plan(packing=True)), data(100), SEEN)
    assert found is not None and found.expected_bytes == 50 * GIB


def test_too_early_or_nothing_to_say() -> None:
    assert early_verdict(BatchMemory(plan()), None, replace(SEEN, rows=2)) is None
    assert early_verdict(BatchMemory({}), None, SEEN) is None
    bare = early_verdict(BatchMemory(PLAN), None, SEEN)
    assert bare is not None and bare.kind == "unsure", "no phases, no capacity"


def test_a_watcher_is_told_once_and_the_values_are_there(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", plan=plan())
    rows = ['{"event": "start", "max_steps": 10}']
    for step in range(1, 6):
        peaks = f'[{45 * GIB}, {44 * GIB}], "peak_reserved_bytes": [{46 * GIB}, {45 * GIB}]'
        tail = f'"batch_tokens": [4096, 4000], "device_used_bytes": [{47 * GIB}, {46 * GIB}]'
        head = f'"event": "step", "step": {step}, "loss": 2.5, "step_s": 2.0, "tokens": 8000, "epoch": 0.1'
        rows.append(f'{{{head}, "peak_allocated_bytes": {peaks}, {tail}}}')
    (run / "metrics.jsonl").write_text("\n".join(rows) + '\n{"event": "end"}\n')
    found = live(run)
    assert (found.step, found.max_steps, found.loss, found.tokens_per_s, found.left_s) == (5, 10, 2.5, 4000, 10.0)
    assert [(r.allocated_bytes, r.reserved_bytes, r.device_bytes) for r in found.ranks] == [
        (45 * GIB, 46 * GIB, 47 * GIB), (44 * GIB, 45 * GIB, 46 * GIB),
    ]  # fmt: skip
    assert found.batch_tokens == 4096
    assert found.verdict is not None and found.verdict.kind == "holds"
    assert found.to_json()["verdict"]["kind"] == "holds"
    lines: list[str] = []
    narrate(run, lines.append)
    assert sum("will hold" in line for line in lines) == 1
