"""Training data, looked at before a launch: does the trainer take it, and how long are its sequences?"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from launcher.errors import UsageError
from launcher.run_text.run_spec import dataset_builder, dataset_source
from launcher.writing.child_script import run_child
from planner.job import Job

CHECK_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DataReport:
    """What the first rows of a data set are."""

    source: str
    format: str
    """``text``, ``messages``, ``prompt-completion``, ``preference``, ... in TRL's words."""
    conversational: bool
    columns: tuple[str, ...]
    num_rows: int | None
    """None where counting would mean reading everything."""
    sampled_rows: int
    sample_text: str
    """The first sequence as the model will see it, cut after 2,000 characters."""
    num_sequences: int
    """Sequences in the sample: two for each preference, else one for each row."""
    lengths: tuple[int, ...]
    """Tokens of every sequence of the sample, shortest first."""
    tokens_p50: int
    tokens_p95: int
    tokens_p99: int
    tokens_max: int
    over_seq_len: int
    """Sequences of the sample that are longer than seq_len and will be cut."""
    has_chat_template: bool
    vocab: int

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences that a user should read before the run."""
        if not self.over_seq_len:
            return ()
        share = self.over_seq_len / self.num_sequences
        return (
            f"{self.over_seq_len} of {self.num_sequences} sampled sequences ({share:.0%}) are longer "
            f"than seq_len and will be cut; the longest has {self.tokens_max:,} tokens",
        )

    def to_json(self) -> dict[str, object]:
        """Plain JSON."""
        return {**asdict(self), "columns": list(self.columns), "lengths": list(self.lengths), "notes": list(self.notes)}


def check_data(
    job: Job,
    *,
    python: str | None,
    model_source: str,
    limit_rows: int = 200,
    base_dir: str | None = None,
) -> DataReport:
    """Read the first rows in the training Python, as the trainer will.

    Args:
        job: whose data, trainer and length are checked.
        python: the training Python; None is the one running.
        model_source: hub id or folder that the tokenizer is loaded from.
        limit_rows: how many rows are looked at.
        base_dir: folder that a relative path starts from; None is the current one.

    Raises:
        UsageError: the data is missing, malformed, or not what the trainer takes.
        EnvironmentLacks: it cannot be read or reached, or the tokenizer cannot be loaded.
    """
    if limit_rows < 1:
        raise UsageError("at least one row must be looked at")
    text_field = job.trl.get("dataset_text_field", "text")
    template = job.trl.get("chat_template_path")
    answer = run_child(
        "check_data.py",
        {
            "source": dataset_source(job, base_dir),
            "builder": dataset_builder(job),
            "split": job.data.split,
            "trainer": job.trainer,
            "model": model_source,
            "text_field": str(text_field),
            "chat_template_path": None if template is None else str(template),
            "seq_len": job.seq_len,
            "limit_rows": limit_rows,
            "trust_remote_code": bool(job.trl.get("trust_remote_code")),
        },
        python=python,
        timeout_s=CHECK_TIMEOUT_S,
    )
    columns, lengths = tuple(answer.pop("columns")), tuple(answer.pop("lengths"))
    return DataReport(columns=columns, lengths=lengths, **answer)
