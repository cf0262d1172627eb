"""Refusals: configs that are no causal language model, or whose layers we would count wrongly."""

from __future__ import annotations

from planner.config.fields import Fields, shown


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ENCODERS = _words("""
    albert bert big_bird camembert canine clip convbert data2vec-text deberta deberta-v2
    distilbert electra ernie esm eurobert flaubert funnel gte ibert jina_embeddings_v3 layoutlm
    layoutlmv3 longformer luke megatron-bert mobilebert modernbert mpnet mra nomic_bert
    nystromformer reformer rembert roberta roberta-prelayernorm roc_bert roformer siglip
    squeezebert tapas vit wav2vec2 xlm xlm-roberta xlm-roberta-xl xmod yoso
""")
_ENCODER_DECODERS = _words("""
    bart bigbird_pegasus blenderbot blenderbot-small encoder-decoder fsmt led longt5 m2m_100
    marian mbart mt5 mvp nllb-moe pegasus pegasus_x plbart prophetnet switch_transformers t5
    t5gemma t5gemma2 trocr udop umt5 vision-encoder-decoder whisper
""")
_OTHER_DECODERS = _words("""
    afmoe apertus apertus1p5_text aria_text axk1 axk2 bailing_hybrid bamba beam bert-generation
    biogpt bitnet bloom blt codegen cohere2_moe cohere_compass_text cpmant ctrl dbrx
    deepseek_v32 deepseek_v4 diffllama doge dory dots1 dots3_note dots3_note_text ernie4_5_moe
    exaone4 exaone_moe falcon falcon_h1 falcon_mamba flex_olmo flint fuyu gemma3n gemma3n_text
    gemma4 gemma4_assistant gemma4_text gemma4_unified gemma4_unified_text git glm4_moe_lite
    glm_moe_dsa got_ocr2 gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox_japanese gptj granite_swa
    granitemoe_swa granitemoehybrid granitemoeshared hrm_text hunyuan_v1_dense hunyuan_v1_moe
    hy_v3 hy_v4 hyperclovax inkling2_loop_text inkling2_text inkling_text jais2 jamba jetmoe
    kimi_linear kolibri1 laguna lara_mini lfm2 lfm2_moe lfm3 llama4 llama4_text longcat_flash
    mamba mamba2 mellum mimo_v2_flash minicpm3 minimax minimax_m2 minimax_m3_vl_text ministral
    mllama modernbert-decoder moshi mpt nanochat nemotron nemotron_h olmo_hybrid openai-gpt opt
    persimmon phi4_multimodal phimoe qwen4_exp qwen4_exp_text recurrent_gemma rwkv sarvam_mla
    sarvam_moe solar_open xglm xlnet xlstm youtu zamba zamba2 zaya
""")
"""Causal models of transformers 5.24 that differ from Llama in ways no row of the families says."""

_FOREIGN_KEYS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_intermediate_size",
    "kv_lora_rank",
    "ssm_cfg",
    "state_size",
    "ssm_state_size",
    "mamba_d_state",
    "attn_layer_period",
    "conv_kernel",
    "type_vocab_size",
    "encoder_layers",
    "decoder_layers",
    "patch_size",
    "image_size",
    "num_mel_bins",
    "vision_config",
    "audio_config",
    "text_config",
    "hidden_size_per_layer_input",
    "linear_attn_config",
)
"""Keys that only models other than dense Llama-like decoders have."""


def refuse_what_is_no_decoder(root: Fields) -> None:
    """Raise for diffusion models, adapters, encoders and encoder-decoders.

    Raises:
        UnreadableConfig: what it is instead.
    """
    if root.has("_class_name"):
        raise root.refuse(f"describes a diffusers model ({shown(root.get('_class_name'))}), not a language model")
    if root.has("peft_type"):
        base = root.get("base_model_name_or_path")
        raise root.refuse(f"belongs to an adapter; plan its base model ({shown(base)}) instead")
    model_type = root.text("model_type")
    if root.get("is_encoder_decoder") is True or model_type in _ENCODER_DECODERS:
        raise root.refuse(f"model_type {shown(model_type)} is an encoder-decoder; TRL trains decoders")
    if model_type in _ENCODERS:
        raise root.refuse(f"model_type {shown(model_type)} is an encoder; TRL trains decoders")


def refuse_other_layouts(root: Fields, model_type: str) -> None:
    """Raise for an unknown ``model_type`` that shows signs of another layout than Llama's.

    Raises:
        UnreadableConfig: which sign.
    """
    if model_type in _OTHER_DECODERS:
        raise root.refuse(f"model_type {shown(model_type)} has layers that trlfit cannot count")
    foreign = next((key for key in _FOREIGN_KEYS if root.has(key)), None)
    if foreign is not None:
        raise root.refuse(
            f"model_type {shown(model_type)} is not known, and {foreign} shows that it is no dense Llama-like decoder"
        )
    types = set(root.strings("layer_types") or ()) - {"full_attention", "sliding_attention"}
    if types:
        raise root.refuse(f"model_type {shown(model_type)} is not known, nor its layer type {shown(min(types))}")
