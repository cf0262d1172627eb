import errno
import os
from pathlib import Path

import pytest

from launcher import files
from launcher.files import folder_to_keep_in, replace_file, write_run_file


def test_a_replaced_file_keeps_its_permissions_and_a_new_one_takes_the_umask(tmp_path: Path) -> None:
    private, script = tmp_path / "job.yaml", tmp_path / "command.sh"
    private.write_text("old")
    private.chmod(0o600)
    replace_file(private, "new")
    assert (private.read_text(), private.stat().st_mode & 0o777) == ("new", 0o600)
    before = os.umask(0o027)
    try:
        replace_file(tmp_path / "fresh", "text")
        write_run_file(script, "echo \udcff")
    finally:
        os.umask(before)
    assert (tmp_path / "fresh").stat().st_mode & 0o777 == 0o640
    assert script.stat().st_mode & 0o777 == 0o750
    assert script.read_bytes() == b"echo \xff"


def test_a_name_as_long_as_names_may_be_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / ("\U0001f600" * 63 + "end")
    assert len(os.fsencode(path.name)) == 255
    replace_file(path, "text")
    assert [found.name for found in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_whatever_stops_a_writer_the_old_file_stands(
    failure: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise failure

    path = tmp_path / "kept.json"
    path.write_text("old")
    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises(type(failure)):
        replace_file(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_what_killed_writers_left_is_swept_and_what_is_being_written_stays(tmp_path: Path) -> None:
    left, going_on = files.beside(tmp_path / "a.json"), files.beside(tmp_path / "a.json")
    for path in (left, going_on):
        path.write_text("half")
    os.utime(left, (0, 0))
    assert folder_to_keep_in(tmp_path) == tmp_path
    assert list(tmp_path.iterdir()) == [going_on]
