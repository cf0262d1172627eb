"""The planning session: what is asked, as a job file with edits over it, so that a command line can ask the same."""

from __future__ import annotations

import shlex
import stat
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from launcher.errors import UsageError
from launcher.flags import FLAG_FIELDS
from launcher.inputs.job_file import resolve_job
from launcher.inputs.validation_text import shown
from planner.job import Job

JOB_FILE = Path("job.yaml")
"""The job that is opened where none is named: this file in the working directory."""
EXAMPLE: Mapping[str, Any] = {"model": "Qwen/Qwen3-8B", "method": "lora"}
"""Planned where there is no job file, so that the first screen shows a real plan."""
MAX_FILE_BYTES = 64 * 2**10
"""Of a job file on the screen, where every keystroke reads it: 0.2 s."""
HERE = "the screen"
"""Where a value came from that was typed here."""
PINS = "pins"
_FLAGS = {path: "--" + name.replace("_", "-") for name, path in FLAG_FIELDS.items()}
_MAPPINGS = {"pins": "--pin", "trl": "--trl", "stack": "--stack"}


@dataclass
class Session:
    """A job file, if any, and the edits over it."""

    file: Path | None = None
    edits: dict[str, Any] = field(default_factory=dict[str, Any])
    """Dotted job field -> value."""
    hidden_cards: frozenset[str] = frozenset()
    """Cards of this machine that the run must not use, by uuid or index."""
    _before: list[tuple[Path | None, dict[str, Any]]] = field(default_factory=list[tuple[Path | None, dict[str, Any]]])
    _resolved: tuple[object, tuple[Job, dict[str, str]] | UsageError] | None = None
    """What the job was made of, and what it came to: a screen asks twenty times, and YAML is slow to read."""

    @classmethod
    def here(cls, file: Path | None = None) -> Session:
        """The session of a job file, of this folder's, or of an example."""
        if file is None and not JOB_FILE.is_file():
            return cls(edits=dict(EXAMPLE))
        return cls(file=file or JOB_FILE)

    @property
    def standing(self) -> str:
        """Where the job is from, and whether a file has it."""
        if self.file is None:
            return "an example; w saves a job" if self.edits == EXAMPLE else "in no file yet; w saves it"
        return f"{self.file}, changed here; w saves it" if self.edits else str(self.file)

    @property
    def is_unsaved(self) -> bool:
        """Edits would be lost."""
        return bool(self.edits) and not (self.file is None and self.edits == EXAMPLE)

    @property
    def own_file(self) -> Path | None:
        """The job file, unless it is the record of a run, which saving must not change."""
        from launcher.running.run_record import COMMAND  # saving is rare, and what it needs slow to load

        return None if self.file is None or (self.file.parent / COMMAND).is_file() else self.file

    def job(self) -> tuple[Job, dict[str, str]]:
        """The job as resolved, and where each value came from.

        Raises:
            UsageError: the file or an edit is wrong; one line.
        """
        made_of = (self.file, self._stamp(), repr(self.edits))
        known = self._resolved
        if known is None or known[0] != made_of:
            try:
                known = (made_of, self._resolve(self.edits))
            except UsageError as error:
                known = (made_of, error)
            self._resolved = known
        if isinstance(known[1], UsageError):
            raise UsageError(str(known[1]))
        return known[1]

    def _stamp(self) -> tuple[int, ...] | None:
        """Changes when the file does."""
        try:
            status = (self.file or Path()).stat()
        except (OSError, ValueError):
            return None
        return (status.st_ino, status.st_size, status.st_mtime_ns)

    def _resolve(self, edits: Mapping[str, Any]) -> tuple[Job, dict[str, str]]:
        if self.file is not None:
            self._check_file(self.file)
        return resolve_job(self.file, nested(edits), dict.fromkeys(edits, HERE))

    @staticmethod
    def _check_file(file: Path) -> None:
        """A pipe would be waited for at every key, and a large file read at every key."""
        try:
            status = file.stat()
        except (OSError, ValueError):
            return  # what is wrong is said where it is read
        if stat.S_ISDIR(status.st_mode):
            return
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(
                f"job file {shown(file)} is no plain file; `trlfit plan --job` reads pipes, the screens do not"
            )
        if status.st_size > MAX_FILE_BYTES:
            raise UsageError(
                f"job file {shown(file)} is larger than {MAX_FILE_BYTES // 1024} KiB, too large for the screens; "
                "is it the right file?"
            )

    def check(self, path: str, value: Any) -> str | None:
        """What is wrong with ``value`` for the field ``path``, or None."""
        changed = self.edits | {path: value}
        try:
            self._resolve(changed)
        except UsageError as error:
            return str(error).removeprefix(f"{HERE}: ")
        return None

    def set(self, path: str, value: Any) -> None:
        """Put ``value`` in the place of what the file or the default says."""
        self._remember()
        if path == PINS:  # all of them at once
            self.edits = {other: edit for other, edit in self.edits.items() if not other.startswith(f"{PINS}.")}
        self.edits[path] = value

    def open(self, file: Path) -> None:
        """Go on from another job file, without the edits over this one."""
        self._remember()
        self.file, self.edits = file, {}

    def take(self, flags: str) -> None:
        """Set what flags of the command line say, as one edit.

        Raises:
            UsageError: they say nothing of the job.
        """
        from launcher.flags import Parser, add_job_flags, job_flags

        parser = Parser(prog="trlfit plan", add_help=False)
        add_job_flags(parser)
        said, fields = job_flags(parser.parse_args(shlex.split(flags)))
        changed: dict[str, Any] = {}
        for path in fields:
            value: Any = said
            for part in _parts(path):
                value = value[part]
            changed[path] = value
        self._resolve(self.edits | changed)
        self._remember()
        self.edits |= changed

    def _remember(self) -> None:
        self._before.append((self.file, dict(self.edits)))

    def reset(self, path: str) -> None:
        """Back to what the file or the default says."""
        gone = {path, *(other for other in self.edits if path == PINS and other.startswith(f"{PINS}."))}
        if path != "model" and not gone.isdisjoint(self.edits):
            self._remember()
            self.edits = {other: edit for other, edit in self.edits.items() if other not in gone}

    def undo(self) -> bool:
        """Take the last edit back; whether there was one."""
        if not self._before:
            return False
        self.file, self.edits = self._before.pop()
        return True

    def command(self, verb: str = "plan", *words: str, fields: Collection[str] | None = None) -> str:
        """The command line that asks the same; with ``fields`` it takes no edits but of these."""
        parts = ["trlfit", verb]
        if self.file is not None:
            parts += ["--job", str(self.file)]
        for path, value in self.edits.items():
            if fields is None or path in fields:
                parts += _words(path, value)
        return shlex.join([*parts, *words])

    def save(self, path: Path) -> None:
        """Write the job as a file that stands alone, and go on from it.

        Raises:
            UsageError: an edit is wrong, or the path is no place for a file.
            OSError: the file cannot be written.
        """
        from launcher.files import replace_file

        if path.exists() and not path.is_file():  # renaming over a device would take it away
            raise UsageError(f"{shown(path)} is a {'folder' if path.is_dir() else 'device'}; name a file")
        job, _ = self.job()
        text = yaml.safe_dump(
            job.model_dump(mode="json", exclude_defaults=True), sort_keys=False, allow_unicode=True, width=100
        )
        replace_file(path.resolve(), text)  # a link stays one
        self.file, self.edits = path, {}
        self._before.clear()  # they were edits over another file


def nested(edits: Mapping[str, Any]) -> dict[str, Any]:
    """``{"data.packing": True}`` as ``{"data": {"packing": True}}``."""
    out: dict[str, Any] = {}
    for path, value in edits.items():
        *parents, leaf = _parts(path)
        target = out
        for parent in parents:
            target = target.setdefault(parent, {})
        target[leaf] = dict(value) if path == PINS else value  # a pin of its own may follow
    return out


def _parts(path: str) -> list[str]:
    """``lora.r`` as its fields; keys of the mappings keep their dots."""
    return path.split(".", 1) if path.startswith(("pins.", "trl.", "stack.")) else path.split(".")


def _words(path: str, value: Any) -> list[str]:
    """Words of the command line that set one field."""
    if path == PINS:
        return [word for knob, pin in value.items() for word in _words(f"{PINS}.{knob}", pin)]
    head, _, rest = path.partition(".")
    if head in _MAPPINGS:
        text = _listed(value) if isinstance(value, list) else _scalar(value)  # pyright: ignore[reportUnknownArgumentType]
        return [_MAPPINGS[head], f"{rest}={text}"]
    if path == "model":
        return [str(value)]
    flag = _FLAGS[path]
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    text = _listed(value) if isinstance(value, list) else str(value)  # pyright: ignore[reportUnknownArgumentType]
    return [flag, text]


def _listed(values: list[Any]) -> str:
    return ",".join(map(str, values))


def _scalar(value: Any) -> str:
    """A plain value as YAML reads it back: of a float ``2e-05`` would be text."""
    if isinstance(value, str):
        return value
    return "" if value is None else yaml.safe_dump(value).split("\n")[0]
