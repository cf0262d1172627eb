"""Which whole models are traced, and in which ways: the cases of benchmarks/whole_models.py.

A model is bundled under profiles/models, or its published sizes are in whole_sizes.jsonl with the checkpoint that they
are from.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BUNDLED = Path(__file__).resolve().parents[1] / "profiles" / "models"
SIZES = Path(__file__).with_name("whole_sizes.jsonl")
PACKAGES = ("torch", "transformers", "peft", "trl")


@dataclass(frozen=True, kw_only=True)
class Model:
    """One checkpoint's sizes."""

    name: str
    source: str
    config: dict[str, Any]
    unread: bool = False
    """No reader of ours counts this family: rows carry its kinds of layers, as the class has them."""

    @property
    def layers(self) -> int:
        """Decoder layers as published."""
        return int(self.config["num_hidden_layers"])


def bundled(name: str, hub_id: str, **more: Any) -> Model:
    """A model of profiles/models; a composite one's text decoder alone."""
    stored = json.loads((BUNDLED / f"{hub_id.replace('/', '--')}.json").read_text(encoding="utf-8"))
    config = dict(stored["config"].get("text_config", stored["config"]))
    return Model(name=name, source=f"profiles/models, {hub_id}", config=config | more)


_PUBLISHED = {model.name: model for model in (Model(**json.loads(line)) for line in SIZES.read_text().splitlines())}
_MIXTRAL = bundled("mixtral-8x7b", "mistralai/Mixtral-8x7B-v0.1")
_DEEPSEEK = bundled("deepseek-v2-lite", "deepseek-ai/DeepSeek-V2-Lite")
GEMMA2 = bundled("gemma-2-2b", "google/gemma-2-2b")
PHI3 = bundled("phi-3-mini", "microsoft/Phi-3-mini-4k-instruct", pad_token_id=0)
OLMO2 = bundled("olmo-2-1b", "allenai/OLMo-2-0425-1B")
_GLM4 = bundled("glm-4-9b-0414", "THUDM/GLM-4-9B-0414")
_SMOLLM3 = bundled("smollm3-3b", "HuggingFaceTB/SmolLM3-3B", pad_token_id=0)
GPT_OSS = bundled("gpt-oss-20b", "openai/gpt-oss-20b")
_GRANITE = bundled("granite-3.1-8b", "ibm-granite/granite-3.1-8b-base")
_MISTRAL = bundled("mistral-7b-v0.1", "mistralai/Mistral-7B-v0.1")
_QWEN35 = bundled("qwen3.5-0.8b", "Qwen/Qwen3.5-0.8B", architectures=["Qwen3_5ForCausalLM"])
_QWEN36 = bundled("qwen3.6-35b-a3b", "Qwen/Qwen3.6-35B-A3B", architectures=["Qwen3_5MoeForCausalLM"])
_QWEN3_NEXT = bundled("qwen3-next-80b", "Qwen/Qwen3-Next-80B-A3B-Instruct")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model trained in one way on one card."""

    model: Model
    seq_len: int
    rows: int = 1
    weights: str = "bf16"
    recompute: str = "none"
    loss: str = "fused"
    lora_r: int = 0
    attention: str = "sdpa"
    padded: bool = False
    autocast: bool = True
    layers: int = 0
    """Depth, where the whole model would take too long; 0 for the published one."""

    @property
    def kernels(self) -> str:
        """Whose attention kernels and autocast lists: where SDPA reads a mask, ``cpu``; else ``cuda``.

        A card makes more of a mask than operators show, so there the CPU's kernel is the one that can be checked.
        """
        window = self.model.config.get("sliding_window")
        beyond = isinstance(window, int) and self.seq_len >= window
        return "cpu" if self.attention == "sdpa" and (self.padded or beyond) else "cuda"

    @property
    def id(self) -> str:
        """Everything that tells cases apart."""
        name = self.model.name + (f"-l{self.layers}" if self.layers else "")
        method = f"lora{self.lora_r}" if self.lora_r else "full"
        weights = self.weights + ("" if self.autocast else "-pure")
        batch = f"{self.rows}x{self.seq_len}" + ("-padded" if self.padded else "")
        loss = self.loss.replace("_", "")
        return f"{name}/{weights}-{method}-{self.recompute}-{loss}-{self.attention.partition('_')[0]}-{batch}"

    def full_config(self) -> dict[str, Any]:
        """The config.json, cut to the depth that is traced."""
        values = json.loads(json.dumps(self.model.config))
        if self.layers:
            values["num_hidden_layers"] = self.layers
            for key, value in values.items():
                if isinstance(value, list) and len(value) == self.model.layers:
                    values[key] = value[: self.layers]
        return values

    def job(self, version: Callable[[str], str]) -> dict[str, Any]:
        """As a job file would state it, every knob pinned."""
        lora = {"lora": {"r": self.lora_r, "target_modules": "all-linear"}} if self.lora_r else {}
        return {
            "trainer": "sft",
            "method": "lora" if self.lora_r else "full",
            **lora,
            "seq_len": self.seq_len,
            "machine": "1xH100-80GB",
            "stack": {package: version(package) for package in PACKAGES},
            "pins": {
                "loss_path": self.loss,
                "recompute": self.recompute,
                "offload": [],
                "sharding": "none",
                "cp": 1,
                "micro_batch": self.rows,
                "grad_accum": 1,
                "optimizer": "adamw_torch_fused",
                "weights": self.weights,
                "mixed_precision": "bf16" if self.autocast else "no",
                "attention": self.attention,
            },
        }


CASES: tuple[Case, ...] = (
    # LayerNorm with biases, parallel residual, partial rotary: GPT-NeoX.
    Case(model=_PUBLISHED["pythia-1.4b"], seq_len=2048, rows=4),
    Case(model=_PUBLISHED["pythia-1.4b"], seq_len=2048, rows=4, lora_r=16),
    Case(model=_PUBLISHED["pythia-1.4b"], seq_len=2048, rows=8, weights="fp32", recompute="full"),
    Case(model=_PUBLISHED["pythia-1.4b"], seq_len=2048, rows=4, autocast=False),
    # LayerNorm, plain MLP with biases, dropout, 24 heads over 2; shorter than its window.
    Case(model=_PUBLISHED["starcoder2-3b"], seq_len=3072),
    Case(model=_PUBLISHED["starcoder2-3b"], seq_len=2048, rows=8, recompute="full"),
    # LayerNorm, partial rotary.
    Case(model=_PUBLISHED["stablelm-2-1.6b"], seq_len=4096, rows=4, recompute="selective"),
    Case(model=_PUBLISHED["stablelm-2-1.6b"], seq_len=2048, weights="fp32", loss="full_logits"),
    # One LayerNorm for attention and MLP side by side, biases, a biased head.
    Case(model=_PUBLISHED["phi-2"], seq_len=2048, rows=2),
    # Norms after the blocks, over whole queries and keys.
    Case(model=OLMO2, seq_len=4096, weights="fp32"),
    Case(model=OLMO2, seq_len=8192, recompute="selective", lora_r=16),
    # Mixtures of experts.
    Case(model=_PUBLISHED["olmoe-1b-7b"], seq_len=4096),
    Case(model=_PUBLISHED["olmoe-1b-7b"], seq_len=4096, autocast=False),
    Case(model=_PUBLISHED["olmoe-1b-7b"], seq_len=4096, recompute="full", lora_r=16),
    Case(model=_PUBLISHED["granite-3.1-3b-a800m"], seq_len=4096, rows=8, recompute="full"),
    Case(model=_PUBLISHED["granite-3.1-3b-a800m"], seq_len=2048, rows=2, padded=True),
    Case(model=_MIXTRAL, seq_len=4096, recompute="full", lora_r=16),
    Case(model=_MIXTRAL, seq_len=16384, layers=8),
    Case(model=_PUBLISHED["glm-4.5-air"], seq_len=4096, layers=8, lora_r=16),
    Case(model=_PUBLISHED["qwen1.5-moe-a2.7b"], seq_len=16384, recompute="full", lora_r=16),
    # Latent attention, first layer dense.
    Case(model=_DEEPSEEK, seq_len=8192, layers=9),
    Case(model=_DEEPSEEK, seq_len=16384, recompute="full", lora_r=16),
    Case(model=_DEEPSEEK, seq_len=2048, rows=2, recompute="selective", lora_r=16),
    Case(model=_PUBLISHED["deepseek-v3"], seq_len=4096, layers=6, lora_r=16),
    # One norm, parallel blocks, logits scaled, a tied vocabulary of 256,000.
    Case(model=_PUBLISHED["aya-expanse-8b"], seq_len=8192),
    Case(model=_PUBLISHED["aya-expanse-8b"], seq_len=8192, weights="fp32", recompute="full", loss="full_logits"),
    Case(model=_PUBLISHED["command-r7b"], seq_len=32768, recompute="full"),
    Case(model=_PUBLISHED["command-r7b"], seq_len=3072, rows=2, padded=True),
    # Soft caps: eager, or the flash-attn package.
    Case(model=GEMMA2, seq_len=2048, attention="eager", loss="full_logits"),
    Case(model=GEMMA2, seq_len=32768, attention="flash_attention_2", recompute="full"),
    # Fused projections, a window below the length and above it.
    Case(model=PHI3, seq_len=16384, recompute="full"),
    Case(model=PHI3, seq_len=1536, lora_r=16),
    # Four norms a layer.
    Case(model=_GLM4, seq_len=32768, recompute="full"),
    Case(model=_GLM4, seq_len=2048, weights="fp32"),
    # Every fourth layer without rotary positions.
    Case(model=_SMOLLM3, seq_len=16384, recompute="every_2"),
    Case(model=_SMOLLM3, seq_len=1024, rows=2, padded=True, lora_r=16),
    Case(model=_SMOLLM3, seq_len=2048, lora_r=16, autocast=False),
    # Sinks, eager, experts with biases, alternating windows.
    Case(model=GPT_OSS, seq_len=1024, attention="eager", lora_r=16),
    Case(model=GPT_OSS, seq_len=2048, attention="eager", recompute="full", lora_r=16),
    # Scaled residuals and logits.
    Case(model=_GRANITE, seq_len=16384, recompute="full", loss="full_logits"),
    # A window that every layer has, inside and beyond.
    Case(model=_MISTRAL, seq_len=8192, attention="flash_attention_2"),
    Case(model=_MISTRAL, seq_len=16384, recompute="selective"),
    # Gated linear attention, every fourth layer full.
    Case(model=_QWEN35, seq_len=2048),
    Case(model=_QWEN35, seq_len=4096, recompute="full"),
    Case(model=_QWEN35, seq_len=2048, autocast=False),
    Case(model=_QWEN35, seq_len=1024, rows=2, padded=True),
    Case(model=_QWEN36, seq_len=1024, layers=8, lora_r=16),
    Case(model=_QWEN36, seq_len=2048, layers=8, autocast=False),
    # Families that are refused today: what a trace would say of them.
    Case(model=_PUBLISHED["opt-1.3b"], seq_len=2048, rows=2),
    Case(model=_PUBLISHED["nemotron-mini-4b"], seq_len=4096),
    Case(model=_PUBLISHED["exaone-4-32b"], seq_len=8192, layers=8, recompute="full"),
    Case(model=_PUBLISHED["falcon-h1"], seq_len=4096, layers=6),
    Case(model=_PUBLISHED["lfm2-1.2b"], seq_len=8192),
    Case(model=_PUBLISHED["apertus-8b"], seq_len=16384, recompute="selective"),
    Case(model=_PUBLISHED["llama-4-scout"], seq_len=4096, layers=4, loss="full_logits"),
    Case(model=_QWEN3_NEXT, seq_len=2048, layers=8, recompute="full", lora_r=16),
)
