# SPDX-License-Identifier: Apache-2.0
"""Train a Llama of three million parameters on the standard library and save it as a Hugging Face folder.

    python examples/checkpoints/pylib/train.py OUT --minutes 45 --threads 2

The clock sets the learning rate: it warms up and then falls along a cosine to zero at the end of `--minutes`, so a run always
ends in time and always ends annealed. Seed and order of the data are fixed; the number of steps, and so the exact weights,
depends on the machine's speed. `OUT/state.pt` is rewritten every two minutes; the same command goes on from there.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from corpus import END_OF_TEXT, VOCAB_SIZE, read_library, train_tokenizer
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

SEED = 0
CONTEXT = 512
BATCH = 4  # windows per step; small, because the number of tokens is what the clock limits
PEAK_RATE = 2e-3
WARMUP = 0.03  # share of the time
SAVE_EVERY_S = 120.0

CONFIG = LlamaConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=CONTEXT,
    tie_word_embeddings=True,
    bos_token_id=0,
    eos_token_id=0,
)

# Written here, not by save_pretrained, whose class name only transformers 5 knows.
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": END_OF_TEXT,
    "eos_token": END_OF_TEXT,
    "clean_up_tokenization_spaces": False,
    "model_max_length": CONTEXT,
}


def rate_at(progress: float) -> float:
    """Learning rate when `progress` (0 to 1) of the time is spent."""
    warm = min(1.0, progress / WARMUP)
    return PEAK_RATE * warm * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


def batch_at(tokens: torch.Tensor, step: int) -> torch.Tensor:
    """The windows of one step, [BATCH, CONTEXT + 1]; each epoch cuts the text at other places, in another order."""
    steps_per_epoch = (len(tokens) - 2 * CONTEXT) // (BATCH * CONTEXT)
    epoch, index = divmod(step, steps_per_epoch)
    generator = torch.Generator().manual_seed(SEED + epoch)
    shift = torch.randint(CONTEXT, (), generator=generator)
    order = torch.randperm(steps_per_epoch * BATCH, generator=generator)
    starts = shift + order[index * BATCH : (index + 1) * BATCH] * CONTEXT
    return tokens[starts[:, None] + torch.arange(CONTEXT + 1)]


def make_optimizer(model: LlamaForCausalLM) -> torch.optim.Optimizer:
    """AdamW; only matrices decay."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.98), fused=True)


def train(tokens: torch.Tensor, state_path: Path, budget_s: float) -> tuple[LlamaForCausalLM, int]:
    """Train until `budget_s` seconds are spent, over all runs that shared `state_path`; return the model and its steps."""
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(CONFIG)
    optimizer = make_optimizer(model)
    step, spent_s = 0, 0.0
    if state_path.exists():
        state = torch.load(state_path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step, spent_s = state["step"], state["spent_s"]
    start = time.monotonic() - spent_s
    saved_s, losses = spent_s, []
    while (spent_s := time.monotonic() - start) < budget_s:
        for group in optimizer.param_groups:
            group["lr"] = rate_at(spent_s / budget_s)
        windows = batch_at(tokens, step)
        # bfloat16 matrix products are 1.25 times as fast here as float32 (AMD EPYC with avx512_bf16, two threads).
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=windows[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        step += 1
        if len(losses) == 100:
            print(
                f"{spent_s:6.0f} s  step {step:5d}  loss {sum(losses) / 100:.4f} nats per token", flush=True
            )
            losses.clear()
        if spent_s - saved_s > SAVE_EVERY_S:
            saved_s = spent_s
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "step": step,
                "spent_s": spent_s,
            }
            torch.save(state, state_path.with_suffix(".new"))
            state_path.with_suffix(".new").replace(state_path)
    return model, step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=45.0, help="wall-clock time of the training loop")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)

    training, _ = read_library()
    tokenizer = train_tokenizer(list(training.values()))
    tokenizer.save(str(args.out / "tokenizer.json"))
    (args.out / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG, indent=2) + "\n")
    ids = [i for text in training.values() for i in [0, *tokenizer.encode(text).ids]]
    size = sum(len(text.encode()) for text in training.values())
    print(
        f"Python {platform.python_version()}: {len(training)} files, {size} bytes, {len(ids)} tokens",
        flush=True,
    )

    model, steps = train(torch.tensor(ids), args.out / "state.pt", args.minutes * 60)
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=0, pad_token_id=0)
    model.to(torch.bfloat16).save_pretrained(args.out)
    (args.out / "state.pt").unlink(missing_ok=True)
    run = {"python": platform.python_version(), "steps": steps, "tokens_seen": steps * BATCH * CONTEXT}
    (args.out / "training.json").write_text(json.dumps(run, indent=2) + "\n")


if __name__ == "__main__":
    main()
