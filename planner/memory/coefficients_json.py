"""Coefficients as plain JSON, ``trlfit.coefficients/1``: one document a model, one entry a set of options.

A line is ``[per token, constant, per token pair]`` with trailing zeros left out; with adapters two more numbers say
what each rank above the traced one adds per token and at all. A list of lines is the highest of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

from planner.architecture import Architecture
from planner.memory.coefficients import (
    Affine,
    Bytes,
    Coefficients,
    Highest,
    LayerBytes,
    LayerWork,
    ModeBytes,
    OperatorWork,
    Windowed,
)
from planner.memory.formula import ActivationOptions, formula_coefficients

SCHEMA = "trlfit.coefficients/1"
MODES = ("none", "full", "selective")
TRACED_ERROR = 0.03
"""Half-width said for this tier, as a share of activations, working set and loss: composed from traces of few layers,
the peaks of 56 whole models of 31 families are off by 0.2 % at worst (tests/planner/test_more_architectures.py), but a
card's kernels have buffers of their own that no trace sees."""

RMS_NORMS = frozenset(
    {
        "llama", "internlm3", "exaone", "mistral", "ministral3", "qwen2", "qwen3", "qwen3_vl_text", "gemma", "gemma2",
        "gemma3_text", "phi3", "smollm3", "olmo", "olmo2", "olmo3", "granite", "glm", "glm4", "cohere", "cohere2",
        "helium", "seed_oss", "ernie4_5",
    }
)  # fmt: skip
"""Dense families whose norms compute in fp32 and hand on the dtype of their input, whatever autocast does."""
ONE_KERNEL = frozenset({"silu", "swish", "gelu", "gelu_pytorch_tanh"})
"""Activations that keep their input and nothing else. Others of transformers' are written out: ``gelu_new`` and
``relu2`` take powers, which autocast widens."""

_DROPOUTS = ("attention_dropout", "resid_pdrop", "residual_dropout", "hidden_dropout", "embd_pdrop", "clip_qkv")
"""Keys of config.json beyond sizes that add operators to a layer when they are not zero or null."""


class BadDocument(ValueError):
    """A document that is no ``trlfit.coefficients/1``; the message says what is wrong."""


def shape_hash(architecture: Architecture) -> str:
    """What decides the layers' bytes, hashed: equal for every depth, vocabulary and name of the same layers."""
    values, activation = _text_values(architecture), activation_of(architecture)
    facts = {
        "model_type": architecture.model_type,
        "hidden": architecture.hidden,
        "kinds": [asdict(kind) for kind in architecture.kinds],
        "rotary": architecture.partial_rotary_factor,
        "activation": "" if activation in ONE_KERNEL else activation,
        "extras": {key: values[key] for key in _DROPOUTS if values.get(key)},
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _text_values(architecture: Architecture) -> Mapping[str, object]:
    text = architecture.config.get("text_config")
    return cast("Mapping[str, object]", text if isinstance(text, dict) else architecture.config)


def activation_of(architecture: Architecture) -> str:
    """The name that config.json gives the MLP's activation, ``silu`` where it gives none."""
    values = _text_values(architecture)
    return str(values.get("hidden_act") or values.get("hidden_activation") or "silu")


def window_of(architecture: Architecture) -> int:
    """The widest window that a layer looks back over, 0 where none does."""
    return max((kind.window or 0 for kind in architecture.kinds), default=0)


def option_key(architecture: Architecture, options: ActivationOptions) -> str:
    """The options that change anything for ``architecture``, as words: ``bf16/lora-fp32:all-linear/sdpa/masked``.

    The rank of adapters is not among them: everything is affine in it.
    """
    residual = {4: "fp32", 2: "bf16"}[options.residual_bytes]
    compute = {4: "", 2: "+bf16"}[options.compute_bytes] if options.residual_bytes == 4 else ""
    words = [residual + compute]
    if options.lora_targets is None:
        words.append("full" if options.trains_base else "frozen")
    else:
        targets = options.lora_targets
        named = targets if isinstance(targets, str) else ",".join(targets)
        words.append(f"lora-{'fp32' if options.adapter_bytes == 4 else 'bf16'}:{named}")
        words += ["dropout"] if options.lora_dropout else []
        words += ["quantised"] if options.quantised else []
    masked, widens = is_masked(options), autocast_widens(architecture, options)
    words += ["no-autocast"] if widens and not options.autocast else []
    words.append("sdpa" if runs_flash(architecture, options) else options.attention)
    words += ["masked"] if masked else []
    words += ["cpu"] if runs_on_cpu(architecture, options) else []
    return "/".join(words)


def runs_on_cpu(architecture: Architecture, options: ActivationOptions) -> bool:
    """Whether a CPU's attention keeps other tensors than a GPU's; else both are priced as on a GPU."""
    return options.attention == "sdpa" and not options.mask_bias and not runs_flash(architecture, options)


def autocast_widens(architecture: Architecture, options: ActivationOptions) -> bool:
    """Whether CUDA's autocast widens more than RMSNorm does by itself, so that a trace without it differs.

    It runs LayerNorm, powers, the sum over a token's experts and what decays in linear attention in fp32. Adapters in
    fp32 beside a low-precision base multiply in fp32 without it.
    """
    if options.compute_bytes != 2 or options.residual_bytes != 2:
        return False
    if options.lora_targets is not None and options.adapter_bytes == 4:
        return True
    mixed = any(kind.experts is not None or kind.attention == "linear" for kind in architecture.kinds)
    return mixed or architecture.model_type not in RMS_NORMS or activation_of(architecture) not in ONE_KERNEL


def runs_flash(architecture: Architecture, options: ActivationOptions) -> bool:
    """Whether SDPA and the flash-attn package come to the same: one causal kernel for every layer, no mask made."""
    plain = all(
        not (kind.attention_softcap or kind.attention_sinks)
        and (kind.attention == "linear" or kind.head_dim == (kind.value_head_dim or kind.head_dim) <= 256)
        for kind in architecture.kinds
    )
    fused = options.attention == "flash_attention_2" or (options.attention == "sdpa" and not options.masked)
    return plain and fused and window_of(architecture) == 0 and options.compute_bytes == 2


def is_masked(options: ActivationOptions) -> bool:
    """Whether padding changes what is allocated: flash attention unpads, eager attention makes a mask in any case."""
    return options.masked and options.attention == "sdpa"


@dataclass(frozen=True, slots=True, kw_only=True)
class CoefficientDocument:
    """Everything that was traced of one model with one set of versions."""

    model: str
    shape: str
    """``shape_hash`` of the architecture."""
    kinds: tuple[str, ...]
    versions: Mapping[str, str]
    rank: int
    """The adapter rank that lines hold for as they stand."""
    window: int
    sets: Mapping[str, Mapping[str, Any]]
    """``option_key`` -> what was traced, as plain JSON; read with ``coefficients_of``."""

    def to_json(self) -> dict[str, Any]:
        """The document as it is stored."""
        out: dict[str, Any] = {"schema": SCHEMA} | {name: getattr(self, name) for name in _FIELDS}
        out["kinds"] = list(self.kinds)
        out["versions"], out["sets"] = dict(sorted(self.versions.items())), dict(sorted(self.sets.items()))
        return out

    @classmethod
    def from_json(cls, data: object) -> CoefficientDocument:
        """The inverse of ``to_json``.

        Raises:
            BadDocument: it is something else.
        """
        if not isinstance(data, dict):
            raise BadDocument("no JSON object")
        document = cast("dict[str, Any]", data)
        if document.get("schema") != SCHEMA:
            raise BadDocument(f"schema is {document.get('schema')!r} and not {SCHEMA!r}")
        types: dict[str, type] = {
            "model": str, "shape": str, "kinds": list, "versions": dict, "rank": int, "window": int, "sets": dict
        }  # fmt: skip
        for name, wanted in types.items():
            if not isinstance(document.get(name), wanted):
                raise BadDocument(f"{name} is missing or no {wanted.__name__}")
        return cls(
            model=document["model"],
            shape=document["shape"],
            kinds=tuple(document["kinds"]),
            versions=document["versions"],
            rank=document["rank"],
            window=document["window"],
            sets=document["sets"],
        )

    def merged(self, other: CoefficientDocument) -> CoefficientDocument:
        """This document with the sets of ``other``, which was traced with the same versions."""
        return replace(self, sets={**self.sets, **other.sets})


_FIELDS = ("model", "shape", "kinds", "versions", "rank", "window", "sets")


def coefficients_of(
    document: CoefficientDocument, architecture: Architecture, options: ActivationOptions, notes: list[str]
) -> Coefficients | None:
    """The traced coefficients for ``options``, None where the document has none or says that they cannot be had.

    A kind of layer whose bytes were found not to be affine gets the formula's, with a note.

    Raises:
        BadDocument: the set is not what the schema says.
    """
    entry = document.sets.get(option_key(architecture, options))
    if entry is None or "refused" in entry:
        return None
    reader = _Reader(document, options.lora_r - document.rank if options.lora_targets is not None else 0)
    try:
        layers = tuple(reader.layer(layer) for layer in entry["layers"])
        work = tuple(reader.work(layer) for layer in entry["layers"])
        outer = {name: reader.bytes(entry[name]) for name in ("model_saved", "final_norm_saved")}
        without = entry.get("model_saved_none")
        outer |= {"model_saved_none": reader.bytes(without)} if without is not None else {}
        names = [str(name).partition(".")[0] for name in entry.get("not_affine", ())]
        not_affine = sorted({int(name) for name in names if name.isdigit()})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadDocument(f"set {option_key(architecture, options)}: {error!r}") from None
    if len(layers) != len(architecture.kinds):
        raise BadDocument(f"{len(layers)} kinds of layers where the model has {len(architecture.kinds)}")
    if not_affine:
        closed = formula_coefficients(architecture, options)
        layers = tuple(closed.layers[i] if i in not_affine else layer for i, layer in enumerate(layers))
        kinds = ", ".join(architecture.kinds[i].name for i in not_affine)
        notes.append(f"layers of kind {kinds} are priced by closed forms: their trace is not affine in the tokens")
    if not all(map(str.isdigit, names)):
        closed = formula_coefficients(architecture, options)
        outer = {"model_saved": closed.model_saved, "final_norm_saved": closed.final_norm_saved}
        notes.append("what is kept outside the layers is priced by closed forms: its trace is not affine in the tokens")
    return Coefficients(
        layers=layers,
        model_saved=outer["model_saved"],
        model_saved_none=outer.get("model_saved_none"),
        final_norm_saved=outer["final_norm_saved"],
        evidence="traced",
        relative_error=TRACED_ERROR,
        source=f"trace of the real layers with {versions_text(document.versions)}",
        work=work,
    )


def versions_text(versions: Mapping[str, str]) -> str:
    """``torch 2.13.0, transformers 5.24.0, ...``."""
    return ", ".join(f"{package} {version}" for package, version in versions.items())


@dataclass(frozen=True, slots=True)
class _Reader:
    """Lines of one document at one rank."""

    document: CoefficientDocument
    ranks_above: int

    def line(self, numbers: Sequence[float]) -> Affine:
        per_token, constant, pair, token_rank, constant_rank = (*numbers, 0, 0, 0, 0, 0)[:5]
        more = self.ranks_above
        return Affine(per_token + more * token_rank, constant + more * constant_rank, pair)

    def lines(self, entry: Sequence[Sequence[float]]) -> Affine | Highest:
        found = tuple(self.line(numbers) for numbers in entry)
        if not found:
            raise ValueError("a value without lines")
        return found[0] if len(found) == 1 else Highest(found)

    def bytes(self, entry: Any) -> Bytes:
        """Lines, or two sets of them with sequences inside the window apart."""
        if isinstance(entry, dict):
            apart = cast("dict[str, Any]", entry)
            return Windowed(self.document.window, self.lines(apart["shorter"]), self.lines(apart["longer"]))
        return self.lines(entry)

    def mode(self, entry: Mapping[str, Any]) -> ModeBytes:
        return ModeBytes(
            kept=self.bytes(entry["kept"]),
            forward=self.bytes(entry["forward"]),
            backward=self.bytes(entry["backward"]),
            attention_backward=self.bytes(entry["attention_backward"]),
        )

    def layer(self, entry: Mapping[str, Any]) -> LayerBytes:
        none, full, selective = (self.mode(entry[mode]) for mode in MODES)
        return LayerBytes(none=none, full=full, selective=selective)

    def work(self, entry: Mapping[str, Any]) -> LayerWork:
        found: list[OperatorWork] = []
        for mode in MODES:
            parts = {name: self.line(numbers) for name, numbers in entry[mode].get("work", {}).items()}
            found.append(OperatorWork(**parts))
        return LayerWork(none=found[0], full=found[1], selective=found[2])


def pack_line(line: Sequence[float]) -> list[float]:
    """A line as it is stored: bytes per token to a hundredth, constants to five digits, no trailing zeros."""
    per_token, constant, pair, *ranks = line
    packed = [_short(per_token, 2), _digits(constant), _short(pair, 4)]
    if ranks:
        packed += [_short(ranks[0], 3), _digits(ranks[1])]
    while len(packed) > 1 and packed[-1] == 0:
        packed.pop()
    return packed


def _short(value: float, places: int) -> float:
    rounded = round(value, places)
    return int(rounded) if rounded == int(rounded) else rounded


def _digits(value: float) -> float:
    return int(float(f"{value:.5g}"))
