from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import UsageError
from launcher.run_text.python_text import fill, literal
from launcher.run_text.run_files import render_run
from launcher.run_text.training_script import render_training_script
from launcher.writing.run_folder import write_run
from planner.machine import Machine
from tests.launcher.run_specs import (
    LONG_JOB,
    VARIANTS,
    assigned,
    constant,
    cpu,
    gpus,
    make_spec,
)
from tests.launcher.tiny_models import EXAMPLES, tiny_model
from tests.launcher.warm_python import warm_environment, warm_python, warm_variables

ALLOWED = {
    "json", "math", "os", "resource", "sys", "time", "psutil", "torch", "accelerate", "datasets",
    "peft", "transformers", "trl", "my_rewards",
}  # fmt: skip


def config(spec: Any) -> dict[str, Any]:
    return assigned(render_training_script(spec), "CONFIG")


# ---- the text ----


def test_scripts_are_clean_python(tmp_path: Path) -> None:
    """As formatted and linted as a person's: no unused import is left by a dropped part."""
    for name, spec in VARIANTS.items():
        (tmp_path / f"{name}.py").write_text(render_training_script(spec))
    ruff = [sys.executable, "-m", "ruff"]
    rules = "--select=F,E4,E7,E9,I,B,UP,SIM115"
    common = ["--isolated", "--line-length=100", str(tmp_path)]
    checks = [[*ruff, "check", rules, "--ignore=SIM115", *common], [*ruff, "format", "--check", *common]]
    for command in checks:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", VARIANTS)
def test_imports_nothing_of_ours(name: str) -> None:
    tree = ast.parse(render_training_script(VARIANTS[name]))
    modules = {
        (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name) or ""
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert {module.partition(".")[0] for module in modules} <= ALLOWED


def test_holds_only_what_the_run_needs() -> None:
    on_cpu = render_training_script(VARIANTS["cpu"])
    assert "import torch" not in on_cpu and "#%" not in on_cpu and "{{" not in on_cpu
    assert "LORA" not in on_cpu and "QUANTIZATION" not in on_cpu and "reward" not in on_cpu
    on_gpu = render_training_script(VARIANTS["single"])
    assert "psutil" not in on_gpu and "rss" not in on_gpu and "MixedPrecisionPolicy" not in on_gpu
    assert "DeepSpeed" in render_training_script(VARIANTS["zero2"])
    assert "DeepSpeed" not in on_gpu


def test_fsdp_keeps_the_loss_as_computed() -> None:
    assert "output_dtype=None" in render_training_script(VARIANTS["fsdp"])
    # DPO wraps its reference while it is built, before a policy could be set.
    assert "output_dtype" not in render_training_script(VARIANTS["dpo"])


# ---- lengths and positions ----


def test_a_million_tokens_on_eight_gpus() -> None:
    values = config(VARIANTS["million"])
    assert values["max_length"] == 1_048_576
    assert values["pad_to_multiple_of"] == 16
    assert values["packing"] is False
    model = values["model_init_kwargs"]
    assert model["attn_implementation"] == "sdpa"
    assert model["max_position_embeddings"] == 1_048_576
    # 1,048,576 / 40,960 positions
    assert model["rope_parameters"] == {
        "rope_type": "yarn",
        "rope_theta": 1_000_000,
        "factor": 25.6,
        "original_max_position_embeddings": 40_960,
    }
    # FSDP2 recomputes and offloads; the trainer must not as well.
    assert values["activation_checkpointing"] is False
    assert "activation_offloading" not in values


def test_no_yarn_within_the_trained_positions() -> None:
    assert "rope_parameters" not in config(make_spec({"seq_len": 40_960}))["model_init_kwargs"]


@pytest.mark.parametrize(
    "change",
    [{"nested_rope": True}, {"rope_type": "llama3"}, {"rope_theta": None}, {"is_composite": True}],
)
def test_no_yarn_where_it_would_replace_something_else(change: dict[str, Any]) -> None:
    spec = make_spec({"seq_len": 65_536})
    shape = replace(spec.architecture, **change)
    assert "rope_parameters" not in config(replace(spec, architecture=shape))["model_init_kwargs"]


def test_yarn_keeps_a_partial_rotary_factor() -> None:
    spec = make_spec({"seq_len": 81_920})
    for own in ({"partial_rotary_factor": 0.5}, {"rope_parameters": {"partial_rotary_factor": 0.5}}):
        shape = replace(spec.architecture, config=own)
        rope = config(replace(spec, architecture=shape))["model_init_kwargs"]["rope_parameters"]
        assert rope["partial_rotary_factor"] == 0.5
        assert rope["factor"] == 2.0


def test_sequence_groups_get_rows_of_one_length() -> None:
    values = config(VARIANTS["zero3_sp"])
    assert values["pad_to_multiple_of"] == 131_072
    odd = make_spec({"seq_len": 1001, "global_batch": 1}, {"sharding": "zero3", "sp": 4}, gpus(4))
    assert config(odd)["pad_to_multiple_of"] == 1004


def test_packing_under_sequence_parallelism_is_wrapped() -> None:
    job = {"data": {"dataset": "a/b", "packing": True}, "global_batch": 1}
    values = config(make_spec(job, {"sharding": "zero3", "sp": 2, "packing": True}, gpus(2)))
    assert values["packing"] is True and values["packing_strategy"] == "wrapped"


# ---- memory knobs ----

CHECKPOINTS = [
    # recompute, offload, sharding, method, transformers -> argument values
    ("none", False, "none", "full", "5.24.0", {"activation_checkpointing": False}),
    ("full", False, "none", "full", "5.24.0", {"activation_checkpointing": True}),
    ("full", False, "none", "full", "5.22.0", {"gradient_checkpointing": True}),
    (
        "selective", False, "none", "full", "5.24.0",
        {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"selective": True}},
    ),
    (
        "every_3", False, "none", "full", "5.22.0",
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"every_n_layers": 3}},
    ),
    (
        "full", True, "none", "full", "5.24.0",
        {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"offload": True}},
    ),
    (
        "full", True, "none", "full", "5.16.0",
        {"gradient_checkpointing": True, "activation_offloading": True},
    ),
    (
        "none", True, "none", "full", "5.24.0",
        {"activation_checkpointing": False, "activation_offloading": True},
    ),
    (
        "full", False, "zero3", "lora", "5.24.0",
        {
            "activation_checkpointing": True,
            "activation_checkpointing_kwargs": {"use_reentrant": True},
        },
    ),
    (
        "full", False, "none", "full", "4.57.0",
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("recompute", "offload", "sharding", "method", "transformers", "expected"), CHECKPOINTS)
def test_recompute_and_offload(
    recompute: str,
    offload: bool,
    sharding: str,
    method: str,
    transformers: str,
    expected: dict[str, Any],
) -> None:
    knobs: dict[str, Any] = {
        "recompute": recompute,
        "offload": frozenset({"activations"} if offload else set()),
        "sharding": sharding,
        "method": method,
        "weights": "bf16",
    }
    machine = gpus(1)
    if sharding == "zero3":
        knobs["dp_shard"], machine = 2, gpus(2)
    values = config(make_spec(choice=knobs, machine=machine, stack={"transformers": transformers}))
    found = {k: v for k, v in values.items() if "checkpointing" in k or k == "activation_offloading"}
    assert found == expected


def test_fsdp_offload_before_accelerate_has_it() -> None:
    knobs = {"sharding": "fsdp", "dp_shard": 2, "offload": frozenset({"activations"})}
    values = config(make_spec(choice=knobs, machine=gpus(2), stack={"accelerate": "1.14.0"}))
    assert values["activation_checkpointing_kwargs"] == {"offload": True}


def test_accumulation_under_fsdp_reduces_every_batch() -> None:
    every = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    assert config(VARIANTS["fsdp"])["accelerator_config"] == every
    assert "accelerator_config" not in config(VARIANTS["fsdp_no_reshard"])


@pytest.mark.parametrize(
    ("trl", "path", "expected"),
    [
        ("1.16.0", "fused", {}),
        ("1.14.0", "chunked", {}),
        ("1.14.0", "full_logits", {"loss_type": "nll"}),
        ("1.12.0", "liger", {"use_liger_kernel": True}),
        ("1.5.0", "chunked_fp32", {"loss_type": "chunked_nll"}),
        ("1.5.0", "full_logits", {}),
    ],
)
def test_loss_path(trl: str, path: str, expected: dict[str, Any]) -> None:
    values = config(make_spec(choice={"loss_path": path}, stack={"trl": trl}))
    found = {k: v for k, v in values.items() if k in ("loss_type", "use_liger_kernel")}
    assert found == expected


def test_loss_path_that_the_release_lacks() -> None:
    with pytest.raises(UsageError, match=r"trl 1\.16\.0 has no loss path chunked for sft; pin one"):
        config(make_spec(choice={"loss_path": "chunked"}))


def test_numerics() -> None:
    values = config(make_spec(choice={"weights": "bf16", "mixed_precision": "no"}))
    assert values["model_init_kwargs"]["dtype"] == "bfloat16"
    assert values["bf16"] is False and "fp16" not in values
    values = config(make_spec(choice={"mixed_precision": "fp16", "optimizer": "adamw_bnb_8bit"}))
    assert values["fp16"] is True and values["bf16"] is False
    assert values["optim"] == "adamw_bnb_8bit"


# ---- adapters ----


def test_lora() -> None:
    lora = {"r": 8, "dropout": 0.1, "target_modules": ["q_proj", "v_proj"]}
    spec = make_spec({"method": "lora", "lora": lora}, {"method": "lora", "weights": "bf16"})
    assert assigned(render_training_script(spec), "LORA") == {
        "r": 8,
        "lora_alpha": 16,
        "lora_dropout": 0.1,
        "target_modules": ["q_proj", "v_proj"],
        "task_type": "CAUSAL_LM",
    }
    script = render_training_script(VARIANTS["reward"])
    assert assigned(script, "LORA")["task_type"] == "SEQ_CLS"
    assert assigned(script, "LORA")["target_modules"] == "all-linear"


def test_qlora() -> None:
    # FSDP shards parameters of one dtype: packed weights are stored as the rest.
    assert assigned(render_training_script(VARIANTS["qlora"]), "QUANTIZATION") == {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "bfloat16",
    }
    knobs = {"method": "qlora", "weights": "bf16"}
    one = make_spec({"method": "qlora"}, knobs)
    assert "bnb_4bit_quant_storage" not in assigned(render_training_script(one), "QUANTIZATION")
    eight = make_spec({"method": "qlora", "quantization": "int8"}, knobs)
    assert assigned(render_training_script(eight), "QUANTIZATION") == {"load_in_8bit": True}


# ---- the job's own settings ----


def test_save_steps_alone_saves_by_steps() -> None:
    assert config(make_spec({"trl": {"save_steps": 50}}))["save_strategy"] == "steps"
    assert config(make_spec({}))["save_strategy"] == "epoch"


def test_settings_pass_through_and_win_over_defaults() -> None:
    settings = {
        "learning_rate": "2e-4",
        "num_train_epochs": 3,
        "save_strategy": False,
        "seed": 7,
        "report_to": ["wandb"],
        "lr_scheduler_kwargs": {"min_lr": "1e-6"},
        "model_init_kwargs": {"revision": "abc"},
    }
    values = config(make_spec({"trl": settings}))
    assert values["learning_rate"] == 2e-4 and isinstance(values["learning_rate"], float)
    assert values["save_strategy"] == "no"
    assert values["seed"] == 7 and values["report_to"] == ["wandb"]
    assert values["lr_scheduler_kwargs"] == {"min_lr": 1e-6}
    assert values["model_init_kwargs"]["revision"] == "abc"
    assert values["model_init_kwargs"]["dtype"] == "float32"
    assert values["save_total_limit"] == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"per_device_train_batch_size": 4}, "trl.per_device_train_batch_size .* pin micro_batch"),
        ({"max_length": 10}, "trl.max_length .* set seq_len"),
        ({"gradient_checkpointing": False}, "trl.gradient_checkpointing .* pin recompute"),
        ({"bf16": True}, "trl.bf16 .* pin mixed_precision"),
        ({"optim": "sgd"}, "trl.optim .* pin optimizer"),
        ({"loss_type": "nll"}, "trl.loss_type .* pin loss_path"),
        ({"fsdp": True}, "trl.fsdp .* pin sharding"),
        ({"output_dir": "x"}, "trl.output_dir .* run folder"),
        ({"eval_strategy": "steps"}, "needs evaluation data"),
        ({"model_init_kwargs": {"dtype": "auto"}}, "model_init_kwargs.dtype .* pin weights"),
        ({"model_init_kwargs": [1]}, "must be a mapping"),
        ({"a-b": 1}, "not a setting's name"),
        ({"class": 1}, "not a setting's name"),
        ({"reward_funcs": "x.y"}, "belongs to grpo and rloo"),
    ],
)
def test_settings_that_contradict_the_plan(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        render_training_script(make_spec({"trl": settings}))
    assert "\n" not in str(error.value)


def test_padding_may_be_set_only_where_the_plan_leaves_it() -> None:
    settings = {"trl": {"pad_to_multiple_of": 64}}
    assert config(make_spec(settings))["pad_to_multiple_of"] == 64
    spec = make_spec({**LONG_JOB, **settings}, {"sharding": "fsdp", "cp": 8}, gpus(8))
    with pytest.raises(UsageError, match="pad_to_multiple_of is decided by cp, sp and the precision route"):
        config(spec)


def test_dft_is_a_loss_of_the_users_choice() -> None:
    assert config(make_spec({"trl": {"loss_type": "dft"}}))["loss_type"] == "dft"


# ---- rewards ----


def test_rewards() -> None:
    script = render_training_script(VARIANTS["grpo"])
    assert "from my_rewards import score" in script
    assert "from trl.rewards import think_format_reward" in script
    assert "reward_funcs=[score, think_format_reward]" in script
    assert "def distinct_words" in render_training_script(VARIANTS["rloo"])


def test_prompt_and_completion_share_the_length() -> None:
    trl = {"reward_funcs": "distinct_words", "max_completion_length": 1000}
    spec = make_spec({"trainer": "grpo", "seq_len": 4096, "trl": trl}, {"micro_batch": 8})
    script = render_training_script(spec)
    assert constant(script, "MAX_PROMPT") == 3096
    assert assigned(script, "CONFIG")["max_completion_length"] == 1000


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "needs a reward; add trl"),
        ({"reward_funcs": "nonsense"}, "neither an import path"),
        ({"reward_funcs": "import os; x.y"}, "neither an import path"),
        ({"reward_funcs": "distinct_words", "num_generations": 3}, "multiple of trl.num_gen"),
        ({"reward_funcs": "distinct_words", "max_completion_length": 4096}, "no room for a prompt"),
    ],
)
def test_grpo_jobs_that_cannot_be_written(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        render_training_script(make_spec({"trainer": "grpo", "trl": settings}, {"micro_batch": 8}))


# ---- what no script does ----


@pytest.mark.parametrize(
    ("job", "choice", "machine", "message"),
    [
        ({}, {"tp": 2}, gpus(2), "pin tp=1"),
        ({}, {"precision": "mxfp4-sr"}, gpus(1), "precision route mxfp4-sr has no TRL script"),
        ({}, {"precision": "fp5"}, gpus(1), "no precision route 'fp5'"),
        ({}, {"sharding": "fsdp1", "dp_shard": 2}, gpus(2), "pin sharding=fsdp"),
        ({}, {"sharding": "zero3", "dp_shard": 2}, cpu(), "pin sharding=ddp on the CPU"),
        ({}, {"offload": frozenset({"activations"})}, cpu(), "need a GPU"),
        ({"trainer": "dpo"}, {"sharding": "fsdp", "cp": 2}, gpus(2), "does not split sequences"),
        ({}, {"sharding": "ddp", "cp": 2}, gpus(2), "needs FSDP2"),
        ({}, {"sharding": "fsdp", "sp": 2}, gpus(2), "needs DeepSpeed"),
        ({}, {"sharding": "fsdp", "cp": 2, "packing": True}, gpus(2), "data.packing: false"),
        ({"trainer": "dpo"}, {"recompute": "selective"}, gpus(1), "only SFT's"),
        ({"trainer": "kto"}, {"recompute": "every_2"}, gpus(1), "pin recompute=full"),
        (
            {},
            {"recompute": "selective", "offload": frozenset({"activations"})},
            gpus(1),
            "not offloaded",
        ),
        ({"data": {}}, {}, gpus(1), "names no training data"),
        ({"data": {"dataset": "./x.txt"}}, {}, gpus(1), "convert it to one of these"),
        (
            {"data": {"dataset": "x.jsonl", "split": "test"}},
            {},
            gpus(1),
            "does not exist in a local file",
        ),
        (
            {"method": "lora", "lora": {"target_modules": ["lm_head"]}},
            {"method": "lora"},
            gpus(1),
            "leave it out",
        ),
    ],
)
def test_refusals(job: dict[str, Any], choice: dict[str, Any], machine: Machine, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        render_training_script(make_spec(job, choice, machine))


def test_quantised_weights_need_a_trainer_that_takes_them() -> None:
    knobs = {"method": "qlora", "weights": "bf16", "loss_path": "chunked_fp32"}
    with pytest.raises(UsageError, match="upgrade trl"):
        render_training_script(make_spec({"method": "qlora"}, knobs, stack={"trl": "1.12.0"}))


def test_code_of_the_models_own_is_asked_for() -> None:
    spec = make_spec()
    shape = replace(spec.architecture, remote_code=True)
    with pytest.raises(UsageError, match="trust_remote_code"):
        render_training_script(replace(spec, architecture=shape))
    trusting = replace(make_spec({"trl": {"trust_remote_code": True}}), architecture=shape)
    assert config(trusting)["trust_remote_code"] is True


# ---- hostile text ----

HOSTILE = [
    'it\'s "quoted"',
    'ends with """ and more',
    "back\\slash \\n and\nnewline",
    "ünïcödé 模型 🚀",
    "{{ config }} #% end",
    "$(touch owned) `touch owned` ; touch owned",
    "\u202e\u2066 bidi",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_names_stay_text(text: str) -> None:
    data = {"dataset": f"/data/{text}.jsonl"}
    spec = make_spec({"data": data, "trl": {"run_name": text, "tags": {text: [text]}}})
    spec = replace(
        spec,
        job=spec.job.model_copy(update={"model": f"/models/{text}"}),
        architecture=replace(spec.architecture, origin="folder"),
    )
    script = render_training_script(spec)
    assert constant(script, "MODEL") == f"/models/{text}"
    assert constant(script, "DATASET") == f"/data/{text}.jsonl"
    values = assigned(script, "CONFIG")
    assert values["run_name"] == text and values["tags"] == {text: [text]}
    # Same statements as with a plain name: nothing in the text became code.
    plain = render_training_script(make_spec({"trl": {"run_name": "x", "tags": {"x": ["x"]}}}))
    kinds = [type(node) for node in ast.parse(script).body]
    assert kinds == [type(node) for node in ast.parse(plain).body]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


@given(JSON)
def test_literals_read_back(value: object) -> None:
    assert ast.literal_eval(literal(value)) == value


@pytest.mark.parametrize("value", [float("inf"), float("-inf")])
def test_infinity_reads_back(value: float) -> None:
    assert eval(literal(value)) == value


def test_templates_say_what_is_wrong_with_them() -> None:
    assert fill("a\n#% if x\nb\n#% else\nc\n#% end", {"x": False}, {}) == "a\nc\n"
    with pytest.raises(ValueError, match="without an #% end"):
        fill("#% if x", {"x": True}, {})
    with pytest.raises(ValueError, match="no beginning"):
        fill("#% end", {}, {})


def test_local_paths_become_absolute() -> None:
    spec = make_spec({"data": {"dataset": "data/x.jsonl"}}, base_dir="/home/me/project")
    assert constant(render_training_script(spec), "DATASET") == "/home/me/project/data/x.jsonl"
    hub = make_spec({"data": {"dataset": "trl-lib/Capybara"}}, base_dir="/home/me")
    assert constant(render_training_script(hub), "DATASET") == "trl-lib/Capybara"


# ---- real training ----


def warm() -> dict[str, str]:
    """For a start whose libraries are imported already."""
    return {**warm_variables(), "PYTHON": warm_python()}


def start(folder: Path, **environment: str) -> str:
    """Run command.sh as a user would, from another folder."""
    process = subprocess.Popen(
        ["bash", str(folder / "command.sh")],
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
        cwd="/",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        pytest.fail(f"the run did not end: {errors[-3000:]}")
    assert process.returncode == 0, errors[-3000:]
    return output


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


RELOAD = """
import sys, json, torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
before, after = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(after)
ids = AutoTokenizer.from_pretrained(after)("Anne Elliot", return_tensors="pt")
with torch.no_grad():
    logits = model(**ids).logits
old, new = load_file(before + "/model.safetensors"), load_file(after + "/model.safetensors")
moved = sum((old[name].float() - new[name].float()).abs().sum().item() for name in old)
print(json.dumps({"finite": bool(logits.isfinite().all()), "moved": moved, "names": old.keys() == new.keys()}))
"""


@pytest.fixture(scope="module", params=["one process", "two processes"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int]]:
    """A run of three steps in a folder with a hostile name."""
    ranks = 1 if request.param == "one process" else 2
    folder = tmp_path_factory.mktemp("runs") / f'it\'s a "run" {ranks} 🚀'
    sharding = {"sharding": "none"} if ranks == 1 else {"sharding": "ddp", "dp_replicate": 2}
    spec = make_spec(
        {
            "model": str(tiny_model()),
            "seq_len": 128,
            "global_batch": 4,
            "trl": {"max_steps": 3, "learning_rate": 1e-2},
        },
        {"micro_batch": 4 // ranks, **sharding},
        cpu(),
        python=sys.executable,
    )
    write_run(folder, render_run(spec))
    # One run has the Python that is written down for it.
    start(folder, **(warm() if ranks == 2 else {}))
    yield folder, ranks


@pytest.mark.launch
def test_training_learns_and_records(trained: tuple[Path, int]) -> None:
    folder, ranks = trained
    first, *steps, last = rows(folder)
    assert [row["event"] for row in (first, *steps, last)] == ["start", "step", "step", "step", "end"]
    assert first["max_steps"] == 3
    assert [row["step"] for row in steps] == [1, 2, 3] and last["step"] == 3
    # A random model of 512 words starts at ln 512 = 6.24 and leaves it at this learning rate.
    assert steps[0]["loss"] == pytest.approx(6.24, abs=0.1)
    assert steps[2]["loss"] < steps[0]["loss"] - 0.1
    for row in steps:
        # Rows of the example text are longer than 128 tokens, so each sequence is full.
        assert row["tokens"] == 4 * 128
        assert row["tokens_per_s"] == pytest.approx(row["tokens"] / row["step_s"])
        assert row["grad_norm"] > 0 and row["learning_rate"] > 0 and row["epoch"] > 0
        for name in ("rss_bytes", "peak_rss_bytes"):
            assert len(row[name]) == ranks
            assert all(value >= first["rss_bytes"][0] // 2 for value in row[name])
        assert all(p >= r for p, r in zip(row["peak_rss_bytes"], row["rss_bytes"], strict=True))


@pytest.mark.launch
def test_model_loads_again(trained: tuple[Path, int]) -> None:
    folder, _ = trained
    command = [warm_python(), "-c", RELOAD, str(tiny_model()), str(folder / "model")]
    done = subprocess.run(command, env=warm_environment(), capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["finite"] and found["names"] and found["moved"] > 1
    assert [p.name for p in (folder / "checkpoints").glob("checkpoint-*")] == ["checkpoint-3"]


@pytest.mark.launch
def test_resume_goes_on(trained: tuple[Path, int]) -> None:
    folder, _ = trained
    script = folder / "train.py"
    script.write_text(script.read_text().replace("max_steps=3", "max_steps=5"))
    start(folder, RESUME="1", **warm())
    steps = [row["step"] for row in rows(folder) if row["event"] == "step"]
    assert steps == [1, 2, 3, 4, 5]


@pytest.mark.launch
def test_grpo_with_a_reward_of_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text(
        "def score(completions, **kwargs):\n    return [float(i) for i, _ in enumerate(completions)]\n"
    )
    chats = (EXAMPLES / "chat.jsonl").read_text().splitlines()[:8]
    prompts = [json.dumps({"prompt": json.loads(chat)["messages"][:1]}) for chat in chats]
    (tmp_path / "prompts.jsonl").write_text("\n".join(prompts))
    trl = {
        "reward_funcs": "my_rewards.score",
        "num_generations": 2,
        "max_completion_length": 16,
        "max_steps": 1,
    }
    spec = make_spec(
        {
            "model": str(tiny_model("llama")),
            "trainer": "grpo",
            "data": {"dataset": "prompts.jsonl"},
            "seq_len": 128,
            "global_batch": 4,
            "trl": trl,
        },
        {"micro_batch": 4},
        cpu(),
        python=sys.executable,
        base_dir=str(tmp_path),
    )
    write_run(tmp_path / "run", render_run(spec))
    start(tmp_path / "run", **warm())
    step = rows(tmp_path / "run")[1]
    assert step["event"] == "step" and step["grad_norm"] > 0


@pytest.mark.launch
def test_a_model_without_weights_is_not_trained(tmp_path: Path) -> None:
    """transformers must not start from random weights in silence."""
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (bare / name).write_bytes((tiny_model() / name).read_bytes())
    spec = make_spec({"model": str(bare), "seq_len": 64}, {"micro_batch": 8}, cpu(), python=sys.executable)
    write_run(tmp_path / "run", render_run(spec))
    command = ["bash", str(tmp_path / "run" / "command.sh")]
    environment = {**os.environ, **warm()}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "model.safetensors" in done.stderr
