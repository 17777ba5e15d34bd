"""Trains the demo checkpoint, a small Qwen2.5-VL that answers about pictures of coloured shapes, from nothing.

    python examples/train_demo.py --out DIR [--minutes N]     # resumes where DIR/training.pt left off
    python examples/train_demo.py --evaluate DIR              # exact match on unseen pictures, by plain transformers

What makes it learn on one processor core in an hour rather than in a day:

* We draw the pictures, so we know what every row of embedding ought to say. The tower first learns alone to give the
  row at a shape's centre the sum of two word embeddings, its colour and its kind, and every other row that of the
  picture token. The language model then reads words, not pixels.
* The questions about one picture share its rows: they follow it in one sequence, and the mask hides them from each
  other, so that each is exactly the single-turn prompt a user would send.
* One picture of one size comes first, then several pictures, then several sizes, and last pictures of so few colours
  that most come twice. Where there are several pictures, every token must also know the number of its picture.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from random import Random
from typing import Annotated, Any

import numpy as np
import torch
import typer
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoImageProcessor, AutoTokenizer, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import rotate_half

from triptych.demo import CHECKPOINT
from triptych.demo.pictures import COLOURS, KINDS, NUMBERS, Picture, draw, questions_about, random_picture

Layout = tuple[tuple[int, int], ...]  # the size (width, height) of each picture of a prompt
Model = Any  # a Qwen2_5_VLForConditionalGeneration: what it is made of has no types

SPECIAL = [f"<|{name}|>" for name in ("endoftext", "im_start", "im_end", "vision_start", "vision_end", "image_pad", "video_pad")]
IMAGE = SPECIAL.index("<|image_pad|>")
VOCABULARY = 1024
PATCH, MERGE = 14, 2
CELL = PATCH * MERGE  # pixels that one row of embedding stands for, in each direction
WINDOW = 112 // CELL  # rows of embedding along one side of an attention window
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
SYSTEM_MESSAGES = ("You are a helpful assistant.", "Answer in one word.", "You see coloured shapes. Be brief.")
ROWS = 640  # of embedding in a batch of prompts, about
ROW_SHARPNESS = 12.0  # how near a row must come to its words: embeddings have a norm of about 0.7
ROW_WEIGHT = 0.2  # of what the rows say, once it is the answers that count
NUMBER_WEIGHT = 0.2  # of the picture's number in each token
REPORT, SAVE = 50, 100  # steps
QWEN_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

# Written by hand: the shipped ones are the source. The template puts the pictures of a message before its text, wherever
# the client put them, and announces each by its number: that is the order of the training prompts.
HAND_WRITTEN = (
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "tokenizer_config.json",
)


def write_tokenizer(out: Path) -> None:
    """A byte-level BPE, Qwen's in all but size, trained on the prompts' own words and on some English."""
    rng = Random(0)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(Regex(QWEN_WORDS), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    lines = [f"system\nuser\nassistant\npicture {number}: video:" for number in NUMBERS] * 1000
    for _ in range(3000):  # often enough that each word of a prompt becomes one token
        pictures = [random_picture(rng, (168, 168)) for _ in range(rng.randint(1, 3))]
        lines += [f"{question.text}\n{question.answer}" for question in questions_about(pictures)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()  # complete, so that any text can be written
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([*lines, *(topics[name] for name in sorted(topics))], trainer)
    tokenizer.save(str(out / "tokenizer.json"))


# Batches: prompts of one layout, cut into tensors.


@dataclass(frozen=True)
class Batch:
    """Prompts of one layout; each row holds the pictures once and then several questions about them."""

    pixels: list[Tensor]  # per picture of the layout: [batch, patches, 3 * PATCH * PATCH]
    anchors: Tensor  # [batch, rows, 2], colour and kind of the shape whose centre lies in a row, 0 and 0 if none does
    ids: Tensor  # [batch, length]
    positions: Tensor  # [3, batch, length]
    mask: Tensor  # [batch, 1, length, length], True where attention is allowed
    numbers: Tensor  # [batch, length], the picture named last before a token, counted from 0, else -100
    targets: Tensor  # [batch, length], the next id where it belongs to an answer, else -100


class Batcher:
    """Makes batches; knows the tokenizer and, for positions, the model."""

    def __init__(self, folder: Path, model: Model):
        self.model = model
        tokenizer = AutoTokenizer.from_pretrained(folder)
        self.encode: Callable[[str], list[int]] = cache(lambda text: tokenizer(text).input_ids)  # pyright: ignore
        # What a row may say of colour and of kind: entry 0 is plain ground.
        self.row_words = [torch.tensor([IMAGE, *(self.encode(f" {word}")[0] for word in words)]) for words in (COLOURS, KINDS)]
        self.number_words = [self.encode(f" {word}")[0] for word in NUMBERS]

    def batch(self, rng: Random, layout: Layout, batch_size: int, num_questions: int, num_colours: int) -> Batch:
        """batch_size prompts, each of num_colours, with num_questions questions drawn from all that its pictures allow."""
        palettes = [rng.sample(tuple(COLOURS), num_colours) for _ in range(batch_size)]
        albums = [[random_picture(rng, size, palette) for size in layout] for palette in palettes]
        system = f"<|im_start|>system\n{rng.choice(SYSTEM_MESSAGES)}<|im_end|>\n" if rng.random() < 0.1 else ""
        is_chat = rng.random() < 0.15
        before_ids, before_positions = self._before(layout, system)
        start = int(before_positions[0, -1]) + 1
        rows = [self._row(rng, album, before_ids, start, num_questions, is_chat) for album in albums]
        length = max(len(row[0]) for row in rows)
        # [batch, 5, length]: ids, positions, branch (0: the pictures; 1, 2, ...: a question), numbers, targets
        table = np.zeros((batch_size, 5, length), dtype=np.int64)
        table[:, 2], table[:, 3:] = -1, -100
        for i, row in enumerate(rows):
            table[i, :, : len(row[0])] = row
        ids, places, branch, numbers, targets = torch.from_numpy(table).unbind(1)
        positions = places.expand(3, -1, -1).clone()
        positions[:, :, : before_positions.shape[1]] = before_positions[:, None]
        same = (branch[:, None, :] == 0) | (branch[:, None, :] == branch[:, :, None])
        mask = (same & torch.ones(length, length, dtype=torch.bool).tril())[:, None]
        slots = list(zip(*albums, strict=True))
        pixels = [patches(np.stack([np.asarray(draw(picture)) for picture in slot])) for slot in slots]
        anchors = torch.tensor([[label for picture in album for label in anchors_of(picture)] for album in albums])
        return Batch(pixels, anchors, ids, positions, mask, numbers, targets)

    def _before(self, layout: Layout, system: str) -> tuple[list[int], Tensor]:
        """Ids and positions [3, n] of what precedes the question, as the chat template and the processor have it."""
        grids = torch.tensor([(1, height // PATCH, width // PATCH) for width, height in layout])
        text = f"{system}<|im_start|>user\n"
        for number, rows in zip(NUMBERS, (grids.prod(1) // MERGE**2).tolist(), strict=False):
            text += f"picture {number}:<|vision_start|>{SPECIAL[IMAGE] * rows}<|vision_end|>\n"
        ids = torch.tensor([self.encode(text)])
        positions, _ = self.model.model.get_rope_index(ids, (ids == IMAGE).int(), grids)
        return ids[0].tolist(), positions[:, 0]

    def _row(
        self, rng: Random, album: list[Picture], before: list[int], start: int, num_questions: int, is_chat: bool
    ) -> list[list[int]]:
        """Ids, positions, branches, numbers and targets of one prompt; in a chat every question sees those before it."""
        ids, positions, branches, targets = [*before], [0] * len(before), [0] * len(before), [-100] * len(before)
        asked = questions_about(album)
        for branch, question in enumerate(rng.sample(asked, min(num_questions, len(asked))), 1):
            prompt = self.encode(f"{reworded(rng, question.text)}<|im_end|>\n<|im_start|>assistant\n")
            if is_chat and branch > 1:
                prompt = [*self.encode("<|im_end|>\n<|im_start|>user\n"), *prompt]
            answer = self.encode(f"{question.answer}<|im_end|>")
            size = len(prompt) + len(answer) - 1
            ids += [*prompt, *answer[:-1]]
            targets += [*[-100] * (len(prompt) - 1), *answer]
            positions += range(start, start + size)
            branches += [1 if is_chat else branch] * size
            start += size if is_chat else 0
        return [ids, positions, branches, self._numbers(ids, branches), targets]

    def _numbers(self, ids: list[int], branches: list[int]) -> list[int]:
        numbers = [-100] * len(ids)
        for i, word in enumerate(ids):
            if word in self.number_words:
                numbers[i] = self.number_words.index(word)
            elif i and branches[i] == branches[i - 1]:
                numbers[i] = numbers[i - 1]
        return numbers


def anchors_of(picture: Picture) -> list[tuple[int, int]]:
    """For each row of embedding the colour and kind of the shape whose centre it covers, counted from 1, or zeros."""
    width, height = (side // CELL for side in picture.size)
    anchors = [(0, 0)] * (width * height)
    for shape in picture.shapes:
        label = (1 + list(COLOURS).index(shape.colour), 1 + KINDS.index(shape.kind))
        anchors[shape.y // CELL * width + shape.x // CELL] = label
    return anchors


def reworded(rng: Random, question: str) -> str:
    """Mostly the question itself, else as others would type it."""
    if rng.random() < 0.7:
        return question
    question = rng.choice((question, question.replace("colour", "color")))
    question = rng.choice((question, question.capitalize()))
    return rng.choice((question, question[:-1]))


def patches(images: np.ndarray) -> Tensor:
    """Pixels [n, height, width, 3] in 0..255 as [n, patches, 3 * PATCH * PATCH], in the image processor's order.

    The processor repeats every patch along time; what is the same twice is left out here, see tower().
    """
    n, height, width, _ = images.shape
    pixels = (images.astype(np.float32) / 255 - np.array(MEAN, np.float32)) / np.array(STD, np.float32)
    cells = pixels.reshape(n, height // CELL, MERGE, PATCH, width // CELL, MERGE, PATCH, 3)
    return torch.from_numpy(cells.transpose(0, 1, 4, 2, 5, 7, 3, 6).reshape(n, -1, 3 * PATCH * PATCH).copy())


# The model, run without what generality costs: pictures of one size, whole batches at once.


@cache
def tower_layout(size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Patch coordinates [patches, 2] and the windows' mask [patches, patches] for pictures of a size."""
    rows, columns = torch.meshgrid(torch.arange(size[1] // CELL), torch.arange(size[0] // CELL), indexing="ij")
    cells = torch.stack([rows, columns], -1).reshape(-1, 1, 2)
    corners = torch.cartesian_prod(torch.arange(MERGE), torch.arange(MERGE))
    windows = (cells // WINDOW * torch.tensor([1000, 1])).sum(-1).expand(-1, MERGE**2).flatten()
    return (cells * MERGE + corners).reshape(-1, 2), windows[:, None] == windows


def tower(model: Model, pixels: Tensor, size: tuple[int, int]) -> Tensor:
    """The rows of embedding [batch, rows, hidden] of pictures of one size."""
    visual = model.model.visual
    coordinates, windows = tower_layout(size)
    cos, sin = (angle[None, None] for angle in visual.rotary_pos_emb(pixels, coordinates))
    weight = visual.patch_embed.proj.weight.sum(2).flatten(1)  # a still picture is the same at both times
    hidden = functional.linear(pixels, weight)
    for i, block in enumerate(visual.blocks):
        attention = block.attn
        qkv = attention.qkv(block.norm1(hidden)).unflatten(-1, (3, attention.num_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        q, k = (x * cos + rotate_half(x) * sin for x in (q, k))
        mask = None if i in visual.fullatt_block_indexes else windows
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        hidden = hidden + attention.proj(mixed.transpose(1, 2).flatten(2))
        hidden = hidden + block.mlp(block.norm2(hidden))
    return visual.merger(hidden).unflatten(0, (len(pixels), -1))


def row_loss(model: Model, rows: Tensor, anchors: Tensor, words: list[Tensor]) -> Tensor:
    """How far each row is from the sum of its two words; shapes' centres and plain ground weigh the same."""
    embeddings = model.get_input_embeddings().weight.detach()
    is_ground = (anchors[..., 0] == 0).flatten()
    loss = torch.zeros(len(is_ground))
    for labels, vocabulary in zip(anchors.unbind(-1), words, strict=True):
        logits = ROW_SHARPNESS * rows @ embeddings[vocabulary].T
        loss = loss + functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return loss[is_ground].mean() + loss[~is_ground].mean()


def answer_loss(model: Model, rows: Tensor, batch: Batch, number_words: list[int]) -> Tensor:
    """Cross-entropy of the answers' tokens, and of the picture number in all tokens after the first layer.

    Left alone, the language model is long content to answer about any of the pictures. Once each row knows the number
    of its picture and each word of a question that of the picture asked about, attention only has to match them.
    """
    embeddings = model.get_input_embeddings()
    hidden = embeddings(batch.ids).masked_scatter((batch.ids == IMAGE)[..., None], rows)
    mask = {"full_attention": batch.mask}
    outputs = model.model.language_model(
        inputs_embeds=hidden, position_ids=batch.positions, attention_mask=mask, output_hidden_states=True
    )
    is_answer = batch.targets != -100
    answered = functional.cross_entropy(outputs.last_hidden_state[is_answer] @ embeddings.weight.T, batch.targets[is_answer])
    if len(batch.pixels) == 1:
        return answered
    after_first = functional.rms_norm(outputs.hidden_states[1], rows.shape[-1:])
    numbered = functional.cross_entropy((after_first @ embeddings.weight[number_words].T).mT, batch.numbers)
    return answered + NUMBER_WEIGHT * numbered


# Training.


@dataclass(frozen=True)
class Stage:
    """A stretch of training; the learning rate goes straight from one value to the other."""

    name: str
    steps: int
    learning_rates: tuple[float, float]
    sides: tuple[int, ...] = (112,)  # pixels: widths and heights to draw from
    counts: tuple[int, ...] = (1,)  # pictures in a prompt, to draw from
    num_colours: int = len(COLOURS)  # of all pictures of a prompt together
    is_answering: bool = True  # else only the tower learns

    def layout(self, rng: Random) -> Layout:
        """How many pictures the prompts of one batch have, and of which sizes."""
        return tuple((rng.choice(self.sides), rng.choice(self.sides)) for _ in range(rng.choice(self.counts)))


SIDES = (112, 140, 168, 196, 224)
STAGES = (
    Stage("rows", 300, (4e-3, 3e-3), is_answering=False),
    Stage("one picture", 200, (4e-3, 4e-3)),
    Stage("several small pictures", 500, (3e-3, 3e-3), counts=(1, 2, 2, 3)),
    Stage("several pictures", 400, (3e-3, 3e-3), SIDES, (1, 2, 3)),
    Stage("many pictures", 1200, (3e-3, 0.0), SIDES, (1, 2, 2, 3, 3)),
    # So few colours that most come in several pictures: whoever ignores the number of the picture errs.
    Stage("same colours", 900, (1.5e-3, 0.0), SIDES, (1, 2, 2, 3, 3), num_colours=3),
)


def train(out: Path, minutes: float) -> None:
    """Runs the stages, or what is left of them; writes the checkpoint every now and then and at the end."""
    out.mkdir(parents=True, exist_ok=True)
    for name in HAND_WRITTEN:
        (out / name).write_bytes((CHECKPOINT / name).read_bytes())
    write_tokenizer(out)
    torch.manual_seed(0)
    model: Model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig.from_pretrained(out))
    batcher = Batcher(out, model)
    optimizers = make_optimizers(model)
    step = done = load_state(out, model, optimizers)
    deadline = time.monotonic() + 60 * minutes
    since, sums = time.monotonic(), [0.0, 0.0]
    for step, stage, learning_rate in schedule(done):
        rng = Random(f"training {step}")  # of the step alone, so that resuming draws the same pictures
        layout = stage.layout(rng)
        num_rows = sum(width * height for width, height in layout) // CELL**2
        batch_size = min(32, ROWS // num_rows) if stage.is_answering else 64
        batch = batcher.batch(rng, layout, batch_size, 3 + 2 * len(layout), stage.num_colours)
        rows = torch.cat([tower(model, pixels, size) for pixels, size in zip(batch.pixels, layout, strict=True)], 1)
        seen = row_loss(model, rows, batch.anchors, batcher.row_words)
        answered = answer_loss(model, rows, batch, batcher.number_words) if stage.is_answering else torch.zeros(())
        (seen * (ROW_WEIGHT if stage.is_answering else 1) + answered).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            optimizer.step()
            optimizer.zero_grad()
        sums = [sums[0] + seen.item(), sums[1] + answered.item()]
        if (step + 1) % REPORT == 0:
            took, since = time.monotonic() - since, time.monotonic()
            print(f"{stage.name} {step + 1}: rows {sums[0] / REPORT:.4f} answers {sums[1] / REPORT:.4f} {took:.0f} s", flush=True)
            sums = [0.0, 0.0]
        if (step + 1) % SAVE == 0:
            save(out, model, optimizers, step + 1)
        if time.monotonic() > deadline:
            break
    save(out, model, optimizers, step + 1)


def schedule(done: int) -> Iterator[tuple[int, Stage, float]]:
    """Every step that is left: its number, its stage, its learning rate."""
    first = 0
    for stage in STAGES:
        for step in range(max(done, first), first + stage.steps):
            start, end = stage.learning_rates
            rate = start + (end - start) * (step - first) / stage.steps
            yield step, stage, rate * min(1.0, (step + 1) / 50)
        first += stage.steps


def make_optimizers(model: Model) -> list[torch.optim.Optimizer]:
    """Muon for the matrices between hidden states, AdamW for all else."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    return [
        torch.optim.Muon(matrices, momentum=0.95, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def save(out: Path, model: Model, optimizers: list[torch.optim.Optimizer], step: int) -> None:
    """Weights for everyone, and what resuming needs; each file appears whole or not at all."""
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(tensors, out / "model.safetensors.new", metadata={"format": "pt"})
    (out / "model.safetensors.new").rename(out / "model.safetensors")
    state = {"step": step, "model": tensors, "optimizers": [optimizer.state_dict() for optimizer in optimizers]}
    torch.save(state, out / "training.pt.new")
    (out / "training.pt.new").rename(out / "training.pt")


def load_state(out: Path, model: Model, optimizers: list[torch.optim.Optimizer]) -> int:
    """The number of steps already done; 0 and no change where there are none."""
    if not (out / "training.pt").exists():
        return 0
    state = torch.load(out / "training.pt")
    model.load_state_dict(state["model"], strict=False)
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return state["step"]


# Evaluation, through what everyone uses: the chat template, the image processor and generate().

SMALL, LARGE, TALL, WIDE = (112, 112), (168, 168), (112, 168), (224, 168)
SINGLE: tuple[Layout, ...] = ((SMALL,), (LARGE,), (TALL,), (WIDE,))
SEVERAL: tuple[Layout, ...] = ((SMALL, SMALL), (LARGE, WIDE), (SMALL, TALL, LARGE))


def evaluate(folder: Path) -> None:
    """Prints the share of exactly right answers by sort of question and by layout, on pictures never trained on."""
    model: Model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    print(f"{'pictures':<28}" + "".join(f"{sort:>18}" for sort in ("colour", "shape", "count", "describe")))
    for layout in (*SINGLE, *SEVERAL):
        right: dict[str, list[bool]] = defaultdict(list)
        rng = Random(f"held out {layout}")
        for _ in range(40):
            album = [random_picture(rng, size) for size in layout]
            questions = questions_about(album)
            answers = ask(model, tokenizer, processor, album, [question.text for question in questions])
            for question, answer in zip(questions, answers, strict=True):
                right[question.sort].append(question.answer == answer)
        name = " + ".join(f"{width}x{height}" for width, height in layout)
        print(f"{name:<28}" + "".join(f"{sum(r):>6} of {len(r):>3} {sum(r) / len(r):>4.0%}" for r in right.values()))


def ask(model: Model, tokenizer: Any, processor: Any, album: list[Picture], texts: list[str]) -> list[str]:
    """The answers to several questions about one set of pictures, each asked in a prompt of its own."""
    images = processor(images=[draw(picture) for picture in album] * len(texts), return_tensors="pt")
    rows = (images["image_grid_thw"].prod(1) // MERGE**2).tolist()
    prompts: list[str] = []
    for text in texts:
        messages = [{"role": "user", "content": [*[{"type": "image"}] * len(album), {"type": "text", "text": text}]}]
        first, *pieces = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True).split(SPECIAL[IMAGE])
        prompts.append(first + "".join(SPECIAL[IMAGE] * n + piece for n, piece in zip(rows, pieces, strict=False)))
    inputs = tokenizer(prompts, padding=True, return_tensors="pt")
    kinds = (inputs["input_ids"] == IMAGE).int()
    out = model.generate(**inputs, **images, mm_token_type_ids=kinds, max_new_tokens=24)
    return tokenizer.batch_decode(out[:, kinds.shape[1] :], skip_special_tokens=True)


def main(
    out: Annotated[Path | None, typer.Option(help="folder to train in")] = None,
    minutes: Annotated[float, typer.Option(help="stop after so long, to go on another time")] = math.inf,
    examine: Annotated[Path | None, typer.Option("--evaluate", help="folder to evaluate")] = None,
    threads: int = 1,
) -> None:
    """Train the demo checkpoint, or evaluate one."""
    torch.set_num_threads(threads)
    if out is not None:
        train(out, minutes)
    if examine is not None:
        evaluate(examine)


if __name__ == "__main__":
    typer.run(main)
