# SPDX-License-Identifier: Apache-2.0
"""Which text the model is trained on, which text is held out, and how text becomes tokens.

The text is the Python source of the running interpreter's standard library, read from disk; nothing is downloaded. A file is
held out when the hash of its relative path says so, so every machine and every Python version splits alike.
"""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"  # stands before every file, and so ends the one before
VOCAB_SIZE = 4096
HELD_OUT_PERCENT = 5

# Tests repeat their scaffolding and hold byte tables; encodings, pydoc_data and html/entities.py are generated tables;
# _sysconfigdata* and config-* describe one machine.
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "__pycache__", "encodings", "pydoc_data"}
SKIPPED_PREFIXES = ("_sysconfigdata", "config-", "html/entities.py")

# One pre-token is: line ends with the indentation after them; a name with one space or dot before it; up to three digits;
# punctuation with one space before it; or spaces inside a line. BPE merges never cross these borders.
PRE_TOKEN = (
    r"\n+[ \t]*"
    r"|[ .]?[\p{L}_][\p{L}\p{N}_]*"
    r"| ?\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}_]+"
    r"|[^\S\n]+(?=[^\S\n])|\s"
)


def is_held_out(relative_path: str) -> bool:
    """Whether the file is never trained on. `relative_path` has forward slashes, as in "json/decoder.py"."""
    digest = hashlib.sha256(relative_path.encode()).digest()
    return int.from_bytes(digest[:8], "big") % 100 < HELD_OUT_PERCENT


def read_library(root: Path | None = None) -> tuple[dict[str, str], dict[str, str]]:
    """Return (training, held out) texts by relative path, sorted; `root` is the standard library unless given."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    training: dict[str, str] = {}
    held_out: dict[str, str] = {}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        name = relative.as_posix()
        if SKIPPED_FOLDERS.intersection(relative.parts) or name.startswith(SKIPPED_PREFIXES):
            continue
        (held_out if is_held_out(name) else training)[name] = path.read_bytes().decode("utf-8")
    return training, held_out


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Train a byte-level BPE of `VOCAB_SIZE` entries; any text round-trips exactly."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKEN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
