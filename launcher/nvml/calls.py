"""The door to NVML: open and close it, call it by name, turn every refusal into a sentence."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from enum import IntEnum
from typing import Any

LIBRARY = "libnvidia-ml.so.1"


class NvmlCode(IntEnum):
    """Return codes of NVML that mean something to us (nvml.h, nvmlReturn_enum)."""

    INVALID_ARGUMENT = 2
    NOT_SUPPORTED = 3
    NO_PERMISSION = 4
    NOT_FOUND = 6
    DRIVER_NOT_LOADED = 9
    TIMEOUT = 10
    IRQ_ISSUE = 11
    LIBRARY_NOT_FOUND = 12
    FUNCTION_NOT_FOUND = 13
    GPU_IS_LOST = 15
    RESET_REQUIRED = 16
    OPERATING_SYSTEM = 17
    VERSION_MISMATCH = 18
    NO_DATA = 21
    GPU_NOT_FOUND = 28
    UNKNOWN = 999


_REFUSALS: dict[int, str] = {
    NvmlCode.NOT_SUPPORTED: "this card or its driver does not report it",
    NvmlCode.NO_PERMISSION: "reading it needs more permission",
    NvmlCode.NOT_FOUND: "the driver does not find it",
    NvmlCode.TIMEOUT: "the driver did not answer in time",
    NvmlCode.IRQ_ISSUE: "the card's interrupts do not reach the driver",
    NvmlCode.GPU_IS_LOST: "the card has fallen off the bus (GPU is lost)",
    NvmlCode.RESET_REQUIRED: "the card must be reset first (GPU requires reset)",
    NvmlCode.OPERATING_SYSTEM: "the operating system blocks access to it",
    NvmlCode.NO_DATA: "the driver has no value for it yet",
    NvmlCode.UNKNOWN: "the driver answers with an unknown error",
}

_UNAVAILABLE: dict[int, str] = {
    NvmlCode.NO_PERMISSION: (
        "the NVIDIA driver refuses access: no permission for /dev/nvidiactl "
        "(a container needs to be started with its GPUs)"
    ),
    NvmlCode.DRIVER_NOT_LOADED: (
        "the NVIDIA driver is installed but not loaded: a reboot or `modprobe nvidia` loads it, "
        "`nvidia-smi` says why not"
    ),
    NvmlCode.LIBRARY_NOT_FOUND: f"no NVIDIA driver here: {LIBRARY} is not found",
    NvmlCode.FUNCTION_NOT_FOUND: "the NVIDIA driver is too old to be read (before 396)",
    NvmlCode.OPERATING_SYSTEM: "the operating system blocks access to the NVIDIA driver",
    NvmlCode.VERSION_MISMATCH: (
        "Driver/library version mismatch: the NVIDIA driver was updated while the old kernel "
        "module still runs; reboot, or reload the nvidia modules"
    ),
    NvmlCode.GPU_NOT_FOUND: "the NVIDIA driver finds no card",
}


class NvmlRefused(Exception):
    """NVML refused one call. Callers turn it into a value; it never reaches a user.

    Attributes:
        code: NVML's return code.
        sentence: Why, for people.
    """

    def __init__(self, function: str, code: int) -> None:
        self.code = code
        if code == NvmlCode.FUNCTION_NOT_FOUND:
            self.sentence = f"this driver is too old to report it (it has no {function})"
        else:
            self.sentence = _REFUSALS.get(code, f"{function} failed with NVML error {code}")
        super().__init__(self.sentence)


class NvmlUnavailable(Exception):
    """NVML cannot be used at all; the message is the sentence for people."""


class Nvml:
    """An open NVML. Every function is called by its name in ``pynvml``.

    The module is untyped and differs between releases, so this is the only place that touches it.
    """

    def __init__(self, module: Any) -> None:
        self._module = module

    def ask(self, function: str, *arguments: Any) -> Any:
        """Call ``function``; bytes come back as text.

        Raises:
            NvmlRefused: NVML returned an error, or driver or module lack the function.
        """
        call = getattr(self._module, function, None)
        if call is None:
            raise NvmlRefused(function, NvmlCode.FUNCTION_NOT_FOUND)
        try:
            answer = call(*arguments)
        except self._module.NVMLError as error:
            raise NvmlRefused(function, int(error.value)) from None
        except UnicodeDecodeError:
            raise NvmlRefused(function, NvmlCode.UNKNOWN) from None
        return answer.decode("utf-8", "replace") if isinstance(answer, bytes) else answer

    def ask_first(self, functions: tuple[str, ...], *arguments: Any) -> Any:
        """The first of ``functions`` that driver and module have, newest version first."""
        for function in functions[:-1]:
            try:
                return self.ask(function, *arguments)
            except NvmlRefused as refused:
                if refused.code != NvmlCode.FUNCTION_NOT_FOUND:
                    raise
        return self.ask(functions[-1], *arguments)

    def constant(self, name: str, default: int) -> int:
        """A constant of the module, ``default`` where this release does not have it."""
        return int(getattr(self._module, name, default))

    def close(self) -> None:
        """Give NVML back. A driver that died meanwhile has nothing left to close."""
        with suppress(NvmlRefused):
            self.ask("nvmlShutdown")


def connect() -> Nvml:
    """Open NVML; the caller closes it.

    Raises:
        NvmlUnavailable: No library, no driver, no permission, or versions that differ.
    """
    _require_library()
    try:
        module = importlib.import_module("pynvml")
    except ImportError:
        raise NvmlUnavailable(
            "the cards cannot be read: the package nvidia-ml-py is missing (pip install nvidia-ml-py)"
        ) from None
    nvml = Nvml(module)
    try:
        nvml.ask("nvmlInit")
    except NvmlRefused as refused:
        sentence = _UNAVAILABLE.get(
            refused.code,
            f"the NVIDIA driver cannot be read (NVML error {refused.code}); `nvidia-smi` may say more",
        )
        raise NvmlUnavailable(sentence) from None
    return nvml


@contextmanager
def nvml_open() -> Generator[Nvml]:
    """NVML for the length of a block, closed once whatever happens.

    Raises:
        NvmlUnavailable: See :func:`connect`.
    """
    nvml = connect()
    try:
        yield nvml
    finally:
        nvml.close()


def _require_library() -> None:
    """Fail before ``pynvml`` is imported.

    Its 8,000 lines cost 15 ms that a box without a driver should not pay on every command.
    """
    if not sys.platform.startswith("linux"):
        return  # pynvml knows where Windows keeps the library.
    import ctypes

    try:
        ctypes.CDLL(LIBRARY)
    except OSError as error:
        if "cannot open shared object file" in str(error):
            raise NvmlUnavailable(_UNAVAILABLE[NvmlCode.LIBRARY_NOT_FOUND]) from None
        # A container may hold an empty or foreign file under that name.
        raise NvmlUnavailable(f"the NVIDIA driver's library cannot be loaded: {error}") from None
