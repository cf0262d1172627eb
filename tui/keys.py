"""One table of keys: it feeds the bindings, the footer, the list that `?` shows, and docs/screens.md."""

from __future__ import annotations

from typing import NamedTuple

from textual.binding import Binding


class Key(NamedTuple):
    """A key, what it does in a word, and in a sentence."""

    key: str
    action: str
    word: str
    says: str
    in_footer: bool = True


EVERYWHERE = (
    Key("1", "mode('goal')", "Goal", "the job: what to train, on what, how long", in_footer=False),
    Key("2", "mode('plans')", "Plans", "what fits, ranked, and why", in_footer=False),
    Key("3", "mode('ledger')", "Ledger", "every byte of the chosen plan", in_footer=False),
    Key("4", "mode('files')", "Files", "what would be written and run", in_footer=False),
    Key("5", "mode('run')", "Run", "the training: memory, progress, log", in_footer=False),
    Key("6", "mode('history')", "History", "runs: predicted against seen", in_footer=False),
    Key("y", "copy", "Copy", "copy the command line that asks the same"),
    Key("u", "undo", "Undo", "take the last edit of the job back", in_footer=False),
    Key("w", "save", "Save", "write the job to a file", in_footer=False),
    Key("r", "replan", "Plan again", "read the machine and the job file again, and plan", in_footer=False),
    Key("ctrl+p", "command_palette", "Palette", "find any of this by its name, and the themes", in_footer=False),
    Key("ctrl+z", "suspend_process", "Suspend", "to the shell; `fg` there comes back", in_footer=False),
    Key("question_mark", "keys", "Keys", "this list"),
    Key("q", "leave", "Quit", "leave; a run goes on"),
)
GOAL = (
    Key("enter", "edit", "Edit", "change the field, or take or leave the card"),
    Key("tab", "app.focus_next", "Next", "to the cards, and back to the form", in_footer=False),
    Key("backspace", "reset", "Default", "back to the file's or the default value"),
    Key("i", "inspect", "Look at data", "read the first rows and count their tokens"),
    Key("P", "plans", "Plan", "to the plans"),
    Key("u", "app.undo", "Undo", "take the last edit of the job back"),
)
PLANS = (
    Key("enter", "ledger", "Ledger", "every byte of the highlighted plan"),
    Key("slash", "filter", "Filter", "show the plans that hold a word"),
    Key("s", "sort", "Sort", "sort by the next column"),
    Key("S", "reverse", "Reverse", "reverse the order", in_footer=False),
    Key("space", "mark", "Compare", "mark a plan; two marked ones are shown side by side"),
    Key("e", "explain", "Why", "every reason, with time, cards and what the host needs", in_footer=False),
    Key("c", "changes", "Changes", "what would fit, or help; Enter sets one", in_footer=False),
    Key("P", "probe", "Probe", "trace or measure for this job, and plan with it", in_footer=False),
    Key("L", "launch", "Launch", "show the files and the command, then start"),
)
LEDGER = (
    Key("enter", "edit", "Edit", "set the cell to another value: bytes per parameter, or GiB"),
    Key("backspace", "reset", "As planned", "the cell back to what the plan says", in_footer=False),
    Key("u", "undo_cell", "Undo", "take the last edit of a cell back"),
    Key("p", "pin", "Pin", "pin a knob of this plan: knob=value"),
    Key("t", "textbook", "Textbook", "the textbook's bytes beside this stack's"),
    Key("L", "launch", "Launch", "show the files and the command, then start"),
)
FILES = (
    Key("d", "diff", "Diff", "against the last run of this model"),
    Key("e", "open", "Editor", "open in $EDITOR"),
    Key("W", "write", "Write", "write the folder, start nothing"),
    Key("L", "launch", "Launch", "show the files and the command, then start"),
)
RUN = (
    Key("f", "follow", "Follow", "keep the end of the log in sight"),
    Key("slash", "find", "Find", "find a word in the log"),
    Key("n", "next", "Next", "the next place where it stands", in_footer=False),
    Key("P", "probe", "Probe", "trace or measure for the job on screen 1, and plan with it"),
    Key("X", "cancel", "Cancel", "end the run, or the probe, and all of its processes"),
    Key("D", "detach", "Detach", "look away; the run goes on"),
)
HISTORY = (
    Key("enter", "open", "Open", "show the run"),
    Key("n", "again", "New from this", "plan the job of this run again"),
    Key("r", "reload", "Reload", "read the history again", in_footer=False),
)
SCREENS = {"goal": GOAL, "plans": PLANS, "ledger": LEDGER, "files": FILES, "run": RUN, "history": HISTORY}
GLOSSARY = (
    ("allocated", "tensors at the peak: torch.cuda.max_memory_allocated"),
    ("saved", "activations kept by the forward pass for the backward pass; recompute keeps a layer's input alone"),
    ("working", "activations of the one layer at work, and of its forward run again where it is recomputed"),
    ("buffers", "weights gathered for a layer, gradients on their way, copies to the host"),
    ("over, host", "what does not fit: more than the card has, or more than the host's memory"),
    ("act, opt, par", "offloaded to the host: activations, optimizer, parameters"),
    ("context, slack", "CUDA's own memory, and what the allocator reserves beyond the tensors"),
    ("fastest first", "by bands of 5 %, which the prediction cannot tell apart; in a band the simpler run first"),
    ("evidence", "formula: closed forms; traced: the real model's code, counted; measured: this card"),
)


def bindings(keys: tuple[Key, ...]) -> list[Binding]:
    """Textual bindings of a table."""
    return [
        Binding(key.key, key.action, key.word, show=key.in_footer, tooltip=key.says, id=f"{key.action}.{key.key}")
        for key in keys
    ]


def shown_key(key: str) -> str:
    """``question_mark`` as it is typed."""
    return {
        "question_mark": "?",
        "slash": "/",
        "enter": "Enter",
        "space": "Space",
        "tab": "Tab",
        "backspace": "Backspace",
        "ctrl+p": "Ctrl+P",
        "ctrl+z": "Ctrl+Z",
    }.get(key, key)
