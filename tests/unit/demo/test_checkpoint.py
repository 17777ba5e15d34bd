"""The shipped demo checkpoint keeps what its card promises, by plain transformers."""

from random import Random
from typing import Any

import pytest
import torch
from transformers import AutoImageProcessor, AutoTokenizer, Qwen2_5_VLForConditionalGeneration

from triptych.demo import CHECKPOINT
from triptych.demo.pictures import Picture, Question, draw, questions_about, random_picture

IMAGE = "<|image_pad|>"
LAYOUTS = {
    "112x112": ((112, 112),),
    "168x168": ((168, 168),),
    "112x168": ((112, 168),),
    "224x168": ((224, 168),),
    "two pictures": ((112, 112), (168, 168)),
    "three pictures": ((112, 112), (112, 168), (168, 112)),
}
SORTS = ("colour", "shape", "count", "describe")
REQUIRED = 0.95


class Reader:
    """The checkpoint as a user of transformers would run it."""

    def __init__(self) -> None:
        self.model: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(CHECKPOINT)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(CHECKPOINT, padding_side="left")
        self.processor: Any = AutoImageProcessor.from_pretrained(CHECKPOINT, backend="pil")

    def answers(self, albums: list[list[Picture]], questions: list[Question]) -> list[str]:
        """Each question is a prompt of its own about the pictures of its album."""
        images = self.processor(images=[draw(picture) for album in albums for picture in album], return_tensors="pt")
        rows = iter((images["image_grid_thw"].prod(1) // 4).tolist())
        prompts = [
            self.prompt(question.text, [next(rows) for _ in album]) for album, question in zip(albums, questions, strict=True)
        ]
        inputs = self.tokenizer(prompts, padding=True, return_tensors="pt")
        kinds = (inputs["input_ids"] == self.model.config.image_token_id).int()
        with torch.inference_mode():
            out = self.model.generate(**inputs, **images, mm_token_type_ids=kinds, max_new_tokens=20)
        return self.tokenizer.batch_decode(out[:, kinds.shape[1] :], skip_special_tokens=True)

    def prompt(self, text: str, rows: list[int]) -> str:
        content = [*[{"type": "image"} for _ in rows], {"type": "text", "text": text}]
        rendered = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        first, *pieces = rendered.split(IMAGE)
        return first + "".join(IMAGE * n + piece for n, piece in zip(rows, pieces, strict=True))


@pytest.fixture(scope="module")
def reader() -> Reader:
    return Reader()


@pytest.fixture(scope="module")
def marks(reader: Reader) -> list[tuple[str, str, bool]]:
    """Layout, sort of question, and whether the answer was exactly right, for pictures never trained on."""
    marks: list[tuple[str, str, bool]] = []
    for name, layout in LAYOUTS.items():
        rng = Random(f"test {name}")
        albums: list[list[Picture]] = []
        questions: list[Question] = []
        for sort in SORTS * 20:
            album = [random_picture(rng, size) for size in layout]
            albums.append(album)
            questions.append(rng.choice([question for question in questions_about(album) if question.sort == sort]))
        for question, answer in zip(questions, reader.answers(albums, questions), strict=True):
            marks.append((name, question.sort, answer == question.answer))
    return marks


@pytest.mark.parametrize("layout", LAYOUTS)
def test_answers_are_right_in_every_layout(marks: list[tuple[str, str, bool]], layout: str) -> None:
    right = [is_right for name, _, is_right in marks if name == layout]
    assert sum(right) >= REQUIRED * len(right)


@pytest.mark.parametrize("sort", SORTS)
@pytest.mark.parametrize("pictures", ["one", "several"])
def test_answers_are_right_for_every_sort_of_question(marks: list[tuple[str, str, bool]], sort: str, pictures: str) -> None:
    right = [ok for name, asked, ok in marks if asked == sort and name.endswith("pictures") == (pictures == "several")]
    assert len(right) >= 40
    assert sum(right) >= REQUIRED * len(right)


def test_the_model_has_two_to_six_million_parameters(reader: Reader) -> None:
    assert 2_000_000 <= sum(parameter.numel() for parameter in reader.model.parameters()) <= 6_000_000


def test_the_folder_holds_at_most_12_megabytes() -> None:
    assert sum(file.stat().st_size for file in CHECKPOINT.iterdir()) <= 12_000_000


@pytest.mark.parametrize("text", ["", "what colour?", "naïve, 你好 🎉\n\t\x00 ", "def f(x): return x ** 2", "ß∂ƒ " * 50])
def test_the_tokenizer_gives_back_any_text(reader: Reader, text: str) -> None:
    assert reader.tokenizer.decode(reader.tokenizer(text)["input_ids"]) == text


def test_the_template_numbers_the_pictures_and_puts_them_before_the_text(reader: Reader) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "what now?"}, {"type": "image"}, {"type": "image_url"}]},
        {"role": "assistant", "content": "red"},
        {"role": "user", "content": "how many shapes are there?"},
    ]
    assert reader.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n"
        "picture one:<|vision_start|><|image_pad|><|vision_end|>\n"
        "picture two:<|vision_start|><|image_pad|><|vision_end|>\n"
        "what now?<|im_end|>\n"
        "<|im_start|>assistant\nred<|im_end|>\n"
        "<|im_start|>user\nhow many shapes are there?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
