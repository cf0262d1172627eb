"""Runs on a precision route: what is written for each, that it converts what it says, and one that trains."""

from __future__ import annotations

import ast
import contextlib
import json
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.errors import UsageError
from launcher.run_text.route_script import recipe_json
from launcher.run_text.run_files import render_run
from planner.machine import Machine
from profiles.routes import find_route, load_routes
from tests.launcher.run_specs import cpu, gpus, make_spec
from tests.launcher.test_launch_command import environment
from tests.launcher.tiny_models import EXAMPLES, tiny_model

HALF = {"weights": "bf16", "mixed_precision": "no"}
WRITTEN = [route.id for route in load_routes() if route.status == "with"]


def written(route: str, machine: Machine | None = None, **choice: Any) -> dict[str, str]:
    knobs = {"precision": route, "recompute": "none", "micro_batch": 8, **choice}
    return render_run(make_spec(choice=knobs, machine=machine))


def settings(script: str) -> dict[str, Any]:
    """CONFIG of a script, as it stands."""
    for node in ast.parse(script).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "CONFIG":
            assert isinstance(node.value, ast.Call)
            return {str(word.arg): ast.literal_eval(word.value) for word in node.value.keywords}
    raise AssertionError("no CONFIG")


@pytest.mark.parametrize("route", WRITTEN)
def test_every_route_that_packages_run_is_written(route: str) -> None:
    found = find_route(route)
    files = written(route, **(HALF if found.needs_half_weights else {}))
    script = files["train.py"]
    compile(script, "train.py", "exec")
    config, launch = settings(script), yaml.safe_load(files["accelerate.yaml"])
    assert config["pad_to_multiple_of"] == found.tokens
    # Either accelerate converts, and TRL's own bf16 must not take its place, or the script does.
    if found.launch == "accelerate":
        assert launch["mixed_precision"] == "fp8"
        assert config["bf16"] is False
        assert "callbacks=[metrics, RouteCheck()]" in script
        assert "convert(trainer.model)" not in script
    else:
        assert launch["mixed_precision"] != "fp8"
        assert "fp8_config" not in launch
        assert "converted = convert(trainer.model)" in script
        assert found.recipe in script
    assert "validation.md" in files
    assert "route_linear.py" not in files


def test_accelerate_is_told_by_its_own_config() -> None:
    assert yaml.safe_load(written("fp8-te-delayed")["accelerate.yaml"])["fp8_config"] == {
        "backend": "TE",
        "fp8_format": "HYBRID",
        "amax_history_len": 1024,
        "amax_compute_algo": "max",
    }
    sharded = written("fp8-ao-tensorwise", gpus(8), sharding="fsdp", dp_shard=8, micro_batch=1)
    launch = yaml.safe_load(sharded["accelerate.yaml"])
    assert launch["fp8_config"]["backend"] == "AO"
    # accelerate refuses torchao beside it, and would trip over Transformer Engine's states.
    swapped = written("nvfp4-te", gpus(8), sharding="fsdp", dp_shard=8, micro_batch=1)
    assert yaml.safe_load(swapped["accelerate.yaml"])["fsdp_config"]["fsdp_cpu_ram_efficient_loading"] is False
    assert launch["fsdp_config"]["fsdp_cpu_ram_efficient_loading"] is False
    plain = written("bf16", gpus(8), sharding="fsdp", dp_shard=8, micro_batch=1)
    assert yaml.safe_load(plain["accelerate.yaml"])["fsdp_config"]["fsdp_cpu_ram_efficient_loading"] is True
    assert "validation.md" not in plain


def test_casts_are_compiled_where_there_is_a_gpu() -> None:
    assert "layer.compile()" in written("fp8-ao-rowwise")["train.py"]
    assert "layer.compile()" not in written("fp8-ao-rowwise", cpu())["train.py"]


def test_a_route_without_kernels_is_refused_and_its_emulation_is_not() -> None:
    with pytest.raises(UsageError, match=r"mxfp4-sr has no TRL script; pin precision=mxfp4-sr:emulated or bf16"):
        written("mxfp4-sr")
    files = written("mxfp4-sr:emulated")
    assert json.loads(files["route.json"]) == recipe_json(find_route("mxfp4-sr"))
    assert files["route_linear.py"] == (tiny_root() / "route_linear.py").read_text(encoding="utf-8")
    assert "pad_to_multiple_of" not in settings(files["train.py"])


def tiny_root() -> Path:
    return Path(__file__).resolve().parents[2] / "launcher" / "children"


def test_the_validation_plan_asks_for_three_checks_of_one_whole_route() -> None:
    text = written("nvfp4-te-last4")["validation.md"]
    for heading in ("## 1. Throughput", "## 2. Held-out loss", "## 3. Downstream tasks", "## Accept when"):
        assert heading in text
    assert "--pin precision=bf16 -o ../nvfp4-te-last4-twin" in text
    assert "| Llama-3-8B, sequences of 8,192, 160 B tokens, 32 x GB200 | 27,078 | +0.87 %" in text
    assert "https://arxiv.org/abs/2610.00053" in text
    assert "Nothing is published" in written("fp8-ao-rowwise-gw-hp")["validation.md"]
    assert "speed says nothing" in written("mxfp4-sr:emulated")["validation.md"]


def convert_of(script: str) -> Any:
    """The script's ``convert`` and what it is made of, without TRL and the run."""
    packages = ("torch", "torchao", "transformer_engine")
    kept: list[ast.stmt] = []
    for node in ast.parse(script).body:
        names = {alias.name for alias in node.names} if isinstance(node, ast.Import) else set[str]()
        module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        wanted = any(name.partition(".")[0] in packages for name in (*names, module))
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            wanted = node.name in ("in_body", "convert", "drop_state", "LowLinear")
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            wanted = node.targets[0].id == "RECIPE"
        kept += [node] if wanted else []
    space: dict[str, Any] = {}
    exec(compile(ast.Module(kept, []), "train.py", "exec"), space)
    return space["convert"]


@contextlib.contextmanager
def transformer_engine(entered: list[object]) -> Iterator[None]:
    """Stands in for Transformer Engine, which runs on a GPU alone: its names, and torch's own linear."""
    import torch

    class Linear(torch.nn.Linear):
        def __init__(self, inputs: int, outputs: int, bias: bool, params_dtype: Any, device: Any) -> None:
            super().__init__(inputs, outputs, bias, dtype=params_dtype, device=device)

        def get_extra_state(self) -> Any:
            return torch.empty(0)

    @contextlib.contextmanager
    def autocast(recipe: object) -> Iterator[None]:
        entered.append(recipe)
        yield

    top, engine, common = (types.ModuleType(name) for name in ("transformer_engine", "pytorch", "common"))
    engine.Linear, engine.autocast = Linear, autocast  # type: ignore[attr-defined]
    common.recipe = types.SimpleNamespace(NVFP4BlockScaling=lambda: "NVFP4")  # type: ignore[attr-defined]
    names = {
        "transformer_engine": top,
        "transformer_engine.pytorch": engine,
        "transformer_engine.common": common,
    }
    sys.modules.update(names)
    try:
        top.pytorch, top.common = engine, common  # type: ignore[attr-defined]
        yield
    finally:
        for name in names:
            del sys.modules[name]


@pytest.mark.stack
@pytest.mark.filterwarnings("ignore")
def test_transformer_engines_linears_keep_weights_and_run_under_their_recipe() -> None:
    """Two blocks of Qwen3's class, whose last stays in bf16 for this test; a recompute enters the autocast as well."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    ids = torch.arange(32)[None]
    before = model(ids).logits
    entered: list[object] = []
    with transformer_engine(entered):
        script = written("nvfp4-te-last4")["train.py"]
        # Qwen3-8B has 36 blocks, of which the last four stay: of six blocks here that is the first two.
        assert "blocks[0] < 32" in script
        convert = convert_of(script.replace("blocks[0] < 32", "blocks[0] < 2"))
        names = set(model.state_dict())
        assert convert(model) == 2 * 7
        assert set(model.state_dict()) == names  # of weights alone, so that anybody can load it
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    out = model(ids, labels=ids)
    torch.testing.assert_close(out.logits, before)
    assert entered == ["NVFP4"] * 14
    out.loss.backward()
    # Each of the two layers once more, but for the last product, which no recompute needs.
    assert len(entered) >= 14 + 2 * 6
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.stack
@pytest.mark.filterwarnings("ignore")
def test_torchaos_recipes_convert_the_body_alone(tmp_path: Path) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    pytest.importorskip("torchao")
    config = Qwen3Config(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    for route, choice in (("fp8-ao-rowwise", {}), ("mxfp8-ao", HALF)):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
        convert = convert_of(written(route, cpu() if route == "fp8-ao-rowwise" else None, **choice)["train.py"])
        assert convert(model) == 14
        assert type(model.lm_head) is torch.nn.Linear
        layer = model.model.layers[0].mlp.up_proj
        assert type(layer).__name__ == {"fp8-ao-rowwise": "Float8Linear", "mxfp8-ao": "MXFP8Linear"}[route]
        # Weights stay plain parameters, so a checkpoint is anybody's.
        assert type(layer.weight) is torch.nn.Parameter
        if route == "mxfp8-ao":
            from torchao.quantization.quantize_.common import KernelPreference

            for module in model.modules():
                if hasattr(module, "kernel_preference"):
                    module.kernel_preference = KernelPreference.EMULATED
        ids = torch.arange(32)[None]
        loss = model(ids, labels=ids).loss
        loss.backward()
        assert layer.weight.grad.abs().sum() > 0
        model.save_pretrained(tmp_path / route)
        again = Qwen3ForCausalLM.from_pretrained(tmp_path / route, dtype=torch.bfloat16)
        assert torch.equal(again.model.layers[0].mlp.up_proj.weight, layer.weight)


@pytest.mark.launch
def test_a_route_of_four_bits_trains_on_a_cpu(tmp_path: Path) -> None:
    """MXFP4 with stochastic rounding and a Hadamard of 32, from the command line to the outcome."""
    folder = tmp_path / "run"
    words = [
        "launch", str(tiny_model()), "--dataset", str(EXAMPLES / "train.jsonl"), "--machine", "cpu", "--no-check",
        "--seq-len", "64", "--global-batch", "2", "--pin", "precision=mxfp4-sr-h32:emulated", "-o", str(folder),
        "--trl", "max_steps=4", "--trl", "save_strategy=no", "--trl", "learning_rate=3e-3",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "tui", *words], cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    outcome = json.loads((folder / "outcome.json").read_text(encoding="utf-8"))
    assert outcome["kind"] == "done"
    assert "precision route mxfp4-sr-h32:emulated: 14 linears converted" in (folder / "log.txt").read_text()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    losses = [row["loss"] for row in rows if row["event"] == "step"]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
