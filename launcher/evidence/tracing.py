"""Asking ``launcher/children/trace_model.py``: which sets to trace, how far it is, and when to give up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, cast

from launcher.evidence.measuring import ask_child
from planner.architecture import Architecture
from planner.memory.coefficients_json import (
    MODES,
    CoefficientDocument,
    is_masked,
    option_key,
    pack_line,
    runs_on_cpu,
    shape_hash,
    window_of,
)
from planner.memory.formula import ActivationOptions

TIME_LIMIT_S = 300.0
SHORTEST_WINDOW = 1024
"""Windows below this are always exceeded in training; only above it sequences inside the window are traced apart."""

Progress = Callable[[int, int, float], None]
"""Called with (sets done, sets asked for, seconds so far); with 0 done when the child starts."""


def trace(
    architecture: Architecture,
    options: Iterable[ActivationOptions],
    *,
    python: str | None = None,
    limit_s: float = TIME_LIMIT_S,
    progress: Progress | None = None,
) -> CoefficientDocument:
    """Trace ``architecture`` under every set of ``options`` in one child of the training Python.

    Args:
        architecture: shapes; its ``config`` is what the real class is built from.
        options: sets; those that come to the same are traced once.
        python: the training Python, None for the one running.
        limit_s: the child is ended after this long.
        progress: told about every set.

    Returns:
        The document; a set that could not be traced says ``refused`` and why.

    Raises:
        EnvironmentLacks: the Python cannot be started or lacks torch or transformers.
        ProbeFailed: the child crashed or took too long.
    """
    asked, request = request_for(architecture, options)

    started = time.monotonic()

    def step(done: int, of: int, _what: str, _seconds: float) -> None:
        if progress is not None and done:
            progress(done, of, time.monotonic() - started)  # the child's own clock leaves out its start

    if progress is not None:
        progress(0, len(asked), 0.0)
    answer = ask_child(
        "trace_model.py",
        request,
        python=python,
        limit_s=limit_s,
        environment={"OMP_NUM_THREADS": "1"},
        progress=step,
        what="trace",
        otherwise="the formulas still hold",
    )
    return document_of(architecture, asked, answer)


Asked = Sequence[tuple[str, bool]]
"""(``option_key``, whether sequences inside the window are meant) for each set of a request."""


def request_for(architecture: Architecture, options: Iterable[ActivationOptions]) -> tuple[Asked, dict[str, Any]]:
    """(what is asked, the request that the child reads on stdin); sets that come to the same are asked once."""
    wanted = {option_key(architecture, o): o for o in options}
    window = window_of(architecture)
    asked: list[tuple[str, bool]] = []
    for key, chosen in wanted.items():
        asked.append((key, False))
        if _knows_window(window, chosen):
            asked.append((key, True))
    return asked, {
        "config": architecture.config,
        "first_layers": [architecture.order.index(kind) for kind in range(len(architecture.kinds))],
        "window": window,
        "loops": any(kind.attention == "linear" for kind in architecture.kinds),
        "sets": [{"options": _plain(architecture, wanted[key]), "within": within} for key, within in asked],
    }


def _knows_window(window: int, options: ActivationOptions) -> bool:
    """Whether a sequence inside the window takes another path: only SDPA without a padding mask does."""
    return window >= SHORTEST_WINDOW and options.attention == "sdpa" and not options.masked


def _plain(architecture: Architecture, options: ActivationOptions) -> dict[str, object]:
    return asdict(replace(options, masked=is_masked(options), mask_bias=not runs_on_cpu(architecture, options)))


def document_of(architecture: Architecture, asked: Asked, answer: Mapping[str, Any]) -> CoefficientDocument:
    """The child's answer as it is stored."""
    found: dict[str, dict[bool, Mapping[str, Any]]] = {}
    for (key, within), entry in zip(asked, answer["sets"], strict=True):
        found.setdefault(key, {})[within] = entry
    return CoefficientDocument(
        model=architecture.model,
        shape=shape_hash(architecture),
        kinds=tuple(kind.name for kind in architecture.kinds),
        versions=cast("dict[str, str]", answer["versions"]),
        rank=int(answer["ranks"][0]),
        window=window_of(architecture),
        sets={key: _packed(entries[False], entries.get(True)) for key, entries in found.items()},
    )


def _packed(longer: Mapping[str, Any], shorter: Mapping[str, Any] | None) -> dict[str, Any]:
    """One set as it is stored; sequences inside the window apart where they differ."""
    refused = longer.get("refused") or (shorter or {}).get("refused")
    if refused:
        return {"refused": refused}
    out: dict[str, Any] = {}
    for name in ("model_saved", "model_saved_none", "final_norm_saved"):
        if name in longer:
            out[name] = _apart([longer[name]], [shorter[name]] if shorter else None)
    if out.get("model_saved_none") == out["model_saved"]:
        del out["model_saved_none"]
    out["layers"] = [
        {mode: _packed_mode(layer[mode], shorter["layers"][kind][mode] if shorter else None) for mode in MODES}
        for kind, layer in enumerate(longer["layers"])
    ]
    not_affine = sorted({*longer["not_affine"], *(shorter["not_affine"] if shorter else ())})
    return out | ({"not_affine": not_affine} if not_affine else {})


def _packed_mode(longer: Mapping[str, Any], shorter: Mapping[str, Any] | None) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name in ("kept", "forward", "backward", "attention_backward"):
        out[name] = _apart(longer[name], shorter[name] if shorter else None)
    return out | {"work": {name: pack_line(line) for name, line in longer["work"].items()}}


def _apart(longer: Sequence[Sequence[float]], shorter: Sequence[Sequence[float]] | None) -> Any:
    packed = [pack_line(line) for line in longer]
    other = packed if shorter is None else [pack_line(line) for line in shorter]
    return packed if other == packed else {"shorter": other, "longer": packed}
