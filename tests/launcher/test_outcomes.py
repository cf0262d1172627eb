"""Ends and what they are called.

The logs in ``logs/`` are what torch 2.13, transformers 5.24, TRL 1.16, accelerate 1.15 and datasets
really print, frames included, made on CPUs; where memory ran out, an allocation was made to raise
torch's own message inside the real call.
"""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path

import pytest

from launcher.ending.judgement import KINDS, Circumstances, Kind
from launcher.ending.log_evidence import Shortage, read_evidence, read_shortage, read_tail
from launcher.ending.outcomes import Outcome, classify
from launcher.ending.run_metrics import Metrics, Predicted, read_metrics, summarise
from tests.launcher.fake_run import GIB, PLAN, rows

LOGS = Path(__file__).parent / "logs"
PREDICTED = Predicted.from_plan(PLAN)
LOADED = Metrics(started=True)
"""The start row is there and no step yet."""


def end(
    log: str,
    *,
    exit_code: int | None = 1,
    number: int | None = None,
    metrics: Metrics = LOADED,
    **around: object,
) -> Outcome:
    return classify(
        exit_code, number, log, metrics, PREDICTED, Circumstances(**around)  # type: ignore[arg-type]
    )  # fmt: skip


def log_of(name: str) -> str:
    text = read_tail(LOGS / f"{name}.txt")
    assert text
    return text


REAL: dict[str, tuple[Kind, str | None, str]] = {
    "oom_load": ("out_of_memory", "load", "out of memory in load: asked for 2.5 GiB"),
    "oom_forward": ("out_of_memory", "forward", "out of memory in forward at step 1: asked for 2.5"),
    "oom_loss": ("out_of_memory", "loss", "with 1.2 GiB of 79.1 GiB free; the plan predicted 50.0"),
    "oom_backward": ("out_of_memory", "backward", "out of memory in backward at step 1"),
    "oom_backward_ckpt": ("out_of_memory", "backward", "out of memory in backward"),
    "oom_step": ("out_of_memory", "step", "out of memory in step"),
    "oom_rank1": ("out_of_memory", "forward", "out of memory in forward at step 1 on rank 1"),
    "oom_cpu": ("out_of_memory", None, "out of host memory at step 1: asked for 4,194,304.0 GiB"),
    "config_keyword": (
        "configuration_error", None,
        "configuration error: TypeError: SFTConfig.__init__() got an unexpected keyword argument"
        " 'max_sequence_length' (train.py:44)",
    ),
    "config_value": ("configuration_error", "load", "you didn't pass an `eval_dataset`"),
    "config_choice": ("configuration_error", "load", "adamw_turbo is not a valid OptimizerNames"),
    "config_model": ("configuration_error", "load", "OSError: We couldn't connect to"),
    "data_file": ("data_error", None, "Unable to find '/home/ana/runs/qwen/no/such.jsonl' (train.py"),
    "data_json": ("data_error", None, "JSON parse error: Missing a comma or '}' after an object member"),
    "data_split": ("data_error", None, 'Unknown split "validation". Should be one of [\'train\']'),
    "data_columns": ("data_error", "load", "data error: the rows have no column 'text' (train.py:56)"),
    "data_chat": ("data_error", "load", "tokenizer.chat_template is not set"),
    "data_empty": ("data_error", "load", "data error: the data set is empty (train.py:56)"),
    "disk_full": ("disk_full", None, "the disk is full: [Errno 28] No space left on device"),
    "killed": ("killed", None, "ended from outside by SIGKILL, with no out-of-memory kill on record"),
    "killed_rank1": ("killed", None, "ended from outside by SIGKILL"),
    "interrupt": ("killed", None, "ended from outside by SIGINT"),
    "crashed": ("failed", None, "crashed with SIGSEGV"),
    "raised": ("failed", None, "failed: RuntimeError: The size of tensor a (4) must match"),
    "hung": ("hung", None, "hung: a rank waited for the others until the time-out"),
    "node_lost": ("node_lost", None, "lost another node: RuntimeError:"),
    "node_join": ("node_lost", None, "RendezvousTimeoutError"),
}  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_a_real_log_gets_its_kind_phase_and_sentence(name: str) -> None:
    kind, phase, words = REAL[name]
    before = Metrics() if name.startswith(("config", "data")) else LOADED
    outcome = end(log_of(name), metrics=before, nodes=2 if name.startswith("node") else 1)
    assert (outcome.kind, outcome.phase) == (kind, phase), outcome.sentence
    assert words in outcome.sentence
    assert "\n" not in outcome.sentence
    assert not outcome.sentence.removesuffix("...").endswith(".")


def test_every_log_is_judged() -> None:
    assert {path.stem for path in LOGS.glob("*.txt")} == REAL.keys()


def test_the_numbers_of_a_shortage_are_kept() -> None:
    """2.50 GiB asked, 1.23 free of 79.11, 75.02 allocated, 1.51 reserved and unused."""
    outcome = end(log_of("oom_loss"))
    assert outcome.shortage == Shortage(
        where="gpu",
        asked_bytes=2_684_354_560,
        free_bytes=1_320_702_444,
        capacity_bytes=84_943_715_697,
        allocated_bytes=80_552_111_636,
        unallocated_bytes=1_621_350_154,
        others_bytes=None,
        gpu=0,
    )
    assert outcome.exception is not None
    assert outcome.exception.startswith("torch.OutOfMemoryError: CUDA out of memory. Tried to alloc")
    assert outcome.predicted.allocated_bytes == 50 * GIB


def test_the_signal_of_a_killed_rank_is_named_though_the_launcher_exits_with_1() -> None:
    assert end(log_of("killed_rank1")).signal == "SIGKILL"
    assert end(log_of("killed")).signal == "SIGKILL"
    assert end(log_of("crashed")).signal == "SIGSEGV"
    assert end(log_of("raised")).signal is None


MESSAGES = {
    "torch 2.1": (
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 3 has a total capacty of 6.00 GiB of "
        "which 0 bytes is free. Of the allocated memory 2.93 GiB is allocated by PyTorch, and 2.30 "
        "GiB is reserved by PyTorch but unallocated.",
        {"asked_bytes": 20 << 20, "free_bytes": 0, "capacity_bytes": 6 << 30, "gpu": 3},
    ),
    "torch 1.13": (
        "CUDA out of memory. Tried to allocate 2.75 GiB (GPU 0; 14.75 GiB total capacity; 8.50 GiB "
        "already allocated; 19.75 MiB free; 13.75 GiB reserved in total by PyTorch)",
        {
            "asked_bytes": 11 << 28, "free_bytes": 20_709_376, "capacity_bytes": 59 << 28,
            "allocated_bytes": 17 << 29,
        },
    ),
    "others on the card": (
        "CUDA out of memory. Tried to allocate 64.00 MiB. GPU 4 has a total capacity of 79.00 GiB of "
        "which 32.00 MiB is free. Process 126723 has 70.00 GiB memory in use. Process 126724 has "
        "512.00 MiB memory in use. Including non-PyTorch memory, this process has 8.00 GiB memory "
        "in use.",
        {"others_bytes": (70 << 30) + (512 << 20), "gpu": 4},
    ),
    "Metal": (
        "MPS backend out of memory (MPS allocated: 17.80 GB, other allocations: 384.00 KB, max "
        "allowed: 18.00 GB). Tried to allocate 256.00 MB on private pool.",
        {"asked_bytes": 256 << 20, "capacity_bytes": 18 << 30},
    ),
    "numpy": (
        "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 1.50 GiB for an array with "
        "shape (402653184,) and data type float32",
        {"asked_bytes": 3 << 29, "where": "host"},
    ),
    "host": (
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 4096 bytes. Error code 12 (Cannot allocate memory)",
        {"asked_bytes": 4096, "where": "host"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_of_many_versions_are_read(name: str) -> None:
    text, expected = MESSAGES[name]
    shortage = read_shortage(text)
    assert {key: getattr(shortage, key) for key in expected} == expected


def traceback(*frames: tuple[str, str, str], error: str = "torch.OutOfMemoryError: CUDA out of memory") -> str:
    package = "/opt/train/lib/python3.11/site-packages"
    lines = ["Traceback (most recent call last):"]
    for path, function, source in frames:
        lines += [f'  File "{package}/{path}", line 1, in {function}', f"    {source}"]
    return "\n".join([*lines, error, ""])


STEP = ("transformers/trainer.py", "training_step", "loss = self.compute_loss(model, inputs)")
MODEL = "transformers/models/qwen3/modeling_qwen3.py"
PHASES = {
    "full logits in the head": (
        "loss", STEP, (MODEL, "forward", "logits = self.lm_head(hidden_states[:, slice_indices, :])"),
        ("torch/nn/modules/linear.py", "forward", "return F.linear(input, self.weight, self.bias)"),
    ),
    "logits upcast": (
        "loss", STEP, ("transformers/loss/loss_utils.py", "ForCausalLMLoss", "logits.float()"),
    ),
    "log-probabilities of DPO": (
        "loss", STEP, ("trl/trainer/utils.py", "selective_log_softmax", "torch.gather(logits)"),
    ),
    "Liger": ("loss", STEP, ("liger_kernel/ops/fused_linear_cross_entropy.py", "forward", "x @ w")),
    "a layer": ("forward", STEP, (MODEL, "forward", "self.down_proj(self.act_fn(x) * self.up(x))")),
    "DeepSpeed's step, inside backward": (
        "step", STEP,
        ("accelerate/accelerator.py", "backward", "self.deepspeed_engine_wrapped.backward(loss)"),
        ("accelerate/utils/deepspeed.py", "backward", "self.engine.step()"),
        ("deepspeed/runtime/engine.py", "step", "self._take_model_step(lr_kwargs)"),
    ),
    "8-bit Adam": ("step", STEP, ("bitsandbytes/optim/optimizer.py", "step", "self.init_state()")),
    "foreach Adam": ("step", ("torch/optim/adamw.py", "step", "adamw(")),
    "clipping": ("step", ("accelerate/accelerator.py", "clip_grad_norm_", "norm()")),
    "a checkpoint": ("save", ("transformers/trainer.py", "_save_checkpoint", "self.save_model(x)")),
    "sampling": (
        "generate", STEP, ("trl/trainer/grpo_trainer.py", "_generate_single_turn", "unwrapped()"),
        ("transformers/generation/utils.py", "generate", "result = decoding_method("),
    ),
    "moving to the card": (
        "load", ("transformers/trainer.py", "__init__", "self._move_model_to_device(model)"),
    ),
    "sharding": ("load", ("accelerate/accelerator.py", "prepare", "fsdp2_prepare_model(self)")),
}  # fmt: skip


@pytest.mark.parametrize("name", PHASES)
def test_the_phase_is_read_from_the_frames(name: str) -> None:
    phase, *frames = PHASES[name]
    assert end(traceback(*frames)).phase == phase  # type: ignore[arg-type]


def test_memory_that_another_process_holds_is_told() -> None:
    log = traceback(STEP, error=f"torch.OutOfMemoryError: {MESSAGES['others on the card'][0]}")
    assert "70.5 GiB of it held by other processes" in end(log).sentence


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        ("Indexing.cu:1553: indexSelectLargeIndex: block: [63,0,0], thread: [95,0,0] Assertion `srcIndex <"
         " srcSelectDimSize` failed.", "a row holds a token id beyond the vocabulary"),
        ("Loss.cu:250: nll_loss_forward_reduce_cuda_kernel_2d: block: [0,0,0], thread: [4,0,0] Assertion `t >= 0 && t <"
         " n_classes` failed.", "a label is beyond the number of classes"),
    ],
)  # fmt: skip
def test_what_a_card_asserts_of_an_index_is_about_the_data(kernel: str, words: str) -> None:
    """The exception comes from whatever touched the card next."""
    error = "torch.AcceleratorError: CUDA error: device-side assert triggered"
    log = f"/pytorch/aten/src/ATen/native/cuda/{kernel}\n{traceback(STEP, error=error)}"
    outcome = end(log, metrics=LOADED)
    assert (outcome.kind, words in outcome.sentence) == ("data_error", True), outcome.sentence
    assert end(traceback(STEP, error=error), metrics=LOADED).kind == "failed", "no kernel said what it was"


def test_an_error_thrown_in_c_is_read_too() -> None:
    log = (
        "terminate called after throwing an instance of 'c10::OutOfMemoryError'\n"
        "  what():  CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity\n"
    )
    outcome = end(log, exit_code=None, number=signal.SIGABRT)
    assert outcome.kind == "out_of_memory"
    assert outcome.shortage is not None and outcome.shortage.asked_bytes == GIB


WATCHDOG = (
    "[rank0]:[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, NumelIn=466119168, "
    "NumelOut=466119168, Timeout(ms)=600000) ran for 600060 milliseconds before timing out.\n"
)


def test_ncclls_watchdog_is_a_hang_and_not_a_crash() -> None:
    thrown = (
        "terminate called after throwing an instance of 'c10::DistBackendError'\n"
        "  what():  [PG ID 0 PG GUID 0(default_pg) Rank 0] NCCL watchdog thread terminated with "
        "exception: [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1580)\n"
    )
    metrics = summarise([{"event": "start"}, {"event": "step", "step": 7, "loss": 1.0}])
    outcome = end(WATCHDOG + thrown, exit_code=None, number=signal.SIGABRT, metrics=metrics)
    assert outcome.kind == "hung"
    assert outcome.sentence.startswith("hung after step 7: ")


def test_a_rank_that_ran_out_of_memory_explains_the_others_hang() -> None:
    assert end(log_of("oom_rank1") + WATCHDOG).kind == "out_of_memory"


def test_a_lost_peer_of_nccl() -> None:
    error = (
        "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:268, remote process exited "
        "or there was a network error, NCCL version 2.27.5"
    )
    assert end(traceback(STEP, error=error), nodes=4).kind == "node_lost"


@pytest.mark.parametrize(
    ("line", "kind", "words"),
    [
        (
            "slurmstepd: error: *** STEP 77.0 ON n1 CANCELLED AT 2026-07-22T10:00:00 DUE TO TIME LIMIT ***",
            "killed", "time limit",
        ),
        (
            "slurmstepd: error: *** JOB 77 ON n1 CANCELLED AT 2026-07-22T10:00:00 DUE TO NODE FAILURE ***",
            "node_lost", "node or card failed",
        ),
        (
            "slurmstepd: error: *** JOB 77 ON n1 CANCELLED AT 2026-07-22T10:00:00 DUE TO PREEMPTION ***",
            "killed", "preempted",
        ),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=77.0.", "out_of_memory", "scheduler"),
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", "node_lost", "card failed"),
    ],
)  # fmt: skip
def test_schedulers_and_drivers_are_heard(line: str, kind: str, words: str) -> None:
    outcome = end(line + "\n", exit_code=137)
    assert outcome.kind == kind
    assert words in outcome.sentence


def test_a_kill_with_the_kernels_record_is_host_memory() -> None:
    outcome = end("command.sh: line 3:  4242 Killed   python train.py\n", exit_code=137, oom_kills={"cgroup": 1})
    assert outcome.kind == "out_of_memory"
    assert outcome.shortage == Shortage(where="host")
    assert outcome.signal == "SIGKILL"
    assert "before the first step" in outcome.sentence
    assert "1 out-of-memory kill in its control group" in outcome.sentence


def test_a_kill_without_such_a_record_is_a_kill() -> None:
    outcome = end("command.sh: line 3:  4242 Killed   python train.py\n", exit_code=137, oom_kills={"cgroup": 0})
    assert (outcome.kind, outcome.signal, outcome.exit_code) == ("killed", "SIGKILL", 137)


def test_a_killed_data_loader_worker_is_host_memory_when_the_kernel_says_so() -> None:
    error = "RuntimeError: DataLoader worker (pid 4242) is killed by signal: Killed. "
    log = traceback(STEP, error=error)
    assert end(log, oom_kills={"cgroup": 2}).kind == "out_of_memory"
    assert end(log).kind == "failed"


def test_a_lost_process_on_one_node_is_no_lost_node() -> None:
    outcome = end(log_of("node_lost"), nodes=1)
    assert (outcome.kind, outcome.sentence[:20]) == ("failed", "lost another process")


def test_kills_elsewhere_on_the_machine_do_not_explain_an_ordinary_error() -> None:
    assert end(log_of("raised"), oom_kills={"machine": 3}).kind == "failed"


def test_a_traceback_that_was_survived_does_not_explain_a_later_kill() -> None:
    long_ago = log_of("raised").partition('Traceback (most recent call last):\n  File "/opt')[0]
    log = long_ago + "step\n" * 5000
    assert end(log, exit_code=None, number=signal.SIGKILL).kind == "killed"
    assert end(long_ago, exit_code=None, number=signal.SIGKILL).kind == "failed"


def test_bash_itself_may_fail() -> None:
    outcome = end("command.sh: line 9: accelerate: command not found\n", exit_code=127, metrics=Metrics())
    assert outcome.kind == "configuration_error"
    assert "accelerate: command not found" in outcome.sentence


def test_a_silent_failure_says_its_code_and_last_line() -> None:
    assert end("\nsome words\n\n", exit_code=3).sentence == "failed with exit code 3: some words"
    assert end("", exit_code=3).sentence == "failed with exit code 3: the log is empty"


def test_done_compares_with_the_plan() -> None:
    metrics = summarise(
        map(
            json.loads,
            rows(
                (1, 2.5, 9.0, [51 * GIB, 48 * GIB]), (2, 2.0, 2.2, [51 * GIB, 49 * GIB]), (3, 1.5, 2.0, [1, 1])
            ).splitlines(),
        )
    )
    outcome = end("", exit_code=0, metrics=metrics)
    assert outcome.kind == "done"
    assert outcome.sentence == (
        "finished after 3 steps, peak 51.0 GiB (predicted 50.0 GiB), 2.10 s a step (predicted 2.00 s)"
    )
    assert outcome.seen.reserved_bytes == 52 * GIB
    assert outcome.seen.step_s == pytest.approx(2.1), "the first step, 9 s, is left out"
    assert outcome.seen.tokens_per_s == pytest.approx(8192 / 2.1)
    assert outcome.memory_error == pytest.approx(0.02)
    assert outcome.step_error == pytest.approx(0.05)


def test_on_the_cpu_the_growth_of_resident_memory_is_compared() -> None:
    metrics = summarise([
        {"event": "start", "rss_bytes": [GIB, 2 * GIB], "peak_rss_bytes": [9 * GIB, 9 * GIB]},
        {"event": "step", "step": 1, "loss": 1.0, "peak_rss_bytes": [30 * GIB, 34 * GIB]},
        {"event": "step", "step": 2, "loss": 1.0, "peak_rss_bytes": [49 * GIB, 47 * GIB]},
    ])  # fmt: skip
    outcome = end("", exit_code=0, metrics=metrics)
    assert (outcome.seen.memory_bytes, outcome.seen.memory_basis) == (48 * GIB, "rss_growth")
    assert outcome.memory_error == pytest.approx(-0.04)


def test_one_step_is_too_little_to_compare() -> None:
    """Adam's moments are allocated in the first step, after its peak."""
    metrics = summarise(
        [{"event": "start"}, {"event": "step", "step": 1, "loss": 1.0, "step_s": 5.0, "peak_allocated_bytes": [GIB]}]
    )
    outcome = end("", exit_code=0, metrics=metrics)
    assert (outcome.memory_error, outcome.step_error, outcome.seen.step_s) == (None, None, None)


def test_a_loss_that_is_no_number_is_told() -> None:
    metrics = summarise(
        [
            {"event": "start"},
            *({"event": "step", "step": n, "loss": x} for n, x in ((1, 2.0), (2, None), (3, math.nan))),
        ]
    )
    assert (metrics.first_bad_step, metrics.loss) == (2, 2.0)
    assert "not a number from step 2 on" in end("", exit_code=0, metrics=metrics).sentence


def test_garbage_in_metrics_is_counted_and_skipped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    wrong = '{"event": "step", "step": "x", "peak_allocated_bytes": {}}'
    garbage = f'{{"event": "step", "step": 2, "lo\n[1, 2]\nnull\n\n\xff\xfe\n{wrong}\n'
    path.write_bytes(rows((1, 2.0, 1.0, [5]), end=False).encode() + garbage.encode("latin-1"))
    metrics = read_metrics(path)
    assert (metrics.bad_lines, metrics.rows, metrics.last_step) == (4, 2, 1)
    assert metrics.allocated_bytes == 5
    assert read_metrics(tmp_path / "none.jsonl") == Metrics()


def test_an_earlier_attempt_in_the_same_file_does_not_count() -> None:
    metrics = summarise(
        map(json.loads, (rows((9, 9.0, 9.0, [9 * GIB])) + rows((1, 1.0, 1.0, [GIB]), end=False)).splitlines())
    )
    assert (metrics.ended, metrics.last_step, metrics.allocated_bytes) == (False, 1, GIB)


def test_an_exit_code_hidden_by_a_pipe_does_not_hide_the_error() -> None:
    """``accelerate launch ... | tee`` exits with 0; the start row stands without an end row."""
    assert end(log_of("oom_loss"), exit_code=0).kind == "out_of_memory"


def test_stopping_is_stopping_whatever_the_log_says() -> None:
    metrics = summarise(map(json.loads, rows((4, 1.0, 1.0, [GIB]), end=False).splitlines()))
    outcome = end(log_of("killed_rank1"), exit_code=None, number=15, metrics=metrics, stop="by ana")
    assert (outcome.kind, outcome.sentence) == ("stopped", "stopped by ana after step 4")


def test_a_command_that_ends_well_because_it_was_stopped_is_stopped() -> None:
    """``wait`` in bash returns 0 when the processes it waits for are gone."""
    assert end("", exit_code=0, metrics=Metrics(), stop="by ana").kind == "stopped"


def test_a_run_that_finished_while_it_was_being_stopped_is_done() -> None:
    metrics = summarise(map(json.loads, rows((4, 1.0, 1.0, [GIB])).splitlines()))
    assert end("", exit_code=0, metrics=metrics, stop="by ana").kind == "done"


def test_a_run_that_finished_unseen_is_done() -> None:
    metrics = summarise(map(json.loads, rows((4, 1.0, 1.0, [GIB])).splitlines()))
    assert end("", exit_code=None, metrics=metrics, lost="its supervisor was killed").kind == "done"


def test_a_run_that_nobody_saw_ending_is_killed_unless_its_log_tells() -> None:
    lost = "the machine was restarted"
    outcome = end("", exit_code=None, lost=lost)
    assert (outcome.kind, outcome.sentence) == ("killed", "killed: the machine was restarted")
    assert end(log_of("oom_loss"), exit_code=None, lost=lost).kind == "out_of_memory"


def test_an_outcome_survives_json() -> None:
    outcome = end(log_of("oom_rank1"))
    text = json.dumps(outcome.to_json(), allow_nan=False)
    assert Outcome.from_json(json.loads(text)) == outcome
    assert json.loads(text)["schema"] == "trlfit.outcome/1"


@pytest.mark.parametrize(
    "data", [None, {}, {"kind": "great", "sentence": ""}, {"kind": "done"}, {"kind": "done", "sentence": "", "seen": 3}]
)
def test_what_is_no_outcome_is_none(data: dict[str, object] | None) -> None:
    assert Outcome.from_json(data) is None


def test_a_plan_without_numbers_predicts_nothing() -> None:
    for plan in (None, {}, {"best": None}, {"best": {"memory": 3, "time": {"step_s": "2"}}}):
        assert Predicted.from_plan(plan) == Predicted()


def test_a_tail_begins_with_a_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text("first line\nsecond line\nthird\n")
    assert read_tail(path, limit=10) == "third\n"
    assert read_tail(tmp_path / "none") == ""


def test_a_progress_bar_before_a_traceback_does_not_hide_it() -> None:
    evidence = read_evidence(log_of("raised"))
    assert [failure.last.kind for failure in evidence.own] == ["RuntimeError"]


def test_the_kinds_are_the_documented_ones() -> None:
    document = (Path(__file__).parents[2] / "docs" / "run-folder.md").read_text()
    assert all(f"`{kind}`" in document for kind in KINDS)
