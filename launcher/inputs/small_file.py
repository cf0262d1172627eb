"""Text of a small file that somebody named: never more than a limit is read, whatever the name leads to."""

from __future__ import annotations

from pathlib import Path

from launcher.errors import UsageError
from launcher.inputs.validation_text import shown


def read_text(path: Path, what: str, limit_bytes: int, advice: str = "") -> str:
    """The whole text of a file; of a device or a pipe no more than ``limit_bytes`` and one.

    Args:
        path: what was named.
        what: what it should be, for messages that begin with it.
        limit_bytes: a larger file is another one.
        advice: what to do instead.

    Raises:
        UsageError: missing, unreadable, a folder, too large, or not text.
    """
    named, more = f"{what} {shown(path)}", f"; {advice}" if advice else ""
    try:
        if path.is_dir():
            raise UsageError(f"{named} is a folder; {advice or 'give a file'}")
        with path.open("rb") as file:
            data = file.read(limit_bytes + 1)
        if len(data) > limit_bytes:
            raise UsageError(f"{named} is larger than {limit_bytes // 1024} KiB; {advice or 'is it the right file?'}")
        # Windows editors begin files with a byte-order mark.
        return data.decode("utf-8-sig")
    except FileNotFoundError:
        raise UsageError(f"{named} does not exist{more}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{named} is not a text file{more}") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"{named} cannot be read ({reason})") from None
