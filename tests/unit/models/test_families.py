"""Every family, on a tiny random model: its two parts, loaded apart, compute what the whole model computes."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from tiny_families import FAMILIES, IMAGE, SIZES, Case, build_prompt, save_tiny_model

from triptych.config import MediaConfig
from triptych.media.header import read_header
from triptych.models.inspect import resolve_model
from triptych.models.layout.adapter import ItemLayout
from triptych.models.layout.registry import MULTIMODAL_LAYOUTS, get_layout_adapter
from triptych.models.loader import LoadedModel, Parts, load_model

pytestmark = pytest.mark.usefixtures("dense_attention")


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, png: Callable[[int, int], bytes]) -> Case:
    return save_tiny_model(request.param, tmp_path_factory.mktemp(request.param), [png(*size) for size in SIZES])


def encode(tower: LoadedModel, files: Sequence[bytes], layouts: Sequence[ItemLayout]) -> list[torch.Tensor]:
    adapter = tower.adapter
    inputs = [
        adapter.preprocess(f, "image", each.grid, each.num_rows, MediaConfig()) for f, each in zip(files, layouts, strict=True)
    ]
    with torch.inference_mode():
        return adapter.encode(tower.model, "image", adapter.collate(inputs), [each.num_rows for each in layouts])


def test_every_family_with_a_layout_is_tried_here() -> None:
    assert FAMILIES.keys() == MULTIMODAL_LAYOUTS.keys()


def test_the_parts_divide_the_parameters(case: Case) -> None:
    config = resolve_model(case.folder)
    whole = {name: weight.shape for name, weight in case.whole.named_parameters()}
    tower, language_model = (
        dict(load_model(config, parts).model.named_parameters()) for parts in (Parts.TOWER, Parts.LANGUAGE_MODEL)
    )
    assert tower.keys() | language_model.keys() == whole.keys()
    assert set(tower.keys() & language_model.keys()) <= {"model.image_newline"}
    assert all(
        "language_model" in name or "text_model" in name or "lm_head" in name for name in language_model.keys() - tower.keys()
    )
    assert not any(weight.is_meta for weight in [*tower.values(), *language_model.values()])


def test_an_item_alone_equals_itself_in_a_batch_of_several_requests(case: Case) -> None:
    """In LLaVA-OneVision the middle one is tiled, the others are not."""
    tower = load_model(resolve_model(case.folder), Parts.TOWER)
    layouts = [case.lay_out(data, items) for data, items in zip(case.files, (2, 1, 3), strict=True)]
    for index, own in enumerate(encode(tower, case.files, layouts)):
        (alone,) = encode(tower, case.files[index : index + 1], layouts[index : index + 1])
        assert own.shape == (layouts[index].num_rows, resolve_model(case.folder).row_width)
        torch.testing.assert_close(alone, own, rtol=1e-4, atol=1e-5)


def test_router_and_worker_read_the_same_settings_where_two_files_have_them(case: Case, tmp_path: Path) -> None:
    """Those within processor_config.json count, for transformers and so for us; what the other file says here would give other rows."""
    folder = Path(shutil.copytree(case.folder, tmp_path / "model"))
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": settings}))
    other = {name: 4 * value for name, value in settings["size"].items()}
    other_settings = {**settings, "size": other, "max_patches": 9, "max_image_size": {"longest_edge": 14}}
    (folder / "preprocessor_config.json").write_text(json.dumps(other_settings))
    tower = load_model(resolve_model(folder), Parts.TOWER)
    layouts = [get_layout_adapter(folder).layout(read_header(data, MediaConfig()), 1) for data in case.files]
    assert layouts == [case.lay_out(data, 1) for data in case.files]
    assert [len(rows) for rows in encode(tower, case.files, layouts)] == [each.num_rows for each in layouts]


@pytest.mark.parametrize("count", [1, 3])
def test_split_logits_equal_the_whole_models(case: Case, count: int) -> None:
    files = case.files[-count:]
    layouts = [case.lay_out(data, count) for data in files]
    rows = encode(load_model(resolve_model(case.folder), Parts.TOWER), files, layouts)
    ids, items = build_prompt(layouts)
    loaded = load_model(resolve_model(case.folder), Parts.LANGUAGE_MODEL)
    adapter, model, tokens = loaded.adapter, loaded.model, torch.tensor(ids)
    mask, both_ways = tokens == IMAGE, torch.zeros(len(ids), len(ids), dtype=torch.bool)
    if adapter.atomic_items:
        for item in items:
            both_ways[item.start : item.end, item.start : item.end] = True
    with torch.inference_mode():
        first, *levels = torch.cat(rows).split(32, dim=-1)
        embeds = adapter.embed(model, tokens)
        embeds[mask] = first
        positions, _ = adapter.positions(model, ids, items)
        extra = adapter.lm_kwargs(mask, levels)
        hidden = adapter.forward(model, embeds.unsqueeze(0), positions.unsqueeze(1), both_ways=both_ways, **extra)
        logits = adapter.logits(model, hidden)
        types = {case.family.types_name: mask.int().unsqueeze(0)} if case.family.types_name else {}
        expected = case.whole(input_ids=tokens.unsqueeze(0), **types, **case.tower_inputs_of_the_library(files)).logits[0]
    assert expected.std() > 0.05
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4)
