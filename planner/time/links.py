"""Links: seconds of communication between cards and to the host, before computation hides any of it."""

from __future__ import annotations

from planner.choice import FSDP2, ZERO, Choice
from planner.hardware import Hardware
from planner.memory.optimizers import find_optimizer
from planner.memory.phases import HeldBytes
from planner.memory.states import residual_bytes, trainable_roles

LINK_SHARE = 0.80
"""Share of a link's rate that NCCL's rings reach with large messages: 235 of 300 GB/s on eight A100s, 365 of 450 on
eight H200s, 682 of 900 on eight B200s (nccl-tests, ml-engineering's network chapter)."""
HOST_LINK_SHARE = 0.88
"""Share of the host link that copies of pinned memory reach: 55.4 of 63 GB/s, eight H200s alike (nvbandwidth, the same
chapter). Where cards share a link to the host, less is left for each; nothing here knows."""
COLLECTIVE_S = 25e-6
"""Latency of one collective among the cards of a node. Not measured here."""
NODE_COLLECTIVE_S = 60e-6
"""The same among nodes. Not measured here."""
UNKNOWN_LINK = 16e9
"""Bytes per second taken where the link between cards is not known: PCIe 3 x16."""
HOST_ADAM_BYTES_PER_S = 109e9
"""Bytes per second that the AdamW steps of all ranks of a node reach in host memory: 8.0 B parameters of 28 bytes in
2.06 s (Llama-3.1-8B under ZeRO-3 with DeepSpeed's optimizer on the host, 8k tokens: 2.99 s a step on H200s and 2.53 on
B200s, of which 0.9 and 0.5 are computation and copies; ml-engineering's chapter on upgrading). torch's fused AdamW,
which FSDP2 runs there, passes over the same bytes once and is taken to reach the same."""
HOST_LOOP_FACTOR = 5.6
"""How much longer torch's AdamW takes on the host without ``fused``, a loop of operators: the median of twelve pairs of
steps, 6.0 to 9.4 ns a parameter against 1.2 to 1.7 of the fused pass (torch 2.13, one thread, 60 fp32 tensors of a
million). DeepSpeed's page says that its own is 5 to 7 times as fast as that loop."""


def link_bytes_per_s(hardware: Hardware, ranks: int) -> float:
    """What each rank reaches, one way, in a collective of ``ranks``."""
    inside = LINK_SHARE * (hardware.link or UNKNOWN_LINK)
    return inside if ranks <= hardware.gpus_per_node else min(inside, LINK_SHARE * hardware.node_link)


def collective_s(hardware: Hardware, ranks: int) -> float:
    """Latency of a collective of ``ranks``."""
    if hardware.device == "cpu":
        return 0.0
    return COLLECTIVE_S if ranks <= hardware.gpus_per_node else NODE_COLLECTIVE_S


def weight_gathers(choice: Choice, forwards: int) -> float:
    """How often a micro-batch gathers each weight: for forward and backward, ZeRO-3 once more for a recompute.

    ``forwards`` are those beside training's, without gradient.
    """
    if choice.sharding in FSDP2 or choice.sharding == "fsdp1":
        return forwards + (1.0 if choice.sharding == "fsdp_no_reshard" else 2.0)
    if choice.sharding == "zero3":
        return forwards + (3.0 if choice.recompute != "none" else 2.0)
    return 0.0


def root_gather_s(hardware: Hardware, choice: Choice, *, parameters: int) -> float:
    """Seconds of gathering a whole model in one group, as TRL wraps a reference under FSDP2: nothing runs beside it."""
    ranks = choice.shard_ranks
    if ranks == 1:
        return 0.0
    moved = 2.0 * (ranks - 1) / ranks * parameters
    return moved / link_bytes_per_s(hardware, ranks) + collective_s(hardware, ranks)


def gathers_s(
    hardware: Hardware, choice: Choice, *, parameters: int, trainable: int, layers: int, forwards: int = 0
) -> float:
    """Seconds of weight gathers and gradient reductions of every micro-batch, with those of ``forwards`` more forwards.

    Both in 2 bytes. HSDP all-reduces every shard over the replicas beside it, for written runs synchronise every
    micro-batch. ZeRO-1 reduces at the end of accumulation alone (``reduction_s``).
    """
    ranks, groups = choice.shard_ranks, layers + 2
    seconds = 0.0
    if choice.sharding == "hsdp" and choice.dp_replicate > 1:
        replicas = choice.dp_replicate
        moved = 2.0 * 2.0 * (replicas - 1) / replicas * trainable / ranks
        seconds = moved / link_bytes_per_s(hardware, choice.num_gpus) + groups * collective_s(hardware, choice.num_gpus)
    if ranks == 1 or choice.sharding == "zero1":
        return seconds
    gathers = weight_gathers(choice, forwards)
    moved = 2.0 * (ranks - 1) / ranks * (trainable + gathers * parameters)
    latency = (gathers + 1.0) * groups * collective_s(hardware, ranks)
    return seconds + moved / link_bytes_per_s(hardware, ranks) + latency


def reduction_s(hardware: Hardware, choice: Choice, *, trainable: int, layers: int) -> float:
    """Seconds of what happens once per optimizer step.

    DDP's all-reduce in the gradients' own dtype, ZeRO-1's reduction (deepspeed/runtime/engine.py,
    ``allreduce_gradients``: stage 2 and above reduce every micro-batch), and ZeRO's gather of new weights.
    """
    ranks = choice.num_gpus
    share = (ranks - 1) / ranks
    link = link_bytes_per_s(hardware, ranks)
    if choice.sharding == "ddp":
        width = trainable_roles(choice, adapter=choice.method != "full").gradients
        return 2.0 * share * width * trainable / link
    if choice.sharding == "zero1":
        return 2.0 * 2.0 * share * trainable / link + (layers + 2) * collective_s(hardware, ranks)
    if choice.sharding == "zero2":
        return 2.0 * share * trainable / link
    return 0.0


def sequence_s(hardware: Hardware, choice: Choice, *, heads: float, kv_heads: float) -> float:
    """Seconds per token of one rank's part that splitting the sequence adds between cards.

    Context parallelism hands keys and values round: in forward, in a recompute, and in backward with their gradients.
    Sequence parallelism turns queries, keys, values and outputs from tokens to heads and back.

    Args:
        hardware: the machine.
        choice: the knobs.
        heads: heads x head_dim, summed over the layers.
        kv_heads: the same of keys.
    """
    forwards = 1.0 if choice.recompute == "none" else 2.0
    if choice.cp > 1:
        # Every rank receives all the others' keys and values; per token of its own part that is cp - 1 tokens'.
        moved = (forwards + 2.0) * 2.0 * 2.0 * kv_heads * (choice.cp - 1)
        return moved / link_bytes_per_s(hardware, choice.cp)
    if choice.sp > 1:
        moved = (forwards + 1.0) * 2.0 * 2.0 * (heads + kv_heads) * (choice.sp - 1) / choice.sp
        return moved / link_bytes_per_s(hardware, choice.sp)
    return 0.0


def offload_s(
    hardware: Hardware,
    choice: Choice,
    *,
    parameters: int,
    held: HeldBytes,
    hidden: int,
    layers: int,
    forwards: int = 0,
) -> tuple[float, float]:
    """Seconds of copies over the host link: per token, and per micro-batch.

    FSDP2 copies a shard up as it rests and casts it on the card, once for every gather, and copies the reduced shard of
    a gradient down in the parameter's dtype (_fsdp_param.py, ``all_gather_inputs``; _fsdp_collectives.py,
    ``foreach_reduce``). ZeRO-3 keeps 2 bytes a parameter on the host and reads them for every gather.

    Args:
        hardware: the machine.
        choice: the knobs.
        parameters: all of them.
        held: what one rank holds at rest.
        hidden: width of the residual stream.
        layers: how many.
        forwards: of every micro-batch beside training's, a reference model's among them.
    """
    if not choice.offload or hardware.host_link is None:
        return 0.0, 0.0
    link = HOST_LINK_SHARE * hardware.host_link
    per_token = per_batch = 0.0
    if "activations" in choice.offload:
        per_token = 2.0 * layers * hidden * residual_bytes(choice) / link
    if "params" in choice.offload and choice.sharding not in ZERO:
        per_batch = (weight_gathers(choice, forwards) * held.weights + held.gradients) / link
    elif "params" in choice.offload:
        per_batch = weight_gathers(choice, forwards) * 2.0 * parameters / choice.shard_ranks / link
    return per_token, per_batch


def host_optimizer_s(hardware: Hardware, choice: Choice, local: float) -> float:
    """Seconds of an update on the host, whose memory all ranks of a node share.

    DeepSpeed's also copies 2-byte gradients down and weights up. FSDP's tensors are there already, and are clipped
    there, which reads gradients twice and writes them once.

    Args:
        hardware: the machine.
        choice: the knobs.
        local: parameters that one rank updates.
    """
    if hardware.host_link is None:
        return 0.0
    ranks = min(choice.num_gpus, hardware.gpus_per_node)
    if choice.sharding in ZERO:
        return local * 4.0 / (HOST_LINK_SHARE * hardware.host_link) + ranks * local * 28.0 / HOST_ADAM_BYTES_PER_S
    roles = trainable_roles(choice, adapter=choice.method != "full")
    moved = 2.0 * (roles.weights + roles.moment1 + roles.moment2) + roles.gradients
    slower = HOST_LOOP_FACTOR if find_optimizer(choice.optimizer).foreach else 1.0
    return ranks * local * (slower * moved + 3.0 * roles.gradients) / HOST_ADAM_BYTES_PER_S
