from pathlib import Path

import pytest

from launcher import child_process
from launcher.child_process import Answer, run_script
from launcher.errors import EnvironmentLacks, UsageError

LONG = {"text": "x" * 2**20}
"""More than a pipe holds."""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(child_process, "CHILDREN", tmp_path)
    return tmp_path / "child.py"


def answer(**more: object) -> Answer:
    return run_script("child.py", python=None, limit_s=60, **more)  # type: ignore[arg-type]


def test_a_request_that_no_pipe_holds_arrives_whole(script: Path) -> None:
    script.write_text(
        "import json, sys\nprint(json.dumps({'length': len(json.loads(sys.stdin.readline())['text'])}))\n"
    )
    assert answer(request=LONG).document() == {"length": 2**20}


def test_a_child_need_not_read_its_request(script: Path) -> None:
    script.write_text("print('{\"a\": 1}')\n")
    assert answer(request=LONG).document() == {"a": 1}


def test_a_child_that_closes_its_pipes_ends_by_itself(script: Path) -> None:
    script.write_text("import os, time\nos.close(1)\nos.close(2)\ntime.sleep(0.3)\nos._exit(3)\n")
    assert answer().code == 3


def test_what_is_heard_is_not_said(script: Path) -> None:
    script.write_text(
        "import sys\nfor line in ('step 1', 'a word', 'step 2', '', 'end without a newline'):\n"
        "    sys.stderr.write(line + ('' if line.startswith('end') else '\\n'))\n"
    )
    heard: list[bytes] = []

    def hear(line: bytes) -> bool:
        heard.append(line)
        return line.startswith(b"step")

    found = answer(heard=hear)
    assert heard == [b"step 1", b"a word", b"step 2", b"", b"end without a newline"]
    assert found.said == ("a word", "", "end without a newline")
    assert found.last_words == "end without a newline" and found.document() is None


def test_scripts_import_each_other_whatever_the_user_forbids(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    (script.parent / "neighbour.py").write_text("X = 7\n")
    script.write_text("from neighbour import X\nprint('{\"x\": %d}' % X)\n")
    assert answer().document() == {"x": 7}


@pytest.mark.parametrize(
    ("kind", "error"), [("usage", UsageError), ("environment", EnvironmentLacks), ("new", EnvironmentLacks)]
)
def test_a_child_says_whose_fault_it_is(kind: str, error: type[Exception], script: Path) -> None:
    script.write_text(f'print(\'loading\')\nprint(\'{{"error": {{"kind": "{kind}", "message": "row 3"}}}}\')\n')
    found = answer()
    with pytest.raises(error, match=r"^row 3$"):
        found.document()
