"""What planner.memory.loss says of every loss path, against the code of the TRL and Liger releases that have it."""

from __future__ import annotations

import functools
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from planner.memory.loss import LossBytes, loss_bytes
from profiles.releases import feature, trl_release
from tests.launcher.command_line import here

pytestmark = pytest.mark.stack

SCRIPT = Path(__file__).with_name("loss_trace.py")
NAMED = Path(__file__).with_name("trl_releases.txt")
UNPACKED = Path(sys.prefix) / "trl-releases"

USUAL, WORST = 0.01, 0.03
"""Shares by which the loss part may be off at lengths and vocabularies of real models, and anywhere."""

PRECISIONS = (("bf16", False), ("bf16", True), ("fp32", True), ("fp32", False))
"""Weights, and whether the forward runs under bf16 autocast: FSDP2 and ZeRO; one card and DDP; TRL's default; no mixed
precision."""


class Shape(NamedTuple):
    """Sequences, tokens in each, vocabulary, hidden size."""

    rows: int
    seq: int
    vocab: int
    hidden: int


QWEN3_8B = Shape(1, 2048, 151_936, 4096)
GEMMA3_1B = Shape(1, 6144, 262_144, 1152)
QWEN36_35B = Shape(1, 4096, 248_320, 2048)
LLAMA2_7B = Shape(1, 8192, 32_000, 4096)
LLAMA32_1B = Shape(2, 2048, 128_256, 2048)
SHORT = Shape(1, 300, 151_936, 4096)
"""Two chunks, and fewer tokens than a tile has."""
WIDE = Shape(1, 2048, 2048, 8192)
"""The hidden states outgrow a chunk's logits, as they do in long sequences."""
ONE_CHUNK = Shape(1, 257, 248_320, 2048)
"""256 scored tokens."""


def case(path: str, shape: Shape, weights: str, autocast: bool, trains: bool, **more: Any) -> dict[str, Any]:
    facts = {"path": path, "weights": weights, "autocast": autocast, "trains": trains, "tied": False, "family": "llama"}
    return {**shape._asdict(), **facts, **more}


def cases(path: str, shapes: tuple[Shape, ...], **more: Any) -> list[dict[str, Any]]:
    """Every precision, the head trained and frozen, over ``shapes``."""
    options = itertools.product(shapes, PRECISIONS, (True, False))
    return [case(path, shape, weights, autocast, trains, **more) for shape, (weights, autocast), trains in options]


def of_families(path: str) -> list[dict[str, Any]]:
    """Soft-capped logits (Gemma 2), divided and multiplied ones (Granite, Cohere), and a head that is the embedding."""
    return [
        case(path, LLAMA32_1B._replace(rows=1), weights, autocast, trains, family=family, tied=trains)
        for family in ("gemma2", "granite", "cohere")
        for weights, autocast in PRECISIONS[:3]
        for trains in (True, False)
    ]


# Liger comes last: its stubs of Triton stay in the process.
ASKED: dict[str, list[dict[str, Any]]] = {
    "0.22.2": cases("full_logits", (QWEN3_8B, LLAMA32_1B)),
    "1.3.0": cases("full_logits", (QWEN3_8B, LLAMA32_1B, SHORT)) + of_families("full_logits"),
    "1.12.0": cases("full_logits", (LLAMA32_1B,))
    + cases("chunked_fp32", (QWEN3_8B, SHORT, WIDE))
    + of_families("chunked_fp32")
    + [case("chunked_fp32", ONE_CHUNK, "bf16", False, trains) for trains in (True, False)],
    "1.16.0": cases("fused", (QWEN3_8B, GEMMA3_1B, LLAMA2_7B, SHORT, WIDE)) + of_families("fused"),
    "1.14.0": cases("chunked", (QWEN3_8B, SHORT, WIDE))
    + of_families("chunked")
    + [case("chunked", shape, "bf16", False, trains) for shape in (QWEN36_35B, ONE_CHUNK) for trains in (True, False)]
    + cases("liger", (QWEN3_8B, LLAMA32_1B), liger="0.8.0")
    + cases("liger", (QWEN3_8B, LLAMA32_1B, LLAMA2_7B), liger="0.8.5"),
}


def folder() -> Path:
    """Where the releases lie unpacked; one line where they do not."""
    named = [line for line in NAMED.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    missing = [line for line in named if not (UNPACKED / line.replace("==", "-")).is_dir()]
    if missing:
        pytest.fail(f"{', '.join(missing)} not in {UNPACKED}: `make .venv/.developed` puts them there", pytrace=False)
    return UNPACKED


@functools.cache
def traced() -> dict[str, list[dict[str, int]]]:
    """What each release's own code holds, in the order asked."""
    command = [sys.executable, str(SCRIPT), str(folder())]
    done = subprocess.run(command, input=json.dumps(ASKED), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    answers: dict[str, list[dict[str, int]]] = json.loads(done.stdout)
    return answers


def element_bytes(asked: dict[str, Any]) -> tuple[int, int]:
    """(bytes of a weight, bytes of a product)."""
    width = 4 if asked["weights"] == "fp32" else 2
    return width, 2 if asked["autocast"] else width


def predicted(release: str, asked: dict[str, Any]) -> LossBytes:
    width, compute = element_bytes(asked)
    # Chunks hold scored tokens, which are one fewer in each sequence; all else is made for every position.
    tokens = asked["rows"] * (asked["seq"] - asked["path"].startswith("chunked"))
    liger = {"liger-kernel": asked["liger"]} if "liger" in asked else {}
    return loss_bytes(
        asked["path"],
        tokens=tokens,
        vocab=asked["vocab"],
        hidden=asked["hidden"],
        hidden_bytes=width,
        head_bytes=width,
        compute_bytes=compute,
        head_trains=asked["trains"],
        autocast=asked["autocast"],
        softcap=asked["family"] == "gemma2",
        rows=asked["rows"],
        metrics=trl_release(release).logit_metrics,
        liger_in_place=feature("liger_in_place_head", liger).available,
    )


def test_every_release_holds_what_is_planned() -> None:
    """Peaks of forward and backward, less the hidden states, which the plan counts with the activations."""
    misses: list[str] = []
    errors: list[float] = []
    for release, found in traced().items():
        for asked, seen in zip(ASKED[release], found, strict=True):
            said = predicted(release, asked)
            states = element_bytes(asked)[0] * asked["rows"] * asked["seq"] * asked["hidden"]
            for moment in ("forward", "backward"):
                held, planned = seen[moment] - states, getattr(said, moment)
                # A frozen head under Liger holds nothing in backward.
                error = 0.0 if abs(planned - held) < 2**20 else planned / max(held, 1) - 1
                errors.append(abs(error))
                usual = asked["vocab"] >= 32_000 and (asked["seq"] >= 2048 or asked["seq"] == 257)
                if abs(error) > (USUAL if usual else WORST):
                    misses.append(f"{error:+.1%} {release} {moment}: {planned:,} for {held:,} in {asked}")
    assert not misses, "\n".join(misses)
    assert len(errors) > 450
    # Most sums are the release's own to the byte, but for statistics of single tokens.
    assert sum(error < 0.002 for error in errors) > 0.8 * len(errors)


def test_the_one_chunk_that_trl_measured() -> None:
    """TRL PR 6863: one chunk of 256 tokens, V 248,320, H 2,048, forward and backward on an H100, 5.99 and 3.03 "GB".

    That is GiB, of a trained head that has a gradient from the step before: weights and gradient are 2 x 1.017 GB, the
    widest moment is the product that makes the chunk's own gradient of the head, and cuBLAS keeps one workspace for
    each of the two threads, forward's and autograd's.
    """
    rest = 2 * (2 * 248_320 * 2048) + 2 * (32 * 2**20 + 65_536)
    for release, path, gib in (("1.12.0", "chunked_fp32", 5.99), ("1.14.0", "chunked", 3.03)):
        asked = case(path, ONE_CHUNK, "bf16", False, True)
        seen = traced()[release][ASKED[release].index(asked)]["backward"] + rest
        assert seen / 2**30 == pytest.approx(gib, rel=0.005)
        assert predicted(release, asked).backward + rest == pytest.approx(seen, rel=0.005)


def test_a_plan_for_an_old_release_says_what_the_new_one_buys(capsys: pytest.CaptureFixture[str]) -> None:
    """Gemma-3-1B has 262,144 words: TRL 1.12 copies a head of 1.2 GB to fp32 for every 256 of 8,192 tokens."""
    words = ["plan", "google/gemma-3-1b-pt", "--machine", "1xH100-80GB", "--seq-len", "8192", "--json", "--stack"]
    # Whole logits fit and are faster there, so the chunks are pinned.
    chunks = ["trl=1.12.0", "--pin", "loss_path=chunked_fp32"]
    old, new = (json.loads(here(capsys, [*words, *more]).out) for more in (chunks, ["trl=1.16.0"]))
    assert (old["best"]["choice"]["loss_path"], new["best"]["choice"]["loss_path"]) == ("chunked_fp32", "fused")
    assert not [change for change in new["changes"] if change["lever"] == "newer TRL"]
    change = next(change for change in old["changes"] if change["lever"] == "newer TRL")
    assert change["flags"] == "--stack trl=1.16.0"
    saved = old["best"]["memory"]["device_bytes"] - new["best"]["memory"]["device_bytes"]
    gain = 1 - new["best"]["time"]["step_s"] / old["best"]["time"]["step_s"]
    # Both plans keep every activation, so the difference is the upgrade's alone.
    assert (saved > 2**30, gain > 0.2) == (True, True)
    assert f"{saved / 2**30:.1f} GiB less per GPU at the peak" in change["sentence"]
    assert f"and {gain:.0%} less time per step" in change["sentence"]
