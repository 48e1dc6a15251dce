"""Image processors of transformers: images to arrays of one size, and these to batches.

A processor resizes and crops images of 8 bits, and then rescales and normalizes each value. The first part is done once
and stored, a quarter of the memory; the second is a table of 256 numbers a channel, so batches are the processor's own
to the bit. If that does not hold for a processor, its finished 32-bit numbers are stored.

N images, C channels, H and W pixels of a processed image.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from training.batching.batches import PadToLongest
from training.data.images import open_image
from training.problems import UserError, on_one_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHANNELS = 3
_AS_STORED = {"do_rescale": False, "do_normalize": False}
_ONLY_VALUES = {"do_resize": False, "do_center_crop": False, "do_pad": False, "input_data_format": "channels_first"}


class ImagePreprocessor:
    """The image processor of a folder, in the place of a tokenizer: it is transformers' of PIL, so its values are the
    same on machines with and without torchvision.

    Raises UserError if it cannot be read, or gives images of several sizes or other channels than RGB.
    """

    max_length = 1
    """Images count as one token each."""
    special_texts: Sequence[str] = ()
    pad_token_id = unk_token_id = unk = eos = chat = None

    def __init__(self, folder: Path) -> None:
        from transformers import AutoImageProcessor

        self._where = str(folder / "preprocessor_config.json")
        try:
            self.processor: Any = AutoImageProcessor.from_pretrained(
                folder, backend="pil", local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # classes fail in many ways on files that they do not expect
            raise self._error(f"AutoImageProcessor cannot load it: {on_one_line(str(error))[:300]}") from error
        draw = np.random.default_rng(0)
        probes = [Image.fromarray(draw.integers(0, 256, (*size, CHANNELS), np.uint8)) for size in ((61, 97), (97, 61))]
        whole = [self._process([probe]) for probe in probes]
        self.shape: tuple[int, int, int] = whole[0].shape[1:]  # (C, H, W)
        if whole[1].shape[1:] != self.shape or self.shape[0] != CHANNELS:
            sizes = " and ".join(" × ".join(map(str, one.shape[1:])) for one in whole)  # noqa: RUF001
            raise self._error(f"it makes {sizes} of two images, and a batch needs RGB of one size")
        self._table: npt.NDArray[np.float32] | None = self._make_table(probes, whole)

    def _make_table(self, probes: list[Image.Image], whole: list[npt.NDArray[Any]]) -> npt.NDArray[np.float32] | None:
        """(C, 256) the finished number of each value; None if these are not all that follows the stored form."""
        every = np.broadcast_to(np.arange(256, dtype=np.uint8).reshape(16, 16), (CHANNELS, 16, 16))
        try:
            table = self._process([every], **_ONLY_VALUES).reshape(CHANNELS, 256)
            for probe, finished in zip(probes, whole, strict=True):
                stored = self._process([probe], **_AS_STORED)
                if stored.dtype != np.uint8 or not np.array_equal(_look_up(table, stored), finished):
                    return None
        except (ValueError, TypeError):  # of processors with further steps
            return None
        return table

    def _process(self, images: Sequence[Any], **options: Any) -> npt.NDArray[Any]:
        return np.stack(self.processor(images=list(images), **options)["pixel_values"])

    @property
    def dtype(self) -> type[np.generic]:
        """Of stored images."""
        return np.float32 if self._table is None else np.uint8

    def prepare(self, images: Sequence[str]) -> npt.NDArray[Any]:
        """(N, C·H·W) of `dtype`: images as rows store them, as they are kept for training."""
        options = {} if self._table is None else _AS_STORED
        found = [self._process([open_image(image)], **options).ravel() for image in images]
        return np.stack(found).astype(self.dtype) if found else np.empty((0, int(np.prod(self.shape))), self.dtype)

    def finish(self, stored: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """(N, C, H, W) the model's inputs, of prepared images (N, C·H·W)."""
        images = stored.reshape(-1, *self.shape)
        return images.astype(np.float32) if self._table is None else _look_up(self._table, images)

    def require_fitting(self, model: PreTrainedModel) -> None:
        """Raises UserError for a model that takes images of another size or other channels."""
        config = model.config
        channels, size = getattr(config, "num_channels", CHANNELS), getattr(config, "image_size", None)
        if channels != CHANNELS:
            message = f"{type(model).__name__} takes images of {channels} channels, and images are read in RGB: choose "
            raise UserError.of("model", "model.path", f"{message}a model of 3.")
        wanted = (size, size) if isinstance(size, int) else tuple(size) if size else self.shape[1:]
        if wanted != self.shape[1:]:
            made, takes = (f"{height} × {width}" for height, width in (self.shape[1:], wanted))  # noqa: RUF001
            message = f"it makes images of {made}, and {type(model).__name__} takes those of {takes}"
            raise self._error(message)

    def _error(self, message: str) -> UserError:
        return UserError.of("model", self._where, f"{message}: correct it, or choose another model.")


def _look_up(table: npt.NDArray[np.float32], images: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """(N, C, H, W) the numbers in the table (C, 256) of values (N, C, H, W)."""
    return np.stack([table[channel][images[:, channel]] for channel in range(CHANNELS)], axis=1)


class StackImages(PadToLongest):
    """Features of B images to pixel_values (B, C, H, W) float32 and, if they have any, the labels of PadToLongest."""

    def __init__(self, preprocessor: Any) -> None:
        self._preprocessor: ImagePreprocessor = preprocessor

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        stored = np.stack([row["pixel_values"] for row in rows])
        batch = {"pixel_values": torch.from_numpy(self._preprocessor.finish(stored))}
        if (labels := self.labels(rows, width=1)) is not None:
            batch["labels"] = torch.from_numpy(labels)
        return batch
