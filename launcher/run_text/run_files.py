"""A run as text: every file of a run folder, made from values alone, to be shown or written."""

from __future__ import annotations

import json
import re
import shlex

import yaml

from launcher.run_text.accelerate_config import (
    ACCELERATE_FILE,
    DEEPSPEED_FILE,
    deepspeed_config,
    render_accelerate_yaml,
)
from launcher.run_text.run_spec import RunSpec as RunSpec
from launcher.run_text.training_script import render_training_script
from launcher.running.run_record import COMMAND as COMMAND_FILE
from launcher.running.run_record import PLAN as PLAN_FILE
from planner.choice import ZERO
from planner.machine_hardware import cards_by_room

TRAIN_FILE = "train.py"
SLURM_FILE = "slurm.sh"
JOB_FILE = "job.yaml"

_PYTHON_LINE = re.compile(r"^PYTHON=\$\{PYTHON:-(.+)\}$", re.MULTILINE)
_BARE_WORD = re.compile(r"[A-Za-z0-9._-]+")


def render_run(spec: RunSpec) -> dict[str, str]:
    """File name -> text for the whole run folder.

    Raises:
        UsageError: the job or the choice asks for something that cannot be written.
    """
    files = {
        TRAIN_FILE: render_training_script(spec),
        ACCELERATE_FILE: render_accelerate_yaml(spec),
    }
    if spec.choice.sharding in ZERO:
        files[DEEPSPEED_FILE] = json.dumps(deepspeed_config(spec), indent=2) + "\n"
    files[COMMAND_FILE] = render_command(spec)
    if spec.num_nodes > 1:
        files[SLURM_FILE] = render_slurm(spec)
    if spec.choice.precision != "bf16":
        from launcher.run_text.route_script import route_files

        files |= route_files(spec)
    files[PLAN_FILE] = spec.plan_json
    files[JOB_FILE] = render_job(spec)
    return files


def render_command(spec: RunSpec) -> str:
    """command.sh: starts the run from its own folder, wherever it is called from."""
    python = shlex.quote(spec.python or spec.stack.python or "python")
    lines = [
        "#!/usr/bin/env bash",
        "# Start:                bash command.sh",
        "# From a checkpoint:    RESUME=1 bash command.sh",
        "# With another Python:  PYTHON=/path/to/python bash command.sh",
    ]
    if spec.num_nodes > 1:
        lines += [
            f"# On each of {spec.num_nodes} nodes:",
            "#   MASTER_ADDR  host name of the first node, the same on all",
            "#   MASTER_PORT  a free port there (29500 when left out)",
            "#   NODE_RANK    0 on the first node, then 1, 2, ...",
            "# or once, under Slurm: sbatch slurm.sh",
        ]
    lines += [
        "set -euo pipefail",
        'cd -- "$(dirname -- "${BASH_SOURCE[0]}")"',
        "",
        f"PYTHON=${{PYTHON:-{python}}}",
        "export PYTHONUNBUFFERED=1  # log lines appear as they are printed",
        *_device_exports(spec),
        "",
        "# accelerate launch --config_file accelerate.yaml train.py, in the Python above",
        *_launch_lines(spec),
    ]
    return "\n".join(lines) + "\n"


def python_of(command: str) -> str | None:
    """The Python that a command.sh starts where the environment names no other; None where that line was edited."""
    found = _PYTHON_LINE.search(command)
    try:
        words = shlex.split(found[1]) if found else []
    except ValueError:
        return None
    return words[0] if len(words) == 1 else None


def _device_exports(spec: RunSpec) -> list[str]:
    if spec.on_cpu:
        lines = ['export CUDA_VISIBLE_DEVICES=""  # planned for the CPU']
        if spec.machine.host is not None:
            threads = max(1, spec.machine.host.cores // spec.num_processes)
            lines.append(f"export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-{threads}}}")
            lines.append(
                "export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}  # spinning threads triple a step on busy cores"
            )
        return lines
    lines = ["export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"]
    # The cards that the plan was made for: the emptiest.
    cards = sorted(cards_by_room(spec.machine)[: spec.processes_per_node], key=lambda card: card.index)
    if spec.machine.origin == "nvml" and spec.num_nodes == 1:
        uuids = [card.uuid for card in cards if card.uuid is not None]
        if len(uuids) == len(cards):
            return [*lines, f"export CUDA_VISIBLE_DEVICES={shlex.quote(','.join(uuids))}"]
        numbers = [card.index if card.physical_index is None else card.physical_index for card in cards]
        lines.append("export CUDA_DEVICE_ORDER=PCI_BUS_ID")
        return [*lines, f"export CUDA_VISIBLE_DEVICES={','.join(map(str, numbers))}"]
    # Planned for another machine: as many of its cards as are needed, unless a scheduler gave some.
    first = ",".join(map(str, range(spec.processes_per_node)))
    return [*lines, f"export CUDA_VISIBLE_DEVICES=${{CUDA_VISIBLE_DEVICES:-{first}}}"]


def _launch_lines(spec: RunSpec) -> list[str]:
    start = 'exec "$PYTHON" -m accelerate.commands.accelerate_cli launch'
    if spec.num_nodes == 1:
        return [f"{start} --config_file {ACCELERATE_FILE} {TRAIN_FILE}"]
    return [
        f"{start} --config_file {ACCELERATE_FILE} \\",
        '  --machine_rank "${NODE_RANK:?set it to the rank of this node, from 0}" \\',
        '  --main_process_ip "${MASTER_ADDR:?set it to the host name of the first node}" \\',
        f'  --main_process_port "${{MASTER_PORT:-29500}}" {TRAIN_FILE}',
    ]


def render_slurm(spec: RunSpec) -> str:
    """slurm.sh: one task per node, each of which runs command.sh."""
    words = _BARE_WORD.findall(spec.job.model.rstrip("/").rpartition("/")[2])
    name = "-".join(["trlfit", *words])[:64]
    return f"""#!/usr/bin/env bash
#SBATCH --job-name={name}
#SBATCH --nodes={spec.num_nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={spec.processes_per_node}
#SBATCH --exclusive
#SBATCH --output=log.txt
# Submit from this folder, which every node must see: sbatch slurm.sh
set -euo pipefail
cd -- "$SLURM_SUBMIT_DIR"

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR
export MASTER_PORT=${{MASTER_PORT:-29500}}

srun --kill-on-bad-exit=1 bash -c 'NODE_RANK=$SLURM_NODEID exec bash {COMMAND_FILE}'
"""


def render_job(spec: RunSpec) -> str:
    """job.yaml: the whole job, defaults included, so that it plans the same in a later release."""
    text: str = yaml.safe_dump(spec.job.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=100)
    return text
