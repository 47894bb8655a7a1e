# SPDX-License-Identifier: Apache-2.0
"""Sounds: WAV files read, and spectrograms made by the feature extractor that a folder names. Needs transformers, which the extra `transformers` installs."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import Any

import torch

from nnfront.errors import LoadError, RunError
from nnfront.packages import transformers

_WIDTHS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def read_wav(path: str | Path) -> tuple[torch.Tensor, int]:
    """Return a WAV file's samples, float32 [samples] between -1 and 1, the mean of its channels, and how many there are a second.

    Raises LoadError for a file that is none, or of samples in 24 bits or floats.
    """
    try:
        with wave.open(str(path), "rb") as file:
            width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
            data = bytearray(file.readframes(file.getnframes()))
    except (OSError, EOFError, wave.Error) as error:
        raise LoadError(f"{path} is not a WAV file", details=[str(error)]) from None
    if width not in _WIDTHS:
        raise LoadError(f"{path} has samples of {8 * width} bits, expected 8, 16 or 32")
    samples = torch.frombuffer(data, dtype=_WIDTHS[width]).double() if data else torch.zeros(0).double()
    samples = (samples - 128) / 128 if width == 1 else samples / 2 ** (8 * width - 1)
    return samples.reshape(-1, channels).mean(1).float(), rate


class Spectrograms:
    """The feature extractor of a folder."""

    def __init__(self, folder: Path) -> None:
        """Raises LoadError without transformers, and for a folder that names no extractor."""
        try:
            self._extractor: Any = transformers().AutoFeatureExtractor.from_pretrained(
                folder, local_files_only=True
            )
        except (OSError, ValueError) as error:
            raise LoadError(
                f"{folder} says nothing of how sounds become spectrograms",
                details=[next(iter(str(error).splitlines()), "")],
                help="add the model's preprocessor_config.json to the folder",
            ) from None

    def __call__(self, sound: torch.Tensor, rate: int) -> torch.Tensor:
        """The log mel spectrogram, float32 [bins, frames], of a sound [samples], padded to the length that the model hears.

        Raises RunError for what is no sound, a longer one, and another rate than the model's.
        """
        extractor = self._extractor
        if not isinstance(sound, torch.Tensor) or sound.ndim != 1 or not sound.is_floating_point():
            raise RunError("the sound is not a float tensor [samples]")
        if rate != extractor.sampling_rate:
            raise RunError(
                f"the sound has {rate} samples a second, the model hears {extractor.sampling_rate}",
                help="resample it",
            )
        if len(sound) > extractor.n_samples:
            raise RunError(
                f"the sound has {len(sound) / rate:.1f} seconds, the model hears {extractor.n_samples / rate:.1f}",
                help="give it in parts",
            )
        made = extractor(sound.float().cpu().numpy(), sampling_rate=rate, return_tensors="pt")
        features: torch.Tensor = made.input_features[0]
        return features
