"""Runs a few steps of a job with the real TRL trainer, random weights and any depth: bytes and seconds by phase.

Runs in the training Python. One JSON request on stdin, progress as JSON lines on stderr, one JSON document on stdout.
Each cell (layers, sequence) builds the real class of the config at that depth, trains it for a few steps and says what
was live at most in each phase of one of them and how long the phases of the others took. Running out of memory is an
answer. On a card the bytes are torch's own statistics; on a CPU, which keeps none, every storage is followed.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import logging
import statistics
import sys
import tempfile
import time
import warnings

try:
    import torch
    from child_guard import device_facts, is_shortage, limit_memory, read_request, say, seconds, versions
    from measure_meter import CardGauge, StorageGauge
    from measure_trainer import config_class, from_config, references, rows, tokenizer, trainer_class
    from torch.utils.data import SequentialSampler
    from transformers import CONFIG_MAPPING, TrainerCallback
except ImportError as missing:
    message = f"measuring a job needs torch, transformers, trl and datasets in the training Python: {missing}"
    print(json.dumps({"error": {"kind": "environment", "message": message}}))
    sys.exit(0)

PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate")
PHASES = ("forward", "loss", "backward", "step")


def parse_config(values: dict, layers: int, more: dict):
    """The text config cut to its first layers."""
    plain = copy.deepcopy(values)
    plain.pop("quantization_config", None)
    parsed = CONFIG_MAPPING[plain["model_type"]].from_dict(plain).get_text_config()
    count = parsed.num_hidden_layers
    for name, value in list(vars(parsed).items()):
        if isinstance(value, list) and len(value) == count:
            setattr(parsed, name, value[:layers])
    parsed.num_hidden_layers = layers
    for name, value in more.items():
        setattr(parsed, name, value)
    return parsed


def build_model(request: dict, layers: int):
    """The class that TRL would load, with random weights on the device they train on."""
    config = parse_config(request["config"], layers, request["config_changes"])
    with torch.device(request["device"]):
        return from_config(request, config)


class Watch(TrainerCallback):
    """Says where a step is: marks its phases, and which step is counted."""

    def __init__(self, gauge, counted: int | None) -> None:
        self.gauge = gauge
        self.counted = counted
        self.step = -1
        self.phase: str | None = None
        self.times: list[dict[str, float]] = []
        self.peaks: dict[str, int] = {}
        self.beside: dict[str, dict[str, int]] = {}
        self.held: dict[str, int] = {}
        self._since = None
        self._began = None
        self._accelerator = None

    def attach(self, trainer) -> None:
        """Hook the trainer's own calls."""
        compute_loss, backward = trainer.compute_loss, trainer.accelerator.backward

        def forwards(*args, **kwargs):
            self.mark("forward")
            return compute_loss(*args, **kwargs)

        def backwards(*args, **kwargs):
            backward(*args, **kwargs)
            self.mark("step")

        trainer.compute_loss, trainer.accelerator.backward = forwards, backwards
        self._accelerator = trainer.accelerator
        model = trainer.model.get_base_model() if hasattr(trainer.model, "get_base_model") else trainer.model
        model.get_decoder().register_forward_hook(self._body_ran)

    def _body_ran(self, _module, _args, out) -> None:
        hidden = out[0] if isinstance(out, tuple) else out.last_hidden_state
        if self.phase != "forward" or not hidden.requires_grad:
            return
        self.mark("loss")
        hidden.register_hook(lambda _grad: self.mark("backward"))

    def mark(self, phase: str | None) -> None:
        """From here on time and bytes are of ``phase``; None ends the step."""
        if self.step < 0 or phase == self.phase:
            return
        now = self.gauge.now()
        if self.phase is not None:
            self.times[-1].setdefault(self.phase, []).append((self._since, now))
            if self.step == self.counted:
                self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), self.gauge.highest())
                for name, value in self.gauge.beside().items():
                    of_phase = self.beside.setdefault(name, {})
                    of_phase[self.phase] = max(of_phase.get(self.phase, 0), value)
        if phase is not None:
            self.gauge.begin()
        self.phase, self._since = phase, now

    def on_train_begin(self, args, state, control, **kwargs):
        """DeepSpeed steps inside backward: its engine, which is there by now, says when."""
        wrapper = getattr(self._accelerator, "deepspeed_engine_wrapped", None)
        if wrapper is None:
            return
        engine = wrapper.engine
        step = engine.step

        def steps(*args, **kwargs):
            self.mark("step")
            return step(*args, **kwargs)

        engine.step = steps

    def on_step_begin(self, args, state, control, **kwargs):
        """A new step; what lies between two is the trainer's own."""
        self.step += 1
        now = self.gauge.now()
        if self._began is not None:
            self.times[-1]["all"] = [(self._began, now)]
        self._began = now
        self.times.append({})
        if self.step == self.counted:
            self.gauge.start()
        self.mark("forward")

    def on_step_end(self, args, state, control, **kwargs):
        """The optimizer is done."""
        self.mark(None)
        if self.step == self.counted:
            self.held = self.gauge.stop()

    def on_train_end(self, args, state, control, **kwargs):
        """The last step is over too."""
        self.times[-1]["all"] = [(self._began, self.gauge.now())]

    def seconds(self, first: int, measure) -> list[dict[str, float]]:
        """By phase of every step from ``first`` on but the counted one, where counting takes time of its own.

        ``measure`` says what counts between two moments.
        """
        self.gauge.settle()
        found: list[dict[str, float]] = []
        for index, step in enumerate(self.times):
            if index < first or (index == self.counted and self.gauge.slow):
                continue
            row = {name: sum(measure(*pair) for pair in pairs) for name, pairs in step.items()}
            whole = row.pop("all")
            row = {phase: row.get(phase, 0.0) for phase in PHASES}
            found.append(row | {"other": max(0.0, whole - sum(row.values()))})
        return found


def run_cell(
    request: dict, layers: int, sequence: int, *, counts: bool, build=build_model, callbacks=(), prepare=None
) -> dict:
    """One depth and length once; bytes are counted where ``counts`` says so.

    Args:
        request: see ``measure``.
        layers: of the model.
        sequence: tokens of a row.
        counts: whether a step more is run for its bytes, where counting takes time of its own.
        build: makes the model of so many layers.
        callbacks: told about the steps too.
        prepare: called with the trainer before it trains.
    """
    warm, timed = request["warm_steps"], request["timed_steps"]
    gauge = CardGauge(request.get("used_bytes", 0)) if request["device"] == "cuda" else StorageGauge()
    watch = Watch(gauge, counted=warm if counts else None)
    total = warm + timed + (1 if gauge.slow and counts else 0)
    peft = {}
    if request["lora"] is not None:
        from peft import LoraConfig

        peft["peft_config"] = LoraConfig(**request["lora"])
    with tempfile.TemporaryDirectory() as folder:
        arguments = request["arguments"] | {
            "output_dir": folder,
            "max_steps": total,
            "max_length": sequence,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "dataset_num_proc": None,
        }
        # Before the model: it says how DeepSpeed cuts one that is being made.
        config = config_class(request)(**arguments)
        model = build(request, layers)
        vocab = model.config.vocab_size
        count = request["rows"] * config.gradient_accumulation_steps * request.get("readers", 1) * total
        with references(request, lambda: build(request, layers)):
            trainer = trainer_class(request)(
                model=model,
                args=config,
                train_dataset=rows(request, sequence, vocab, count),
                processing_class=tokenizer(vocab),
                callbacks=[watch, *callbacks],
                **peft,
            )
        trainer._get_train_sampler = lambda *_: SequentialSampler(trainer.train_dataset)
        if prepare is not None:
            prepare(trainer)
        watch.attach(trainer)
        trainer.train()
    # ZeRO-3 leaves an empty tensor where a parameter was.
    sizes = [(getattr(p, "ds_numel", p.numel()), p.requires_grad) for p in model.parameters()]
    return {
        "layers": layers,
        "sequence": sequence,
        "tokens": request["rows"] * request["rows_per_example"] * sequence,
        "parameters": sum(size for size, _ in sizes),
        "trainable": sum(size for size, trains in sizes if trains),
        "peaks": watch.peaks,
        "rows": watch.seconds(warm, gauge.between),
        "busy_rows": watch.seconds(warm, gauge.busy) if gauge.slow else [],
        **watch.beside,
        **watch.held,
    }


def summary(cell: dict) -> dict:
    """A cell as it is kept: median seconds by phase over the steps of all its rounds; of the processor's the least."""
    if "rows" not in cell:
        return cell
    rows, busy = cell.pop("rows"), cell.pop("busy_rows")
    names = (*PHASES, "other")
    cell["seconds"] = with_step({name: statistics.median(row[name] for row in rows) for name in names})
    if busy:
        cell["wall_seconds"] = cell["seconds"]
        cell["processor_seconds"] = with_step({name: min(row[name] for row in busy) for name in names})
    return cell


def with_step(seconds: dict[str, float]) -> dict[str, float]:
    """Phases, and the step that they make."""
    return seconds | {"step_s": sum(seconds.values())}


def share_the_wait(cells: list[dict]) -> None:
    """Seconds of a CPU's cells as the processor's own at its least disturbed, stretched alike by what all waited.

    Others' work on the CPU hits steps by chance, and small differences drown in it; the least that a phase took of the
    processor is its own. Over all cells a phase took so many times as long by the wall clock (less than once where
    threads share it), and that is said of each.
    """
    stretch: dict[str, float] = {}
    for name in (*PHASES, "other"):
        own = sum(cell["processor_seconds"][name] for cell in cells)
        stretch[name] = sum(cell["wall_seconds"][name] for cell in cells) / own if own else 1.0
    for cell in cells:
        own = cell["processor_seconds"]
        cell["seconds"] = with_step({name: own[name] * factor for name, factor in stretch.items()})


def shortage(error: BaseException, layers: int, sequence: int) -> dict:
    """What is said of a cell that ran out of memory."""
    said = " ".join(str(error).split())[:200]
    return {"layers": layers, "sequence": sequence, "out_of_memory": said or type(error).__name__}


def measure(request: dict) -> dict:
    """Every cell, the smallest first, and all again: what slows the machine for a while then slows all alike."""
    if request["device"] == "cuda":
        torch.cuda.init()
    limit_memory(request["device"], int(request["memory_bytes"]))
    cells = request["cells"]
    answer: list[dict | None] = [None] * len(cells)
    total, longest = request["rounds"] * len(cells), 0.0
    for done in range(total):
        index = done % len(cells)
        before, layers, sequence = answer[index], cells[index]["layers"], cells[index]["sequence"]
        what = f"{layers} layer{'s' if layers > 1 else ''}, {sequence:,} tokens"
        if before is not None and "out_of_memory" in before:
            continue
        began = time.monotonic()
        if began + 1.5 * longest > request["deadline"]:
            # What is there is handed over; the limit itself would leave nothing.
            if before is None:
                answer[index] = {"layers": layers, "sequence": sequence, "not_run": "no time left"}
            continue
        say(done=done, of=total, what=what, seconds=round(seconds(), 1))
        try:
            found = run_cell(request, layers, sequence, counts=before is None)
        except (RuntimeError, MemoryError) as error:
            if not is_shortage(error):
                raise
            found = shortage(error, layers, sequence)
        if before is not None and "rows" in before and "rows" in found:
            before["rows"] += found["rows"]
            before["busy_rows"] += found["busy_rows"]
        else:
            answer[index] = found
        # Trainer, model and hooks refer to each other.
        gc.collect()
        if request["device"] == "cuda":
            torch.cuda.empty_cache()
        longest = max(longest, time.monotonic() - began)
    say(done=total, of=total, what="", seconds=round(seconds(), 1))
    kept = [summary(cell) for cell in answer if cell is not None]
    if request["device"] == "cpu":
        share_the_wait([cell for cell in kept if "processor_seconds" in cell])
    return {"versions": versions(*PACKAGES), "on": device_facts(request["device"]), "cells": kept}


def main() -> int:
    """Read, run, print."""
    request = read_request()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    # Libraries print while they train; stdout is for the one document.
    with contextlib.redirect_stdout(sys.stderr):
        answer = measure(request)
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
