"""Image files: each kind gives the right pixels or an error in one line, within limits of memory and time."""

from __future__ import annotations

import base64
import io
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageSequence

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.images.reading import checked_size, open_image, size_within
from hybrid_rlhf.data.images.references import ImageReference, read_reference, stored_images, tokenised_images
from tests.support.errors import refused, user_error
from tests.support.vision import picture

PICTURE = picture(1, (60, 50))
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


def written(image: Image.Image, format: str = "PNG", **settings: Any) -> bytes:
    """The bytes of a file."""
    stored = io.BytesIO()
    image.save(stored, format, **settings)
    return stored.getvalue()


def claimed(width: int, height: int) -> bytes:
    """65 bytes of a PNG file that claims a size."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def reference(source: Any, folder: Path | None = None, max_pixels: int = 2**20) -> ImageReference:
    return read_reference(source, "image 1", folder=folder, max_pixels=max_pixels)


def rgb(array: np.ndarray) -> np.ndarray:
    """Shades of grey as RGB."""
    return np.repeat(array[:, :, None], 3, 2).astype(np.uint8)


@pytest.mark.parametrize("format", FORMATS)
def test_part_of_a_file_is_refused_or_has_all_pixels(format: str) -> None:
    whole = written(PICTURE, format)
    pixels = np.asarray(open_image(whole, "x"))
    for length in {*range(0, len(whole), max(1, len(whole) // 50)), *range(len(whole) - 30, len(whole))}:
        try:
            assert np.array_equal(np.asarray(open_image(whole[:length], "x")), pixels), length
            assert checked_size(whole[:length], "x") == PICTURE.size
        except UserError as error:
            assert "x is none" in str(error) or "x is damaged or cut off" in str(error)
            assert refused(checked_size, whole[:length], "x") == str(error), "without its pixels, too"


def shades() -> np.ndarray:
    return (np.arange(16 * 16).reshape(16, 16) * 257).astype(np.uint16)


def palette() -> Image.Image:
    """Two colours, of which the first is transparent, and a pixel of the second."""
    image = Image.new("P", (16, 16), 0)
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.putpixel((3, 2), 1)
    return image


WHITE = np.full((16, 16, 3), 255, np.uint8)
BLUE = WHITE.copy()
BLUE[2, 3] = (0, 0, 255)
HALF = np.full((16, 16, 3), (255, 127, 127), np.uint8)
INK = np.full((16, 16, 3), (0, 255, 255), np.uint8)
PIXELS: dict[str, tuple[Callable[[], bytes], np.ndarray]] = {
    "16 bit": (lambda: written(Image.fromarray(shades())), rgb(shades() >> 8)),
    "grey": (lambda: written(Image.fromarray((shades() >> 8).astype(np.uint8))), rgb(shades() >> 8)),
    "1 bit": (lambda: written(Image.new("1", (16, 16), 1)), WHITE),
    "palette": (lambda: written(palette(), transparency=0), BLUE),
    "palette of a GIF": (lambda: written(palette(), "GIF", transparency=0), BLUE),
    "half transparent": (lambda: written(Image.new("RGBA", (16, 16), (255, 0, 0, 128))), HALF),
    "CMYK": (lambda: written(Image.new("CMYK", (16, 16), (255, 0, 0, 0)), "JPEG", quality=100), INK),
    "animated GIF": (
        lambda: written(Image.fromarray(BLUE), "GIF", save_all=True, append_images=[Image.fromarray(INK)]),
        BLUE,
    ),
    "animated WebP": (
        lambda: written(
            Image.fromarray(BLUE), "WEBP", save_all=True, lossless=True, append_images=[Image.fromarray(INK)]
        ),
        BLUE,
    ),
    "JPEG with the name of a PNG": (lambda: written(Image.new("RGB", (16, 16), "white"), "JPEG"), WHITE),
}


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.float32])
def test_shades_of_an_array_keep_their_values(dtype: Any) -> None:
    """Those of 32 bits, which environments make of numbers, became black as the upper bits of 16."""
    values = np.arange(256).reshape(16, 16)
    found = open_image(reference(Image.fromarray(values.astype(dtype))).content, "x")
    assert np.array_equal(np.asarray(found), rgb(values))


@pytest.mark.parametrize("name", PIXELS)
def test_pixels(name: str) -> None:
    make, pixels = PIXELS[name]
    found = np.asarray(open_image(make(), "x.png")).astype(int)
    assert checked_size(make(), "x.png") == (16, 16)
    assert np.abs(found - pixels).max() <= (1 if name in ("half transparent", "CMYK") else 0)


def test_an_animated_image_has_frames() -> None:
    """The files of `test_pixels` are not stills."""
    for name in ("animated GIF", "animated WebP"):
        assert len(list(ImageSequence.Iterator(Image.open(io.BytesIO(PIXELS[name][0]()))))) == 2


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_turned_images_are_upright(orientation: int, format: str) -> None:
    """The EXIF tag says where the stored first row and column are."""
    turns = {
        1: None,
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,  # the inverse of the turn that makes it upright
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    turn = turns[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = PICTURE if turn is None else PICTURE.transpose(turn)
    content = written(stored, format, exif=exif, **({"lossless": True} if format == "WEBP" else {"quality": 100}))
    found = open_image(content, "x")
    assert found.size == checked_size(content, "x") == PICTURE.size
    error = np.abs(np.asarray(found).astype(int) - np.asarray(PICTURE).astype(int))
    assert error.mean() < 4 if format == "JPEG" else not error.any(), "JPEG halves the resolution of colours"


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (claimed(12000, 12000), "at most 67,108,864 pixels, x has 12000x12000: scale it down"),
        (claimed(30000, 30000), "at most 67,108,864 pixels, x has more: scale it down"),
        (claimed(1, 10000), "at most 200 times the shorter, x has 1x10000"),
        (claimed(0, 10), "x is none|is damaged"),
        (written(PICTURE, "EPS"), "must be a complete PNG, JPEG, WebP, GIF or BMP file, x is none"),
        (written(PICTURE, "TIFF"), "x is none"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "x is none"),
        (b"", "x is none"),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * (64 * 2**20), "at most 67,108,864 bytes, x has 67,108,872"),
    ],
    ids=["12000", "30000", "thin", "empty side", "eps", "tiff", "svg", "empty", "long"],
)
def test_refused_files(content: bytes, rule: str) -> None:
    assert len(claimed(12000, 12000)) == 65
    with user_error(rule):
        open_image(content, "x")


def test_a_path_stays_in_the_folder_of_its_rows(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    (folder / "inner").mkdir(parents=True)
    content = written(PICTURE)
    for file in (folder / "a.png", folder / "inner" / "b.png", tmp_path / "outside.png"):
        file.write_bytes(content)
    (folder / "link.png").symlink_to(folder / "a.png")
    (folder / "linked").symlink_to(tmp_path)
    (folder / "round.png").symlink_to(folder / "round.png")
    os.mkfifo(folder / "pipe.png")
    shown = np.asarray(PICTURE)
    for path in ("a.png", "inner/b.png", "inner/../a.png", str(folder / "a.png"), {"bytes": None, "path": "a.png"}):
        assert np.array_equal(np.asarray(reference(path, folder).image()), shown)
    linked = tmp_path / "data"
    linked.symlink_to(folder)  # the user's choice, not a row's
    assert reference("a.png", linked).path == str(folder / "a.png")
    rules = {
        "../outside.png": "is outside of it",
        str(tmp_path / "outside.png"): "is outside of it",
        "link.png": "is behind a symbolic link",
        "linked/outside.png": "is behind a symbolic link",
        "round.png": "round.png (cannot be read|does not exist)",
        "pipe.png": "is a pipe or a device",
        "inner": "is a folder",
        "": "is a folder",
        "c.png": "c.png does not exist",
        "a\0.png": "download it first",
        "https://example.com/a.png": "or a data URI, got 'https://example.com/a.png': download it first",
        "file:///etc/passwd": "or a data URI, got 'file:///etc/passwd'",
    }
    for path, rule in rules.items():
        with user_error(rule):
            reference(path, folder)
    with user_error("in rows without a file"):
        reference("a.png")


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ("data:image/png;base64," + "A" * 100_000_000, "at most 67,108,864 bytes, image 1 has 75,000,000"),
        ("data:image/png;base64,A", "must be base64, that of image 1 is not"),
        ("data:image/png;base64,\N{SNOWMAN}", "must be base64"),
        ("data:image/png,abc", "must begin as data:image/png;base64"),
        ("data:" + "x" * 1000, "must begin as data:image/png;base64, got 'data:x{54}…': fix"),
        ("data:text/html;base64,PGI+", "image 1 is none"),
        (3, "must be a path, a data URI or bytes, image 1 is int"),
        ({}, "image 1 is NoneType"),
    ],
)
def test_refused_sources(source: Any, rule: str) -> None:
    with user_error(rule):
        reference(source)


def test_equal_bytes_have_one_digest() -> None:
    """However an image is given; they are kept where no file has them. Of another size it is another image."""
    content = written(PICTURE)
    uri = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    given = [content, {"bytes": content, "path": "x.jpg"}, uri, PICTURE]
    references = [reference(source) for source in given]
    assert len({each.digest for each in references}) == 1
    assert reference(picture(2, PICTURE.size)).digest != references[0].digest
    assert reference(content, max_pixels=100).digest != references[0].digest
    assert reference(Image.new("RGB", (20, 30))).digest != reference(Image.new("RGB", (30, 20))).digest
    row = {"images": stored_images(references)}
    assert tokenised_images(row) == references
    assert tokenised_images({"images": None}) == tokenised_images({}) == []


def test_large_images_are_scaled_down(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(written(PICTURE))
    for pixels, size in ((3000, (60, 50)), (750, (30, 25)), (1, (1, 1))):
        small = reference("a.png", tmp_path, max_pixels=pixels)
        assert (small.width, small.height) == small.image().size == size
    assert reference(Image.new("RGB", (2000, 10)), max_pixels=100).image().size == (100, 1)
    for width, height in ((115852, 579), (400, 2), (1999, 10), (7, 1400)):
        for pixels in (1, 100, 2**20, 2**26):
            small_width, small_height = size_within((width, height), pixels)
            assert max(small_width, small_height) <= 200 * min(small_width, small_height)
            assert small_width * small_height <= max(pixels, 1)


def test_bytes_are_stored_once(tmp_path: Path) -> None:
    read = [
        read_reference(source, "x", folder=None, max_pixels=2**20, store=tmp_path)
        for source in (written(PICTURE), PICTURE, written(picture(2)), {"bytes": written(PICTURE), "path": "a.png"})
    ]
    assert read[0] == read[1] == read[3] != read[2] and not any(each.content for each in read)
    files = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {Path(each.path) for each in read}
    Path(read[0].path).write_bytes(b"")  # the machine has crashed
    again = read_reference(PICTURE, "x", folder=None, max_pixels=2**20, store=tmp_path)
    assert again.path == read[0].path
    assert np.array_equal(np.asarray(read[0].image()), np.asarray(PICTURE))


def test_a_changed_file_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(written(PICTURE))
    stored = reference("a.png", tmp_path)
    file.write_bytes(written(picture(2, (60, 50))))
    with user_error("must stay as they were tokenised, .*a.png has changed"):
        stored.image()
    file.unlink()
    with user_error("must stay as they were tokenised, .*a.png cannot be read"):
        stored.image()
