"""What a media file's header says: enough for the layout of its placeholders, without decoding a pixel.

Only the formats below are opened, so that PIL's rarer parsers are never fed by a stranger.
"""

from io import BytesIO

import msgspec
from PIL import ExifTags, Image, UnidentifiedImageError

from triptych.config import MediaConfig
from triptych.errors import MediaError, TooLargeError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")

# First bytes of files that people do send, to refuse them by name.
_REFUSED = (
    (0, b"II*\0", "TIFF"),
    (0, b"MM\0*", "TIFF"),
    (0, b"%PDF", "PDF"),
    (0, b"<svg", "SVG"),
    (0, b"<?xml", "SVG or XML"),
    (0, b"<!DOCTYPE", "HTML"),
    (0, b"<html", "HTML"),
    (0, b"\0\0\1\0", "ICO"),
    (4, b"ftypavif", "AVIF"),
    (4, b"ftypheic", "HEIC"),
    (4, b"ftypheix", "HEIC"),
    (4, b"ftypmif1", "HEIF"),
    (4, b"ftyp", "MP4 (or kin)"),
    (0, b"\0\0\0\x0cJXL ", "JPEG XL"),
    (0, b"\0\0\0\x0cjP  ", "JPEG 2000"),
)


class MediaHeader(msgspec.Struct, frozen=True):
    """`height` and `width` in pixels as the picture is shown (after EXIF rotation); `frames`, `fps`, `samples` for video and audio."""

    modality: str
    height: int = 0
    width: int = 0
    frames: int = 0
    fps: float = 0.0
    samples: int = 0


def read_header(data: bytes, limits: MediaConfig) -> MediaHeader:
    """The size of the picture in `data`. Raises `MediaError` for what is no picture we read, `TooLargeError` over a limit."""
    check_nbytes(len(data), limits)
    image = open_image(data)
    width, height = image.size
    if width * height > limits.max_image_pixels:
        raise TooLargeError(
            f"the picture has {width} x {height} = {width * height} pixels; at most {limits.max_image_pixels} are allowed."
        )
    if read_orientation(image, data) >= 5:  # rotated by a quarter turn
        width, height = height, width
    return MediaHeader(modality="image", height=height, width=width)


def check_nbytes(nbytes: int, limits: MediaConfig) -> None:
    """Raises `TooLargeError` for a file larger than `limits.max_media_nbytes`."""
    if nbytes > limits.max_media_nbytes:
        raise TooLargeError(f"the media file has {nbytes} bytes; at most {limits.max_media_nbytes} are allowed.")


def open_image(data: bytes) -> Image.Image:
    """Read the header only; pixels are decoded when the picture's `load` is called. Raises `MediaError`."""
    try:
        return Image.open(BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise MediaError(_why_refused(data)) from None
    except Image.DecompressionBombError as error:
        raise TooLargeError(f"the picture is too large to be decoded safely: {error}") from None
    except Exception as error:  # on hostile bytes a parser raises whatever its code meets (struct.error, KeyError ...)
        raise MediaError(f"the picture's header is broken: {error or type(error).__name__}.") from None


def read_orientation(image: Image.Image, data: bytes) -> int:
    """EXIF orientation, 1 to 8; 1 where there is none or it is broken, as browsers have it.

    PIL's own `getexif` of a PNG decodes all pixels to look for EXIF behind them; here the chunks are walked instead.
    """
    if image.format == "PNG" and "exif" not in image.info:
        exif = _find_png_exif(data)
        if exif:
            image.info["exif"] = exif
    try:
        orientation = Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1)
    except Exception:  # a parser over hostile bytes, as above
        return 1
    return orientation if isinstance(orientation, int) and 1 <= orientation <= 8 else 1


def _find_png_exif(data: bytes) -> bytes:
    """The content of a PNG's eXIf chunk, wherever it stands; empty if there is none."""
    position = 8  # after the signature
    while position + 8 <= len(data):
        length = int.from_bytes(data[position : position + 4])
        if data[position + 4 : position + 8] == b"eXIf":
            return b"Exif\0\0" + data[position + 8 : position + 8 + length]
        position += length + 12  # length, type and checksum are 4 bytes each
    return b""


def _why_refused(data: bytes) -> str:
    known = ", ".join(FORMATS)
    if not data:
        return "the media file is empty."
    for offset, magic, name in _REFUSED:
        if data[offset : offset + len(magic)].lower() == magic.lower():
            return f"the media file is {name}; pictures must be {known}."
    return f"the media file is not a picture that can be read (or its header is broken); pictures must be {known}."
