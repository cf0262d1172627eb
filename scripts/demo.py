"""`make demo`: two plans, then a real training of a small model, and what was predicted against what was seen.

Runs from the repository with the Python that holds trlfit and the training stack. Nothing is downloaded: the shapes of
the two large models are bundled, and the small one is made here.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WORK = "demo-runs"
TEXT = "examples/data/train.jsonl"
# 27 M parameters: four fp32 values each (weight, gradient, two moments) are 416 MiB, well above what the allocator
# and the libraries add, and 30 steps of two sequences take about a minute on two cores.
SIZES = shlex.split("--hidden 512 --intermediate 1536 --layers 8 --heads 8 --kv-heads 4 --vocab 4096")
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRLFIT_DATA": f"{WORK}/history",
    # Threads that wait sleep instead of spinning: beside other work on the same cores a step takes a third of the time.
    "OMP_WAIT_POLICY": "PASSIVE",
}
MIB = 2**20


class DemoFailed(Exception):
    """The demo did not show what it should."""


def say(text: str) -> None:
    """Narration, flushed so that it stays in order with the output of the commands."""
    print(f"\n{text}", flush=True)


def heading(text: str) -> None:
    """A title for what follows."""
    print(f"\n\n=== {text}", flush=True)


def call(*arguments: str, shown: str, allowed: tuple[int, ...] = (0,), capture: bool = False) -> str:
    """Run a Python of this environment in the repository, after echoing the command as a user would type it.

    Args:
        arguments: What follows ``python``.
        shown: The command's name for the reader, in place of the interpreter's path.
        allowed: Exit codes that are an answer.
        capture: Return stdout instead of showing it; the command is not echoed.

    Raises:
        DemoFailed: any other exit code.
    """
    if not capture:
        print(f"\n$ {shown}", flush=True)
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE if capture else None,
        text=True,
    )
    if done.returncode not in allowed:
        raise DemoFailed(f"`{shown}` ended with exit code {done.returncode}")
    return done.stdout or ""


def trlfit(*arguments: str, allowed: tuple[int, ...] = (0,), capture: bool = False) -> str:
    """Run one trlfit command."""
    return call("-m", "tui", *arguments, shown=shlex.join(["trlfit", *arguments]), allowed=allowed, capture=capture)


def plan_for_a_node() -> None:
    """A plan for cards that are not here."""
    heading("1. Qwen3-8B, all weights, sequences of 1,048,576 tokens, on 8 x H100-80GB")
    say("The eight cards are named, not present: sizes and rates come from the card table (`trlfit cards`).")
    trlfit("plan", "--job", "examples/qwen3-8b-1m.yaml", "--top", "3")


def plan_for_this_machine() -> None:
    """A plan for the cards that are here; where there are none, for the host and then for a named card."""
    heading("2. Llama-3.1-8B with LoRA, on this machine")
    trlfit("gpus")
    machine: dict[str, Any] = json.loads(trlfit("gpus", "--json", capture=True))
    cards = [card for card in machine["cards"] if card["usable"]]
    # 3: nothing fits, which is an answer on a small machine.
    trlfit("plan", "--job", "examples/llama-8b-lora.yaml", "--top", "3", allowed=(0, 3))
    if cards:
        return
    say(
        "There is no usable GPU here, so the same job again for a named card, one RTX4090: a common card, and its\n"
        "24 GB hold 8.03 B frozen parameters in bf16 (15.0 GiB) beside a sequence of 4,096 tokens; 16 GB would not."
    )
    trlfit("plan", "--job", "examples/llama-8b-lora.yaml", "--machine", "1xRTX4090", "--top", "3")


def train_here() -> None:
    """Make a small model, plan, write, train, and list the run."""
    heading("3. A real training, here")
    say(
        f"The model is made now: Qwen3's class with 27 M random weights, and a tokenizer trained on {TEXT}\n"
        "(Persuasion by Jane Austen, which ships with this repository). It knows nothing; its loss starts near\n"
        "ln 4096 = 8.3 and must fall."
    )
    maker = ["launcher/children/make_tiny_model.py", "--out", f"{WORK}/tiny", "--text", TEXT, *SIZES]
    call(*maker, shown=shlex.join(["python", *maker]))
    trlfit("plan", "--job", "examples/demo.yaml", "--top", "2")
    trlfit("write", "examples/demo.yaml", "-o", f"{WORK}/run")
    trlfit("launch", f"{WORK}/run")
    trlfit("runs", WORK)


def compare() -> None:
    """Print predicted against seen.

    Raises:
        DemoFailed: the run is not done, or its loss did not fall.
    """
    folder = ROOT / WORK / "run"
    outcome: dict[str, Any] = json.loads((folder / "outcome.json").read_text(encoding="utf-8"))
    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    rows: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]
    losses = [row["loss"] for row in rows if row["event"] == "step"]
    predicted, seen = outcome["predicted"], outcome["seen"]
    heading("Predicted against seen")
    if outcome["kind"] != "done" or len(losses) < 2:
        raise DemoFailed(f"the run is not done: {outcome['sentence']}")
    basis = "growth of resident memory" if seen["memory_basis"] == "rss_growth" else "allocated on the GPU"
    print(f"{'':<42}{'predicted':<30}{'seen':<12}seen / predicted")
    for name, want, low, high, have, unit in (
        (f"peak memory ({basis})", "allocated_bytes", "low_bytes", "high_bytes", seen["memory_bytes"], "MiB"),
        ("step time", "step_s", "low_s", "high_s", seen["step_s"], "s"),
    ):
        # Neither is known where the card is not in the table, or no step was timed.
        if predicted[want] is None or have is None:
            print(f"{name:<42}not known")
            continue
        scale, digits = (MIB, 0) if unit == "MiB" else (1, 3)
        values = [f"{value / scale:,.{digits}f}" for value in (predicted[want], predicted[low], predicted[high], have)]
        text = f"{values[0]} {unit} ({values[1]} to {values[2]})"
        print(f"{name:<42}{text:<30}{values[3] + ' ' + unit:<12}{have / predicted[want]:.2f}")
    if seen["memory_basis"] == "rss_growth":
        say(
            "On a CPU the rates are guessed from the number of cores, hence the wide interval of the step time, and\n"
            "resident memory also holds what the C library keeps and the kernels' own buffers."
        )
    say(f"loss  first step {losses[0]:.3f}, last step {losses[-1]:.3f} ({len(losses)} steps)")
    if not losses[-1] < losses[0]:
        raise DemoFailed("the loss did not fall")


def end_run() -> None:
    """End a run that is still going, of this demo or an earlier one; the supervisor outlives its terminal."""
    if (ROOT / WORK / "run" / "run.json").is_file():
        trlfit("stop", f"{WORK}/run", capture=True)


def main() -> int:
    """Everything in order; 1 when something is not as it should be."""
    began = time.monotonic()
    print("environment: " + " ".join(f"{name}={value}" for name, value in ENVIRONMENT.items()), flush=True)
    try:
        end_run()
        shutil.rmtree(ROOT / WORK, ignore_errors=True)
        plan_for_a_node()
        plan_for_this_machine()
        train_here()
        compare()
    except DemoFailed as failure:
        print(f"\ndemo failed: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        end_run()
        return 130
    say(f"demo done in {time.monotonic() - began:.0f} s; the run folder is {WORK}/run")
    return 0


if __name__ == "__main__":
    sys.exit(main())
