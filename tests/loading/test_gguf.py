"""GGUF files written here, read back and compared with an mlx-lm model that has the same values."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes, load_model, load_tokenizer

from mlx_spec.errors import BadConfig, MLXSpecError, ModelNotFound
from mlx_spec.loading.gguf.config import _llama3_scaling
from mlx_spec.loading.gguf.loader import load_gguf
from mlx_spec.loading.gguf.tokenizer import build_tokenizer
from mlx_spec.loading.gguf.weights import WIDTHS, quantized

gguf = pytest.importorskip("gguf")
Type = gguf.GGMLQuantizationType

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, LAYERS = 256, 4, 2, 64, 512, 2
TEXTS = [
    "Hello world", "  two spaces\n\n\tx = 1234567;\r\n  for (i=0; i<10; i++) {}  ", "", " ",
    "don't I'LL we've 3.14",
    "naïve café — 日本語 한국어 🙂👩‍👩‍👧 e\u0301",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>", "a" * 50,
    "<tool_call>{}</tool_call>", "مرحبا ١٢٣ \u200b\ufeff x²", "\x00\x7f", "<s>[INST] hi [/INST]</s>",
]  # fmt: skip


def byte_alphabet() -> list[str]:
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def vocabulary() -> tuple[list[str], list[int]]:
    """Bytes, one merge, two control tokens, a whole-word token, and a filler as converters write it."""
    tokens = [*byte_alphabet(), "he", "<|begin|>", "<|im_end|>", "<think>", "[PAD260]"]
    return tokens, [1] * 257 + [3, 3, 4, 5]


def permute(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows to the order in which llama files store queries and keys: halves of a head interleaved."""
    return values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def tensors_of(architecture: str, *, tied: bool = False) -> dict[str, np.ndarray]:
    """Random float32 weights under GGUF's names, rows in our order."""
    random = np.random.default_rng(0)
    rows, columns = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (261, HIDDEN), "output_norm.weight": (HIDDEN,)}
    if not tied:
        shapes["output.weight"] = (261, HIDDEN)
    for i in range(LAYERS):
        layer = {
            "attn_q": (rows, HIDDEN), "attn_k": (columns, HIDDEN), "attn_v": (columns, HIDDEN),
            "attn_output": (HIDDEN, rows), "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN),
            "ffn_down": (HIDDEN, INNER), "attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,),
        }  # fmt: skip
        if architecture == "qwen3":
            layer |= {"attn_q_norm": (HEAD_DIM,), "attn_k_norm": (HEAD_DIM,)}
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in layer.items()}
        if architecture == "qwen2":
            shapes |= {f"blk.{i}.attn_{n}.bias": (rows if n == "q" else columns,) for n in "qkv"}
    return {
        name: (random.standard_normal(shape) * 0.1 + ("norm" in name)).astype(np.float32)
        for name, shape in shapes.items()
    }


def write(
    path: Path,
    architecture: str = "llama",
    types: Callable[[str], Any] = lambda name: None,
    *,
    tied: bool = False,
    edit: Callable[[dict[str, Any]], None] = lambda metadata: None,
    tensors: dict[str, np.ndarray] | None = None,
    split: int = 0,
) -> dict[str, np.ndarray]:
    """Write a file, and return what its reader must find: float32 under GGUF's names, rows in our order.

    types(name) gives the type of a tensor, None for float32; edit changes the metadata before it is written.
    """
    tokens, token_types = vocabulary()
    metadata: dict[str, Any] = {
        "block_count": LAYERS, "context_length": 512, "embedding_length": HIDDEN,
        "feed_forward_length": INNER, "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS,
        "rope.freq_base": 10000.0, "attention.layer_norm_rms_epsilon": 1e-5, "attention.key_length": HEAD_DIM,
    }  # fmt: skip
    metadata = {f"{architecture}.{key}": value for key, value in metadata.items()} | {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": token_types, "tokenizer.ggml.merges": ["h e"],
        "tokenizer.ggml.bos_token_id": 257, "tokenizer.ggml.eos_token_id": 258,
    }  # fmt: skip
    edit(metadata)
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split)
    for key, value in metadata.items():
        add: dict[type, Any] = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32,
                                float: writer.add_float32, list: writer.add_array}  # fmt: skip
        add[type(value)](key, value)
    expected = {}
    for name, values in (tensors_of(architecture, tied=tied) if tensors is None else tensors).items():
        kind = types(name)
        part = name.split(".")[-2]
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(part) if architecture == "llama" else None
        stored = values if heads is None else permute(values, heads)
        if kind is None:
            writer.add_tensor(name, stored)
            expected[name] = values
            continue
        writer.add_tensor(name, gguf.quantize(stored, kind), raw_dtype=kind)
        expected[name] = gguf.dequantize(gguf.quantize(values, kind), kind)  # rows are quantized one by one
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def reference(config: dict[str, Any], expected: dict[str, np.ndarray], dtype: Any = mx.float32) -> Any:
    """An mlx-lm model in float32 that holds these values."""
    names = {
        "token_embd": "embed_tokens", "output_norm": "norm", "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }  # fmt: skip
    model_class, arguments = _get_classes(config)
    model = model_class(arguments.from_dict(config))
    weights = []
    for name, values in expected.items():
        *layer, part, kind = name.split(".")
        inside = f"layers.{layer[1]}." if layer else ""
        place = "lm_head" if part == "output" else f"model.{inside}{names[part]}"
        weights.append((f"{place}.{kind}", mx.array(values, dtype=dtype)))
    model.load_weights(weights, strict=True)
    return model


def widen(module: Any) -> Any:
    module.apply(lambda array: array.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else array)
    return module


def assert_same_logits(module: Any, model: Any) -> None:
    tokens = mx.array([[257, 3, 50, 7, 255, 100, 9, 30]])
    difference = mx.abs(widen(module)(tokens) - model(tokens)).max().item()
    assert difference < 1e-4, difference


MIXED = {
    "token_embd": "Q8_0", "output": "Q4_1", "attn_q": "Q4_0", "attn_k": "Q5_0", "ffn_up": "Q5_1",
    "ffn_down": "Q8_0",
}  # fmt: skip


def mixed(name: str) -> Any:
    kind = MIXED.get(name.split(".")[-2]) if name.endswith("weight") else None
    return None if kind is None else Type[kind]


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_dense_and_mixed_files_give_mlx_lm_logits(tmp_path: Path, architecture: str, tied: bool) -> None:
    for types in (lambda name: None, mixed):
        expected = write(tmp_path / "m.gguf", architecture, types, tied=tied)
        module, config, _ = load_gguf(tmp_path / "m.gguf", _get_classes)
        assert config["tie_word_embeddings"] is tied
        assert_same_logits(module, reference(config, expected))
    assert config["quantization"]["model.embed_tokens"] == {"group_size": 32, "bits": 8}
    assert config["quantization"]["model.layers.1.self_attn.k_proj"]["bits"] == 5
    assert "model.layers.1.self_attn.v_proj" not in config["quantization"]


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_sixteen_bits_stay(tmp_path: Path, kind: str) -> None:
    expected = write(tmp_path / "m.gguf", types=lambda name: None if "norm" in name else Type[kind])
    module, config, _ = load_gguf(tmp_path / "m.gguf", _get_classes)
    assert "quantization" not in config
    dtype = module.model.layers[0].self_attn.q_proj.weight.dtype
    assert dtype == {"F16": mx.float16, "BF16": mx.bfloat16}[kind]
    assert_same_logits(module, reference(config, expected))


def test_attention_biases_of_llama_are_reordered_too(tmp_path: Path) -> None:
    tensors, random = tensors_of("llama"), np.random.default_rng(1)
    for i in range(LAYERS):
        for name, rows in {"q": 256, "k": 128, "v": 128, "output": 256}.items():
            tensors[f"blk.{i}.attn_{name}.bias"] = random.standard_normal(rows).astype(np.float32)
    expected = write(tmp_path / "m.gguf", tensors=tensors)
    module, config, _ = load_gguf(tmp_path / "m.gguf", _get_classes)
    assert_same_logits(module, reference(config, expected))


def test_split_file(tmp_path: Path) -> None:
    expected = write(tmp_path / "m.gguf", types=mixed, split=8)
    parts = sorted(tmp_path.glob("m-*-of-*.gguf"))
    assert len(parts) == 3
    module, config, _ = load_gguf(parts[1], _get_classes)
    assert_same_logits(module, reference(config, expected))
    parts[0].rename(tmp_path / "other.gguf")
    with pytest.raises(ModelNotFound, match="m-00001-of-00003"):
        load_gguf(parts[1], _get_classes)
    with pytest.raises(BadConfig, match="split into 3 files"):
        load_gguf(tmp_path / "other.gguf", _get_classes)


def random_blocks(kind: Any, rows: int, columns: int) -> np.ndarray:
    """Random bytes of a type, with the float16 factors of each block in the range of real ones."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(0)
    data = random.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    two = {"Q4_1": 0, "Q5_1": 0, "Q4_K": 0, "Q5_K": 0, "Q2_K": 80}
    one = {"Q3_K": 108, "Q6_K": 208, "TQ2_0": 64}
    places = [two[kind.name], two[kind.name] + 2] if kind.name in two else [one.get(kind.name, 0)]
    for place in places:
        factor = random.uniform(1e-4, 1e-3, data.shape[:2]).astype(np.float16)
        data[..., place : place + 2] = factor[..., None].view(np.uint8)
    return data.reshape(rows, -1)


def read_back(parts: dict[str, mx.array], bits: int) -> np.ndarray:
    floats = (parts[name].astype(mx.float32) for name in ("scales", "biases"))
    return np.array(mx.dequantize(parts["weight"], *floats, group_size=32, bits=bits))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_moved_blocks_are_exact(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_spec.loading.gguf.weights._ELEMENTS_AT_A_TIME", 5 * 1024)  # slices, the last short
    data, order = random_blocks(Type[kind], 32, 1024), np.random.default_rng(1).permutation(32)
    parts = quantized(data, Type[kind], order)
    assert parts["scales"].dtype == parts["biases"].dtype == mx.float16
    assert np.array_equal(read_back(parts, WIDTHS[kind]), gguf.dequantize(data, Type[kind])[order])


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [("Q4_K", 5e-4), ("Q5_K", 5e-4), ("Q6_K", 0.03), ("Q3_K", 0.15), ("Q2_K", 0.3), ("IQ4_NL", 0.1),
     ("IQ4_XS", 0.1), ("IQ3_S", 0.12), ("IQ3_XXS", 0.12), ("IQ2_S", 0.25), ("IQ2_XS", 0.25),
     ("IQ2_XXS", 0.25), ("IQ1_S", 0.15), ("TQ2_0", 0.01)],
)  # fmt: skip
def test_other_types_are_near(kind: str, tolerance: float) -> None:
    data = random_blocks(Type[kind], 16, 1024)
    values = gguf.dequantize(data, Type[kind])
    error = read_back(quantized(data, Type[kind], None), WIDTHS[kind]) - values
    assert math.sqrt((error**2).mean() / (values**2).mean()) < tolerance


def llama3_factors(factor: float, original: int = 8192, base: float = 500000.0) -> np.ndarray:
    """Written from the definition: short waves stay, long ones are divided, between them it interpolates."""
    factors = []
    for i in range(0, HEAD_DIM, 2):
        wave = 2 * math.pi * base ** (i / HEAD_DIM)
        smooth = (original / wave - 1) / 3
        middle = 1 / ((1 - smooth) / factor + smooth)
        factors.append(1.0 if wave < original / 4 else factor if wave > original else middle)
    return np.array(factors, dtype=np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recovered(tmp_path: Path, factor: float) -> None:
    tensors = tensors_of("llama") | {"rope_freqs.weight": llama3_factors(factor)}
    expected = write(tmp_path / "m.gguf", tensors=tensors,
                     edit=lambda metadata: metadata.update({"llama.rope.freq_base": 500000.0}))
    module, config, _ = load_gguf(tmp_path / "m.gguf", _get_classes)
    scaling = {"rope_type": "llama3", "type": "llama3", "factor": factor, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
    assert config["rope_scaling"] == scaling
    del expected["rope_freqs.weight"]
    assert_same_logits(module, reference(config, expected))
    with pytest.raises(BadConfig, match="not those of Llama 3"):
        _llama3_scaling(llama3_factors(factor, original=4096).astype(np.float64), HEAD_DIM, 500000.0)
    assert _llama3_scaling(np.ones(32), HEAD_DIM, 500000.0) is None


def test_linear_and_yarn_scaling(tmp_path: Path) -> None:
    def scaled(kind: str, **more: Any) -> Any:
        values = {"type": kind, "factor": 4.0, **more}
        metadata = {f"llama.rope.scaling.{key}": value for key, value in values.items()}
        write(tmp_path / "m.gguf", edit=lambda whole: whole.update(metadata))
        return load_gguf(tmp_path / "m.gguf", _get_classes)[1]["rope_scaling"]

    assert scaled("linear") == {"type": "linear", "rope_type": "linear", "factor": 4.0}
    assert scaled("yarn", original_context_length=128) == {
        "type": "yarn", "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128,
    }  # fmt: skip
    assert scaled("none") is None
    narrower = {"original_context_length": 128, "yarn_beta_fast": 16.0}
    refused = (("longrope", {}, "longrope"), ("yarn", {}, "yarn"), ("yarn", narrower, "yarn_beta_fast"))
    for kind, more, named in refused:
        with pytest.raises(BadConfig, match=named):
            scaled(kind, **more)


def failure(path: Path, kind: type[MLXSpecError] = BadConfig) -> str:
    with pytest.raises(kind) as caught:
        load_gguf(path, _get_classes)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_bad_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    assert str(path) in failure(path, ModelNotFound)
    for content in (b"", b"{}", b"not a gguf file at all"):
        path.write_bytes(content)
        assert "not a GGUF file" in failure(path)
    write(path)
    whole = path.read_bytes()
    for length in (4, 12, 24, 40, 3000, 8000, len(whole) // 2, len(whole) - 100):
        path.write_bytes(whole[:length])
        assert "truncated or broken" in failure(path)
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "pip install 'mlx-spec[gguf]'" in failure(path)


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("llama.block_count", None, "llama.block_count is None"),
        ("llama.attention.head_count_kv", [1, 2], r"head_count_kv is \[1, 2\]"),
        ("llama.block_count", 3, r"blk\.2\.attn_norm"),
        ("llama.block_count", 1, "do not fit"),
        ("llama.context_length", "long", "context_length is 'long'"),
        ("llama.attention.sliding_window", "wide", "metadata .* is broken"),
        ("tokenizer.ggml.token_type", 1, "metadata .* is broken"),
        ("tokenizer.chat_template", 7, "chat_template is 7"),
        ("llama.feed_forward_length", 1024, "do not fit"),
        ("llama.attention.head_count", 2, "attn_q.weight of this GGUF file has 256 rows"),
        ("llama.expert_count", 8, "expert_count is 8"),
        ("llama.rope.dimension_count", 32, "rope.dimension_count is 32"),
        ("llama.attention.sliding_window", 64, "sliding_window is 64"),
        ("tokenizer.ggml.pre", "chatglm-bpe", "'chatglm-bpe'; known are .*llama-bpe"),
        ("tokenizer.ggml.pre", None, "pre-tokenizer .* is None"),
        ("tokenizer.ggml.model", "rwkv", "'rwkv'"),
        ("tokenizer.ggml.tokens", None, "0 tokens"),
        ("tokenizer.ggml.eos_token_id", 999, "eos_token_id is 999"),
        ("tokenizer.ggml.merges", ["h zz"], "cannot be built"),
        ("tokenizer.ggml.model", "llama", "0 scores"),
    ],
)
def test_bad_metadata(tmp_path: Path, key: str, value: Any, named: str) -> None:
    def edit(metadata: dict[str, Any]) -> None:
        metadata.pop(key, None)
        if value is not None:
            metadata[key] = value

    write(tmp_path / "m.gguf", edit=edit)
    with pytest.raises(BadConfig, match=named):
        load_gguf(tmp_path / "m.gguf", _get_classes)


def test_bad_tensors(tmp_path: Path) -> None:
    path, tensors = tmp_path / "m.gguf", tensors_of("llama")
    write(path, "gemma2")
    assert "'gemma2'; llama, qwen2, qwen3 can be read" in failure(path)
    write(path, tensors={name: values for name, values in tensors.items() if "blk.1.ffn_up" not in name})
    assert "model.layers.1.mlp.up_proj.weight" in failure(path)
    write(path, tensors={name: values for name, values in tensors.items() if name != "token_embd.weight"})
    assert "token_embd.weight" in failure(path)
    write(path, tensors=tensors | {"blk.0.ssm_in.weight": np.ones((2, 32), np.float32)})
    assert "blk.0.ssm_in.weight" in failure(path)
    write(path, tensors=tensors | {"blk.0.ffn_up.weight": np.ones((INNER, HIDDEN), np.float64)})
    assert "blk.0.ffn_up.weight of this GGUF file has type F64" in failure(path)


def test_empty_tensors_are_named(tmp_path: Path) -> None:
    path, tensors = tmp_path / "m.gguf", tensors_of("llama")
    empty = {"blk.0.ffn_up.weight": (INNER, 0), "token_embd.weight": (0, HIDDEN), "blk.0.attn_norm.weight": (0,)}
    for name, shape in empty.items():
        write(path, tensors=tensors | {name: np.ones(shape, np.float32)})
        assert f"Tensor {name} of {path} is empty" in failure(path)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_K", "Q6_K"])
def test_scales_that_overflow_warn_of_nothing(kind: str) -> None:
    data = np.full_like(random_blocks(Type[kind], 2, 256), 0x7B)  # each half of it is 61280
    parts = quantized(data, Type[kind], None)
    assert not mx.isfinite(parts["biases"]).all()


def test_tokens_of_a_byte_level_file(tmp_path: Path) -> None:
    def edit(metadata: dict[str, Any]) -> None:
        turn = "{{ m['content'] }}<|im_end|>"
        metadata["tokenizer.chat_template"] = f"{{% for m in messages %}}{turn}{{% endfor %}}"
        metadata["tokenizer.ggml.add_bos_token"] = True
        metadata["tokenizer.ggml.eos_token_id"] = 257
        metadata["tokenizer.ggml.eom_token_id"] = 256

    write(tmp_path / "m.gguf", edit=edit)
    _, config, tokenizer = load_gguf(tmp_path / "m.gguf", _get_classes)
    assert config["eos_token_id"] == [257, 256, 258]  # named, then known by its text
    assert tokenizer.eos_token_ids == {256, 257, 258}
    assert config["bos_token_id"] == tokenizer.bos_token_id == 257
    ids = tokenizer.encode("the<|im_end|><think>")
    assert ids == [257, tokenizer.get_vocab()["t"], 256, 258, 259]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "t<think>"
    assert tokenizer.encode("he", add_special_tokens=False) == [256]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "t"}]) == [ids[1], 258]
    assert "[PAD260]" not in tokenizer.get_vocab()


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("llama-bpe", "Don't 12345 x!\n", ["Don", "'t", "Ġ", "123", "45", "Ġx", "!Ċ"]),
        ("qwen2", "Don't 12 x!\n", ["Don", "'t", "Ġ", "1", "2", "Ġx", "!Ċ"]),
        ("tekken", "HelloWorld 12", ["Hello", "World", "Ġ", "1", "2"]),
        ("smollm", "it's 12 x", ["it", "'s", "Ġ", "1", "2", "Ġx"]),
        ("gpt-2", "it's 12 x", ["it", "'s", "Ġ12", "Ġx"]),
    ],
)
def test_pre_tokenizers_cut_as_published(name: str, text: str, pieces: list[str]) -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": name, "tokenizer.ggml.tokens": byte_alphabet(),
        "tokenizer.ggml.merges": [],
    }  # fmt: skip
    tokenizer, _ = build_tokenizer(metadata, 128)
    cuts = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [piece for piece, _ in cuts] == pieces


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_ids_are_sentencepieces_own(tmp_path: Path, prefix: bool) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    source = Path(__file__).read_text(encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(source.splitlines()), model_prefix=str(tmp_path / "spm"), vocab_size=700,
        model_type="bpe", byte_fallback=True, character_coverage=0.99, add_dummy_prefix=prefix,
        normalization_rule_name="identity", remove_extra_whitespaces=False, split_digits=True, minloglevel=2,
        allow_whitespace_only_pieces=True,
    )  # fmt: skip
    model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "spm.model"))
    size = range(model.vocab_size())
    metadata = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in size],
        "tokenizer.ggml.scores": [model.get_score(i) for i in size],
        "tokenizer.ggml.token_type": [2 if model.is_unknown(i) else 3 if model.is_control(i) else
                                      6 if model.is_byte(i) else 1 for i in size],
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0, "tokenizer.ggml.add_space_prefix": prefix,
    }  # fmt: skip
    tokenizer, ends = build_tokenizer(metadata, 512)
    assert ends == [2]
    for text in [*TEXTS, *source.splitlines()[:200]]:
        if "<s>" in text:  # special here, plain text to sentencepiece
            continue
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == model.encode(text), text
        assert tokenizer.encode(text) == [1, *ids]
        assert tokenizer.decode(ids) == model.decode(ids)
        detokenizer = tokenizer.detokenizer
        for token in ids:
            detokenizer.add_token(token)
        detokenizer.finalize()
        assert detokenizer.text.strip() == text.strip()
    assert tokenizer.encode("<s>a</s>", add_special_tokens=False)[0] == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2-135m", "qwen2.5-coder-0.5b"])
def test_real_file_equals_its_directory(real_models: Path, name: str) -> None:
    path, directory = real_models / f"{name}.gguf", real_models / name
    if not path.exists() or not directory.exists():
        pytest.skip(f"{path} and {directory} are not both there")
    module, config, tokenizer = load_gguf(path, _get_classes)
    same = load_tokenizer(directory)
    for text in [*TEXTS, Path(__file__).read_text(encoding="utf-8")]:
        ids = tokenizer.encode(text)
        assert ids == same.encode(text)
        assert tokenizer.decode(ids) == same.decode(ids)
    messages = [{"role": "user", "content": "What is gravity?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert prompt == same.apply_chat_template(messages, add_generation_prompt=True)

    model, _ = load_model(directory, lazy=True)
    shared = {"model_type", "hidden_size", "num_hidden_layers", "rope_theta", "vocab_size", "bos_token_id"}
    stored = load_model(directory, lazy=True, strict=False)[1]
    assert {key: config[key] for key in shared} == {key: stored[key] for key in shared}
    tokens = mx.array([prompt])
    logits, expected = widen(module)(tokens), model(tokens).astype(mx.float32)
    agreement = (logits.argmax(-1) == expected.argmax(-1)).astype(mx.float32).mean().item()
    assert agreement > 0.9
    if name == "smollm2-135m":  # Q4_1 and Q8_0 only: both hold the same values, one rounded to bfloat16
        weights = dict(tree_flatten(model.parameters()))
        layer = module.model.layers[3].self_attn.q_proj
        values = mx.dequantize(layer.weight, layer.scales, layer.biases, group_size=32, bits=layer.bits)
        assert mx.array_equal(values.astype(mx.bfloat16), weights["model.layers.3.self_attn.q_proj.weight"])
