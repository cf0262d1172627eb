"""RunSpec: everything a run folder is written from, and the few facts that follow from it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path, PurePath

from launcher.errors import UsageError
from launcher.paths import expanded
from planner.architecture import Architecture
from planner.choice import Choice
from planner.job import Job
from planner.machine import Machine
from planner.stack import Stack
from profiles.models import find_model

LOCAL_FORMATS: dict[str, str] = {
    ".jsonl": "json",
    ".json": "json",
    ".parquet": "parquet",
    ".csv": "csv",
}
"""Suffix of a local data file -> the builder of `datasets` that reads it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """One run, decided: what is trained, on what, by which knobs, with which packages."""

    job: Job
    choice: Choice
    architecture: Architecture
    stack: Stack
    machine: Machine
    plan_json: str
    """Text of plan.json, written as it is."""
    python: str | None
    """The training Python; None leaves it to PATH."""
    base_dir: str | None = None
    """Folder that relative paths of the job start from; None is the current one."""

    @property
    def on_cpu(self) -> bool:
        """The run uses no accelerator."""
        return self.machine.origin == "cpu" or not self.machine.cards

    @property
    def num_processes(self) -> int:
        """Processes over all nodes, one per GPU."""
        return self.choice.num_gpus

    @property
    def num_nodes(self) -> int:
        """Nodes the processes are spread over.

        Raises:
            UsageError: the processes do not divide evenly over the nodes they need.
        """
        if self.on_cpu:
            return 1
        per_node = max(1, len(self.machine.usable_cards))
        nodes = -(-self.num_processes // per_node)
        available = max(self.machine.nodes, self.job.nodes)
        if nodes > available:
            raise UsageError(
                f"the plan needs {self.num_processes} GPUs, but {available} node(s) with "
                f"{per_node} usable GPUs each have fewer; plan again for this machine"
            )
        if self.num_processes % nodes:
            raise UsageError(
                f"{self.num_processes} processes do not divide evenly over {nodes} nodes; pin sizes that do"
            )
        return nodes

    @property
    def processes_per_node(self) -> int:
        """Processes that one node starts."""
        return self.num_processes // self.num_nodes

    @property
    def model_source(self) -> str:
        """What `from_pretrained` is given; see ``model_source``."""
        return model_source(self.job, self.architecture, self.base_dir)

    @property
    def dataset_source(self) -> str:
        """A hub id, or the absolute path of a local file."""
        return dataset_source(self.job, self.base_dir)

    def absolute(self, path: str) -> str:
        """``path`` with ~ and relative parts resolved from ``base_dir``."""
        return absolute(path, self.base_dir)


def model_source(job: Job, architecture: Architecture, base_dir: str | None = None) -> str:
    """What `from_pretrained` is given: a hub id, or an absolute folder.

    Raises:
        UsageError: the job names a config file that is not the config.json of a model folder.
    """
    model = job.model
    if architecture.origin == "config.json":
        path = PurePath(model)
        if path.name != "config.json":
            raise UsageError(
                f"model {model} is a config without weights; name the folder or the hub id that holds the weights"
            )
        return absolute(str(path.parent), base_dir)
    if architecture.origin == "folder" or _looks_local(model):
        return absolute(model, base_dir)
    if architecture.origin == "bundled":
        found = find_model(model)  # as its owner spells it; never the model that it shares its shapes with
        return model if found is None else found.name
    return model


def dataset_builder(job: Job) -> str | None:
    """The builder of `datasets` for the job's local file, None for a hub data set."""
    return LOCAL_FORMATS.get(PurePath(_dataset(job)).suffix.lower())


def dataset_source(job: Job, base_dir: str | None = None) -> str:
    """A hub id, or the absolute path of a local file.

    Raises:
        UsageError: the job names no data set, or a local path in a format that is not read.
    """
    name = _dataset(job)
    if dataset_builder(job) is not None:
        return absolute(name, base_dir)
    if _looks_local(name):
        raise UsageError(
            f"data.dataset {name} is neither a hub id nor a {', '.join(LOCAL_FORMATS)} file; convert it to one of these"
        )
    return name


def evaluation_job(job: Job) -> Job | None:
    """The job with its evaluation data in the place of its training data; None where it does not evaluate.

    Raises:
        UsageError: it would evaluate on what it trains on.
    """
    data = job.data
    if not data.evaluates:
        return None
    moved = job.model_copy(update={"data": data.model_copy(update={"dataset": data.eval_dataset or data.dataset})})
    split = data.eval_split or ("test" if dataset_builder(moved) is None else "train")
    if moved.data.dataset == data.dataset and split == data.split:
        raise UsageError(
            f"data.eval_split {split} is what the run trains on; name another split, or slices such as"
            " train[:90%] and train[90%:]"
        )
    return moved.model_copy(update={"data": moved.data.model_copy(update={"split": split})})


def absolute(path: str, base_dir: str | None = None) -> str:
    """``path`` with ~ and relative parts resolved from ``base_dir``, or from the current folder."""
    start = Path.cwd() if base_dir is None else Path(base_dir)
    # normpath, not resolve: a link stays the name that the user gave.
    return os.path.normpath(start / expanded(path))


def _dataset(job: Job) -> str:
    if not job.data.dataset:
        raise UsageError("the job names no training data; add data: {dataset: a hub id or a .jsonl file}")
    return job.data.dataset


def _looks_local(name: str) -> bool:
    """Written as a path: absolute, ~, ./, ../, or deeper than a hub id's owner/name."""
    return name.startswith(("/", "~", "./", "../")) or name in (".", "..") or name.count("/") > 1
