"""The page docs/accuracy.md, put together."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from textwrap import fill

from benchmarks.accuracy_cases import default_cases
from benchmarks.accuracy_causes import fms_causes, limit_causes, other_causes, traced_causes
from benchmarks.accuracy_peers import peer_lines, peers_table, read_peers
from benchmarks.accuracy_tables import (
    GROUPS,
    Evaluation,
    limits_table,
    measured_table,
    other_times_table,
    percent,
    refused_lines,
    runs_table,
    times_table,
    traced_table,
    traces_table,
    unbundled_lines,
    verdict_table,
)
from tests.planner.published_times import PROFILED
from tests.planner.readings import READINGS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "accuracy.md"

INTRODUCTION = (
    "Written by `make accuracy` from `tests/planner/data`; tests hold the bounds. Nothing here was measured by this "
    "project: traces are of the real classes without weights, measurements are other people's. Errors are predicted "
    "over seen, less one. `python benchmarks/accuracy.py FILE` replays cases of your own, in the format that "
    "`tests/planner/data/README.md` describes."
)
FIGURE = (
    "![Predicted against measured peaks of published runs, both axes logarithmic, with the identity and a band of 5 % "
    "around it](accuracy.svg)"
)
TIERS = (
    "Three sources of coefficients stand side by side. **Closed forms** need nothing. **Bundled traces** are what a "
    "plan of a bundled model uses: traced layers where the model and its options are bundled, else closed forms; "
    "these are the errors that the README quotes. **After a probe** is the same once `trlfit probe`, or the plan of a "
    "model that is not bundled, has traced what was missing; its answers for these cases are recorded in "
    "`tests/planner/data/probes.jsonl`."
)
UNBUNDLED = "No bundled set covers these rows; without a probe closed forms price them:"
CPU_NOTE = (
    "Sets that end in `cpu` are of the CPU's masked attention, which the recorded traces ran; what is bundled is for "
    "CUDA's."
)
ONE_RANK = (
    "A trace of one rank runs in the order of the host's calls, which is what a card's allocator follows as well: "
    "FSDP2 gathers ahead by making tensors early, and its streams only decide when they are written (read in torch's "
    "code, not measured on a card). So a prediction needs no more than a trace: `planner/memory/sharding.py` names "
    "what is gathered and reduced at each moment."
)
OPEN_KNOBS = (
    "Where a source leaves a knob open, the library's default of that time is taken, or what the source says elsewhere:"
)
LONGEST = (
    "Predicted with no reserve: the longest multiple of 512 tokens whose peak, context and allocator slack included, "
    "CUDA offers on an empty card. No source says that it switched expandable segments on, so the slack is that of a "
    "run without them. The last two columns are the first step alone, before AdamW has made its states, and any later "
    "one; the prediction is of later steps unless a reading above says otherwise."
)
FITTED = "The constants were fitted on these rows (see [time.md](time.md)), so they show the fit and do not test it."
UNFITTED = (
    "Nothing was fitted on the following; [time.md](time.md) has every row, after a probe and with its cause. The "
    "ZeRO-3 rows wait 3.4 s a micro-batch for something that is no card's work."
)
PEERS = (
    "Other estimators, asked by `python benchmarks/peers.py` about the same rows: published runs that measured "
    "allocated memory, and whole-model traces, whose two to six layers weigh the vocabulary more than a usual model "
    "does. Ours are the errors of bundled traces on the rows that the estimator "
    "could be told. The last column is of runs recorded as out of memory: how many have a figure below the card's "
    "capacity."
)


@cache
def evaluation() -> Evaluation:
    """The recorded cases, replayed."""
    return Evaluation(default_cases())


def outside() -> str:
    """The published step that no constant was fitted on."""
    run, seen = PROFILED
    found = run.estimate("chunked_fp32").step_s
    return (
        f"One profiled step of {run.model}, LoRA on {run.gpus} H100 under TRL 1.12, held {seen} s of kernels; "
        f"predicted are {found:.2f} s ({percent(found / seen - 1, signed=True)}) with linear attention by its kernels. "
        "Two gathers of 35 B parameters, which computation hides, are 0.34 s of those kernels."
    )


def page() -> str:
    """docs/accuracy.md."""
    found, peers = evaluation(), read_peers()
    unbundled = unbundled_lines(found)
    parts: list[str | list[str]] = [
        "# How good the predictions are",
        INTRODUCTION,
        FIGURE,
        TIERS,
        "## Against traces of whole models",
        traced_table(found),
        ONE_RANK,
        traced_causes(found),
        "## Against measurements",
        measured_table(found),
        "Verdicts at the default reserve of 5 %:",
        verdict_table(found),
        refused_lines(found),
        "What the rows are:",
        [f"- `{prefix}`: {text}." for prefix, text in GROUPS.items()],
        OPEN_KNOBS,
        [f"- `{pattern}`: {reading.why}." for pattern, reading in READINGS.items()],
        *([UNBUNDLED, unbundled, CPU_NOTE] if unbundled else []),
        "## Which rows miss, and why",
        [*fms_causes(found), *other_causes(found)],
        "## Longest sequences",
        LONGEST,
        limits_table(found),
        limit_causes(found),
        *(["## Peers on the same cases", PEERS, peers_table(found, peers), peer_lines(peers)] if peers else []),
        "## Step times",
        FITTED,
        times_table(),
        UNFITTED,
        other_times_table(found),
        outside(),
        "## Every run",
        "Errors of bundled traces, of closed forms and after a probe; evidence and phase are those of bundled traces.",
        runs_table(found),
        "## Every trace",
        traces_table(found),
    ]
    texts = ("\n".join(map(wrapped, [part] if isinstance(part, str) else part)) for part in parts)
    return "\n\n".join(text for text in texts if text) + "\n"


def wrapped(line: str) -> str:
    """A line of the page, at most 120 wide unless it is a row of a table or a picture."""
    if line.startswith(("|", "![")):
        return line
    return fill(line, 120, subsequent_indent="  " if line.startswith("- ") else "", break_on_hyphens=False)
