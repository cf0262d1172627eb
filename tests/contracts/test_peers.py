"""What other estimators are told of each row, and their recorded answers: whole, and as their formulas give them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import PEERS, RESULTS, all_rows, case_of
from benchmarks.peers_cases import (
    REACH,
    CannotError,
    Case,
    check_reach,
    state_accelerate,
    state_canifinetune,
    state_deepspeed,
    state_fitcheck,
    state_ftuneai,
    state_hf_vram_calc,
    state_llm_analysis,
)

RECORDED: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))

# PowerLM-3b, tied: 40 x (4 x 2304 x 2304 + 3 x 2304 x 9216 + 2 x 2304) + 49152 x 2304 + 2304.
POWERLM = 3_510_819_072

FULL = "fms-granite-000-PowerLM-3b-full-g1-bs4-none"
LORA_ON_TWO = "fms-granite-009-PowerLM-3b-lora-g2-bs2-none"
QLORA = "fms-granite-018-PowerLM-3b-qlora-g1-bs8-baseline-peft-bnb"
RING = "trl-long-qwen4b-cp4-1m"
FP32 = "qwen3-4b-l4/fp32-none-fused"
EVERY_2 = "qwen3-4b-l4/bf16-every2-fused"
EXPERTS = "qwen3-30b-a3b-l2/bf16-none-chunked"


def case(row_id: str) -> Case:
    return case_of(next(row for row in all_rows() if row["id"] == row_id), Path("models"))


def refusal(row_id: str, peer: str) -> str | None:
    try:
        check_reach(case(row_id), REACH[peer])
    except CannotError as error:
        return str(error)
    return None


def test_a_measured_row_in_neutral_terms() -> None:
    read: dict[str, Any] = {**case(LORA_ON_TWO)}
    config = read.pop("config")
    assert read == {
        "id": LORA_ON_TWO,
        "model": "ibm/PowerLM-3b",
        "folder": "models/ibm--PowerLM-3b-bfloat16-4096",
        "params": POWERLM,
        "trainer": "sft",
        "method": "lora",
        "lora_r": 16,
        "lora_targets": ["q_proj", "k_proj", "v_proj", "o_proj"],
        "quantization": None,
        "batch": 2,
        "seq_len": 4096,
        "recompute": "full",
        "offload": [],
        "sharding": "fsdp1",
        "gpus": 2,
        "context_ranks": 1,
        "optimizer": "adamw_torch",
        "states": "bf16",
        "loss_path": "full_logits",
        "metric": "max_allocated",
        "card": "A100-80GB",
        "card_bytes": read["card_bytes"],
    }
    assert 79 * 2**30 < read["card_bytes"] <= 80 * 2**30
    assert (config["model_type"], config["torch_dtype"]) == ("granite", "bfloat16")


def test_a_traced_row_in_neutral_terms() -> None:
    read = case(FP32)
    assert (read["model"], read["states"], read["metric"]) == ("traced/qwen3-4b-l4", "fp32", "max_allocated")
    # Counted on the class when it was traced.
    assert read["params"] == 792_681_984
    assert read["config"]["torch_dtype"] == "float32"
    assert read["config"]["max_position_embeddings"] == read["seq_len"] == 2048


def test_states_follow_the_wrapper() -> None:
    assert case("hfblog-ulysses-8192-sp1")["states"] == "master"
    # Its accelerate config says bf16 under FSDP2, which keeps fp32 shards.
    assert case("trl-long-qwen8b-1m-8xh100")["states"] == "fp32"
    assert case(RING)["states"] == "bf16"


@pytest.mark.parametrize(
    ("row_id", "peer", "why"),
    [
        (LORA_ON_TWO, "deepspeed", "no LoRA"),
        (LORA_ON_TWO, "fitcheck-llm", "one GPU only"),
        (LORA_ON_TWO, "ftuneai", None),
        (RING, "deepspeed", None),
        (RING, "llm-analysis", "no context parallelism"),
        (RING, "accelerate", "one GPU only"),
        ("trl-long-qwen4b-96k-off", "ftuneai", "no offload of activations"),
        ("trl-115-DPO-8k-1.15.0", "accelerate", "no DPO"),
        (EVERY_2, "canifinetune", "recompute is on or off"),
        (EVERY_2, "hf-vram-calc", None),
        (EXPERTS, "fitcheck-llm", "no mixture of experts"),
        (EXPERTS, "canifinetune", None),
    ],
)
def test_what_a_peer_has_no_words_for(row_id: str, peer: str, why: str | None) -> None:
    assert refusal(row_id, peer) == why


def test_a_full_run_in_each_peers_terms() -> None:
    full = case(FULL)
    assert state_accelerate(full) == {"model_name": "models/ibm--PowerLM-3b-bfloat16-4096", "dtypes": ["float16"]}
    assert state_deepspeed(full)["num_gpus_per_node"] == 1
    analysis = state_llm_analysis(full)
    # Three matrices of 9,216 as two of 13,824; 2 + 2 + (2 + 2) bytes a parameter.
    assert (analysis["model"]["ffn_embed_dim"], analysis["model"]["expansion_ratio"]) == (13_824, 6.0)
    training = analysis["training"]
    assert (training["master_weights_dtype_bytes"], training["other_op_bytes"]) == (2, 2)
    assert (training["batch_size_per_gpu"], training["activation_recomputation"], training["ds_zero"]) == (4, 2, 0)
    fitcheck = state_fitcheck(full)
    assert (fitcheck["optimizer_dtype"], fitcheck["lora_rank"], fitcheck["grad_checkpoint"]) == ("bf16", None, True)
    canifinetune = state_canifinetune(full)
    assert canifinetune["override"]["total_params"] == POWERLM
    assert (canifinetune["base_dtype"], canifinetune["optimizer"]) == ("bf16", "adamw_torch")
    ftuneai = state_ftuneai(full)
    assert (ftuneai["batch_size"], ftuneai["seq_length"], ftuneai["sharding"]) == (4, 4096, "none")
    assert state_hf_vram_calc(full)["dtype"] == "bf16"


def test_adapters_in_each_peers_terms() -> None:
    qlora = case(QLORA)
    fitcheck = state_fitcheck(qlora)
    assert (fitcheck["quantization"], fitcheck["double_quant"]) == ("nf4", True)
    assert (fitcheck["lora_targets"], fitcheck["optimizer_dtype"]) == ("LORA_TARGETS_STANDARD", "fp32")
    canifinetune = state_canifinetune(qlora)
    assert (canifinetune["quantization"], canifinetune["lora_target_scope"]) == ("nf4_double_quant", "attention")
    # Without a family that it knows it takes no LoRA.
    assert canifinetune["override"]["family"] == "llama"
    assert state_hf_vram_calc(qlora) == {
        "dtype": "int4",
        "batch_size": 8,
        "sequence_length": 4096,
        "lora_rank": 16,
    }
    on_two = state_ftuneai(case(LORA_ON_TWO))
    assert (on_two["sharding"], on_two["num_gpus"], on_two["lora_target"]) == ("fsdp", 2, "attention_all")
    assert state_ftuneai(case("peft-mm-lora--llama-3.2-3B-rank32"))["lora_target"] == "attention"
    assert state_ftuneai(case("qwen3-4b-l4/bf16-lora16-full-fused"))["lora_target"] == "all_linear"


def test_experts_and_fp32_in_each_peers_terms() -> None:
    model = state_llm_analysis(case(EXPERTS))["model"]
    # Experts of 768, three matrices each.
    assert (model["ffn_embed_dim"], model["moe_num_experts"], model["moe_top_k"]) == (1152, 128, 8)
    assert state_canifinetune(case(EXPERTS))["override"]["intermediate_size"] == 768
    fp32 = case(FP32)
    assert state_accelerate(fp32)["dtypes"] == ["float32"]
    assert state_canifinetune(fp32)["base_dtype"] == state_hf_vram_calc(fp32)["dtype"] == "fp32"
    assert state_llm_analysis(fp32)["training"]["other_op_bytes"] == 8


def test_every_row_is_answered_by_every_peer() -> None:
    names = [peer.name for peer in PEERS]
    assert [peer["name"] for peer in RECORDED["peers"]] == names
    assert set(RECORDED["rows"]) == {row["id"] for row in all_rows()}
    for row_id, said in RECORDED["rows"].items():
        assert list(said) == names, row_id
        for name, answer in said.items():
            if "cannot" in answer:
                assert answer["cannot"] and "fails" not in answer["cannot"], (row_id, name)
            else:
                assert isinstance(answer["bytes"], int) and answer["bytes"] > 0, (row_id, name)
                assert isinstance(answer["fits"], bool), (row_id, name)


def test_recorded_peers_are_those_that_would_be_asked() -> None:
    for peer, recorded in zip(PEERS, RECORDED["peers"], strict=True):
        assert (recorded["command"], recorded["counts"]) == (peer.command, peer.counts)
        assert any(f"{peer.name}=={recorded['version']}" in arguments for arguments in peer.installs)


def test_refusals_are_those_of_today() -> None:
    for row in all_rows():
        for peer in PEERS:
            why = refusal(row["id"], peer.name)
            said = RECORDED["rows"][row["id"]][peer.name]
            assert why is None or said == {"cannot": why}, (row["id"], peer.name)


def test_recorded_answers_are_the_peers_formulas() -> None:
    """Formulas as each peer documents them, worked out by hand for PowerLM-3b."""
    full = RECORDED["rows"][FULL]
    # Buffers count as parameters: the rotary embedding keeps two of 32 frequencies.
    assert full["accelerate"]["bytes"] == 8 * (POWERLM + 2 * 32)
    # 18 bytes a parameter, and 4 for each of the embedding's 49,152 x 2,304.
    assert full["deepspeed"]["bytes"] == 18 * POWERLM + 4 * 113_246_208
    # It counts a tied head twice: the empty model that it makes loses the tie.
    assert full["hf-vram-calc"]["bytes"] == pytest.approx(2 * (POWERLM + 113_246_208) * 4 * 1.3, abs=1)
    # 12 bytes a parameter; 40 checkpoints of 4 x 4,096 x 2,304 in bf16; 3.5 fp32 copies of the logits.
    logits = 14 * 4 * 4096 * 49_152
    assert full["fitcheck-llm"]["bytes"] == pytest.approx(12 * POWERLM + 40 * 4 * 4096 * 2304 * 2 + logits, rel=1e-4)
    halved = RECORDED["rows"]["fms-granite-001-PowerLM-3b-full-g2-bs2-none"]["deepspeed"]["bytes"]
    assert halved == 9 * POWERLM + 4 * 113_246_208
