"""From a name to a model in memory, on tiny directories; bad input is one line with a next step."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
import pytest
from directories import byte_level, write_json, write_model, write_tokenizer, write_weights
from mlx.utils import tree_flatten
from tokenizers import models

from mlx_spec.errors import BadConfig, DoesNotFit, IncompatiblePair, MLXSpecError, ModelNotFound
from mlx_spec.loading import catalog, checkpoint, hub, loader


@pytest.fixture
def on_cpu() -> Any:
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(before)


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names asked of the hub; nothing is downloaded."""
    asked: list[str] = []
    monkeypatch.setattr(hub, "download", lambda name: asked.append(name) or Path("somewhere"))
    return asked


def refused(kind: type[MLXSpecError], name: str | Path, *parts: str) -> None:
    """Loading `name` fails with one line that has all `parts`."""
    with pytest.raises(kind) as caught:
        loader.load(name)
    assert "\n" not in str(caught.value)
    for part in parts:
        assert part in str(caught.value)


def dtypes(model: loader.LoadedModel) -> set[mx.Dtype]:
    return {array.dtype for _, array in tree_flatten(model.module.parameters())}


# Names.


def test_a_catalogue_name_is_its_target(no_hub: list[str]) -> None:
    source = loader.resolve("llama-3.3-70b")
    assert source.entry is catalog.entries()["llama-3.3-70b"]
    assert no_hub == ["mlx-community/Llama-3.3-70B-Instruct-4bit"]


def test_a_directory_of_a_catalogue_name_is_reached_as_a_path(
    no_hub: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen3-8b").mkdir()
    assert loader.resolve("./qwen3-8b").entry is None
    assert loader.resolve(Path("qwen3-8b")).entry is None
    assert no_hub == []


def test_a_directory_comes_before_the_hub(
    no_hub: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert loader.resolve("org/name").path == Path("somewhere")
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert loader.resolve("org/name").path == Path("org/name")
    assert no_hub == ["org/name"]


@pytest.mark.parametrize(("name", "parts"), [
    ("llama-3.3-70", ["did you mean llama-3.3-70b", "mlx-spec models"]),
    ("Demo", ["did you mean demo"]),
    ("something", ["give a name of `mlx-spec models`, org/name"]),
    ("", ["give a name"]),
    ("./nowhere", ["no model or directory './nowhere'"]),
    ("/nowhere/at/all", ["no model or directory"]),
    ("nowhere.gguf", ["there is no file nowhere.gguf"]),
    ("x" * 5000, ["'xxxxx", "xxx...'"]),
    ("x/" * 2500, ["'x/x/x", "x/...'"]),
    ("x/" + "x" * 5000, ["'x/xxx", "xxx...'"]),
    ("x" * 5000 + ".gguf", ["'xxxxx", "xxx...'"]),
    ("~nosuchuser/x", ["'~nosuchuser/x' is no path", "mlx-spec models"]),
    ("a\0b", ["'a\\x00b'", "mlx-spec models"]),
    ("package:", ["'package:' names no file", "package:MODULE/FILE"]),
    ("package:json", ["'package:json' names no file"]),
    ("package:no.such/file", ["names no file"]),
    ("package:nowhere/" + "x" * 200, ["xxx... comes with the Python package nowhere"]),
    ("package:nowhere/" + "x" * 5000, ["'package:nowhere/xxx", "xxx...'"]),
])
def test_an_unknown_name_says_what_could_be_meant(no_hub: list[str], name: str, parts: list[str]) -> None:
    refused(ModelNotFound, name, *parts)
    with pytest.raises(ModelNotFound) as caught:
        loader.load(name)
    assert len(str(caught.value)) < 400
    assert no_hub == []


@pytest.mark.parametrize("name", [5, None, True, b"demo"])
def test_what_is_no_name(no_hub: list[str], name: Any) -> None:
    refused(BadConfig, name, repr(name), "give a name")
    assert no_hub == []


def test_a_path_is_never_looked_for_on_the_hub(no_hub: list[str]) -> None:
    refused(ModelNotFound, Path("org/name"), "no model or directory")
    assert no_hub == []


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    refused(ModelNotFound, tmp_path / "model.safetensors", "a file of another kind", "directory")


# Loading.


@pytest.mark.parametrize("shards", [1, 3])
def test_a_directory_is_loaded(tmp_path: Path, shards: int) -> None:
    write_model(tmp_path, shards=shards)
    model = loader.load(tmp_path)
    assert model.name == str(tmp_path)
    assert model.context_length == 4096
    assert model.tokenizer.decode(model.tokenizer.encode("the hello")) == "the hello"
    assert set(dtypes(model)) == {mx.float32}


@pytest.mark.parametrize("bits", [None, 4])
def test_an_embedding_is_read_with_a_pass_only_as_the_output_head(tmp_path: Path, bits: int | None) -> None:
    tied, untied = (
        loader.load(write_model(tmp_path / f"{tied}", bits=bits, tie_word_embeddings=tied)) for tied in (True, False)
    )
    everything = sum(array.nbytes for _, array in tree_flatten(tied.module.parameters()))
    assert tied.bytes_per_pass == untied.bytes_per_pass == everything


def test_end_tokens_of_every_source_are_united(tmp_path: Path) -> None:
    write_model(tmp_path, eos_token_id=3, text_config={"eos_token_id": [4]})
    write_json(tmp_path / "generation_config.json", {"eos_token_id": [5, 6]})
    model = loader.load(tmp_path)
    ends = {3, 4, 5, 6, byte_level().token_to_id("</s>")}
    assert model.tokenizer.end_tokens == ends
    assert model.config["eos_token_id"] == sorted(ends)


def test_the_context_length_may_be_in_the_text_config() -> None:
    assert checkpoint.context_length({"max_position_embeddings": 8}) == 8
    assert checkpoint.context_length({"text_config": {"max_position_embeddings": 9}}) == 9
    assert checkpoint.context_length({"text_config": None}) is None


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(("stored", "expected"), [
    (mx.float16, mx.bfloat16), (mx.bfloat16, mx.bfloat16), (mx.float32, mx.float32)])
def test_dense_weights_on_a_cpu(tmp_path: Path, stored: mx.Dtype, expected: mx.Dtype) -> None:
    assert dtypes(loader.load(write_model(tmp_path, dtype=stored))) == {expected}


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("stored", [mx.float16, mx.bfloat16])
def test_quantized_weights_on_a_cpu_compute_in_float32(tmp_path: Path, stored: mx.Dtype) -> None:
    assert dtypes(loader.load(write_model(tmp_path, dtype=stored, bits=4))) == {mx.float32, mx.uint32}


def test_a_gpu_keeps_what_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_model(tmp_path, dtype=mx.float16)
    monkeypatch.setattr(loader.mx, "default_device", lambda: mx.Device(mx.gpu))
    assert dtypes(loader.load(directory)) == {mx.float16}


def test_a_sentencepiece_only_tokenizer_loads(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    write_model(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("the quick brown fox jumps over the lazy dog\n" * 50)
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(tmp_path / "tokenizer"), vocab_size=60, model_type="bpe",
        byte_fallback=False, minloglevel=2)
    write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>"})
    tokenizer = loader.load(tmp_path).tokenizer
    assert tokenizer.decode(tokenizer.encode("the lazy fox")) == "the lazy fox"


def test_a_stale_index_is_ignored(tmp_path: Path) -> None:
    write_model(tmp_path)
    write_json(tmp_path / checkpoint.INDEX, {"weight_map": {"a": "model-00001-of-00002.safetensors"}})
    assert checkpoint.is_complete(tmp_path)
    loader.load(tmp_path)


# Bad input.


def test_no_config(tmp_path: Path) -> None:
    refused(ModelNotFound, tmp_path, "no config.json", ".gguf")
    (tmp_path / "weights.gguf").write_bytes(b"GGUF")
    refused(ModelNotFound, tmp_path, "it has weights.gguf")


@pytest.mark.parametrize("text", ["{", "[]", "", "\udc80"])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json", checkpoint.INDEX])
def test_bad_json(tmp_path: Path, file: str, text: str) -> None:
    write_model(tmp_path)
    (tmp_path / file).write_bytes(text.encode("utf-8", "surrogateescape"))
    refused(BadConfig, tmp_path, file, "download the model again")


def test_no_weights(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    refused(ModelNotFound, tmp_path, "no weights", "only pytorch_model.bin", "mlx_lm.convert")
    (tmp_path / "pytorch_model.bin").unlink()
    refused(ModelNotFound, tmp_path, "no weights", "download the model again")


@pytest.mark.parametrize("index", [True, False])
def test_a_missing_shard_is_named(tmp_path: Path, index: bool) -> None:
    write_model(tmp_path, shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    if not index:
        (tmp_path / checkpoint.INDEX).unlink()
    refused(ModelNotFound, tmp_path, "lacks model-00002-of-00003.safetensors;")
    assert not checkpoint.is_complete(tmp_path)


@pytest.mark.parametrize(("keep", "part"), [
    (0.5, "is cut short"), (0.99, "is cut short"), (0.01, "is cut short"), (0.0, "is cut short")])
def test_truncated_weights_are_named(tmp_path: Path, keep: float, part: str) -> None:
    write_model(tmp_path, shards=2)
    file = tmp_path / "model-00002-of-00002.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * keep)])
    refused(ModelNotFound, tmp_path, str(file), part, "download the model again")


def test_what_is_no_safetensors_file_is_named(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"<html>not found</html>" * 10)
    refused(ModelNotFound, tmp_path, "model.safetensors is damaged")
    (tmp_path / "model.safetensors").write_bytes((20).to_bytes(8, "little") + b"<html>not found</html>" * 10)
    refused(ModelNotFound, tmp_path, "model.safetensors is damaged")
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    refused(ModelNotFound, tmp_path, "Git LFS", "git lfs pull")


def test_two_models_in_one_directory(tmp_path: Path) -> None:
    write_model(tmp_path, shards=2)
    shutil.copy(tmp_path / "model-00001-of-00002.safetensors", tmp_path / "model.safetensors")
    refused(BadConfig, tmp_path, "both hold", "Remove")


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    write_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    write_json(tmp_path / "config.json", config | {"model_type": "perceptron"})
    refused(BadConfig, tmp_path, str(tmp_path), "'perceptron'")


def test_an_unknown_rope_kind_is_named(tmp_path: Path) -> None:
    write_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    write_json(tmp_path / "config.json", config | {"rope_scaling": {"rope_type": "spiral", "factor": 2}})
    refused(BadConfig, tmp_path, "'spiral'")


def test_weights_that_do_not_fit(tmp_path: Path) -> None:
    write_model(tmp_path)
    weights = mx.load(str(tmp_path / "model.safetensors"))
    name = "model.layers.1.mlp.up_proj.weight"
    write_weights(tmp_path, weights | {"model.extra.weight": mx.zeros((2,))})
    refused(BadConfig, tmp_path, "Received 1 parameters not in model", "model.extra.weight")
    write_weights(tmp_path, {key: value for key, value in weights.items() if "layers.1" not in key})
    refused(BadConfig, tmp_path, "Missing", "model.layers.1.", "more")
    write_weights(tmp_path, weights | {name: mx.zeros((2, 2))})
    refused(BadConfig, tmp_path, "Expected shape", name)


def test_a_config_that_lacks_a_value(tmp_path: Path) -> None:
    write_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["hidden_size"]
    write_json(tmp_path / "config.json", config)
    refused(BadConfig, tmp_path, "hidden_size")


@pytest.mark.parametrize("key", ["num_hidden_layers", "text_config"])
def test_more_layers_than_tensors(tmp_path: Path, key: str) -> None:
    write_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    write_json(tmp_path / "config.json",
               config | {key: {"num_hidden_layers": 200_000} if key == "text_config" else 200_000})
    refused(BadConfig, tmp_path, "num_hidden_layers in config.json is 200000", "tensors", "download the model again")


@pytest.mark.parametrize(("changes", "parts"), [
    ({"text_config": [1]}, ["text_config in", "is a list, not an object"]),
    ({"text_config": "x"}, ["text_config in", "is a str"]),
    ({"quantization_config": {"quant_method": "awq"}}, ["quantization_config", "'awq'", "*.qweight"]),
    ({"quantization_config": {"bits": 4}}, ["config.json of", "lacks 'quant_method'"]),
    ({"quantization_config": {}, "quantization": {"bits": 4}}, ["config.json of", "lacks 'group_size'"]),
])
def test_a_config_of_the_wrong_shape(tmp_path: Path, changes: dict[str, Any], parts: list[str]) -> None:
    refused(BadConfig, write_model(tmp_path, **changes), *parts)


def test_code_of_a_model_is_never_run(tmp_path: Path) -> None:
    write_model(tmp_path, model_file="model.py")
    (tmp_path / "model.py").write_text("raise SystemExit('ran')")
    refused(BadConfig, tmp_path, "asks to run 'model.py'", "never runs code")


def test_code_of_a_tokenizer_is_never_run(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    write_json(tmp_path / "tokenizer_config.json", {
        "tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}})
    (tmp_path / "own.py").write_text("raise SystemExit('ran')")
    refused(BadConfig, tmp_path, "tokenizer of")


def test_a_broken_tokenizer(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    refused(BadConfig, tmp_path, "tokenizer of", "download the model again")


def test_a_model_larger_than_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path)
    monkeypatch.setattr(loader, "available_memory", lambda: 1000)
    refused(DoesNotFit, tmp_path, str(tmp_path), "GB")


def test_memory_that_runs_out_while_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("[malloc] Unable to allocate 1 bytes.")

    write_model(tmp_path)
    monkeypatch.setattr(loader.mx, "eval", fail)
    refused(DoesNotFit, tmp_path, "memory ran out", "mlx-spec models")


# Pairs.


def test_a_pair_is_judged_by_its_tokenizers(tmp_path: Path) -> None:
    target = loader.load(write_model(tmp_path / "target"))
    draft = loader.load(write_model(tmp_path / "draft", vocab_size=300, seed=1))
    assert loader.check_pair(target, draft) == []
    other = write_model(tmp_path / "other")
    write_tokenizer(other, byte_level((("l", "l"), ("h", "e"), ("Ġ", "t"), ("Ġt", "he"))))
    with pytest.raises(IncompatiblePair, match="'he' in the target and 'll' in the draft"):
        loader.check_pair(target, loader.load(other))
    backend = byte_level()
    backend.model = models.BPE(backend.get_vocab(), [("l", "l")])
    write_tokenizer(other, backend)
    with pytest.raises(IncompatiblePair, match="split the same text differently"):
        loader.check_pair(target, loader.load(other))


@pytest.mark.parametrize(
    ("types", "on_cpu", "from_gguf", "expected"),
    [
        ({"weight": mx.float16}, True, False, {"weight": mx.bfloat16}),
        ({"weight": mx.bfloat16}, True, False, {"weight": mx.bfloat16}),
        ({"weight": mx.float32}, True, False, {"weight": mx.float32}),
        ({"scales": mx.float16, "norm": mx.bfloat16}, True, False, {"scales": mx.float32, "norm": mx.float32}),
        ({"scales": mx.float16, "norm": mx.float32}, False, True, {"scales": mx.float16, "norm": mx.float16}),
        ({"weight": mx.bfloat16, "norm": mx.float32}, False, True, {"weight": mx.bfloat16, "norm": mx.bfloat16}),
        ({"scales": mx.bfloat16, "norm": mx.float32}, False, False, {"scales": mx.bfloat16, "norm": mx.float32}),
    ],
)
def test_compute_type_follows_the_backend(types, on_cpu, from_gguf, expected) -> None:
    module = nn.Module()
    for name, dtype in types.items():
        module[name] = mx.zeros((2, 2), dtype)
    loader.choose_compute_type(module, on_cpu=on_cpu, from_gguf=from_gguf)
    assert {name: module[name].dtype for name in types} == expected


@pytest.mark.parametrize(("draft", "read"), [
    (None, ["70B", "1B"]), (False, ["70B"]), ("other", ["70B", "other"]), ("absent", []),
])  # fmt: skip
def test_both_of_a_pair_are_found_before_one_is_read(
    monkeypatch: pytest.MonkeyPatch, draft: Any, read: list[str]
) -> None:
    """A mistyped draft is said at once, not after minutes of reading the target."""
    steps: list[str] = []
    entry = mock.Mock(draft="1B")

    def find(name: str) -> loader.Source:
        if name == "absent":
            raise ModelNotFound("absent")
        return loader.Source(name, Path(), entry if name == "70B" else None)

    monkeypatch.setattr(loader, "resolve", find)
    monkeypatch.setattr(loader, "load", lambda source: steps.append(source.name) or source.name)
    if draft == "absent":
        with pytest.raises(ModelNotFound):
            loader.load_pair("70B", draft)
    else:
        assert loader.load_pair("70B", draft) == ("70B", read[1] if len(read) > 1 else None, entry)
        assert loader.load_pair("1B", None) == ("1B", None, None)
        assert steps.pop() == "1B"
    assert steps == read
