"""Asking ``launcher/children/trace_model.py``: which sets to trace, how far it is, and when to give up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

from launcher.errors import EnvironmentLacks, ProbeFailed
from planner.architecture import Architecture
from planner.coefficients_json import (
    MODES,
    CoefficientDocument,
    is_masked,
    option_key,
    pack_line,
    shape_hash,
    window_of,
)
from planner.formula import ActivationOptions

TIME_LIMIT_S = 300.0
SHORTEST_WINDOW = 1024
"""Windows below this are always exceeded in training; only above it sequences inside the window are traced apart."""

_SCRIPT = Path(__file__).with_name("children") / "trace_model.py"
_MAX_ANSWER_BYTES = 32 * 2**20

Progress = Callable[[int, int, float], None]
"""Called with (sets done, sets asked for, seconds so far)."""


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
    return document_of(architecture, asked, _ask(python or sys.executable, request, limit_s, progress))


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
        "sets": [{"options": _plain(wanted[key]), "within": within} for key, within in asked],
    }


def _knows_window(window: int, options: ActivationOptions) -> bool:
    """Whether a sequence inside the window takes another path: only SDPA without a padding mask does."""
    return window >= SHORTEST_WINDOW and options.attention == "sdpa" and not options.masked


def _plain(options: ActivationOptions) -> dict[str, object]:
    return asdict(replace(options, masked=is_masked(options)))


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
    for name in ("model_saved", "final_norm_saved"):
        out[name] = _apart([longer[name]], [shorter[name]] if shorter else None)
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


def _ask(python: str, request: Mapping[str, object], limit_s: float, progress: Progress | None) -> dict[str, Any]:
    """Run the child; it and all that it started are gone when this returns, however it returns."""
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                [python, str(_SCRIPT)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.PIPE,
                start_new_session=True,
                env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
            )
        except OSError as error:
            raise EnvironmentLacks(
                f"cannot start the training Python {python}: {error.strerror}; name one with --python"
            ) from None
        try:
            said = _follow(process, json.dumps(request).encode(), limit_s, progress)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return _answer(output.read(_MAX_ANSWER_BYTES), process.returncode, said, python)


def _follow(process: subprocess.Popen[bytes], request: bytes, limit_s: float, progress: Progress | None) -> list[str]:
    """Hand over the request, pass progress on, and return what else was said."""
    assert process.stdin is not None and process.stderr is not None
    late = threading.Event()

    def give_up() -> None:
        late.set()
        os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(limit_s, give_up)
    timer.daemon = True
    timer.start()
    said: list[str] = []
    started = time.monotonic()
    try:
        try:
            process.stdin.write(request)
            process.stdin.close()
        except BrokenPipeError:
            pass  # It ended before it read; what it said comes below.
        for line in process.stderr:
            step = _progress_of(line)
            if step is None:
                said.append(line.decode("utf-8", "replace").strip())
            elif progress is not None:
                progress(step[0], step[1], time.monotonic() - started)
        process.wait()
    finally:
        timer.cancel()
        process.stderr.close()
    if late.is_set():
        raise ProbeFailed(f"the trace took longer than {limit_s:g} s and was ended; the formulas still hold")
    return said


def _progress_of(line: bytes) -> tuple[int, int] | None:
    try:
        step: Any = json.loads(line)
        return int(step["done"]), int(step["of"])
    except (ValueError, TypeError, KeyError):
        return None


def _answer(output: bytes, code: int, said: Sequence[str], python: str) -> dict[str, Any]:
    try:
        document: Any = json.loads(output)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        last = next((line for line in reversed(said) if line), "it said nothing")
        raise ProbeFailed(f"the trace failed in {python} (exit code {code}): {last[:300]}")
    answer = cast("dict[str, Any]", document)
    if "error" in answer:
        raise EnvironmentLacks(str(answer["error"]["message"]))
    return answer
