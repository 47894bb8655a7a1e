# SPDX-License-Identifier: Apache-2.0
"""`Seq2Seq`: the folder of an encoder-decoder, ready to write texts about texts (T5) or sounds (Whisper)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from nnfront.distributed.ranks import ALONE
from nnfront.engine.params import Sampling
from nnfront.errors import RunError
from nnfront.files import Folder
from nnfront.llm.divided import load_part
from nnfront.llm.find_model import find_model
from nnfront.llm.folder_files import CONFIG, read_json
from nnfront.llm.hf_folder import compile_folder, eos_token_ids
from nnfront.llm.load_options import opened, session_on, stored_as
from nnfront.llm.lora import Loras
from nnfront.llm.methods import SEQ2SEQ, require_methods
from nnfront.llm.prompts import check_tokens
from nnfront.llm.sampling import Sampler, sampling_of, tokens_of, until_end
from nnfront.llm.sounds import Spectrograms
from nnfront.llm.text_start import TextStart
from nnfront.llm.timings import Timings
from nnfront.llm.tokenizer import Tokenizer, tokenizer_of, until
from nnfront.lower import TensorType
from nnfront.passes import QuantizeReport, QuantScheme
from nnfront.quantized import StoredReport
from nnfront.session import Session
from nnfront.state.cache import Cache
from nnfront.transform.plan import TransformPlan
from nnfront.weights.checkpoint import is_artefact


class Seq2Seq:
    """An encoder-decoder that writes a text about each source. Make one with `Seq2Seq.load`.

    `session` runs `logits`, `encode`, `prefill` and `decode`; `start` is how texts begin; `hears`: whether a source is a sound, not a text; `context`, `max_source`: how many
    tokens a text may have, and how many keys and values a source; `vocab_size`: how many tokens there are; `phases` are times so far; `sampling` is how `generate` chooses tokens if it
    is not told; `quantized` and `stored` are as of an `LLM`.
    """

    def __init__(
        self,
        session: Session,
        files: Folder,
        path: Path,
        phases: Timings | None = None,
        kv_quant: str | None = None,
    ) -> None:
        """Raises LoadError for a `kv_quant` that there is not, and for files that do not say how texts begin."""
        hf_config = read_json(files, CONFIG)
        self.session, self.files, self.path = session, files, path
        self.phases = phases or Timings()
        self.stored_as = stored_as(kv_quant)
        self.quantized: QuantizeReport | None = None
        self.stored: StoredReport | None = None
        self.start = TextStart.of(self.files, hf_config)
        self.eos_token_ids = eos_token_ids(self.files, hf_config)
        self.sampling = sampling_of(self.files)
        source = session["encode"].program.arguments[0].type
        assert isinstance(source, TensorType)
        self.hears = source.dtype != "int64"
        prefill = session["prefill"].program
        most = {dim.symbol.name: dim.symbol.max for dim in prefill.dims}
        self.context, self.max_source = (most[name] or sys.maxsize for name in ("max_seq", "max_source"))
        logits = prefill.slots[prefill.result.slot].type
        assert isinstance(logits, TensorType)
        self.vocab_size = int(str(logits.shape[-1]))
        self._dtype: torch.dtype = getattr(torch, source.dtype)

    @staticmethod
    def load(
        path: str | Path,
        device: str = "cpu",
        dtype: str | None = None,
        quant: str | QuantScheme | None = None,
        *,
        kv_quant: str | None = None,
        model_file: str | Path | None = None,
        cache: str | Path | None = None,
        ignored: Sequence[str] = (),
        lora: Loras = (),
        plan: Callable[[TransformPlan], None] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Seq2Seq:
        """Load a Hugging Face folder, or an artefact; the arguments are those of `LLM.load`. One process computes it.

        Raises LoadError if the folder, its architecture or its weights are not what they should be, and for a model that is no encoder-decoder.
        """
        phases, path, device = Timings(), Path(find_model(path)), str(device)
        if is_artefact(path):
            given = {"dtype": dtype, "model_file": model_file, "quant": quant}
            files = opened(path, given | {"cache": cache, "ignored": ignored, "lora": lora})
            _check_methods(path, [*files.manifest.methods])
            phases.end("read")
            session = session_on(files, device)
            phases.end("load")
            return Seq2Seq(session, files.home, path, phases, kv_quant)
        model = compile_folder(path, device, dtype, model_file, phases, quant, lora)
        _check_methods(path, [method.name for method in model.executable.source.methods])
        session = load_part(
            model, ALONE, ignored=ignored, cast=dtype is not None, cache=cache, plan=plan, progress=progress
        )
        phases.end("load")
        made = Seq2Seq(session, model.folder, path, phases, kv_quant)
        made.quantized, made.stored = model.quantized, model.stored
        return made

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
        stop: str | Sequence[str] | None = None,
        stream: bool = False,
        rate: int = 16000,
        **sampling: Any,
    ) -> Any:
        """Write a text about a text, or about a sound [samples]: the text, or with `stream` an iterator over its pieces.

        Ends after max_new_tokens, at the model's end token, or before the first of the `stop` strings. language, task: of a model that knows several; the likeliest language, and `transcribe`, if they are not given.
        sampling: values of `Sampling`; what is not given is as generation_config.json says. Raises RunError for what does not fit.
        """
        chosen = self.sampling.changed(sampling)
        steps = self._steps([self.source(source, rate)], max_new_tokens, chosen, language, task)
        pieces = until(self.tokenizer.stream(until_end(steps, self.eos_token_ids)), stop)
        return pieces if stream else "".join(pieces)

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
        for step in self._steps(sources, max_new_tokens, Sampling(**sampling), language, task):
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
        sampling: Sampling,
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
        if room > self.context:
            raise RunError(
                "the text does not fit",
                details=[
                    f"{prompt.shape[1]} tokens begin it and {count} come, the context holds {self.context}"
                ],
                help="ask for fewer new tokens",
            )
        cache = self._empty("cache", batch=len(sources), max_seq=room)
        sampler = Sampler(sampling, [*prompt])
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
            if not self.hears:
                check_tokens(f"source {i}", source, self.vocab_size)
        room = self.max_source if self.hears else max(map(len, sources))
        memory = self._empty("memory", batch=len(sources), max_source=room)
        for i, source in enumerate(sources):
            self.session["encode"](source[None].to(self.session.device, self._dtype), memory.rows(i))
        return memory

    def _empty(self, argument: str, **sizes: Any) -> Cache:
        return self.session.make_cache(argument, stored_as=self.stored_as, **sizes)

    def _prompt(self, memory: Cache, language: str | None, task: str | None) -> torch.Tensor:
        """What each text begins with: int64 [batch, seq]."""
        start = self.start
        languages: Sequence[int | None] = [None] * memory.batch
        if language is not None:
            languages = [start.language(language)] * memory.batch
        elif start.languages:
            first = torch.full((memory.batch, 1), start.token, device=self.session.device)
            cache = self._empty("cache", batch=memory.batch, max_seq=1)
            languages = start.detected(self.session["prefill"](first, memory, cache)[:, -1])
        return torch.tensor([start.prompt(each, task) for each in languages])


def _check_methods(path: Path, methods: Sequence[str]) -> None:
    """Raise LoadError for a model that is no encoder-decoder."""
    help = "nnfront.LLM.load(DIR) loads a language model without an encoder"
    require_methods(path, "encoder-decoder", SEQ2SEQ, methods, help)
