"""The native definitions against mlx-lm's on the same weights, and contexts against fresh ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes
from tiny import CONFIG, randomise, tiny_model

from mlx_spec.architectures import decoder, llama, qwen2, qwen3
from mlx_spec.architectures.context import prefill
from mlx_spec.architectures.definitions import NATIVE, Decoder, model_classes
from mlx_spec.architectures.paged import PagedContext, PagedModel
from mlx_spec.errors import BadConfig
from mlx_spec.kv import PAGE

BASE = CONFIG | {"intermediate_size": 64, "head_dim": 8, "rope_scaling": None}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "type": "longrope", "original_max_position_embeddings": 64,
    "short_factor": [1.0, 1.0, 1.0, 1.0], "long_factor": [1.0, 1.5, 2.0, 3.0],
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, one query head per kv head": {"num_key_value_heads": 4},
    "llama, four query heads per kv head": {"num_key_value_heads": 1},
    "llama, untied": {"tie_word_embeddings": False},
    "llama, biases": {"attention_bias": True, "mlp_bias": True},
    "llama, attention biases": {"attention_bias": True},
    "llama, wide heads": {"head_dim": 20},
    "llama, narrow heads, untied": {"head_dim": 4, "tie_word_embeddings": False, "rope_theta": 500000.0},
    "llama, llama3 rope": {"rope_scaling": LLAMA3, "rope_theta": 500000.0},
    "llama, linear rope": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama, yarn": {"rope_scaling": YARN},
    "llama, longrope": {"rope_scaling": LONGROPE},
    "llama, default rope": {"rope_scaling": {"rope_type": "default"}},
    "llama, interleaved rope": {"rope_traditional": True},
    "llama, interleaved llama3 rope": {"rope_traditional": True, "rope_scaling": LLAMA3},
    "mistral": {"model_type": "mistral", "tie_word_embeddings": False, "rope_theta": 1e6},
    "qwen2": {"model_type": "qwen2", "rope_theta": 1e6},
    "qwen2, untied, yarn": {"model_type": "qwen2", "tie_word_embeddings": False, "rope_scaling": YARN},
    "qwen3": {"model_type": "qwen3", "rope_theta": 1e6},
    "qwen3, untied, wide heads": {"model_type": "qwen3", "tie_word_embeddings": False, "head_dim": 20},
    "qwen3, three layers": {"model_type": "qwen3", "num_hidden_layers": 3, "num_key_value_heads": 1},
}


def mixed(path: str, module: nn.Module) -> bool | dict[str, Any]:
    """4 bits, but 8 for some layers and none for others, as mixed recipes have it."""
    if not hasattr(module, "to_quantized") or "o_proj" in path:
        return False
    return {"bits": 8, "group_size": 32} if "layers.0" in path or "embed" in path else True


QUANTIZERS: dict[str, Callable[[nn.Module], None]] = {
    "4 bits": lambda module: nn.quantize(module, group_size=32, bits=4),
    "8 bits": lambda module: nn.quantize(module, group_size=32, bits=8),
    "mixed": lambda module: nn.quantize(module, group_size=32, bits=4, class_predicate=mixed),
}


def both(
    changes: dict[str, Any], quantize: Callable[[nn.Module], None] | None = None, seed: int = 0
) -> tuple[Decoder, nn.Module]:
    """Our definition and mlx-lm's, with the same random weights."""
    config = BASE | changes
    model_class, arguments_class = model_classes(config)
    ours = randomise(model_class(arguments_class.from_dict(config)), seed)
    assert isinstance(ours, Decoder)
    model_class, arguments_class = _get_classes(config)
    theirs = model_class(arguments_class.from_dict(config))
    weights = tree_flatten(ours.parameters())
    theirs.load_weights(weights, strict=True)
    if quantize is not None:
        quantize(ours)
        quantize(theirs)
    return ours, theirs


def full(module: nn.Module, tokens: list[int]) -> np.ndarray:
    """mlx-lm's logits, in one pass without a cache: (n, vocabulary)."""
    return np.array(module(mx.array([tokens]))[0])


def check(actual: mx.array, expected: np.ndarray) -> None:
    assert actual.shape == expected.shape
    np.testing.assert_allclose(np.array(actual), expected, atol=5e-5, rtol=0)


class Walk:
    """A context and what it should hold. Every logit it gives is compared with mlx-lm's full pass."""

    def __init__(self, context: PagedContext, reference: nn.Module, seed: int = 0) -> None:
        self.context, self.reference = context, reference
        self.random = np.random.default_rng(seed)
        self.tokens: list[int] = []
        self.unchecked: list[tuple[int, mx.array]] = []

    def extend(self, count: int, rows: int | None = None) -> None:
        new = self.random.integers(0, 40, count).tolist()
        self.tokens += new
        logits = self.context.extend(new, rows)
        assert self.context.length == len(self.tokens)
        self.unchecked.append((len(self.tokens) - len(logits), logits))

    def rewind(self, length: int) -> None:
        self.compare()
        self.context.rewind(length)
        del self.tokens[length:]

    def compare(self) -> None:
        expected = full(self.reference, self.tokens)
        for start, logits in self.unchecked:
            check(logits, expected[start : start + len(logits)])
        self.unchecked = []


def decode_and_rewind(walk: Walk) -> None:
    """Prefill in chunks, decode one by one, verify passes, rewinds: at, before and across page borders."""
    for count in (5, 50, 3):
        walk.extend(count)
    for _ in range(8):  # across 64
        walk.extend(1)
    for verified, kept in ((4, 68), (7, 70), (5, 75)):
        walk.extend(verified)
        walk.rewind(kept)
    walk.extend(1)
    walk.extend(60)
    walk.rewind(128)
    walk.extend(1)
    walk.extend(3)
    walk.rewind(126)
    walk.extend(5)
    walk.rewind(64)
    walk.extend(2)
    walk.rewind(0)
    walk.extend(70)
    walk.extend(1)
    walk.compare()


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_mlx_lm(name: str) -> None:
    ours, theirs = both(CONFIGS[name])
    assert type(ours).__module__.startswith("mlx_spec")
    assert type(theirs).__module__.startswith("mlx_lm")
    decode_and_rewind(Walk(PagedModel(ours).new_context(), theirs))


@pytest.mark.parametrize("bits", QUANTIZERS)
@pytest.mark.parametrize("name", ["llama", "llama, untied", "qwen2", "qwen3"])
def test_quantized_logits_equal_mlx_lm(name: str, bits: str) -> None:
    ours, theirs = both(CONFIGS[name], QUANTIZERS[bits])
    assert {path for path, _ in tree_flatten(ours.parameters())} == {
        path for path, _ in tree_flatten(theirs.parameters())}
    assert isinstance(ours.model.embed_tokens, nn.QuantizedEmbedding)
    decode_and_rewind(Walk(PagedModel(ours).new_context(), theirs))


def test_the_settings_under_test_matter() -> None:
    """Each of CONFIGS changes the logits, so that ignoring one cannot pass unseen."""
    tokens = list(range(30)) * 3
    plain = {}
    for name in ("llama", "llama, llama3 rope", "llama, linear rope", "llama, yarn", "llama, longrope",
                 "llama, interleaved rope"):
        ours, _ = both(CONFIGS[name])
        plain[name] = np.array(PagedModel(ours).new_context().extend(tokens))
    names = list(plain)
    for index, one in enumerate(names):
        for other in names[index + 1 :]:
            assert np.abs(plain[one] - plain[other]).max() > 0.01, (one, other)


def test_half_precision_is_close() -> None:
    ours, theirs = both({})
    for module in (ours, theirs):
        module.set_dtype(mx.bfloat16)
    model = PagedModel(ours)
    assert model.pool.dtype == mx.bfloat16
    context, tokens = model.new_context(), [(i * 7) % 40 for i in range(70)]
    pieces = (tokens[:66], tokens[66:67], tokens[67:])
    logits = mx.concatenate([context.extend(piece) for piece in pieces])
    assert logits.dtype == mx.bfloat16
    expected = np.array(theirs(mx.array([tokens]))[0].astype(mx.float32))
    assert np.abs(np.array(logits.astype(mx.float32)) - expected).max() < 0.05 * np.abs(expected).max()


# Configurations and weights.


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_native_architectures(kind: str) -> None:
    definition = {"llama": llama, "mistral": llama, "qwen2": qwen2, "qwen3": qwen3}[kind]
    assert model_classes(BASE | {"model_type": kind}) == (definition.Model, definition.ModelArgs)
    full_attention = BASE | {"model_type": kind, "layer_types": ["full_attention"] * 2}
    assert model_classes(full_attention)[0] is definition.Model
    assert kind in NATIVE


def test_sliding_layers_are_not_native() -> None:
    config = BASE | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
    model_class, _ = model_classes(config)
    assert model_class.__module__ == "mlx_lm.models.llama"


def arguments(changes: dict[str, Any], *, without: str | None = None) -> Any:
    config = BASE | changes
    if without is not None:
        del config[without]
    return model_classes(config)[1].from_dict(config)


def test_optional_settings_may_be_absent_or_null() -> None:
    minimal = {key: value for key, value in CONFIG.items() if key not in
               ("num_key_value_heads", "rope_theta", "max_position_embeddings", "tie_word_embeddings")}
    result = llama.ModelArgs.from_dict(minimal)
    assert (result.kv_heads, result.head_dim, result.rope_theta, result.tied) == (4, 8, 10000.0, False)
    nulls = dict.fromkeys(
        ("head_dim", "num_key_value_heads", "rope_scaling", "rope_parameters", "rope_theta"))
    assert llama.ModelArgs.from_dict(minimal | nulls) == result


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads",
                                 "vocab_size", "rms_norm_eps"])
def test_a_missing_key_is_named(kind: str, key: str) -> None:
    with pytest.raises(BadConfig, match=f"no '{key}'.*download the model again"):
        arguments({"model_type": kind}, without=key)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("key", ["hidden_size", "num_attention_heads", "rms_norm_eps"])
@pytest.mark.parametrize("value", [None, "many", [], 0, -1, True])
def test_a_value_of_the_wrong_kind_is_named(kind: str, key: str, value: Any) -> None:
    with pytest.raises(BadConfig, match=key):
        arguments({"model_type": kind, key: value})


@pytest.mark.parametrize("where", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_an_unknown_rope_is_refused_by_name(where: str, key: str) -> None:
    with pytest.raises(BadConfig, match=r"'spiral'.*known are default, linear"):
        arguments({where: {key: "spiral", "factor": 2.0}})


@pytest.mark.parametrize("scaling", [
    {"rope_type": "llama3"}, {"type": "linear"}, {"type": "yarn"}, {"type": "longrope"},
    {"rope_type": "llama3", "factor": "eight"}, {"type": "linear", "factor": 0},
    {"type": "linear", "factor": None},
])
def test_an_incomplete_rope_is_refused(scaling: dict[str, Any]) -> None:
    config = BASE | {"rope_scaling": scaling}
    model_class, arguments_class = model_classes(config)
    with pytest.raises(BadConfig, match="rope_scaling"):
        model_class(arguments_class.from_dict(config))


def test_two_names_for_one_rope_that_disagree() -> None:
    """mlx-lm reads `type` first. What it then builds must be of the kind that was checked."""
    config = BASE | {"rope_scaling": LLAMA3 | {"type": "spiral"}}
    model_class, arguments_class = model_classes(config)
    with pytest.raises(BadConfig, match="spiral"):
        model_class(arguments_class.from_dict(config))


@pytest.mark.parametrize("config", [{}, {"model_type": None}, {"model_type": 3}])
def test_no_model_type(config: dict[str, Any]) -> None:
    with pytest.raises(BadConfig, match="no model_type"):
        model_classes(config)


@pytest.mark.parametrize("kind", ["perceptron", "", "os", "../llama"])
def test_an_unknown_architecture_is_refused_by_name(kind: str) -> None:
    with pytest.raises(BadConfig, match=f"architecture '{kind}' is known neither"):
        model_classes({"model_type": kind})


@pytest.mark.parametrize(("old", "new"), [
    ({"rope_theta": 5e5}, {"rope_theta": 5e5, "rope_type": "default"}),
    ({"rope_theta": 5e5, "rope_scaling": LLAMA3}, LLAMA3 | {"rope_theta": 5e5}),
    ({"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 4.0}},
     {"rope_theta": 1e6, "rope_type": "linear", "factor": 4.0}),
    ({"rope_theta": 1e6, "rope_scaling": YARN},
     {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}),
])
def test_rotary_settings_of_transformers_5(old: dict[str, Any], new: dict[str, Any]) -> None:
    """One nested dictionary, theta included, and nothing beside it."""
    ours, theirs = both(old)
    config = {key: value for key, value in BASE.items() if not key.startswith("rope_")}
    modern = llama.Model(llama.ModelArgs.from_dict(config | {"rope_parameters": new}))
    modern.load_weights(tree_flatten(ours.parameters()))
    tokens = [(i * 7) % 40 for i in range(100)]
    check(PagedModel(modern).new_context().extend(tokens), full(theirs, tokens))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("declared", [True, False, None])
@pytest.mark.parametrize("stored", [True, False])
def test_the_head_is_the_stored_one_unless_declared_tied(kind: str, declared: bool | None, stored: bool) -> None:
    untied, _ = both({"model_type": kind, "tie_word_embeddings": False})
    config = BASE | {"model_type": kind, "tie_word_embeddings": declared}
    if declared is None:
        del config["tie_word_embeddings"]
    weights = dict(tree_flatten(untied.parameters()))
    if not stored:
        del weights["lm_head.weight"]
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = mx.zeros((4,))
    model_class, arguments_class = model_classes(config)
    module = model_class(arguments_class.from_dict(config))
    module.load_weights(list(module.sanitize(weights).items()), strict=True)
    own_head = stored and declared is not True
    assert ("lm_head" in module) == own_head
    if not own_head:
        untied.lm_head.weight = untied.model.embed_tokens.weight
    actual, expected = (PagedModel(model).new_context().extend([1, 2, 3]) for model in (module, untied))
    check(actual, np.array(expected))


def test_a_quantized_head_is_dropped_whole_where_it_is_tied() -> None:
    weights = {f"lm_head.{part}": mx.zeros(1) for part in ("weight", "scales", "biases")}
    tied, _ = both({})
    assert tied.sanitize(weights | {"model.norm.weight": mx.zeros(1)}).keys() == {"model.norm.weight"}


# Contexts.


@pytest.mark.parametrize("rows", [0, 1, 2, 6, 7, 9, None])
def test_rows_are_the_last_ones(rows: int | None) -> None:
    model, tokens = tiny_model(), [(i * 5) % 40 for i in range(70)]
    context, other = model.new_context(), model.new_context()
    context.extend(tokens[:63])
    other.extend(tokens[:63])
    expected = np.array(other.extend(tokens[63:]))
    logits = context.extend(tokens[63:], rows=rows)
    wanted = 7 if rows is None else min(rows, 7)
    assert logits.shape == (wanted, 40)
    np.testing.assert_allclose(np.array(logits), expected[7 - wanted :], atol=1e-5)
    np.testing.assert_allclose(np.array(context.extend([3])), np.array(other.extend([3])), atol=1e-5)


@pytest.mark.parametrize("count", [1, 2, 64, 65, 66, 129, 200])
def test_prefill_leaves_the_last_token(count: int) -> None:
    model, tokens = tiny_model(), [(i * 5) % 40 for i in range(count)]
    context, other, progress = model.new_context(), model.new_context(), []
    prefill(context, tokens, progress.append)
    assert context.length == count - 1 == sum(progress)
    expected = other.extend(tokens, rows=1)
    np.testing.assert_allclose(np.array(context.extend(tokens[-1:])), np.array(expected), atol=1e-5)


def test_tokens_may_be_an_array_or_a_list() -> None:
    model = tiny_model()
    one, two = model.new_context(), model.new_context()
    np.testing.assert_array_equal(
        np.array(one.extend([1, 2, 3])), np.array(two.extend(mx.array([1, 2, 3], mx.int32))))


@pytest.mark.parametrize("at", [1, 40, 64, 70, 128])
def test_forks_diverge_like_fresh_contexts(at: int) -> None:
    ours, theirs = both({})
    model = PagedModel(ours)
    parent = Walk(model.new_context(), theirs)
    parent.extend(at)
    children = []
    for seed in (1, 2):
        child = Walk(parent.context.fork(), theirs, seed)
        child.tokens = list(parent.tokens)
        children.append(child)
    for walk in (children[0], parent, children[1]) * 3:
        walk.extend(2)
    grandchild = Walk(children[0].context.fork(), theirs, seed=3)
    grandchild.tokens = list(children[0].tokens)
    grandchild.rewind(at - 1)
    walks = [parent, *children, grandchild]
    for walk in walks:
        walk.extend(63)
        walk.extend(1)
        walk.compare()
    for walk in walks:
        walk.context.close()
    assert model.pool.pages_in_use == 0


def test_a_neighbour_in_the_pool_changes_nothing() -> None:
    ours, theirs = both({"num_key_value_heads": 1})
    model = PagedModel(ours)
    walks = [Walk(model.new_context(), theirs, seed) for seed in range(3)]
    for count in (1, 62, 2, 1, 3, 64, 1, 1, 5):
        for walk in walks:
            walk.extend(count)
    assert not any(walk.context.table.consecutive for walk in walks)
    walks[0].rewind(70)
    walks[1].rewind(0)
    for count in (7, 1, 100, 1):
        for walk in walks:
            walk.extend(count)
    for walk in walks:
        walk.compare()


@pytest.mark.parametrize("where", ["layer 0", "layer 1", "norm"])
@pytest.mark.parametrize("length", [0, 10, 64, 70])
@pytest.mark.parametrize("forked", [False, True])
def test_an_exception_leaves_the_context_as_it_was(
    monkeypatch: pytest.MonkeyPatch, where: str, length: int, forked: bool
) -> None:
    ours, theirs = both({})
    model = PagedModel(ours)
    walk = Walk(model.new_context(), theirs)
    if length:
        walk.extend(length)
    other = walk.context.fork() if forked else None

    def interrupted(self: Any, *_: Any) -> mx.array:
        raise KeyboardInterrupt

    if where == "norm":
        monkeypatch.setattr(decoder.Decoder, "logits", interrupted)
    else:
        layers, index = list(ours.model.layers), int(where[-1])
        layers[index] = _AfterAttention(layers[index])
        monkeypatch.setitem(ours.model, "layers", layers)
    pages = model.pool.pages_in_use
    with pytest.raises(KeyboardInterrupt):
        walk.context.extend([1] * 60)
    monkeypatch.undo()
    assert walk.context.length == length
    assert len(walk.context.table.pages) == -(-length // PAGE)
    assert model.pool.pages_in_use <= pages + (forked and length % PAGE > 0)
    walk.extend(5)
    walk.extend(1)
    walk.compare()
    if other is not None:
        again = Walk(other, theirs, seed=9)
        again.tokens = walk.tokens[:length]
        again.extend(3)
        again.compare()
        other.close()
    walk.context.close()
    assert model.pool.pages_in_use == 0


class _AfterAttention(nn.Module):
    """A layer that is interrupted once its keys and values are in the pool."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def __call__(self, x: mx.array, attention: Any) -> mx.array:
        self.layer.self_attn(x, attention)
        raise KeyboardInterrupt


def test_a_closed_context_is_empty_and_usable() -> None:
    ours, theirs = both({})
    model = PagedModel(ours)
    walk = Walk(model.new_context(), theirs)
    walk.extend(100)
    walk.context.close()
    assert (walk.context.length, model.pool.pages_in_use) == (0, 0)
    walk.tokens, walk.unchecked = [], []
    walk.extend(30)
    walk.compare()


@pytest.mark.parametrize("length", [-1, 11, 1000])
def test_rewinding_to_where_nothing_is(length: int) -> None:
    context = tiny_model().new_context()
    context.extend(list(range(10)))
    with pytest.raises(ValueError, match=f"cannot rewind 10 positions to {length}"):
        context.rewind(length)
    assert context.length == 10


def test_bytes() -> None:
    model = tiny_model()
    context = model.new_context()
    assert context.nbytes == 0
    assert model.pool.page_bytes // 64 == 2 * 2 * 2 * 8 * 4  # keys and values, layers, kv heads, head_dim, float32
    context.extend(list(range(10)))
    assert context.nbytes == sum(array.nbytes for array in model.pool.keys + model.pool.values)
    assert model.rewind_obstacle is None
    assert context.can_rewind
    assert context.vocabulary_size == 40


def test_a_rope_that_stretches_with_the_length_goes_through_mlx_lm() -> None:
    """Its base grows past the trained length, and keys that stay rotated cannot follow."""
    config = CONFIG | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    model_class, _ = model_classes(config)
    assert model_class.__module__.startswith("mlx_lm.")


def test_closing_frees_the_pages_even_where_the_last_pass_cannot_be_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(0)
    context = model.new_context()
    mx.eval(context.extend([1, 2, 3]))

    def fail(*_: Any) -> None:
        raise RuntimeError("no stream")

    monkeypatch.setattr(model.pool, "evaluate", fail)
    with pytest.raises(RuntimeError, match="no stream"):
        context.close()
    assert model.pool.pages_in_use == 0
