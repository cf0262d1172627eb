"""TRL's trainer of a job with a model of random weights: its rows, its tokenizer, the reference it would load.

Rows of SFT are tokenised already. The other trainers tokenise what they get, and do so here: words of a vocabulary in
which each is one token, so that a row has exactly the tokens it was drawn with.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast

FIRST_WORD = 2
"""Below it are the tokens that pad and that end a row."""
MOST_WORDS = 1000
"""Different words of a row: which they are changes neither bytes nor work."""


def config_class(request: dict):
    """The class of the trainer's settings."""
    return getattr(trl, f"{request['trainer']}Config")


def trainer_class(request: dict):
    """The trainer."""
    return getattr(trl, f"{request['trainer']}Trainer")


def from_config(request: dict, config):
    """The class that the trainer would load, with random weights."""
    kind = AutoModelForCausalLM
    if request["trainer"] == "Reward":
        # As its trainer asks for it: one score a row.
        kind, config.num_labels = AutoModelForSequenceClassification, 1
    return kind.from_config(config, dtype=getattr(torch, request["dtype"]), attn_implementation=request["attention"])


def rows(request: dict, sequence: int, vocab: int, count: int) -> Dataset:
    """So many examples, of which every micro-batch reaches ``sequence`` tokens; ragged ones make it carry a mask."""
    draw, name = random.Random(0), request["trainer"]
    if name == "SFT":
        return Dataset.from_dict({"input_ids": _of_sft(request, sequence, vocab, count, draw)})
    last = min(vocab, MOST_WORDS) - 1

    def words(number: int) -> str:
        return "".join(f" {draw.randint(FIRST_WORD, last)}" for _ in range(number))

    # One word asks and all others answer, for a trainer scores those alone; the token that ends a row is one of them.
    longest, shorter = sequence - 2, sequence - 2 - request["ragged"]
    prompts = [f"{FIRST_WORD}"] * count
    if name == "KTO":
        answers = [words(shorter if index % request["rows"] else longest) for index in range(count)]
        return Dataset.from_dict(
            {"prompt": prompts, "completion": answers, "label": [index % 2 == 0 for index in range(count)]}
        )
    chosen, rejected = ([words(number) for _ in range(count)] for number in (longest, shorter))
    return Dataset.from_dict({"prompt": prompts, "chosen": chosen, "rejected": rejected})


def _of_sft(request: dict, sequence: int, vocab: int, count: int, draw: random.Random) -> list[list[int]]:
    parts = 4 if request["packing"] else 1
    lengths: list[int] = []
    for index in range(count):
        short = 1 if request["ragged"] and index % request["rows"] else 0
        lengths += [(sequence - short) // parts] * parts
    return [[draw.randrange(vocab) for _ in range(number)] for number in lengths]


def tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """A number is its own token; the trainer also wants to know how to pad and how a row ends."""
    words = {"<pad>": 0, "<eos>": 1} | {str(number): number for number in range(FIRST_WORD, min(vocab, MOST_WORDS))}
    plain = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>")


@contextmanager
def references(request: dict, build: Callable[[], object]) -> Iterator[None]:
    """Meanwhile the trainer gets its reference, which it loads by the policy's path, from ``build``.

    The policy was never saved. Whether there is a reference at all stays the trainer's own affair. Releases that copy
    the policy load nothing.
    """
    module = sys.modules[trainer_class(request).__module__]
    loads = getattr(module, "create_model_from_path", None)
    if loads is None:
        yield
        return
    module.create_model_from_path = lambda *_args, **_kwargs: build()
    try:
        yield
    finally:
        module.create_model_from_path = loads
