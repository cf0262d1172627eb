"""The reader against transformers itself: every bundled model, every family, and configs that must be refused."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.architecture import Architecture
from planner.config.families import FAMILIES
from planner.config.reader import UnreadableConfig, read_architecture
from profiles.models import BundledModel, find_model, list_models

ROOT = Path(__file__).parents[2]
BUNDLED = list_models()
ROLES = ("embedding", "attention", "mlp", "experts", "norms", "head", "other")

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


def read(config: Any, origin: str = "config.json") -> Architecture:
    return read_architecture(config, model="some/model", origin=origin)


def bundled(model_id: str) -> Architecture:
    model = find_model(model_id)
    assert model is not None
    return read_architecture(model.config, model=model.name, origin="bundled")


def with_(**changes: Any) -> dict[str, Any]:
    return LLAMA | changes


def without(*keys: str) -> dict[str, Any]:
    return {key: value for key, value in LLAMA.items() if key not in keys}


# --- against transformers -----------------------------------------------------------------------


@pytest.mark.stack
@pytest.mark.parametrize("model", BUNDLED, ids=lambda m: m.id)
def test_a_bundled_model_has_the_parameters_of_the_real_class(model: BundledModel) -> None:
    from tests.planner.real_models import build, count

    real = build(model.config)
    read_ = read_architecture(model.config, model=model.id, origin="bundled")
    assert read_.num_parameters == count(real)
    assert read_.class_name == type(real).__name__
    assert read_.tied == (real.get_output_embeddings().weight is real.get_input_embeddings().weight)
    towers = count(real) - count(decoder_with_head(real))
    assert read_.vision_parameters == towers


def decoder_with_head(real: Any) -> Any:
    """The decoder and its head in one module, so that a tied matrix counts once."""
    import torch

    decoder = getattr(real.model, "language_model", real.model)
    return torch.nn.ModuleList([decoder, real.get_output_embeddings()])


@pytest.mark.stack
@pytest.mark.parametrize("model", BUNDLED, ids=lambda m: m.id)
def test_a_bundled_model_has_the_layers_rope_and_positions_of_the_real_config(model: BundledModel) -> None:
    from tests.planner.real_models import real_config

    real = real_config(model.config).get_text_config()
    read_ = read_architecture(model.config, model=model.id, origin="bundled")
    assert [kind.attention for kind in read_.layers()] == real_attention(real)
    assert read_.max_positions == real.max_position_embeddings
    rope = real.rope_parameters
    assert read_.nested_rope == ("full_attention" in rope)
    rope = rope.get("full_attention", rope)
    assert (read_.rope_theta, read_.rope_type) == (rope["rope_theta"], rope["rope_type"])
    assert read_.partial_rotary_factor == rope.get("partial_rotary_factor", 1.0)


def real_attention(real: Any) -> list[str]:
    """What transformers masks in every layer: by layer type where the class obeys it, else by the window."""
    names = {"full_attention": "full", "sliding_attention": "sliding", "linear_attention": "linear"}
    window = getattr(real, "sliding_window", None)
    if real.model_type in ("mistral", "ministral3", "mixtral", "phi3", "starcoder2", "qwen3_moe"):
        return ["full" if window is None else "sliding"] * real.num_hidden_layers
    types = getattr(real, "layer_types", None) or ["full_attention"] * real.num_hidden_layers
    return [names[name] if window or name != "sliding_attention" else "full" for name in types]


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "biased": {
        "attention_bias": True,
        "mlp_bias": True,
        "qkv_bias": True,
        "use_bias": True,
        "use_qkv_bias": True,
        "attention_out_bias": True,
    },
    "tied, one kv head": {"tie_word_embeddings": True, "num_key_value_heads": 1},
    "untied, all heads": {"tie_word_embeddings": False, "num_key_value_heads": 8},
    "windowed": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
    "no window": {"sliding_window": None},
    "sparse": {
        "mlp_only_layers": [1],
        "decoder_sparse_step": 2,
        "first_k_dense_replace": 2,
        "use_qk_norm": True,
        "qk_layernorm": True,
        "q_lora_rank": None,
    },
}
"""Keys that some families read; the others must ignore them, as transformers does."""


def small(model_type: str, changes: dict[str, Any]) -> dict[str, Any]:
    sizes = {
        "model_type": model_type,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 7,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "vocab_size": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "num_experts": 6,
        "num_local_experts": 6,
        "n_routed_experts": 6,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "kv_lora_rank": 16,
        "q_lora_rank": 12,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 6,
        "v_head_dim": 10,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
    }
    if model_type in ("mixtral", "gpt_oss", "granitemoe", "qwen3_moe"):
        # One spelling of the two that transformers maps onto each other.
        del sizes["num_experts" if model_type != "qwen3_moe" else "num_local_experts"]
    return sizes | changes


BUILDABLE = [name for name in FAMILIES if not name.startswith("qwen3_vl")]


@pytest.mark.stack
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("model_type", BUILDABLE)
def test_every_layer_of_a_family_holds_the_real_modules(model_type: str, variant: str) -> None:
    import torch

    from tests.planner.real_models import build, count, decoder_layers

    config = small(model_type, VARIANTS[variant])
    real, read_ = build(config), read(config)
    assert read_.num_parameters == count(real)
    assert [kind.attention for kind in read_.layers()] == real_attention(real.config)
    layers = real.gpt_neox.layers if model_type == "gpt_neox" else decoder_layers(real)
    for module, kind in zip(layers, read_.layers(), strict=True):
        assert kind.num_parameters == count(module)
        modules = sorted(
            (name.rpartition(".")[2], m.in_features, m.out_features, m.bias is not None)
            for name, m in module.named_modules()
            if isinstance(m, torch.nn.Linear)
        )
        described = [(m.name, m.in_features, m.out_features, m.bias) for m in kind.linears for _ in range(m.count)]
        assert sorted(described) == modules


@pytest.mark.stack
@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_defaults_of_a_family_are_those_of_its_config_class(model_type: str) -> None:
    import dataclasses

    from tests.planner.real_models import CONFIG_MAPPING

    family = FAMILIES[model_type]
    fields = {field.name: field.default for field in dataclasses.fields(CONFIG_MAPPING[model_type])}
    for key, value in family.defaults.items():
        name = family.names.get(key, key)
        # Llama's None means as many as heads, which is also what a default of heads says.
        if name in fields and not (key == "num_key_value_heads" and fields[name] is None):
            assert (key, fields[name]) == (key, value)
        if name not in fields:
            assert value in (None, False, 0), f"{model_type} has no {name}"


@pytest.mark.stack
@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen3_vl_moe"])
def test_a_vision_language_model_counts_its_tower_and_mergers(model_type: str) -> None:
    from tests.planner.real_models import build, count

    text_type = f"{model_type}_text"
    config = {
        "model_type": model_type,
        "architectures": [
            "Qwen3VLMoeForConditionalGeneration" if "moe" in model_type else "Qwen3VLForConditionalGeneration"
        ],
        "text_config": small(text_type, {"tie_word_embeddings": False}),
        "vision_config": {
            "depth": 3,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 4,
            "out_hidden_size": 64,
            "deepstack_visual_indexes": [0, 1],
        },
    }
    assert read(config).num_parameters == count(build(config))


@pytest.mark.stack
def test_a_pooling_head_and_several_feature_layers_are_counted() -> None:
    from tests.planner.real_models import build, count

    siglip = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    gemma = {
        "model_type": "gemma3",
        "text_config": small("gemma3_text", {}),
        "vision_config": siglip | {"model_type": "siglip_vision_model", "image_size": 32, "patch_size": 8},
    }
    assert read(gemma).num_parameters == count(build(gemma))
    mistral = {
        "model_type": "mistral3",
        "architectures": ["Mistral3ForConditionalGeneration"],
        "text_config": small("mistral", {}),
        "vision_config": siglip | {"model_type": "pixtral", "patch_size": 8},
        "vision_feature_layer": [-2, -1],
        "multimodal_projector_bias": True,
    }
    assert read(mistral).num_parameters == count(build(mistral))


@pytest.mark.stack
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7e4}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7e4}},
        {"rope_parameters": {}, "rope_theta": 5e5},
        {"rope_scaling": None},
    ],
    ids=str,
)
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "smollm3", "olmo3"])
def test_both_spellings_of_rope_are_read_as_transformers_reads_them(model_type: str, rope: dict[str, Any]) -> None:
    from tests.planner.real_models import real_config

    if model_type in ("gemma3_text", "olmo3") and rope.get("rope_parameters"):
        rope = {
            "rope_parameters": {"full_attention": rope["rope_parameters"], "sliding_attention": {"rope_theta": 1e4}}
        }
    config = small(model_type, rope)
    real = real_config(config).rope_parameters
    real = real.get("full_attention", real)
    read_ = read(config)
    assert (read_.rope_theta, read_.rope_type) == (real["rope_theta"], real["rope_type"])


# --- bundled models without transformers --------------------------------------------------------


@pytest.mark.parametrize("model", BUNDLED, ids=lambda m: m.id)
def test_the_roles_add_up_and_published_totals_are_met(model: BundledModel) -> None:
    read_ = read_architecture(model.config, model=model.id, origin="bundled")
    assert sum(read_.parameters_of(role) for role in ROLES) == read_.num_parameters  # type: ignore[arg-type]
    assert model.published_parameters in (None, read_.num_parameters)
    assert read_.model == model.id
    assert read_.origin == "bundled"
    assert read_.config == model.config


@pytest.mark.parametrize(
    ("model_id", "billions"),
    [
        ("Qwen/Qwen3-30B-A3B", 3.3),
        ("openai/gpt-oss-120b", 5.1),
        ("openai/gpt-oss-20b", 3.6),
        ("mistralai/Mixtral-8x7B-v0.1", 12.9),
    ],
)
def test_active_parameters_are_near_what_the_makers_state(model_id: str, billions: float) -> None:
    # Makers differ in whether the embedding counts beside the head; it is a tenth of the first.
    assert bundled(model_id).active_parameters / 1e9 == pytest.approx(billions, rel=0.09)


def test_shapes_that_the_memory_model_reads() -> None:
    gemma = bundled("google/gemma-2-2b")
    assert [k.attention for k in gemma.layers()][:4] == ["sliding", "full", "sliding", "full"]
    assert gemma.kinds[0].window == 4096
    assert gemma.kinds[0].num_norms == 4
    assert gemma.kinds[0].attention_softcap
    assert gemma.logit_softcap == 30.0
    oss = bundled("openai/gpt-oss-20b")
    assert oss.kinds[0].attention_sinks
    assert oss.kinds[0].name == "sliding+moe"
    assert any("stored quantised (mxfp4)" in note for note in oss.notes)
    assert oss.is_moe
    hybrid = bundled("Qwen/Qwen3.6-35B-A3B")
    linear, full = hybrid.kinds
    assert (linear.attention, full.attention) == ("linear", "full")
    assert (linear.heads, linear.kv_heads, linear.head_dim, linear.value_head_dim) == (32, 16, 128, 128)
    assert (linear.conv_channels, linear.conv_kernel) == (8192, 4)
    assert full.attention_gate
    assert full.intermediate == 512  # the shared expert
    assert full.experts is not None
    assert (full.experts.num_experts, full.experts.experts_per_token, full.experts.intermediate) == (256, 8, 512)
    assert hybrid.is_composite
    latent = bundled("deepseek-ai/DeepSeek-V2-Lite")
    assert [k.name for k in latent.kinds] == ["full", "full+moe"]
    assert latent.order[:2] == (0, 1)
    assert (latent.kinds[1].head_dim, latent.kinds[1].value_head_dim) == (192, 128)
    assert bundled("allenai/OLMo-2-1124-7B").kinds[0].qk_norm == "full"
    assert bundled("Qwen/Qwen3-8B").kinds[0].qk_norm == "head"
    assert bundled("ibm-granite/granite-3.3-8b-instruct").logit_scale
    assert not bundled("meta-llama/Llama-3.1-8B").logit_scale
    assert bundled("microsoft/phi-4").kinds[0].linears[0].name == "qkv_proj"
    assert bundled("HuggingFaceTB/SmolLM3-3B").attention_kinds == ("full",)
    assert bundled("mistralai/Mistral-7B-v0.1").attention_kinds == ("sliding",)


def test_a_bundled_model_is_found_and_read_in_under_five_milliseconds_with_the_standard_library() -> None:
    code = """
import sys, time
from profiles.models import find_model
from planner.config.reader import read_architecture
start = time.process_time()
model = find_model("Qwen/Qwen3.5-27B")
read_architecture(model.config, model=model.id, origin="bundled")
print(time.process_time() - start)
print(sorted({"torch", "transformers", "pydantic", "yaml"} & set(sys.modules)))
"""
    times = []
    for _ in range(3):
        out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        seconds, heavy = out.split("\n")[:2]
        assert heavy == "[]"
        times.append(float(seconds))
    assert min(times) < 0.005


# --- what else a config may say -----------------------------------------------------------------


def test_a_missing_key_takes_the_default_of_transformers_and_says_so() -> None:
    read_ = read(without("num_key_value_heads", "vocab_size"))
    assert read_.kinds[0].kv_heads == 8
    assert read_.vocab == 32_000
    assert read_.notes == ("vocab_size is not in the config: 32000, transformers' default, is used",)


def test_a_config_without_a_class_is_read_as_the_auto_class_and_said() -> None:
    read_ = read(without("architectures"))
    assert read_.class_name == "LlamaForCausalLM"
    assert read_.notes == ("architectures names no class, and TRL's trainers load the model by that name",)


@pytest.mark.parametrize(
    ("changes", "parameters"),
    [
        # Counted by instantiating the models at reduced depth.
        ({"model_type": "qwen3", "hidden_size": 2560, "num_attention_heads": 32, "num_key_value_heads": 8,
          "head_dim": 128, "intermediate_size": 9728, "vocab_size": 151936, "tie_word_embeddings": True,
          "num_hidden_layers": 4}, 792_681_984),
        ({"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
          "intermediate_size": 14336, "vocab_size": 128256, "num_hidden_layers": 4}, 1_923_125_248),
        ({"model_type": "gemma3_text", "hidden_size": 1152, "num_attention_heads": 4, "num_key_value_heads": 1,
          "head_dim": 256, "intermediate_size": 6912, "vocab_size": 262144, "tie_word_embeddings": True,
          "num_hidden_layers": 6}, 463_043_712),
        ({"model_type": "qwen3_moe", "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4,
          "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
          "num_experts_per_tok": 8, "vocab_size": 151936, "num_hidden_layers": 2}, 1_868_573_184),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)  # fmt: skip
def test_reduced_models_have_the_counts_seen_elsewhere(changes: dict[str, Any], parameters: int) -> None:
    assert read(with_(**changes)).num_parameters == parameters


def test_null_is_not_the_same_as_missing() -> None:
    mistral = with_(model_type="mistral", architectures=["MistralForCausalLM"])
    assert read(mistral).attention_kinds == ("sliding",)
    assert read(mistral | {"sliding_window": None}).attention_kinds == ("full",)


def test_an_unknown_llama_like_decoder_is_read_with_a_note() -> None:
    read_ = read(with_(model_type="brandnew", architectures=["BrandNewForCausalLM"]))
    assert read_.num_parameters == read(LLAMA).num_parameters
    assert read_.class_name == "BrandNewForCausalLM"
    assert "'brandnew' is not known: read as a dense Llama-like decoder" in read_.notes[0]


def test_auto_map_means_remote_code() -> None:
    auto_map = {"AutoModelForCausalLM": "modeling_x.X"}
    assert read(with_(model_type="brandnew", auto_map=auto_map)).remote_code
    known = read(with_(auto_map=auto_map))
    assert known.remote_code
    assert "without trust_remote_code transformers uses its own LlamaForCausalLM" in known.notes[0]
    assert not read(LLAMA).remote_code
    assert not read(with_(auto_map={})).remote_code


def test_another_head_is_counted_as_a_language_model_and_said() -> None:
    read_ = read(with_(architectures=["LlamaForSequenceClassification"]))
    assert read_.class_name == "LlamaForCausalLM"
    assert read_.notes == ("the config names the class LlamaForSequenceClassification; counted as LlamaForCausalLM",)


def test_a_composite_model_may_be_loaded_as_its_text_decoder() -> None:
    model = find_model("Qwen/Qwen3.5-4B")
    assert model is not None
    whole = read(model.config)
    alone = read(model.config | {"architectures": ["Qwen3_5ForCausalLM"]})
    automatic = read({key: value for key, value in model.config.items() if key != "architectures"})
    assert whole.is_composite
    assert whole.vision_parameters > 300e6
    assert alone.vision_parameters == automatic.vision_parameters == 0
    assert whole.num_parameters - whole.vision_parameters == alone.num_parameters == automatic.num_parameters
    assert alone.class_name == automatic.class_name == "Qwen3_5ForCausalLM"


def test_stored_dtype_and_quantisation_are_kept() -> None:
    assert read(with_(torch_dtype="float16")).stored_dtype == "float16"
    assert read(with_(dtype="bfloat16")).stored_dtype == "bfloat16"
    quantised = read(with_(quantization_config={"quant_method": "gptq", "bits": 4}))
    assert "stored quantised (gptq)" in quantised.notes[0]


# --- refusals -----------------------------------------------------------------------------------

REFUSED: list[tuple[Any, str]] = [
    ([], "holds a list, not an object"),
    ("llama", "holds 'llama', not an object"),
    ({}, "model_type is missing"),
    (without("hidden_size"), "config.json: hidden_size is missing"),
    (without("num_hidden_layers"), "num_hidden_layers is missing"),
    (with_(hidden_size="4096"), "hidden_size is '4096', not an integer"),
    (with_(hidden_size=64.0), "hidden_size is 64.0, not an integer"),
    (with_(hidden_size=True), "hidden_size is True, not an integer"),
    (with_(hidden_size=-1), "hidden_size is -1, outside 1 to 33,554,432"),
    (with_(hidden_size=0), "hidden_size is 0, outside"),
    (with_(hidden_size=10**12), "hidden_size is 1000000000000, outside"),
    (with_(hidden_size=10**400), "hidden_size is a int, outside"),
    (with_(hidden_size=[64]), "hidden_size is a list, not an integer"),
    (with_(num_hidden_layers=10**6), "num_hidden_layers is 1000000, outside 1 to 4,096"),
    (with_(num_attention_heads=7, num_key_value_heads=7), "num_attention_heads 7 does not divide hidden_size 64"),
    (with_(num_key_value_heads=3), "num_key_value_heads 3 does not divide num_attention_heads 8"),
    (with_(vocab_size=-5), "vocab_size is -5"),
    (with_(layer_types=["full_attention"]), "layer_types has 1 entries for 3 layers"),
    (
        with_(model_type="qwen3", layer_types=["mamba"] * 3),
        "layer_types holds 'mamba', which Qwen3ForCausalLM does not have",
    ),
    (
        with_(model_type="qwen3", layer_types=["linear_attention"] * 3),
        "layer_types holds linear_attention, which Qwen3",
    ),
    (with_(model_type="qwen3", layer_types="full"), "layer_types is 'full', not a list"),
    (with_(tie_word_embeddings="yes"), "tie_word_embeddings is 'yes', not true or false"),
    (with_(rope_scaling="yarn"), "rope_scaling is 'yarn', not an object"),
    (with_(rope_theta=float("nan")), "rope_theta is not a finite number"),
    (with_(max_position_embeddings=-1), "max_position_embeddings is -1"),
    (with_(model_type=7), "model_type is 7, not a string"),
    (with_(architectures="LlamaForCausalLM"), "architectures is 'LlamaForCausalLM', not a list"),
    (with_(model_type="bert"), "'bert' is an encoder"),
    (with_(model_type="t5"), "'t5' is an encoder-decoder"),
    (with_(is_encoder_decoder=True), "'llama' is an encoder-decoder"),
    (with_(model_type="mamba"), "model_type 'mamba' has layers that trlfit cannot count"),
    (
        with_(model_type="new", num_experts=8),
        "'new' is not known, and num_experts shows that it is no dense Llama-like",
    ),
    (with_(model_type="new", layer_types=["ssm"] * 3), "'new' is not known, nor its layer type 'ssm'"),
    ({"model_type": "new", "hidden_size": 64}, "'new' is not known, and num_hidden_layers is missing"),
    ({"model_type": "llava", "text_config": LLAMA}, "'llava' is not known, and text_config shows"),
    ({"_class_name": "UNet2DConditionModel"}, "describes a diffusers model ('UNet2DConditionModel')"),
    ({"peft_type": "LORA", "base_model_name_or_path": "a/b"}, "belongs to an adapter; plan its base model ('a/b')"),
    ({"model_type": "gemma3"}, "text_config is missing"),
    ({"model_type": "gemma3", "text_config": 3}, "text_config is 3, not an object"),
    ({"model_type": "gemma3", "text_config": {"model_type": "t5"}}, "text_config: model_type 't5' is not a decoder"),
    ({"model_type": "gemma3", "text_config": {"hidden_size": 64, "num_hidden_layers": 2}}, "vision_config is missing"),
    (
        with_(model_type="mixtral", num_local_experts=2, num_experts_per_tok=4),
        "num_experts_per_tok 4 is more than the 2",
    ),
    (with_(model_type="qwen3_moe", decoder_sparse_step=0), "decoder_sparse_step is 0"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_cannot_be_read_is_refused_in_one_line(config: Any, message: str) -> None:
    with pytest.raises(UnreadableConfig) as raised:
        read(config)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 250
    assert isinstance(raised.value, ValueError)


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 70),
    st.sampled_from([4096, 10**12, 10**400, -(10**50), 2**25]),
    st.floats(),
    st.text(max_size=6),
    st.sampled_from(["full_attention", "sliding_attention", "linear_attention", "default", "yarn", "llama"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda children: st.one_of(
        st.lists(children, max_size=4),
        st.dictionaries(
            st.one_of(st.text(max_size=4), st.sampled_from(["rope_theta", "full_attention"])), children, max_size=4
        ),
    ),
    max_leaves=8,
)
KEYS = sorted(
    {key for model in BUNDLED for key in model.config}
    | {key for model in BUNDLED for key in model.config.get("text_config", {})}
    | {key for model in BUNDLED for key in model.config.get("vision_config", {})}
    | {"auto_map", "is_encoder_decoder", "rope_parameters", "quantization_config"}
)
TYPES = sorted({*FAMILIES, "gemma3", "mistral3", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "unheard_of"})


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), model_type=st.sampled_from(TYPES))
def test_hostile_configs_are_refused_and_never_crash(data: st.DataObject, model_type: str) -> None:
    config: dict[str, Any] = small(model_type, {})
    changes = data.draw(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=5))
    if model_type in ("gemma3", "mistral3", "qwen3_5", "qwen3_5_moe", "qwen3_vl") and data.draw(st.booleans()):
        inner = data.draw(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=3))
        config |= {"text_config": small(f"{model_type}_text", {}) | inner, "vision_config": inner}
    config |= changes
    before = copy.deepcopy(config)
    try:
        read_ = read(config)
    except UnreadableConfig as refusal:
        assert "\n" not in str(refusal)
        assert str(refusal).strip()
    else:
        assert sum(read_.parameters_of(role) for role in ROLES) == read_.num_parameters > 0  # type: ignore[arg-type]
        assert read_.active_parameters > 0
    assert repr(config) == repr(before)


@settings(max_examples=200, deadline=None)
@given(VALUES)
def test_any_json_value_at_all_is_read_or_refused(value: Any) -> None:
    try:
        read(value)
    except UnreadableConfig as refusal:
        assert "\n" not in str(refusal)


def test_json_that_python_alone_accepts_does_not_crash() -> None:
    config = json.loads('{"model_type": "llama", "hidden_size": NaN, "num_hidden_layers": Infinity}')
    with pytest.raises(UnreadableConfig, match="hidden_size is nan, not an integer"):
        read(config)
