"""The definitions in models/, and what is said about broken ones."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from mlx_spec import resources
from mlx_spec.errors import BadConfig, ModelNotFound
from mlx_spec.loading import catalog, hub
from mlx_spec.settings import KVConfig, Sampling, Speculation

GOOD = """
summary = "A target and a draft"
context_length = 4096
[target]
source = "org/target"
license = "mit"
parameters = 1_000_000_000
bits = 4
[draft]
source = "org/draft"
license = "apache-2.0"
parameters = 100_000_000
bits = 16
[sampling]
temperature = 0.5
top_k = 20
[speculation]
draft_tokens = 4
[template]
enable_thinking = false
"""


def read(folder: Path, text: str) -> catalog.Entry:
    (folder / "pair.toml").write_text(text, encoding="utf-8")
    return catalog.entries(folder)["pair"]


def test_a_definition_is_read_whole(tmp_path: Path) -> None:
    entry = read(tmp_path, GOOD)
    assert (entry.name, entry.target, entry.draft) == ("pair", "org/target", "org/draft")
    assert entry.license == "mit, apache-2.0"
    assert entry.sampling == Sampling(temperature=0.5, top_k=20)
    assert entry.speculation == Speculation(draft_tokens=4)
    assert dict(entry.defaults) == {"temperature": 0.5, "top_k": 20, "draft_tokens": 4}
    assert dict(entry.template) == {"enable_thinking": False}


@pytest.mark.parametrize(("text", "expected"), [
    ("", KVConfig()),
    ("[kv]", KVConfig()),
    ('[kv]\nstorage = "int8"', KVConfig("int8")),
    ('[kv]\nstorage = "int8"\ndraft_storage = "int8"\nwindow = 4096\nsinks = "system"',
     KVConfig("int8", "int8", 4096, "system")),
    ("[kv]\nwindow = 100\nsinks = 8", KVConfig(window=100, sinks=8)),
])
def test_a_definition_says_how_keys_and_values_are_kept(tmp_path: Path, text: str, expected: KVConfig) -> None:
    entry = read(tmp_path, GOOD + text)
    assert entry.kv == expected
    shown = {**dataclasses.asdict(expected), "temperature": 0.5, "top_k": 20, "draft_tokens": 4}
    assert shown | entry.defaults == shown
    assert len(entry.defaults) == 3 + text.count("=")


@pytest.mark.parametrize(("text", "named"), [
    ('[kv]\nstorage = "int4"', "storage is 'int4'"),
    ("[kv]\nstorage = 8", "storage is 8"),
    ('[kv]\ndraft_storage = "half"', "draft_storage is 'half'"),
    ("[kv]\nwindow = 64", "window is 64"),
    ('[kv]\nwindow = "all"', "window is 'all'"),
    ("[kv]\nwindow = true", "window is True"),
    ("[kv]\nwindow = 100\nsinks = 101", "window is 100; give at least 101"),
    ('[kv]\nsinks = "some"', "sinks is 'some'"),
    ("[kv]\nsinks = 8", "sinks is 8, which says what stays visible beside a window; give a window"),
    ('[kv]\nsinks = "system"', "give a window"),
    ("[kv]\nbits = 8", "unknown key kv.bits; known are storage, draft_storage, window, sinks"),
])
def test_a_broken_way_to_keep_them_is_named(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(BadConfig, match=re.escape(named)) as caught:
        read(tmp_path, GOOD + text)
    assert "pair.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_sizes_are_computed_from_parameters_and_bits(tmp_path: Path) -> None:
    entry = read(tmp_path, GOOD)
    assert entry.target_weights.download_bytes == 562_500_000  # 4 bits and 32 bits per group of 64
    assert entry.draft_weights is not None
    assert entry.draft_weights.download_bytes == 200_000_000
    assert entry.download_bytes == 762_500_000
    assert entry.minimum_memory == 8


def test_a_pair_without_a_draft_has_none(tmp_path: Path) -> None:
    entry = read(tmp_path, re.sub(r"\[draft\].*?(?=\[sampling\])", "", GOOD, flags=re.DOTALL))
    assert entry.draft is None
    assert entry.license == "mit"


@pytest.mark.parametrize(("old", "new", "named"), [
    ("temperature = 0.5", "temperature = -1", "temperature is -1"),
    ("temperature = 0.5", 'temperature = "hot"', "sampling.temperature is 'hot'"),
    ("temperature = 0.5", "temperature = true", "sampling.temperature is True"),
    ("temperature = 0.5", "temprature = 0.5", "sampling.temprature"),
    ("top_k = 20", "top_k = 1.5", "sampling.top_k is 1.5"),
    ("top_k = 20", "seed = 1", "sampling.seed"),
    ("draft_tokens = 4", "draft_tokens = 65", "draft_tokens is 65"),
    ("bits = 16", "bits = 7", "draft.bits is 7"),
    ("parameters = 100_000_000", "parameters = 0", "draft.parameters is 0"),
    ('license = "mit"', 'license = ""', "target.license is ''"),
    ('source = "org/target"', "", "target.source is missing"),
    ("context_length = 4096", 'context_length = "long"', "context_length is 'long'"),
    ('summary = "A target and a draft"', "", "summary is missing"),
    ("enable_thinking = false", "enable_thinking = [1]", "template.enable_thinking"),
    ("[template]", "[templates]", "unknown key templates"),
    ("[template]", "[template", "TOML"),
])
def test_a_broken_definition_names_its_file_and_key(tmp_path: Path, old: str, new: str, named: str) -> None:
    assert old in GOOD
    with pytest.raises(BadConfig, match=re.escape(named)) as caught:
        read(tmp_path, GOOD.replace(old, new))
    assert "pair.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_shipped_catalogue_holds_what_is_promised() -> None:
    names = {
        "llama-3.3-70b", "llama-3.1-8b", "qwen2.5-72b", "qwen2.5-32b", "qwen2.5-14b", "qwen2.5-7b",
        "qwen2.5-coder-32b", "qwen2.5-coder-7b", "qwen3-32b", "qwen3-14b", "qwen3-8b", "mistral-large",
        "demo",
    }
    assert names <= set(catalog.entries())
    for entry in catalog.entries().values():
        assert "\n" not in entry.summary
        assert entry.draft or entry.name == "demo"
        if entry.draft_weights:
            assert entry.draft_weights.download_bytes < entry.target_weights.download_bytes / 4
        if entry.name.startswith("qwen3-"):
            assert "enable_thinking" in entry.template
    assert catalog.entries()["llama-3.3-70b"].minimum_memory == 64
    assert catalog.entries()["qwen2.5-7b"].minimum_memory == 16
    assert catalog.find("no-such-model") is None


def test_only_the_largest_for_64_gb_keep_int8_by_themselves() -> None:
    ways = {entry.name: entry.kv for entry in catalog.entries().values() if entry.kv != KVConfig()}
    assert ways == dict.fromkeys(("llama-3.3-70b", "qwen2.5-72b"), KVConfig("int8"))
    assert all(catalog.entries()[name].minimum_memory == 64 for name in ways)


def test_whether_an_entry_is_here_is_said_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = catalog.entries()["qwen3-8b"]
    monkeypatch.setattr(hub, "cached", lambda source: Path() if source == entry.target else None)
    assert entry.draft is not None
    assert (hub.is_local(entry.target), hub.is_local(entry.draft)) == (True, False)
    monkeypatch.setattr(hub, "packaged", lambda source: Path(__file__))
    assert hub.is_local(catalog.entries()["demo"].target)


def test_a_missing_resource_folder_is_explained() -> None:
    assert (resources.folder("models") / "demo.toml").is_file()
    with pytest.raises(ModelNotFound, match="install mlx-spec again"):
        resources.folder("no-such-folder")
