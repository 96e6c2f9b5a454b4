"""Images in the rows of a vision-language model.

The tower of a model turns an image into states that take the places of the embeddings of its image tokens. All distinct
images of a batch pass the tower by one call, and their states are gathered for the rows that have them, so rows share
images as samples of a prompt do, and a packed row needs no pixels of its own. The language model then reads the merged
embeddings as it reads those of text.

Rotary positions are the model's own (`get_rope_index`): three axes in Qwen's and GLM's models. A batch without an image
calls the tower with a blank image of weight 0, if it has one, so that all ranks gather the weights of the tower.

Shapes: B rows, T time, N real tokens of all rows, M tokens that the model computes, n image tokens, H hidden.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.models.families.vision import VISION_FAMILIES, VisionFamily, image_token_id, images_refused
from hybrid_rlhf.models.packing import take
from hybrid_rlhf.models.structure import backbone_of, text_model_of
from hybrid_rlhf.runtime.latest import LatestValues

FEATURE_BYTES = 2**28
"""Maximum bytes of the states that a FeatureCache keeps."""


@dataclass(frozen=True)
class RowImage:
    """An image as its model reads it."""

    load: Callable[[], dict[str, Tensor]]
    """Returns the model's arguments for this image alone, on the host."""
    tokens: int
    """Number of image tokens, which carry its states."""
    key: int
    """Equal for equal images."""


@dataclass(frozen=True)
class Images:
    """Images of the rows of a batch."""

    rows: Sequence[Sequence[RowImage]]
    """Images of each row, in the order of their tokens."""
    blank: RowImage | None = None
    """What the tower computes for a batch without an image; None: nothing.

    Under ZeRO-3 all ranks give one, as they wait for each other in every module.
    """
    cache: FeatureCache | None = None
    """States that the tower has computed before, if its weights never change and are whole on this rank."""

    def __bool__(self) -> bool:
        """True if a row has an image."""
        return any(self.rows)


@dataclass(frozen=True)
class PlacedImages:
    """Images of the tokens that a model computes."""

    arguments: dict[str, Tensor]
    """The model's arguments for the distinct images."""
    states: Tensor
    """[n] index of the state that each image token takes, among those of the distinct images."""
    places: Tensor
    """[n] index of each image token among the M, ascending; empty for a blank image."""
    features: tuple[Tensor, ...] = ()
    """What `ImageEncoder.features` returns for the distinct images; empty: the tower computes it."""


@dataclass(frozen=True)
class EncodedImages:
    """The images of one row, after the tower."""

    places: list[int]
    """Index of each image token in the row, ascending."""
    states: Tensor
    """[n, H], in place of the embeddings of these tokens."""
    deep: tuple[Tensor, ...] = ()
    """[n, H] each: added to the states of these tokens after the first layers (Qwen3-VL)."""
    positions: Tensor | None = None
    """[T, 3] rotary positions on the host; None: the index."""
    spans: tuple[tuple[int, int], ...] = ()
    """First token and end of each run of image tokens that attend to each other in both directions."""


class ImageEncoder:
    """The tower of a model, and where its states go."""

    def __init__(
        self, lm: PreTrainedModel, *, device: torch.device | None = None, cache: FeatureCache | None = None
    ) -> None:
        """Take a causal LM or classifier.

        Args:
            lm: the model.
            device: of its tower; None: that of its first weight.
            cache: as of `Images`, for `encode`.

        Raises:
            UserError: for a model that reads no images.
        """
        if (refusal := images_refused(lm.config)) is not None:
            raise UserError(refusal)
        self._lm = lm
        self.device = device or lm.device
        self._cache = cache
        self.family: VisionFamily = VISION_FAMILIES[lm.config.model_type]
        self.token_id = image_token_id(lm.config)

    def encode(self, images: Sequence[RowImage], input_ids: Sequence[int]) -> EncodedImages:
        """The images of one row of tokens, of which there is at least one; the tower computes equal images once."""
        ids = torch.tensor([input_ids])
        rows = ImageRows.of(self, ids, torch.ones_like(ids, dtype=torch.bool), Images([images], cache=self._cache))
        placed = rows.placed(None, len(input_ids), self.dtype)
        assert placed is not None, "a row without an image"
        device = self.device
        states, *deep = (part.to(device) for part in placed.features or self.computed(placed.arguments))
        places: list[int] = placed.places.tolist()
        inside = set(places if self.family.has_two_way_images else ())
        starts = [place for place in sorted(inside) if place - 1 not in inside]
        ends = [place + 1 for place in sorted(inside) if place + 1 not in inside]
        index = placed.states.to(device)
        return EncodedImages(
            places,
            take(states, index),
            tuple(take(part, index) for part in deep),
            rows.positions,
            tuple(zip(starts, ends, strict=True)),
        )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of pixels."""
        return self._lm.dtype

    def computed(self, arguments: dict[str, Tensor]) -> list[Tensor]:
        """`features` of arguments on the host."""
        return self.features({name: value.to(self.device) for name, value in arguments.items()})

    @functools.cached_property
    def _learns(self) -> bool:
        """True if the tower is trained."""
        of_text = {id(weight) for weight in text_model_of(self._lm).parameters()}
        return any(weight.requires_grad and id(weight) not in of_text for weight in backbone_of(self._lm).parameters())

    def features(self, arguments: dict[str, Tensor]) -> list[Tensor]:
        """States [n, H] of the tokens of images, then those that are added after each of the first layers."""
        # also where checkpointing would store the states of a frozen tower
        with torch.set_grad_enabled(torch.is_grad_enabled() and self._learns):
            output: Any = backbone_of(self._lm).get_image_features(**arguments, return_dict=True)
        deep = getattr(output, "deepstack_features", None) or ()
        return [_joined(part) for part in (output.pooler_output, *deep)]

    def positions(
        self, input_ids: Tensor, images: Sequence[RowImage], cache: FeatureCache | None = None
    ) -> Tensor | None:
        """Rotary positions [T, 3] of a row of tokens [T]; None for models whose positions have one axis."""
        backbone: Any = backbone_of(self._lm)
        if not hasattr(backbone, "get_rope_index"):
            return None
        if not images:
            return torch.arange(len(input_ids))[:, None].expand(-1, 3)
        grid = torch.cat(
            [image.load()["image_grid_thw"] if cache is None else cache.grid(self, image) for image in images]
        )
        marks = (input_ids == self.token_id).int()
        found: Tensor = backbone.get_rope_index(input_ids[None], mm_token_type_ids=marks[None], image_grid_thw=grid)[0]
        return found[:, 0].t()

    def joined(self, images: Sequence[RowImage], dtype: torch.dtype) -> dict[str, Tensor]:
        """The model's arguments for several images, with pixels in a dtype."""
        of_images = [image.load() for image in images]
        joined = {
            name: torch.cat([arguments[name] for arguments in of_images], dim=self.family.joined_dim)
            for name in of_images[0]
        }
        return {name: value.to(dtype) if value.is_floating_point() else value for name, value in joined.items()}


_Computed = tuple[list[Tensor], dict[str, Tensor]]
"""What the tower computes for an image, and the arguments that are no pixels."""


class FeatureCache:
    """States of images after a tower that does not change, on the host: it computes each image once while there is
    room. Images are computed one by one, so that their states do not depend on the batch that is first to read them.
    """

    def __init__(self, most_bytes: int = FEATURE_BYTES) -> None:
        """Begin empty; `most_bytes`: maximum bytes of the states that are kept."""
        self._kept = LatestValues[_Computed](most_bytes, lambda computed: computed[0])

    def of(self, encoder: ImageEncoder, images: Sequence[RowImage]) -> tuple[Tensor, ...]:
        """What `ImageEncoder.features` returns for images, on the host."""
        return tuple(torch.cat(parts) for parts in zip(*(self._of(encoder, image)[0] for image in images), strict=True))

    def grid(self, encoder: ImageEncoder, image: RowImage) -> Tensor:
        """The argument of the model that positions depend on, without a load of the pixels."""
        return self._of(encoder, image)[1]["image_grid_thw"]

    def _of(self, encoder: ImageEncoder, image: RowImage) -> _Computed:
        def compute() -> _Computed:
            arguments = encoder.joined([image], encoder.dtype)
            # a training forward reads them too, which it cannot if they are inference tensors
            with torch.inference_mode(mode=False), torch.no_grad():
                features = [part.cpu() for part in encoder.computed(arguments)]
            return features, {name: value for name, value in arguments.items() if not value.is_floating_point()}

        return self._kept.get(image.key, compute)


@dataclass(frozen=True)
class ImageRows:
    """Which state each token of rows takes, before the rows are packed."""

    encoder: ImageEncoder
    distinct: list[RowImage]
    """Different images, in the order of their first tokens."""
    sources: Tensor
    """[N] index of the state of each real token, -1 for a token of text."""
    positions: Tensor | None
    """[N, 3] rotary positions; None: the index."""
    cache: FeatureCache | None
    """That of `Images`."""

    @staticmethod
    def of(encoder: ImageEncoder, input_ids: Tensor, real: Tensor, images: Images) -> ImageRows:
        """Rows [B, T], true in `real` on their tokens, with their images.

        Raises:
            ValueError: when a row has image tokens without an image, or the reverse.
        """
        distinct: dict[int, RowImage] = {}
        firsts: dict[int, int] = {}
        total = 0
        sources, positions = [], []
        for ids, mask, of_row in zip(input_ids, real, images.rows, strict=True):
            row = ids[mask]
            for image in of_row:
                if image.key not in distinct:
                    distinct[image.key], firsts[image.key] = image, total
                    total += image.tokens
            states = [torch.arange(image.tokens) + firsts[image.key] for image in of_row]
            marks = row == encoder.token_id
            wanted = sum(image.tokens for image in of_row)
            if int(marks.sum()) != wanted:
                raise ValueError(f"a row has {int(marks.sum())} image tokens, its images have {wanted}")
            source = torch.full_like(row, -1)
            if states:
                source[marks] = torch.cat(states)
            sources.append(source)
            positions.append(encoder.positions(row, of_row, images.cache))
        axes = [position for position in positions if position is not None]
        if not distinct and images.blank is not None:
            distinct[images.blank.key] = images.blank
        return ImageRows(
            encoder, [*distinct.values()], torch.cat(sources), torch.cat(axes) if axes else None, images.cache
        )

    @property
    def are_causal(self) -> bool:
        """False if image tokens attend to later ones."""
        return not (self.encoder.family.has_two_way_images and bool((self.sources >= 0).any()))

    def keys(self, input_ids: Tensor, real: Tensor) -> Tensor:
        """Ids [B, T] that differ where states do: image tokens of different images are different tokens."""
        keys = input_ids.clone()
        keys[real] = torch.where(self.sources < 0, keys[real], -1 - self.sources)
        return keys

    def placed(self, order: Tensor | None, tokens: int, dtype: torch.dtype) -> PlacedImages | None:
        """The images among the tokens that a model computes; None if there is no image.

        Args:
            order: [N] index of each real token among them; None: the same order.
            tokens: M.
            dtype: of the pixels.
        """
        if not self.distinct:
            return None
        states = self._in_order(self.sources, order, tokens, -1)
        places = (states >= 0).nonzero().squeeze(1)
        if self.cache is not None:
            return PlacedImages({}, states[places], places, self.cache.of(self.encoder, self.distinct))
        return PlacedImages(self.encoder.joined(self.distinct, dtype), states[places], places)

    def position_ids(self, index: Tensor, order: Tensor | None) -> Tensor:
        """Positions of the tokens that a model computes: with three axes [4, B, T], whose first is the index, which
        separates rows for flash attention.

        Args:
            index: [B, T], the index of each token in its row.
            order: as in `placed`.
        """
        if self.positions is None:
            return index
        axes = self._in_order(self.positions, order, index.numel(), 0)
        return torch.cat([index[None], axes.t().unflatten(1, index.shape)])

    @staticmethod
    def _in_order(values: Tensor, order: Tensor | None, tokens: int, padding: int) -> Tensor:
        if order is None:
            return values
        return values.new_full((tokens, *values.shape[1:]), padding).index_copy_(0, order, values)


def hidden_with_images(lm: PreTrainedModel, arguments: dict[str, Any], images: PlacedImages, **options: Any) -> Any:
    """What the backbone of a model returns for tokens of which some take states of images.

    Args:
        lm: causal LM or classifier.
        arguments: arguments of the backbone for the tokens, of which `input_ids` are [B, T].
        images: the images, on the same device.
        options: further arguments of the backbone.
    """
    encoder = ImageEncoder(lm)
    arguments = dict(arguments)
    ids: Tensor = arguments.pop("input_ids")
    states, *deep = images.features or encoder.features(images.arguments)
    # some models have no embedding of image tokens
    embeds: Tensor = lm.get_input_embeddings()(ids.flatten().index_fill(0, images.places, 0))  # type: ignore[misc]
    if len(images.places):
        embeds = embeds.index_copy(0, images.places, take(states, images.states).to(embeds.dtype))
        if deep:
            marks = torch.zeros_like(ids, dtype=torch.bool).flatten().index_fill_(0, images.places, True)
            options["visual_pos_masks"] = marks.view(ids.shape)
            options["deepstack_visual_embeds"] = [take(part, images.states) for part in deep]
    else:
        for part in (states, *deep):
            embeds = embeds + (part * 0).sum().to(embeds.dtype)
    arguments["inputs_embeds"] = embeds.view(*ids.shape, -1)
    if not encoder.family.has_two_way_images:
        return text_model_of(lm)(**arguments, **options)
    if len(images.places):  # the backbone makes a mask from the marks
        marks = torch.zeros_like(ids).flatten().index_fill_(0, images.places, 1)
        options["token_type_ids"] = marks.view(ids.shape)
    return backbone_of(lm)(**arguments, **options)  # also without, as ZeRO-3 compares the modules of all ranks


def _joined(parts: Tensor | Sequence[Tensor]) -> Tensor:
    """States [n, H] of images that a model returns as a tensor, or for each image."""
    whole = parts if isinstance(parts, Tensor) else torch.cat(list(parts))
    return whole.flatten(0, -2)
