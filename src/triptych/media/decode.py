"""`decode_image`: a file's bytes to upright RGB pixels, the picture that transformers' `load_image` would give.

But for 16-bit grey, which `load_image` clips to white: it becomes the picture's 8-bit version.
"""

from PIL import Image

from triptych.errors import MediaError
from triptych.media.header import open_image, read_orientation

_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def decode_image(data: bytes) -> Image.Image:
    """The first frame, turned as EXIF says, in RGB (alpha is dropped). Raises `MediaError` for broken or truncated pixels.

    Sizes were checked with `read_header` before; the same code finds the orientation, so the size is the promised one.
    """
    image = open_image(data)
    orientation = read_orientation(image, data)
    try:
        image.load()
        if image.mode == "I" or image.mode.startswith("I;16"):
            image = _to_8_bit(image)
        if orientation in _UPRIGHT:
            image = image.transpose(_UPRIGHT[orientation])
        return image.convert("RGB")
    except Exception as error:  # on hostile bytes a decoder raises whatever its code meets
        raise MediaError(f"the picture cannot be decoded: {error or type(error).__name__}.") from None


def _to_8_bit(image: Image.Image) -> Image.Image:
    """16-bit grey, whichever of PIL's modes holds it, by each value's upper byte."""
    return image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
