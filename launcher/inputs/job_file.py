"""Job documents: YAML and flags to a validated Job, with the origin of every value. Flags beat the file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from launcher.errors import UsageError
from launcher.inputs.small_file import read_text
from launcher.inputs.validation_text import shown, validation_line
from planner.job import Job

MAX_JOB_BYTES = 2**20


def load_job_file(path: Path) -> dict[str, Any]:
    """The mapping in a job file, unvalidated.

    Raises:
        UsageError: not YAML, not a mapping, a key twice; with the line.
    """
    import yaml  # 10 ms that plans without a job file do not pay

    from launcher.inputs.strict_yaml import StrictLoader

    text = read_text(path, "job file", MAX_JOB_BYTES)
    try:
        data = yaml.load(text, Loader=StrictLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" line {mark.line + 1}" if mark else ""
        reason = " ".join(part for part in (error.context, error.problem) if part)
        raise UsageError(f"job file {shown(path)}{line}: {reason}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        deep = isinstance(error, RecursionError)
        reason = "nested too deeply" if deep else (str(error).splitlines() or [type(error).__name__])[0][:120]
        raise UsageError(f"job file {shown(path)}: not valid YAML ({reason})") from None
    if data is None:
        raise UsageError(f"job file {shown(path)} is empty; it needs at least a line such as model: Qwen/Qwen3-8B")
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):  # pyright: ignore[reportUnknownVariableType]
        raise UsageError(
            f"job file {shown(path)} is not a mapping of fields; start with a line such as model: Qwen/Qwen3-8B"
        )
    return data  # pyright: ignore[reportUnknownVariableType]


def _merge(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        current = merged.get(key)
        merged[key] = _merge(current, value) if isinstance(current, dict) and isinstance(value, Mapping) else value  # pyright: ignore[reportUnknownArgumentType]
    return merged


def _origins(data: Mapping[str, Any], origin: str, prefix: str = "") -> dict[str, str]:
    """Dotted leaf -> origin."""
    out: dict[str, str] = {}
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            out |= _origins(value, origin, f"{prefix}{key}.")  # pyright: ignore[reportUnknownArgumentType]
        else:
            out[prefix + key] = origin
    return out


def resolve_job(
    file: Path | None, flags: Mapping[str, Any], flag_names: Mapping[str, str]
) -> tuple[Job, dict[str, str]]:
    """Merge file and flags over the defaults.

    Args:
        file: job file, or None.
        flags: nested values given on the command line only.
        flag_names: dotted field -> flag that set it.

    Returns:
        The job, and for every field where its value came from.

    Raises:
        UsageError: one line naming the field, the file or flag, and what is allowed.
    """
    from_file = load_job_file(file) if file is not None else {}
    if file is not None:
        where = f"job file {shown(file)}"
        if "model" not in from_file and "model" not in flags:
            raise UsageError(f"{where} names no model; add a line such as model: Qwen/Qwen3-8B")
        # On its own first, so that a wrong field is reported as the file's even where a flag would replace it.
        _validated({"model": str(flags.get("model", "")), **from_file}, where, {})
    merged = _merge(from_file, flags)
    if "model" not in merged:
        raise UsageError("no model given; name one, for example: trlfit plan Qwen/Qwen3-8B")
    job = _validated(merged, "job", flag_names)
    origins = dict.fromkeys(_origins(job.model_dump(mode="json"), "default"), "default")
    if file is not None:
        origins |= _origins(from_file, file.name)
    origins |= {field: flag_names.get(field, "flag") for field in _origins(flags, "flag")}
    return job, origins


def job_over(
    base: Mapping[str, Any], where: str, flags: Mapping[str, Any], flag_names: Mapping[str, str]
) -> tuple[Job, dict[str, str]]:
    """The job of another document, with flags over it; like ``resolve_job`` in all else.

    Args:
        base: job values.
        where: the document's name, for messages and origins.
        flags: nested values given on the command line only.
        flag_names: dotted field -> flag that set it.

    Raises:
        UsageError: one line naming the field, the document or flag, and what is allowed.
    """
    _validated(base, where, {})
    job = _validated(_merge(dict(base), flags), "job", flag_names)
    origins = dict.fromkeys(_origins(job.model_dump(mode="json"), where), where)
    return job, origins | {field: flag_names.get(field, "flag") for field in _origins(flags, "flag")}


def _validated(data: Mapping[str, Any], where: str, flag_names: Mapping[str, str]) -> Job:
    try:
        return Job.model_validate(data)
    except ValidationError as error:
        raise UsageError(validation_line(error, where, flag_names)) from None
    except RecursionError:
        raise UsageError(f"{where}: nested too deeply") from None
