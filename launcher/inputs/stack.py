"""Which versions will train: stated ones, then the training Python's, then the newest known."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from launcher.errors import EnvironmentLacks, UsageError
from launcher.inputs.validation_text import short
from launcher.paths import expanded
from planner.stack import PACKAGES, Origin, Stack
from profiles.stacks import load_packages

OLDEST_PYTHON = (3, 9)
"""Below, the oldest transformers and TRL that we know anything about do not install."""

TIME_LIMIT_S = 30.0
"""An import-free child takes 0.1 s; a cold network file system may take many seconds."""

_ABSENT = ("none", "absent")
_seen: dict[str, Stack] = {}


def resolve_stack(
    stated: Mapping[str, str],
    python: str | None = None,
    *,
    inspect: bool = True,
    assume_optional: bool = False,
) -> Stack:
    """The stack that a plan is made for.

    Args:
        stated: Package to version, as in ``--stack trl=1.12.0,torch=2.11.0``; ``none`` takes a
            package out.
        python: The training Python; None for the one that runs trlfit.
        inspect: Whether to look into that Python at all.
        assume_optional: The plan is for another box: packages that are simply installed there
            (deepspeed, bitsandbytes) count as present.

    Returns:
        Stated versions beat installed ones. Where TRL is not installed the stack is not a training
        Python's, and missing core packages are taken as the newest known.

    Raises:
        UsageError: An unknown package or a malformed version.
        EnvironmentLacks: ``python`` cannot be asked.
    """
    wanted = _checked(stated)
    stack = inspect_stack(python) if inspect else Stack()
    assume_core = "trl" not in stack.versions
    known = load_packages()
    for package in PACKAGES:
        role = known[package].role
        assumed = (role == "core" and assume_core) or (role == "elsewhere" and assume_optional)
        if package in wanted:
            _set(stack, package, wanted[package], "stated")
        elif package in stack.versions:
            stack.origin[package] = "installed"
        elif assumed:
            _set(stack, package, known[package].newest, "newest known")
        else:
            _set(stack, package, None, "absent")
    if "torch" in wanted:
        stack.cuda = None  # Which build of the stated version will be installed is not known.
    return stack


def _set(stack: Stack, package: str, version: str | None, origin: Origin) -> None:
    if version is None:
        stack.versions.pop(package, None)
        stack.origin[package] = "absent"
    else:
        stack.versions[package] = version
        stack.origin[package] = origin


def _checked(stated: Mapping[str, str]) -> dict[str, str | None]:
    """Stated versions under the names on PyPI; None takes the package out."""
    wanted: dict[str, str | None] = {}
    for name, version in stated.items():
        package = name.strip().casefold().replace("_", "-")
        if package not in PACKAGES:
            raise UsageError(f"--stack {short(name)}={short(version)}: {_unknown(package)}")
        text = version.strip()
        if text.casefold() in _ABSENT:
            wanted[package] = None
            continue
        try:
            Version(text)
        except ValueError:  # Also thousands of digits, which Python refuses to read.
            newest = load_packages()[package].newest
            raise UsageError(
                f"--stack {package}={short(version)}: not a version; write for example "
                f"{package}={newest}, or {package}=none"
            ) from None
        wanted[package] = text
    return wanted


def _unknown(package: str) -> str:
    import difflib  # Only mistyped names need it.

    near = difflib.get_close_matches(package[:64], PACKAGES, n=1)
    hint = f"did you mean {near[0]}" if near else f"it is one of {', '.join(PACKAGES)}"
    return f"no package that a plan depends on; {hint}"


def inspect_stack(python: str | None = None, *, limit_s: float = TIME_LIMIT_S) -> Stack:
    """What is installed in a Python. Asked once per process and Python.

    Args:
        python: A path or a command; None for the one that runs trlfit, which needs no child.
        limit_s: How long the child may take.

    Raises:
        EnvironmentLacks: Not found, not executable, no Python, too old, crashed, or too slow.
    """
    path = _located(python)
    if path not in _seen:
        _seen[path] = _stack(path, _look_here() if _is_ours(path) else _look_there(path, limit_s))
    return _seen[path].model_copy(deep=True)


_METADATA_FOLDER = re.compile(r"(?P<name>[A-Za-z0-9._]+)-(?P<version>[^-]+)(-[^-]+)*\.(dist|egg)-info$")


def _look_here() -> dict[str, Any]:
    """What our own interpreter has, from the names of its metadata folders.

    importlib.metadata would say the same and cost 40 ms, most of it for an e-mail parser.
    """
    wanted = {re.sub(r"[-_.]+", "-", package).lower(): package for package in PACKAGES}
    found: dict[str, Any] = {
        "python": sys.executable,
        "python_version": ".".join(map(str, sys.version_info[:3])),
        "versions": {},
        "cuda": None,
        "notes": [],
    }
    for folder in dict.fromkeys(sys.path):
        try:
            names = os.listdir(folder or ".")  # noqa: PTH208  a Path for each of hundreds of names is time lost
        except OSError:
            continue
        for match in filter(None, map(_METADATA_FOLDER.match, names)):
            package = wanted.get(re.sub(r"[-_.]+", "-", match["name"]).lower())
            if package is None or package in found["versions"]:
                continue
            found["versions"][package] = match["version"]
            if package == "torch":
                # By name: the script is written for older Pythons and carries no types.
                script: Any = importlib.import_module("launcher.children.inspect_stack")
                found["cuda"], note = script.torch_build(Path(folder) / "torch" / "version.py")
                found["notes"] += [note] if note else []
    return found


def _look_there(path: str, limit_s: float) -> dict[str, Any]:
    from launcher.inputs.stack_child import ask_python  # subprocess and selectors: 5 ms most plans save.

    return ask_python(path, limit_s)


def _located(python: str | None) -> str:
    """Absolute path of the interpreter. Links stay: a venv's Python is one."""
    if python is None:
        return sys.executable
    if os.sep not in python:
        import shutil  # 3 ms, for its compressors.

        found = shutil.which(python)
        if found is None:
            raise EnvironmentLacks(f"--python {python}: no such command on PATH")
        return str(Path(found).absolute())
    path = expanded(python)
    try:
        if path.is_dir():
            inside = path / "bin" / "python"
            hint = f"; did you mean {inside}" if inside.exists() else ""
            raise EnvironmentLacks(f"--python {python} is a folder{hint}")
        if not path.exists():
            gone = f"a link to {path.readlink()}, which" if path.is_symlink() else "not there"
            raise EnvironmentLacks(f"--python {python} is {gone}" + (" is not there" if path.is_symlink() else ""))
    except (OSError, ValueError) as error:
        raise EnvironmentLacks(f"--python {short(python)}: {error}") from None
    if not os.access(path, os.X_OK):
        raise EnvironmentLacks(f"--python {python} is not executable")
    return str(path.absolute())


def _is_ours(path: str) -> bool:
    """Whether ``path`` is this interpreter: same file, reached through the same environment."""
    ours = Path(sys.executable)
    other = Path(path)
    return other.parent.resolve() == ours.parent.resolve() and other.resolve() == ours.resolve()


def _stack(path: str, found: dict[str, Any]) -> Stack:
    version = tuple(int(part) for part in found["python_version"].split(".")[:2])
    if version < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        raise EnvironmentLacks(f"--python {path} is Python {found['python_version']}; training needs {oldest} or newer")
    stack = Stack(
        python=path,
        python_version=found["python_version"],
        cuda=found["cuda"],
        notes=list(found["notes"]),
    )
    for package, text in found["versions"].items():
        try:
            Version(text)
        except InvalidVersion:
            stack.notes.append(f"{package} {text} is no version by the rules of PyPI and is ignored")
            continue
        _set(stack, package, text, "installed")
    return stack
