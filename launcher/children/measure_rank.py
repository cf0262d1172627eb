"""One rank of a plan, started by accelerate: trains it for three steps and writes down what it saw on its device.

Reads request.json in the current folder and writes rank-N.json there, then waits to be ended with all others: a rank
that leaves while another still talks to it would look like a failure. Weights are random and of the real shapes, made
on the host as a written run loads them; settings, wrapping and sharding are the run's own.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from contextlib import nullcontext
from pathlib import Path

from child_guard import end_with_stdin

_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of prctl(2)."""
DRAWN = 2**22
"""Weights that are drawn; larger matrices repeat them. Drawing them all takes minutes of a host."""
SPREAD = 0.02
"""Standard deviation, transformers' initializer_range."""


def end_with_lead() -> None:
    """Whatever ends the launcher or who started it ends this rank, in a call that never returns as well."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_DEATH_SIGNAL, signal.SIGKILL)
    end_with_stdin()


def write(rank: int, answer: dict) -> None:
    """The rank's answer, whole or not there."""
    path = Path(f"rank-{rank}.json")
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps({"at": time.time(), **answer}), encoding="utf-8")
    beside.replace(path)


def build_on_host(request: dict, layers: int):
    """The class that TRL would load, as it would be loaded: on the host, or in shares where ZeRO-3 cuts it at once."""
    import measure_job
    import torch
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    on_host = {**request, "device": "cpu"}
    if is_deepspeed_zero3_enabled():
        return measure_job.build_model(on_host, layers)
    with _no_drawing():
        model = measure_job.build_model(on_host, layers)
    model.tie_weights()  # transformers leaves that out with the drawing
    draw = torch.Generator().manual_seed(0)
    block = torch.randn(DRAWN, generator=draw).mul_(SPREAD)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            flat = parameter.view(-1)
            for part in flat.split(DRAWN):
                part.copy_(block[: part.numel()])
    return model


def _no_drawing():
    """Build without drawing weights; where transformers cannot, they are drawn one by one."""
    try:
        from transformers.initialization import no_init_weights
    except ImportError:
        try:
            from transformers.modeling_utils import no_init_weights
        except ImportError:
            return nullcontext()
    return no_init_weights()


def prepare(request: dict, trainer) -> None:
    """What a written run's script does to its trainer before it trains."""
    import torch

    if request["keeps_outputs"]:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        trainer.accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, output_dtype=None
        )


def measure(request: dict, rank: int) -> dict:
    """The plan's steps on this rank, or that it ran out of memory."""
    import measure_job
    import torch
    from child_guard import device_facts, is_shortage, limit_memory, say, seconds, versions
    from transformers import TrainerCallback

    class Says(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if rank == 0:
                what = f"{request['ranks']} ranks, {layers} layers, {sequence:,} tokens"
                say(done=state.global_step, of=state.max_steps, what=what, seconds=round(seconds(), 1))

    local = int(os.environ.get("LOCAL_RANK", "0"))
    if request["device"] == "cuda":
        torch.cuda.set_device(local)
    (cell,) = request["cells"]
    layers, sequence = cell["layers"], cell["sequence"]
    limit_memory(request["device"], int(request["memory_bytes"][local]))
    request = {**request, "used_bytes": request["used_bytes"][local]}
    facts = {"versions": versions(*measure_job.PACKAGES, "deepspeed"), "on": device_facts(request["device"])}
    try:
        found = measure_job.run_cell(
            request, layers, sequence, counts=True, build=build_on_host, callbacks=[Says()],
            prepare=lambda trainer: prepare(request, trainer),
        )  # fmt: skip
    except (RuntimeError, MemoryError) as error:
        # NCCL's own shortage is no torch.OutOfMemoryError.
        if not is_shortage(error) and "'out of memory'" not in str(error):
            raise
        return {**facts, **measure_job.shortage(error, layers, sequence)}
    return {**facts, "cell": measure_job.summary(found)}


def main() -> int:
    """Read, run, write, wait."""
    end_with_lead()
    rank = int(os.environ.get("RANK", "0"))
    Path(f"rank-{rank}.pid").write_text(str(os.getpid()), encoding="ascii")
    request = json.loads(Path("request.json").read_text(encoding="utf-8"))
    try:
        import logging
        import warnings

        warnings.filterwarnings("ignore")
        logging.disable(logging.WARNING)
        answer = measure(request, rank)
    except SystemExit:
        write(
            rank,
            {"failed": "the training Python lacks torch, transformers, trl or datasets; `trlfit doctor` says what"},
        )
        raise
    except BaseException as error:
        said = " ".join(str(error).split())
        write(rank, {"failed": f"{type(error).__name__}: {said}"[:300]})
        raise
    write(rank, answer)
    while True:
        signal.pause()


if __name__ == "__main__":
    sys.exit(main())
