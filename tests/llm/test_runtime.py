"""Text in, text out, on tiny models: what is refused at once, where an answer ends, and what its figures say."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from directories import write_model, write_tokenizer
from small_tokenizers import sentencepiece
from tiny import CONFIG, tiny_module

import mlx_spec
from mlx_spec import LLM, BadConfig, KVConfig, MLXSpecError, ModelNotFound, Sampling, Speculation
from mlx_spec.decoding.engine import Round
from mlx_spec.llm.statistics import Drafted, RoundTotals, Statistics
from mlx_spec.llm.text_stream import Answer
from mlx_spec.loading.loader import LoadedModel
from mlx_spec.loading.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def llm(directory: Path) -> LLM:
    return mlx_spec.load(directory, write_model(directory.parent / "draft", seed=5))


def _with(tokenizer: Tokenizer, seed: int = 0) -> LLM:
    """A tiny model behind this tokenizer."""
    size = tokenizer.vocabulary_size
    return LLM(LoadedModel("tiny", tiny_module(seed, vocab_size=size), tokenizer, dict(CONFIG), 4096))


# What is refused


@pytest.mark.parametrize("prompt", [
    None, 5, {1, 2}, (token for token in (1, 2)), {"role": "user", "content": "x"}, b"abc", bytearray(b"a"),
    "", " ", [],
    ["12", "13"], [1.0, 2.0], [1.7], [True], [[1, 2]], [float("inf")], [float("nan")], [10**30], [-1], [272],
    [{"role": "user", "content": "x"}, 5], [{}], "a\ud800b", np.array([1.5]), mx.array([[1, 2]]),
])  # fmt: skip
def test_what_is_no_prompt(llm: LLM, prompt: Any) -> None:
    with pytest.raises(BadConfig) as caught:
        llm.stream(prompt)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("prompt", [
    [1, 2, 3], (1, 2, 3), range(1, 4), np.array([1, 2, 3]), [np.int64(1), np.uint8(2), 3], mx.array([1, 2, 3])])
def test_ids_of_any_whole_type(llm: LLM, prompt: Any) -> None:
    assert llm.generate(prompt, max_tokens=4).tokens == llm.generate([1, 2, 3], max_tokens=4).tokens
    assert llm.logits(prompt).shape == (3, 272)


@pytest.mark.parametrize("tokens", [None, 5, "abc", [], [1.5], [272], [-1]])
def test_logits_of_what_are_no_ids(llm: LLM, tokens: Any) -> None:
    with pytest.raises(BadConfig):
        llm.logits(tokens)


@pytest.mark.parametrize("options", [
    {"max_tokens": "3"}, {"max_tokens": 2.5}, {"max_tokens": True}, {"max_tokens": -1},
    {"sampling": {}}, {"sampling": {"temperature": 1}}, {"speculation": 3}, {"speculation": 0},
    {"stop": None}, {"stop": [3]}, {"stop": 5}, {"stop": [""]}, {"prefill_progress": 1},
    {"stop_tokens": ["a"]}, {"stop_tokens": 5}, {"stop_tokens": "5"}, {"stop_tokens": None}, {"stop_tokens": [1.0]},
    {"stop_tokens": [-1]}, {"stop_tokens": [263]}, {"sampling": Sampling(logit_bias={263: 1})},
    {"sampling": Sampling(logit_bias={10**12: 1})},
    {"sampling": Sampling(logit_bias=dict.fromkeys(range(263), -math.inf))},
])  # fmt: skip
def test_what_is_no_setting(llm: LLM, options: dict[str, Any]) -> None:
    assert llm.vocabulary_size == 263
    [name] = options
    with pytest.raises(BadConfig, match="sampling|logit_bias" if name == "sampling" else name) as caught:
        llm.stream("hello", **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kv", [{}, 0, {"window": 100}])
def test_what_is_no_kv_config(directory: Path, kv: Any) -> None:
    with pytest.raises(BadConfig, match="KVConfig"):
        mlx_spec.load(directory, kv=kv)


@pytest.mark.parametrize(("draft", "kind"), [("", ModelNotFound), (True, BadConfig), (0, BadConfig)])
def test_what_is_no_draft(directory: Path, draft: Any, kind: type[MLXSpecError]) -> None:
    with pytest.raises(kind):
        mlx_spec.load(directory, draft)
    assert mlx_spec.load(directory, False).draft_name is None
    assert mlx_spec.load(directory).draft_name is None


def test_a_template_and_a_text_without_tokens(tmp_path: Path) -> None:
    template = "{% if messages[0].content == 'nothing' %}{% else %}{{ messages[0].content }}{% endif %}"
    write_model(tmp_path)
    write_tokenizer(tmp_path, chat_template=template)
    llm = mlx_spec.load(tmp_path)
    assert llm.generate("hello", max_tokens=1).tokens
    with pytest.raises(BadConfig, match="the prompt has no tokens"):
        llm.stream("nothing")
    write_tokenizer(tmp_path, chat_template="{{ messages[0].content | trim }}")
    with pytest.raises(BadConfig, match="the prompt has no tokens"):
        mlx_spec.load(tmp_path).stream([{"role": "user", "content": " "}])


# Where an answer ends


@pytest.mark.parametrize("k", [0, 3])
def test_a_stop_string_of_a_byte_token_ends_the_answer_there(k: int) -> None:
    tokenizer = sentencepiece(fused=True)
    newline = tokenizer.vocabulary()["<0x0A>"]
    sampling = Sampling(logit_bias={newline: 1e6})
    llm = _with(tokenizer)
    answer = llm.generate("a", stop=["\n"], max_tokens=9, sampling=sampling, speculation=Speculation(k))
    assert (answer.text, answer.tokens, answer.finish_reason) == ("", [newline], "stop")
    assert llm.generate("a", max_tokens=3, sampling=sampling).text == "\n\n\n"


def test_a_stop_string_counts_from_the_token_that_completes_it() -> None:
    tokenizer = sentencepiece(fused=False)
    a, newline = (tokenizer.vocabulary()[string] for string in ("a", "<0x0A>"))
    for tokens, kept in (([newline, a], 1), ([a, newline, newline], 2), ([a, a], None)):
        answer = Answer(tokenizer, ["\n"], frozenset())
        assert answer.keep(tokens) == kept
        assert answer.take() + answer.finish() == "a" * (kept - 1 if kept else 2)
        assert answer.stopped == (kept is not None)


def test_a_stop_string_that_only_the_end_makes_certain(directory: Path) -> None:
    llm = mlx_spec.load(directory)
    broken = llm.tokenizer.vocabulary()["\u0122"]  # byte 0x80: it could still belong to a character
    assert llm.tokenizer.decode([broken]) == "\ufffd"
    answer = llm.generate("a", stop=["\ufffd"], max_tokens=1, sampling=Sampling(logit_bias={broken: 1e6}))
    assert (answer.text, answer.finish_reason) == ("", "stop")


# Figures


@pytest.mark.parametrize(("draft_context_length", "readers"), [(None, 2), (10, 1)])
def test_progress_reaches_its_total(directory: Path, draft_context_length: int | None, readers: int) -> None:
    draft = directory.parent / f"short-{draft_context_length}"
    write_model(draft, **({"max_position_embeddings": draft_context_length} if draft_context_length else {}))
    seen: list[tuple[int, int]] = []
    llm = mlx_spec.load(directory, draft)
    llm.generate("hello" * 20, max_tokens=2, prefill_progress=lambda *figures: seen.append(figures))
    total = readers * (len(llm.tokenizer.encode("hello" * 20)) - 1)
    assert (seen[0], seen[-1]) == ((0, total), (total, total))


def test_there_is_no_speed_without_tokens() -> None:
    figures = {"prompt_tokens": 1, "target_passes": 0, "drafted": 0, "accepted": 0, "drafter": "none",
               "draft_tokens": 0, "verification": "block", "by_drafter": {}, "passes_by_draft_tokens": {},
               "accepted_by_position": [], "parked_passes": 0, "prefill_seconds": 1.0,
               "decode_seconds": 0.5, "kv_bytes": 0, "peak_memory_bytes": 0, "seed": 0}  # fmt: skip
    assert Statistics(completion_tokens=0, **figures).tokens_per_second is None
    assert Statistics(completion_tokens=3, **figures).tokens_per_second == 6


def test_rounds_add_up() -> None:
    """Whoever drafted them; what a stop cut off was accepted all the same."""
    total = RoundTotals()
    for drafter, drafted, accepted, kept, parked in (
        (None, 0, 0, 1, True), ("model", 4, 4, 5, False), ("lookup", 4, 2, 3, False), (None, 0, 0, 1, False),
        ("model", 2, 0, 1, False), ("model", 1, 1, 0, False),
    ):  # fmt: skip
        total.add(Round([7] * kept, drafted, accepted, drafter, parked, None, False))  # type: ignore[arg-type]
    assert (total.tokens, total.passes, total.parked, total.drafted, total.accepted) == (11, 6, 1, 11, 7)
    assert total.by_drafter == {"model": Drafted(3, 7, 5), "lookup": Drafted(1, 4, 2)}
    assert total.passes_by_draft_tokens == {0: 2, 1: 1, 2: 1, 4: 2}
    # First: 4 rounds reached it, all but one accepted; the third was not tried after two of four.
    assert total.accepted_by_position == [(4, 3), (2, 2), (2, 1), (1, 1)]
    assert RoundTotals().accepted_by_position == []


def test_what_a_stop_cuts_off_was_accepted_all_the_same(directory: Path) -> None:
    llm = mlx_spec.load(directory, directory)
    whole = llm.generate("hello", max_tokens=20, speculation=Speculation(0)).tokens
    cut = llm.generate("hello", max_tokens=20, stop_tokens=[whole[1]], speculation=Speculation(5, "model"))
    assert cut.tokens == whole[: whole.index(whole[1]) + 1]
    statistics = cut.statistics
    assert (statistics.drafted, statistics.accepted, statistics.target_passes) == (5, 5, 1)
    assert statistics.passes_by_draft_tokens == {5: 1}
    assert statistics.accepted_by_position == [(1, 1)] * 5
    assert statistics.as_dict()["by_drafter"] == {"model": {"passes": 1, "drafted": 5, "accepted": 5}}


@pytest.mark.parametrize("drafter", [None, "model", "lookup"])
@pytest.mark.parametrize("stop", [0, 1, 5, 17])
def test_a_stream_may_be_closed_and_another_begun(directory: Path, drafter: str | None, stop: int) -> None:
    """Nothing of the first is left in the second."""
    llm = mlx_spec.load(directory, directory.parent / "draft")
    prompt = [5, 6, 7, 8] * 5
    expected = llm.generate(prompt, max_tokens=25, speculation=Speculation(0)).tokens
    stream = llm.stream(prompt, max_tokens=25, speculation=Speculation(3, drafter))
    for _ in range(stop):
        next(stream, None)
    stream.close()
    assert llm.generate(prompt, max_tokens=25, speculation=Speculation(3, drafter)).tokens == expected


@pytest.mark.parametrize("temperature", [0, 1])
def test_weights_that_are_no_numbers_give_no_answer(tmp_path: Path, temperature: float) -> None:
    write_model(tmp_path)
    weights = mx.load(str(tmp_path / "model.safetensors"))
    weights["model.layers.1.mlp.up_proj.weight"] *= mx.nan
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    llm = mlx_spec.load(tmp_path, kv=KVConfig())
    with pytest.raises(MLXSpecError, match="logits are not numbers"):
        llm.generate("hello", sampling=Sampling(temperature=temperature))
