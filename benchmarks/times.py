"""Predicted step times beside every recorded one: `python benchmarks/times.py`.

`--markdown` renews the marked part of docs/time.md, `--check` says whether it is up to date.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from textwrap import fill

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.accuracy_tables import percent
from planner.choice import Choice
from planner.time.rates import FITTED_ERROR, FP32_MATMUL
from planner.time.step import TimeModel
from tests.planner.published_times import CHUNK_MS, FP32_KERNELS, LONG, PROFILED, UPGRADES
from tests.planner.replay import problem_of, replay, rows

PAGE = Path(__file__).resolve().parents[1] / "docs" / "time.md"
BEGIN, END = "<!-- benchmarks/times.py -->", "<!-- end -->"
TIMED = ("step_s", "tokens_per_s_per_gpu")
HOST_ROWS = ("mle-llama8b-H200-8k", "mle-llama8b-B200-8k")
"""What ``HOST_ADAM_BYTES_PER_S`` was taken from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One recorded time beside the predicted one."""

    name: str
    group: str
    fitted: bool
    """A constant was fitted on it."""
    seen_s: float
    found_s: float
    low_s: float
    high_s: float
    tokens: float | None = None
    """Of one GPU in one step, where it is a step."""

    @property
    def error(self) -> float:
        """Predicted over seen, less one."""
        return self.found_s / self.seen_s - 1

    @property
    def inside(self) -> bool:
        """Whether the recorded time lies in the interval."""
        return self.low_s <= self.seen_s <= self.high_s


GROUPS = {
    "TRL 6863": "TRL before and after 1.13, five models on one and two H100",
    "TRL kernels": "one chunk of the loss, and fp32 products of a profile, H100",
    "TRL long": "TRL's long sequences, 131,072 and 1,048,576 tokens on 2 to 8 H100",
    "TRL profile": "a profiled step of Qwen3.6-35B-A3B on 8 H100",
    "fms/ibm/PowerLM-3b": "PowerLM-3b on one and two A100: full, LoRA, QLoRA",
    "fms/meta-llama/Meta-Llama-3-8B": "Llama-3-8B on one to four A100, fused kernels: full, LoRA, QLoRA",
    "fms/mistral": "Mistral-7B on one A100, with and without fused kernels: full, LoRA, QLoRA",
    "peft": "Llama-3.2-3B on one L40S, 210 tokens a row: full, LoRA",
    "mle-H200": "Llama-3.1-8B on 8 H200, ZeRO-3 with the optimizer on the host, 8k to 256k tokens, and ZeRO-2",
    "mle-B200": "the same on 8 B200",
    "a800-llama7b": "LLaMA-7B on 8 A800, ZeRO-2 and ZeRO-3, with and without recompute and offload",
    "ulysses": "Qwen3-4B under ZeRO-3 on one and four H100, Ulysses",
}
CAUSES = (
    "Where a group is off, and why; nothing is corrected for it:",
    "- Full training of Llama-3-8B on two cards (-18 and -24 %) holds 80.3 GB at its peak on a card of 85, so the"
    " allocator frees and asks again. On four cards it is -5 to -10 %.",
    "- PowerLM-3b with two rows on each of two cards (-10 to -19 %): `train_runtime` over 100 steps holds "
    "wrapping, loading to the cards and the first steps. Its QLoRA on one card without the baseline's casts (+18 "
    "to +20 %) runs as if adapters were in 2 bytes; its memory says 4.",
    "- The QLoRA baseline of Mistral-7B (-14 and -16 %): its residual stream is fp32, for which nothing was "
    "traced. That of PowerLM-3b was, and is within 4 % on one card.",
    "- LoRA on L40S (+23 to +25 %): 840 tokens of 3,072 are 5 MB a tensor, which probably stay in the card's 96 "
    "MB cache.",
    "- H200 and B200 at 8k tokens without recompute (-20 and -37 %): fused kernels gain nothing there, says the "
    "source, where 15 % are said here. FlashAttention 3 and 4 stand behind all of its rows.",
    "- The host's share of AdamW was taken from the two rows of 8k with the optimizer there, which are counted as"
    " fitted.",
    "- A800 (-24 to -66 %): neither the code nor the unit of the throughput is stated (samples per second are "
    "assumed), and torch 2.2 ran it. With the optimizer on the host the rows fit torch's own AdamW, not "
    "DeepSpeed's.",
    "- Ulysses (-52 and -64 %): 3.4 s a micro-batch on one card with 8k tokens, 3.5 s on four with 8k, 4.2 with "
    "32k and 4.9 with 64k (the source's table): a constant of the host, not of the cards. The data were streamed "
    "and the optimizer was on the host.",
    "- The guide's 131,072 tokens: -1 to -5 % if they are of Qwen3-8B, as the fit took them, -10 to -15 % if of "
    "Qwen3-4B.",
    "- Ranks of tokens/s within the A100 groups say little: a method's runs differ by 5 % from one to four cards "
    "and from 4 to 32 rows, and what the time model says of them differs by less.",
)


def upgrades() -> list[Timed]:
    """The five models of TRL's pull request 6863, before and after."""
    out: list[Timed] = []
    for upgrade in UPGRADES:
        for path, release in (("chunked_fp32", "1.12"), ("chunked", "1.13")):
            found = upgrade.run.estimate(path)
            out.append(
                Timed(
                    name=f"{upgrade.run.model} {upgrade.run.method}, {upgrade.run.gpus} H100, TRL {release}",
                    group="TRL 6863",
                    fitted=True,
                    seen_s=upgrade.seen_s(path),
                    found_s=found.step_s,
                    low_s=found.low_s,
                    high_s=found.high_s,
                    tokens=4 * 4096,
                )
            )
    return out


def long_sequences() -> list[Timed]:
    """TRL's guide and pull request 6846."""
    out: list[Timed] = []
    for run, seconds in LONG:
        found = run.estimate()
        out.append(
            Timed(
                name=f"{run.model} {run.seq_len:,} tokens, {run.gpus} H100",
                group="TRL long",
                fitted=True,
                seen_s=seconds,
                found_s=found.step_s,
                low_s=found.low_s,
                high_s=found.high_s,
                tokens=run.seq_len / run.gpus,
            )
        )
    return out


def chunk_model() -> tuple[TimeModel, Choice]:
    """Qwen3.6-35B-A3B has the published chunk's vocabulary of 248,320 and hidden width of 2,048."""
    job = {"model": "Qwen/Qwen3.6-35B-A3B", "method": "full", "seq_len": 4096, "machine": "8xH100-80GB"}
    choice = Choice(method="full", loss_path="chunked", recompute="full", sharding="fsdp", dp_shard=8, weights="bf16")
    return problem_of(job, stack={"trl": "1.13.0"}).judge.time, choice


def kernels() -> list[Timed]:
    """One chunk of the loss, the fp32 products of a profile, and that profile's step."""
    model, choice = chunk_model()
    measured = {
        f"one chunk of 256 tokens, {path}": (milliseconds / 1e3, 256 * model.loss_s(replace(choice, loss_path=path)))
        for path, milliseconds in CHUNK_MS.items()
    }
    launches, seen = FP32_KERNELS
    assert model.hardware.fp32_flops is not None
    product = 2 * 248_320 * 2_048 * 256 / (FP32_MATMUL * model.hardware.fp32_flops)
    measured[f"{launches} fp32 products of the head"] = (seen, launches * product)
    out = [
        Timed(
            name=name,
            group="TRL kernels",
            fitted=True,
            seen_s=seconds,
            found_s=found,
            low_s=found * (1 - FITTED_ERROR),
            high_s=found * (1 + FITTED_ERROR),
        )
        for name, (seconds, found) in measured.items()
    ]
    run, seconds = PROFILED
    step = run.estimate("chunked_fp32")
    # The profile adds up all kernels, those of gathers that computation hides included.
    gathers = 2 * 2 * model.num_parameters * 7 / 8 / (0.8 * 450e9)
    out.append(
        Timed(
            name=f"{run.model} LoRA, {run.gpus} H100, all kernels",
            group="TRL profile",
            fitted=False,
            seen_s=seconds,
            found_s=step.step_s + gathers,
            low_s=step.low_s + gathers,
            high_s=step.high_s + gathers,
        )
    )
    return out


def recorded() -> list[Timed]:
    """Rows of tests/planner/data with a time, after a probe; those of the fit are in ``long_sequences``."""
    out: list[Timed] = []
    for row in (*rows("measured"), *rows("times")):
        if not any(key in row["measured"] for key in TIMED) or row["group"] == "trl-long":
            continue
        found = replay(row, tier="probed")
        assert found.time is not None and found.seen_step_s is not None
        group = str(row["group"])
        group = "peft" if group.startswith("peft") else "ulysses" if "ulysses" in group else group
        out.append(
            Timed(
                name=row["id"],
                group=group,
                fitted=row["id"] in HOST_ROWS,
                seen_s=found.seen_step_s,
                found_s=found.time.step_s,
                low_s=found.time.low_s,
                high_s=found.time.high_s,
                tokens=found.time.tokens_per_s_per_gpu * found.time.step_s,
            )
        )
    return out


def everything() -> list[Timed]:
    """Every recorded time."""
    return [*upgrades(), *kernels()[:-1], *long_sequences(), kernels()[-1], *recorded()]


def ranks(values: Sequence[float]) -> list[float]:
    """Rank of each value from 1, equal values sharing their mean rank."""
    ordered = sorted(values)
    return [ordered.index(v) + (ordered.count(v) + 1) / 2 for v in values]


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Rank correlation, None for fewer than three pairs."""
    if len(first) < 3:
        return None
    a, b = ranks(first), ranks(second)
    mean = (len(a) + 1) / 2
    shared = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    return shared / (sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b)) ** 0.5


def by_seconds(found: Sequence[Timed]) -> float | None:
    """Rank correlation of step times."""
    return spearman([t.seen_s for t in found], [t.found_s for t in found])


def by_speed(found: Sequence[Timed]) -> float | None:
    """Rank correlation of tokens per second and GPU."""
    steps = [t for t in found if t.tokens is not None]
    return spearman([(t.tokens or 0) / t.seen_s for t in steps], [(t.tokens or 0) / t.found_s for t in steps])


def summary(found: Sequence[Timed], name: str) -> str:
    """One line of the table of groups."""
    errors = [abs(t.error) for t in found]
    inside = sum(t.inside for t in found)
    numbers = [f"{r:.2f}" if r is not None else "" for r in (by_seconds(found), by_speed(found))]
    return (
        f"| {name} | {len(found)} | {percent(median(errors))} | {percent(max(errors))} | {inside} | "
        f"{numbers[0]} | {numbers[1]} |"
    )


def section(found: Sequence[Timed]) -> str:
    """The marked part of docs/time.md."""
    head = ["| rows | number | median | worst | in the interval | ranks of s | ranks of tokens/s |"]
    head.append("| --- | --- | --- | --- | --- | --- | --- |")
    fitted, unseen = [t for t in found if t.fitted], [t for t in found if not t.fitted]
    table = [*head, summary(fitted, "**fitted on**"), summary(unseen, "**held out**")]
    groups = list(dict.fromkeys(t.group for t in found))
    table += [summary([t for t in found if t.group == group], GROUPS[group]) for group in groups]
    inside, unseen_in = (sum(t.inside for t in some) / len(some) for some in (found, unseen))
    lines = [
        "## Against recorded times",
        "",
        fill(
            "Written by `make accuracy`. Errors are predicted over seen, less one; ranks are Spearman's correlation "
            "within the rows. Recorded rows are priced after a probe; a plan without one has the closed forms of the "
            f"same options. Of all recorded times {inside:.0%} lie in the interval that is said, of those held out "
            f"{unseen_in:.0%}.",
            120,
            break_on_hyphens=False,
        ),
        "",
        *table,
        "",
        CAUSES[0],
        "",
        *(fill(cause, 120, subsequent_indent="  ", break_on_hyphens=False) for cause in CAUSES[1:]),
        "",
        "| run | seen s | predicted s | error | in the interval |",
        "| --- | --- | --- | --- | --- |",
    ]
    for t in found:
        words = (t.name + (" (fitted)" if t.fitted else ""), f"{t.seen_s:.4g}", f"{t.found_s:.4g}")
        lines.append(f"| {' | '.join(words)} | {percent(t.error, signed=True)} | {'yes' if t.inside else 'no'} |")
    return "\n".join(lines)


def renewed(page: str, found: Sequence[Timed]) -> str:
    """The page with its marked part as it is now."""
    begin, end = page.index(BEGIN), page.index(END)
    return f"{page[:begin]}{BEGIN}\n{section(found)}\n{page[end:]}"


def main() -> int:
    """Print, write or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", action="store_true", help="renew the marked part of docs/time.md")
    parser.add_argument("--check", action="store_true", help="exit 1 when docs/time.md is out of date")
    asked = parser.parse_args()
    found, page = everything(), PAGE.read_text(encoding="utf-8")
    if asked.markdown:
        PAGE.write_text(renewed(page, found), encoding="utf-8")
    elif asked.check:
        if renewed(page, found) != page:
            print("docs/time.md is out of date: make accuracy", file=sys.stderr)
            return 1
    else:
        print(re.sub(r"^\| --- .*\n", "", section(found), flags=re.MULTILINE))
    return 0


if __name__ == "__main__":
    sys.exit(main())
