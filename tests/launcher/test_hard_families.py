"""Families whose layers are not Llama's: planned from traces, composed as whole models are, refused where unknown."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from launcher.evidence.coefficient_store import LINEAR_KERNELS, default_options
from launcher.evidence.tracing import document_of, request_for, trace
from planner.architecture import Architecture
from planner.choice import Choice
from planner.config.reader import read_architecture
from planner.memory.coefficients import Coefficients
from planner.memory.coefficients_json import CoefficientDocument, coefficients_of, option_key, shape_hash
from planner.memory.formula import ActivationOptions
from profiles.coefficients import find_coefficients
from profiles.models import list_models
from tests.launcher.command_line import TINY_CONFIG, assert_refused, command_environment, here, write_files
from tests.launcher.test_tracing import SCRIPT, Case

MACHINE = "2xH100-80GB"
STACK = "torch=2.13.0,transformers=5.24.0,trl=1.16.0,accelerate=1.15.0,peft=0.21.2"
GIB = 2**30

PARAMETERS = {
    "google/gemma-2-2b": 2_614_341_888,
    "google/gemma-3-1b-pt": 999_885_952,
    "microsoft/Phi-3-mini-4k-instruct": 3_821_079_552,
    "Qwen/Qwen3.5-0.8B": 852_985_920,
    "Qwen/Qwen3.5-4B": 4_539_265_536,
}
"""Of the classes that TRL loads, on the meta device; towers for images included. Two cards hold 16 bytes of each."""
LARGE = ("openai/gpt-oss-20b", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3.6-35B-A3B")
"""Too large for full training on two cards."""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in command_environment(tmp_path / "home").items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def planned(
    capsys: pytest.CaptureFixture[str],
    *words: str,
    machine: str = MACHINE,
    stack: str = STACK,
    codes: tuple[int, ...] = (0,),
) -> dict[str, Any]:
    said = here(capsys, ("plan", *words, "--machine", machine, "--stack", stack, "--json"))
    assert said.code in codes and said.err == ""
    document: dict[str, Any] = json.loads(said.out)
    assert (document["best"] is None) == (said.code == 3)
    return document


# Plans


def assert_traced(plan: dict[str, Any]) -> None:
    """Every candidate that is shown, and those that miss, rest on traces and not one part of them on closed forms."""
    shown = [*plan["candidates"], *plan["near_misses"]]
    assert shown and {candidate["memory"]["evidence"] for candidate in shown} == {"traced"}
    assert [note for note in plan["notes"] if "closed forms" in note] == []


@pytest.mark.parametrize("model", PARAMETERS)
def test_full_training_is_planned_from_traces(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, model)
    assert_traced(plan)
    assert plan["architecture"]["parameters"]["trainable"] == PARAMETERS[model]
    best = plan["best"]
    choice, memory = best["choice"], best["memory"]
    assert best["fits"] and memory["low_bytes"] < memory["allocated_bytes"] < memory["high_bytes"]
    # fp32 weights, gradients and two moments, over the ranks that shard them.
    assert (choice["weights"], choice["offload"]) == ("fp32", [])
    held = 16 * PARAMETERS[model] / (1 if choice["sharding"] == "ddp" else 2)
    step = next(phase for phase in memory["phases"] if phase["name"] == "step")
    states = sum(step["parts"][role] for role in ("weights", "gradients", "moment1", "moment2"))
    assert states == pytest.approx(held, rel=0.001)


@pytest.mark.parametrize("method", ["lora", "qlora"])
@pytest.mark.parametrize("model", [*PARAMETERS, *LARGE])
def test_adapters_are_planned_from_traces(model: str, method: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, model, "--method", method)
    assert_traced(plan)
    assert plan["best"]["fits"]


@pytest.mark.parametrize("model", LARGE)
def test_what_is_too_large_in_full_says_so_from_traces(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Two cards cannot hold the states; every choice that is listed, if only under offload, is priced by traces."""
    plan = planned(capsys, model, codes=(0, 3))
    assert_traced(plan)
    for candidate in plan["candidates"]:
        assert not candidate["fits"] or {"optimizer", "params"} & set(candidate["choice"]["offload"])


@pytest.mark.parametrize("machine", ["1xH100-80GB", "8xH100-80GB"])
@pytest.mark.parametrize("model", ["Qwen/Qwen3.5-4B", "Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-V2-Lite"])
def test_what_the_planner_may_alter_is_traced(model: str, machine: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Pure bf16 and 8-bit states; adapters are offered beside. One card runs under autocast where eight do not."""
    plan = planned(capsys, model, "--allow", "numerics", "--pin", "weights=bf16", machine=machine, codes=(0, 3))
    assert_traced(plan)
    shown = [*plan["candidates"], *plan["near_misses"]]
    assert {candidate["choice"]["weights"] for candidate in shown} == {"bf16"}


def test_every_bundled_model_has_traces_for_all_its_default_sets() -> None:
    lacking: dict[str, str] = {}
    for model in list_models():
        architecture = read_architecture(model.config, model=model.id, origin="bundled")
        data = find_coefficients(shape_hash(architecture))
        for key in {option_key(architecture, options) for options in default_options(architecture)}:
            entry = {"refused": "not there"} if data is None else data["sets"].get(key, {"refused": "not there"})
            if "refused" in entry or "not_affine" in entry:
                lacking[f"{model.id} {key}"] = entry.get("refused") or entry["not_affine"]
    assert lacking == {}


def test_linear_attention_says_which_path_was_traced(capsys: pytest.CaptureFixture[str]) -> None:
    model, kernel = "Qwen/Qwen3.5-0.8B", LINEAR_KERNELS[0]
    assert planned(capsys, model)["notes"] == []
    notes = planned(capsys, model, stack=f"{STACK},{kernel}=0.6.0")["notes"]
    (note,) = [sentence for sentence in notes if kernel in sentence]
    assert "upper bound" in note


REMOTE = TINY_CONFIG | {
    "model_type": "homemade",
    "architectures": ["HomemadeForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_homemade.Config", "AutoModelForCausalLM": "modeling_homemade.Model"},
}


def test_unknown_code_beside_the_checkpoint_is_refused(capsys: pytest.CaptureFixture[str], place: Path) -> None:
    write_files(place, {"model/config.json": json.dumps(REMOTE)})
    said = here(capsys, ("plan", "model", "--machine", MACHINE, "--json"))
    assert_refused(said, 2, "'homemade'", "auto_map", "--trl trust_remote_code=true")


def test_trusted_code_is_planned_by_closed_forms(capsys: pytest.CaptureFixture[str], place: Path) -> None:
    write_files(place, {"model/config.json": json.dumps(REMOTE)})
    plan = planned(capsys, "model", "--trl", "trust_remote_code=true")
    assert plan["best"]["memory"]["evidence"] == "formula"


def test_code_that_transformers_has_of_its_own_is_no_obstacle(capsys: pytest.CaptureFixture[str], place: Path) -> None:
    write_files(place, {"model/config.json": json.dumps(REMOTE | {"model_type": "llama"})})
    assert planned(capsys, "model", "--no-trace")["best"]["fits"]


@pytest.mark.parametrize("model_type", ["zamba2", "gemma3n_text", "albert"])
def test_layers_that_share_weights_or_keys_are_refused(
    model_type: str, capsys: pytest.CaptureFixture[str], place: Path
) -> None:
    """One block run at several depths, or keys of an earlier layer read again: no count of ours holds for them."""
    write_files(place, {"model/config.json": json.dumps(TINY_CONFIG | {"model_type": model_type})})
    said = here(capsys, ("plan", "model", "--machine", MACHINE, "--json"))
    assert_refused(said, 2, model_type)


# Composed against whole models


_SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "tie_word_embeddings": True,
}
_LINEAR: dict[str, Any] = {
    "head_dim": 128,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}
_EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
HARD: dict[str, dict[str, Any]] = {
    "qwen3_5": {"model_type": "qwen3_5_text", **_SIZES, **_LINEAR},
    "qwen3_next": {
        "model_type": "qwen3_next",
        **_SIZES,
        **_LINEAR,
        **_EXPERTS,
        "shared_expert_intermediate_size": 256,
        "decoder_sparse_step": 1,
    },
    "dense-in-moe": {"model_type": "qwen3_moe", **_SIZES, **_EXPERTS, "head_dim": 64, "mlp_only_layers": [0, 2]},
    "deepseek_v2": {
        "model_type": "deepseek_v2",
        **_SIZES,
        "num_key_value_heads": 8,
        "kv_lora_rank": 128,
        "q_lora_rank": None,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "first_k_dense_replace": 1,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "pad_token_id": 0,
    },
}


@dataclass(frozen=True, kw_only=True)
class HardCase(Case):
    """A case of one of the families above."""

    autocast: bool = True

    @property
    def config(self) -> dict[str, Any]:
        config = {**HARD[self.family], "num_hidden_layers": self.layers}
        types = config.get("layer_types")
        return config | ({"layer_types": [types[i % len(types)] for i in range(self.layers)]} if types else {})

    @property
    def scenario(self) -> dict[str, Any]:
        facts = {name: getattr(self, name) for name in ("seq_len", "rows", "weights", "recompute", "lora_r", "padded")}
        return facts | {"config": self.config, "attention": self.attention, "autocast": self.autocast}

    @property
    def choice(self) -> Choice:
        return replace(super().choice, mixed_precision="bf16" if self.autocast else "no")

    @property
    def architecture(self) -> Architecture:
        return read_architecture(self.config, model=self.family, origin="config.json")


CASES = (
    HardCase(family="qwen3_5", layers=3, seq_len=512, weights="fp32", recompute="full"),
    HardCase(family="qwen3_5", layers=4, seq_len=512, rows=2, padded=True),
    HardCase(family="qwen3_next", layers=4, seq_len=512, autocast=False),
    HardCase(family="dense-in-moe", layers=4, seq_len=1024, rows=2, padded=True),
    HardCase(family="dense-in-moe", layers=3, seq_len=1024, recompute="full", lora_r=32),
    HardCase(family="deepseek_v2", layers=4, seq_len=1024, rows=2, recompute="selective"),
)
"""Beside what benchmarks/whole_models.py traces at published widths: masks, fp32, no autocast under linear attention,
dense layers between mixtures, latent attention that keeps its outputs."""


@functools.cache
def traced() -> tuple[dict[str, CoefficientDocument], tuple[int, ...]]:
    """(documents by shape, peaks of the whole models), in one process."""
    wanted: dict[str, tuple[Architecture, dict[str, ActivationOptions]]] = {}
    for case in CASES:
        architecture, options = case.architecture, case.options()
        known = wanted.setdefault(shape_hash(architecture), (architecture, {}))
        known[1][option_key(architecture, options)] = options
    asked = [(architecture, *request_for(architecture, options.values())) for architecture, options in wanted.values()]
    request = {"requests": [entry[2] for entry in asked], "scenarios": [case.scenario for case in CASES]}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], input=json.dumps(request).encode(), capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    answer = json.loads(done.stdout)
    documents = [
        document_of(architecture, sets, reply)
        for (architecture, sets, _), reply in zip(asked, answer["answers"], strict=True)
    ]
    return {document.shape: document for document in documents}, tuple(answer["peaks"])


def source(architecture: Architecture, options: ActivationOptions) -> Coefficients:
    document = traced()[0][shape_hash(architecture)]
    notes: list[str] = []
    found = coefficients_of(document, architecture, replace(options, mask_bias=False), notes)
    assert found is not None, document.sets
    assert notes == []
    return found


@pytest.mark.stack
def test_composed_peaks_of_hard_families_are_those_of_whole_models() -> None:
    errors = {case: case.predicted(source) / peak - 1 for case, peak in zip(CASES, traced()[1], strict=True)}
    report = "\n".join(f"{error:+.2%} {case}" for case, error in errors.items())
    sizes = [abs(error) for error in errors.values()]
    assert median(sizes) <= 0.0005, report
    assert max(sizes) <= 0.005, report


# One layer by hand: a Llama of 8 heads over 2, each 64 wide


PLAIN = read_architecture(
    {"model_type": "llama", **_SIZES, "num_hidden_layers": 2}, model="plain", origin="config.json"
)
HIDDEN, QUERIES, KEYS, WIDTH = 512, 512, 128, 1408
FULL = ActivationOptions(residual_bytes=2, compute_bytes=2, trains_base=True, adapter_bytes=2)
LORA = replace(FULL, trains_base=False, lora_targets=("q_proj", "v_proj"), lora_r=16)
SETS = {
    "full": FULL,
    "padded": replace(FULL, masked=True),
    "lora": LORA,
    "dropout": replace(LORA, lora_dropout=True),
    "fp32 adapters": replace(LORA, adapter_bytes=4),
    "all linears": replace(LORA, lora_targets="all-linear"),
    "4-bit": replace(LORA, lora_targets="all-linear", quantised=True),
    "eager": replace(FULL, attention="eager"),
}


@functools.cache
def by_hand() -> CoefficientDocument:
    return trace(PLAIN, SETS.values())


def found(name: str, r: int = 16) -> Coefficients:
    options = replace(SETS[name], lora_r=r if SETS[name].lora_targets is not None else 0)
    coefficients = coefficients_of(by_hand(), PLAIN, options, [])
    assert coefficients is not None, by_hand().sets
    return coefficients


def kept(name: str, tokens: int = 4096, r: int = 16) -> int:
    """Bytes of one layer from forward to backward, one sequence, nothing recomputed."""
    return found(name, r).layers[0].none.kept.at(tokens, tokens)


@pytest.mark.stack
def test_padding_repeats_keys_and_values_and_keeps_two_masks() -> None:
    tokens = 4096
    repeated = 2 * 2 * (QUERIES - KEYS)
    # The bias and its copy, 2 bytes per token pair each.
    assert kept("padded") - kept("full") == tokens * repeated + 4 * tokens**2


@pytest.mark.stack
def test_eager_attention_keeps_scores() -> None:
    """Softmax in fp32, its bf16 copy: 6 bytes per pair and head; no log-sum-exp, keys and values repeated."""
    longer, shorter = kept("eager", 8192), kept("eager", 4096)
    pairs = (longer - 2 * shorter) / (8192**2 - 2 * 4096**2)
    assert pairs == pytest.approx(8 * 6, rel=1e-6)


@pytest.mark.stack
def test_a_rank_keeps_one_value_per_module() -> None:
    tokens = 4096
    assert kept("lora", r=48) - kept("lora", r=16) == tokens * 2 * 2 * 32
    assert kept("all linears", r=48) - kept("all linears", r=16) == tokens * 7 * 2 * 32


@pytest.mark.stack
def test_dropout_keeps_a_mask_and_an_output_of_its_own_for_every_module() -> None:
    """Without it query and value adapters share their input."""
    mask_and_output = HIDDEN + 2 * HIDDEN
    assert kept("dropout") - kept("lora") == 4096 * (2 * mask_and_output - 2 * HIDDEN)


@pytest.mark.stack
def test_fp32_adapters_keep_a_cast_input_each() -> None:
    """Query and value no longer share theirs; the plan counts casts of the adapters' weights by themselves."""
    assert kept("fp32 adapters") - kept("lora") == 4096 * 2 * HIDDEN


@pytest.mark.stack
def test_a_4_bit_weight_is_dequantised_for_its_product() -> None:
    """The widest weight in bf16, which a plain base does not need and which is gone afterwards."""
    plain, packed = (found(name).layers[0].full for name in ("all linears", "4-bit"))
    more = packed.forward.at(1, 1) - plain.forward.at(1, 1)
    assert more == pytest.approx(2 * HIDDEN * WIDTH, rel=0.02)
    assert packed.kept.at(1, 1) == plain.kept.at(1, 1)


@pytest.mark.stack
def test_work_is_known_at_every_rank() -> None:
    """6 FLOPs per weight of an adapter: forward, and both gradients; 4 per frozen weight: its own is not needed."""
    frozen = HIDDEN * (2 * QUERIES + 2 * KEYS) + 3 * HIDDEN * WIDTH
    features = 2 * (HIDDEN + QUERIES) + 2 * (HIDDEN + KEYS) + 3 * (HIDDEN + WIDTH)
    for r in (8, 16, 64, 256):
        work = found("all linears", r).work[0].none
        assert work.matmul_flops.at(1, 1) == 4 * frozen + 6 * r * features
    # Scores and their product with the values, half a square: 2 forward, 5 backward, 2 again.
    layer = found("all linears").work[0]
    assert layer.none.attention_flops.at(4096, 4096) == 7 * QUERIES * 4096**2
    assert layer.full.attention_flops.at(4096, 4096) == 9 * QUERIES * 4096**2
