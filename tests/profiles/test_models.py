"""Bundled models: the index is current, ids and aliases lead to their files, slips are answered."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from profiles import models
from profiles.models import find_model, list_models, nearest

FOLDER = Path(models.__file__).with_name("models")

_ASKED_FOR = """
Qwen/Qwen2.5-0.5B Qwen/Qwen2.5-1.5B-Instruct Qwen/Qwen2.5-3B Qwen/Qwen2.5-7B-Instruct Qwen/Qwen2.5-14B
Qwen/Qwen2.5-32B Qwen/Qwen2.5-72B-Instruct Qwen/Qwen3-0.6B Qwen/Qwen3-1.7B Qwen/Qwen3-4B Qwen/Qwen3-8B
Qwen/Qwen3-14B Qwen/Qwen3-32B Qwen/Qwen3-30B-A3B Qwen/Qwen3-235B-A22B Qwen/Qwen3.6-35B-A3B Qwen/Qwen3.6-27B
Qwen/Qwen3-Next-80B-A3B-Instruct meta-llama/Llama-2-7b-hf meta-llama/Llama-2-13b-hf meta-llama/Llama-2-70b-hf
meta-llama/Meta-Llama-3-8B meta-llama/Meta-Llama-3-70B meta-llama/Llama-3.1-8B meta-llama/Llama-3.1-70B-Instruct
meta-llama/Llama-3.2-1B meta-llama/Llama-3.2-3B meta-llama/Llama-3.3-70B-Instruct mistralai/Mistral-7B-v0.1
mistralai/Mistral-7B-v0.3 mistralai/Mistral-Nemo-Instruct-2407 mistralai/Mistral-Small-24B-Instruct-2501
mistralai/Mixtral-8x7B-v0.1 google/gemma-2-2b google/gemma-2-9b-it google/gemma-2-27b google/gemma-3-270m
google/gemma-3-1b-it google/gemma-3-4b-it google/gemma-3-12b-it google/gemma-3-27b-it
microsoft/Phi-3-mini-4k-instruct microsoft/phi-4 microsoft/Phi-4-mini-instruct HuggingFaceTB/SmolLM2-135M
HuggingFaceTB/SmolLM2-360M HuggingFaceTB/SmolLM2-1.7B HuggingFaceTB/SmolLM3-3B allenai/OLMo-2-0425-1B
allenai/OLMo-2-1124-7B allenai/OLMo-2-1124-13B ibm-granite/granite-3.3-2b-instruct
ibm-granite/granite-3.1-8b-instruct THUDM/GLM-4-9B-0414 openai/gpt-oss-20b openai/gpt-oss-120b ibm/PowerLM-3b
TinyLlama/TinyLlama-1.1B-Chat-v1.0 deepseek-ai/DeepSeek-R1-Distill-Llama-8B
deepseek-ai/DeepSeek-R1-Distill-Qwen-7B
"""
ASKED_FOR = _ASKED_FOR.split()


def test_the_index_is_current() -> None:
    names: dict[str, str] = {}
    for path in FOLDER.glob("*--*.json"):
        document = json.loads(path.read_text(encoding="utf-8"))
        names |= dict.fromkeys((document["id"], *document["aliases"]), path.stem)
    wanted = json.dumps(dict(sorted(names.items())), indent=1) + "\n"
    written = (FOLDER / "index.json").read_text(encoding="utf-8")
    assert written == wanted, f"profiles/models/index.json must hold:\n{wanted}"


def test_every_file_is_named_after_its_model_and_names_are_unique() -> None:
    seen: set[str] = set()
    for path in FOLDER.glob("*--*.json"):
        document = json.loads(path.read_text(encoding="utf-8"))
        assert path.stem == document["id"].replace("/", "--")
        names = [document["id"], *document["aliases"]]
        assert set(document.get("overrides", {})) <= set(document["aliases"])
        lower = {name.lower() for name in names}
        assert len(lower) == len(names)
        assert not lower & seen
        seen |= lower


@pytest.mark.parametrize("model", list_models(), ids=lambda m: m.id)
def test_a_model_says_where_it_is_from(model: models.BundledModel) -> None:
    assert len(model.source) > 10
    assert (model.published_parameters is None) == (model.published_source is None)
    assert {"model_type", "architectures"} <= set(model.config)


@pytest.mark.parametrize("model_id", ASKED_FOR)
def test_models_that_people_fine_tune_are_bundled(model_id: str) -> None:
    model = find_model(model_id)
    assert model is not None
    assert model.name == model_id


def test_letter_case_and_aliases_are_forgiven() -> None:
    model = find_model("qwen/qwen3-8b-BASE")
    assert model is not None
    assert (model.id, model.name) == ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B-Base")
    assert find_model("nobody/nothing") is None
    assert find_model("") is None
    assert find_model("../models/index") is None


def test_an_alias_may_have_been_trained_on_other_positions() -> None:
    base, tuned = find_model("Qwen/Qwen2.5-7B"), find_model("Qwen/Qwen2.5-7B-Instruct")
    assert base is not None
    assert tuned is not None
    assert (base.config["max_position_embeddings"], tuned.config["max_position_embeddings"]) == (131_072, 32_768)
    sizes = ("hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers")
    assert [base.config[key] for key in sizes] == [tuned.config[key] for key in sizes]


def test_the_list_is_sorted_and_complete() -> None:
    listed = list_models()
    assert len(listed) >= 45
    ids = [model.id for model in listed]
    assert ids == sorted(ids, key=str.lower)
    assert len(ids) == len(list(FOLDER.glob("*--*.json")))


def test_finding_one_model_reads_the_index_and_that_file_only(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    read_text = Path.read_text

    def counting(self: Path, *args: str, **kwargs: str) -> str:
        opened.append(self.name)
        return read_text(self, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", counting)
    models._index.cache_clear()
    models._by_lower_name.cache_clear()
    assert find_model("google/gemma-3-4b-it") is not None
    assert opened == ["index.json", "google--gemma-3-4b-pt.json"]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("qwen3-8b", "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-8", "Qwen/Qwen3-8B"),
        ("Qwen/Qwen2.5-7b-instrct", "Qwen/Qwen2.5-7B-Instruct"),
        ("llama-3.1-8b", "meta-llama/Llama-3.1-8B"),
        ("meta-llama/Llama-3.1-8B-Instuct", "meta-llama/Llama-3.1-8B-Instruct"),
        ("google/gemma3-4b", "google/gemma-3-4b-it"),
    ],
)
def test_the_nearest_model_is_what_was_meant(typed: str, meant: str) -> None:
    assert nearest(typed)[0] == meant


def test_nothing_near_means_no_suggestion() -> None:
    assert nearest("xyzzy/plugh") == []
    assert nearest("") == []
