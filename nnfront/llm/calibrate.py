# SPDX-License-Identifier: Apache-2.0
"""`calibrate`: measure on some text what the weights of a folder's model are multiplied with."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from nnfront.errors import LoadError, RunError
from nnfront.llm.calibration import TOKENS
from nnfront.llm.evaluate import WINDOW
from nnfront.llm.hf_folder import LOGITS, compile_folder
from nnfront.llm.tokenizer import tokenizer_of

MOST_TOKENS = 1 << 17
"""Of a longer text the rest is not read: moments change little by then."""


def calibrate(
    path: str | Path,
    text: str,
    output: str | Path,
    *,
    dtype: str | None = None,
    model_file: str | Path | None = None,
    ignored: Sequence[str] = (),
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Have a folder's model read a text, and write the second moments of the inputs of each weight to a safetensors file, for `QuantScheme.calibration`. Returns how many tokens it read.

    The text is read in windows of `WINDOW` tokens, or of the model's context, up to `MOST_TOKENS`, on a CPU; the file takes 4 bytes for each input of a weight and each of up to 512 of its
    neighbours. dtype, model_file, ignored: as for `LLM.load`. The text should be like those that the model is for. progress: told how many tokens of how many are read.
    Raises LoadError for a model that generates no text and what `LLM.load` raises it for, RunError for a text of no tokens, and for inputs that are no finite numbers.
    """
    model = compile_folder(path, dtype=dtype, model_file=model_file, moments=True)
    assert model.text is not None
    ids = torch.tensor(tokenizer_of(model.folder).encode(text), dtype=torch.int64)[:MOST_TOKENS]
    if not len(ids):
        raise RunError("the text to calibrate on has no tokens")
    session = model.executable.load(model.checkpoint, ignored=ignored, cast=dtype is not None)
    names = model.measured
    sums = [torch.zeros(()) for _ in names]
    done = 0
    for part in torch.split(ids, min(WINDOW, model.text.max_position_embeddings)):
        sums = [total + found for total, found in zip(sums, session[LOGITS](part[None]), strict=True)]
        done += len(part)
        if progress is not None:
            progress(done, len(ids))
    found = {name: (total / len(ids)).to(torch.float32) for name, total in zip(names, sums, strict=True)}
    for name, moments in found.items():
        if not bool(moments.isfinite().all()):
            raise RunError(
                f"the inputs of {name} are no finite numbers",
                help="compute in another dtype: --dtype float32",
            )
    _write(Path(output), found, len(ids))
    return len(ids)


def _write(path: Path, found: dict[str, torch.Tensor], tokens: int) -> None:
    """Write the file beside where it is to be, and move it there."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file(found, beside, {"format": "pt", TOKENS: str(tokens)})
        os.replace(beside, path)
    except OSError as error:
        raise LoadError(f"cannot write {path}: {error.strerror}") from None
    finally:
        beside.unlink(missing_ok=True)
