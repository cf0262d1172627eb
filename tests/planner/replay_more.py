"""Rows of ``data/traced_more.jsonl`` beside what coefficients composed over depth say of them; nothing is traced here.

Coefficients are those of ``data/coefficients_more.jsonl``: one document a shape with the sets that the rows need.
``benchmarks/whole_models.py`` makes the rows, ``benchmarks/whole_compare.py --trace`` the documents.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

from planner.architecture import Architecture, AttentionKind, LayerKind
from planner.config.reader import read_architecture
from planner.memory.coefficients import Coefficients
from planner.memory.coefficients_json import CoefficientDocument, coefficients_of, shape_hash
from planner.memory.depth import depth_of
from planner.memory.formula import ActivationOptions, formula_coefficients
from planner.memory.model import MemoryModel
from planner.memory.parts import CoefficientSource, MemoryJob
from planner.memory.phases import LayerWalker
from tests.planner.replay import DATA, H100_WITHOUT_RATES, Row, as_traced, choice_of, rows, tensor_bytes

ATTENTION: dict[str, AttentionKind] = {
    "full_attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
    # Convolutions, and state spaces beside attention: a loop over chunks, as linear attention is.
    "conv": "linear",
    "hybrid": "linear",
}
"""``layer_types`` of transformers -> ours."""
DOCUMENTS = DATA / "coefficients_more.jsonl"


@cache
def documents() -> dict[str, CoefficientDocument]:
    """Shape -> what was traced of it."""
    lines = DOCUMENTS.read_text(encoding="utf-8").splitlines()
    found = [CoefficientDocument.from_json(json.loads(line)) for line in lines]
    return {document.shape: document for document in found}


def architecture_of(row: Row) -> Architecture:
    """As the reader reads the row's config; of a family that it refuses, as the row says of the class."""
    name = row["id"].partition("/")[0]
    if "kinds" not in row:
        return read_architecture(row["config"], model=name, origin="config.json")
    config, order = row["config"], tuple(row["order"])
    kinds = tuple(unread_kind(config, kind) for kind in row["kinds"])
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    counted = sum(kinds[index].num_parameters for index in order) + row["embedding_params"]
    counted += 0 if row["tied"] else vocab * hidden
    return Architecture(
        model=name,
        model_type=config["model_type"],
        config=config,
        origin="config.json",
        hidden=hidden,
        vocab=vocab,
        kinds=kinds,
        order=order,
        tied=row["tied"],
        embedding_parameters=row["embedding_params"],
        final_norm_parameters=row["params"] - counted,
    )


def unread_kind(config: dict[str, Any], kind: dict[str, Any]) -> LayerKind:
    """A kind of layer of which only the number of parameters is known, and what decides on a mask."""
    attention = ATTENTION[kind["type"]]
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return LayerKind(
        name=attention,
        attention=attention,
        linears=(),
        norm_parameters=kind["params"],
        head_dim=width,
        value_head_dim=width,
        window={"sliding": config.get("sliding_window"), "chunked": config.get("attention_chunk_size")}.get(attention),
    )


def options_of(row: Row) -> ActivationOptions:
    """The options that the planner asks for."""
    return as_traced(row, model_of(row, formula_coefficients).activation_options(choice_of(row)))


def traced_source(row: Row) -> CoefficientSource:
    """Stored coefficients alone: a set that is missing is an error."""

    def source(architecture: Architecture, options: ActivationOptions) -> Coefficients:
        notes: list[str] = []
        document = documents()[shape_hash(architecture)]
        found = coefficients_of(document, architecture, as_traced(row, options), notes)
        assert found is not None and notes == [], (row["id"], notes)
        return found

    return source


def model_of(row: Row, source: CoefficientSource) -> MemoryModel:
    """The memory model of a row."""
    job = row["job"]
    return MemoryModel(
        job=MemoryJob(
            architecture=architecture_of(row),
            seq_len=job["seq_len"],
            lora_r=job.get("lora", {}).get("r", 16),
            padded=row.get("padded", False),
        ),
        hardware=H100_WITHOUT_RATES,
        reserve=0.05,
        source=source,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One row: predicted beside traced, bytes of tensors."""

    row: Row
    peak_phase: str
    predicted: int
    forward: int
    """Predicted at the highest moment before backward begins."""
    by_formula: int
    parameters: int
    trainable: int

    @property
    def seen(self) -> int:
        """The whole model's peak."""
        return int(self.row["allocated_bytes"])

    @property
    def error(self) -> float:
        """Predicted over traced, less one."""
        return self.predicted / self.seen - 1

    @property
    def error_above_rest(self) -> float:
        """The same error as a share of what the step adds to weights and states, which are counted exactly."""
        return (self.predicted - self.seen) / (self.seen - int(self.row["at_rest_bytes"]))

    @property
    def forward_error(self) -> float:
        """Predicted over traced, less one, before backward begins."""
        return self.forward / int(self.row["forward_peak_bytes"]) - 1


@cache
def compared() -> tuple[Compared, ...]:
    """Every row."""
    return tuple(compare(row) for row in rows("traced_more"))


def compare(row: Row) -> Compared:
    """What the planner says of ``row``."""
    choice, model = choice_of(row), model_of(row, traced_source(row))
    memory, blocks = model.estimate(choice), model.blocks(choice.method)
    closed = model_of(row, lambda architecture, options: formula_coefficients(architecture, as_traced(row, options)))
    return Compared(
        row=row,
        peak_phase=memory.peak_phase,
        predicted=max(tensor_bytes(memory).values()),
        forward=forward_bytes(model, row),
        by_formula=max(tensor_bytes(closed.estimate(choice)).values()),
        parameters=blocks.num_parameters,
        trainable=blocks.total.trainable,
    )


def forward_bytes(model: MemoryModel, row: Row) -> int:
    """The highest moment of the forward: in a layer, or in the loss on top of all that is saved."""
    choice, architecture = choice_of(row), model.job.architecture
    frame = model.frame(choice)
    shard = frame.shard
    depth = depth_of(architecture.order, choice.recompute, False, neighbours=bool(shard.beside))
    walker = LayerWalker(depth, frame.states, frame.shard, tied=architecture.tied, accumulates=False)
    walk = walker.at(model.activations_of(choice)[1], choice.micro_batch)
    in_loss = max(model.loss_of(choice).forward + walker.forward_casts, shard.loss_copy)
    return int(frame.states.rest_bytes + max(walk.forward_bytes, walk.saved + shard.root_loss + in_loss))
