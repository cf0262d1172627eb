"""Whole models on fake tensors: exact peaks of one training step, to hold composed coefficients against.

Shares nothing with launcher/children: the whole model with its head and transformers' own loss, plain FakeTensorMode,
the CPU's attention kernels. Runs in the Python that has torch; stdin holds ``{"requests": [...], "scenarios": [...]}``,
where requests go to the child under test in the same process, which saves loading torch twice.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

from live_storages import LiveStorages

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
CHILDREN = Path(__file__).resolve().parents[2] / "launcher" / "children"


def watching(peak: LiveStorages) -> Any:
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_iter

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            import torch

            out = func(*args, **(kwargs or {}))
            for value in tree_iter(out):
                if isinstance(value, torch.Tensor):
                    peak.see(value)
            return out

    return Watch()


def real_model(scenario: dict[str, Any]) -> Any:
    """The class that TRL would train, on the meta device, wrapped as it would be."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    values = dict(scenario["config"])
    config = CONFIG_MAPPING[values["model_type"]].from_dict(values)
    dtype = torch.float32 if scenario["weights"] == "fp32" else torch.bfloat16
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=scenario["attention"], dtype=dtype)
        model.train()
        if scenario["recompute"] != "none" and scenario["recompute"] != "selective":
            every = 2 if scenario["recompute"] == "every_2" else 1
            model.activation_checkpointing_enable({"use_reentrant": False}, every_n_layers=every)
        if scenario["recompute"] == "selective":
            from trl.models.selective_activation_checkpointing import enable_selective_activation_checkpointing

            enable_selective_activation_checkpointing(model)
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if scenario["lora_r"]:
            from peft import LoraConfig, get_peft_model

            wanted = LoraConfig(r=scenario["lora_r"], target_modules="all-linear", task_type="CAUSAL_LM")
            model = get_peft_model(model, wanted)
            if scenario["recompute"] != "none":
                model.enable_input_require_grads()
    return model


def materialise(model: Any) -> None:
    """Fake tensors in the place of meta ones; shared ones stay shared."""
    import torch

    made: dict[int, Any] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    fake = torch.zeros(tensor.shape, dtype=tensor.dtype)
                    is_parameter = isinstance(tensor, torch.nn.Parameter)
                    made[id(tensor)] = torch.nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
                table[name] = made[id(tensor)]


def peak_of(scenario: dict[str, Any]) -> int:
    """Most bytes live in a step that finds AdamW's states in place, as every one but the first."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import masking_utils

    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    model = real_model(scenario)
    peak = LiveStorages()
    with FakeTensorMode(allow_non_fake_inputs=True), watching(peak):
        materialise(model)
        states = [torch.zeros_like(p) for p in model.parameters() if p.requires_grad for _ in range(2)]
        peak.highest = peak.live
        ids = torch.zeros(scenario["rows"], scenario["seq_len"], dtype=torch.long)
        batch = {"input_ids": ids, "labels": torch.zeros_like(ids)}
        if scenario["padded"]:
            batch["attention_mask"] = torch.ones_like(ids)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=scenario.get("autocast", True)):
            loss = model(**batch, use_cache=False).loss
        loss.backward()
        del states
    return peak.highest


def main() -> None:
    asked = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        sys.path.insert(0, str(CHILDREN))
        import trace_model

        # Whole models first: the child under test must not have touched transformers yet.
        peaks = [peak_of(scenario) for scenario in asked["scenarios"]]
        answers = [trace_model.trace(request) for request in asked["requests"]]
    print(json.dumps({"peaks": peaks, "answers": answers}))


if __name__ == "__main__":
    main()
