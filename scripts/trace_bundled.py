"""Traces the bundled coefficients again: ``python scripts/trace_bundled.py [MODEL ...]``.

Run it with the Python that holds torch, transformers, peft and trl, from a checkout. Every model is traced under the
sets of options that plans ask for by default, and written to ``profiles/coefficients``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from launcher.coefficient_store import default_options  # noqa: E402
from launcher.tracing import trace  # noqa: E402
from planner.coefficients_json import CoefficientDocument, option_key  # noqa: E402
from planner.config_reader import read_architecture  # noqa: E402
from profiles.coefficients import FOLDER, SHAPE_DIGITS, find_coefficients  # noqa: E402
from profiles.models import find_model  # noqa: E402

MODELS = """
Qwen/Qwen3-0.6B Qwen/Qwen3-1.7B Qwen/Qwen3-4B Qwen/Qwen3-8B Qwen/Qwen3-14B Qwen/Qwen3-32B Qwen/Qwen3-30B-A3B
Qwen/Qwen2.5-0.5B Qwen/Qwen2.5-1.5B Qwen/Qwen2.5-3B Qwen/Qwen2.5-7B Qwen/Qwen2.5-14B Qwen/Qwen2.5-32B Qwen/Qwen2.5-72B
meta-llama/Llama-3.2-1B meta-llama/Llama-3.2-3B meta-llama/Llama-3.1-8B meta-llama/Llama-3.1-70B
meta-llama/Llama-2-7b-hf TinyLlama/TinyLlama-1.1B-Chat-v1.0
mistralai/Mistral-7B-v0.1 mistralai/Mistral-7B-v0.3 mistralai/Mistral-Nemo-Base-2407
google/gemma-3-270m google/gemma-3-1b-pt google/gemma-3-4b-pt google/gemma-2-2b google/gemma-2-9b
microsoft/Phi-3-mini-4k-instruct microsoft/Phi-4-mini-instruct microsoft/phi-4
HuggingFaceTB/SmolLM2-135M HuggingFaceTB/SmolLM2-360M HuggingFaceTB/SmolLM2-1.7B HuggingFaceTB/SmolLM3-3B
allenai/OLMo-2-0425-1B allenai/OLMo-2-1124-7B ibm-granite/granite-3.3-2b-base ibm-granite/granite-3.3-8b-base
openai/gpt-oss-20b
"""
LARGEST_BYTES = 40_000


def trace_model(model_id: str, words: str) -> CoefficientDocument:
    """Trace one bundled model under those default sets whose key holds ``words``."""
    model = find_model(model_id)
    if model is None:
        raise SystemExit(f"{model_id} is not bundled: see profiles/models")
    architecture = read_architecture(model.config, model=model.id, origin="bundled")
    wanted = [o for o in default_options(architecture) if words in option_key(architecture, o)]
    traced = trace(architecture, wanted, limit_s=3600)
    data = find_coefficients(traced.shape)
    if words and data is not None:
        known = CoefficientDocument.from_json(data)
        if known.versions == traced.versions:
            return known.merged(traced)
    return traced


def write(document: CoefficientDocument) -> Path:
    """Write one document where the package looks for it, in place of the one of the same model."""
    stem = document.model.replace("/", "--")
    for old in FOLDER.glob(f"{stem}.*.json"):
        old.unlink()
    path = FOLDER / f"{stem}.{document.shape[:SHAPE_DIGITS]}.json"
    path.write_text(json.dumps(document.to_json(), separators=(",", ":")) + "\n", encoding="utf-8")
    return path


def main() -> int:
    """Trace what is asked for, or everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help="bundled ids; all of the list when left out")
    parser.add_argument("--sets", default="", help="only sets whose key holds this, such as fp32+bf16; others stay")
    parser.add_argument("--missing", action="store_true", help="leave alone what is there")
    args = parser.parse_args()
    for model_id in args.models or MODELS.split():
        if args.missing and list(FOLDER.glob(f"{model_id.replace('/', '--')}.*.json")):
            continue
        started = time.monotonic()
        document = trace_model(model_id, args.sets)
        path = write(document)
        size = path.stat().st_size
        refused = {entry["refused"] for entry in document.sets.values() if "refused" in entry}
        bent = [name for entry in document.sets.values() for name in entry.get("not_affine", ())]
        seconds = time.monotonic() - started
        line = f"{path.name}: {size:,} bytes, {len(document.sets)} sets, {seconds:.0f} s, refused {refused or 'none'}"
        sys.stderr.write(f"{line}, not affine {bent or 'none'}\n")
        if size > LARGEST_BYTES:
            sys.stderr.write(f"{path.name} is larger than {LARGEST_BYTES:,} bytes\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
