"""Look at the first rows of a data set as a trainer will: format, columns, tokens.

Runs in the training Python. Reads a JSON request on stdin:
    source, builder (json | parquet | csv | null for the hub), split, trainer, model, text_field, seq_len,
    limit_rows, trust_remote_code
and prints one JSON document, or {"error": {"kind", "message"}} with one line for the user.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

MAX_LINE_BYTES = 64 * 2**20
"""A row longer than this is a file in the wrong format, not a row."""
READ_WHOLE_BYTES = 64 * 2**20
"""Files up to this size are read to the end, so that every line is known to be JSON."""
SAMPLE_CHARS = 2000

NEEDS = {
    "sft": "`text`, `messages`, or `prompt` and `completion`",
    "dpo": "`chosen` and `rejected`, with `prompt` or with the prompt inside both",
    "reward": "`chosen` and `rejected`",
    "kto": "`prompt`, `completion` and `label`, or `chosen` and `rejected`",
    "grpo": "`prompt`",
    "rloo": "`prompt`",
}
TEXT_COLUMNS = {
    "text": ("text",),
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt-completion": ("prompt", "completion"),
    "preference": ("prompt", "chosen", "rejected"),
    "implicit-prompt preference": ("chosen", "rejected"),
    "unpaired preference": ("prompt", "completion"),
    "prompt-only": ("prompt",),
    "tokenised": (),
}


class Refused(Exception):
    """One line for the user, and whose fault it is."""

    def __init__(self, message: str, kind: str = "usage") -> None:
        super().__init__(message)
        self.kind = kind


def json_lines(path: Path) -> Iterator[dict]:
    """Rows of a JSON Lines file; blank lines do not count.

    Raises:
        Refused: the line that is no JSON object, by its number.
    """
    with path.open("rb") as lines:
        number = 0
        while line := lines.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                limit = f"{MAX_LINE_BYTES // 2**20} MiB"
                raise Refused(f"{path} line {number} is longer than {limit}; put one row on a line")
            if not line.strip():
                continue
            yield json_row(path, number, line)


def json_row(path: Path, number: int, line: bytes) -> dict:
    """One line as a row."""
    try:
        row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
    except UnicodeDecodeError:
        raise Refused(f"{path} line {number} is not UTF-8 text; is it really JSON Lines?") from None
    except RecursionError:
        raise Refused(f"{path} line {number} is nested too deeply to be a row") from None
    except ValueError as error:
        # The decoder's own words name the column; a line number inside one line would mislead.
        reason = getattr(error, "msg", str(error))
        column = getattr(error, "colno", 1)
        raise Refused(f"{path} is not JSON at line {number}, column {column}: {reason}") from None
    if not isinstance(row, dict):
        kind = type(row).__name__
        raise Refused(f"{path} line {number} is of type {kind}; each line must be an object") from None
    return row


def local_rows(path: Path, builder: str) -> tuple[Iterator[dict], int | None]:
    """Rows of a local file as they are read, and their number where that is cheap to know."""
    check_readable(path)
    small = path.stat().st_size <= READ_WHOLE_BYTES
    if builder == "json":
        head = first_bytes(path)
        if b"\0" in head:
            raise Refused(f"{path} is binary, not JSON; is the name right?")
        if not head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
            return json_lines(path), sum(1 for _ in json_lines(path)) if small else None
        if small:
            rows = json_list(path)
            return iter(rows), len(rows)
    count = parquet_count(path) if builder == "parquet" else None
    from datasets import load_dataset

    try:
        rows = load_dataset(builder, data_files=os.fspath(path), split="train", streaming=True)
        return iter(rows), count
    except Exception as error:  # datasets raises whatever its reader raises
        raise Refused(f"{path} cannot be read as {builder}: {first_line(error)}") from None


def check_readable(path: Path) -> None:
    """Say what is wrong with a path before a reader does in its own words."""
    if not path.exists():
        raise Refused(f"{path} does not exist")
    if path.is_dir():
        raise Refused(f"{path} is a folder; name one .jsonl, .json, .parquet or .csv file in it")
    try:
        with path.open("rb") as file:
            head = file.read(1)
    except PermissionError:
        raise Refused(f"{path} cannot be read: no permission", "environment") from None
    except OSError as error:
        raise Refused(f"{path} cannot be read: {error.strerror}", "environment") from None
    if not head:
        raise Refused(f"{path} is empty")


def first_bytes(path: Path) -> bytes:
    """Enough of a file to see what it is."""
    with path.open("rb") as file:
        return file.read(4096)


def json_list(path: Path) -> list[dict]:
    """Rows of a .json file that is one list of objects."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError:
        raise Refused(f"{path} is not UTF-8 text") from None
    except RecursionError:
        raise Refused(f"{path} is nested too deeply to be rows") from None
    except json.JSONDecodeError as error:
        raise Refused(f"{path} is not JSON at line {error.lineno}, column {error.colno}: {error.msg}") from None
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise Refused(f"{path} item {number} is of type {type(row).__name__}; each must be an object")
    return rows


def parquet_count(path: Path) -> int:
    """Number of rows as the file's footer has it."""
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path).metadata.num_rows
    except Exception as error:  # pyarrow has no common class for a file that is not Parquet
        raise Refused(f"{path} is not Parquet: {first_line(error)}") from None


def hub_rows(source: str, split: str) -> tuple[Iterator[dict], int | None]:
    """Rows of a hub data set: streamed, or from the cache when there is no network."""
    from datasets import load_dataset

    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")
    try:
        if offline:
            cached = load_dataset(source, split=split)
            return iter(cached), len(cached)
        return iter(load_dataset(source, split=split, streaming=True)), None
    except Exception as error:  # many layers below raise many classes
        raise hub_refusal(source, split, error, offline) from None


def hub_refusal(source: str, split: str, error: Exception, offline: bool) -> Refused:
    """The hub's answer in one line."""
    name, text = type(error).__name__, first_line(error)
    if "split" in text.lower():
        return Refused(f"data.split {split} of {source}: {text}")
    if "config" in text.lower() and "missing" in text.lower():
        return Refused(f"{source} has several configurations, which a job cannot name yet: {text}")
    if offline:
        return Refused(f"{source} is not in the cache and HF_HUB_OFFLINE is set", "environment")
    if name in ("DatasetNotFoundError", "RepositoryNotFoundError"):
        hint = "is it spelt right, and are you logged in if it is private?"
        return Refused(f"the hub knows no data set {source}; {hint}")
    if isinstance(error, OSError) or "Connect" in name or "Timeout" in name:
        return Refused(f"cannot reach the hub for {source}: {text}", "environment")
    return Refused(f"{source} cannot be read: {text}")


def first_line(error: Exception) -> str:
    """An error's own words, short."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else f"{text[:197]}..."


def find_format(row: dict, trainer: str, text_field: str) -> str | None:
    """Name of the format that ``trainer`` would take the row for, None when it is none."""
    has = set(row)
    if trainer == "sft":
        if "input_ids" in has:
            return "tokenised"
        if "prompt" in has:
            return "prompt-completion" if "completion" in has else None
        for name in ("messages", "conversations"):
            if name in has:
                return name
        return "text" if text_field in has else None
    if trainer in ("grpo", "rloo"):
        return "prompt-only" if "prompt" in has else None
    if trainer == "kto" and {"prompt", "completion", "label"} <= has:
        return "unpaired preference"
    if {"chosen", "rejected"} <= has:
        return "preference" if "prompt" in has else "implicit-prompt preference"
    return None


def is_messages(value: object) -> bool:
    """A list of turns with a role and a content, or from and value."""
    if not isinstance(value, list) or not value:
        return False
    return all(
        isinstance(turn, dict) and ({"role", "content"} <= set(turn) or {"from", "value"} <= set(turn))
        for turn in value
    )


def check_row(number: int, row: dict, columns: tuple[str, ...], conversational: bool) -> None:
    """Every text column of the row is of the kind that the first row has."""
    for name in columns:
        value = row.get(name)
        good = is_messages(value) if conversational else isinstance(value, str)
        if not good:
            wanted = "a list of {role, content} turns" if conversational else "text"
            found = "missing" if value is None else f"of type {type(value).__name__}"
            raise Refused(f"row {number}: column `{name}` is {found}, where {wanted} is needed")


def check_labels(number: int, row: dict) -> None:
    """KTO's verdicts are booleans."""
    if not isinstance(row.get("label"), bool):
        raise Refused(f"row {number}: column `label` must be true or false, not {row.get('label')!r}")


def load_tokenizer(model: str, trust_remote_code: bool):
    """The model's tokenizer.

    Raises:
        Refused: it is missing or cannot be loaded.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)
    except Exception as error:  # loaders of every family raise their own
        said = first_line(error)
        if "couldn't find them in the cached files" in said:
            said = "it is not in the hub's cache and the hub cannot be reached; fetch it once, or name a local folder"
        raise Refused(f"the tokenizer of {model} cannot be loaded: {said}", "environment") from None


def turns_of(value: list) -> list:
    """ShareGPT turns as role and content; others as they are."""
    roles = {"human": "user", "gpt": "assistant"}
    return [{"role": roles.get(t["from"], t["from"]), "content": t["value"]} if "from" in t else t for t in value]


def rendered(row: dict, columns: tuple[str, ...], conversational: bool, tokenizer, ends: bool) -> list[str]:
    """The sequences that one row becomes, as text: two for a preference, else one."""
    if {"chosen", "rejected"} <= set(columns):
        answers = [("chosen",), ("rejected",)]
        shared = ("prompt",) if "prompt" in columns else ()
        parts = [shared + answer for answer in answers]
    else:
        parts = [columns]
    texts = []
    for names in parts:
        if conversational:
            turns = [turn for name in names for turn in turns_of(row[name])]
            texts.append(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=not ends))
        else:
            text = "".join(row[name] for name in names)
            texts.append(text + (tokenizer.eos_token or "" if ends else ""))
    return texts


def percentile(ordered: list[int], share: float) -> int:
    """Smallest value with at least ``share`` of the values at or below it."""
    return ordered[max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1)]


def check(request: dict) -> dict:
    """The report on a data set.

    Raises:
        Refused: training on it would fail.
    """
    trainer, source = request["trainer"], request["source"]
    if request["builder"]:
        rows, count = local_rows(Path(source), request["builder"])
    else:
        rows, count = hub_rows(source, request["split"])
    sample = read_sample(rows, source, request["limit_rows"])
    first = sample[0]
    kind = find_format(first, trainer, request["text_field"])
    if kind is None:
        found = ", ".join(f"`{name}`" for name in first) or "none"
        needs = NEEDS[trainer]
        if request["text_field"] != "text":
            needs = needs.replace("`text`", f"`{request['text_field']}`")
        raise Refused(f"{source} has the columns {found}; {trainer} needs {needs}")
    columns = (request["text_field"],) if kind == "text" else TEXT_COLUMNS[kind]
    conversational = bool(columns) and isinstance(first.get(columns[0]), list)
    try:
        for number, row in enumerate(sample, 1):
            check_row(number, row, columns, conversational)
            if kind == "unpaired preference":
                check_labels(number, row)
    except Refused as refused:
        raise Refused(f"{source} {refused}", refused.kind) from None
    tokenizer = load_tokenizer(request["model"], request["trust_remote_code"])
    if conversational and not tokenizer.chat_template:
        hint = "train on text, or add trl: {chat_template_path: FOLDER_OR_JINJA_FILE}"
        if not request["chat_template_path"]:
            raise Refused(f"the data is conversational, but the tokenizer has no chat template; {hint}")
        set_template(tokenizer, request["chat_template_path"])
    lengths, text = token_lengths(sample, kind, columns, conversational, tokenizer)
    ordered = sorted(lengths)
    return {
        "source": source,
        "format": kind,
        "conversational": conversational,
        "columns": list(first),
        "num_rows": count,
        "sampled_rows": len(sample),
        "sample_text": text[:SAMPLE_CHARS],
        "lengths": ordered,
        "tokens_p50": percentile(ordered, 0.5),
        "tokens_p95": percentile(ordered, 0.95),
        "tokens_p99": percentile(ordered, 0.99),
        "tokens_max": ordered[-1],
        "num_sequences": len(lengths),
        "over_seq_len": sum(1 for n in lengths if n > request["seq_len"]),
        "has_chat_template": bool(tokenizer.chat_template),
        "vocab": len(tokenizer),
    }


def set_template(tokenizer, path: str) -> None:
    """Take the chat template of a Jinja file or of another tokenizer, as TRL will."""
    if path.endswith((".jinja", ".j2")) and Path(path).is_file():
        tokenizer.chat_template = Path(path).read_text(encoding="utf-8")
    else:
        tokenizer.chat_template = load_tokenizer(path, False).chat_template


def read_sample(rows: Iterator[dict], source: str, limit: int) -> list[dict]:
    """The first rows.

    Raises:
        Refused: there are none, or one cannot be read.
    """
    try:
        sample = [dict(row) for row in islice(rows, limit)]
    except Refused:
        raise
    except Exception as error:  # a streamed reader fails where it stands, with its own classes
        raise Refused(f"{source} cannot be read: {first_line(error)}") from None
    if not sample:
        raise Refused(f"{source} holds no rows")
    return sample


def token_lengths(
    sample: list[dict], kind: str, columns: tuple[str, ...], conversational: bool, tokenizer
) -> tuple[list[int], str]:
    """Tokens of every sequence of the sample, and the first as text."""
    if kind == "tokenised":
        return [len(row["input_ids"]) for row in sample], tokenizer.decode(sample[0]["input_ids"])
    texts: list[str] = []
    for number, row in enumerate(sample, 1):
        try:
            texts += rendered(row, columns, conversational, tokenizer, kind != "prompt-only")
        except Exception as error:  # a template is a program, and raises what it likes
            raise Refused(f"row {number}: the chat template fails: {first_line(error)}") from None
    # Rendered chat already holds the special tokens that a tokenizer would add again.
    encoded = tokenizer(texts, add_special_tokens=not conversational)["input_ids"]
    return [len(ids) for ids in encoded], texts[0]


def main() -> int:
    """Read the request, answer it."""
    from child_guard import read_request

    request = read_request()
    # Libraries print while they load; stdout is for the one document.
    with contextlib.redirect_stdout(sys.stderr):
        try:
            answer = check(request)
        except Refused as refused:
            answer = {"error": {"kind": refused.kind, "message": str(refused)}}
        except ModuleNotFoundError as error:
            message = f"the training Python {sys.executable} has no {error.name}; install it there"
            answer = {"error": {"kind": "environment", "message": message}}
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
