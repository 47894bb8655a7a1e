# SPDX-License-Identifier: Apache-2.0
"""`LLM`: a Hugging Face folder, ready to generate."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from nnfront import dtypes, passes
from nnfront.compiler import compile
from nnfront.errors import LoadError, RunError
from nnfront.models import read_folder, read_json
from nnfront.sampling import Sampler, Sampling
from nnfront.session import Session
from nnfront.tokenizer import Tokenizer, until
from nnfront.weights import Checkpoint


class Phases:
    """Seconds spent in each phase, in order, and how many tokens it handled where that is a rate worth showing."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.tokens: dict[str, int] = {}
        self._last = time.perf_counter()

    def end(self, phase: str, tokens: int = 0) -> None:
        """Book the time since the last phase ended (or `start`) under `phase`."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        if tokens:
            self.tokens[phase] = self.tokens.get(phase, 0) + tokens
        self._last = now

    def start(self) -> None:
        """Begin a phase now; what passed since the last one belongs to none."""
        self._last = time.perf_counter()

    def table(self) -> str:
        """Return the times as text, a line for each phase."""
        rows = [f"{'phase':<12}{'seconds':>9}{'tokens':>8}{'tokens/s':>10}"]
        for phase, seconds in self.seconds.items():
            tokens = self.tokens.get(phase)
            rate = f"{tokens:>8}{tokens / seconds:>10.1f}" if tokens and seconds else ""
            rows.append(f"{phase:<12}{seconds:>9.3f}{rate}")
        rows.append(f"{'total':<12}{sum(self.seconds.values()):>9.3f}")
        return "\n".join(rows)


class LLM:
    """A language model that generates text. Make one with `LLM.load`.

    `session` runs the methods `logits`, `prefill` and `decode`; `config` is the model file's; `phases` are times so far.
    """

    def __init__(
        self,
        session: Session,
        config: Any,
        path: Path,
        eos: tuple[int, ...] = (),
        phases: Phases | None = None,
    ) -> None:
        self.session = session
        self.config = config
        self.path = path
        self.eos_token_ids = eos
        self.phases = phases or Phases()
        self._tokenizer: Tokenizer | None = None

    @staticmethod
    def load(
        path: str | Path,
        device: str = "cpu",
        dtype: str | None = None,
        quant: str | None = None,
        *,
        model_file: str | Path | None = None,
    ) -> LLM:
        """Load a Hugging Face folder: config.json, safetensors, and tokenizer.json if there is to be text.

        dtype: compute in it instead of the checkpoint's dtype; weights are cast when they are loaded.
        model_file: a model file of the user's, instead of the shipped one for the folder's `model_type`.
        Raises LoadError if the folder, its architecture or its weights are not what they should be.
        """
        folder = Path(path)
        phases = Phases()
        if quant is not None:
            raise LoadError(f"quant={quant!r} is not supported", help="leave it out")
        architecture, config, hf_config = read_folder(folder, model_file)
        if dtype is not None:
            config = replace(config, dtype=dtypes.check(dtype))
        model = architecture.file.build(config)
        spec = architecture.file.export_spec(config)
        checkpoint = Checkpoint(folder)
        phases.end("read")
        module = model.export(spec)
        phases.end("export")
        module = passes.lift_transform_params(module, shared_transform=True)
        phases.end("lift")
        executable = compile(module, target=device)
        phases.end("compile")
        session = executable.load(checkpoint, cast=dtype is not None)
        phases.end("load")
        return LLM(session, config, folder, _eos_token_ids(folder, hf_config), phases)

    @property
    def tokenizer(self) -> Tokenizer:
        """The folder's tokenizer. Raises LoadError if it has none."""
        if self._tokenizer is None:
            path = self.path / "tokenizer.json"
            if not path.is_file():
                raise LoadError(
                    f"{self.path} has no tokenizer.json, so it takes no text",
                    help="use generate_ids with token ids, or add the model's tokenizer.json to the folder",
                )
            self._tokenizer = Tokenizer(path)
        return self._tokenizer

    @property
    def context(self) -> int:
        """How many tokens a text may have, prompt included."""
        return int(self.config.max_position_embeddings)

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits of every position: int64 [batch, seq] to float32 [batch, seq, vocab]."""
        result: torch.Tensor = self.session["logits"](ids)
        return result

    def generate(
        self,
        prompt: str,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        stream: bool = False,
    ) -> Any:
        """Continue a text: the new text only, or with `stream` an iterator over its pieces.

        Ends after max_new_tokens, at the model's end token, or before the first of the `stop` strings. See `Sampling` for the other
        parameters. Raises RunError for an empty prompt, one that does not fit the context, or parameters out of range.
        """
        stops = [stop] if isinstance(stop, str) else list(stop or ())
        if any(not isinstance(s, str) or not s for s in stops):
            raise RunError(f"stop is {stop!r}, expected a non-empty text or several")
        if not isinstance(prompt, str):
            raise RunError(
                f"the prompt is a {type(prompt).__name__}, expected a text",
                help="use generate_ids for token ids",
            )
        sampler = Sampler(Sampling(temperature, top_k, top_p, min_p, seed))
        ids = torch.tensor(self.tokenizer.encode(prompt), dtype=torch.int64)
        room = self._room([ids], max_new_tokens)
        pieces = until(self.tokenizer.stream(self._tokens(ids, room, sampler)), stops)
        return pieces if stream else "".join(pieces)

    def generate_ids(
        self,
        ids: torch.Tensor | Sequence[torch.Tensor],
        max_new_tokens: int = 128,
        eos_token_id: int | Sequence[int] | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int | None = None,
    ) -> Any:
        """Continue token ids: int64 [batch, seq] to [batch, new], or a list of 1-D tensors of any lengths to a list.

        Greedy by default. With `eos_token_id` a sequence ends after that token: in a list it is shorter, in a tensor it is filled up with
        that token. Raises RunError for an empty prompt, one that does not fit the context, or parameters out of range.
        """
        sampler = Sampler(Sampling(temperature, top_k, top_p, min_p, seed))
        prompts = list(ids)
        ends = (
            []
            if eos_token_id is None
            else [eos_token_id]
            if isinstance(eos_token_id, int)
            else list(eos_token_id)
        )
        self._room(prompts, max_new_tokens)
        rows: list[list[int]] = [[] for _ in prompts]
        done = [False] * len(prompts)
        for step in self._steps(prompts, max_new_tokens, sampler):
            for i, token in enumerate(step.tolist()):
                if not done[i]:
                    rows[i].append(token)
                    done[i] = token in ends
            if all(done):
                break
        if not isinstance(ids, torch.Tensor):
            return [torch.tensor(row, dtype=torch.int64) for row in rows]
        width = max(map(len, rows))
        return torch.tensor(
            [row + [row[-1]] * (width - len(row)) for row in rows], dtype=torch.int64
        ).reshape(-1, width)

    def _room(self, prompts: Sequence[torch.Tensor], max_new_tokens: int) -> int:
        """Check that every prompt and what is to come after it fits; return how many tokens may come."""
        if type(max_new_tokens) is not int or max_new_tokens < 1:
            raise RunError(f"max_new_tokens is {max_new_tokens!r}, expected an int >= 1")
        if not prompts:
            raise RunError("there is no prompt")
        for i, prompt in enumerate(prompts):
            which = f"prompt {i}" if len(prompts) > 1 else "the prompt"
            if not isinstance(prompt, torch.Tensor) or prompt.ndim != 1 or prompt.is_floating_point():
                raise RunError(f"{which} is not a 1-D integer tensor")
            if not len(prompt):
                raise RunError(f"{which} is empty", help="give at least one token")
            if len(prompt) + max_new_tokens > self.context:
                raise RunError(
                    f"{which} does not fit",
                    details=[
                        f"got {len(prompt)} tokens and {max_new_tokens} new ones, the context holds {self.context}"
                    ],
                    help="shorten the prompt, or ask for fewer new tokens",
                )
            if int(prompt.min()) < 0 or int(prompt.max()) >= self.config.vocab_size:
                raise RunError(f"{which} holds a token outside the vocabulary of {self.config.vocab_size}")
        return max_new_tokens

    def _tokens(self, prompt: torch.Tensor, room: int, sampler: Sampler) -> Iterator[int]:
        """Yield new tokens of one sequence up to the model's end token."""
        for step in self._steps([prompt], room, sampler):
            token = int(step[0])
            if token in self.eos_token_ids:
                return
            yield token

    def _steps(self, prompts: Sequence[torch.Tensor], count: int, sampler: Sampler) -> Iterator[torch.Tensor]:
        """Yield the next token of every sequence, int64 [batch], `count` times."""
        longest = max(map(len, prompts))
        cache = self.session.make_cache(batch=len(prompts), max_seq=longest + count)
        self.phases.start()
        parts = []
        first = 0
        for _, group in groupby(prompts, key=len):
            same = torch.stack(list(group)).to(torch.int64)
            rows = cache if len(same) == len(prompts) else cache.rows(first, first + len(same))
            parts.append(self.session["prefill"](same, rows)[:, -1])
            first += len(same)
        token = sampler(torch.cat(parts))
        self.phases.end("prefill", sum(map(len, prompts)))
        yield token
        for _ in range(count - 1):
            self.phases.start()
            token = sampler(self.session["decode"](token[:, None], cache)[:, -1])
            self.phases.end("decode", len(prompts))
            yield token


def _eos_token_ids(folder: Path, hf_config: dict[str, Any]) -> tuple[int, ...]:
    """The tokens that end a text: from generation_config.json, else from config.json."""
    path = folder / "generation_config.json"
    found = (read_json(path) if path.is_file() else {}).get("eos_token_id", hf_config.get("eos_token_id"))
    return () if found is None else (found,) if isinstance(found, int) else tuple(found)
