"""Watches a rank's own resident memory: while the model loads, at rest in the second step, and while it is saved.

Anonymous pages only: what is mapped from a file of weights can be dropped by the system at any time.
"""

import atexit
import json
import os
import pathlib
import threading
import time

import psutil

EVERY_S = 0.004


class Watch:
    """Highest anonymous bytes by phase, above what the process held before it loaded anything."""

    def __init__(self, path):
        self.path = pathlib.Path(f"{path}.{os.environ.get('LOCAL_RANK', '0')}")
        self.process = psutil.Process()
        self.phase = None
        self.highest = {}
        self.rest = []
        self.before = 0
        self.seen = {}
        atexit.register(self.write)

    def now(self):
        memory = self.process.memory_info()
        return memory.rss - memory.shared

    def begin(self):
        """train.py asks for its memory before it loads a model."""
        if self.phase is None:
            self.before = self.now()
            self.phase = "load"
            threading.Thread(target=self.sample, daemon=True).start()

    def sample(self):
        while True:
            phase = self.phase  # asked once: it may change while the memory is read
            self.highest[phase] = max(self.highest.get(phase, 0), self.now())
            time.sleep(EVERY_S)

    def step(self):
        """A step begins: nothing is at work."""
        self.phase = "train"
        self.rest.append(self.now())

    def saves(self, method):
        def saved(*args, **kwargs):
            # A checkpoint saves the model first and the optimizer then.
            outer, self.phase = self.phase, "save"
            self.rest.append(self.now())
            try:
                return method(*args, **kwargs)
            finally:
                self.phase = outer

        return saved

    def write(self):
        above = {phase: size - self.before for phase, size in self.highest.items()}
        seen = {"before": self.before, "rest": [size - self.before for size in self.rest], "highest": above}
        self.path.write_text(json.dumps(seen), encoding="utf-8")


def watch(path, torch):
    """Take the place of torch.cuda's figures; return what to do when transformers' trainer is imported."""
    seen = Watch(path)
    torch.cuda.mem_get_info = lambda *_: (2**30, 2**31)
    torch.cuda.max_memory_allocated = lambda *_: seen.begin() or 0
    torch.cuda.max_memory_reserved = lambda *_: 0
    torch.cuda.reset_peak_memory_stats = lambda *_: seen.step()
    torch.cuda.synchronize = lambda *_: None

    def mark(trainer):
        for name in ("_save_checkpoint", "save_model"):
            setattr(trainer.Trainer, name, seen.saves(getattr(trainer.Trainer, name)))

    return {"transformers.trainer": mark}
