"""The release table against the published behaviour of each TRL, and the feature gates at their edges."""

from __future__ import annotations

import pytest

from profiles.releases import (
    context_parallel_blocker,
    families,
    feature,
    feature_names,
    known_trl_releases,
    newest_known,
    optimizer_needs,
    release_numbers,
    trl_release,
    within,
)

NOW = dict(newest_known())

# TRL -> paths of SFT (the default first), loss_type for full logits and for the chunked loss.
PUBLISHED = [
    ("0.20.0", ("full_logits", "liger"), ()),
    ("0.22.2", ("full_logits", "liger"), ()),
    ("0.23.0", ("full_logits", "liger"), ("nll", "dft")),
    ("1.3.0", ("full_logits", "liger"), ("nll", "dft")),
    ("1.4.0", ("full_logits", "chunked_fp32", "liger"), ("nll", "dft", "chunked_nll")),
    ("1.6.0", ("full_logits", "chunked_fp32", "liger"), ("nll", "dft", "chunked_nll")),
    ("1.7.0", ("chunked_fp32", "full_logits", "liger"), ("nll", "dft", "chunked_nll")),
    ("1.12.0", ("chunked_fp32", "full_logits", "liger"), ("nll", "dft", "chunked_nll")),
    ("1.13.0", ("chunked", "full_logits", "liger"), ("nll", "dft", "chunked_nll")),
    ("1.14.2", ("chunked", "full_logits", "liger"), ("nll", "dft", "chunked_nll")),
    ("1.15.0", ("fused",), ("nll", "dft", "chunked_nll")),
    ("1.16.0", ("fused",), ("nll", "dft", "chunked_nll")),
]


@pytest.mark.parametrize(("version", "paths", "loss_types"), PUBLISHED, ids=[row[0] for row in PUBLISHED])
def test_sft_loss_paths(version: str, paths: tuple[str, ...], loss_types: tuple[str, ...]) -> None:
    release = trl_release(version)
    assert release.loss_paths == paths
    assert release.default_loss_path == paths[0]
    assert release.loss_types == loss_types


@pytest.mark.parametrize(
    ("version", "path", "argument"),
    [
        ("0.22.2", "full_logits", None),
        ("1.3.0", "full_logits", None),
        ("1.5.1", "chunked_fp32", "chunked_nll"),
        # 1.6 warns about the coming default unless nll is asked for by name.
        ("1.6.0", "full_logits", "nll"),
        ("1.6.0", "chunked_fp32", "chunked_nll"),
        ("1.12.0", "chunked_fp32", None),
        ("1.12.0", "full_logits", "nll"),
        ("1.14.2", "chunked", None),
        ("1.14.2", "liger", None),
        ("1.16.0", "fused", None),
    ],
)
def test_loss_type_argument(version: str, path: str, argument: str | None) -> None:
    assert trl_release(version).loss_type_argument(path) == argument


def test_a_path_that_is_not_there_has_no_argument() -> None:
    with pytest.raises(ValueError, match=r"trl 1\.16\.0 has no loss path 'chunked'; it has fused"):
        trl_release("1.16.0").loss_type_argument("chunked")


def test_other_trainers_have_their_own_paths() -> None:
    old, new = trl_release("1.14.2"), trl_release("1.15.0")
    assert old.loss_paths_for("dpo") == ("full_logits", "liger")
    assert old.loss_paths_for("rloo") == ("full_logits",)
    assert {new.loss_paths_for(trainer) for trainer in ("sft", "dpo", "kto", "grpo", "rloo")} == {("fused",)}
    # A reward model has no vocabulary head; the knob keeps one value.
    assert old.loss_paths_for("reward") == ("chunked",)


def test_the_argument_that_turns_liger_on_was_renamed() -> None:
    assert trl_release("0.25.1").liger_argument("liger", "dpo") == "use_liger_loss"
    assert trl_release("1.14.2").liger_argument("liger", "dpo") == "use_liger_kernel"
    assert trl_release("1.14.2").liger_argument("full_logits") is None
    assert trl_release("1.16.0").liger_argument("fused") is None


@pytest.mark.parametrize(
    ("version", "dtype"),
    [("0.25.1", "transformers"), ("0.26.0", "auto"), ("0.27.0", "float32"), ("1.16.0", "float32")],
)
def test_load_dtype(version: str, dtype: str) -> None:
    assert trl_release(version).load_dtype_default == dtype


@pytest.mark.parametrize(
    ("version", "one_row", "two_rows"),
    [
        # Up to 0.22 the entropy makes three softmaxes of a whole sequence.
        ("0.20.0", 20, 14),
        ("0.23.0", 12, 12),
        ("1.2.0", 12, 12),
        ("1.3.0", 12, 16),
        ("1.5.1", 12, 16),
        ("1.6.0", 12, 12),
        ("1.16.0", 12, 12),
    ],
)
def test_bytes_per_full_logit(version: str, one_row: int, two_rows: int) -> None:
    release = trl_release(version)
    assert (release.nll_bytes(1), release.nll_bytes(2)) == (one_row, two_rows)


def test_versions_outside_the_table_get_the_nearest_row_and_a_note() -> None:
    old, new = trl_release("0.11.4"), trl_release("1.40.0")
    assert (old.since, new.since) == ("0.20.0", "1.16.0")
    assert "older than the known range" in old.notes[-1]
    assert "newer than the known range" in new.notes[-1]
    assert trl_release("").version == "1.16.0"


def test_versions_between_rows_and_pre_releases() -> None:
    assert trl_release("1.14.9").since == "1.13.0"
    assert trl_release("1.15.0.dev0").loss_paths == ("fused",)
    with pytest.raises(ValueError, match="is not a version"):
        trl_release("latest")


def test_rows_are_in_order_and_state_their_source() -> None:
    releases = known_trl_releases()
    numbers = [release_numbers(release.since) for release in releases]
    assert numbers == sorted(numbers)
    for release in releases:
        assert release_numbers(release.since) <= release_numbers(release.checked)
        assert release.source


@pytest.mark.parametrize(
    ("name", "package", "without", "with_it"),
    [
        ("recompute_every_n", "transformers", "5.15.0", "5.16.0"),
        ("offload_activations", "transformers", "5.16.1", "5.17.0"),
        ("activation_checkpointing_name", "transformers", "5.22.0", "5.23.0"),
        ("recompute_selective", "trl", "1.14.2", "1.15.0"),
        ("context_parallel", "accelerate", "1.10.1", "1.11.0"),
        ("context_parallel", "accelerate", "1.12.0", "1.13.0"),
        ("context_parallel", "torch", "2.5.1", "2.6.0"),
        ("context_parallel_family_check", "accelerate", "1.14.0", "1.15.0"),
        ("context_parallel_packing_check", "trl", "1.10.0", "1.11.0"),
        ("fsdp_activation_checkpointing_offload", "accelerate", "1.14.0", "1.15.0"),
        ("fsdp2_fp32_shards", "accelerate", "1.13.0", "1.14.0"),
        ("fsdp2_fp32_shards", "accelerate", "1.13.1", "1.12.0"),
        ("fsdp2_frozen_kept", "accelerate", "1.12.0", "1.13.0"),
        ("fsdp2_tied_embeddings", "accelerate", "1.14.0", "1.15.0"),
        ("chunked_sharded_head", "trl", "1.6.0", "1.7.0"),
        ("fused_head_fp32_accumulate", "torch", "2.7.1", "2.8.0"),
    ],
)
def test_feature_edges(name: str, package: str, without: str, with_it: str) -> None:
    missing = feature(name, {**NOW, package: without})
    assert not missing.available
    assert package in missing.lacking
    assert without in missing.lacking
    found = feature(name, {**NOW, package: with_it})
    assert found.available
    assert found.lacking == ""


def test_sequence_parallelism_needs_four_packages() -> None:
    everything = {**NOW, "deepspeed": "0.18.2"}
    assert feature("sequence_parallel", everything).available
    for package, version in (("deepspeed", "0.18.1"), ("trl", "1.10.0"), ("accelerate", "1.11.0")):
        lacking = feature("sequence_parallel", {**everything, package: version})
        assert lacking.lacking.endswith(f"the stack has {version}")
    assert feature("sequence_parallel", NOW).lacking == "deepspeed >= 0.18.2, the stack has none"


def test_tied_embeddings_ask_for_a_newer_accelerate_only_with_a_newer_torch() -> None:
    assert feature("fsdp2_tied_embeddings", {"torch": "2.12.1", "accelerate": "1.13.0"}).available
    assert not feature("fsdp2_tied_embeddings", {"torch": "2.13.0+cu130", "accelerate": "1.14.0"}).available


@pytest.mark.parametrize(
    ("packages", "available"),
    [
        ({}, False),
        ({"flash-attn": "2.3.2"}, False),
        ({"flash-attn": "2.8.3"}, True),
        ({"kernels": "0.18.3"}, True),
        ({"kernels": "0.19.0"}, False),
        ({"kernels": "0.16.0"}, False),
        ({"kernels": "0.16.0", "transformers": "5.17.0"}, True),
    ],
)
def test_flash_attention_comes_from_two_packages(packages: dict[str, str], available: bool) -> None:
    assert feature("flash_attention_2", {**NOW, **packages}).available is available


def test_every_feature_can_be_asked_and_has_a_source() -> None:
    for name in feature_names():
        answer = feature(name, {})
        assert not answer.available, name
        assert answer.since, name
        assert answer.source, name
    with pytest.raises(ValueError, match="feature 'warp' is not known"):
        feature("warp", NOW)


@pytest.mark.parametrize(
    ("version", "ranges", "inside"),
    [
        ("1.12.0", (">=1.11.0", "!=1.12.0"), False),
        ("1.12.1", (">=1.11.0", "!=1.12.0"), True),
        ("1.13.4", ("!=1.13.*",), False),
        ("1.14", ("!=1.13.*",), True),
        ("1.13.2", ("==1.13.*",), True),
        ("2.13", (">=2.13.0",), True),
        ("2.13.0a0+git", ("<2.13.0",), False),
        ("0.46", ("<=0.46.0",), True),
        ("0.46.1", (">0.46.0",), True),
    ],
)
def test_ranges(version: str, ranges: tuple[str, ...], inside: bool) -> None:
    assert within(version, ranges) is inside


def test_a_range_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(ValueError, match="'~1' is not a version range"):
        within("1.0", ("~1",))


def test_optimizers() -> None:
    bnb = optimizer_needs("adamw_bnb_8bit")
    assert bnb is not None
    assert (bnb.package, bnb.cpu_equivalent) == ("bitsandbytes", False)
    fused = optimizer_needs("adamw_torch_fused")
    assert fused is not None
    assert (fused.package, fused.cpu_equivalent) == (None, True)
    galore = optimizer_needs("galore_adamw_layerwise")
    assert galore is not None
    assert (galore.package, galore.whole_matrices, galore.layerwise) == ("galore-torch", True, True)
    npu = optimizer_needs("adamw_torch_npu_fused")
    assert npu is not None
    assert npu.other_device
    assert optimizer_needs("source") is None
    assert optimizer_needs("adamw_magic") is None


def test_families() -> None:
    assert "gemma2" in families("no_sdpa")
    assert "qwen3" not in families("no_sdpa") | families("no_flash") | families("no_recompute")
    assert "gpt_oss" in families("flash_sinks")
    with pytest.raises(KeyError):
        families("tall")


def test_families_that_context_parallelism_refuses_whatever_their_config_says() -> None:
    assert context_parallel_blocker("deepseek_v32") == "indexed_attention"
    assert context_parallel_blocker("qwen3_next") == "linear_attention"
    assert context_parallel_blocker("llama4_text") == "chunked_attention"
    # These depend on the config: Mistral v0.1 has a window, later ones do not.
    for model_type in ("mistral", "qwen2", "qwen3", "qwen3_moe", "llama", "deepseek_v3"):
        assert context_parallel_blocker(model_type) is None
