"""An item's key, as the real renderer makes it for the demo model and every family: it changes with all that its rows depend on, and
with nothing else."""

import asyncio
import base64
import importlib.metadata
import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tiny_families import FAMILIES, save_tiny_model

from triptych.config import MediaConfig
from triptych.demo import CHECKPOINT
from triptych.errors import ConfigError
from triptych.media.header import MediaHeader
from triptych.models.inspect import resolve_model
from triptych.models.layout.adapter import ItemLayout, ModelFiles
from triptych.models.layout.internvl import InternVLLayout
from triptych.models.layout.registry import MULTIMODAL_LAYOUTS
from triptych.router.render import ChatMessage, MediaPart, RenderedPrompt, Renderer, TextPart

LIMITS = MediaConfig(allowed_domains=("127.0.0.1",))


@pytest.fixture(scope="module")
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


@pytest.fixture(scope="module", params=["demo", *FAMILIES])
def original(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "demo":
        return CHECKPOINT
    folder = tmp_path_factory.mktemp(request.param)
    save_tiny_model(request.param, folder, [])
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(original, tmp_path / "model"))


@pytest.fixture
def keys(executor: ThreadPoolExecutor) -> Callable[..., list[str]]:
    """The keys of a request with the pictures `sources`, rendered for the model in `folder` as it is now."""

    def make(folder: Path, *sources: str | bytes, dtype: str = "float32", tenant_salt: str = "") -> list[str]:
        prompt = asyncio.run(_render(Renderer(resolve_model(folder), LIMITS, executor), sources, dtype, tenant_salt))
        return [item.key for item in prompt.items]

    return make


async def _render(
    renderer: Renderer,
    sources: tuple[str | bytes, ...],
    dtype: str = "float32",
    tenant_salt: str = "",
    modality: str = "image",
) -> RenderedPrompt:
    message = ChatMessage("user", (*(MediaPart(modality, source) for source in sources), TextPart("what is it?")))
    async with aiohttp.ClientSession() as session:
        return await renderer.render([message], session, dtype=dtype, tenant_salt=tenant_salt)


Keys = Callable[..., list[str]]
Png = Callable[..., bytes]


def flip(file: Path, place: int) -> None:
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)


# --- what changes it ---


def test_each_of_bytes_dtype_and_tenant_changes_it(original: Path, keys: Keys, png: Png) -> None:
    """A byte behind the picture's end changes no pixel; but that only a decoder knows, and the router has none."""
    found = [
        keys(original, png()),
        keys(original, png(colour=(200, 30, 31))),
        keys(original, png() + b"\0"),
        keys(original, png(), dtype="bfloat16"),
        keys(original, png(), tenant_salt="a"),
        keys(original, png(), tenant_salt="b"),
    ]
    assert len({key for (key,) in found}) == len(found)


class FilmLayout(InternVLLayout):
    """No family here takes videos yet: this one takes a picture for one."""

    def __init__(self, files: ModelFiles) -> None:
        super().__init__(files)
        self.placeholders = {"video": self.placeholders["image"]}

    def layout(self, header: MediaHeader, items_in_request: int) -> ItemLayout:
        return replace(super().layout(header, items_in_request), modality="video")

    def check_modality(self, modality: str) -> None:
        pass


def test_the_modality_changes_it(tmp_path: Path, executor: ThreadPoolExecutor, png: Png, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_model("internvl", tmp_path, [])
    model = resolve_model(tmp_path)
    picture = asyncio.run(_render(Renderer(model, LIMITS, executor), (png(),)))
    monkeypatch.setitem(MULTIMODAL_LAYOUTS, "internvl", FilmLayout)  # type: ignore[arg-type]  # a mapping to all but this test
    film = asyncio.run(_render(Renderer(model, LIMITS, executor), (png(),), modality="video"))
    assert film.token_ids == picture.token_ids
    assert film.items[0].grid == picture.items[0].grid
    assert film.items[0].key != picture.items[0].key


def test_every_setting_of_the_processor_changes_it(folder: Path, keys: Keys, png: Png) -> None:
    """Also one that is not there yet: what a processor makes of it is not ours to know."""
    path = folder / "preprocessor_config.json"
    content = path.read_text()
    settings = json.loads(content)
    others = {
        "min_pixels": 28 * 28 * 4,
        "max_pixels": 28 * 28 * 16,
        "image_mean": [0.1, 0.2, 0.3],
        "rescale_factor": 0.5,
        "resample": 2,
        "do_normalize": False,
        "size": {name: 2 * value for name, value in settings["size"].items()},
    }
    found = [keys(folder, png())]
    for name, value in others.items():
        path.write_text(json.dumps({**settings, name: value}))
        found.append(keys(folder, png()))
    path.write_text(content)
    assert keys(folder, png()) == found[0]
    assert len({key for (key,) in found}) == len(found)


@pytest.mark.parametrize("package", ["transformers", "pillow"])
def test_the_versions_of_decoder_and_processor_change_it(
    original: Path, keys: Keys, png: Png, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = keys(original, png())
    real = importlib.metadata.version

    def other(name: str) -> str:
        return real(name) + (".post1" if name == package else "")

    monkeypatch.setattr("triptych.models.layout.adapter.version", other)
    assert keys(original, png()) != before


def test_how_many_pictures_there_are_changes_it_where_the_rows_depend_on_that(original: Path, keys: Keys, png: Png) -> None:
    (alone,) = keys(original, png())
    among_two = keys(original, png(), png(colour=(1, 2, 3)))[0]
    among_three = keys(original, png(), png(colour=(1, 2, 3)), png(colour=(4, 5, 6)))[0]
    assert (alone != among_two) == ("llava_onevision" in original.name)
    assert among_two == among_three


@pytest.mark.parametrize("place", [-1, -4097, -20_000])
def test_one_byte_of_the_weights_changes_it(folder: Path, keys: Keys, png: Png, place: int) -> None:
    before = keys(folder, png())
    flip(folder / "model.safetensors", place)
    assert keys(folder, png()) != before


def test_one_byte_of_any_shard_changes_it(folder: Path, keys: Keys, png: Png) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    shutil.copy(folder / "model-00001-of-00002.safetensors", folder / "model-00002-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    found = [keys(folder, png())]
    for shard in shards.values():
        flip(folder / shard, -1)
        found.append(keys(folder, png()))
    assert len({key for (key,) in found}) == 3


def test_a_renderer_does_not_start_over_files_that_changed_since_they_were_hashed(
    folder: Path, executor: ThreadPoolExecutor
) -> None:
    model = resolve_model(folder)
    flip(folder / "model.safetensors", -1)
    with pytest.raises(ConfigError, match="have changed since the start"):
        Renderer(model, LIMITS, executor)


# --- what does not ---


def urls_of(data: bytes) -> dict[str, str]:
    """One file in many words."""
    plain, lines = base64.b64encode(data).decode(), base64.encodebytes(data).decode()
    return {
        "base64": f"data:image/png;base64,{plain}",
        "in lines": f"data:image/png;base64,{lines}",
        "in lines as mail has them": f"data:image/png;base64,{lines}".replace("\n", "\r\n"),
        "in escaped lines": f"data:image/png;base64,{quote(lines, safe='')}",
        "escaped base64": f"data:image/png;base64,{quote(plain, safe='')}",
        "percent encoding": f"data:image/png,{quote(data, safe='')}",
        "every byte escaped": "data:image/png," + "".join(f"%{byte:02x}" for byte in data),
        "another type": f"data:image/jpeg;base64,{plain}",
        "no type": f"data:;base64,{plain}",
        "with a parameter": f"DATA:image/PNG;name=a.png;BASE64,{plain}",
    }


def test_one_file_has_one_key_however_it_is_sent(original: Path, keys: Keys, png: Png) -> None:
    (key,) = keys(original, png())
    assert len(key) == 64
    found = {name: keys(original, url) for name, url in urls_of(png()).items()}
    assert found == {name: [key] for name in found}


def test_one_file_has_one_key_twice_in_a_request_and_in_two_requests(original: Path, keys: Keys, png: Png) -> None:
    assert len({*keys(original, png(), png())}) == 1
    assert keys(original, png()) == keys(original, png())


def test_a_copy_of_the_model_gives_the_same_keys(original: Path, folder: Path, keys: Keys, png: Png) -> None:
    """On another host, under another path, at another time."""
    assert keys(folder, png()) == keys(original, png())


async def test_a_file_from_the_web_has_the_key_of_its_bytes(original: Path, executor: ThreadPoolExecutor, png: Png) -> None:
    async def give(request: web.Request) -> web.StreamResponse:
        return web.Response(body=png(), content_type="image/gif" if "gif" in request.path else "image/png")

    app = web.Application()
    app.router.add_get("/{path:.*}", give)
    renderer = Renderer(resolve_model(original), LIMITS, executor)
    async with TestServer(app, host="127.0.0.1") as server:
        sources = (png(), str(server.make_url("/a.png")), str(server.make_url("/b.gif?token=1")))
        prompts = [await _render(renderer, (source,)) for source in sources]
    assert len({prompt.items[0].key for prompt in prompts}) == 1
