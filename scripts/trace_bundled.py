"""Traces the bundled coefficients again: ``python scripts/trace_bundled.py [MODEL ...]``.

Run it with the Python that holds torch, transformers, peft and trl, from a checkout. Every bundled model is traced
under the sets of options that plans ask for by default, and written to ``profiles/coefficients``; models of one shape
share a file. What was traced with the installed versions and the tracer as it is now is left alone, so a run that was
interrupted goes on where it stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from launcher.errors import TrlfitError  # noqa: E402
from launcher.evidence.coefficient_store import PACKAGES, default_options  # noqa: E402
from launcher.evidence.tracing import trace  # noqa: E402
from planner.architecture import Architecture  # noqa: E402
from planner.config.reader import read_architecture  # noqa: E402
from planner.memory.coefficients_json import CoefficientDocument, option_key, shape_hash  # noqa: E402
from profiles.coefficients import FOLDER, SHAPE_DIGITS, find_coefficients  # noqa: E402
from profiles.models import BundledModel, find_model, list_models  # noqa: E402

LARGEST_BYTES = 50_000
"""Above this a document deserves a look. The most sets and kinds have 21 and 2 (latent attention, experts): 49 kB."""
FIRST = """
Qwen/Qwen3-0.6B Qwen/Qwen3-1.7B Qwen/Qwen3-4B Qwen/Qwen3-8B Qwen/Qwen3-14B Qwen/Qwen3-32B Qwen/Qwen3-30B-A3B
Qwen/Qwen2.5-0.5B Qwen/Qwen2.5-1.5B Qwen/Qwen2.5-3B Qwen/Qwen2.5-7B Qwen/Qwen2.5-14B Qwen/Qwen2.5-32B Qwen/Qwen2.5-72B
meta-llama/Llama-3.2-1B meta-llama/Llama-3.2-3B meta-llama/Llama-3.1-8B meta-llama/Llama-3.1-70B
google/gemma-3-270m google/gemma-3-1b-pt google/gemma-3-4b-pt google/gemma-2-2b google/gemma-2-9b
mistralai/Mistral-7B-v0.3 microsoft/Phi-3-mini-4k-instruct openai/gpt-oss-20b
"""
"""Traced before the others, and naming the file of their shape: what is trained most."""
TRACER = sorted((ROOT / "launcher" / "children").glob("trace_*.py"))


@dataclass(frozen=True)
class Wanted:
    """One shape to trace."""

    architecture: Architecture
    path: Path

    @property
    def name(self) -> str:
        """The model that the file is named after."""
        return self.architecture.model


def tracer_digest() -> str:
    """The tracer's code, hashed."""
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in TRACER)).hexdigest()[:12]


def installed() -> dict[str, str]:
    """Versions that a trace would have now."""
    return {package: importlib.metadata.version(package) for package in PACKAGES}


def wanted(models: Iterable[BundledModel]) -> list[Wanted]:
    """One entry a shape, named after the model that comes first."""
    found: dict[str, Wanted] = {}
    first = FIRST.split()
    for model in sorted(models, key=lambda m: first.index(m.id) if m.id in first else len(first)):
        architecture = read_architecture(model.config, model=model.id, origin="bundled")
        shape = shape_hash(architecture)
        path = FOLDER / f"{model.id.replace('/', '--')}.{shape[:SHAPE_DIGITS]}.json"
        found.setdefault(shape, Wanted(architecture, path))
    return list(found.values())


def trouble(entry: Wanted) -> str:
    """Why ``entry`` has to be traced again; empty when it has not."""
    data = find_coefficients(shape_hash(entry.architecture))
    if data is None:
        return "missing"
    if data.get("tracer") != tracer_digest():
        return "traced by another tracer"
    if data["versions"] != installed():
        return "traced with other versions"
    keys = {option_key(entry.architecture, options) for options in default_options(entry.architecture)}
    return "" if keys <= data["sets"].keys() else "without some sets"


def trace_one(entry: Wanted, words: str, before: str) -> CoefficientDocument:
    """Trace one model under those default sets whose key holds ``words``."""
    shown = sys.stderr.isatty()

    def progress(done: int, of: int, seconds: float) -> None:
        if shown:
            sys.stderr.write(f"\r{before} set {done} of {of}, {seconds:.0f} s\x1b[K")

    options = [o for o in default_options(entry.architecture) if words in option_key(entry.architecture, o)]
    document = trace(entry.architecture, options, limit_s=3600, progress=progress)
    if shown:
        sys.stderr.write("\r\x1b[K")
    known = find_coefficients(document.shape)
    if words and known is not None and known["versions"] == document.versions:
        return CoefficientDocument.from_json(known).merged(document)
    return document


def write(entry: Wanted, document: CoefficientDocument, *, whole: bool) -> int:
    """Write one document in place of those of the same model or shape; its bytes."""
    stem, digits = entry.path.name.split(".json")[0].rsplit(".", 1)
    content: dict[str, Any] = document.to_json() | ({"tracer": tracer_digest()} if whole else {})
    text = json.dumps(content, separators=(",", ":")) + "\n"
    part = entry.path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.replace(entry.path)
    for old in (*FOLDER.glob(f"{stem}.*.json"), *FOLDER.glob(f"*.{digits}.json")):
        if old != entry.path:
            old.unlink(missing_ok=True)
    return len(text)


def report(document: CoefficientDocument, size: int) -> str:
    """What a person should see of one document."""
    refused = sorted({entry["refused"] for entry in document.sets.values() if "refused" in entry})
    bent = sorted({name for entry in document.sets.values() for name in entry.get("not_affine", ())})
    said = [f"{size:,} bytes", f"{len(document.sets)} sets"]
    said += [f"refused: {reason}" for reason in refused]
    said += [f"not affine: {', '.join(bent)}"] if bent else []
    said += [f"larger than {LARGEST_BYTES:,} bytes"] if size > LARGEST_BYTES else []
    return ", ".join(said)


def run(todo: Sequence[Wanted], words: str) -> int:
    """Trace all of ``todo``; the exit code."""
    started = time.monotonic()
    for index, entry in enumerate(todo):
        before = f"[{index + 1}/{len(todo)}] {entry.name}"
        began = time.monotonic()
        try:
            document = trace_one(entry, words, before)
        except TrlfitError as error:
            sys.stderr.write(f"{before}: {error}\n")
            return 1
        size = write(entry, document, whole=not words)
        sys.stderr.write(f"{before}: {time.monotonic() - began:.0f} s, {report(document, size)}\n")
    sys.stderr.write(f"{len(todo)} traced in {time.monotonic() - started:.0f} s\n")
    return 0


def main() -> int:
    """Trace what is asked for and not up to date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="bundled ids; all of them when left out")
    parser.add_argument("--sets", default="", help="only sets whose key holds this, such as fp32+bf16; others stay")
    parser.add_argument("--missing", action="store_true", help="only models without a file, whatever traced the others")
    parser.add_argument("--again", action="store_true", help="also what is up to date")
    parser.add_argument("--list", action="store_true", help="say what would be traced and why, and stop")
    args = parser.parse_args()
    entries = wanted(list_models())
    if args.models:
        shapes: set[str] = set()
        for model_id in args.models:
            model = find_model(model_id)
            if model is None:
                parser.error(f"{model_id} is not bundled: see profiles/models")
            shapes.add(shape_hash(read_architecture(model.config, model=model.id, origin="bundled")))
        entries = [entry for entry in entries if shape_hash(entry.architecture) in shapes]
    reasons = {entry.name: trouble(entry) for entry in entries}
    forced = args.again or bool(args.sets)
    todo = [e for e in entries if reasons[e.name] == "missing" or (not args.missing and (forced or reasons[e.name]))]
    if args.list:
        for entry in todo:
            sys.stdout.write(f"{entry.name}: {reasons[entry.name] or 'asked for'}\n")
        return 0
    sys.stderr.write(f"{len(todo)} of {len(entries)} shapes to trace; Ctrl-C stops, the next run goes on\n")
    try:
        return run(todo, args.sets)
    except KeyboardInterrupt:
        sys.stderr.write("\nstopped; what is written stays\n")
        return 130


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
