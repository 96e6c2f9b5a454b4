"""CPU time of reading an image when rows are tokenised: decoded as a model reads it, checked, or its header alone.

python -m benchmarks.image_files

The three alternate over JPEG files of 640x480 pixels, so that they see the same machine; times are of the thread, as
others may use its cores. The check is what tokenising does (`checked_size`).
"""

from __future__ import annotations

import io
import statistics
import time
from collections.abc import Callable

import numpy as np
from PIL import Image

from hybrid_rlhf.data.images.reading import checked_size, image_digest, open_image

FILES = 300
SIZE = (640, 480)


def picture(rng: np.random.Generator) -> bytes:
    """A smooth picture with noise, of about 85 kB, as a photograph has."""
    base = Image.fromarray(rng.integers(0, 256, (30, 40, 3), dtype=np.uint8)).resize(SIZE, Image.Resampling.BICUBIC)
    pixels = np.asarray(base) + rng.normal(0, 6, (SIZE[1], SIZE[0], 3))
    stored = io.BytesIO()
    Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(stored, "JPEG", quality=88)
    return stored.getvalue()


def decoded(content: bytes) -> None:
    """Every pixel, and a digest of them."""
    image_digest(open_image(content, "x").tobytes(), SIZE)


def checked(content: bytes) -> None:
    """Read whole, without pixels."""
    image_digest(content, checked_size(content, "x"))


def header(content: bytes) -> None:
    """Size and orientation; a file that is cut off is not noticed."""
    image = Image.open(io.BytesIO(content))
    image.getexif()
    image_digest(content, image.size)


def main() -> None:
    """Print milliseconds of CPU time per file, medians, and their ratios."""
    rng = np.random.default_rng(0)
    files = [picture(rng) for _ in range(FILES)]
    ways: tuple[Callable[[bytes], None], ...] = (decoded, checked, header)
    times: list[list[float]] = [[] for _ in ways]
    for content in files:
        for way, of_way in zip(ways, times, strict=True):
            start = time.thread_time()
            way(content)
            of_way.append(time.thread_time() - start)
    whole, *_ = medians = [statistics.median(of_way) for of_way in times]
    for way, median in zip(ways, medians, strict=True):
        print(f"{way.__name__:<8} {1000 * median:.2f} ms, {median / whole:.2f} of decoded")


if __name__ == "__main__":
    main()
