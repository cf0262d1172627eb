"""Where a model's config.json is found: a path, the bundled shapes, the hub's cache, the hub."""

from __future__ import annotations

import http.server
import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from launcher.errors import EnvironmentLacks, UsageError
from launcher.inputs.model_config import hub_cache, resolve_architecture
from tests.launcher.command_line import DEAD_HUB, H100, TINY_CONFIG, assert_refused, child, command_environment

PARAMETERS = 210_240
"""2 x 1000 x 64 for embedding and head, 2 x (4 x 64 x 64 + 3 x 64 x 128 + 2 x 64) for the layers, 64 for the norm."""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("HF_")]:
        monkeypatch.delenv(name)
    for name, value in command_environment(tmp_path / "home").items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def config(folder: Path, **changes: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps({**TINY_CONFIG, **changes}))
    return path


def test_a_folder_and_a_file(place: Path) -> None:
    path = config(place / "m")
    for model, origin in (
        ("m", "folder"),
        ("./m", "folder"),
        (str(place / "m") + "/", "folder"),
        (str(path), "config.json"),
    ):
        found = resolve_architecture(model)
        assert (found.num_parameters, found.origin, found.model) == (PARAMETERS, origin, model)


def test_the_home_folder(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(place))
    config(place / "m")
    assert resolve_architecture("~/m").num_parameters == PARAMETERS


@pytest.mark.parametrize("model", ["Qwen/Qwen3-8B", "qwen/qwen3-8b", "unsloth/Qwen3-8B"])
def test_bundled_models_need_nothing(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", DEAD_HUB)
    found = resolve_architecture(model)
    assert (found.model, found.origin, found.num_parameters) == ("Qwen/Qwen3-8B", "bundled", 8_190_735_360)


def test_a_folder_of_that_name_comes_before_the_bundled_shapes(place: Path) -> None:
    config(place / "Qwen" / "Qwen3-8B")
    assert resolve_architecture("Qwen/Qwen3-8B").origin == "folder"


def test_a_byte_order_mark(place: Path) -> None:
    path = config(place / "m")
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert resolve_architecture("m").num_parameters == PARAMETERS


def cached(root: Path, revision: str, *, main: str | None = None, **changes: object) -> None:
    repository = root / "models--nobody--cached"
    config(repository / "snapshots" / revision, **changes)
    if main is not None:
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / "main").write_text(main + "\n")


def test_the_hubs_cache_is_asked_before_the_hub() -> None:
    cached(hub_cache(), "aaa", main="aaa")
    found = resolve_architecture("nobody/cached")
    assert (found.origin, found.num_parameters) == ("hub cache", PARAMETERS)


def test_main_comes_before_newer_snapshots() -> None:
    cached(hub_cache(), "aaa", main="aaa")
    cached(hub_cache(), "bbb", num_hidden_layers=4)
    assert resolve_architecture("nobody/cached").num_layers == 2


def test_without_main_the_newest_snapshot(tmp_path: Path) -> None:
    cached(hub_cache(), "aaa")
    cached(hub_cache(), "bbb", num_hidden_layers=4)
    folder = hub_cache() / "models--nobody--cached" / "snapshots"
    os.utime(folder / "aaa", (1, 1))
    assert resolve_architecture("nobody/cached").num_layers == 4


def test_a_cache_with_weights_alone_is_no_answer() -> None:
    (hub_cache() / "models--nobody--cached" / "snapshots" / "aaa").mkdir(parents=True)
    with pytest.raises(EnvironmentLacks, match="not in the hub cache, and HF_HUB_OFFLINE is set"):
        resolve_architecture("nobody/cached")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"HF_HUB_CACHE": "/a"}, "/a"),
        ({"HUGGINGFACE_HUB_CACHE": "/b"}, "/b"),
        ({"HF_HOME": "/c"}, "/c/hub"),
        ({"XDG_CACHE_HOME": "/d"}, "/d/huggingface/hub"),
        ({"HOME": "/e"}, "/e/.cache/huggingface/hub"),
        ({"HF_HUB_CACHE": "/a", "HF_HOME": "/c"}, "/a"),
    ],
    ids=str,
)
def test_the_cache_is_where_the_hub_client_keeps_it(
    variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert hub_cache() == Path(expected)


@contextmanager
def hub(status: int, headers: dict[str, str] | None = None) -> Iterator[str]:
    """A hub that answers everything alike: with the tiny config, or with an error."""
    body = json.dumps(TINY_CONFIG).encode() if status == 200 else b""
    sent = {"ETag": '"abc"', "X-Repo-Commit": "0" * 40, "Content-Length": str(len(body)), **(headers or {})}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(status)
            for name, value in sent.items():
                self.send_header(name, value)
            self.end_headers()

        def do_GET(self) -> None:
            self.do_HEAD()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def online(tmp_path: Path, endpoint: str) -> dict[str, str]:
    return command_environment(tmp_path / "home", HF_ENDPOINT=endpoint, HF_HUB_OFFLINE="0")


def test_the_hub_is_asked_last_and_its_answer_is_kept(tmp_path: Path, place: Path) -> None:
    words = ["plan", "nobody/nothing", "--no-trace", *H100]
    with hub(200) as endpoint:
        first = child([*words, "--json"], cwd=place, env=online(tmp_path, endpoint))
    assert (first.code, first.err) == (0, ""), "no progress bar, no log"
    assert json.loads(first.out)["architecture"]["origin"] == "hub"
    assert json.loads(first.out)["architecture"]["parameters"]["total"] == PARAMETERS
    again = child([*words, "--json"], cwd=place, env=online(tmp_path, DEAD_HUB))
    assert json.loads(again.out)["architecture"]["origin"] == "hub cache"


@pytest.mark.parametrize(
    ("status", "headers", "code", "says"),
    [
        (401, {"X-Error-Code": "RepoNotFound"}, 2, "is not on the hub, or private without a login"),
        (404, {"X-Error-Code": "RepoNotFound"}, 2, "is not on the hub, or private without a login"),
        (404, {"X-Error-Code": "EntryNotFound"}, 2, "has no config.json on the hub; give a transformers model"),
        (403, {"X-Error-Code": "GatedRepo"}, 4, "is gated: accept its licence on the hub, then run `hf auth login`"),
        (500, {}, 4, "the hub answered with an error (500); try again later"),
        (429, {}, 4, "the hub answered with an error (429); try again later"),
    ],
)
def test_what_the_hub_refuses(
    status: int, headers: dict[str, str], code: int, says: str, tmp_path: Path, place: Path
) -> None:
    with hub(status, headers) as endpoint:
        said = child(["plan", "nobody/nothing", *H100], cwd=place, env=online(tmp_path, endpoint), timeout_s=30)
    assert_refused(said, code, "model 'nobody/nothing'", says)


def test_no_network(tmp_path: Path, place: Path) -> None:
    said = child(["plan", "nobody/nothing", *H100], cwd=place, env=online(tmp_path, DEAD_HUB), timeout_s=20)
    assert_refused(said, 4, "model 'nobody/nothing' is not bundled and the hub cannot be reached (ConnectError)")


def test_no_hub_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(EnvironmentLacks, match="is not bundled; to ask the hub: pip install huggingface_hub"):
        resolve_architecture("nobody/nothing")


@pytest.mark.parametrize("model", ["a/b/c", "no such", "-m", "a" * 200, "a/", "a b/c"])
def test_what_no_hub_id_looks_like(model: str) -> None:
    with pytest.raises(UsageError):
        resolve_architecture(model)
