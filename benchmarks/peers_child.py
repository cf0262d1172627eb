"""One peer's answers to recorded runs, asked in the peer's own Python: `python peers_child.py NAME CASES ANSWERS`.

CASES and ANSWERS are JSON files: a list of cases (`Case`), and row id -> {"bytes", "fits"} or {"cannot": why}.

Every peer is asked by the best route that it documents and gets the model as `config.json`, never over the network. A
peer that names a context, an allocator's share or a margin apart from tensors is read without them for a run that
measured tensors, and without the margin and the context for one that measured reserved memory. `fits` is the peer's
own verdict where it gives one, else its whole number against the card.
"""

from __future__ import annotations

import contextlib
import json
import sys
from argparse import Namespace
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from peers_cases import (
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

GIB, MIB = 2**30, 2**20


def answer(tensors: float, *, fits: bool) -> dict[str, Any]:
    """A row of the results."""
    return {"bytes": round(tensors), "fits": bool(fits)}


def ask_accelerate() -> Callable[[Case], dict[str, Any]]:
    from accelerate.commands import estimate

    estimate.verify_on_hub = lambda *_: SimpleNamespace(config={}, library_name="transformers")

    def ask(case: Case) -> dict[str, Any]:
        args = Namespace(**state_accelerate(case), library_name="transformers", trust_remote_code=False)
        ((_, _, _, training),) = estimate.gather_data(args)
        most = max(training.values())
        return answer(most, fits=most <= case["card_bytes"])

    return ask


@cache
def counted_parameters(folder: str) -> tuple[int, int]:
    """All parameters, and those of the largest module, as DeepSpeed's own counting defines them."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    model.tie_weights()
    largest = max(sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules())
    return sum(p.numel() for p in model.parameters()), largest


def ask_deepspeed() -> Callable[[Case], dict[str, Any]]:
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs

    def ask(case: Case) -> dict[str, Any]:
        _, on_gpu, _ = estimate_zero3_model_states_mem_needs(
            *counted_parameters(case["folder"]), **state_deepspeed(case)
        )
        return answer(on_gpu, fits=on_gpu <= case["card_bytes"])

    return ask


def ask_llm_analysis() -> Callable[[Case], dict[str, Any]]:
    import logging

    from llm_analysis import analysis, config

    logging.getLogger("llm_analysis").setLevel(logging.ERROR)
    analysis.logger.setLevel(logging.ERROR)

    def ask(case: Case) -> dict[str, Any]:
        stated = state_llm_analysis(case)
        training = stated["training"]
        training["activation_recomputation"] = analysis.ActivationRecomputation(training["activation_recomputation"])
        training["ds_zero"] = analysis.DSZeRO(training["ds_zero"])
        summary = analysis.LLMAnalysis(
            config.ModelConfig(**stated["model"]),
            config.get_gpu_config_by_name(stated["gpu"]),
            config.get_dtype_config_by_name(stated["dtype"]),
            config.ParallelismConfig(dp_size=stated["dp_size"]),
        ).training(**training)
        return answer(summary["(weight+op_state+grad+act)_memory_per_gpu"], fits=summary["memory_left_per_gpu"] >= 0)

    return ask


def ask_fitcheck() -> Callable[[Case], dict[str, Any]]:
    from fitcheck import config_parser, estimator
    from fitcheck.gpu_db import get_gpu, gpu_key_for
    from fitcheck.memory import lora
    from fitcheck.overhead_db import get_overhead_profile

    def ask(case: Case) -> dict[str, Any]:
        config_parser.hf_hub_download = lambda **_: str(Path(case["folder"], "config.json"))
        config_parser._reported_param_count = lambda *_: case["params"]
        stated = state_fitcheck(case)
        if targets := stated.get("lora_targets"):
            stated["lora_targets"] = list(getattr(lora, targets))
        gpu = get_gpu({"A100-80GB": "a100-80", "H100-80GB": "h100-80", "L40S": "l40s"}[case["card"]])
        try:
            model = config_parser.fetch_model_config(case["model"])
        except config_parser.UnsupportedModelError as error:
            raise CannotError("refuses: its count of parameters is over 2 % off") from error
        report = estimator.estimate(model, estimator.TrainingConfig(**stated), gpu)
        profile = get_overhead_profile(gpu_key_for(gpu), True, stated["quantization"])
        not_seen = profile.base_context_mib if case["metric"] == "max_reserved" else report.overhead_mib
        return answer((report.total_mib - not_seen) * MIB, fits=report.fits)

    return ask


def ask_canifinetune() -> Callable[[Case], dict[str, Any]]:
    from canifinetune.estimator import EstimateRequest, estimate

    def ask(case: Case) -> dict[str, Any]:
        said = estimate(EstimateRequest(**state_canifinetune(case)))
        parts = said.memory
        seen = parts.total_estimated_gb - parts.safety_margin_gb
        if case["metric"] != "max_reserved":
            seen -= parts.cuda_overhead_gb
        return answer(seen * GIB, fits=said.feasible != "no")

    return ask


def ask_ftuneai() -> Callable[[Case], dict[str, Any]]:
    from ftuneai import Estimator, hub, loader
    from ftuneai.core.memory import CUDA_OVERHEAD_FRACTION

    table = set(loader.load_models())

    def ask(case: Case) -> dict[str, Any]:
        hub.fetch_model_config = lambda _: json.loads(Path(case["folder"], "config.json").read_text(encoding="utf-8"))
        if case["model"] not in table:
            loader.load_models().pop(case["model"], None)
        try:
            estimator = Estimator(**state_ftuneai(case))
        except ValueError as error:
            if "max_seq_length" not in str(error):
                raise
            raise CannotError("refuses lengths beyond max_position_embeddings") from error
        total = estimator.estimate_memory().total_gb
        if case["card"] in loader.load_gpus():
            fits = estimator.check_gpu_fit([case["card"]])[0].fits
        else:
            fits = total * GIB <= case["card_bytes"]
        # Its overhead is one share for the context and the allocator, so reserved memory is read with all of it.
        seen = total if case["metric"] == "max_reserved" else total / (1 + CUDA_OVERHEAD_FRACTION)
        return answer(seen * GIB, fits=fits)

    return ask


def ask_hf_vram_calc() -> Callable[[Case], dict[str, Any]]:
    from hf_vram_calc.calculator import LlmodelMemoryResult, ParameterCalculator, VRAMCalculator
    from hf_vram_calc.config import ConfigManager
    from hf_vram_calc.parser import ConfigParser

    manager = ConfigManager()
    calculator = VRAMCalculator(manager)
    card_gib = {entry[0].replace(" ", "-"): entry[2] for entry in manager.get_gpu_types()}

    @cache
    def counted(model: str, folder: str) -> tuple[Any, int]:
        config = ConfigParser.load_and_parse_config(model, folder)
        return config, ParameterCalculator.calculate_transformer_params(config)

    def ask(case: Case) -> dict[str, Any]:
        result = LlmodelMemoryResult(**state_hf_vram_calc(case))
        result.calculate_all(*counted(case["model"], case["folder"]), calculator)
        total = result.training_memory if case["method"] == "full" else result.lora_memory
        return answer(total * GIB, fits=total <= card_gib[case["card"]])

    return ask


ASK = {
    "accelerate": ask_accelerate,
    "deepspeed": ask_deepspeed,
    "llm-analysis": ask_llm_analysis,
    "fitcheck-llm": ask_fitcheck,
    "canifinetune": ask_canifinetune,
    "ftuneai": ask_ftuneai,
    "hf-vram-calc": ask_hf_vram_calc,
}


def answers_of(name: str, cases: list[Case]) -> dict[str, Any]:
    """Every case's answer; a case on which the peer fails says with what."""
    ask = ASK[name]()
    out: dict[str, Any] = {}
    for case in cases:
        try:
            check_reach(case, REACH[name])
            out[case["id"]] = ask(case)
        except CannotError as error:
            out[case["id"]] = {"cannot": str(error)}
        except Exception as error:
            out[case["id"]] = {"cannot": f"fails: {type(error).__name__}"}
            print(f"{name}, {case['id']}: {type(error).__name__}: {error}", file=sys.stderr)
    return out


def main() -> None:
    name, cases, answers = sys.argv[1:]
    # Some peers narrate on stdout.
    with contextlib.redirect_stdout(sys.stderr):
        found = answers_of(name, json.loads(Path(cases).read_text(encoding="utf-8")))
    document = {"version": version(name), "rows": found}
    Path(answers).write_text(json.dumps(document), encoding="utf-8")


if __name__ == "__main__":
    main()
