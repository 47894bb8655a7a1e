# SPDX-License-Identifier: Apache-2.0
"""`VisionLanguageModel`: a language model whose prompts may hold images. Needs transformers and pillow, which the extra `images` installs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from nnfront.errors import LoadError, RunError
from nnfront.llm.folder_files import CONFIG, read_json
from nnfront.llm.language_model import LLM
from nnfront.llm.methods import WITH_IMAGES, require_methods
from nnfront.llm.prompts import check_prompts
from nnfront.llm.sampling import Sampler, until_end
from nnfront.llm.tokenizer import until
from nnfront.lower import TensorType
from nnfront.packages import package, transformers

IMAGE_TOKENS = ("boi_token_index", "boi_token_id", "image_token_index", "image_token_id")
"""What config.json calls the tokens that stand for images, or begin them."""


class VisionLanguageModel:
    """Continues texts with images. Make one with `VisionLanguageModel.load`. `llm` is the language model, which continues texts alone."""

    def __init__(self, llm: LLM) -> None:
        """Raises LoadError for a language model without the methods that images need."""
        help, what = "nnfront.LLM.load(DIR) loads it", "language model that sees images"
        require_methods(llm.path, what, WITH_IMAGES, llm.session.methods, help)
        self.llm = llm

    @staticmethod
    def load(
        path: str | Path, device: str = "cpu", dtype: str | None = None, **options: Any
    ) -> VisionLanguageModel:
        """Load a Hugging Face folder; the arguments are those of `LLM.load`, which says what it raises."""
        return VisionLanguageModel(LLM.load(path, device, dtype, **options))

    @cached_property
    def processor(self) -> Any:
        """What the folder prepares images and prompts by. Raises LoadError if it does not say, and without the packages."""
        package = transformers()
        try:
            return package.AutoProcessor.from_pretrained(self.llm.path, local_files_only=True)
        except (ImportError, OSError, ValueError) as error:
            raise LoadError(
                f"{self.llm.path} does not say how images and prompts are prepared, or a package for it is missing",
                details=[next(filter(None, str(error).splitlines()), "")],
                help="add the model's processor_config.json and tokenizer to the folder; pip install 'nnfront[images]'",
            ) from error

    def prepared(self, prompt: str, images: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """A prompt in which the processor's sign stands for each image, and the images, as files or as PIL has them: tokens int64 [1, seq], and pixels [images, ...].

        Raises RunError for a file that is no image, and where there are not as many images as signs.
        """
        pillow = package("PIL.Image", "images", "pillow")
        try:
            opened = [pillow.open(x).convert("RGB") if isinstance(x, str | Path) else x for x in images]
        except OSError as error:  # an image of no known format is one
            raise RunError("an image cannot be read", details=[str(error)]) from None
        sign = self.processor.boi_token
        if prompt.count(sign) != len(opened):
            raise RunError(
                f"the prompt has {prompt.count(sign)} places for images, and there are {len(opened)} images",
                help=f"write {sign} where an image stands",
            )
        made = self.processor(text=prompt, images=[opened], return_tensors="pt")
        return made["input_ids"], made["pixel_values"]

    def generate(
        self,
        prompt: str,
        images: Sequence[Any],
        max_new_tokens: int = 128,
        *,
        stop: str | Sequence[str] | None = None,
        stream: bool = False,
        **sampling: Any,
    ) -> Any:
        """Continue a prompt with images, as `prepared` takes them: the new text, or with `stream` an iterator over its pieces.

        Without images it is `LLM.generate`. Ends after max_new_tokens, at the model's end token, or before the first of the `stop` strings. sampling: values of `Sampling`; what is not
        given is as generation_config.json says. Raises RunError for what does not fit, and for a prompt that has places for other images than there are.
        """
        if not images:
            self._check_is_text(prompt)
            return self.llm.generate(prompt, max_new_tokens, stop=stop, stream=stream, **sampling)
        ids, pixels = self.prepared(prompt, images)
        steps = self.steps(ids, pixels, max_new_tokens, Sampler(self.llm.sampling.changed(sampling), [*ids]))
        pieces = until(self.llm.tokenizer.stream(until_end(steps, self.llm.eos_token_ids)), stop)
        return pieces if stream else "".join(pieces)

    def _check_is_text(self, prompt: str) -> None:
        """Raise RunError for a prompt with the tokens that stand for images: `prefill` would take them for words."""
        said = read_json(self.llm.files, CONFIG)
        signs = {said.get(name) for name in IMAGE_TOKENS}
        if count := sum(token in signs for token in self.llm.tokenizer.encode(prompt)):
            raise RunError(
                f"the prompt has {count} places for images, and there are 0 images",
                help="give an image for each: --image FILE on the command line",
            )

    def steps(
        self, ids: torch.Tensor, pixels: torch.Tensor, count: int, sampler: Sampler
    ) -> Iterator[torch.Tensor]:
        """Yield the next token of every text, int64 [batch], `count` times: of texts int64 [batch, seq] whose images are in order. Raises RunError for what does not fit."""
        session, phases = self.llm.session, self.llm.phases
        batch, seq = ids.shape
        check_prompts([*ids], count, self.llm.context, int(self.llm.config.vocab_size))
        phases.start()
        argument = session["image_features"].program.arguments[0].type
        assert isinstance(argument, TensorType)
        pixels = pixels.to(session.device, getattr(torch, argument.dtype))
        features = session["image_features"](pixels)
        phases.end("images", len(pixels))
        cache = session.make_cache(batch=batch, max_seq=seq + count, stored_as=self.llm.stored_as)
        logits = session["prefill_with_images"](ids.to(session.device), features, cache)[:, -1]
        phases.end("prefill", ids.numel())
        for i in range(count):
            token = sampler(logits)
            yield token
            if i + 1 < count:
                phases.start()
                logits = session["decode"](token[:, None], cache)[:, -1]
                phases.end("decode", batch)
