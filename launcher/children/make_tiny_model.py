"""Build a small model folder: random weights of a real family and a tokenizer trained on a given text.

Runs in the training Python and prints one JSON document: the folder, its parameter count, the sizes. The folder
holds config.json, model.safetensors, the tokenizer and a chat template, so that every trainer loads it as it
would load a published model.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

END = "<|im_end|>"
PAD = "<|pad|>"
START = "<|im_start|>"

# ChatML, with the markers that let `assistant_only_loss` find what the assistant said.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ message['content'] }}<|im_end|>\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def texts(path: Path) -> Iterator[str]:
    """Every string of the file: the strings inside each JSON line, or the plain lines."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if path.suffix == ".jsonl":
                yield from strings(json.loads(line))
            else:
                yield line


def strings(value: object) -> Iterator[str]:
    """Strings anywhere inside a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)


def train_tokenizer(path: Path, vocab: int):
    """A byte-level BPE tokenizer of at most ``vocab`` entries: no text is unknown to it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(path), trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, clean_up_tokenization_spaces=False
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def build_model(args: argparse.Namespace, tokenizer):
    """The real class of the family with the sizes asked for, weights drawn from the seed."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    config_class, model_class = {
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }[args.family]
    config = config_class(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=args.head_dim or args.hidden // args.heads,
        max_position_embeddings=args.max_positions,
        tie_word_embeddings=not args.untied,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(args.seed)
    return model_class(config).to(getattr(torch, args.dtype))


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write; made when it is missing")
    parser.add_argument("--text", type=Path, required=True, help="text or .jsonl the tokenizer is trained on")
    parser.add_argument("--family", choices=["qwen3", "llama"], default="qwen3")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--intermediate", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, help="hidden / heads when left out")
    parser.add_argument("--vocab", type=int, default=512, help="at least 259: 256 bytes and 3 marks")
    parser.add_argument("--max-positions", type=int, default=512)
    parser.add_argument("--untied", action="store_true", help="an output head of its own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the saved weights")
    args = parser.parse_args(argv)
    if args.vocab < 259:
        parser.error("--vocab must be at least 259: 256 bytes and 3 marks")
    if args.heads % args.kv_heads:
        parser.error("--heads must be a multiple of --kv-heads")
    return args


def main(argv: list[str]) -> int:
    """Build, save, report."""
    args = parse(argv)
    # Libraries may print while they load; stdout is for the one document.
    with contextlib.redirect_stdout(sys.stderr):
        tokenizer = train_tokenizer(args.text, args.vocab)
        model = build_model(args, tokenizer)
        args.out.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(args.out)
        tokenizer.save_pretrained(args.out)
    report = {
        "folder": str(args.out.resolve()),
        "family": args.family,
        "parameters": sum(p.numel() for p in model.parameters()),
        "vocab": args.vocab,
        "tokenizer_vocab": len(tokenizer),
    }
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
