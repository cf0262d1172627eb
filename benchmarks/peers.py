"""What other estimators say of the recorded runs that ours is held to: writes benchmarks/results/peers.json.

`python benchmarks/peers.py` makes a virtual environment for each peer, installs it from the package registry, asks it
about every row of tests/planner/data/measured.jsonl and traced.jsonl that it can be told, and writes what it answered
or why it could not be asked. `--only NAME` renews one peer and keeps the others; `--summary` prints errors of the file
as it is. What is stated to a peer is in peers_cases.py; how its answer is read is in peers_child.py, which runs in the
peer's Python.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.peers_cases import Case
from planner.choice import Choice
from planner.config.reader import read_architecture
from profiles.cards import find_card
from profiles.models import find_model
from tests.planner.replay import Row, choice_of, quantile, rows

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "peers.json"
CONSTRAINTS = ("-c", str(ROOT / "constraints.txt"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One estimator."""

    name: str
    """As on the package registry."""
    command: str
    """What is asked, in its own words."""
    counts: str
    """What its number holds."""
    installs: tuple[tuple[str, ...], ...]
    """Arguments of pip, one call each."""
    environ: tuple[tuple[str, str], ...] = ()
    """Variables that its installation needs."""


PEERS = (
    Peer(
        name="accelerate",
        command="accelerate estimate-memory MODEL --dtypes float32|float16, column Training using Adam",
        counts="weights, gradients and Adam states of the model without an untied head; no activations, no sharding, "
        "no LoRA; the float16 row stands for bf16 runs.",
        installs=((*CONSTRAINTS, "torch", "transformers", "accelerate==1.15.0"),),
    ),
    Peer(
        name="deepspeed",
        command="estimate_zero3_model_states_mem_needs(params, largest layer, GPUs, cpu_offload=False)",
        counts="18 bytes per parameter over the GPUs (16-bit weights, fp32 master weights and Adam states) and the "
        "largest layer; no activations, no loss, no LoRA, no pure bf16; FSDP and one GPU are asked as ZeRO-3.",
        installs=(
            (*CONSTRAINTS, "torch", "transformers", "packaging", "setuptools", "wheel", "ninja"),
            (*CONSTRAINTS, "--no-build-isolation", "deepspeed==0.19.8"),
        ),
        environ=(("DS_BUILD_OPS", "0"), ("DS_ACCELERATOR", "cpu")),
    ),
    Peer(
        name="llm-analysis",
        command="LLMAnalysis(model, gpu, dtype, parallelism).training(...)",
        counts="weights, gradients, states, activations by recompute mode and one 16-bit copy of the logits, all at "
        "once; ZeRO divides the states; weights of 16 bits, a tied head, no head_dim, no LoRA, no allocator.",
        # Its bounds on transformers and huggingface_hub are older than what the constraints pin.
        installs=(("llm-analysis==0.2.2",),),
    ),
    Peer(
        name="fitcheck-llm",
        command="fitcheck MODEL --gpu CARD --batch-size N --seq-len N ... (estimate)",
        counts="weights, adapters, gradients, states (with fp32 master weights unless LoRA), and the higher of the "
        "logits' and a layer's peak over kept activations; context and allocator apart; one GPU, dense models.",
        installs=((*CONSTRAINTS, "fitcheck-llm==0.3.1"),),
    ),
    Peer(
        name="canifinetune",
        command="canifinetune estimate --model MODEL --method full|lora|qlora --gpu-vram-gb N ...",
        counts="weights, gradients, states (and a copy of one unless fused), activations and 14 bytes per bf16 logit, "
        "all at once; 8 % of the card for context and allocator and 5 % for safety apart; one GPU.",
        installs=((*CONSTRAINTS, "canifinetune==0.4.1"),),
    ),
    Peer(
        name="ftuneai",
        command="ftuneai.Estimator(model, method, batch_size, seq_length, sharding, num_gpus, ...).estimate_memory()",
        counts="weights, 16-bit gradients, fp32 states, and a fitted multiple of the hidden states for activations, "
        "divided by ZeRO or FSDP; no logits; 20 % for context and allocator apart.",
        installs=((*CONSTRAINTS, "ftuneai==0.4.1"),),
    ),
    Peer(
        name="hf-vram-calc",
        command="hf-vram-calc --model MODEL --model_path DIR --dtype D --lora_rank R, column Training (Adam) or LoRA",
        counts="weights x 4 x 1.3 for full training, (weights + adapters x 4) x 1.2 for LoRA, a tied head counted "
        "twice; no batch, length or recompute in either; no sharding.",
        installs=((*CONSTRAINTS, "torch", "transformers", "hf-vram-calc==1.0.9"),),
    ),
)


def states_of(choice: Choice) -> str:
    """The dtypes in which trained weights, gradients and moments rest: see `Case.states`."""
    if choice.sharding.startswith("zero"):
        return "master"
    upcast = choice.sharding == "fsdp" and choice.mixed_precision == "bf16" and choice.method == "full"
    return "fp32" if choice.weights == "fp32" or upcast else "bf16"


@cache
def config_of(job_model: str | None, config: str | None) -> tuple[dict[str, Any], int]:
    """A row's config.json and the parameters of its class.

    Args:
        job_model: hub id of a measured row.
        config: a traced row's own config, as JSON.
    """
    if config is not None:
        found: dict[str, Any] = json.loads(config)
    else:
        assert job_model is not None
        model = find_model(job_model)
        assert model is not None, f"{job_model} is not bundled"
        found = dict(model.config)
    return found, read_architecture(found, model="peer", origin="config.json").num_parameters


def case_of(row: Row, folder: Path) -> Case:
    """A row in neutral terms.

    Args:
        row: of measured.jsonl or traced.jsonl.
        folder: where the folders with a config.json are.
    """
    job, choice = row["job"], choice_of(row)
    own = json.dumps(row["config"]) if "config" in row else None
    config, params = config_of(job.get("model"), own)
    model = job.get("model") or f"traced/{row['id'].partition('/')[0]}"
    states = states_of(choice)
    dtype = "float32" if states == "fp32" else "bfloat16"
    lora: dict[str, Any] = job.get("lora", {}) if choice.method != "full" else {}
    # A traced config bounds no length; some peers then assume one that is too short for the run.
    config = {"max_position_embeddings": job["seq_len"]} | config | {"torch_dtype": dtype}
    card = find_card(job["machine"].partition("x")[2])
    return Case(
        id=row["id"],
        model=model,
        folder=str(folder / f"{model.replace('/', '--')}-{dtype}-{config['max_position_embeddings']}"),
        config=config,
        params=params,
        trainer=job.get("trainer", "sft"),
        method=choice.method,
        lora_r=lora.get("r"),
        lora_targets=lora.get("target_modules"),
        quantization=job.get("quantization"),
        batch=choice.micro_batch,
        seq_len=job["seq_len"],
        recompute=choice.recompute,
        offload=sorted(choice.offload),
        sharding=choice.sharding,
        gpus=choice.num_gpus,
        context_ranks=choice.cp * choice.sp,
        optimizer=choice.optimizer,
        states=states,
        loss_path=choice.loss_path,
        metric=row.get("measured", {}).get("metric", "max_allocated"),
        card=card.id,
        card_bytes=card.nvml_bytes,
    )


def all_rows() -> list[Row]:
    """Every row that is asked about."""
    return [*rows("measured"), *rows("traced")]


def write_configs(cases: list[Case]) -> None:
    """A folder with config.json for each model of ``cases``."""
    for case in cases:
        path = Path(case["folder"]) / "config.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(case["config"], indent=1), encoding="utf-8")


class InstallError(Exception):
    """pip did not install a peer; the message is its last line."""


def run(command: list[str], environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """A child process, its output kept."""
    return subprocess.run(command, env=os.environ | environ, capture_output=True, text=True, check=False)


def install(peer: Peer, folder: Path) -> Path:
    """The Python of a peer's virtual environment, made if it is not there with the same requirements.

    Raises:
        InstallError: the registry or a build refused.
    """
    home, wanted = folder / peer.name, json.dumps(peer.installs)
    python, marker = home / "bin" / "python", home / "installed.json"
    if marker.is_file() and marker.read_text(encoding="utf-8") == wanted:
        return python
    print(f"{peer.name}: installing into {home}", file=sys.stderr)
    made = run([sys.executable, "-m", "venv", "--clear", str(home)], {})
    for arguments in peer.installs:
        if made.returncode == 0:
            made = run([str(python), "-m", "pip", "install", "--quiet", *arguments], dict(peer.environ))
    if made.returncode != 0:
        lines = [line for line in made.stderr.splitlines() if line.strip()] or ["no word from pip"]
        errors = [line for line in lines if line.startswith("ERROR")]
        raise InstallError((errors or lines)[-1])
    marker.write_text(wanted, encoding="utf-8")
    return python


def ask(peer: Peer, cases: list[Case], folder: Path) -> tuple[str, dict[str, Any]]:
    """A peer's version and its answers, by row id; where it is not to be had, every answer says so."""
    try:
        python = install(peer, folder)
    except InstallError as error:
        print(f"{peer.name}: not installable: {error}", file=sys.stderr)
        return "", {case["id"]: {"cannot": f"not installable: {error}"} for case in cases}
    asked, answered = folder / f"{peer.name}.cases.json", folder / f"{peer.name}.answers.json"
    answered.unlink(missing_ok=True)
    asked.write_text(json.dumps(cases), encoding="utf-8")
    child = Path(__file__).with_name("peers_child.py")
    # Peers look models up on the hub; what they need lies beside them.
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"} | dict(peer.environ)
    done = run([str(python), str(child), peer.name, str(asked), str(answered)], offline)
    if not answered.is_file():
        print(f"{peer.name}: {done.stderr[-2000:]}", file=sys.stderr)
        return "", {case["id"]: {"cannot": "fails to start"} for case in cases}
    document = json.loads(answered.read_text(encoding="utf-8"))
    failed = [line for line in done.stderr.splitlines() if line.startswith(f"{peer.name}, ")]
    print("\n".join([*failed, f"{peer.name} {document['version']}: {len(document['rows'])} rows"]), file=sys.stderr)
    return document["version"], document["rows"]


def renew(names: list[str], folder: Path) -> None:
    """Ask the peers in ``names`` and write the results, those of other peers kept."""
    folder.mkdir(parents=True, exist_ok=True)
    old: dict[str, Any] = {"peers": [], "rows": {}}
    if RESULTS.is_file():
        old = json.loads(RESULTS.read_text(encoding="utf-8"))
    versions: dict[str, str] = {peer["name"]: peer["version"] for peer in old["peers"]}
    cases = [case_of(row, folder / "models") for row in all_rows()]
    answers: dict[str, dict[str, Any]] = {case["id"]: old["rows"].get(case["id"], {}) for case in cases}
    write_configs(cases)
    for peer in PEERS:
        if peer.name in names:
            versions[peer.name], found = ask(peer, cases, folder)
            for row_id, said in found.items():
                answers[row_id][peer.name] = said
    known = [peer for peer in PEERS if peer.name in versions]
    document: dict[str, Any] = {
        "taken": {"python": platform.python_version(), "date": date.today().isoformat()},
        "peers": [
            {"name": p.name, "version": versions[p.name], "command": p.command, "counts": p.counts} for p in known
        ],
        "rows": {row_id: {p.name: said[p.name] for p in known if p.name in said} for row_id, said in answers.items()},
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def seen_bytes(row: Row, group: str) -> int | None:
    """What a row saw, if it is of a group.

    Args:
        row: of measured.jsonl or traced.jsonl.
        group: a metric of measured rows or ``traced``, and after a comma ``full logits`` for runs that made them all.
    """
    metric, _, only = group.partition(", ")
    if only and row["job"]["pins"]["loss_path"] != "full_logits":
        return None
    if "measured" not in row:
        return row.get("allocated_bytes") if metric == "traced" else None
    return row["measured"].get("bytes") if row["measured"].get("metric") == metric else None


GROUPS = (
    "max_allocated",
    "max_allocated, full logits",
    "max_reserved",
    "unknown",
    "traced",
    "traced, full logits",
)


def summary() -> None:
    """Errors of every peer by metric, and its verdicts on runs that ended and runs that ran out of memory."""
    document = json.loads(RESULTS.read_text(encoding="utf-8"))
    for peer in document["peers"]:
        name = peer["name"]
        print(f"\n{name} {peer['version']}")
        for group in GROUPS:
            pairs = [(row, seen) for row in all_rows() if (seen := seen_bytes(row, group)) is not None]
            said = [(document["rows"][row["id"]][name].get("bytes"), seen) for row, seen in pairs]
            errors = [found / seen - 1 for found, seen in said if found is not None]
            text = f"  {group:<27}{len(errors):>3} of {len(pairs)}"
            if errors:
                sizes = [abs(error) for error in errors]
                low = sum(error < 0 for error in errors)
                worst = max(errors, key=abs)
                text += f"  median {median(sizes):.1%}  90th {quantile(sizes, 0.9):.1%}  worst {worst:+.1%}  low {low}"
            print(text)
        for died in (True, False):
            judged = [row["id"] for row in rows("measured") if bool(row["measured"].get("oom")) is died]
            verdicts = [v for row_id in judged if (v := document["rows"][row_id][name].get("fits")) is not None]
            what = "out of memory" if died else "ran"
            print(f"  {what:<27}{len(verdicts):>3} of {len(judged)}  called fitting {sum(verdicts)}")
        why: dict[str, int] = {}
        for said_of in document["rows"].values():
            if "cannot" in said_of[name]:
                why[said_of[name]["cannot"]] = why.get(said_of[name]["cannot"], 0) + 1
        print("  cannot:", ", ".join(f"{reason} ({count})" for reason, count in sorted(why.items())) or "nothing")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[peer.name for peer in PEERS], action="append", help="renew this peer alone")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "peers", help="for environments")
    parser.add_argument("--summary", action="store_true", help="print errors of the results as they are")
    args = parser.parse_args()
    if args.summary:
        summary()
        return 0
    renew(args.only or [peer.name for peer in PEERS], args.folder.resolve())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
