"""Reading a training log: tracebacks by rank, their phase, short memory, lost peers, hangs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

TAIL_BYTES = 1 << 20
"""Eight ranks' tracebacks take 60 KB; the rest is for what comes after them."""

Sign = Literal["hung", "node", "time_limit", "preempted", "host_memory", "cancelled", "index"]
Where = Literal["gpu", "host", "shared_memory"]
Phase = Literal["load", "generate", "forward", "loss", "backward", "step", "evaluate", "save"]

_END_LINES = 400
"""What eight ranks print after the first one's traceback."""
_UNITS = {"bytes": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = r"([\d.]+) (bytes|B|[KMGT]i?B)"
_RANK = re.compile(r"^\[(?:rank|default)?(\d+)\]:\s?")
_FRAME = re.compile(r'^\s*File "(?P<path>.+)", line (?P<line>\d+), in (?P<function>.+)$')
_RAISED = re.compile(r"^(?P<kind>(?:\w+\.)*[A-Z]\w*)(?:: ?(?P<message>.*))?$")
_CHAINED = re.compile(r"^(The above exception was the direct|During handling of the above)")
_TRACEBACK = "Traceback (most recent call last):"
_THROWN = re.compile(r"terminate called after throwing an instance of '(?P<kind>[\w:<>]+)'")
_WHAT = re.compile(r"^\s*what\(\):\s*(?P<message>.*)$")

_SHORT = re.compile(
    r"out of memory|OutOfMemory|can't allocate memory|Cannot allocate memory|MemoryError"
    r"|Unable to allocate .* for an array|STATUS_ALLOC_FAILED|out of shared memory"
    r"|No available memory for the cache blocks",
    re.IGNORECASE,
)
_ON_HOST = re.compile(r"DefaultCPUAllocator|\bMemoryError|ArrayMemoryError|Cannot allocate memory|for an array")
_SIGNS: tuple[tuple[Sign, re.Pattern[str]], ...] = (
    ("time_limit", re.compile(r"CANCELLED AT .* DUE TO TIME LIMIT")),
    ("preempted", re.compile(r"CANCELLED AT .* DUE TO PREEMPTION")),
    ("node", re.compile(r"DUE TO NODE FAILURE|fallen off the bus|GPU is lost|uncorrectable ECC")),
    ("cancelled", re.compile(r"(?:STEP|JOB) \S+ ON \S+ CANCELLED AT")),
    ("host_memory", re.compile(r"Detected \d+ oom[_-]kill event|task \d+: Out Of Memory")),
    ("index", re.compile(r"Assertion .(?:srcIndex < srcSelectDimSize|t >= 0 && t < n_classes)")),
    ("hung", re.compile(r"Watchdog caught collective operation timeout")),
    ("hung", re.compile(r"Timed out waiting \d+ms for (?:recv|send) operation")),
)
_PEER = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|ncclRemoteError"
    r"|remote process exited or there was a network error|Rendezvous\w+Error|DistNetworkError"
    r"|DistStoreError|failed to recv, got 0 bytes"
)
_READS_DATA = frozenset({"_prepare_dataset", "tokenize_fn", "apply_chat_template", "torch_call", "fetch"})
_NO_DEVICE = re.compile(r"No CUDA GPUs are available|no kernel image|driver version is insufficient")
_LOOP = frozenset({"training_step", "_run_epoch", "prediction_step", "call_event"})
_EXIT_RANK = re.compile(r"^\s*rank\s*:\s*(\d+)")
_EXITCODE = re.compile(r"^\s*exitcode\s*:\s*(-?\d+)")
_DIED = re.compile(r"died with <Signals\.\w+: (\d+)>")
_BASH = re.compile(r": line \d+:\s+\d+ (Killed|Segmentation fault|Bus error|Aborted|Terminated)\b")
_BASH_SIGNALS = {
    "Killed": 9, "Segmentation fault": 11, "Bus error": 7, "Aborted": 6, "Terminated": 15,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of a traceback."""

    path: str
    line: int
    function: str
    source: str

    @property
    def is_users(self) -> bool:
        """Outside installed packages and the standard library: the run's own script."""
        return not re.search(r"(site|dist)-packages|/lib/python\d|^<", self.path)


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception with the frames it came through, outermost first."""

    kind: str
    message: str
    frames: tuple[Frame, ...]

    @property
    def text(self) -> str:
        """As Python prints it: ``ValueError: ...``."""
        return f"{self.kind}: {self.message}" if self.message else self.kind

    @property
    def is_short_of_memory(self) -> bool:
        """Whether it says that memory ran out, of a card or of the host."""
        return bool(_SHORT.search(self.text))

    @property
    def is_lost_peer(self) -> bool:
        """Whether it only says that another process went away."""
        return bool(_PEER.search(self.text))

    @property
    def is_about_data(self) -> bool:
        """Whether it came from reading, preparing or collating rows."""
        names = {frame.function for frame in self.frames}
        return bool(
            names & _READS_DATA
            or any(re.search(r"packages/(datasets|pyarrow)/", frame.path) for frame in self.frames)
            or self.kind.startswith(("datasets.", "pyarrow.", "jinja2."))
            or (self.frames and "train_dataset" in self.frames[-1].source)
            or self.is_beyond_vocabulary
        )

    @property
    def is_beyond_vocabulary(self) -> bool:
        """Whether an embedding was asked for a row that it does not have: a token id that the tokenizer never gave."""
        return bool(self.kind == "IndexError" and self.frames and self.frames[-1].function == "embedding")

    @property
    def is_about_setup(self) -> bool:
        """Whether a package, a driver or valid source text is missing."""
        return bool(
            self.kind.rsplit(".", 1)[-1] in {"ImportError", "ModuleNotFoundError", "SyntaxError"}
            or _NO_DEVICE.search(self.text)
        )

    @property
    def is_device_assert(self) -> bool:
        """Whether a kernel on the card found its input impossible; the log tells which kernel, the frames do not."""
        return "device-side assert" in self.text

    @property
    def is_in_training(self) -> bool:
        """Whether the training loop had begun."""
        return any(frame.function in _LOOP for frame in self.frames)

    @property
    def place(self) -> str | None:
        """``train.py:44``: the innermost line of the run's own script, else of anything."""
        frames = [frame for frame in self.frames if frame.is_users] or self.frames
        return f"{Path(frames[-1].path).name}:{frames[-1].line}" if frames else None

    @property
    def is_launchers(self) -> bool:
        """Whether it only reports that a child of the launcher failed."""
        return self.kind.rsplit(".", 1)[-1] in {"CalledProcessError", "ChildFailedError"}


@dataclass(frozen=True, slots=True)
class Failure:
    """What one rank died of: a chain of exceptions, the last one raised last."""

    rank: int | None
    line: int
    """Position in the log, to tell which rank was first."""
    chain: tuple[Raised, ...]

    @property
    def last(self) -> Raised:
        """The exception that ended the process."""
        return self.chain[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """An allocation that failed, as torch, numpy or the kernel tell it; None where they do not."""

    where: Where
    asked_bytes: int | None = None
    free_bytes: int | None = None
    capacity_bytes: int | None = None
    allocated_bytes: int | None = None
    """Held by torch's tensors at that moment."""
    unallocated_bytes: int | None = None
    """Reserved by torch's allocator and not in use: fragmentation."""
    others_bytes: int | None = None
    """Held by other processes on the same card."""
    gpu: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEvidence:
    """Everything a log says about an end."""

    failures: tuple[Failure, ...] = ()
    """In the order in which they appear."""
    signs: dict[Sign, str] = field(default_factory=dict[Sign, str])
    """Kind of sign -> the first line that shows it."""
    exit_code: int | None = None
    """Of the first process the launcher saw failing; negative: the signal that ended it."""
    exit_rank: int | None = None
    """Rank of that process, where the launcher tells it."""
    num_lines: int = 0

    @property
    def own(self) -> tuple[Failure, ...]:
        """Failures with a cause of their own, not those that report somebody else's."""
        return tuple(f for f in self.failures if not f.last.is_launchers and not f.last.is_lost_peer)

    @property
    def at_the_end(self) -> tuple[Failure, ...]:
        """``own`` failures that little follows: an earlier one was logged and survived."""
        return tuple(f for f in self.own if self.num_lines - f.line <= _END_LINES)


def read_tail(path: Path, limit: int = TAIL_BYTES) -> str:
    """The end of a text file, from a whole line on; empty when it cannot be read."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - limit))
            data = file.read()
    except OSError:
        return ""
    if size > limit:
        data = data[data.find(b"\n") + 1 :]
    return data.decode(errors="replace")


def read_evidence(log: str) -> LogEvidence:
    """Evidence from the text of a log."""
    lines = log.splitlines()
    streams: dict[int | None, list[tuple[int, str]]] = {}
    for number, line in enumerate(lines):
        rank = _RANK.match(line)
        key = int(rank.group(1)) if rank else None
        streams.setdefault(key, []).append((number, line[rank.end() :] if rank else line))
    failures: list[Failure] = []
    for rank_number, stream in streams.items():
        failures += _tracebacks(rank_number, stream)
        failures += _thrown(rank_number, stream)
    signs: dict[Sign, str] = {}
    for line in lines:
        for sign, pattern in _SIGNS:
            if pattern.search(line):
                signs.setdefault(sign, line.strip())
                break
    failures.sort(key=lambda failure: failure.line)
    code, first = _exit_code(lines)
    return LogEvidence(failures=tuple(failures), signs=signs, exit_code=code, exit_rank=first, num_lines=len(lines))


def read_shortage(text: str) -> Shortage:
    """The numbers of an out-of-memory message; formats of torch 1.x to 2.13, numpy, Metal."""
    where: Where = "host" if _ON_HOST.search(text) else "gpu"
    if "shared memory" in text:
        where = "shared_memory"
    gpu = re.search(r"GPU (\d+)", text)
    others = [_bytes(m) for m in re.finditer(rf"Process \d+ has {_SIZE} memory in use", text)]
    return Shortage(
        where=where,
        asked_bytes=_find(text, rf"ried to allocate {_SIZE}", rf"Unable to allocate {_SIZE}"),
        free_bytes=_find(text, rf"of which {_SIZE} is free", rf"{_SIZE} free"),
        capacity_bytes=_find(
            text,
            rf"total capac\w+ of {_SIZE}",
            rf"{_SIZE} total capacity",
            rf"max allowed: {_SIZE}",
        ),
        allocated_bytes=_find(text, rf"{_SIZE} is allocated by PyTorch", rf"{_SIZE} already allocated"),
        unallocated_bytes=_find(text, rf"{_SIZE} is reserved by PyTorch but unallocated"),
        others_bytes=sum(others) if others else None,
        gpu=int(gpu.group(1)) if gpu else None,
    )


def guess_phase(frames: Sequence[Frame]) -> Phase | None:
    """The plan's phase in which a traceback of transformers, TRL and accelerate stands.

    The outermost telling frame decides (a forward recomputed inside backward is backward), except
    that DeepSpeed steps inside accelerate's backward.
    """
    names = [frame.function for frame in frames]
    steps = [i for i, frame in enumerate(frames) if _steps(frame)]
    backwards = [i for i, frame in enumerate(frames) if _is_backward(frame)]
    if steps and (not backwards or steps[0] > backwards[0]):
        return "step"
    if backwards:
        return "backward"
    if any(n in {"save_model", "_save_checkpoint", "save_pretrained", "save_state"} for n in names):
        return "save"
    if any(n.startswith(("generate", "_generate")) for n in names):
        return "generate"
    if "evaluation_loop" in names:
        return "evaluate"
    if "training_step" in names or "prediction_step" in names or "compute_loss" in names:
        return "loss" if any(_is_loss(frame) for frame in frames) else "forward"
    loading = ("from_pretrained", "from_config", "__init__", "_prepare_for_training", "prepare")
    return "load" if any(n.startswith(loading) for n in names) else None


def _bytes(match: re.Match[str]) -> int:
    unit = match.group(2)
    return round(float(match.group(1)) * _UNITS.get(unit, _UNITS.get(unit[0], 1)))


def _find(text: str, *patterns: str) -> int | None:
    for pattern in patterns:
        if match := re.search(pattern, text):
            return _bytes(match)
    return None


def _tracebacks(rank: int | None, stream: Sequence[tuple[int, str]]) -> list[Failure]:
    """Tracebacks of one rank's lines; a chain ("During handling of ...") is one failure."""
    failures: list[Failure] = []
    frames: list[Frame] | None = None
    chained = False
    for number, line in stream:
        # A progress bar leaves its line open, so the header may stand at the end of one.
        if line.endswith(_TRACEBACK):
            frames = []
        elif _CHAINED.match(line):
            chained = bool(failures)
        elif frames is not None:
            if match := _FRAME.match(line):
                path, function = match["path"], match["function"]
                frames.append(Frame(path, int(match["line"]), function, ""))
            elif line.startswith((" ", "\t")):
                if frames and not frames[-1].source:
                    last = frames[-1]
                    frames[-1] = Frame(last.path, last.line, last.function, line.strip())
            elif raised := _RAISED.match(line):
                error = Raised(raised["kind"], (raised["message"] or "").strip(), tuple(frames))
                before = failures.pop().chain if chained and failures else ()
                failures.append(Failure(rank, number, (*before, error)))
                frames, chained = None, False
    return failures


def _thrown(rank: int | None, stream: Iterable[tuple[int, str]]) -> list[Failure]:
    """C++ exceptions that ended a process: no Python frames."""
    failures: list[Failure] = []
    kind: str | None = None
    for number, line in stream:
        if thrown := _THROWN.search(line):
            kind = thrown["kind"]
        elif kind is not None and (what := _WHAT.match(line)):
            error = Raised(kind, what["message"].strip(), ())
            failures.append(Failure(rank, number, (error,)))
            kind = None
    return failures


def _exit_code(lines: Sequence[str]) -> tuple[int | None, int | None]:
    """What torchrun, accelerate or bash say about the process that failed first: (exit code, rank)."""
    root = next((i for i, line in enumerate(lines) if line.startswith("Root Cause")), None)
    rank: int | None = None
    for line in lines[root:] if root is not None else ():
        if match := _EXIT_RANK.match(line):
            rank = int(match.group(1))
        elif match := _EXITCODE.match(line):
            return int(match.group(1)), rank
    for line in lines:
        if match := _DIED.search(line):
            return -int(match.group(1)), None
        if match := _BASH.search(line):
            return -_BASH_SIGNALS[match.group(1)], None
    return None, None


def _is_backward(frame: Frame) -> bool:
    autograd = ("torch/_tensor.py", "torch/autograd/__init__.py", "accelerate/accelerator.py")
    return (frame.function == "backward" and frame.path.endswith(autograd)) or (
        frame.function in {"_engine_run_backward", "unpack_hook"}
    )


def _steps(frame: Frame) -> bool:
    if frame.function in {"clip_grad_norm_", "clip_grad_norm"}:
        return True
    return frame.function == "step" and bool(
        re.search(r"torch/optim/|accelerate/optimizer\.py|deepspeed/|bitsandbytes/optim", frame.path)
    )


def _is_loss(frame: Frame) -> bool:
    """The head and everything after it: the plan counts logits and their loss as one phase."""
    if re.search(r"trl/kernels/|liger_kernel/|transformers/loss/", frame.path):
        return True
    if re.search(r"cross_entropy|log_?prob|log_softmax|entropy|logps", frame.function):
        return True
    return bool(re.search(r"\blm_head\(|\blogits\b", frame.source))
