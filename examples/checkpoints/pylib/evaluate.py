# SPDX-License-Identifier: Apache-2.0
"""Print bits per byte of a checkpoint and of trivial baselines on text it was not trained on.

    python examples/checkpoints/pylib/evaluate.py examples/checkpoints/pylib-3m            # the held-out library files
    python examples/checkpoints/pylib/evaluate.py examples/checkpoints/pylib-3m --text examples/checkpoints/pylib-3m/heldout.txt

The model predicts every token of a text, the first from the end-of-text token; a token sees at least half a context of tokens
before it, as far as there are any.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from baselines import MAX_ORDER, fit_ngram, gzip_bits, ngram_bits, xz_bits
from corpus import read_library
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM


def bits_per_byte(model: LlamaForCausalLM, tokenizer: Tokenizer, texts: list[str], context: int) -> float:
    """Mean bits per UTF-8 byte of `texts`; the model reads windows of at most `context` tokens."""
    bits = sum(_text_bits(model, tokenizer, text, context) for text in texts)
    return bits / sum(len(text.encode()) for text in texts)


@torch.inference_mode()
def _text_bits(model: LlamaForCausalLM, tokenizer: Tokenizer, text: str, context: int) -> float:
    ids = torch.tensor([model.config.bos_token_id, *tokenizer.encode(text).ids])
    nats, scored = 0.0, 1  # tokens before `scored` are paid for; the first is given
    while scored < len(ids):
        start = max(0, scored - context // 2 - 1)
        window = ids[start : start + context + 1]
        logits = model(input_ids=window[None, :-1], use_cache=False).logits[0].float()
        fresh = scored - start - 1  # windows overlap by half; only what is new counts
        nats += F.cross_entropy(logits[fresh:], window[1 + fresh :], reduction="sum").item()
        scored = start + len(window)
    return nats / math.log(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument(
        "--text", type=Path, help="a file to evaluate on, instead of the held-out library files"
    )
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    training, held_out = read_library()
    texts = [args.text.read_bytes().decode()] if args.text else list(held_out.values())
    seen, wanted = [t.encode() for t in training.values()], [t.encode() for t in texts]
    joined = b"".join(wanted)
    print(f"{len(texts)} texts, {len(joined)} bytes; bits per byte:")

    _print_row("gzip -9", gzip_bits(joined))
    _print_row("xz -9e", xz_bits(joined))
    _print_row("xz -9e, after the training text", xz_bits(joined, b"".join(seen)))
    levels = fit_ngram(seen, MAX_ORDER)
    for order in range(1, MAX_ORDER + 1):
        _print_row(f"byte {order}-gram, Witten-Bell", ngram_bits(levels[:order], wanted))

    tokenizer = Tokenizer.from_file(str(args.checkpoint / "tokenizer.json"))
    model = LlamaForCausalLM.from_pretrained(args.checkpoint, dtype=torch.float32).eval()
    bits = bits_per_byte(model, tokenizer, texts, model.config.max_position_embeddings)
    _print_row(args.checkpoint.name, bits)


def _print_row(name: str, bits: float) -> None:
    print(f"  {name:38} {bits:.3f}", flush=True)


if __name__ == "__main__":
    main()
