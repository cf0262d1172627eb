"""Where coefficients come from: the user's cache, what is bundled, a trace, and closed forms where there is nothing.

The cache holds one file per shape, set of options and versions. Files are written beside and renamed, so writers may
run at once and be killed; a file that cannot be read is made again.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from launcher.errors import EnvironmentLacks, ProbeFailed
from launcher.paths import cache_dir
from planner.architecture import Architecture
from planner.coefficients import Coefficients
from planner.coefficients_json import (
    BadDocument,
    CoefficientDocument,
    coefficients_of,
    option_key,
    shape_hash,
    versions_text,
)
from planner.formula import ActivationOptions, formula_coefficients
from planner.memory import CoefficientSource
from planner.stack import Stack
from profiles.coefficients import find_coefficients

PACKAGES = ("torch", "transformers", "peft", "trl")
"""What decides the bytes of a layer; other packages do not."""

_FORGOTTEN_S = 3600.0
"""A half-written file this old belongs to a writer that was killed."""

Progress = Callable[[int, int, float], None]


def source_for(
    architecture: Architecture,
    stack: Stack,
    *,
    trace: bool,
    notes: list[str],
    progress: Progress | None = None,
) -> CoefficientSource:
    """Coefficients for plans of ``architecture`` under ``stack``: cached, bundled, traced or by closed forms.

    Nothing is read before the first set of options is asked for. The source answers for other architectures as well.

    Args:
        architecture: the model that is planned.
        stack: versions that the cache must agree with, and the Python that would trace.
        trace: whether a child may be started for what is neither cached nor bundled (seconds).
        notes: receives a sentence for everything the user should know: other versions, refusals, unreadable files.
        progress: told about a running trace.

    Returns:
        What ``planner.memory.MemoryModel`` asks for coefficients.
    """
    finder = _Finder(stack, trace, notes, progress)
    finder.planned = shape_hash(architecture) if trace else ""
    return finder.coefficients


def siblings(options: ActivationOptions) -> list[ActivationOptions]:
    """``options`` and those that a search over the same method will ask for next: one child traces them all."""
    found: list[ActivationOptions] = []
    masks = (False, True) if options.attention == "sdpa" else (False,)
    for masked in masks:
        if options.lora_targets is None:
            widths = {options.residual_bytes, 2, 4} if options.compute_bytes == 2 else {options.residual_bytes}
            found += [replace(options, residual_bytes=width, masked=masked) for width in sorted(widths)]
        elif options.quantised:
            found.append(replace(options, masked=masked))
        else:
            found += [replace(options, adapter_bytes=width, masked=masked) for width in (2, 4)]
    return [options, *(other for other in found if other != options)]


def default_options(architecture: Architecture) -> list[ActivationOptions]:
    """The sets that plans on GPUs ask for with default settings: what is bundled."""
    eager = any(kind.attention_softcap or kind.attention_sinks for kind in architecture.kinds)
    attentions = ["eager" if eager else "sdpa"]
    # No released flash-attn kernel takes attention sinks.
    attentions += [] if any(kind.attention_sinks for kind in architecture.kinds) else ["flash_attention_2"]
    found: list[ActivationOptions] = []
    for attention in attentions:
        base = ActivationOptions(
            residual_bytes=2, compute_bytes=2, trains_base=True, attention=attention, adapter_bytes=2
        )
        lora = replace(base, trains_base=False, lora_targets="all-linear", lora_r=16)
        for start in (base, lora, replace(lora, quantised=True)):
            found += siblings(start)
    return found


def cache_folder() -> Path:
    """Where traced coefficients are kept."""
    return cache_dir() / "coefficients"


def keep(document: CoefficientDocument) -> None:
    """Write every set of ``document`` to the cache, each to its own file.

    Raises:
        OSError: the cache cannot be written.
    """
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    _sweep(folder)
    for key, entry in document.sets.items():
        single = replace(document, sets={key: entry})
        text = json.dumps(single.to_json(), separators=(",", ":"))
        _write(folder / f"{_cache_key(document.shape, key, document.versions)}.json", text)


def _write(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.stem}.{os.getpid()}-{time.monotonic_ns()}.part")
    try:
        with beside.open("x", encoding="utf-8") as file:
            file.write(text)
        beside.replace(path)
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise


def _sweep(folder: Path) -> None:
    """Remove what killed writers left behind."""
    for path in folder.glob(".*.part"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _FORGOTTEN_S:
                path.unlink()


def _public(versions: Mapping[str, str]) -> dict[str, str]:
    """Versions of the packages that matter, without build tags such as ``+cpu``."""
    return {package: versions[package].partition("+")[0] for package in PACKAGES if package in versions}


def _cache_key(shape: str, option: str, versions: Mapping[str, str]) -> str:
    facts = json.dumps([shape, option, _public(versions)], sort_keys=True)
    return hashlib.sha256(facts.encode()).hexdigest()[:40]


class _Finder:
    """One plan's look-ups, each answered once."""

    def __init__(self, stack: Stack, trace: bool, notes: list[str], progress: Progress | None) -> None:
        self._stack, self._trace, self._notes, self._progress = stack, trace, notes, progress
        self._versions = _public(stack.versions)
        self._found: dict[tuple[str, str, int], Coefficients] = {}
        # Architectures are compared without their config, which a shape depends on: known by identity, so kept alive.
        self._shapes: dict[int, tuple[Architecture, str]] = {}
        self._bundled: dict[str, CoefficientDocument | None] = {}
        self._traced: dict[str, CoefficientDocument] = {}
        self.planned = ""
        """Shape of the model that may be traced."""

    def coefficients(self, architecture: Architecture, options: ActivationOptions) -> Coefficients:
        """The best evidence there is for ``options``."""
        known_shape = self._shapes.get(id(architecture))
        if known_shape is None:
            known_shape = self._shapes[id(architecture)] = (architecture, shape_hash(architecture))
        shape, option = known_shape[1], option_key(architecture, options)
        known = self._found.get((shape, option, options.lora_r))
        if known is None:
            known = self._look_up(architecture, options, shape, option)
            self._found[shape, option, options.lora_r] = known
        return known

    def _look_up(self, architecture: Architecture, options: ActivationOptions, shape: str, option: str) -> Coefficients:
        for look in (self._from_traces, self._from_cache, self._from_bundle):
            document = look(shape, option)
            if document is None:
                continue
            if "refused" in document.sets[option]:
                self._note(f"{document.sets[option]['refused']}; closed forms are used")
                return formula_coefficients(architecture, options)
            found = self._read(document, architecture, options)
            if found is not None:
                return found
        if self._trace and shape == self.planned and self._run_trace(architecture, options, shape):
            return self._look_up(architecture, options, shape, option)
        return formula_coefficients(architecture, options)

    def _read(
        self, document: CoefficientDocument, architecture: Architecture, options: ActivationOptions
    ) -> Coefficients | None:
        own: list[str] = []
        try:
            found = coefficients_of(document, architecture, options, own)
        except BadDocument as error:
            self._note(f"coefficients of {document.model} are not readable ({error}); they are ignored")
            return None
        for sentence in own:
            self._note(sentence)
        return found

    def _from_traces(self, shape: str, option: str) -> CoefficientDocument | None:
        document = self._traced.get(shape)
        return document if document is not None and option in document.sets else None

    def _from_cache(self, shape: str, option: str) -> CoefficientDocument | None:
        path = cache_folder() / f"{_cache_key(shape, option, self._versions)}.json"
        try:
            document = CoefficientDocument.from_json(json.loads(path.read_text(encoding="utf-8")))
            if document.shape != shape or option not in document.sets:
                raise BadDocument("it holds another model or other options")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            self._note(f"cached coefficients {path} are ignored: {reason}")
            return None
        return document

    def _from_bundle(self, shape: str, option: str) -> CoefficientDocument | None:
        if shape not in self._bundled:
            data = find_coefficients(shape)
            self._bundled[shape] = None if data is None else CoefficientDocument.from_json(data)
        document = self._bundled[shape]
        if document is None or option not in document.sets:
            return None
        traced = _public(document.versions)
        other = {package: version for package, version in self._versions.items() if traced.get(package) != version}
        if other:
            self._note(
                f"memory of {document.model} was traced with {versions_text({p: traced.get(p, '?') for p in other})}; "
                f"this stack has {versions_text(other)}"
            )
        return document

    def _run_trace(self, architecture: Architecture, options: ActivationOptions, shape: str) -> bool:
        """Trace ``options`` and their siblings; whether there is now something to read."""
        # Loading a subprocess machinery costs milliseconds that a plan of a bundled model does not have.
        from launcher.tracing import trace

        try:
            document = trace(architecture, siblings(options), python=self._stack.python, progress=self._progress)
        except (EnvironmentLacks, ProbeFailed) as error:
            self._trace = False
            self._note(f"no trace of {architecture.model}: {error}; closed forms are used")
            return False
        known = self._traced.get(shape)
        self._traced[shape] = document if known is None else known.merged(document)
        try:
            keep(document)
        except OSError as error:
            self._note(f"traced coefficients are not kept: {cache_folder()}: {error.strerror}")
        return option_key(architecture, options) in document.sets

    def _note(self, sentence: str) -> None:
        if sentence not in self._notes:
            self._notes.append(sentence)
