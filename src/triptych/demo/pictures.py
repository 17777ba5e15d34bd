"""Pictures of coloured shapes, and questions about them with their answers.

A picture holds one to three shapes on a white ground. Within one picture all shapes differ in kind and in colour, so
that 'what colour is the circle?' and 'what shape is red?' have one answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from PIL import Image, ImageDraw

KINDS = ("circle", "square", "triangle")
COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 160, 60),
    "blue": (40, 80, 220),
    "yellow": (240, 210, 30),
    "purple": (150, 50, 190),
    "black": (20, 20, 20),
}
NUMBERS = ("one", "two", "three")
BACKGROUND = (255, 255, 255)
MIN_DIAMETER, MAX_DIAMETER = 40, 56  # pixels: a shape covers at least one whole row of embedding (28 x 28 pixels)
GAP = 3  # pixels between two shapes


@dataclass(frozen=True)
class Shape:
    """One shape: its kind and colour, its centre and diameter in pixels."""

    kind: str
    colour: str
    x: int
    y: int
    diameter: int

    def overlaps(self, other: "Shape") -> bool:
        """Whether the bounding boxes come closer than GAP."""
        reach = (self.diameter + other.diameter) / 2 + GAP
        return abs(self.x - other.x) < reach and abs(self.y - other.y) < reach


@dataclass(frozen=True)
class Picture:
    """Shapes on a white ground; size is (width, height) in pixels."""

    size: tuple[int, int]
    shapes: tuple[Shape, ...]


@dataclass(frozen=True)
class Question:
    """A question, its answer, and which of the four sorts it is: 'colour', 'shape', 'count' or 'describe'."""

    sort: str
    text: str
    answer: str


def draw(picture: Picture) -> Image.Image:
    """The picture as RGB pixels."""
    image = Image.new("RGB", picture.size, BACKGROUND)
    canvas = ImageDraw.Draw(image)
    for shape in picture.shapes:
        radius = shape.diameter / 2
        left, top, right, bottom = shape.x - radius, shape.y - radius, shape.x + radius, shape.y + radius
        fill = COLOURS[shape.colour]
        if shape.kind == "circle":
            canvas.ellipse((left, top, right, bottom), fill=fill)
        elif shape.kind == "square":
            canvas.rectangle((left, top, right, bottom), fill=fill)
        else:
            canvas.polygon(((left, bottom), (shape.x, top), (right, bottom)), fill=fill)
    return image


def random_picture(rng: Random, size: tuple[int, int], palette: Sequence[str] = tuple(COLOURS)) -> Picture:
    """One to three shapes at random places; size is (width, height), each at least 112; palette, three colours or more."""
    count = rng.randint(1, len(KINDS))
    kinds, colours = rng.sample(KINDS, count), rng.sample(palette, count)
    while True:  # three large shapes do not fit at every first try: start over until they do
        shapes = tuple(_random_shape(rng, size, *look) for look in zip(kinds, colours, strict=True))
        if not any(a.overlaps(b) for i, a in enumerate(shapes) for b in shapes[:i]):
            return Picture(size, shapes)


def _random_shape(rng: Random, size: tuple[int, int], kind: str, colour: str) -> Shape:
    diameter = rng.randint(MIN_DIAMETER, MAX_DIAMETER)
    margin = diameter // 2 + 1
    x, y = (rng.randint(margin, side - margin) for side in size)
    return Shape(kind, colour, x, y, diameter)


def describe(picture: Picture) -> str:
    """For example 'a red circle and a blue square.', always in the order circle, square, triangle."""
    nouns = [f"a {shape.colour} {shape.kind}" for shape in sorted(picture.shapes, key=lambda s: KINDS.index(s.kind))]
    return " and ".join([", ".join(nouns[:-1]), nouns[-1]] if len(nouns) > 1 else nouns) + "."


def questions(picture: Picture) -> list[Question]:
    """All questions about a picture that is alone in its prompt."""
    return _questions(picture, prefix="", name="the picture")


def questions_about(pictures: Sequence[Picture]) -> list[Question]:
    """All questions about one to three pictures of one prompt; where there are several, each names its picture."""
    if len(pictures) == 1:
        return questions(pictures[0])
    return [
        question
        for number, picture in zip(NUMBERS, pictures, strict=False)
        for question in _questions(picture, prefix=f"in picture {number}, ", name=f"picture {number}")
    ]


def _questions(picture: Picture, prefix: str, name: str) -> list[Question]:
    found = [Question("colour", f"{prefix}what colour is the {s.kind}?", s.colour) for s in picture.shapes]
    found += [Question("shape", f"{prefix}what shape is {s.colour}?", s.kind) for s in picture.shapes]
    found.append(Question("count", f"{prefix}how many shapes are there?", NUMBERS[len(picture.shapes) - 1]))
    found.append(Question("describe", f"describe {name}.", describe(picture)))
    return found
