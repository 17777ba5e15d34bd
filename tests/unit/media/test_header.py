from io import BytesIO
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from triptych.config import MediaConfig
from triptych.errors import MediaError, TooLargeError
from triptych.media.decode import decode_image
from triptych.media.header import FORMATS, MediaHeader, read_header

LIMITS = MediaConfig()


def make(width: int, height: int, kind: str = "PNG", orientation: int = 1) -> bytes:
    image = Image.frombytes("RGB", (width, height), Random(width).randbytes(3 * width * height))
    exif = image.getexif()
    exif[0x0112] = orientation
    buffer = BytesIO()
    image.save(buffer, kind, **({"exif": exif} if orientation != 1 else {}))
    return buffer.getvalue()


def move_exif_behind_pixels(png: bytes) -> bytes:
    chunks: list[bytes] = []
    position = 8
    while position < len(png):
        end = position + 12 + int.from_bytes(png[position : position + 4])
        chunks.append(png[position:end])
        position = end
    (exif,) = [chunk for chunk in chunks if chunk[4:8] == b"eXIf"]
    chunks.remove(exif)
    return png[:8] + b"".join([*chunks[:-1], exif, chunks[-1]])


@pytest.mark.parametrize("kind", FORMATS)
def test_the_size_is_read_from_every_format(kind: str) -> None:
    assert read_header(make(7, 5, kind), LIMITS) == MediaHeader(modality="image", height=5, width=7)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_header_and_pixels_agree_with_pil_on_every_orientation(kind: str, orientation: int) -> None:
    data = make(7, 5, kind, orientation)
    header, picture = read_header(data, LIMITS), decode_image(data)
    expected = ImageOps.exif_transpose(Image.open(BytesIO(data))).convert("RGB")
    assert (header.width, header.height) == expected.size
    assert picture.mode == "RGB"
    assert picture.tobytes() == expected.tobytes()


def test_a_rotation_that_stands_behind_the_pixels_of_a_png_counts() -> None:
    data = move_exif_behind_pixels(make(7, 5, "PNG", orientation=6))
    expected = ImageOps.exif_transpose(Image.open(BytesIO(data))).convert("RGB")
    assert expected.size == (5, 7)
    assert (read_header(data, LIMITS).width, read_header(data, LIMITS).height) == (5, 7)
    assert decode_image(data).tobytes() == expected.tobytes()


@pytest.mark.parametrize("kind", sorted(set(FORMATS) - {"WEBP"}))  # PIL refuses a truncated WEBP at once
def test_no_pixel_is_decoded(kind: str) -> None:
    """A file without its second half still has a size, but no picture."""
    data = make(64, 48, kind)
    half = data[: len(data) // 2]
    assert read_header(half, LIMITS).width == 64
    with pytest.raises(MediaError, match="cannot be decoded"):
        decode_image(half)


def test_a_picture_bomb_is_refused_by_its_header() -> None:
    data = bytearray(make(7, 5, "BMP"))
    data[18:26] = (30_000).to_bytes(4, "little") * 2
    with pytest.raises(TooLargeError, match=r"900000000|too large"):
        read_header(bytes(data), LIMITS)
    with pytest.raises(TooLargeError, match="at most 34 are allowed"):
        read_header(make(7, 5), MediaConfig(max_image_pixels=34))
    assert read_header(make(7, 5), MediaConfig(max_image_pixels=35)).width == 7


def test_a_file_over_the_byte_limit_is_refused() -> None:
    data = make(7, 5)
    assert read_header(data, MediaConfig(max_media_nbytes=len(data))).width == 7
    with pytest.raises(TooLargeError, match=f"has {len(data)} bytes; at most {len(data) - 1}"):
        read_header(data, MediaConfig(max_media_nbytes=len(data) - 1))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "empty"),
        (b"hello", "not a picture"),
        (b"%PDF-1.7", "is PDF"),
        (b"<svg xmlns=''/>", "is SVG"),
        (b"<!doctype html>", "is HTML"),
        (b"\0\0\0\x1cftypavif", "is AVIF"),
        (b"\0\0\0\x1cftypheic", "is HEIC"),
        (b"\0\0\0\x1cftypisom", "is MP4"),
        (make(7, 5, "TIFF"), "is TIFF"),
        (make(7, 5, "PNG")[:20], "picture"),
        (make(7, 5, "JPEG")[:30], "picture"),
    ],
)
def test_what_is_no_picture_is_refused_with_a_sentence(data: bytes, says: str) -> None:
    with pytest.raises(MediaError, match=says):
        read_header(data, LIMITS)


WHOLE = {kind: make(16, 12, kind, orientation=1 if kind in ("GIF", "BMP") else 6) for kind in FORMATS}


@settings(max_examples=300, deadline=None)
@given(kind=st.sampled_from(FORMATS), seed=st.integers(0, 2**32), cut=st.booleans())
def test_damaged_files_give_a_picture_or_a_request_error(kind: str, seed: int, cut: bool) -> None:
    rng = Random(seed)
    data = bytearray(WHOLE[kind])
    for _ in range(rng.randint(1, 8)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    damaged = bytes(data[: rng.randrange(len(data))] if cut else data)
    limits = MediaConfig(max_image_pixels=100_000)
    try:
        header = read_header(damaged, limits)
        picture = decode_image(damaged)
    except (MediaError, TooLargeError):
        return
    assert picture.size == (header.width, header.height)
