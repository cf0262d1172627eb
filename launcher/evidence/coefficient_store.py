"""Where coefficients come from: the user's cache, what is bundled, a trace, and closed forms where there is nothing.

The cache holds one file per shape, set of options and versions. Files are written beside and renamed, so writers may
run at once and be killed; a file that cannot be read is made again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from launcher.diagnostics import report_note
from launcher.errors import EnvironmentLacks, ProbeFailed
from launcher.files import folder_to_keep_in, replace_file
from launcher.paths import cache_dir
from planner.architecture import Architecture
from planner.memory.coefficients import Coefficients
from planner.memory.coefficients_json import (
    BadDocument,
    CoefficientDocument,
    coefficients_of,
    option_key,
    shape_hash,
    versions_text,
)
from planner.memory.formula import ActivationOptions, formula_coefficients
from planner.memory.parts import CoefficientSource
from planner.stack import Stack, public_versions
from profiles.coefficients import find_coefficients

PACKAGES = ("torch", "transformers", "peft", "trl")
"""What decides the bytes of a layer; other packages do not."""

LINEAR_KERNELS = ("flash-linear-attention", "causal-conv1d")
"""Packages that transformers takes for linear attention where they are installed."""

Progress = Callable[[int, int, float], None]


def source_for(
    architecture: Architecture,
    stack: Stack,
    *,
    trace: bool,
    notes: list[str],
    warn: Callable[[str], None] = report_note,
    progress: Progress | None = None,
) -> CoefficientSource:
    """Coefficients for plans of ``architecture`` under ``stack``: cached, bundled, traced or by closed forms.

    Nothing is read before the first set of options is asked for. The source answers for other architectures as well.

    Args:
        architecture: the model that is planned.
        stack: versions that the cache must agree with, and the Python that would trace.
        trace: whether a child may be started for what is neither cached nor bundled (seconds).
        notes: receives a sentence for everything that belongs to the plan: other versions, refusals.
        warn: told what concerns this machine alone: unreadable files, a trace that failed.
        progress: told about a running trace.

    Returns:
        What ``planner.memory.model.MemoryModel`` asks for coefficients.
    """
    finder = _Finder(stack, trace, notes, warn, progress)
    finder.planned = shape_hash(architecture) if trace else ""
    return finder.coefficients


def may_trace(architecture: Architecture, stack: Stack) -> bool:
    """Whether a plan traces on its own: a model that is not bundled, and a training Python that has the parts.

    Plans of bundled models import no torch whatever is asked of them; ``trlfit probe`` traces those on request.
    """
    parts = (stack.origin.get(package) == "installed" for package in ("torch", "transformers"))
    return architecture.origin != "bundled" and all(parts)


def siblings(options: ActivationOptions) -> list[ActivationOptions]:
    """``options`` and those that the same plan will ask for next: one child traces them all.

    Where adapters are asked about, a 4-bit base is the next question, and another child costs as much as its trace.
    What is held in the compute dtype throughout (pure bf16, FSDP2, DeepSpeed) runs without autocast; where autocast
    widens nothing, with and without it are one set.
    """
    found: list[ActivationOptions] = []
    masks = (False, True) if options.attention == "sdpa" else (False,)
    for masked in masks:
        here = replace(options, masked=masked)
        if options.lora_targets is None:
            half = replace(here, compute_bytes=2, residual_bytes=2, autocast=False)
            found += [half, replace(half, residual_bytes=4, autocast=True)]
            if not options.mask_bias or options.compute_bytes == 4:
                # A CPU's plan also runs without autocast.
                found.append(replace(here, compute_bytes=4, residual_bytes=4))
            continue
        whole = replace(here, quantised=False)
        cast = options.residual_bytes != options.compute_bytes
        found += [replace(whole, adapter_bytes=2, autocast=cast), replace(whole, adapter_bytes=4, autocast=True)]
        if options.mask_bias:
            packed = replace(whole, quantised=True, adapter_bytes=options.compute_bytes)
            found += [replace(packed, autocast=wrapped) for wrapped in dict.fromkeys((cast, True))]
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
        lora = replace(base, trains_base=False, lora_targets="all-linear", lora_r=16, adapter_bytes=4)
        for start in (base, lora):
            found += siblings(start)
    # bf16 weights under autocast are no plan's own idea, but a pin that people know.
    pinned = [o for o in found if o.lora_targets is None and o.residual_bytes == 2]
    return found + [replace(options, autocast=True) for options in pinned]


def cache_folder() -> Path:
    """Where traced coefficients are kept."""
    return cache_dir() / "coefficients"


def keep(document: CoefficientDocument) -> None:
    """Write every set of ``document`` to the cache, each to its own file.

    Raises:
        OSError: the cache cannot be written.
    """
    folder = folder_to_keep_in(cache_folder())
    for key, entry in document.sets.items():
        single = replace(document, sets={key: entry})
        text = json.dumps(single.to_json(), separators=(",", ":"))
        replace_file(folder / f"{_cache_key(document.shape, key, document.versions)}.json", text)


def _deciding(versions: Mapping[str, str]) -> dict[str, str]:
    """Versions of the packages that matter, without build tags such as ``+cpu``."""
    return public_versions({package: versions[package] for package in PACKAGES if package in versions})


def _cache_key(shape: str, option: str, versions: Mapping[str, str] | None) -> str:
    """The name of one set's file, ``SET-VERSIONS``; with ``versions`` None the part before the dash."""
    head = hashlib.sha256(json.dumps([shape, option]).encode()).hexdigest()[:32]
    if versions is None:
        return head
    return f"{head}-{hashlib.sha256(json.dumps(_deciding(versions), sort_keys=True).encode()).hexdigest()[:16]}"


class _Finder:
    """One plan's look-ups, each answered once."""

    def __init__(
        self, stack: Stack, trace: bool, notes: list[str], warn: Callable[[str], None], progress: Progress | None
    ) -> None:
        self._stack, self._trace, self._notes, self._warn, self._progress = stack, trace, notes, warn, progress
        self._versions = _deciding(stack.versions)
        self._found: dict[tuple[str, str, int], Coefficients] = {}
        # Architectures are compared without their config, which a shape depends on: known by identity, so kept alive.
        self._shapes: dict[int, tuple[Architecture, str]] = {}
        self._bundled: dict[str, CoefficientDocument | None] = {}
        self._traced: dict[str, CoefficientDocument] = {}
        self._unreadable: set[Path] = set()
        # A trace has the versions that are installed. Where others are stated, an older trace is no worse.
        stated = any(stack.origin.get(package) != "installed" for package in self._versions)
        last = (self._from_elsewhen, self._from_a_trace) if stated else (self._from_a_trace, self._from_elsewhen)
        # A bundle of the very versions spares the cache a look, and the start of a plan its import.
        self._looks = (self._from_traces, self._from_exact_bundle, self._from_cache, self._from_bundle, *last)
        self.planned = ""
        """Shape of the model that may be traced."""
        self._device_asked: bool | None = None
        """Whether the plan is for cards (``mask_bias``): one that a CPU's plan offers is not worth a second trace."""

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
        for look in self._looks:
            document = look(architecture, options, shape, option)
            if document is None:
                continue
            if "refused" in document.sets[option]:
                self._note(f"{document.sets[option]['refused']}; closed forms are used")
                break
            found = self._read(document, architecture, options)
            if found is not None:
                return found
        return formula_coefficients(architecture, options)

    def _read(
        self, document: CoefficientDocument, architecture: Architecture, options: ActivationOptions
    ) -> Coefficients | None:
        own: list[str] = []
        try:
            found = coefficients_of(document, architecture, options, own)
        except BadDocument as error:
            self._warn(f"coefficients of {document.model} are not readable ({error}); they are ignored")
            return None
        for sentence in own:
            self._note(sentence)
        return None if found is None else self._with_path(found, architecture, document)

    def _with_path(
        self, found: Coefficients, architecture: Architecture, document: CoefficientDocument
    ) -> Coefficients:
        """``found``, saying which path of linear attention was traced: kernels of other packages never are."""
        if all(kind.attention != "linear" for kind in architecture.kinds):
            return found
        kernels = [name for name in LINEAR_KERNELS if name in self._stack.versions]
        if kernels:
            self._note(
                f"linear attention of {document.model} was traced without {' and '.join(kernels)}, "
                "whose kernels keep less: an upper bound"
            )
        return replace(found, source=f"{found.source}; linear attention in torch operators, without kernels")

    def _from_traces(
        self, _a: Architecture, _o: ActivationOptions, shape: str, option: str
    ) -> CoefficientDocument | None:
        document = self._traced.get(shape)
        return document if document is not None and option in document.sets else None

    def _from_cache(
        self, _a: Architecture, _o: ActivationOptions, shape: str, option: str
    ) -> CoefficientDocument | None:
        """What was traced with the versions of this stack."""
        return self._cached(cache_folder() / f"{_cache_key(shape, option, self._versions)}.json", shape, option)

    def _cached(self, path: Path, shape: str, option: str) -> CoefficientDocument | None:
        if path in self._unreadable:
            return None
        try:
            document = CoefficientDocument.from_json(json.loads(path.read_text(encoding="utf-8")))
            if document.shape != shape or option not in document.sets:
                raise BadDocument("it holds another model or other options")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            self._warn(f"cached coefficients {path} are ignored: {reason}")
            self._unreadable.add(path)
            return None
        return document

    def _bundle(self, shape: str, option: str) -> CoefficientDocument | None:
        if shape not in self._bundled:
            data = find_coefficients(shape)
            self._bundled[shape] = None if data is None else CoefficientDocument.from_json(data)
        document = self._bundled[shape]
        return document if document is not None and option in document.sets else None

    def _from_exact_bundle(
        self, _a: Architecture, _o: ActivationOptions, shape: str, option: str
    ) -> CoefficientDocument | None:
        document = self._bundle(shape, option)
        return document if document is not None and not self._other_versions(document) else None

    def _from_bundle(
        self, _a: Architecture, _o: ActivationOptions, shape: str, option: str
    ) -> CoefficientDocument | None:
        document = self._bundle(shape, option)
        if document is not None:
            self._say_versions(document)
        return document

    def _from_elsewhen(
        self, _a: Architecture, _o: ActivationOptions, shape: str, option: str
    ) -> CoefficientDocument | None:
        """What was traced with other versions than this stack's: the newest trace."""
        paths = list(cache_folder().glob(f"{_cache_key(shape, option, None)}-*.json"))
        with suppress(OSError):
            paths.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
        for path in paths:
            document = self._cached(path, shape, option)
            if document is not None:
                self._say_versions(document)
                return document
        return None

    def _other_versions(self, document: CoefficientDocument) -> dict[str, str]:
        """What of this stack differs from the versions that ``document`` was traced with."""
        traced = _deciding(document.versions)
        return {package: version for package, version in self._versions.items() if traced.get(package) != version}

    def _say_versions(self, document: CoefficientDocument) -> None:
        traced, other = _deciding(document.versions), self._other_versions(document)
        if other:
            self._note(
                f"the layers of {document.model} were traced with "
                f"{versions_text({p: traced.get(p, '?') for p in other})}; this stack has {versions_text(other)} "
                "(rules and loss are this stack's)"
            )

    def _from_a_trace(
        self, architecture: Architecture, options: ActivationOptions, shape: str, option: str
    ) -> CoefficientDocument | None:
        """Trace ``options`` and their siblings now, where that is allowed."""
        if self._device_asked is None:
            self._device_asked = options.mask_bias
        if not self._trace or shape != self.planned or options.mask_bias != self._device_asked:
            return None
        # Loading a subprocess machinery costs milliseconds that a plan of a bundled model does not have.
        from launcher.evidence.tracing import trace

        try:
            document = trace(architecture, siblings(options), python=self._stack.python, progress=self._progress)
        except (EnvironmentLacks, ProbeFailed) as error:
            self._trace = False
            self._warn(f"no trace of {architecture.model}: {error}; closed forms are used")
            return None
        known = self._traced.get(shape)
        self._traced[shape] = document if known is None else known.merged(document)
        try:
            keep(document)
        except OSError as error:
            self._warn(f"traced coefficients are not kept: {cache_folder()}: {error.strerror}")
        if option not in document.sets:
            return None
        self._say_versions(document)
        return document

    def _note(self, sentence: str) -> None:
        if sentence not in self._notes:
            self._notes.append(sentence)
