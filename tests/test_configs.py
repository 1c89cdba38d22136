"""The config.json files in configs/: as released, and the small ones that tests are built from."""

import hashlib
from pathlib import Path

import pytest

from unified_models.config import load_json
from unified_models.registry import architectures, find

CONFIGS = Path(__file__).parent.parent / "configs"
RELEASED = {
    "deepseek_v4_flash.json": "b628e63398a645abc711d92207f8737dd8140f7a4ef1e0a5b3616019e0ddd818"
}
FILES = sorted(CONFIGS.rglob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_config_is_read_and_written_back(path: Path) -> None:
    raw = load_json(path)
    config_of = find(raw["model_type"]).Config
    config = config_of.from_json(raw, str(path))
    assert config_of.from_json(config.to_json()) == config


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_config_refuses_an_unknown_key(path: Path) -> None:
    raw = load_json(path)
    with pytest.raises(ValueError, match=r"hiden_size.*hidden_size"):
        find(raw["model_type"]).Config.from_json(raw | {"hiden_size": 1}, str(path))


@pytest.mark.parametrize("path", [p for p in FILES if p.parent == CONFIGS], ids=lambda p: p.stem)
def test_released_config_is_byte_for_byte(path: Path) -> None:
    assert hashlib.sha256(path.read_bytes()).hexdigest() == RELEASED[path.name]


@pytest.mark.parametrize("name", architectures())
def test_tiny_config_is_the_file_of_its_name(name: str) -> None:
    config_of = find(name).Config
    assert config_of.tiny() == config_of.from_json(load_json(CONFIGS / f"tiny/{name}.json"))
