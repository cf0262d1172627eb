"""What a precision route adds to a run folder: lines of train.py, keys of accelerate.yaml, the reference layer."""

from __future__ import annotations

import json
from importlib.resources import files

from launcher.errors import UsageError
from launcher.run_text.run_spec import RunSpec
from planner.choice import FSDP2
from planner.precision.routes import Asked, asked_route
from profiles.routes import PRODUCTS, Route

RECIPE_FILE = "route.json"
LAYER_FILE = "route_linear.py"
_BACKENDS = {"fp8-te-delayed": "TE", "fp8-ao-tensorwise": "AO"}
"""Route -> accelerate's backend for it."""

_BODY = '''def in_body(module, name):
    """Linears of the decoder blocks{but}; head, embedding and routers stay in bf16."""
    parts = name.split(".")
    blocks = [int(part) for part in parts if part.isdigit()]
    if type(module) is not torch.nn.Linear or not blocks or parts[-1] in ("gate", "router"):
        return False
    return module.in_features % {features} == 0 and module.out_features % {features} == 0{last}
'''
_FLOAT8 = '''def convert(model):
    """Precision route {route}: torchao's recipe {recipe} in every linear of the body."""
    config = float8.Float8LinearConfig.from_recipe_name("{recipe}")
    float8.convert_to_float8_training(model, config=config, module_filter_fn=in_body)
    layers = [module for module in model.modules() if type(module).__name__ == "Float8Linear"]
{compiled}    return len(layers)
'''
_COMPILED = """    for layer in layers:
        layer.compile()  # eager casts are a dozen kernels a layer and cost more than FP8 saves
"""
_MX = '''def convert(model):
    """Precision route {route}: torchao's {recipe} in the place of every linear of the body, weights and all."""
    names = [name for name, module in model.named_modules() if in_body(module, name)]
    for name in names:
        parent, _, last = name.rpartition(".")
        old = model.get_submodule(name)
        new = {recipe}(old.in_features, old.out_features, bias=old.bias is not None, device="meta")
        new.weight, new.bias = old.weight, old.bias
        setattr(model.get_submodule(parent), last, new)
    return len(names)
'''
_TE = '''RECIPE = recipe.{recipe}()


class LowLinear(te.Linear):
    """A linear under an autocast of its own, so that a recompute of its layer is in low precision too."""

    def forward(self, *args, **kwargs):
        # Renamed in newer releases.
        low = te.autocast(recipe=RECIPE) if hasattr(te, "autocast") else te.fp8_autocast(fp8_recipe=RECIPE)
        with low:
            return super().forward(*args, **kwargs)


def drop_state(module, state, prefix, metadata):
    """The recipe keeps nothing between steps, so a checkpoint holds weights alone and loads anywhere."""
    state.pop(prefix + "_extra_state", None)


def convert(model):
    """Precision route {route}: Transformer Engine's {recipe} in every linear of the body."""
    names = [name for name, module in model.named_modules() if in_body(module, name)]
    for name in names:
        parent, _, last = name.rpartition(".")
        old = model.get_submodule(name)
        dtype, device = old.weight.dtype, old.weight.device
        has_bias = old.bias is not None
        new = LowLinear(old.in_features, old.out_features, bias=has_bias, params_dtype=dtype, device=device)
        with torch.no_grad():
            new.weight.copy_(old.weight)
            if has_bias:
                new.bias.copy_(old.bias)
        new._register_state_dict_hook(drop_state)
        setattr(model.get_submodule(parent), last, new)
    return len(names)
'''
_EMULATED = '''def convert(model):
    """Precision route {route} by the reference layer beside this script: its numerics, slower than bf16."""
    with open("{file}") as recipe:
        return len(route_linear.convert(model, json.load(recipe), seed=CONFIG.get("seed", 42)))
'''


def asked_by(spec: RunSpec) -> Asked | None:
    """The route of the chosen plan; None for bf16.

    Raises:
        UsageError: there is no such route.
    """
    try:
        return asked_route({"precision": spec.choice.precision})
    except LookupError as error:
        raise UsageError(str(error)) from None


def refuse_unwritten(spec: RunSpec) -> None:
    """Refuse a route for which there is no script.

    Raises:
        UsageError: nobody's package could run it.
    """
    asked = asked_by(spec)
    if asked is not None and not asked.emulated and asked.route.launch == "none":
        route = asked.route.id
        raise UsageError(f"precision route {route} has no TRL script; pin precision={route}:emulated or bf16")


def by_accelerate(spec: RunSpec) -> bool:
    """Whether accelerate converts the model when it prepares it."""
    asked = asked_by(spec)
    return asked is not None and not asked.emulated and asked.route.launch == "accelerate"


def converts_in_script(spec: RunSpec) -> bool:
    """Whether train.py converts the model."""
    return asked_by(spec) is not None and not by_accelerate(spec)


def accelerate_keys(spec: RunSpec) -> dict[str, object]:
    """Keys of accelerate.yaml in the place of ``mixed_precision``; empty where accelerate converts nothing."""
    if not by_accelerate(spec):
        return {}
    backend = _BACKENDS[spec.choice.precision]
    config: dict[str, object] = {"backend": backend}
    if backend == "TE":
        config |= {"fp8_format": "HYBRID", "amax_history_len": 1024, "amax_compute_algo": "max"}
    else:
        # Widths are multiples of 16 already, and gathers stay in bf16.
        config |= {"pad_inner_dim": False, "enable_fsdp_float8_all_gather": False}
    return {"mixed_precision": "fp8", "fp8_config": config}


def loads_everywhere(spec: RunSpec) -> bool:
    """Every process under FSDP2 loads its weights itself, in place of the first that hands them out.

    accelerate refuses that for torchao (accelerator.py @1.15.0), and goes through state dicts by position, in which
    Transformer Engine's modules have entries of their own (utils/fsdp_utils.py: fsdp2_load_full_state_dict).
    """
    asked = asked_by(spec)
    return asked is not None and not asked.emulated and spec.choice.sharding in FSDP2


def padding_of(spec: RunSpec) -> int | None:
    """Tokens that rows are padded to a multiple of; None where any number will do."""
    asked = asked_by(spec)
    return asked.route.tokens if asked is not None and not asked.emulated and asked.route.tokens > 1 else None


def script_imports(spec: RunSpec) -> list[str]:
    """Import lines of train.py for the conversion."""
    asked = asked_by(spec)
    if asked is None or by_accelerate(spec):
        return []
    if asked.emulated:
        return ["import route_linear"]
    return {
        "torchao-float8": ["import torch", "from torchao import float8"],
        "torchao-mx": [
            "import torch",
            "from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear",
        ],
        "te": [
            "import torch",
            "import transformer_engine.pytorch as te",
            "from transformer_engine.common import recipe",
        ],
    }[asked.route.launch]


def script_code(spec: RunSpec) -> str:
    """``convert(model)`` for train.py, with what it needs; empty where nothing is converted there."""
    asked = asked_by(spec)
    if asked is None or by_accelerate(spec):
        return ""
    route = asked.route
    if asked.emulated:
        return _EMULATED.format(route=route.id, file=RECIPE_FILE).rstrip()
    body = _body(route, spec.architecture.num_layers)
    template = {"torchao-float8": _FLOAT8, "torchao-mx": _MX, "te": _TE}[route.launch]
    compiled = "" if spec.on_cpu else _COMPILED
    return f"{body}\n\n{template.format(route=route.id, recipe=route.recipe, compiled=compiled)}".rstrip()


def _body(route: Route, num_layers: int) -> str:
    last = num_layers - route.keep_last
    but, kept = (f" but the last {route.keep_last}", f" and blocks[0] < {last}") if route.keep_last else ("", "")
    return _BODY.format(features=route.features, but=but, last=kept)


def route_files(spec: RunSpec) -> dict[str, str]:
    """Files beside train.py: how to validate the route, and for an emulated one the layer and its recipe."""
    asked = asked_by(spec)
    if asked is None:
        return {}
    from launcher.run_text.route_validation import VALIDATION_FILE, validation_plan

    found = {VALIDATION_FILE: validation_plan(spec, asked)}
    if asked.emulated:
        found[LAYER_FILE] = files("launcher").joinpath("children", LAYER_FILE).read_text(encoding="utf-8")
        found[RECIPE_FILE] = json.dumps(recipe_json(asked.route), indent=1) + "\n"
    return found


def recipe_json(route: Route) -> dict[str, object]:
    """A route as ``launcher/children/route_linear.py`` reads it."""
    operands = {product: [operand.to_json() for operand in route.operands[product]] for product in PRODUCTS}
    return {"route": route.id, **operands, "keep_last": route.keep_last, "features": route.features}
