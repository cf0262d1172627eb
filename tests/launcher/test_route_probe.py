"""`trlfit probe --route` and `trlfit routes`: the evidence, counted by hand where it can be, and words for errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.cli import main
from launcher.errors import ExitCode
from launcher.text.route_probe import probe_text
from tests.launcher.test_launch_command import environment


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A probe of the stand-in, of so few steps that only its shape is looked at."""
    folder = tmp_path_factory.mktemp("probe")
    words = ["probe", "--route", "mxfp4-sr-h32", "--steps", "3", "--seeds", "2", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "tui", *words], cwd=folder, env=environment(folder), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "training with route, seed 1" in done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


@pytest.mark.stack
def test_errors_are_those_of_four_bits_and_a_mean_of_draws_is_nearer(probed: dict[str, Any]) -> None:
    errors = probed["errors"]["mean"]
    # Steps of E2M1 are a sixth to a half of the value: a few percent of the energy, and bf16's are a millionth.
    assert 0.005 < errors["forward"] < 0.06
    assert errors["forward, in bf16"] < 1e-4
    assert errors["input gradient, mean of 4 draws"] < 0.7 * errors["input gradient"]
    assert len(probed["errors"]["layers"]) == 12


@pytest.mark.stack
def test_traffic_is_counted(probed: dict[str, Any]) -> None:
    """Four blocks by hand: inputs 6 x 64 + 192 and outputs 5 x 64 + 2 x 192 wide, each read once a layout."""
    inputs, outputs = 6 * 64 + 192, 5 * 64 + 2 * 192
    traffic = probed["traffic"]
    assert traffic["layers"] == 4 * 7
    assert traffic["read"] == 4 * 2 * 2 * (inputs + outputs)
    assert traffic["maxima"] == 0  # a block of 32 is its own
    # A code of half a byte and a scale of one byte for 32; of a weight for 32 x 32, read once for both layouts.
    assert traffic["written"] == 4 * 2 * (0.5 + 1 / 32) * (inputs + outputs)
    weights = 4 * (4 * 64 * 64 + 3 * 64 * 192)
    assert traffic["weights_read"] == 2 * weights
    assert traffic["weights_written"] == pytest.approx(2 * (0.5 + 1 / 1024) * weights)
    assert probed["times"]["reference_quantising_s"] > 0
    assert probed["times"]["products_bf16_s"] > 0


@pytest.mark.stack
def test_training_is_paired_and_the_report_warns(probed: dict[str, Any]) -> None:
    training = probed["training"]
    assert [row["seed"] for row in training["rows"]] == [0, 1]
    assert training["steps"] == 3
    low, mean, high = training["gap_percent"]
    assert low <= mean <= high
    assert training["verdict"] in ("broken", "worse beyond noise", "not told apart at this length")
    text = probe_text(probed)
    for words in ("a stand-in: no model was named", "do not rank recipes", "1. errors", "2. outside", "3. 3 steps"):
        assert words in text
    assert max(map(len, text.splitlines())) < 180


def test_routes_of_a_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["routes", "--machine", "8xB200", "--stack", "transformer-engine=2.20.2,torchao=0.18.0"]) == ExitCode.DONE
    )
    text = capsys.readouterr().out
    assert "offered on 8xB200: bf16, fp8-te-delayed" in text
    assert "not fp8-te-block: needs compute capability 9.0, the card has 10.0" in text
    assert main(["routes", "--machine", "1xT4", "--json"]) == ExitCode.DONE
    document = json.loads(capsys.readouterr().out)
    assert not any(route["offered"] for route in document["routes"])
    by_id = {route["id"]: route for route in document["routes"]}
    assert by_id["nvfp4-te-last4"]["published"][0]["loss_percent"] == 0.87
    assert by_id["nvfp4-te-last4"]["operands"]["igrad"][0]["stochastic"] is True
    assert "arxiv.org" in by_id["mxfp4-sr"]["source"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--route", "fp5"], "--route: no precision route 'fp5'; known: bf16, fp8-te-delayed"),
        (["--route", "bf16"], "bf16 is what a route is held against"),
        (
            ["Qwen/Qwen3-0.6B", "--measure", "--machine", "cpu", "--pin", "precision=mxfp4-sr:emulated"],
            "--pin precision=mxfp4-sr:emulated: a probe measures bf16; try it with --route",
        ),
        (["--route", "mxfp4-sr", "--seeds", "0"], "give a whole number from 1 to 100"),
        (["--route", "mxfp4-sr", "--python", "/nowhere/python"], "/nowhere/python is not there"),
    ],
)
def test_what_is_wrong_is_said(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["probe", *words]) in (ExitCode.USAGE, ExitCode.ENVIRONMENT)
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1
