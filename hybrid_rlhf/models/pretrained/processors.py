"""The processor of a model's images, and the files of processors.

`ImageProcessor` is the part of a processor of transformers that reads images: the text that takes an image's place, and
the arguments of the model. It is built without the part for videos, which needs torchvision, and computes pixels with
Pillow, so that all machines read the same ones.

The files are copied unchanged from the model that was loaded into the one that is saved: a processor of transformers
that reads and writes them can lose settings.
"""

from __future__ import annotations

import copy
import hashlib
import json
import zlib
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers
from torch import Tensor
from transformers import AutoImageProcessor, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
from transformers.utils import (
    FEATURE_EXTRACTOR_NAME,
    PROCESSOR_NAME,
    VIDEO_PROCESSOR_NAME,
    cached_file,
)

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.models.families import unread_weights
from hybrid_rlhf.models.families.vision import VISION_FAMILIES, banned_ids, image_token_id, images_refused
from hybrid_rlhf.models.pretrained.folders import load_config, reading
from hybrid_rlhf.models.pretrained.sources import quiet_transformers
from hybrid_rlhf.models.vision import RowImage

if TYPE_CHECKING:
    from PIL import Image

PROCESSOR_FILES = (PROCESSOR_NAME, FEATURE_EXTRACTOR_NAME, VIDEO_PROCESSOR_NAME)
_KNOWN_SIZES = 2**17
"""Most sizes of images whose text is kept: 15 kB for a megapixel, 0.2 kB compressed."""
_OF_TEXT = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids", "text_replacement_offsets")
"""What a processor returns for the text."""


def keep_processor(lm: PreTrainedModel, path: str) -> None:
    """Keep the processor's files of a resolved model with its weights, for `write_processor`: the folder may be gone
    by then. A model without towers has none."""
    files = {}
    if unread_weights(lm, (name for name, _ in lm.named_parameters())):
        found = {name: cached_file(path, name, _raise_exceptions_for_missing_entries=False) for name in PROCESSOR_FILES}
        files = {name: Path(file).read_bytes() for name, file in found.items() if file is not None}
    vars(lm)["processor_files"] = files


def write_processor(lm: PreTrainedModel, folder: Path) -> None:
    """Write the kept files; none for a model that was not loaded from a folder."""
    for name, content in vars(lm).get("processor_files", {}).items():
        (folder / name).write_bytes(content)


class ImageProcessor:
    """Reads images as a vision-language model does."""

    def __init__(self, processor: Any, config: PreTrainedConfig) -> None:
        """Take a processor of transformers without a part for videos, and the whole config of its model."""
        self._processor = processor
        self._expansions: dict[tuple[int, int], bytes] = {}
        self.placeholder: str = processor.image_token
        """What a chat template writes for one image."""
        self.image_token_id = image_token_id(config)
        """The id that carries a state of the tower."""
        self.banned_ids = banned_ids(config)
        """Ids that may not be sampled."""
        settings = processor.to_dict() | {"image_processor": processor.image_processor.to_dict()}
        written = json.dumps(settings, sort_keys=True, default=str)
        self.key = hashlib.blake2b(written.encode(), digest_size=16).hexdigest()
        """Digest of the settings, on which pixels and texts depend."""

    @staticmethod
    def load(path: str, tokenizer: PreTrainedTokenizerBase, *, trust_remote_code: bool = False) -> ImageProcessor:
        """The processor of a resolved model, with its tokenizer, which is not changed.

        Raises:
            UserError: for a model that reads no images, without Pillow, or for faulty files.
        """
        config = load_config(path, trust_remote_code=trust_remote_code)
        if (refusal := images_refused(config)) is not None:
            raise UserError(refusal)
        if find_spec("PIL") is None:
            raise UserError("images need Pillow, which is not installed: run pip install 'hybrid_rlhf[vision]'")
        name = VISION_FAMILIES[config.model_type].processor or PROCESSOR_MAPPING_NAMES[config.model_type]
        whole = getattr(transformers, name)
        attributes = [part for part in whole.get_attributes() if "video" not in part]
        kind: Any = type(name, (whole,), {"get_attributes": classmethod(lambda cls: attributes)})
        rule = f"transformers cannot load the processor of {path}"
        with quiet_transformers(), reading(rule, "copy the model again with its processor files"):
            images = AutoImageProcessor.from_pretrained(path, backend="pil", trust_remote_code=trust_remote_code)
            settings, _ = kind.get_processor_dict(path)
            settings.pop("video_processor", None)
            processor = kind.from_args_and_dict([images, copy.deepcopy(tokenizer)], settings)
        return ImageProcessor(processor, config)

    def expansion_text(self, width: int, height: int) -> str:
        """The text that takes the placeholder's place for an image of a size, on whose content it does not depend."""
        size = width, height
        packed = self._expansions.get(size)
        if packed is None:
            from PIL import Image

            read = self._read([Image.new("RGB", size)])
            packed = zlib.compress(read["text_replacement_offsets"][0][0]["replacement"].encode())
            if len(self._expansions) >= _KNOWN_SIZES:  # clients of a server choose sizes
                self._expansions.clear()
            self._expansions[size] = packed
        return zlib.decompress(packed).decode()

    def expansion(self, width: int, height: int) -> list[int]:
        """Token ids of that text."""
        return self._processor.tokenizer.encode(self.expansion_text(width, height), add_special_tokens=False)  # type: ignore[no-any-return]

    def pixels(self, images: Sequence[Image.Image]) -> dict[str, Tensor]:
        """The model's arguments for some images, at least one: float32 pixel values, sizes, masks."""
        read = self._read(images)
        return {name: value for name, value in read.items() if name not in _OF_TEXT}

    def tokens(self, width: int, height: int) -> int:
        """Number of image tokens of an image of a size, which carry its states."""
        token = self._processor.tokenizer.convert_ids_to_tokens(self.image_token_id)
        return self.expansion_text(width, height).count(token)

    def row_image(self, image: Image.Image, key: int) -> RowImage:
        """An image for the tower; images with one `key` are equal."""
        return RowImage(partial(dict, self.pixels([image])), self.tokens(*image.size), key)

    def blank(self) -> RowImage:
        """A small image without content (`Images.blank`)."""
        from PIL import Image

        return self.row_image(Image.new("RGB", (32, 32)), key=0)

    def _read(self, images: Sequence[Image.Image]) -> dict[str, Any]:
        """What the processor returns for images, as those of one row."""
        return self._processor(  # type: ignore[no-any-return]
            images=[list(images)],
            text=[self.placeholder * len(images)],
            return_tensors="pt",
            return_text_replacement_offsets=True,
            input_data_format="channels_last",  # which it cannot tell of images of three rows of pixels
        )
