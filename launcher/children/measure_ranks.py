"""Starts a plan's ranks as its written run would, each with ``measure_rank.py``, and hands over what all of them saw.

Runs in the training Python and imports nothing of it. One JSON request on stdin, one JSON document on stdout; rank 0
tells progress on stderr. accelerate's launcher gives every rank a session of its own, out of reach of whoever ends
ours. So they hold our end of a pipe: when we are done, ended or killed it closes, and they end themselves. One rank out
of memory is the answer of all: the others would wait for it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

RANK = Path(__file__).with_name("measure_rank.py")
LOOK_S = 0.1
SETTLE_S = 3.0
"""After one rank failed: time for another to say that it ran out of memory, of which the first may only be the echo."""
GONE_S = 10.0
"""For ended ranks to be gone: a card's memory is given back by then."""


class Ranks:
    """The launcher and all ranks, in a folder of theirs."""

    def __init__(self, request: dict) -> None:
        self.folder, self.count = Path(request["folder"]), int(request["ranks"])
        for name, text in request["files"].items():
            (self.folder / name).write_text(text, encoding="utf-8")
        (self.folder / "request.json").write_text(json.dumps(request["rank"]), encoding="utf-8")
        held, self.line = os.pipe()
        # What libraries put beside goes with the folder.
        environment = {**os.environ, "TMPDIR": str(self.folder)}
        launch = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
        self.launcher = subprocess.Popen(
            [*launch, "--config_file", "accelerate.yaml", str(RANK)],
            cwd=self.folder, stdin=held, stdout=sys.stderr.fileno(), env=environment,
        )  # fmt: skip
        os.close(held)
        self._ending = threading.Lock()

    def answers(self) -> dict[int, dict]:
        """Rank -> what it has written."""
        found: dict[int, dict] = {}
        for rank in range(self.count):
            with suppress(FileNotFoundError):
                found[rank] = json.loads((self.folder / f"rank-{rank}.json").read_text(encoding="utf-8"))
        return found

    def wait(self) -> dict[int, dict]:
        """Until every rank has answered, one is out of memory, or the launcher has given up."""
        failed_at: float | None = None
        while True:
            over = self.launcher.poll() is not None
            found = self.answers()
            if len(found) == self.count or any("out_of_memory" in answer for answer in found.values()):
                return found
            if over and not found and not any(self.folder.glob("rank-*.pid")):
                sys.exit(1)  # accelerate's launcher has said why it started none
            if over or any("failed" in answer for answer in found.values()):
                failed_at = failed_at or time.monotonic()
                if time.monotonic() > failed_at + (0.0 if over else SETTLE_S):
                    return found
            time.sleep(LOOK_S)

    def end(self) -> None:
        """Every rank and the launcher are gone, and then the folder."""
        with self._ending:
            if self.line is None:
                return
            os.close(self.line)
            self.line = None
            if self.launcher.poll() is None:
                self.launcher.kill()
            self.launcher.wait()
            waiting = [int(path.read_text() or 0) for path in self.folder.glob("rank-*.pid")]
            end = time.monotonic() + GONE_S
            while waiting and time.monotonic() < end:
                waiting = [pid for pid in waiting if pid and runs(pid)]
                time.sleep(LOOK_S / 5)
            for pid in waiting:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            shutil.rmtree(self.folder, ignore_errors=True)


def runs(pid: int) -> bool:
    """Whether the process still does; the dead whom nobody has waited for do not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except OSError:
        return not Path("/proc/self").exists()  # gone meanwhile, or a system without /proc


def merged(found: dict[int, dict]) -> dict:
    """One cell of all ranks: the most bytes that any held by phase, the seconds of the slowest, and each rank's own."""
    cells = [found[rank]["cell"] for rank in sorted(found)]
    slowest = max(cells, key=lambda cell: cell["seconds"]["step_s"])
    whole = {name: value for name, value in slowest.items() if not name.endswith("_seconds")}
    for name in ("peaks", "reserved_peaks", "device_used"):
        if name in slowest:
            whole[name] = {phase: max(cell[name][phase] for cell in cells) for phase in slowest[name]}
    for name in ("reserved_bytes", "device_used_bytes", "context_bytes"):
        if name in slowest:
            whole[name] = max(cell[name] for cell in cells)
    own = ("peaks", "seconds", "reserved_peaks", "device_used", "reserved_bytes", "device_used_bytes", "context_bytes")
    whole["ranks"] = [{name: cell[name] for name in own if name in cell} for cell in cells]
    return whole


def answer_of(found: dict[int, dict], count: int) -> dict:
    """What is said of them all; exits with one line where a rank failed otherwise than by running out of memory."""
    short = {rank: answer for rank, answer in found.items() if "out_of_memory" in answer}
    if short:
        rank, first = min(short.items(), key=lambda pair: pair[1]["at"])
        cell = {name: first[name] for name in ("layers", "sequence")} | {"rank": rank}
        cell["out_of_memory"] = f"rank {rank} of {count}: {first['out_of_memory']}"
        return {"versions": first["versions"], "on": first["on"], "cells": [cell]}
    failed = {rank: answer for rank, answer in found.items() if "failed" in answer}
    if failed:
        rank, first = min(failed.items(), key=lambda pair: pair[1]["at"])
        sys.exit(f"rank {rank} of {count}: {first['failed']}")
    silent = [str(rank) for rank in range(count) if rank not in found]
    if silent:
        ranks = f"rank{'s' if len(silent) > 1 else ''} {', '.join(silent)} of {count}"
        sys.exit(f"{ranks} ended without a word; the kernel does that for want of host memory")
    return {"versions": found[0]["versions"], "on": found[0]["on"], "cells": [merged(found)]}


def end_with_whoever_asked(ranks: Ranks) -> None:
    """The end of stdin ends all of it."""
    while os.read(0, 65536):
        pass
    ranks.end()
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)


def main() -> int:
    """Read, start, wait, print."""
    request = json.loads(sys.stdin.buffer.readline())
    ranks = Ranks(request)
    threading.Thread(target=end_with_whoever_asked, args=(ranks,), daemon=True).start()
    try:
        found = ranks.wait()
    finally:
        ranks.end()
    print(json.dumps(answer_of(found, ranks.count)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
