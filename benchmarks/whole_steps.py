"""Whole training steps on paper: every allocation of the real class and TRL's own loss, played on PyTorch's allocator.

    python benchmarks/whole_steps.py [--only PART] [-o benchmarks/results/whole_steps.json]

The class that TRL would train is built at its published depth on fake tensors, checkpointed as TRL does, and runs one
or two steps with the loss of a TRL release (as tests/launcher/loss_trace.py runs it) and AdamW's states from the end of
the first. What is made and dropped, in order, goes to benchmarks/caching_allocator.py: the least capacity under which
the run ends is what it needs of a card. Attention is CUDA's: one kernel that keeps its output and a logarithm per row;
of a boolean mask it makes a bias in the query's dtype. One more copy of the bias during the call is an assumption:
without it two recorded limits of Gemma-3 lie a fifth lower in memory. cuBLAS keeps a workspace for each of two threads.

Runs in the Python that has torch and transformers, with the TRL releases that `make` unpacks beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "launcher"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import loss_trace
import torch
import torch.nn.functional as functional
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from benchmarks.caching_allocator import CachingAllocator, Event, ExpandableAllocator, least_capacity
from profiles.models import find_model

RELEASES = Path(sys.prefix) / "trl-releases"
RESULTS = Path(__file__).with_name("results") / "whole_steps.json"
CUBLAS_BYTES = 32 * 2**20 + 65_536
H100_BYTES = int((79.18 - 0.55) * 2**30)
"""What CUDA says of an H100-80GB in reports of exhausted memory, less a context."""


def case(model: str, seq: int, path: str, **more: Any) -> dict[str, Any]:
    usual = {"rows": 1, "steps": 2, "recompute": True, "offload": False, "trainer": "sft", "recorded": None}
    return {"model": model, "seq": seq, "path": path, **usual, **more}


GEMMA, QWEN = "google/gemma-3-1b-pt", "Qwen/Qwen3-4B"
CASES = [
    # Recorded limits: the longest that ran and the next length of the grid. Those of Qwen3-4B are of one step.
    *(case(QWEN, n, "full_logits", steps=1, recorded=32_768) for n in (32_768, 36_864)),
    *(case(QWEN, n, "chunked", steps=1, recorded=163_840) for n in (163_840, 172_032)),
    *(case(QWEN, n, "chunked", steps=1, offload=True, recorded=262_144) for n in (262_144, 278_528)),
    *(case(GEMMA, n, "full_logits", recorded=20_480) for n in (20_480, 21_504, 22_528)),
    *(case(GEMMA, n, "fused", recorded=107_520) for n in (107_520, 108_544)),
    *(case(GEMMA, n, "fused", trainer="dpo", rows=2, recorded=59_392) for n in (58_368, 59_392, 60_416)),
    # Everyday sizes.
    *(case(GEMMA, n, "full_logits") for n in (4096, 8192)),
    *(case(GEMMA, n, "fused") for n in (8192, 32_768, 65_536)),
    case(QWEN, 16_384, "full_logits"),
    *(case(QWEN, n, "chunked") for n in (32_768, 98_304)),
    *(case(QWEN, n, "fused") for n in (8192, 65_536)),
    *(case("Qwen/Qwen3-0.6B", n, "fused") for n in (8192, 32_768)),
    case("Qwen/Qwen3-8B", 8192, "fused"),
    case("Qwen/Qwen3-8B", 2048, "chunked"),
    case("Qwen/Qwen2.5-1.5B", 16_384, "chunked"),
    case("meta-llama/Llama-3.2-1B", 4096, "fused", rows=4),
    *(case("meta-llama/Llama-3.2-1B", 4096, path, recompute=False) for path in ("fused", "full_logits")),
    case("meta-llama/Llama-3.2-3B", 768, "full_logits", rows=4, recompute=False),
    case("Qwen/Qwen2.5-1.5B", 4096, "fused", rows=2, recompute=False),
]
RELEASE_OF = {"full_logits": "1.14.0", "chunked": "1.14.0", "fused": "1.16.0"}


class Recorder(loss_trace.Counter):
    """What is made and dropped, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.numbers: dict[int, int] = {}

    def see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.sizes or not storage.nbytes():
            return
        super().see(tensor)
        self.numbers[key] = len(self.events)
        self.events.append((len(self.events), storage.nbytes()))

    def drop(self, key: int) -> None:
        super().drop(key)
        self.events.append((self.numbers.pop(key), 0))

    def workspace(self) -> None:
        """cuBLAS's, at a thread's first product."""
        self.events.append((len(self.events), CUBLAS_BYTES))
        self.live += CUBLAS_BYTES


class Attention(torch.autograd.Function):
    """What CUDA's attention allocates."""

    @staticmethod
    def forward(ctx, query, key, value, mask):
        bias = None
        if mask is not None:
            made = torch.empty(mask.shape, dtype=query.dtype)
            bias = made.clone()
            del made
        # Rows of tokens in memory, so that what follows reads it as it is.
        rows, heads, length, _ = query.shape
        out = torch.empty(rows, length, heads, value.shape[-1], dtype=query.dtype).transpose(1, 2)
        logarithms = torch.empty(query.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, logarithms, bias)
        return out

    @staticmethod
    def backward(ctx, gradient):
        query, key, value, *kept = ctx.saved_tensors
        held = [gradient.contiguous(), torch.empty(query.shape[:3]), torch.empty(query.shape, dtype=torch.float32)]
        gradients = [torch.empty_like(query)]
        if kept[-1] is None and key.shape[1] != query.shape[1]:
            held += [torch.empty_like(query), torch.empty_like(query)]
        gradients += [torch.empty_like(key), torch.empty_like(value)]
        del held
        return *gradients, None


def attention(query, key, value, attn_mask=None, **options):
    """In the place of torch's scaled_dot_product_attention."""
    return Attention.apply(query, key, value, attn_mask)


class Offloaded(torch.autograd.graph.saved_tensors_hooks):
    """torch.autograd.graph.save_on_cpu, whose host tensors hold nothing of the card."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(self.away, self.back)

    @staticmethod
    def away(tensor):
        stays = isinstance(tensor, torch.nn.Parameter) or not tensor.is_floating_point()
        return tensor if stays else (tensor.shape, tensor.dtype)

    @staticmethod
    def back(kept):
        return torch.empty(kept[0], dtype=kept[1]) if isinstance(kept, tuple) else kept


def build(case: dict[str, Any], *, trains: bool) -> Any:
    """The published class in bf16 on the meta device."""
    import transformers.modeling_utils
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    found = find_model(case["model"])
    assert found is not None
    config = CONFIG_MAPPING[found.config["model_type"]].from_dict(dict(found.config))
    transformers.modeling_utils.save_on_cpu = Offloaded
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
    model.train(trains).requires_grad_(trains)
    if trains and case["recompute"]:
        model.activation_checkpointing_enable({"use_reentrant": False}, offload=case["offload"])
    return model


def materialise(model: Any) -> None:
    """Fake tensors in the place of meta ones; shared ones stay shared."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None and id(tensor) not in made:
                    fake = torch.zeros(tensor.shape, dtype=tensor.dtype)
                    is_parameter = isinstance(tensor, torch.nn.Parameter)
                    made[id(tensor)] = torch.nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
                if tensor is not None:
                    table[name] = made[id(tensor)]


def record(case: dict[str, Any]) -> Recorder:
    """All allocations of a case."""
    from accelerate.utils import convert_outputs_to_fp32
    from transformers import masking_utils

    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    functional.scaled_dot_product_attention = attention
    sft = loss_trace.load_trl(RELEASES, RELEASE_OF[case["path"]])
    models = [build(case, trains=True)]
    if case["trainer"] == "dpo":
        models.append(build(case, trains=False))
    recorder = Recorder()
    with FakeTensorMode(allow_non_fake_inputs=True), recorder:
        for model in models:
            materialise(model)
            prepare(sft, model, case["path"])
            autocast = torch.autocast("cpu", dtype=torch.bfloat16)
            model.forward = convert_outputs_to_fp32(autocast(model.forward))
        trainer = loss_trace.trainer_of(sft, models[0], case["path"])
        parameters = list(models[0].parameters())
        states: list[torch.Tensor] = []
        for step in range(case["steps"]):
            if not step:
                recorder.workspace()
            loss = dpo_loss(models, case) if len(models) > 1 else sft_loss(trainer, case)
            if not step:
                recorder.workspace()
            loss.backward()
            del loss
            if step + 1 < case["steps"]:
                states = states or [torch.zeros_like(p) for p in parameters for _ in range(2)]
            for parameter in parameters:
                parameter.grad = None
            trainer._metrics["train"] = defaultdict(list)
    return recorder


def prepare(sft: Any, model: Any, path: str) -> None:
    """The loss path of the release."""
    if path == "chunked":
        sft._patch_chunked_ce_lm_head(model, chunk_size=sft._CHUNKED_LM_HEAD_CHUNK_SIZE)
    elif path == "fused":
        loss_trace.fused_as_on_cuda()
        sft.add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))


def batch(case: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Real tensors: masks are read on the host."""
    with unset_fake_temporarily():
        ids = torch.zeros(case["rows"], case["seq"], dtype=torch.long)
        mask = torch.ones_like(ids)
        if case["trainer"] == "dpo":
            # Chosen and rejected differ in length.
            mask[-1, -1] = 0
        return {"input_ids": ids, "labels": ids.clone(), "attention_mask": mask}


def sft_loss(trainer: Any, case: dict[str, Any]) -> torch.Tensor:
    return trainer.compute_loss(trainer.model, batch(case), num_items_in_batch=case["rows"] * (case["seq"] - 1))


def dpo_loss(models: list[Any], case: dict[str, Any]) -> torch.Tensor:
    """Policy, then the reference while the policy's tensors wait (trl/trainer/dpo_trainer.py _compute_loss @1.15.0)."""
    policy, reference = models
    inputs = {**batch(case), "use_cache": False, "fused_lm_head": True}
    scores = policy(**inputs).log_probs.sum(dim=1)
    with torch.no_grad():
        expected = reference(**inputs).log_probs.sum(dim=1)
    return -functional.logsigmoid(0.1 * (scores - expected)).mean()


def result(case: dict[str, Any]) -> dict[str, Any]:
    """What a case holds and what it needs."""
    recorder = record(case)
    row = {**case, "tensor_bytes": recorder.highest}
    for name, kind in (("segments", CachingAllocator), ("expandable", ExpandableAllocator)):
        needed, endless = least_capacity(recorder.events, kind)
        row |= {f"{name}_needed_bytes": needed, f"{name}_reserved_bytes": endless.most_reserved}
    return row


def shown(row: dict[str, Any]) -> str:
    """One line of a row."""
    held = row["tensor_bytes"]
    shares: list[str] = []
    for name in ("segments", "expandable"):
        needs, reserves = (row[f"{name}_{what}_bytes"] / held - 1 for what in ("needed", "reserved"))
        shares.append(f"{name} needs {needs:+.1%}, reserves {reserves:+.1%}")
    limit = ""
    if row["recorded"]:
        ran = "runs" if row["segments_needed_bytes"] <= H100_BYTES else "does not run"
        limit = f"; {ran} on an H100, recorded to {row['recorded']:,}"
    how = f"{row['rows']} x {row['seq']:,} {row['path']}, {row['steps']} step(s)"
    return f"{row['model']} {row['trainer']} {how}: {held / 2**30:.2f} GiB; {'; '.join(shares)}{limit}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose model, trainer or path holds this")
    parser.add_argument("-o", dest="out", type=Path, help="write the rows here")
    asked = parser.parse_args()
    kept = loss_trace.autocast_like_cuda()
    rows = []
    for each in CASES:
        if asked.only in f"{each['model']} {each['trainer']} {each['path']}":
            with contextlib.redirect_stdout(sys.stderr):
                rows.append(result(each))
            print(shown(rows[-1]), flush=True)
    del kept
    if asked.out:
        asked.out.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
