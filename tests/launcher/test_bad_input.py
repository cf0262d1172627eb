"""Bad input of every kind: one line that says what is wrong and what to do, the documented exit code, no traces."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.launcher.command_line import (
    DEAD_HUB,
    H100,
    MODEL,
    TINY_CONFIG,
    assert_refused,
    child,
    command_environment,
    here,
    listing,
    write_files,
)
from tests.launcher.tiny_models import EXAMPLES, templateless_model, tiny_model

USAGE, ENVIRONMENT = 2, 4
NOBODY = "~no-such-user"
BERT = {**TINY_CONFIG, "model_type": "bert", "architectures": ["BertForMaskedLM"]}
BOMB = "x0: &a0 [l, l, l, l, l, l, l, l, l]\n" + "".join(
    f"x{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10)
)
"""Nine aliases of nine aliases, ten levels deep: three thousand million values."""


@dataclass(frozen=True)
class Case:
    """A command line that must be refused."""

    words: tuple[str, ...]
    says: tuple[str, ...]
    code: int = USAGE
    files: dict[str, str | bytes] = field(default_factory=dict)


def plan(*flags: str, says: str | tuple[str, ...], code: int = USAGE, **files: str | bytes) -> Case:
    """``trlfit plan`` of a bundled model on eight cards, with more flags."""
    return Case(("plan", MODEL, *H100, *flags), (says,) if isinstance(says, str) else says, code, dict(files))


def model(name: str, *says: str, code: int = USAGE, files: dict[str, str | bytes] | None = None) -> Case:
    """A plan of another model."""
    return Case(("plan", name, *H100), says, code, files or {})


def config(text: str | bytes, *says: str) -> Case:
    """A plan of a folder whose config.json holds ``text``."""
    return model("m", "m/config.json", *says, files={"m/config.json": text})


def machine(spec: str, *says: str, files: dict[str, str | bytes] | None = None) -> Case:
    """A plan for another machine."""
    return Case(("plan", MODEL, "--machine", spec), says, USAGE, files or {})


def job(text: str | bytes, *says: str, flags: tuple[str, ...] = H100) -> Case:
    """A plan of a job file."""
    return Case(("plan", "--job", "job.yaml", *flags), says, USAGE, {"job.yaml": text})


def field_of(text: str, *says: str) -> Case:
    """A plan of a job file that is good but for one more line."""
    return job(f"model: {MODEL}\n{text}\n", "job file 'job.yaml': ", *says)


def book(*flags: str, says: str) -> Case:
    """A textbook count."""
    return Case(("ledger", "--textbook", *flags), (says,))


MODELS = {
    "unknown": model("Qwen/Qwen3-9B", "not bundled", "did you mean Qwen/", "HF_HUB_OFFLINE is set", code=ENVIRONMENT),
    "typo": model("Qwen/Qwen3-8Bx", "did you mean Qwen/Qwen3-8B, ", code=ENVIRONMENT),
    "nothing-like-it": model("zzz/zzzzzz", "'zzz/zzzzzz' is not bundled", code=ENVIRONMENT),
    "not-an-id": model("no such model!", "neither a path nor a hub id such as Qwen/Qwen3-8B"),
    "empty": model("", "no model given"),
    "a-plan": Case(
        ("plan", "p.json", *H100),
        ("p.json is a plan, not a model; give it to `trlfit write`, `trlfit launch` or --against",),
        files={"p.json": '{"schema": "trlfit.plan/1"}'},
    ),
    "none": Case(("plan", *H100), ("no model given; name one, for example: trlfit plan Qwen/Qwen3-8B",)),
    "too-many-slashes": model("a/b/c", "neither a path nor a hub id"),
    "home-of-nobody": model(f"{NOBODY}/m", f"'{NOBODY}/m': no such file or folder"),
    "path-that-is-not-there": model("./nothing", "'./nothing': no such file or folder"),
    "endless-name": model("x" * 5000, "neither a path nor a hub id"),
    "name-with-a-line-break": model("a\nb", "'a\\nb' is neither"),
    "name-with-a-nul": model("a\0b", "neither a path nor a hub id"),
    "user-that-is-not-there": model("~nobody-of-that-name/m", "no such file or folder"),
    "folder-without-config": model("m", "model folder 'm' has no config.json", files={"m/weights.bin": "x"}),
    "device": model("/dev/null", "/dev/null: is not valid JSON"),
    "weights": model("m.safetensors", "is not a text file", files={"m.safetensors": b"\x80\xff\x00" * 99}),
    "broken-config": config("{broken", "is not valid JSON at line 1"),
    "empty-config": config("", "is not valid JSON at line 1"),
    "huge-config": config(" " * (9 << 20), "is larger than 8192 KiB; give the model's config.json"),
    "binary-config": config(b"\x80\xff\x00" * 99, "is not a text file"),
    "list-config": config("[]", "holds no JSON object"),
    "deep-config": config("[" * 100_000, "is not valid JSON"),
    "number-without-end": config('{"model_type": "llama", "hidden_size": ' + "9" * 5000 + "}", "is not valid JSON"),
    "no-model-type": config("{}", "model_type is missing"),
    "encoder": config(json.dumps(BERT), "model_type 'bert' is an encoder; TRL trains decoders"),
    "negative-size": config(json.dumps({**TINY_CONFIG, "hidden_size": -1}), "hidden_size is -1, outside 1 to"),
    "word-for-a-size": config(
        json.dumps({**TINY_CONFIG, "hidden_size": "many"}), "hidden_size is 'many', not an integer"
    ),
    "thousands-of-layers": config(
        json.dumps({**TINY_CONFIG, "num_hidden_layers": 10**9}), "num_hidden_layers is 1000000000"
    ),
    "not-a-number": config('{"model_type": "llama", "hidden_size": NaN}', "nan, not an integer"),
}

SIZES = {
    "no-tokens": plan("--seq-len", "0", says="--seq-len: must be at least 8 (given 0)"),
    "negative-tokens": plan(
        "--seq-len", "-1", says="--seq-len: '-1' is not a number of tokens; write 4096, 128k or 1M"
    ),
    "endless-tokens": plan("--seq-len", str(10**12), says="--seq-len: must be at most 134217728 (given 1000000000000)"),
    "almost-tokens": plan("--seq-len", "1e9x", says="'1e9x' is not a number of tokens"),
    "fraction-of-a-token": plan("--seq-len", "4.5", says="'4.5' is not a number of tokens"),
    "other-digits": plan("--seq-len", "\uff19\uff19", says="is not a number of tokens"),
    "no-batch": plan("--global-batch", "0", says="--global-batch: must be at least 1 (given 0)"),
    "batch-in-words": plan("--global-batch", "1e9", says="--global-batch: invalid int value: '1e9'"),
    "endless-batch": plan("--global-batch", "9" * 400, says="--global-batch: must be at most 1000000"),
    "number-beyond-python": plan("--global-batch", "9" * 9000, says="--global-batch: invalid int value"),
    "reserve-of-everything": plan("--reserve", "1.5", says="--reserve: must be less than 1 (given 1.5)"),
    "reserve-nan": plan("--reserve", "nan", says="--reserve: must be less than 1 (given nan)"),
    "no-rank": plan("--method", "lora", "--lora-r", "0", says="--lora-r: must be at least 1 (given 0)"),
    "dropout-of-everything": plan("--lora-dropout", "1", says="--lora-dropout: must be less than 1 (given 1.0)"),
    "no-alpha": plan("--lora-alpha", "0", says="--lora-alpha: must be at least 1 (given 0)"),
    "no-nodes": plan("--nodes", "0", says="--nodes: must be at least 1 (given 0)"),
    "no-candidates": plan("--top", "0", says="--top: give a whole number from 1 to 1,000, not '0'"),
}

WORDS = {
    "trainer": plan("--trainer", "ppo", says="--trainer: must be 'sft', 'dpo', 'kto', 'reward', 'grpo' or 'rloo'"),
    "method": plan("--method", "qlroa", says="--method: must be 'full', 'lora' or 'qlora' (given 'qlroa')"),
    "goal": plan("--goal", "fast", says="--goal: must be 'fastest', 'longest', 'fewest_gpus' or 'headroom'"),
    "quantization": plan("--quantization", "nf5", says="--quantization: must be 'nf4', 'nf4-double' or 'int8'"),
    "allow": plan("--allow", "everything", says="--allow: must be 'numerics' or 'method' (given 'everything')"),
    "knob": plan("--pin", "recomputing=full", says=("pin recomputing is not a knob; knobs: ", "recompute, offload")),
    "value": plan(
        "--pin", "recompute=some", says="recompute=some is not a value of this knob; choose one of none, full"
    ),
    "offload": plan("--pin", "offload=activation", says="use a subset of activations, optimizer, params"),
    "optimizer": plan("--pin", "optimizer=adamm", says=("'adamm' is not known; known: ", "adamw_torch_fused")),
    "route": plan("--pin", "precision=fp4", says="precision=fp4: no precision route 'fp4'; known: bf16, "),
    "no-value": plan("--pin", "cp", says="--pin: 'cp' is not KEY=VALUE"),
    "no-knob": plan("--pin", "=3", says="--pin: '=3' is not KEY=VALUE"),
    "size": plan("--pin", "cp=1.5", says="pin cp=1.5 is not a size; give a whole number from 1 to 1,000,000"),
    "size-without-end": plan("--pin", f"cp={'9' * 5000}", says="is not a size"),
    "twice": plan(
        "--pin", "recompute=full", "--pin", "recompute=none", says="--pin: recompute is given as 'full' and as 'none'"
    ),
    "flag": plan("--batch-size", "8", says="unrecognized arguments: --batch-size 8"),
    "shortened-flag": plan("--pi", "cp=1", says="unrecognized arguments: --pi cp=1"),
    "command": Case(("plam",), ("invalid choice: 'plam' (choose from 'plan', 'ledger'",)),
    "second-model": plan("another/model", says="unrecognized arguments: another/model"),
    "document": Case(("schema", "run"), ("invalid choice: 'run' (choose from 'job', 'plan')",)),
}

CONTRADICTIONS = {
    "cp-under-ddp": plan(
        "--pin", "cp=2", "--pin", "sharding=ddp", "--seq-len", "16k",
        says="cp 2 runs only under fsdp, fsdp_no_reshard or hsdp, not ddp",
    ),
    "cp-3-of-8": plan("--pin", "cp=3", "--seq-len", "16k", says=("cp=3 divides none", "(1, 2, 4, 8); pin gpus=3")),
    "batch": plan(
        "--pin", "micro_batch=3", "--pin", "grad_accum=1", "--pin", "gpus=1", "--global-batch", "8",
        says="micro_batch 3 x grad_accum 1 x 1 data-parallel ranks is 3, not global_batch 8",
    ),
    "batch-that-divides-over-no-ranks": plan(
        "--pin", "sharding=ddp", "--pin", "gpus=8", "--global-batch", "7",
        says=("8 data-parallel ranks", "not global_batch 7"),
    ),
    "batch-without-end": plan(
        "--pin", "micro_batch=1000000", "--pin", "grad_accum=1000000", says="the largest is 1,000,000"
    ),
    "more-gpus-than-there-are": plan("--pin", "gpus=9", says="makes 9 GPUs, the machine has 8"),
    "sizes-beyond-the-machine": plan("--pin", "dp_shard=16", says="dp_shard=16 makes 16 GPUs, and the machine has 8"),
    "sizes-and-gpus": plan(
        "--pin", "gpus=5", "--pin", "dp_shard=2", "--pin", "dp_replicate=2",
        says="dp_shard=2 x dp_replicate=2 makes 4, which does not go with gpus=5",
    ),
    "sp-under-fsdp": plan(
        "--pin", "sp=2", "--pin", "sharding=fsdp", "--seq-len", "16k", says="sp 2 runs only under zero1, zero2 or zero3"
    ),
    "sp-and-cp": plan("--pin", "sp=2", "--pin", "cp=2", "--seq-len", "16k", says="cp 2 and sp 2 exclude each other"),
    "tp": plan("--pin", "tp=2", says="tp 2 is not offered: such a run cannot resume from a checkpoint"),
    "one-gpu-on-eight": plan("--pin", "sharding=none", "--pin", "gpus=8", says="none runs on one GPU, not on 8"),
    "offload-under-ddp": plan(
        "--pin", "offload=optimizer", "--pin", "sharding=ddp", says="offload optimizer needs zero1, zero2 or zero3"
    ),
    "loss-path-of-another-release": plan(
        "--pin", "loss_path=chunked_fp32", "--stack", "trl=1.16.0", says="trl 1.16.0 has no chunked_fp32 loss for sft"
    ),
    "every-knob": plan(
        *(f"--pin={pin}" for pin in (
            "loss_path=fused", "recompute=none", "offload=activations", "sharding=ddp", "cp=1", "sp=1", "tp=1",
            "dp_shard=1", "dp_replicate=8", "micro_batch=1", "grad_accum=1", "optimizer=adamw_torch_fused",
            "weights=fp32", "mixed_precision=bf16", "attention=sdpa", "precision=bf16",
        )),
        "--stack", "trl=1.16.0",
        says="no run is possible: offload activations",
    ),
    "packing-of-preferences": plan("--trainer", "dpo", "--packing", says="dpo does not pack rows"),
}  # fmt: skip

ONE_CARD = {"index": 0, "name": "NVIDIA H100 80GB HBM3", "total_bytes": 80 << 30}
BOX = {"schema": "trlfit.machine/1", "origin": "file", "spec": "box", "cards": [ONE_CARD]}


def box(says: str, **card: object) -> Case:
    """A plan for a machine file whose card has other values."""
    return machine("box.json", says, files={"box.json": json.dumps({**BOX, "cards": [{**ONE_CARD, **card}]})})


MACHINES = {
    "home-of-nobody": machine(f"{NOBODY}/box.json", f"machine file '{NOBODY}/box.json' does not exist"),
    "near-miss": machine("8xH10O-80GB", "no card 'H10O-80GB'; nearest: H100-80GB"),
    "nothing-like-it": machine("banana", "no card 'banana'", "write local, cpu, NxCARD such as 8xH100-80GB"),
    "family": machine("8xA100", "'A100' may be A100-40GB, ", "A100-80GB", "write one of them"),
    "no-cards": machine("0xH100-80GB", "a node has 1 to 128 cards, not 0"),
    "thousand-cards": machine("1000xH100-80GB", "a node has 1 to 128 cards, not 1000; more of them take --nodes"),
    "empty": machine("", "--machine: is empty"),
    "no-file": machine("box.json", "machine file 'box.json' does not exist; write local"),
    "folder": machine("./box", "machine file 'box' is a folder; write local", files={"box/x": ""}),
    "broken": machine("box.json", "box.json, line 1, column 2: not JSON", files={"box.json": "{bro"}),
    "no-schema": machine("box.json", "it has no schema trlfit.machine/1", files={"box.json": "{}"}),
    "other-schema": machine(
        "box.json", "has schema trlfit.plan/1, not trlfit.machine/1", files={"box.json": '{"schema": "trlfit.plan/1"}'}
    ),
    "word-for-bytes": machine(
        "box.json",
        "cards[0].total_bytes: input should be a valid integer",
        files={"box.json": json.dumps({**BOX, "cards": [{**ONE_CARD, "total_bytes": "lots"}]})},
    ),
    "endless-bytes": box("cards[0].total_bytes: input should be less than or equal to", total_bytes=10**400),
    "not-a-number": box("cards[0].power_w: input should be a finite number", power_w=float("nan")),
    "capability": box("cards[0].compute_capability: string should match pattern", compute_capability="nine"),
    "share-of-nothing": box("cards[0].compute_share: input should be greater than or equal to", compute_share=1e-300),
    "endless-nodes": machine(
        "box.json",
        "nodes: input should be less than or equal to 1024",
        files={"box.json": json.dumps({**BOX, "nodes": 10**9})},
    ),
    "no-nodes": machine(
        "box.json",
        "nodes: input should be greater than or equal to 1",
        files={"box.json": json.dumps({**BOX, "nodes": 0})},
    ),
}

JOBS = {
    "missing": Case(("plan", "--job", "none.yaml"), ("job file 'none.yaml' does not exist",)),
    "home-of-nobody": Case(("plan", f"{NOBODY}/job.yaml"), (f"job file '{NOBODY}/job.yaml' does not exist",)),
    "folder": Case(("plan", "--job", "d"), ("job file 'd' is a folder; give a file",), files={"d/x": ""}),
    "unreadable": Case(("plan", "--job", "/proc/self/mem"), ("job file '/proc/self/mem' cannot be read",)),
    "endless": Case(("plan", "--job", "/dev/zero"), ("job file '/dev/zero' is larger than 1024 KiB",)),
    "empty": job("", "job file 'job.yaml' is empty; it needs at least a line such as model: Qwen/Qwen3-8B"),
    "comments": job("# nothing yet\n", "is empty"),
    "binary": job(b"\x80\xff\x00" * 9, "job file 'job.yaml' is not a text file"),
    "control-character": job("model: \x01\n", "not valid YAML (unacceptable character #x0001"),
    "list": job("- a\n- b\n", "is not a mapping of fields; start with a line such as model:"),
    "text": job("just words", "is not a mapping of fields"),
    "numbers-for-names": job("1: 2\n", "is not a mapping of fields"),
    "bracket": job("model: [a\n", "job file 'job.yaml' line 2: while parsing a flow sequence expected ',' or ']'"),
    "tab": job(f"model: {MODEL}\nlora:\n\tr: 8\n", "line 3: ", "'\\t' that cannot start any token"),
    "twice": job(f"model: {MODEL}\nseq_len: 8\nmodel: b\n", "job file 'job.yaml' line 3: 'model' is given twice"),
    "twice-inside": job(f"model: {MODEL}\nlora:\n  r: 3\n  r: 4\n", "line 4: 'r' is given twice"),
    "key-of-keys": job("? [a]\n: b\n", "line 1: a key is not a plain word"),
    "tag": job("model: !!python/object/apply:os.system [ls]\n", "line 1: could not determine a constructor"),
    "two-documents": job(f"model: {MODEL}\n---\nmodel: b\n", "expected a single document in the stream"),
    "unknown-alias": job("model: *a\n", "line 1: found undefined alias"),
    "alias-of-itself": job(f"model: {MODEL}\ntrl: &a {{b: *a}}\n", "line 2: an alias stands inside what it names"),
    "bomb": job(f"model: {MODEL}\n{BOMB}", "more than 10,000 values"),
    "bomb-in-a-free-field": job(f"model: {MODEL}\ntrl:\n  {BOMB.replace(chr(10), chr(10) + '  ')}", "more than 10,000"),
    "nested-lists": job("[" * 5000, "nested too deeply"),
    "nested-maps": job("a: " + "{a: " * 3000, "nested too deeply"),
    "number-without-end": job(f"model: {MODEL}\nseq_len: {'9' * 5000}\n", "not valid YAML"),
    "no-model": job("seq_len: 8\n", "job file 'job.yaml' names no model; add a line such as model: Qwen/Qwen3-8B"),
    "field": field_of("seq_length: 3", "seq_length is not a field of a job; did you mean seq_len?"),
    "field-like-no-other": field_of("learning_rate: 3", "is not a field of a job; `trlfit schema job` lists them"),
    "field-of-lora": field_of("lora: {rank: 3}", "lora.rank is not a field of a job; there are r, alpha"),
    "field-of-data": field_of("data: {path: x}", "data.path is not a field of a job; there are dataset, "),
    "word-for-a-number": field_of("seq_len: lots", "seq_len: 'lots' is not a number of tokens; write 4096, 128k or 1M"),
    "quoted-number": field_of("global_batch: '8'", "global_batch: give a whole number (given '8')"),
    "fraction": field_of("seq_len: 4.5", "seq_len: give a whole number (given 4.5)"),
    "yes-for-a-number": field_of("nodes: yes", "nodes: give a whole number (given True)"),
    "hexadecimal-without-end": field_of(f"seq_len: 0x{'f' * 5000}", "seq_len: must be at most 134217728"),
    "number-for-lora": field_of("lora: 3", "lora: give a mapping, such as {r: 16} (given 3)"),
    "path-for-data": field_of("data: x.jsonl", "data: give a mapping, such as {dataset: train.jsonl}"),
    "list-for-pins": field_of("pins: [a]", "pins: give a mapping, such as {recompute: full}"),
    "word-for-allow": field_of("allow: numerics", "allow: give a list, such as [numerics] (given 'numerics')"),
    "word-for-yes": field_of("data: {packing: 'yes'}", "data.packing: give true or false (given 'yes')"),
    "number-for-text": field_of("machine: 8", "machine: give text", "(given 8)"),
    "bare-version": field_of("stack: {trl: 1.16}", "stack: put the version of trl in quotes: '1.16'"),
    "no-targets": field_of("lora: {target_modules: []}", "lora.target_modules: name at least one module"),
    "infinite": field_of("trl: {learning_rate: .inf}", "trl: learning_rate is inf"),
    "date": field_of("trl: {run_name: 2026-01-01}", "trl: run_name is a date; put it in quotes"),
    "number-for-a-name": field_of("trl: {1: 2}", "trl: its names must be text"),
    "list-for-a-size": job(f"model: {MODEL}\npins: {{cp: [2]}}\n", "pin cp=[2] is not a size"),
    "flag-over-a-good-file": job(
        f"model: {MODEL}\n", "--seq-len: must be at least 8 (given 0)", flags=("--seq-len", "0")
    ),
}  # fmt: skip

LORA = ("--method", "lora", "--lora-targets")
TARGETS_AND_STACKS = {
    "target": plan(*LORA, "q_prog", says="lora target 'q_prog' is no module of Qwen/Qwen3-8B; it has q_proj, k_proj"),
    "one-of-two-targets": plan(*LORA, "q_proj,value", says="lora target 'value' is no module"),
    "no-target": plan(*LORA, "", says="--lora-targets: name at least one module, or write all-linear"),
    "fused-attention": Case(
        ("plan", "microsoft/phi-4", *H100, *LORA, "q_proj"),
        ("'q_proj' is no module of microsoft/phi-4; it has qkv_proj",),
    ),
    "half-of-a-fused-pair": Case(
        ("plan", "mistralai/Mixtral-8x7B-v0.1", *H100, *LORA, "w1"),
        ("lora targets lack w3: PEFT adapts the fused gate",),
    ),
    "package": plan(
        "--stack", "trll=1.0", says="--stack trll=1.0: no package that a plan depends on; did you mean trl"
    ),
    "foreign-package": plan("--stack", "numpy=2.0", says="it is one of torch, transformers, trl"),
    "version": plan("--stack", "trl=new", says="--stack trl=new: not a version; write for example trl=1.16.0"),
    "no-version": plan("--stack", "trl", says="--stack: 'trl' is not KEY=VALUE"),
    "two-versions": plan("--stack", "trl=1.16.0,trl=1.15.0", says="trl is given as '1.16.0' and as '1.15.0'"),
    "no-python": plan("--python", "/nope/python", code=ENVIRONMENT, says="--python /nope/python is not there"),
    "no-python-on-path": plan(
        "--python", "pyhton9", code=ENVIRONMENT, says="--python pyhton9: no such command on PATH"
    ),
    "folder-for-a-python": plan("--python", ".", code=ENVIRONMENT, says="--python"),
    "other-program": plan("--python", "/bin/true", code=ENVIRONMENT, says="does not answer like a Python"),
    "text-file-for-a-python": plan("--python", "./p", code=ENVIRONMENT, says="is not executable", p="print()"),
}

BOOKS = {
    "no-parameters": book("--params", "0", says="--params 0 is out of range; give 1 to 1e+15"),
    "infinite-parameters": book("--params", "inf", says="--params inf is out of range"),
    "parameters-in-words": book("--params", "x", says="--params: invalid float value: 'x'"),
    "no-devices": book("--devices", "0", says="--devices 0 is out of range"),
    "stage": book("--stage", "4", says="--stage: invalid choice: 4 (choose from 0, 1, 2, 3)"),
    "role": book("--bytes", "momentum=3", says="no such role; roles: weights, gradient, master, moment1, moment2"),
    "half-a-byte": book("--bytes", "gradient=0.5", says="give whole bytes per parameter, 0 to 64"),
    "no-width": book("--bytes", "gradient", says="--bytes: 'gradient' is not ROLE=BYTES"),
    "role-twice": book("--bytes", "gradient=4,gradient=2", says="--bytes: gradient is given as 4 and as 2"),
    "card-nan": book("--card-gib", "nan", says="--card-gib nan is out of range"),
    "model": Case(("ledger", MODEL, "--textbook"), ("--textbook counts stated sizes, not a model",)),
    "flag-of-a-job": book("--pin", "cp=1", says="--pin: --textbook reads stated sizes alone; drop it"),
    "tracing-of-a-book": book("--no-trace", says="--no-trace: --textbook reads stated sizes alone"),
    "flag-of-the-book": Case(("ledger", MODEL, *H100, "--params", "8e9"), ("add --textbook",)),
}

RUNS = {
    "watch-nothing": Case(("watch", "none"), ("none is not a run folder; `trlfit runs` lists them",)),
    "control-characters": Case(
        ("watch", "a\x1b[31m\x9b\u202eb"), (r"a\x1b[31m\x9b\u202eb is not a run folder",)
    ),
    "resume-a-run-of-nobody": Case(
        ("launch", f"{NOBODY}/run", "--resume"), ("--resume needs a run folder that was launched",)
    ),
    "python-of-nobody": Case(
        ("plan", MODEL, *H100, "--python", f"{NOBODY}/python"), (f"--python {NOBODY}/python is not there",), ENVIRONMENT
    ),
    "data-of-nobody": Case(
        ("write", MODEL, *H100, "--dataset", f"{NOBODY}/rows.jsonl"), (f"{NOBODY}/rows.jsonl does not exist",)
    ),
    "resume-nothing": Case(("launch", "none", "--resume"), ("--resume needs a run folder that was launched",)),
    "next-nothing": Case(("launch", "--next"), ("--next needs a run folder that was launched; name one",)),
    "forget-nothing": Case(("probe", "--forget", ""), ("--forget: a WORD is empty; --forget alone removes all",)),
    "two-probes": Case(("probe", "--rates", "--route", "mxfp4-sr"), ("--rates and --route ask for two probes",)),
    "rates-of-a-model": Case(
        ("probe", MODEL, "--rates"), (f"{MODEL}: --rates measures this machine, whatever the job", "--measure")
    ),
    "rates-of-a-job": Case(("probe", "--rates", "--seq-len", "9k"), ("--seq-len: --rates measures this machine",)),
    "rates-without-tracing": Case(("probe", "--rates", "--no-trace"), ("--no-trace: --rates measures this machine",)),
    "route-of-a-job": Case(
        ("probe", "--route", "mxfp4-sr", "--lora-r", "8"), ("--lora-r: --route takes MODEL and --dataset of a job",)
    ),
    "list-of-a-job": Case(("probe", "--show", "--method", "lora"), ("--method: --show runs no probe; drop it",)),
    "list-of-rates": Case(("probe", "--show", "--rates"), ("--rates: --show runs no probe; drop it",)),
    "steps-of-no-route": Case(("probe", "--rates", "--steps", "9"), ("--steps is for --route",)),
    "limit-of-a-list": Case(("probe", "--show", "--limit", "9"), ("--limit is for probes; --show runs none",)),
    "probe-of-short-rows": Case(
        ("probe", MODEL, "--measure", "--machine", "cpu", "--seq-len", "16"), ("rows of 32 tokens or more",)
    ),
    "stop-nothing": Case(("stop", "none"), ("none is not a run folder",)),
    "no-run": Case(("stop",), ("the following arguments are required: RUN",)),
    "grace": Case(
        ("stop", "r", "--grace", "nan"),
        ("--grace nan: give seconds from 0 to 86,400",),
        files={"r/train.py": "", "r/command.sh": "", "r/accelerate.yaml": ""},
    ),
    "history-of-nothing": Case(("runs", "none"), ("none is not a folder",)),
    "stacks-of-no-python": Case(("stacks", "--python", "/nope"), ("--python /nope is not there",), ENVIRONMENT),
    "elsewhere": Case(
        ("launch", MODEL, *H100, "--dataset", "d.jsonl", "--no-check"),
        ("this plan is for 8xH100-80GB; start it there",),
        files={"d.jsonl": '{"text": "a"}\n'},
    ),
    "plan-that-is-none": Case(("write", "p.json"), ("plan 'p.json' is not valid JSON",), files={"p.json": "{"}),
    "plan-of-another-kind": Case(
        ("write", "p.json"),
        ("schema: ", "make it with `trlfit plan --json`"),
        files={"p.json": '{"schema": "trlfit.plan/9"}'},
    ),
    "two-jobs-planned": Case(("plan", "a.yaml", "--job", "b.yaml"), ("two job files: a.yaml and --job b.yaml",)),
    "job-file-that-is-not-there": Case(("plan", "none.yaml"), ("none.yaml",)),
    "two-jobs": Case(("write", "a.yaml", "--job", "b.yaml"), ("two job files: a.yaml and --job b.yaml; give one",)),
    "written-already": Case(
        ("write", "r"),
        ("r is a run folder already; `trlfit launch` starts it",),
        files={"r/train.py": "", "r/command.sh": "", "r/accelerate.yaml": ""},
    ),
    "no-such-candidate": Case(
        ("write", MODEL, *H100, "--candidate", "999", "--dataset", "d.jsonl"),
        ("--candidate 999: only ", " candidates fit"),
        files={"d.jsonl": '{"text": "a"}\n'},
    ),
}  # fmt: skip

TABLES = {
    "model": MODELS,
    "size": SIZES,
    "word": WORDS,
    "contradiction": CONTRADICTIONS,
    "machine": MACHINES,
    "job": JOBS,
    "target-or-stack": TARGETS_AND_STACKS,
    "textbook": BOOKS,
    "run": RUNS,
}
CASES = {f"{table}-{name}": case for table, cases in TABLES.items() for name, case in cases.items()}
IN_CHILDREN = (
    "model-typo", "model-broken-config", "model-huge-config", "size-almost-tokens", "word-value",
    "contradiction-cp-3-of-8", "machine-near-miss", "job-tab", "job-bomb", "job-endless",
    "target-or-stack-other-program", "textbook-role",
    "run-watch-nothing",
)  # fmt: skip
"""Also run as the installed command."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, without network and caches."""
    for name, value in command_environment(tmp_path / "home").items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_the_table_is_as_long_as_it_should_be() -> None:
    assert len(CASES) >= 150


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_refused_in_one_line(name: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = CASES[name]
    write_files(place, case.files)
    before = listing(place)
    ways = (
        [case.words] if case.words[0] in ("schema", "watch", "stop", "plam") else [case.words, (*case.words, "--json")]
    )
    for words in ways:
        assert_refused(here(capsys, words), case.code, *case.says)
    assert listing(place) == before


@pytest.mark.parametrize("name", IN_CHILDREN)
def test_bad_input_is_refused_by_the_installed_command(name: str, place: Path) -> None:
    case = CASES[name]
    write_files(place, case.files)
    before = listing(place)
    said = child(case.words, cwd=place, env=command_environment(place.parent / "home"))
    assert_refused(said, case.code, *case.says)
    assert listing(place) == before


def test_without_network_an_unknown_model_is_one_quick_line(place: Path) -> None:
    env = command_environment(place.parent / "home", HF_ENDPOINT=DEAD_HUB, HF_HUB_OFFLINE="0")
    said = child(["plan", "nobody/Qwen3-8B", *H100], cwd=place, env=env, timeout_s=20)
    assert_refused(said, ENVIRONMENT, "the hub cannot be reached", "did you mean Qwen/Qwen3-8B")
    assert listing(place) == set()


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
@pytest.mark.parametrize("words", [("--job", "secret.yaml"), ("secret.json",), (MODEL, "--machine", "secret.json")])
def test_a_file_without_permission(words: tuple[str, ...], place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("secret.yaml", "secret.json"):
        (place / name).touch(mode=0)
    assert_refused(here(capsys, ("plan", *words)), USAGE, "secret", "Permission denied")


# Training data and written runs


TINY = ("tiny", "--no-trace", "--machine", "cpu", "--seq-len", "64", "-o", "run")
TINY_FOLDER = {"tiny/config.json": json.dumps(TINY_CONFIG)}
TEXT = str(EXAMPLES / "train.jsonl")
DATA = {
    "none": ((), "the job names no training data", {}),
    "missing": (("--dataset", "none.jsonl"), "none.jsonl does not exist", {}),
    "suffix": (("--dataset", "d.txt"), "'d.txt' is a file of no known kind; convert it to .jsonl", {"d.txt": "a"}),
    "suffix-of-a-path": (("--dataset", "./d.txt"), "convert it to", {"d.txt": "a"}),
    "folder": (("--dataset", "d.jsonl"), "is a folder", {"d.jsonl/x": ""}),
    "empty": (("--dataset", "d.jsonl"), "d.jsonl is empty", {"d.jsonl": ""}),
    "broken": (("--dataset", "d.jsonl"), "is not JSON at line 2", {"d.jsonl": '{"text": "a"}\n{"text": "b"\n'}),
    "columns": (("--dataset", "d.jsonl"), "has the columns `body`; sft needs `text`", {"d.jsonl": '{"body": "a"}\n'}),
    "trainer": (("--dataset", TEXT, "--trainer", "dpo"), "dpo needs `chosen` and `rejected`", {}),
    "planned": (("--dataset", TEXT, "--trl", "optim=sgd"), "trl.optim is decided by the plan; pin optimizer", {}),
    "occupied": (("--dataset", TEXT), "run holds other files", {"run/other": "x"}),
    "file-in-the-way": (("--dataset", TEXT), "run is a file", {"run": "x"}),
}


@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("command", ["write", "launch"])
def test_bad_data_is_refused_before_anything_is_written(
    command: str, name: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags, says, files = DATA[name]
    write_files(place, {**files, **TINY_FOLDER})
    before = listing(place)
    assert_refused(here(capsys, (command, *TINY, *flags)), USAGE, says)
    assert listing(place) == before


def test_a_probe_that_could_not_be_kept_is_not_begun(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "file").touch()
    monkeypatch.setenv("TRLFIT_CACHE", str(place / "file"))
    monkeypatch.setattr("launcher.commands.measure.ask_child", lambda *_, **__: pytest.fail("it began"))
    assert_refused(here(capsys, ("probe", "--rates")), ENVIRONMENT, "nothing could be kept", "Not a directory")


def test_an_output_under_a_file(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_files(place, {"a": "x", **TINY_FOLDER})
    words = ("write", *TINY[:-1], "a/run", "--dataset", TEXT)
    assert_refused(here(capsys, words), USAGE, "-o a/run: ", "/a is a file; choose another place")
    assert listing(place) == {"a", "tiny", "tiny/config.json"}


def test_the_folder_one_is_in_is_no_output(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_files(place, TINY_FOLDER)
    words = ("write", *TINY[:-1], ".", "--dataset", TEXT)
    assert_refused(here(capsys, words), USAGE, "-o .: the folder you are in cannot be replaced")
    assert listing(place) == {"tiny", "tiny/config.json"}


@pytest.mark.stack
def test_a_conversation_without_a_chat_template(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("write", str(templateless_model()), *TINY[1:], "--dataset", str(EXAMPLES / "chat.jsonl"))
    assert_refused(here(capsys, words), USAGE, "the tokenizer has no chat template")
    assert listing(place) == set()


@pytest.mark.stack
def test_a_setting_that_trl_does_not_have(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Known only once the trainer's config class was asked, so what was found in the data stands before it."""
    write_files(place, {"run/train.py": "old", "run/command.sh": "old", "run/accelerate.yaml": "old"})
    words = ("write", str(tiny_model()), *TINY[1:], "--overwrite", "--dataset", TEXT, "--trl", "learnig_rate=1e-3")
    said = here(capsys, words)
    *notes, error = said.err.splitlines()
    assert notes
    assert all(note.startswith("trlfit: data: ") for note in notes)
    assert error.startswith("trlfit: error: SFTConfig of this TRL has no setting learnig_rate")
    assert (said.code, said.out) == (USAGE, "")
    assert (place / "run" / "train.py").read_text() == "old", "the run that was there is as it was"
    assert listing(place) == {"run", "run/train.py", "run/command.sh", "run/accelerate.yaml"}
