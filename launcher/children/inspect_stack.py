"""Says which training packages a Python has: one JSON document on the last line of stdout.

Run by the training Python: ``python inspect_stack.py torch trl ...``. Reads only the metadata of
installed distributions: importing torch would take five seconds. Written for Pythons that are too
old for us as well, so that they can say so: no annotations, nothing newer than Python 3.6.
"""

import json
import re
import sys


def look(packages):
    """What this interpreter has.

    Args:
        packages: Names of distributions on PyPI.

    Returns:
        A dictionary with ``python`` (path), ``python_version``, ``versions`` (package to version,
        absent ones left out), ``cuda`` (what torch was built for, or None) and ``notes``.
    """
    found = {
        "python": sys.executable,
        "python_version": ".".join(str(part) for part in sys.version_info[:3]),
        "versions": {},
        "cuda": None,
        "notes": [],
    }
    try:
        from importlib import metadata
    except ImportError:  # Before 3.8.
        return found
    for package in packages:
        try:
            distribution = metadata.distribution(package)
        except metadata.PackageNotFoundError:
            continue
        version = _version(distribution)
        if version is None:
            found["notes"].append(package + " is installed without metadata that says its version")
            continue
        found["versions"][package] = version
        if package == "torch":
            found["cuda"], note = torch_build(distribution.locate_file("torch/version.py"))
            found["notes"] += [note] if note else []
    return found


def _version(distribution):
    # `distribution.version` parses the whole description as an e-mail: 1 ms a package.
    for name in ("METADATA", "PKG-INFO"):
        version = re.search(r"^Version:(.*)$", distribution.read_text(name) or "", re.MULTILINE)
        if version:
            return version.group(1).strip() or None
    return None


def torch_build(version_file):
    """The CUDA version that torch was built for, read from its version.py as text, and a note."""
    try:
        text = version_file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None, "torch/version.py cannot be read: the CUDA version of its build is not known"
    cuda = re.search(r"""^cuda\b[^=\n]*=\s*['"]([0-9.]+)['"]""", text, re.MULTILINE)
    if cuda:
        return cuda.group(1), None
    if re.search(r"""^hip\b[^=\n]*=\s*['"]""", text, re.MULTILINE):
        return None, "torch is a ROCm build; trlfit plans for NVIDIA cards"
    return None, None


if __name__ == "__main__":
    # Files beside this one must not stand in for what importlib.metadata imports.
    sys.path.pop(0)
    print(json.dumps(look(sys.argv[1:])))
