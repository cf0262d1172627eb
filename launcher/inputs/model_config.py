"""Find a model's config.json: a path, the bundled shapes, the hub cache, the hub; in that order."""

from __future__ import annotations

import contextlib
import json
import os
import re
from importlib import import_module
from pathlib import Path
from typing import Any

from launcher.errors import EnvironmentLacks, TrlfitError, UsageError
from launcher.inputs.small_file import read_text
from launcher.inputs.validation_text import MAX_PATH, shown
from launcher.paths import expanded
from planner.architecture import Architecture
from planner.config.reader import UnreadableConfig, read_architecture
from profiles.models import find_model, nearest

HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?$")
MAX_CONFIG_BYTES = 8 * 2**20
"""The largest real config.json is below 200 kB; anything far beyond is some other file."""
HUB_TIMEOUT_S = 10


def resolve_architecture(model: str) -> Architecture:
    """Shapes of ``model``.

    Args:
        model: hub id, local folder, or a config.json.

    Raises:
        UsageError: the path or id names nothing, or the config cannot be read as a decoder.
        EnvironmentLacks: only the hub could know it, and the hub cannot be asked.
    """
    try:
        path = expanded(model)
        exists = path.exists()
    except (OSError, ValueError):  # too long, a NUL
        path, exists = Path(), False
    if exists:
        return _from_path(model, path)
    if model.startswith((".", "/", "~")) or model.endswith(".json"):
        raise UsageError(f"model {shown(model, MAX_PATH)}: no such file or folder")
    bundled = find_model(model)
    if bundled is not None:
        return _read(bundled.config, model=bundled.id, origin="bundled", where=model)
    if not HUB_ID.match(model):
        raise UsageError(f"model {shown(model, MAX_PATH)} is neither a path nor a hub id such as Qwen/Qwen3-8B")
    cached = _cached_config(model)
    if cached is not None:
        return _read(_load(cached), model=model, origin="hub cache", where=model)
    return _read(_load(_download(model)), model=model, origin="hub", where=model)


def _from_path(model: str, path: Path) -> Architecture:
    if path.is_dir():
        config = path / "config.json"
        if not config.is_file():
            raise UsageError(f"model folder {model!r} has no config.json")
        return _read(_load(config), model=model, origin="folder", where=str(config))
    data = _load(path)
    if str(data.get("schema", "")).startswith("trlfit.plan/"):
        raise UsageError(f"{model} is a plan, not a model; give it to `trlfit write`, `trlfit launch` or --against")
    return _read(data, model=model, origin="config.json", where=model)


def _load(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``."""
    text = read_text(path, "model config", MAX_CONFIG_BYTES, "give the model's config.json")
    try:
        data = json.loads(text)
    except (RecursionError, ValueError) as error:
        line = f" at line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise UsageError(f"{path}: is not valid JSON{line}; give the model's config.json") from None
    if not isinstance(data, dict):
        raise UsageError(f"{path}: holds no JSON object; give the model's config.json")
    return data  # pyright: ignore[reportUnknownVariableType]


def _read(config: dict[str, Any], *, model: str, origin: str, where: str) -> Architecture:
    try:
        return read_architecture(config, model=model, origin=origin)
    except UnreadableConfig as error:
        raise UsageError(f"{where}: {str(error).removeprefix('config.json: ')}") from None


def hub_cache() -> Path:
    """The folder where huggingface_hub keeps repositories."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(variable):
            return expanded(os.environ[variable])
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return expanded(home) / "hub"


def _cached_config(model: str) -> Path | None:
    """config.json of the newest cached revision, found without importing huggingface_hub (200 ms)."""
    repository = hub_cache() / ("models--" + model.replace("/", "--"))
    try:
        revision = (repository / "refs" / "main").read_text(encoding="utf-8").strip()
        candidates = [repository / "snapshots" / revision]
    except OSError:
        candidates = []
    with contextlib.suppress(OSError):
        candidates += sorted((repository / "snapshots").iterdir(), key=lambda p: p.stat().st_mtime, reverse=True)
    return next((c / "config.json" for c in candidates if (c / "config.json").is_file()), None)


def _suggestion(model: str) -> str:
    close = nearest(model)
    return f"; did you mean {', '.join(close[:3])}?" if close else ""


def _download(model: str) -> Path:
    """config.json from the hub, into its cache."""
    if os.environ.get("HF_HUB_OFFLINE", "").strip().upper() in ("1", "TRUE", "YES", "ON"):
        raise EnvironmentLacks(
            f"model {model!r} is not bundled and not in the hub cache, and HF_HUB_OFFLINE is set{_suggestion(model)}"
        )
    try:
        # By name: an optional package, with types that neither checker can follow.
        hub: Any = import_module("huggingface_hub")
        http_error: type[Exception] = import_module("huggingface_hub.errors").HfHubHTTPError
        utils: Any = import_module("huggingface_hub.utils")
    except ImportError:
        raise EnvironmentLacks(
            f"model {model!r} is not bundled; to ask the hub: pip install huggingface_hub{_suggestion(model)}"
        ) from None
    # Its own retries and progress bars would stand on stderr between the user and our one line.
    utils.logging.set_verbosity_error()
    utils.disable_progress_bars()
    try:
        # Asked first, because the download alone tries a dead network for half a minute.
        hub.get_hf_file_metadata(hub.hf_hub_url(model, "config.json"), timeout=HUB_TIMEOUT_S)
        return Path(hub.hf_hub_download(model, "config.json", etag_timeout=HUB_TIMEOUT_S))
    except http_error as error:
        raise _hub_error(model, error) from None
    except (OSError, ValueError) as error:
        # Connection errors of every HTTP client version derive from OSError; offline modes raise ValueError kinds.
        first = str(error).strip().splitlines()[0][:120] if str(error).strip() else type(error).__name__
        raise EnvironmentLacks(
            f"model {model!r} is not bundled and the hub cannot be reached ({first}){_suggestion(model)}"
        ) from None
    except Exception as error:  # huggingface_hub 1 and later raise httpx errors, which have no OSError base
        if type(error).__module__.split(".")[0] not in (
            "httpx",
            "httpx2",
            "httpcore",
            "httpcore2",
            "requests",
            "urllib3",
        ):
            raise
        raise EnvironmentLacks(
            f"model {model!r} is not bundled and the hub cannot be reached ({type(error).__name__}){_suggestion(model)}"
        ) from None


def _hub_error(model: str, error: Exception) -> TrlfitError:
    name = type(error).__name__
    if name == "GatedRepoError":
        return EnvironmentLacks(f"model {model!r} is gated: accept its licence on the hub, then run `hf auth login`")
    if name == "EntryNotFoundError" or name == "RemoteEntryNotFoundError":
        return UsageError(f"model {model!r} has no config.json on the hub; give a transformers model")
    if name == "RepositoryNotFoundError":
        return UsageError(f"model {model!r} is not on the hub, or private without a login{_suggestion(model)}")
    status = getattr(getattr(error, "response", None), "status_code", name)
    return EnvironmentLacks(f"model {model!r}: the hub answered with an error ({status}); try again later")
