"""Flags to nested job values."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from launcher.cli import COMMANDS, build_parser
from launcher.errors import UsageError
from launcher.flags import FLAG_FIELDS, count, job_flags, tokens
from planner.job import Job


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4096", 4096),
        ("1_048_576", 1_048_576),
        ("1,048,576", 1_048_576),
        ("128k", 131_072),
        ("128K", 131_072),
        ("1M", 1_048_576),
        (" 8 ", 8),
    ],
)
def test_tokens(text: str, value: int) -> None:
    assert tokens(text) == value


@pytest.mark.parametrize("text", ["", "k", "-1", "1.5", "1e6", "128kk", "1M1", "\u0664", "0x10", "1 000"])
def test_no_tokens(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a number of tokens; write 4096, 128k or 1M"):
        tokens(text)


def test_count() -> None:
    parse = count(1, 1000)
    assert [parse(text) for text in ("1", "1000", " 7 ")] == [1, 1000, 7]
    for text in ("0", "1001", "-1", "1.5", "", "9" * 5000):
        with pytest.raises(argparse.ArgumentTypeError, match="give a whole number from 1 to 1,000, not"):
            parse(text)


def parsed(*words: str) -> tuple[dict[str, Any], dict[str, str]]:
    return job_flags(build_parser().parse_args(["plan", *words]))


def test_nothing_given_is_nothing_merged() -> None:
    assert parsed() == ({}, {})


def test_every_flag_of_a_job_names_a_field_of_it() -> None:
    args = build_parser().parse_args(["plan"])
    for destination, field in FLAG_FIELDS.items():
        assert hasattr(args, destination)
        model: Any = Job
        for part in field.split("."):
            assert part in model.model_fields, field
            model = model.model_fields[part].annotation


def test_flags_become_nested_values_that_know_their_flag() -> None:
    nested, names = parsed(
        "Qwen/Qwen3-8B", "--method", "lora", "--lora-r", "8", "--lora-targets", "q_proj,v_proj", "--seq-len", "2k",
        "--no-packing", "--reserve", "0.1", "--allow", "numerics,method", "--pin", "recompute=full", "--pin", "cp = 2",
        "--stack", "trl=1.16.0,torch=2.13.0", "--stack", "peft=0.18",
    )  # fmt: skip
    assert nested == {
        "model": "Qwen/Qwen3-8B",
        "method": "lora",
        "lora": {"r": 8, "target_modules": "q_proj,v_proj"},
        "seq_len": 2048,
        "data": {"packing": False},
        "reserve": 0.1,
        "allow": ["numerics", "method"],
        "pins": {"recompute": "full", "cp": "2"},
        "stack": {"trl": "1.16.0", "torch": "2.13.0", "peft": "0.18"},
    }
    assert names["lora.r"] == "--lora-r"
    assert names["data.packing"] == "--packing"
    assert names["pins.cp"] == "--pin"
    assert names["stack.peft"] == "--stack"
    assert names["model"] == "MODEL"
    assert Job.model_validate(nested).lora.target_modules == ["q_proj", "v_proj"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", 5),
        ("2.0e-5", 2e-5),
        ("true", True),
        ("null", None),
        ("cosine", "cosine"),
        ("[a, b]", ["a", "b"]),
        ("{x: 1}", {"x": 1}),
        ("a: b: c", "a: b: c"),
        ("", None),
        ("a=b", "a=b"),
    ],
)
def test_trl_values_mean_what_they_mean_in_a_job_file(text: str, value: object) -> None:
    nested, _ = parsed("--trl", f"key={text}")
    assert nested["trl"] == {"key": value}


def test_a_pin_may_be_repeated_but_not_contradicted() -> None:
    assert parsed("--pin", "cp=2", "--pin", "cp=2")[0]["pins"] == {"cp": "2"}
    with pytest.raises(UsageError, match="--pin: cp is given as '2' and as '4'; give it once"):
        parsed("--pin", "cp=2", "--pin", "cp=4")


def test_an_empty_set_of_offloads_is_a_pin() -> None:
    assert parsed("--pin", "offload=")[0]["pins"] == {"offload": ""}


@pytest.mark.parametrize("command", COMMANDS)
def test_one_commands_parser_is_that_part_of_the_whole(command: str) -> None:
    """The parser that a command gets knows what the whole parser knows of it."""

    def flags(parser: argparse.ArgumentParser) -> list[str]:
        (choices,) = [action.choices for action in parser._actions if action.dest == "command"]
        assert isinstance(choices, dict)
        return [" ".join(action.option_strings) or action.dest for action in choices[command]._actions]

    assert flags(build_parser(command)) == flags(build_parser())


def test_flags_are_not_abbreviated() -> None:
    with pytest.raises(UsageError, match="unrecognized arguments: --seq 8"):
        build_parser().parse_args(["plan", "m", "--seq", "8"])


def test_an_endless_word_does_not_make_an_endless_line() -> None:
    with pytest.raises(UsageError) as caught:
        build_parser().parse_args(["plan", "m", "--global-batch", "x" * 100_000])
    assert len(str(caught.value)) < 400
    assert str(caught.value).endswith("...; see `trlfit plan --help`")
