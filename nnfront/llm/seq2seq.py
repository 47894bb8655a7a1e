# SPDX-License-Identifier: Apache-2.0
"""`Seq2Seq`: the folder of an encoder-decoder, ready to write texts about texts (T5) or sounds (Whisper)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from nnfront.errors import LoadError, RunError
from nnfront.llm.find_model import find_model
from nnfront.llm.folder_files import read_json
from nnfront.llm.hf_folder import CompiledFolder, compile_folder, eos_token_ids, open_folder
from nnfront.llm.methods import SEQ2SEQ
from nnfront.llm.model_files import read_folder
from nnfront.llm.sampling import Sampler, Sampling, sampling_of, tokens_of
from nnfront.llm.sounds import Spectrograms
from nnfront.llm.text_start import TextStart
from nnfront.llm.timings import Timings
from nnfront.llm.tokenizer import Tokenizer, tokenizer_of
from nnfront.lower import TensorType
from nnfront.passes import QuantScheme
from nnfront.session import Session
from nnfront.state.cache import Cache
from nnfront.weights.checkpoint import is_artefact


class Seq2Seq:
    """An encoder-decoder that writes a text about each source. Make one with `Seq2Seq.load`.

    `session` runs `logits`, `encode`, `prefill` and `decode`; `config` is the model file's; `start` is how texts begin; `hears`: whether a source is a sound, not a text;
    `phases` are times so far; `sampling` is how `generate` chooses tokens if it is not told.
    """

    def __init__(
        self, session: Session, model: CompiledFolder, path: Path, phases: Timings | None = None
    ) -> None:
        hf_config = read_json(model.held, "config.json")
        self.session, self.config, self.files, self.path = session, model.config, model.held, path
        self.phases = phases or Timings()
        self.start = TextStart.of(self.files, hf_config)
        self.eos_token_ids = eos_token_ids(self.files, hf_config)
        self.sampling = sampling_of(self.files)
        source = session["encode"].program.arguments[0].type
        assert isinstance(source, TensorType)
        self.hears = source.dtype != "int64"
        self._dtype: torch.dtype = getattr(torch, source.dtype)

    @staticmethod
    def load(
        path: str | Path,
        device: str = "cpu",
        dtype: str | None = None,
        quant: str | QuantScheme | None = None,
        *,
        model_file: str | Path | None = None,
        ignored: Sequence[str] = (),
        progress: Callable[[int, int], None] | None = None,
    ) -> Seq2Seq:
        """Load a Hugging Face folder; the arguments are those of `LLM.load`.

        Raises LoadError if the folder, its architecture or its weights are not what they should be, and for a model that is no encoder-decoder.
        """
        phases, path = Timings(), find_model(path)
        model = compile_folder(path, str(device), dtype, model_file, phases, quant)
        methods = [method.name for method in model.executable.source.methods]
        if missing := [name for name in SEQ2SEQ if name not in methods]:
            raise LoadError(
                f"{path} holds no encoder-decoder",
                details=[
                    f"there is no method {name!r}, methods are {', '.join(map(repr, methods))}"
                    for name in missing
                ],
                help="nnfront.LLM.load(DIR) loads a language model without an encoder",
            )
        session = model.executable.load(
            model.checkpoint, ignored=ignored, cast=dtype is not None, progress=progress
        )
        phases.end("load")
        return Seq2Seq(session, model, Path(path), phases)

    @staticmethod
    def fits(path: str | Path, model_file: str | Path | None = None) -> bool:
        """Whether a folder holds an encoder-decoder. Reads config.json alone. Raises LoadError as `load` does."""
        if is_artefact(path):
            return False
        architecture, config, _ = read_folder(open_folder(path), model_file)
        return {*SEQ2SEQ} <= {*architecture.methods(config)}

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The folder's tokenizer. Raises LoadError if it has none."""
        return tokenizer_of(self.files)

    @cached_property
    def spectrograms(self) -> Spectrograms:
        """What makes spectrograms of sounds. Raises LoadError if the folder does not say how, and without transformers."""
        return Spectrograms(self.path)

    def source(self, given: str | torch.Tensor, rate: int = 16000) -> torch.Tensor:
        """A text, or a sound [samples] between -1 and 1 of so many samples a second, as what `encode` takes of one: tokens, or a spectrogram.

        Raises RunError for a source of the other kind, and for a sound that the model cannot hear.
        """
        if isinstance(given, str) is self.hears:
            kinds = "a text", "a sound"
            raise RunError(f"the source is {kinds[not self.hears]}, the model reads {kinds[self.hears]}")
        if isinstance(given, str):
            return torch.tensor(self.tokenizer.encode(given), dtype=torch.int64)
        return self.spectrograms(given, rate)

    def generate(
        self,
        source: str | torch.Tensor,
        max_new_tokens: int = 128,
        *,
        language: str | None = None,
        task: str | None = None,
        stream: bool = False,
        rate: int = 16000,
        **sampling: Any,
    ) -> Any:
        """Write a text about a text, or about a sound [samples]: the text, or with `stream` an iterator over its pieces.

        Ends after max_new_tokens or at the model's end token. language, task: of a model that knows several; the likeliest language, and `transcribe`, if they are not given.
        sampling: values of `Sampling`; what is not given is as generation_config.json says. Raises RunError for what does not fit.
        """
        chosen = replace(self.sampling, **{name: x for name, x in sampling.items() if x is not None})
        steps = self._steps([self.source(source, rate)], max_new_tokens, Sampler(chosen), language, task)
        pieces = self.tokenizer.stream(self._until_end(steps))
        return pieces if stream else "".join(pieces)

    def _until_end(self, steps: Iterator[torch.Tensor]) -> Iterator[int]:
        for step in steps:
            (token,) = tokens_of(step)
            if token in self.eos_token_ids:
                return
            yield token

    def generate_ids(
        self,
        sources: Sequence[torch.Tensor],
        max_new_tokens: int = 128,
        *,
        language: str | None = None,
        task: str | None = None,
        **sampling: Any,
    ) -> list[torch.Tensor]:
        """Write a text about each source, tokens int64 [source] of any lengths or spectrograms [bins, frames]: int64 [new] each, its end token included.

        Greedy unless values of `Sampling` say otherwise. Raises RunError for what does not fit.
        """
        rows: list[list[int]] = [[] for _ in sources]
        done = [False] * len(sources)
        for step in self._steps(sources, max_new_tokens, Sampler(Sampling(**sampling)), language, task):
            for i, token in enumerate(tokens_of(step)):
                if not done[i]:
                    rows[i].append(token)
                    done[i] = token in self.eos_token_ids
            if all(done):
                break
        return [torch.tensor(row, dtype=torch.int64) for row in rows]

    def _steps(
        self,
        sources: Sequence[torch.Tensor],
        count: int,
        sampler: Sampler,
        language: str | None,
        task: str | None,
    ) -> Iterator[torch.Tensor]:
        """Yield the next token of every text, int64 [batch], `count` times."""
        if type(count) is not int or count < 1:
            raise RunError(f"max_new_tokens is {count!r}, expected an int >= 1")
        self.phases.start()
        memory = self._remembered(sources)
        self.phases.end("encode", sum(memory.lengths))
        prompt = self._prompt(memory, language, task).to(self.session.device)
        room = prompt.shape[1] + count
        if room > self.config.max_position_embeddings:
            raise RunError(
                "the text does not fit",
                details=[
                    f"{prompt.shape[1]} tokens begin it and {count} come, the context holds {self.config.max_position_embeddings}"
                ],
                help="ask for fewer new tokens",
            )
        cache = self.session.make_cache("cache", batch=len(sources), max_seq=room)
        tokens, phase = prompt, "prefill"
        for i in range(count):
            logits = self.session[phase](tokens, memory, cache)[:, -1]
            token = sampler(self.start.suppress(logits, is_first=i == 0))
            self.phases.end(phase, tokens.numel())
            yield token
            self.phases.start()
            tokens, phase = token[:, None], "decode"

    def _remembered(self, sources: Sequence[torch.Tensor]) -> Cache:
        """Keys and values of the sources."""
        if not sources:
            raise RunError("there is no source")
        for i, source in enumerate(sources):
            wanted = source.ndim == 2 if self.hears else source.ndim == 1 and source.dtype == torch.int64
            if not wanted or not source.numel():
                kind = "a spectrogram [bins, frames]" if self.hears else "int64 [source], a token at least"
                raise RunError(f"source {i} is not {kind}")
            if not self.hears and not 0 <= int(source.min()) <= int(source.max()) < self.config.vocab_size:
                raise RunError(f"source {i} holds a token outside the vocabulary of {self.config.vocab_size}")
        room = self.config.max_source_positions if self.hears else max(map(len, sources))
        memory = self.session.make_cache("memory", batch=len(sources), max_source=room)
        for i, source in enumerate(sources):
            self.session["encode"](source[None].to(self.session.device, self._dtype), memory.rows(i))
        return memory

    def _prompt(self, memory: Cache, language: str | None, task: str | None) -> torch.Tensor:
        """What each text begins with: int64 [batch, seq]."""
        start = self.start
        languages: Sequence[int | None] = [None] * memory.batch
        if language is not None:
            languages = [start.language(language)] * memory.batch
        elif start.languages:
            first = torch.full((memory.batch, 1), start.token, device=self.session.device)
            cache = self.session.make_cache("cache", batch=memory.batch, max_seq=1)
            languages = start.detected(self.session["prefill"](first, memory, cache)[:, -1])
        return torch.tensor([start.prompt(each, task) for each in languages])
