"""Pictures are drawn as described, and the answers about them are right."""

from itertools import combinations
from random import Random

import pytest

from triptych.demo.pictures import BACKGROUND, COLOURS, Picture, Shape, draw, questions, questions_about, random_picture

TWO_SHAPES = Picture((112, 112), (Shape("square", "blue", 30, 30, 40), Shape("circle", "red", 85, 85, 44)))
ONE_SHAPE = Picture((112, 112), (Shape("triangle", "green", 50, 50, 40),))


def test_answers_about_one_picture() -> None:
    assert {question.text: question.answer for question in questions(TWO_SHAPES)} == {
        "what colour is the square?": "blue",
        "what colour is the circle?": "red",
        "what shape is blue?": "square",
        "what shape is red?": "circle",
        "how many shapes are there?": "two",
        "describe the picture.": "a red circle and a blue square.",
    }


def test_questions_about_several_pictures_name_the_picture() -> None:
    answers = {question.text: question.answer for question in questions_about([TWO_SHAPES, ONE_SHAPE])}
    assert answers["in picture one, what colour is the circle?"] == "red"
    assert answers["in picture two, how many shapes are there?"] == "one"
    assert answers["describe picture two."] == "a green triangle."


def test_three_shapes_are_listed_with_a_comma() -> None:
    picture = Picture(
        (168, 168),
        (Shape("triangle", "black", 30, 30, 40), Shape("circle", "red", 30, 100, 40), Shape("square", "blue", 100, 30, 40)),
    )
    assert questions(picture)[-1].answer == "a red circle, a blue square and a black triangle."


def test_a_shape_has_its_colour_at_its_centre_and_the_corner_is_ground() -> None:
    image = draw(TWO_SHAPES)
    assert image.size == (112, 112)
    assert image.getpixel((30, 30)) == COLOURS["blue"]
    assert image.getpixel((85, 85)) == COLOURS["red"]
    assert image.getpixel((111, 0)) == BACKGROUND


@pytest.mark.parametrize("size", [(112, 112), (112, 168), (224, 168)])
def test_random_pictures_are_unambiguous_and_whole(size: tuple[int, int]) -> None:
    rng = Random(0)
    for _ in range(50):
        picture = random_picture(rng, size)
        for a, b in combinations(picture.shapes, 2):
            assert a.kind != b.kind and a.colour != b.colour and not a.overlaps(b)
        for shape in picture.shapes:
            assert shape.diameter / 2 <= shape.x <= size[0] - shape.diameter / 2
            assert shape.diameter / 2 <= shape.y <= size[1] - shape.diameter / 2


def test_the_same_seed_draws_the_same_picture() -> None:
    assert random_picture(Random(7), (112, 112)) == random_picture(Random(7), (112, 112))
