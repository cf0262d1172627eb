"""`trlfit gpus`, `models`, `cards`, `stacks`, `doctor` and `schema`: what is here and what is known."""

from __future__ import annotations

import argparse
from typing import Any

from launcher.doctor import Check, checkup
from launcher.errors import ExitCode
from launcher.inputs.machines import resolve_machine
from launcher.inputs.stack import resolve_stack
from launcher.output import print_json, print_text, table
from launcher.text.plan import machine_words
from launcher.text.wrapping import wrapped
from planner.architecture import Architecture
from planner.config.reader import read_architecture
from planner.machine import Card
from planner.units import format_count, format_gib
from profiles.cards import load_cards
from profiles.models import list_models
from profiles.releases import known_trl_releases

STATE = len("optional")


def run_gpus(args: argparse.Namespace) -> int:
    """Inventory of this machine; the JSON is what `--machine FILE` reads."""
    machine = resolve_machine("local")
    if args.json:
        print_json(machine.model_dump(mode="json", by_alias=True))
        return ExitCode.DONE
    rows = [_card_row(card) for card in machine.cards]
    lines = [machine_words(machine.model_dump(mode="json", by_alias=True))]
    if machine.driver_version:
        lines[0] += f"; driver {machine.driver_version}, CUDA {machine.cuda_version or 'not known'}"
    if rows:
        lines.append(
            table(
                (
                    "#",
                    "card",
                    "used/total GiB",
                    "util",
                    "temp",
                    "power",
                    "PCIe",
                    "MIG",
                    "other processes",
                ),
                rows,
                right=(0, 2),
            )
        )
    lines += [f"card {card.index}: {card.problem}" for card in machine.cards if card.problem]
    lines += [f"card {card.index}, {field}: {why}" for card in machine.cards for field, why in card.unknown.items()]
    lines += machine.notes
    print_text("\n".join(lines))
    return ExitCode.DONE


def _card_row(card: Card) -> list[str]:
    def known(value: Any, unit: str = "") -> str:
        return f"{value:g}{unit}" if value is not None else "?"

    power = f"{known(card.power_w)}/{known(card.power_limit_w, ' W')}"
    pcie = f"{known(card.pcie_generation)} x{known(card.pcie_width)}"
    processes = [
        f"pid {p.pid} {p.name or '?'} ({p.user or '?'}) "
        + (format_gib(p.memory_bytes) if p.memory_bytes is not None else "?")
        for p in card.processes
    ]
    return [
        str(card.index),
        card.name,
        f"{format_gib(card.used_bytes)}/{format_gib(card.total_bytes)}",
        known(card.utilisation_percent, "%"),
        known(card.temperature_c, "C"),
        power,
        pcie,
        card.mig_mode or "?",
        "; ".join(processes) or "none",
    ]


def run_models(args: argparse.Namespace) -> int:
    """Bundled shapes, with their exact parameter counts."""
    read = [(m, read_architecture(m.config, model=m.id, origin="bundled")) for m in list_models()]
    if args.json:
        print_json([_model_json(m.id, list(m.aliases), m.source, a) for m, a in read])
        return ExitCode.DONE
    rows = [
        [
            m.id,
            a.model_type,
            format_count(a.num_parameters),
            format_count(a.active_parameters) if a.is_moe else "-",
            str(a.num_layers),
            f"{a.max_positions:,}",
            ", ".join(k.name for k in a.kinds),
        ]
        for m, a in read
    ]
    print_text(
        table(
            ("model", "type", "parameters", "active", "layers", "positions", "layer kinds"),
            rows,
            right=(2, 3, 4, 5),
        )
    )
    return ExitCode.DONE


def _model_json(model_id: str, aliases: list[str], source: str, a: Architecture) -> dict[str, Any]:
    return {
        "id": model_id,
        "aliases": aliases,
        "source": source,
        "model_type": a.model_type,
        "parameters": a.num_parameters,
        "active_parameters": a.active_parameters,
        "layers": a.num_layers,
        "max_positions": a.max_positions,
    }


def run_cards(args: argparse.Namespace) -> int:
    """The card table, every figure with its source."""
    cards = load_cards()
    if args.json:
        print_json([{name: getattr(card, name) for name in card.__slots__} for card in cards])
        return ExitCode.DONE

    def rate(value: float | None) -> str:
        return f"{value:g}" if value is not None else "-"

    rows = [
        [
            c.id,
            c.product_name,
            c.compute_capability,
            format_gib(c.nvml_bytes),
            rate(c.bf16_tflops),
            rate(c.fp8_tflops),
            rate(c.hbm_gb_s),
            rate(c.nvlink_total_gb_s),
            rate(c.host_link_gb_s),
            rate(c.tdp_w),
        ]
        for c in cards
    ]
    headers = (
        "id",
        "product",
        "cc",
        "GiB",
        "bf16 TFLOP/s",
        "fp8",
        "GB/s",
        "NVLink GB/s",
        "host GB/s",
        "W",
    )
    print_text(table(headers, rows, right=range(2, 10)))
    return ExitCode.DONE


def run_stacks(args: argparse.Namespace) -> int:
    """What each TRL release really runs, and the stack of the training Python."""
    stack = resolve_stack({}, args.python, assume_optional=False)
    releases = known_trl_releases()
    if args.json:
        print_json(
            {
                "here": stack.model_dump(mode="json"),
                "trl": [
                    {
                        "since": r.since,
                        "checked": r.checked,
                        "loss_paths": list(r.loss_paths),
                        "default": r.default_loss_path,
                        "load_dtype_default": r.load_dtype_default,
                        "notes": list(r.notes),
                        "source": r.source,
                    }
                    for r in releases
                ],
            }
        )
        return ExitCode.DONE
    rows = [[r.since, r.default_loss_path, ", ".join(r.loss_paths), r.load_dtype_default] for r in releases]
    here = ", ".join(f"{n} {v} ({stack.origin.get(n, '?')})" for n, v in stack.versions.items())
    print_text(f"here: {here}\n\n" + table(("TRL since", "default loss", "loss paths", "loads as"), rows))
    return ExitCode.DONE


def run_doctor(args: argparse.Namespace) -> int:
    """What is missing for what, and the command that fixes it."""
    checks = checkup(args.python)
    if args.json:
        print_json([check.to_json() for check in checks])
    else:
        print_text("\n".join(line for check in checks for line in _check_lines(check)))
    return ExitCode.ENVIRONMENT if any(check.state == "missing" for check in checks) else ExitCode.DONE


def _check_lines(check: Check) -> list[str]:
    """``ok  torch >= 2.6 for training: 2.13.0``, and below it what mends it."""
    below = " " * (STATE + 2)
    lines = wrapped(f"{check.what}: {check.found}", f"{check.state:<{STATE}}  ", below)
    # A command is pasted, so it is not wrapped.
    return [*lines, f"{below}fix: {check.fix}"] if check.fix else lines


def run_schema(args: argparse.Namespace) -> int:
    """JSON Schema of a document."""
    if args.document == "job":
        from planner.job import Job

        print_json(Job.model_json_schema())
    else:
        from planner.plan import Plan

        print_json(Plan.model_json_schema(by_alias=True))
    return ExitCode.DONE
