from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, ImageOps
from transformers import AutoImageProcessor, LlamaForCausalLM, Qwen2_5_VLForConditionalGeneration

from triptych.config import MediaConfig
from triptych.errors import InternalError, MediaError, TooLargeError
from triptych.media.header import read_header
from triptych.media.item import MediaItem
from triptych.models.inspect import resolve_model
from triptych.models.layout.adapter import ItemLayout, find_items
from triptych.models.layout.registry import get_layout_adapter
from triptych.models.loader import LoadedModel, Parts, load_model

pytestmark = pytest.mark.usefixtures("dense_attention")

Png = Callable[[int, int], bytes]
SIZES = [(56, 56), (120, 80), (61, 199)]  # (width, height)
IMAGE_ID, START_ID, END_ID = 90, 92, 93
LIMITS = MediaConfig()


@pytest.fixture(scope="module")
def tower(qwen_folder: Path) -> LoadedModel:
    return load_model(resolve_model(qwen_folder), Parts.TOWER)


@pytest.fixture
def language_model(qwen_folder: Path) -> LoadedModel:
    return load_model(resolve_model(qwen_folder), Parts.LANGUAGE_MODEL)


@pytest.fixture(scope="module")
def oracle(qwen_folder: Path) -> Any:
    return Qwen2_5_VLForConditionalGeneration.from_pretrained(qwen_folder, dtype=torch.float32).eval()


def layout_of(folder: Path, data: bytes) -> ItemLayout:
    return get_layout_adapter(folder).layout(read_header(data, MediaConfig()), 1)


def build_prompt(folder: Path, files: list[bytes], separator: list[int]) -> tuple[list[int], list[MediaItem]]:
    layouts = [layout_of(folder, data) for data in files]
    ids = [1, 2, 3]
    for layout in layouts:
        ids += [*separator, *[IMAGE_ID] * layout.num_rows]
    ids += [4, 5]
    runs = find_items(ids, layouts)
    items = [MediaItem("0" * 64, "image", run, each.num_rows, each.grid) for run, each in zip(runs, layouts, strict=True)]
    return ids, items


def oracle_positions(model: Any, ids: list[int], items: list[MediaItem]) -> tuple[torch.Tensor, int]:
    tensor = torch.tensor([ids])
    grids = torch.tensor([item.grid for item in items]) if items else None
    positions, delta = model.model.get_rope_index(
        input_ids=tensor, mm_token_type_ids=(tensor == IMAGE_ID).int(), image_grid_thw=grids
    )
    return positions[:, 0], int(delta)


def test_tower_rows_equal_the_whole_models_alone_and_in_a_batch(
    tower: LoadedModel, oracle: Any, qwen_folder: Path, png: Png
) -> None:
    files = [png(*size) for size in SIZES]
    layouts = [layout_of(qwen_folder, data) for data in files]
    processor = AutoImageProcessor.from_pretrained(qwen_folder, backend="pil")
    with torch.inference_mode():
        images = [Image.open(BytesIO(data)).convert("RGB") for data in files]
        expected = oracle.model.get_image_features(**processor(images=images, return_tensors="pt")).pooler_output
        adapter = tower.adapter
        inputs = [
            adapter.preprocess(data, "image", each.grid, each.num_rows, LIMITS) for data, each in zip(files, layouts, strict=True)
        ]
        batch = adapter.encode(tower.model, "image", adapter.collate(inputs), [each.num_rows for each in layouts])
        alone = [
            adapter.encode(tower.model, "image", each, [layout.num_rows])[0] for each, layout in zip(inputs, layouts, strict=True)
        ]
    for each, single, wanted, layout in zip(batch, alone, expected, layouts, strict=True):
        assert each.shape == (layout.num_rows, 32)
        torch.testing.assert_close(each, wanted, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(single, wanted, rtol=1e-5, atol=1e-6)


def test_preprocessing_in_many_threads_gives_what_one_gives(tower: LoadedModel, qwen_folder: Path, png: Png) -> None:
    files = [png(56 + 9 * (i % 7), 70) for i in range(28)]

    def prepare(data: bytes) -> torch.Tensor:
        layout = layout_of(qwen_folder, data)
        return tower.adapter.preprocess(data, "image", layout.grid, layout.num_rows, LIMITS)["pixel_values"]

    serial = [prepare(data) for data in files]
    with ThreadPoolExecutor(4) as pool:
        for one, other in zip(serial, pool.map(prepare, files), strict=True):
            assert torch.equal(one, other)


def test_a_rotated_photo_is_prepared_upright(tower: LoadedModel, qwen_folder: Path, png: Png) -> None:
    image = Image.open(BytesIO(png(120, 80)))
    exif = image.getexif()
    exif[0x0112] = 6
    buffer = BytesIO()
    image.save(buffer, "JPEG", exif=exif)
    layout = layout_of(qwen_folder, buffer.getvalue())
    prepared = tower.adapter.preprocess(buffer.getvalue(), "image", layout.grid, layout.num_rows, LIMITS)
    upright = ImageOps.exif_transpose(Image.open(buffer)).convert("RGB")
    assert upright.size == (80, 120)
    expected = AutoImageProcessor.from_pretrained(qwen_folder, backend="pil")(images=[upright], return_tensors="pt")
    assert torch.equal(prepared["pixel_values"], expected["pixel_values"])


@pytest.mark.parametrize(("grid", "num_rows"), [((1, 4, 6), 6), ((1, 4, 4), 5), ((1, 4, 4), 3), ((1, 4, 4), 8), ((), 4)])
def test_a_router_that_promises_other_than_the_workers_own_files_is_refused(
    tower: LoadedModel, png: Png, grid: tuple[int, ...], num_rows: int
) -> None:
    """Else the rows of a whole batch would shift, if another item's promise is wrong the other way."""
    with pytest.raises(
        InternalError, match=r"by this worker's files the image has grid \(1, 4, 4\) and 4 rows; the router promised"
    ):
        tower.adapter.preprocess(png(56, 56), "image", grid, num_rows, LIMITS)


def test_pixels_that_break_the_headers_promise_are_refused(tower: LoadedModel, png: Png, monkeypatch: pytest.MonkeyPatch) -> None:
    process = tower.adapter.process

    def stretched(image: Image.Image, grid: tuple[int, ...]) -> Any:
        return process(image.resize((112, 56)), grid)

    monkeypatch.setattr(tower.adapter, "process", stretched)
    with pytest.raises(MediaError, match=r"pixels give the grid \(1, 4, 8\) where its header promised \(1, 4, 4\)"):
        tower.adapter.preprocess(png(56, 56), "image", (1, 4, 4), 4, LIMITS)


@pytest.mark.parametrize("limits", [MediaConfig(max_image_pixels=56 * 56 - 1), MediaConfig(max_media_nbytes=100)])
def test_a_worker_decodes_nothing_over_its_own_limits(
    tower: LoadedModel, png: Png, limits: MediaConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triptych.models.adapter.decode_image", pytest.fail)
    with pytest.raises(TooLargeError):
        tower.adapter.preprocess(png(56, 56), "image", (1, 4, 4), 4, limits)


def test_rows_that_break_the_promise_are_refused(tower: LoadedModel, qwen_folder: Path, png: Png) -> None:
    layout = layout_of(qwen_folder, png(56, 56))
    inputs = tower.adapter.preprocess(png(56, 56), "image", layout.grid, layout.num_rows, LIMITS)
    with torch.inference_mode(), pytest.raises(InternalError, match=rf"gave {layout.num_rows} rows where {layout.num_rows + 1}"):
        tower.adapter.encode(tower.model, "image", inputs, [layout.num_rows + 1])


def test_a_worker_without_a_tower_prepares_nothing(language_model: LoadedModel, png: Png) -> None:
    with pytest.raises(InternalError, match="encode workers only"):
        language_model.adapter.preprocess(png(56, 56), "image", (1, 4, 4), 4, LIMITS)


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_positions_are_the_librarys_on_the_language_model_alone(
    count: int, language_model: LoadedModel, oracle: Any, qwen_folder: Path, png: Png
) -> None:
    ids, items = build_prompt(qwen_folder, [png(*size) for size in SIZES[:count]], [END_ID, START_ID])
    positions, delta = language_model.adapter.positions(language_model.model, ids, items)
    expected, expected_delta = oracle_positions(oracle, ids, items)
    assert torch.equal(positions, expected)
    assert positions.shape == (3, len(ids))
    assert delta == expected_delta


def test_two_pictures_side_by_side_have_the_positions_of_two_with_a_token_between(
    language_model: LoadedModel, oracle: Any, qwen_folder: Path, png: Png
) -> None:
    """The library cannot place them; with one separator it can, and what follows the separator comes one position later."""
    files = [png(*size) for size in SIZES[:2]]
    ids, items = build_prompt(qwen_folder, files, [])
    apart_ids, apart_items = build_prompt(qwen_folder, files, [7])
    apart, apart_delta = oracle_positions(oracle, apart_ids, apart_items)
    first, second = (item.start for item in apart_items)
    without = torch.cat([apart[:, : first - 1], apart[:, first : second - 1] - 1, apart[:, second:] - 2], dim=1)
    positions, delta = language_model.adapter.positions(language_model.model, ids, items)
    assert torch.equal(positions, without)
    assert delta == apart_delta


def test_split_logits_equal_the_whole_models(
    tower: LoadedModel, language_model: LoadedModel, oracle: Any, qwen_folder: Path, png: Png
) -> None:
    files = [png(*size) for size in SIZES]
    ids, items = build_prompt(qwen_folder, files, [END_ID, START_ID])
    adapter, model = language_model.adapter, language_model.model
    with torch.inference_mode():
        inputs = [tower.adapter.preprocess(f, "image", i.grid, i.num_rows, LIMITS) for f, i in zip(files, items, strict=True)]
        rows = tower.adapter.encode(tower.model, "image", tower.adapter.collate(inputs), [item.num_rows for item in items])
        embeds = adapter.embed(model, torch.tensor(ids))
        for item, each in zip(items, rows, strict=True):
            embeds[item.start : item.end] = each
        positions, _ = adapter.positions(model, ids, items)
        logits = adapter.logits(model, adapter.forward(model, embeds.unsqueeze(0), positions.unsqueeze(1)))
        pixels = tower.adapter.collate(inputs)
        tensor = torch.tensor([ids])
        expected = oracle(input_ids=tensor, mm_token_type_ids=(tensor == IMAGE_ID).int(), **pixels).logits[0]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


def test_a_text_only_model_counts_its_positions_and_gives_its_logits(llama_folder: Path) -> None:
    loaded = load_model(resolve_model(llama_folder), Parts.LANGUAGE_MODEL)
    ids = [5, 17, 3, 99]
    positions, delta = loaded.adapter.positions(loaded.model, ids, [])
    assert positions.tolist() == [[0, 1, 2, 3]]
    assert delta == 0
    with torch.inference_mode():
        embeds = loaded.adapter.embed(loaded.model, torch.tensor(ids)).unsqueeze(0)
        logits = loaded.adapter.logits(loaded.model, loaded.adapter.forward(loaded.model, embeds, positions.unsqueeze(1)))
        expected = LlamaForCausalLM.from_pretrained(llama_folder)(input_ids=torch.tensor([ids])).logits[0]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
