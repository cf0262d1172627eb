"""Tables of docs/accuracy.md: predicted beside seen, for every tier of coefficients."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from statistics import median

from benchmarks.accuracy_cases import Cases
from planner.choice import LossPath
from planner.memory.coefficients_json import option_key
from tests.planner.published_times import LONG, UPGRADES
from tests.planner.replay import (
    TIERS,
    Replay,
    Row,
    Tier,
    as_traced,
    choice_of,
    longest_length,
    measured_problem,
    quantile,
    replay,
    traced_evidence,
    traced_model,
    traced_peak,
)

LABELS: dict[Tier, str] = {"formula": "closed forms", "best": "bundled traces", "probed": "after a probe"}
HEADLINE: Tier = "best"
"""What a plan is made of without being asked to trace."""
LIMIT_BELOW, LIMIT_ABOVE = 0.10, 0.05
"""How far a longest length may be off."""
GROUPS = {
    "fms-granite": "PowerLM-3B on one and two A100-80GB (foundation-model-stack), packed rows of 4,096 tokens",
    "fms-liger": "Llama-3-8B on one to four A100-80GB (foundation-model-stack), fused kernels",
    "peft-mm": "Llama-3.2-3B on one L40S (PEFT's method comparison), reserved memory of a whole run",
    "acc-fsdp2": "Qwen2.5-1.5B on eight H100 (accelerate's FSDP2 benchmark)",
    "trl-long": "Qwen3-4B and 8B at 98,304 to 1,048,576 tokens on one to eight H100 (TRL's long-context guide)",
    "trl-115": "Gemma-3-1B on one H100 (TRL 1.15's release notes)",
    "trl-6859": "Qwen3-0.6B and 8B on one H100 (TRL PR 6859)",
    "hfblog": "Qwen3-4B under ZeRO-3 on one and four H100 (Hugging Face's Ulysses article), metric not said",
}
"""Prefix of a row's id -> what the rows are."""


def percent(value: float, signed: bool = False) -> str:
    """``0.0213`` as ``2.1 %``."""
    return f"{100 * value:{'+' if signed else ''}.1f} %"


def shares(errors: Iterable[float | None]) -> str:
    """Number, median, 90th and 95th percentile and worst of the sizes of ``errors``, as cells."""
    sizes = [abs(error) for error in errors if error is not None]
    cells = (median(sizes), quantile(sizes, 0.90), quantile(sizes, 0.95), max(sizes))
    return " | ".join((str(len(sizes)), *map(percent, cells)))


class Evaluation:
    """Cases replayed, each at every tier and once."""

    def __init__(self, cases: Cases) -> None:
        self.cases = cases
        self._longest: dict[tuple[str, Tier, bool | None], int] = {}

    @cached_property
    def runs(self) -> dict[Tier, tuple[Replay, ...]]:
        """Every measured row."""
        return {tier: tuple(replay(row, tier=tier) for row in self.cases.measured) for tier in TIERS}

    def run(self, row_id: str, tier: Tier = HEADLINE) -> Replay:
        """One measured row."""
        return next(run for run in self.runs[tier] if run.row["id"] == row_id)

    def with_bytes(self, tier: Tier = HEADLINE, *, metric: str | None = None) -> list[Replay]:
        """Rows that measured bytes, of one metric if asked."""
        return [r for r in self.runs[tier] if r.error is not None and metric in (None, r.row["measured"]["metric"])]

    @property
    def limits(self) -> list[Row]:
        """Rows that measured the longest sequence."""
        return [row for row in self.cases.measured if "max_seq_len" in row["measured"]]

    def longest(self, row: Row, tier: Tier = HEADLINE, *, first_step: bool | None = None) -> int:
        """The longest predicted length, as the row is read unless it is said whether AdamW's states exist."""
        key = (row["id"], tier, first_step)
        if key not in self._longest:
            self._longest[key] = longest_length(row, first_step=first_step, tier=tier)
        return self._longest[key]

    def limit_error(self, row: Row, tier: Tier = HEADLINE) -> float:
        """How far the longest length is off."""
        return float(self.longest(row, tier) / row["measured"]["max_seq_len"] - 1)

    @cached_property
    def traced(self) -> dict[Tier, list[tuple[Row, float]]]:
        """Whole models on one card, and how far each is off."""
        return {
            t: [(row, traced_peak(row, t) / row["allocated_bytes"] - 1) for row in self.cases.traced] for t in TIERS
        }

    @cached_property
    def sharded(self) -> dict[Tier, list[tuple[Row, float]]]:
        """The same of one rank of FSDP2."""
        cases = self.cases.sharded
        return {t: [(row, traced_peak(row, t) / row["allocated_bytes"] - 1) for row in cases] for t in TIERS}


def traced_table(found: Evaluation) -> list[str]:
    """Predictions against traces."""
    out = [
        "| compared with | coefficients | traces | median | 90th | 95th | worst |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    replicas = {t: [(row, e) for row, e in errors if _is_hsdp(row)] for t, errors in found.sharded.items()}
    alone = {t: [(row, e) for row, e in errors if not _is_hsdp(row)] for t, errors in found.sharded.items()}
    groups = (
        ("whole models on one card", found.traced),
        ("one rank of FSDP2", alone),
        ("one rank of FSDP2 with replicas", replicas),
    )
    for name, errors in groups:
        for tier in TIERS:
            if errors[tier]:
                out.append(f"| {name} | {LABELS[tier]} | {shares(error for _, error in errors[tier])} |")
    return out


def _is_hsdp(row: Row) -> bool:
    return bool(row["job"]["pins"]["sharding"] == "hsdp")


def measured_table(found: Evaluation) -> list[str]:
    """Errors by metric, number of GPUs, confidence and tier."""
    out = [
        "| metric | GPUs | confidence | coefficients | runs | median | 90th | 95th | worst |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for metric in ("max_allocated", "max_reserved", "unknown"):
        for single in (True, False):
            for confidence in sorted({row.get("confidence", "not said") for row in found.cases.measured}):
                for tier in TIERS:
                    errors = [
                        r.error
                        for r in found.with_bytes(tier, metric=metric)
                        if r.single_gpu == single and r.row.get("confidence", "not said") == confidence
                    ]
                    if errors:
                        gpus = "one" if single else "several"
                        out.append(f"| {metric} | {gpus} | {confidence} | {LABELS[tier]} | {shares(errors)} |")
    for tier in TIERS:
        allocated = found.with_bytes(tier, metric="max_allocated")
        if allocated:
            out.append(f"| max_allocated | any | any | {LABELS[tier]} | {shares(r.error for r in allocated)} |")
    return out


def verdict_table(found: Evaluation) -> list[str]:
    """Recorded failures called fitting, and recorded runs called too large, at the default reserve."""
    out = [
        "| coefficients | recorded out of memory | called fitting | recorded as having run | called too large |",
        "| --- | --- | --- | --- | --- |",
    ]
    for tier in TIERS:
        failed = [r for r in found.runs[tier] if r.row["measured"].get("oom")]
        ran = found.with_bytes(tier)
        fits, refused = (sum(r.memory.fits for r in failed), sum(not r.memory.fits for r in ran))
        out.append(f"| {LABELS[tier]} | {len(failed)} | {fits} | {len(ran)} | {refused} |")
    return out


def refused_lines(found: Evaluation) -> list[str]:
    """What the runs have in common that ran and are called too large."""
    refused = [r for r in found.with_bytes() if not r.memory.fits]
    if not refused:
        return []
    smallest = min(r.row["measured"]["bytes"] for r in refused) / 1e9
    card = min(r.memory.capacity_bytes or 0 for r in refused) / 1e9
    return [
        f"Those called too large ran at {smallest:.1f} GB or more of a card's {card:.1f} GB, inside the default "
        "reserve of 5 %."
    ]


def _tier_cells(errors: Iterable[float | None]) -> str:
    return " | ".join("" if error is None else percent(error, signed=True) for error in errors)


def runs_table(found: Evaluation) -> list[str]:
    """Every measured run."""
    out = [
        "| run | metric | seen GB | predicted GB | error | closed forms | after a probe | evidence | phase |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in found.with_bytes():
        seen, row_id = r.row["measured"], r.row["id"]
        others = _tier_cells((r.error, found.run(row_id, "formula").error, found.run(row_id, "probed").error))
        out.append(
            f"| {row_id} | {seen['metric']} | {seen['bytes'] / 1e9:.2f} | {r.predicted_bytes / 1e9:.2f} | {others} "
            f"| {r.memory.evidence} | {r.memory.peak_phase} |"
        )
    return out


def traces_table(found: Evaluation) -> list[str]:
    """Every trace."""
    out = [
        "| trace | seen GB | error | closed forms | after a probe | evidence |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for errors in (found.traced, found.sharded):
        for (row, best), (_, formula), (_, probed) in zip(
            errors[HEADLINE], errors["formula"], errors["probed"], strict=True
        ):
            cells = _tier_cells((best, formula, probed))
            evidence = traced_evidence(row, HEADLINE)
            out.append(f"| {row['id']} | {row['allocated_bytes'] / 1e9:.2f} | {cells} | {evidence} |")
    return out


def limits_table(found: Evaluation) -> list[str]:
    """Longest lengths, reserve 0."""
    out = [
        "| run | recorded | closed forms | bundled traces | error | -10 % to +5 % | first step | later steps |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in found.limits:
        error = found.limit_error(row)
        tokens = [
            row["measured"]["max_seq_len"],
            found.longest(row, "formula"),
            found.longest(row),
            found.longest(row, first_step=True),
            found.longest(row, first_step=False),
        ]
        seen, formula, best, *steps = (f"{number:,}" for number in tokens)
        within = "yes" if -LIMIT_BELOW <= error <= LIMIT_ABOVE else "no"
        cells = [row["id"], seen, formula, best, percent(error, signed=True), within, *steps]
        out.append(f"| {' | '.join(cells)} |")
    return out


def unbundled_lines(found: Evaluation) -> list[str]:
    """Which rows are priced by closed forms because no bundled set is theirs."""
    asked: dict[tuple[str, str], int] = {}
    for row in (*found.cases.traced, *found.cases.sharded):
        model, choice = traced_model(row, HEADLINE), choice_of(row)
        if model.coefficients(choice).evidence == "formula":
            architecture, options = model.job.architecture, as_traced(row, model.activation_options(choice))
            key = (row["id"].partition("/")[0], option_key(architecture, options))
            asked[key] = asked.get(key, 0) + 1
    for run in found.runs[HEADLINE]:
        if run.memory.evidence == "formula":
            model = measured_problem(run.row).judge.memory
            key = (run.row["job"]["model"], option_key(model.job.architecture, model.activation_options(run.choice)))
            asked[key] = asked.get(key, 0) + 1
    return [f"- {model}, `{options}`: {number} rows" for (model, options), number in sorted(asked.items())]


def times_table() -> list[str]:
    """Published step times that the constants were fitted on."""
    out = ["| run | predicted s | seen s | error |", "| --- | --- | --- | --- |"]
    releases: tuple[tuple[LossPath, str], ...] = (("chunked_fp32", "TRL 1.12"), ("chunked", "TRL 1.13"))
    for upgrade in UPGRADES:
        run = upgrade.run
        for path, release in releases:
            found, seen = run.estimate(path).step_s, upgrade.seen_s(path)
            name = f"{run.model} {run.method} on {run.gpus} H100, {release}"
            out.append(f"| {name} | {found:.3f} | {seen:.3f} | {percent(found / seen - 1, signed=True)} |")
    for run, seen in LONG:
        found = run.estimate().step_s
        name = f"{run.model} {run.seq_len:,} tokens on {run.gpus} H100"
        out.append(f"| {name} | {found:.1f} | {seen:.1f} | {percent(found / seen - 1, signed=True)} |")
    return out


def other_times_table(found: Evaluation) -> list[str]:
    """Errors of times that nothing was fitted on, group by group."""
    out = ["| runs | number | median | lowest | highest |", "| --- | --- | --- | --- | --- |"]
    for prefix, what in GROUPS.items():
        for method in ("full", "lora", "qlora"):
            errors = [
                r.time.step_s / r.seen_step_s - 1
                for r in found.runs[HEADLINE]
                if r.row["id"].startswith(prefix) and r.time and r.seen_step_s and r.choice.method == method
            ]
            if errors and prefix != "trl-long":
                cells = " | ".join(percent(x, signed=True) for x in (median(errors), min(errors), max(errors)))
                out.append(f"| {what.split(' (')[0]}, {method} | {len(errors)} | {cells} |")
    return out
