# SPDX-License-Identifier: Apache-2.0
"""`LLM`: a Hugging Face folder, or an artefact made of one, ready to generate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nnfront.artefact.manifest import TextModel
from nnfront.backends.device import fetching
from nnfront.distributed.ranks import ALONE, Ranks
from nnfront.engine.multi_token import MultiTokenHead, head_of
from nnfront.engine.params import Sampling
from nnfront.engine.speculate import DraftModel, Guesser, guesser_of
from nnfront.errors import LoadError, RunError
from nnfront.files import Folder
from nnfront.llm.find_model import find_model
from nnfront.llm.generation import Captured, Coming, Generation, round_robin, until_ends
from nnfront.llm.load_options import opened, session_on, stored_as, text_of, weights_again
from nnfront.llm.methods import SEQ2SEQ, Methods
from nnfront.llm.prompts import adapter_numbers, are_integers, check_prompts, check_tokens, kind_of, listed
from nnfront.llm.sampling import Sampler, sampling_of
from nnfront.llm.stepping import Stepping
from nnfront.llm.timings import Timings
from nnfront.llm.tokenizer import Tokenizer, tokenizer_of, until
from nnfront.session import Session
from nnfront.transform.plan import TransformPlan
from nnfront.weights.checkpoint import is_artefact

if TYPE_CHECKING:
    from nnfront.llm.lora import Loras
    from nnfront.llm.unmerged import Adapters
    from nnfront.passes import QuantizeReport, QuantScheme
    from nnfront.quantized import StoredReport

# On a GPU caches have room for a multiple of so many tokens, so that one serves several generations.
SPARE_TOKENS = 1024


class LLM:
    """A language model that generates text. Make one with `LLM.load`.

    `session` runs the methods `logits`, `prefill` and `decode`; `config` is the model file's, or what an artefact keeps of it: at
    least `max_position_embeddings` and `vocab_size`; `phases` are times so far; `sampling` is how `generate` chooses tokens if it is not
    told; `quantized` says what `quant` did, None where it was not given; `files` is the folder, held open; `stored_as` is how caches keep keys
    and values, for `make_cache`; `stored` says what became of
    weights that the checkpoint holds quantised, None where its config.json says of none; `adapters` are names of adapters that `generate` takes.
    """

    def __init__(
        self,
        session: Session,
        text: TextModel,
        config: Any,
        path: Path,
        phases: Timings | None = None,
        kv_quant: str | None = None,
        files: Folder | None = None,
    ) -> None:
        """`kv_quant` as for `load`; `files` is the folder at `path`, if it is open already. Raises LoadError for one that there is not."""
        self.session = session
        self.stored_as = stored_as(kv_quant)
        self.config = config
        self.path = path
        self.eos_token_ids = text.eos_token_ids
        self.files = files or Folder(path)
        self.sampling = sampling_of(self.files)
        self.quantized: QuantizeReport | None = None
        self.stored: StoredReport | None = None
        self.adapters: tuple[str, ...] = ()
        self.ranks = ALONE
        self.phases = phases or Timings()
        self._spare: Stepping | None = None
        self._drafts: dict[str, LLM] = {}
        self._read: Callable[[], Mapping[str, torch.Tensor]] | None = None

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
        ranks: Ranks | None = None,
        plan: Callable[[TransformPlan], None] | None = None,
        progress: Callable[[int, int], None] | None = None,
        extends: bool = False,
        adapters: Adapters | None = None,
        mtp: bool = False,
    ) -> LLM:
        """Load a Hugging Face folder (config.json, safetensors, and tokenizer.json if there is to be text), or an artefact.

        path: also a safetensors file beside its config.json, a GGUF file, or `org/name` in Hugging Face's cache, as `find_model` says.
        dtype: compute in it instead of the checkpoint's dtype; weights are cast when they are loaded.
        quant: store weights in a format of `nnfront.quant_format`: 4 bits (`int4`, a scale for 32 of them), 8 (`int8` or, in floats, `fp8`) ..., or as a `QuantScheme` says.
        kv_quant: keep keys and values in 8 bits (`fp8`: a float, with a scale for each token and head).
        model_file: a model file of the user's, instead of the shipped one for the folder's `model_type`.
        cache: a folder that keeps what is computed of weights, so that the next load computes nothing.
        ignored: names or patterns (`*.inv_freq`) of tensors that the checkpoint may hold beside the model's.
        lora: folders of low-rank adapters in PEFT's layout, merged into the weights; `(DIR, 0.5)` or `"DIR=0.5"` counts half.
        ranks: divide the model among these processes, each of which loads its part and calls the same methods; `nnfront.distributed.joined` makes them.
        An artefact has dtype, quant and model in it, and its weights made, so none of these is given with one; ranks only if it was made for as many.
        extends: make the method `extend` too, with which tokens that are guessed are computed together (`spec`).
        adapters: folders of low-rank adapters by name, beside the weights: each text is generated with one of them (`adapter`), or none.
        mtp: also load the head that guesses further tokens, of a checkpoint that has one (`spec="mtp"`); `extend` is made with it.
        plan, progress: told what loading will take before weights are read, and then how many steps of how many are done.
        Raises LoadError if the folder, its architecture or its weights are not what they should be, and for a model that generates no text.
        """
        path, device = find_model(path), str(device)  # a torch.device says the same
        if is_artefact(path):
            weights = {"quant": quant, "cache": cache, "ignored": ignored, "lora": lora, "adapters": adapters}
            given = {"dtype": dtype, "model_file": model_file, "ranks": ranks, **weights}
            return _from_artefact(Path(path), device, kv_quant, given)
        from nnfront.llm.divided import load_part  # here: an artefact loads without what exports
        from nnfront.llm.hf_folder import compile_folder

        phases, ranks = Timings(), ranks or ALONE
        parts: Any = {"methods": Methods.of(extends=extends, mtp=mtp), "adapters": adapters or {}}
        options: Any = {"quant": quant, "lora": lora, "ranks": ranks.world, **parts}
        compiled = partial(compile_folder, path, device, dtype, model_file, **options)
        with ranks.together():
            model = compiled(phases=phases)
        if model.text is None:
            raise LoadError(
                f"{path} holds no language model",
                details=model.lacks,
                help="nnfront.Seq2Seq.load(DIR) loads an encoder-decoder"
                if all(name in model.executable.source for name in SEQ2SEQ)
                else "nnfront.compile(nnfront.export_folder(DIR)).load(nnfront.Checkpoint(DIR)) loads any model",
            )
        session = load_part(
            model, ranks, ignored=ignored, cast=dtype is not None, cache=cache, plan=plan, progress=progress
        )
        phases.end("load")
        # Weights are mapped, or made of what was read.
        model.folder.close(file.name for file in model.checkpoint.files)
        llm = LLM(session, model.text, model.config, Path(path), phases, kv_quant, model.folder)
        llm.quantized, llm.stored, llm.ranks = model.quantized, model.stored, ranks
        llm.adapters = model.adapters
        llm._read = partial(weights_again, compiled, model.executable.source, ignored, dtype is not None)
        return llm

    def save(self, folder: str | Path) -> None:
        """Write an artefact that `LLM.load` reads, tokenizer included. Raises LoadError like `Session.save`, and for adapters that are not merged."""
        if self.adapters:
            merge = "load the model without them, or merge one: lora=[DIR] (--lora DIR)"
            raise LoadError("an artefact holds no adapters that are not merged", help=merge)
        self.session.save(folder)

    def read(self) -> Mapping[str, torch.Tensor]:
        """The weights that its folder holds now, for `session.update`. Raises LoadError as `load` does, for an artefact, and for another model than before."""
        if self._read is None:
            raise LoadError(
                f"{self.path} is an artefact, whose weights are made already", help="load it anew"
            )
        return self._read()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The folder's tokenizer. Raises LoadError if it has none."""
        return tokenizer_of(self.files)

    @property
    def context(self) -> int:
        """How many tokens a text may have, prompt included."""
        return int(self.config.max_position_embeddings)

    def guesser(self, how: str, longest: int) -> Guesser | MultiTokenHead:
        """What guesses tokens of one text of up to `longest`: as `guesser_of` has it, `draft:DIR`, a model that is loaded once, or the model's own head,
        as `head_of` has it.

        Raises RunError for anything else, and for a model with other tokens, or without a head.
        """
        kind, _, where = how.partition(":")
        if kind == "mtp":
            return head_of(self.session, how)
        if kind != "draft" or not where:
            return guesser_of(how)
        if where not in self._drafts:
            draft = LLM.load(where, self.session.device.type)
            mine, its = int(self.config.vocab_size), int(draft.config.vocab_size)
            if its != mine:
                raise RunError(f"{where} cannot draft: it has {its} tokens, the model {mine}")
            self._drafts[where] = draft
        draft = self._drafts[where]
        return DraftModel(draft.session, min(longest, draft.context))

    def logits(self, ids: torch.Tensor, adapter: str | Sequence[str | None] | None = None) -> torch.Tensor:
        """Return the logits of every position: int64 [batch, seq] to float32 [batch, seq, vocab], on the session's device.

        adapter: as for `generate`. Raises RunError for tokens outside the vocabulary, and for what does not fit the method.
        """
        if not are_integers(ids, 2):
            raise RunError(f"the tokens are {kind_of(ids)}, expected int64[batch, seq]")
        check_tokens("the batch", ids, int(self.config.vocab_size))
        chosen, device = adapter_numbers(self.adapters, adapter, len(ids)), self.session.device
        more = [torch.tensor(chosen, dtype=torch.int32, device=device)] if self.adapters else []
        result: torch.Tensor = self.session["logits"](ids.to(device), *more)
        return result

    def generate(
        self,
        prompt: str | Sequence[str],
        max_new_tokens: int = 128,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        stream: bool = False,
        repetition_penalty: float | None = None,
        spec: str | None = None,
        adapter: str | Sequence[str | None] | None = None,
    ) -> Any:
        """Continue a text: the new text only, or with `stream` an iterator over its pieces. Of several texts a list, or an iterator over pieces
        with their texts' numbers: each continues as it would alone.

        Ends after max_new_tokens, at the model's end token, or before the first of the `stop` strings. See `Sampling` for the other
        parameters; one that is None is as the model's generation_config.json says, without one as `Sampling` does: the likeliest token.
        spec: guess tokens to save time, as `guesser` has it; the text stays the same.
        adapter: the name of one of `adapters`, or one for each text; without it, or None, the model as it is.
        Raises RunError for an empty prompt, one that does not fit the context, or parameters out of range.
        """
        prompts = listed(prompt, str)
        if not prompts:
            raise RunError(
                f"the prompt is a {type(prompt).__name__}, expected a text or several",
                help="use generate_ids for token ids",
            )
        said = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
        sampling = self.sampling.changed({**said, "repetition_penalty": repetition_penalty})
        ids = [torch.tensor(self.tokenizer.encode(text), dtype=torch.int64) for text in prompts]
        coming = self._generation(ids, max_new_tokens, sampling, self.eos_token_ids, spec, adapter)
        streams = [until(self.tokenizer.stream(coming.tokens(i)), stop) for i in range(len(prompts))]
        if isinstance(prompt, str):
            return streams[0] if stream else "".join(streams[0])
        pieces = round_robin(streams)
        if stream:
            return pieces
        texts = [""] * len(prompts)
        for which, piece in pieces:
            texts[which] += piece
        return texts

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
        repetition_penalty: float = 1.0,
        stream: bool = False,
        spec: str | None = None,
        adapter: str | Sequence[str | None] | None = None,
    ) -> Any:
        """Continue token ids: int64 [batch, seq] to [batch, new], or a list of 1-D tensors of any lengths to a list. With `stream` an iterator over
        tokens as they come, each with its sequence's number.

        Greedy by default. With `eos_token_id` a sequence ends after that token: in a list it is shorter, in a tensor it is filled up with
        that token. `spec`, `adapter` as for `generate`. Raises RunError for an empty prompt, one that does not fit the context, or parameters out of range.
        """
        sampling = Sampling(temperature, top_k, top_p, min_p, seed, repetition_penalty)
        ends = listed(eos_token_id, int)
        if ends is None:
            raise RunError(f"eos_token_id is {eos_token_id!r}, expected a token or several")
        if not isinstance(ids, torch.Tensor | Sequence) or (isinstance(ids, torch.Tensor) and ids.ndim != 2):
            raise RunError(
                f"the prompts are {kind_of(ids)}, expected int64[batch, seq] or a list of 1-D integer tensors"
            )
        prompts = list(ids)
        tokens = until_ends(self._generation(prompts, max_new_tokens, sampling, (), spec, adapter), ends)
        if stream:
            return tokens
        rows: list[list[int]] = [[] for _ in prompts]
        for which, token in tokens:
            rows[which].append(token)
        if not isinstance(ids, torch.Tensor):
            return [torch.tensor(row, dtype=torch.int64) for row in rows]
        width = max(map(len, rows))
        return torch.tensor(
            [row + [row[-1]] * (width - len(row)) for row in rows], dtype=torch.int64
        ).reshape(-1, width)

    def _generation(
        self,
        prompts: Sequence[torch.Tensor],
        count: int,
        sampling: Sampling,
        ends: Sequence[int],
        spec: str | None,
        adapter: str | Sequence[str | None] | None,
    ) -> Coming:
        """What computes and draws tokens behind these prompts."""
        check_prompts(prompts, count, self.context, int(self.config.vocab_size))
        adapters = adapter_numbers(self.adapters, adapter, len(prompts))
        if self.session.backend.captures and spec is None and not self.adapters:
            steps = self._steps(prompts, count, Sampler(sampling, prompts))
            return Captured(steps, len(prompts), ends)
        longest = max(map(len, prompts)) + count
        guessers = [None if spec is None else self.guesser(spec, longest) for _ in prompts]
        return Generation(
            self.session,
            prompts,
            sampling,
            count,
            ends,
            guessers,
            adapters,
            bool(self.adapters),
            self.stored_as,
            self.phases,
            self.ranks,
        )

    def _steps(self, prompts: Sequence[torch.Tensor], count: int, sampler: Sampler) -> Iterator[torch.Tensor]:
        """Yield the next token of every sequence, int64 [batch], `count` times."""
        with self._stepping(len(prompts), max(map(len, prompts)) + count) as stepping:
            yield from self._steps_in(stepping, prompts, count, sampler)

    @contextmanager
    def _stepping(self, batch: int, length: int) -> Iterator[Stepping]:
        """An empty cache for sequences of so many tokens, and steps over it.

        On a GPU it is that of the generation before, if that is over and it will do: steps are captured for the memory of one cache.
        """
        if not self.session.backend.captures:
            yield Stepping(self.session.make_cache(batch=batch, max_seq=length, stored_as=self.stored_as))
            return
        spare, self._spare = self._spare, None
        if spare is None or spare.cache.batch != batch or spare.cache.max_seq < length:
            spare = None  # its memory may be needed for the next one
            room = min(-(-length // SPARE_TOKENS) * SPARE_TOKENS, self.context)
            spare = Stepping(self.session.make_cache(batch=batch, max_seq=room, stored_as=self.stored_as))
        spare.cache.reset()
        try:
            yield spare
        finally:
            self._spare = spare

    def _steps_in(
        self, stepping: Stepping, prompts: Sequence[torch.Tensor], count: int, sampler: Sampler
    ) -> Iterator[torch.Tensor]:
        self.phases.start()
        cache, sampler = stepping.cache, stepping.sampler(sampler)
        logits = stepping.begin(prompts, self.session["prefill"], self.session.device)
        token = self._drawn(sampler, logits)
        step = stepping.step(sampler, self.session["decode"], self._drawn)
        phase, tokens = "prefill", sum(map(len, prompts))
        for left in reversed(range(count)):
            # A device that draws by itself begins the next step before anybody has seen this token.
            here = fetching(token)
            following = step(token[:, None], cache) if left and sampler.on_kernel else None
            read = here()
            self.phases.end(phase, tokens)
            yield read
            self.phases.start()
            phase, tokens = "decode", len(prompts)
            if left:
                token = step(token[:, None], cache) if following is None else following

    def _drawn(self, sampler: Sampler, logits: torch.Tensor) -> torch.Tensor:
        """The next token of every sequence, by a kernel of the artefact's if it has it."""
        with self.session.backend.launching(self.session.kernels):
            token = sampler(logits)
        return token if self.ranks is ALONE else self.ranks.from_first(token)


def _from_artefact(folder: Path, device: str, kv_quant: str | None, given: Mapping[str, Any]) -> LLM:
    phases, ranks = Timings(), given["ranks"] or ALONE
    with ranks.together():
        files = opened(folder, given)
    text = text_of(files)
    phases.end("read")
    session = session_on(files, device, ranks)
    phases.end("load")
    llm = LLM(session, text, text, folder, phases, kv_quant, files.home)
    llm.ranks = ranks
    return llm
