from dataclasses import fields
from pathlib import Path

import pytest

from triptych.config import CacheConfig, ConnectorConfig, MediaConfig
from triptych.errors import ConfigError
from triptych.launch.settings import SECTIONS, SETTINGS, sections_from

README = Path(__file__).parents[3] / "README.md"

# Fields that no flag sets, with the reason why not.
WITHOUT_FLAG = {
    ("cache", "rows_per_page"),  # part of the arena's layout, not a user's business
    ("connector", "verify_checksums"),  # never off in service
    ("media", "num_threads"),  # follows --num-threads' reasoning; nobody has needed it
}


def test_every_field_of_every_section_has_a_flag_or_a_reason() -> None:
    all_fields = {(section, each.name) for section, (cls, _) in SECTIONS.items() for each in fields(cls)}
    with_flag = {(setting.section, setting.field) for setting in SETTINGS}
    assert with_flag | WITHOUT_FLAG == all_fields
    assert not with_flag & WITHOUT_FLAG


def test_flags_are_unique() -> None:
    assert len({setting.flag for setting in SETTINGS}) == len(SETTINGS)


def test_nothing_given_is_every_sections_default() -> None:
    assert sections_from({}) == {section: cls() for section, (cls, _) in SECTIONS.items()}


def test_the_defaults_shown_are_the_defaults_meant() -> None:
    assert sections_from({setting.name: setting.default for setting in SETTINGS}) == sections_from({})


def test_mebibytes_become_bytes() -> None:
    sections = sections_from({"kv_cache_mib": 3, "max_media_mib": 2})
    assert sections["cache"] == CacheConfig(kv_cache_nbytes=3 * 1_048_576)
    assert sections["media"] == MediaConfig(max_media_nbytes=2_097_152)


def test_the_file_plane_and_the_file_connector_have_a_directory_each() -> None:
    sections = sections_from({"data_plane": "file", "data_plane_path": Path("/planes")})
    assert sections["connector"] == ConnectorConfig(data_plane="file", data_plane_path=Path("/planes"))
    sections = sections_from({"ec_connector": "file", "ec_path": Path("/items"), "ec_path_mib": 2})
    assert sections["connector"] == ConnectorConfig(ec_connector="file", ec_path=Path("/items"), ec_path_nbytes=2_097_152)


@pytest.mark.parametrize(("mistyped", "sentence"), (("fil", "did you mean 'file'"), ("carrier", "known are data-plane, file")))
def test_an_ec_connector_that_does_not_exist_is_refused_with_the_nearest(mistyped: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=f"ec_connector is '{mistyped}', which does not exist; {sentence}"):
        sections_from({"ec_connector": mistyped})


def test_domains_given_one_by_one_become_a_tuple() -> None:
    assert sections_from({"allow_media_domain": ["a.org", "b.org"]})["media"].allowed_domains == ("a.org", "b.org")


def test_a_value_that_a_section_refuses_is_a_config_error_naming_it() -> None:
    with pytest.raises(ConfigError, match="block_size is 0"):
        sections_from({"block_size": 0})


def test_the_readme_has_every_flag_with_its_default() -> None:
    rows = [line.split("|")[1:3] for line in README.read_text().splitlines() if line.startswith("| `--")]
    wanted = [
        [
            f"`{each.flag}`",
            "" if each.default is None else f"{each.default:g}" if isinstance(each.default, float) else str(each.default),
        ]
        for each in SETTINGS
    ]
    assert [[cell.strip() for cell in row] for row in rows] == wanted
