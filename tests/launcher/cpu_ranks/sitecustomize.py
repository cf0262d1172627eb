"""Lets ranks of a run that was written for GPUs train on this machine's CPU, and counts what they allocate.

Python imports it in every process that finds this folder on PYTHONPATH; it acts in the ranks of a launcher alone.
accelerate takes a gloo world for several GPUs, so that FSDP2, context parallelism and DeepSpeed run as on cards;
torch.cuda's figures, which train.py writes down, are the CPU allocator's own.
"""

import atexit
import importlib.abc
import importlib.util
import json
import os
import pathlib
import sys
import time


class OnImport(importlib.abc.MetaPathFinder):
    """Runs a function on a module right after it is executed."""

    def __init__(self, actions):
        self.actions = actions

    def find_spec(self, name, path, target=None):
        action = self.actions.pop(name, None)
        if action is None:
            return None
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            action(module)

        spec.loader.exec_module = exec_module
        return spec


def take_gloo_for_cards(state):
    state.PartialState._prepare_backend = lambda self, *_, **__: ("gloo", state.DistributedType.MULTI_GPU)


def allow_bf16(training_args):
    training_args.is_torch_bf16_gpu_available = lambda: True


def copy_weights(modeling):
    """Weights that are mapped from their file are no allocation; those of a card are."""
    load = modeling.PreTrainedModel.from_pretrained.__func__

    def from_pretrained(cls, *args, **kwargs):
        model = load(cls, *args, **kwargs)
        for parameter in model.parameters():
            if not parameter.is_meta and parameter.numel():
                parameter.data = parameter.data.clone()
        watch_a_linear(model)
        return model

    modeling.PreTrainedModel.from_pretrained = classmethod(from_pretrained)


COMPUTED = {}
"""How the last decoder layer last computed."""


def watch_a_linear(model):
    """Note the dtypes in which a linear of the last layer meets its input, and whether autocast would change them."""
    linears = [module for name, module in model.named_modules() if name.endswith("self_attn.o_proj")]

    def note(linear, inputs):
        COMPUTED.update(
            autocast=torch.is_autocast_enabled("cpu"),
            weight=str(linear.weight.dtype).removeprefix("torch."),
            input=str(inputs[0].dtype).removeprefix("torch."),
        )

    linears[-1].register_forward_pre_hook(note)


def few_rows_at_once(kernels):
    """The fused head's tiles are folded by a Triton kernel, a program a token; the CPU's stand-in takes all at once.

    A card sums bf16 products in fp32 without copies of the factors (``addmm`` with ``out_dtype``); the CPU makes them.
    """
    rows = 8

    def addmm_by_rows(total, left, right):
        for start in range(0, right.shape[0], rows):
            part = slice(start, start + rows)
            total.addmm_(left[:, part].float(), right[part].float())

    kernels._addmm_fp32 = addmm_by_rows

    def by_rows(fold, per_row):
        def folded(tile, stride, *rest, **options):
            for start in range(0, tile.shape[0], rows):
                part = slice(start, start + rows)
                cut = [None if value is None else value[part] for value in rest[:per_row]]
                fold(tile[part], stride, *cut, *rest[per_row:], **options)

        return folded

    kernels._forward_tile = by_rows(kernels._forward_tile, per_row=8)
    kernels._backward_tile = by_rows(kernels._backward_tile, per_row=5)


def drop_devices(distributed):
    """DDP takes no device for modules on the CPU; accelerate names one, for it believes in cards.

    Ranks whose bytes are counted send each other no weights at the start, which both have read from one file: a gloo
    thread lets go of what was sent, and the profiler, which sees one thread, would count it for good.
    """
    construct = distributed.DistributedDataParallel.__init__

    def without(self, module, device_ids=None, output_device=None, **options):
        construct(self, module, init_sync="TRLFIT_TEST_RESIDENT" in os.environ, **options)

    distributed.DistributedDataParallel.__init__ = without


def ring_on_cpu(attention):
    """Context parallelism knows the attention operators of cards; the CPU's takes the same way."""
    import torch
    from torch.distributed.tensor import DTensor, Shard

    aten = torch.ops.aten
    flash = aten._scaled_dot_product_flash_attention_for_cpu
    flash_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    sequence = 2

    def local(value):
        return value._local_tensor if isinstance(value, DTensor) else value

    def whole(value, mesh):
        return DTensor.from_local(value, mesh, [Shard(sequence)], run_check=False)

    def forward(_operator, args, kwargs):
        mesh = args[0].device_mesh
        query, key, value = map(local, args[:3])
        causal = args[4] if len(args) > 4 else kwargs.get("is_causal", False)
        out, logsumexp = attention._templated_ring_attention(
            mesh.get_group(),
            sequence,
            flash,
            query=query,
            key=key,
            value=value,
            is_causal=causal,
            dropout_p=0.0,
            scale=kwargs.get("scale"),
        )[:2]
        return whole(out.to(query.dtype), mesh), whole(logsumexp, mesh)

    def backward(_operator, args, kwargs):
        mesh = args[1].device_mesh
        grad, query, key, value, out, logsumexp = map(local, args[:6])
        grads = attention._templated_ring_attention_backward(
            mesh.get_group(),
            sequence,
            flash_backward,
            grad_out=grad.contiguous(),
            grad_out_name="grad_out",
            query=query,
            key=key,
            value=value,
            out=out,
            logsumexp=logsumexp,
            is_causal=args[7],
            dropout_p=args[6],
            scale=kwargs.get("scale"),
        )
        return tuple(whole(each, mesh) for each in grads[:3])

    attention.custom_ops[flash.default] = forward
    attention.custom_ops[flash_backward] = backward


def talk_through_gloo_alone(comm):
    """DeepSpeed compiles an exchange through shared memory for CPUs, for minutes; cards have none of that."""
    comm.build_shm_op = lambda: None


def adam_without_compiler(cpu_adam):
    """DeepSpeed's Adam of offloaded states, its kernel in torch: compiling the real one takes minutes.

    The optimizer that makes and keeps the states is DeepSpeed's own.
    """

    class Kernel:
        def create_adam(self, *_):
            pass

        def destroy_adam(self, *_):
            pass

        def adam_update(self, _, step, rate, beta1, beta2, eps, decay, _corrected, weights, gradients, first, second):
            first.mul_(beta1).add_(gradients, alpha=1 - beta1)
            second.mul_(beta2).addcmul_(gradients, gradients, value=1 - beta2)
            weights.mul_(1 - rate * decay)
            width = second.sqrt().div_((1 - beta2**step) ** 0.5).add_(eps)
            weights.addcdiv_(first, width, value=-rate / (1 - beta1**step))

    class Builder:
        def load(self):
            return Kernel()

    cpu_adam.CPUAdamBuilder = Builder


class Counter:
    """What the CPU allocator has handed out, C++ allocations included, by way of torch's profiler.

    Not counted is what a collective allocates inside: gloo's copies of what it reduces, which NCCL does not make.
    """

    def __init__(self, torch):
        self.torch = torch
        self.profile = None
        self.held = {}
        self.now = 0
        self.highest = 0

    def start(self):
        profiler = self.torch.profiler
        self.profile = profiler.profile(activities=[profiler.ProfilerActivity.CPU], profile_memory=True)
        self.profile.__enter__()

    def stop(self):
        if self.profile is not None:
            self.profile.__exit__(None, None, None)

    def read(self):
        """The most since the last reset. The first call starts the counting: train.py asks before it loads a model."""
        if self.profile is None:
            self.start()
            return 0
        self.stop()
        for _, address, size, of_collective in sorted(self.events()):
            self.now -= self.held.pop(address, 0)
            if size > 0 and not of_collective:
                self.held[address] = size
                self.now += size
            self.highest = max(self.highest, self.now)
        self.start()
        return self.highest

    def events(self):
        """(time, address, bytes, negative when they are given back, inside a collective) of every allocation."""
        waiting = [(event, False) for event in self.profile.profiler.kineto_results.experimental_event_tree()]
        allocation = self.torch._C._profiler._EventType.Allocation
        while waiting:
            event, of_collective = waiting.pop()
            if event.tag == allocation:
                fields = event.extra_fields
                yield event.start_time_ns, fields.ptr, fields.alloc_size, of_collective
            else:
                of_collective = of_collective or event.name.startswith("c10d::")
            waiting += [(child, of_collective) for child in event.children]

    def reset(self):
        self.read()
        self.highest = self.now


def count(torch):
    counter = Counter(torch)
    torch.cuda.mem_get_info = lambda *_: (2**30, 2**31)
    torch.cuda.max_memory_allocated = lambda *_: counter.read()
    torch.cuda.max_memory_reserved = lambda *_: counter.highest
    torch.cuda.reset_peak_memory_stats = lambda *_: counter.reset()
    torch.cuda.synchronize = lambda *_: None
    atexit.register(counter.stop)


def let_gloo_go_first(work):
    """The profiler sees one thread: what a gloo thread is the last to refer to would never be seen to go.

    On a busy machine that thread waits for a core, so it is given some time.
    """
    wait = work.wait

    def waited(self, *args, **kwargs):
        done = wait(self, *args, **kwargs)
        time.sleep(0.004)
        return done

    work.wait = waited


def tell(path):
    """Write down what accelerate made of the run's own files."""
    state = sys.modules["accelerate.state"].AcceleratorState()
    fsdp, mesh = (getattr(state, name, None) for name in ("fsdp_plugin", "parallelism_config"))
    seen = {
        "distributed_type": state.distributed_type.value,
        "num_processes": state.num_processes,
        "zero_optimization": state.deepspeed_plugin and state.deepspeed_plugin.deepspeed_config["zero_optimization"],
        "reshard_after_forward": fsdp and fsdp.reshard_after_forward,
        "mesh": mesh and [mesh.dp_shard_size, mesh.cp_size, mesh.sp_size],
        "computed": COMPUTED,
    }
    pathlib.Path(path).write_text(json.dumps(seen), encoding="utf-8")


RING = "torch.distributed.tensor.experimental._context_parallel._attention"

# A launcher hands its settings on: to ranks with their number, to a single process without one.
LAUNCHED = ("LOCAL_RANK", "ACCELERATE_MIXED_PRECISION")

if os.environ.get("TRLFIT_TEST_CPU_RANKS") and any(name in os.environ for name in LAUNCHED):
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    import torch

    actions = {
        "transformers.training_args": allow_bf16,
        "trl.kernels.chunked_logprob": few_rows_at_once,
        "deepspeed.comm.torch": talk_through_gloo_alone,
        "deepspeed.ops.adam.cpu_adam": adam_without_compiler,
        RING: ring_on_cpu,
    }
    if "LOCAL_RANK" in os.environ:
        actions["accelerate.state"] = take_gloo_for_cards
        if os.environ["LOCAL_RANK"] == "0":
            atexit.register(tell, os.environ["TRLFIT_TEST_CPU_RANKS"])
    drop_devices(torch.nn.parallel)
    if "TRLFIT_TEST_RESIDENT" in os.environ:
        from resident import watch

        actions |= watch(os.environ["TRLFIT_TEST_RESIDENT"], torch)
    else:
        actions["transformers.modeling_utils"] = copy_weights
        let_gloo_go_first(torch.distributed.Work)
        count(torch)
    # A fork of a process that has imported them already: see tests/launcher/warm_python.py.
    for name in actions.keys() & sys.modules.keys():
        actions.pop(name)(sys.modules[name])
    sys.meta_path.insert(0, OnImport(actions))
