"""validation.md: how to find out whether a precision route is worth its price on this model, as one whole recipe."""

from __future__ import annotations

from launcher.run_text.run_spec import RunSpec
from planner.precision.routes import Asked
from profiles.routes import Published, spelled_out

VALIDATION_FILE = "validation.md"


def validation_plan(spec: RunSpec, asked: Asked) -> str:
    """The text of validation.md."""
    route, evaluates = asked.route, spec.job.data.evaluates
    emulated = " (emulated: numerics only, speed says nothing)" if asked.emulated else ""
    held_out = (
        "`metrics.jsonl` has rows `evaluation`: compare the last of both runs."
        if evaluates
        else "This job has no evaluation data. Add `data: {eval_dataset: ..., eval_split: ...}` to both jobs, on text"
        " that neither trains on."
    )
    speed = (
        "Not here: the reference layer is slower than bf16 whatever the route."
        if asked.emulated
        else "`metrics.jsonl`, rows `step`: the median of `tokens_per_s` after 20 steps of both runs, on the\n"
        "same cards, micro-batch and recompute. Then the share outside the products: torch.profiler's self time of\n"
        "casts, maxima and copies against that of matmuls. A fast product in a slow step is no gain."
    )
    return f"""# Validating {route.id}{emulated}

{route.name}. Published price: {route.loss}.

It is judged whole: rounding, transform, scales and the layers kept in bf16 belong together, and no part of it may be
exchanged without starting again. A twin in bf16 is needed, which differs in nothing else:

    trlfit write job.yaml --pin precision=bf16 -o ../{route.id}-twin

(the same data, order, seed, learning rate, batch and steps).

## 1. Throughput

{speed}

## 2. Held-out loss

{held_out}
Repeat both with at least three seeds (`--trl seed=1`, ...): a gap is one when it is larger than the spread of bf16
between its seeds. Look at the gap along the training too: the published gaps grow with tokens, and an early cut ranked
routes in another order (rank correlation with the end -0.11 after 5 % of the tokens).

## 3. Downstream tasks

On the saved `model/` of both runs, in bf16, for example with lm-evaluation-harness:

    lm_eval --model hf --model_args pretrained=model,dtype=bfloat16 --tasks mmlu,hellaswag,winogrande,arc_challenge

and the tasks that the model is trained for. Rankings change from check to check, so one that is left out was not
passed.

## Accept when

- tokens/s are higher by more than what the longer training that its loss asks for would cost, (1 + gain) / (1 + extra),
- the held-out gap is inside what the work allows, in every seed,
- no task falls by more than its own standard error times two,
- no step was not finite (`loss` is null in `metrics.jsonl`).

## What others saw

{_published(route.published)}

Source: {spelled_out(route.source)}
"""


def _published(rows: tuple[Published, ...]) -> str:
    if not rows:
        return "Nothing is published for this route."
    lines = ["| run | tokens/s per GPU | loss | tasks | to hold against it |", "| --- | --- | --- | --- | --- |"]
    for row in rows:
        speed = f"{row.tokens_per_s:,.0f}" if row.tokens_per_s is not None else f"{row.speedup} x bf16"
        loss = f"{row.loss_percent:+.2f} %" if row.loss_percent is not None else "not given"
        tasks = ", ".join(f"{name} {value}" for name, value in row.tasks.items()) or "not given"
        lines.append(f"| {row.model}, {row.gpu} | {speed} | {loss} | {tasks} | {row.caveat} |")
    return "\n".join(lines)
