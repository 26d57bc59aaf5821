"""Settings check themselves and say what they accept."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from mlx_spec.errors import BadConfig
from mlx_spec.settings import KVConfig, Sampling, Speculation

NAN, INFINITY = math.nan, math.inf


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in (-0.1, NAN, INFINITY, -INFINITY, 1e39)),
        ("top_k", -1),
        *(("top_p", value) for value in (0, -0.5, 1.0001, NAN, INFINITY)),
        *(("min_p", value) for value in (-0.01, 1.01, NAN, INFINITY)),
        *(("repetition_penalty", value) for value in (0, -1, NAN, INFINITY, 1e-300, 1e300)),
        *(("presence_penalty", value) for value in (NAN, INFINITY, -INFINITY, 1e39)),
        *(("frequency_penalty", value) for value in (NAN, INFINITY, -INFINITY, -1e39)),
        *(("logit_bias", value) for value in ({-1: 1.0}, {3: NAN}, {3: INFINITY}, {3: 1e39}, {0: 1.0, 5: NAN})),
        *(("seed", value) for value in (-1, 2**64)),
        *(("top_logprobs", value) for value in (-1, 101)),
    ],
)
def test_value_out_of_range_is_named(name: str, value: Any) -> None:
    with pytest.raises(BadConfig) as caught:
        Sampling(**{name: value})
    message = str(caught.value)
    bad = next(iter(value)) if value == {-1: 1.0} else [*value.values()][-1] if isinstance(value, dict) else value
    assert message.startswith(f"{name} is {bad!r}; give ")
    assert message.endswith(".")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("kind", "name", "value", "accepted"),
    [
        *((Sampling, name, value, "is no number") for value in ("1", None, True, [1.0]) for name in (
            "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")),
        *((Sampling, "top_k", value, "is no whole number") for value in ("1", None, True, 2.5)),
        *((Sampling, "seed", value, "is no whole number") for value in ("1", True, 1.5)),
        *((Sampling, "top_logprobs", value, "is no whole number") for value in ("1", True, 1.5)),
        *((Sampling, "logit_bias", value, "a mapping") for value in (None, 5, [(1, 2.0)])),
        *((Sampling, "logit_bias", {key: 1.0}, "token ids") for key in ("5", 1.5, True, None)),
        *((Sampling, "logit_bias", {1: value}, "is no number") for value in ("5", None, True)),
        *((Speculation, "draft_tokens", value, "is no whole number") for value in ("2", 2.5, None, True)),
        *((KVConfig, "window", value, "is no whole number") for value in ("100", 100.5, True)),
        *((KVConfig, "sinks", value, "is no whole number") for value in ("4", 4.0, True, [])),
        *((KVConfig, name, value, "model or int8") for value in (None, 8, [], "int4")
          for name in ("storage", "draft_storage")),
    ],
)  # fmt: skip
def test_value_of_the_wrong_type_is_named(kind: Any, name: str, value: Any, accepted: str) -> None:
    with pytest.raises(BadConfig, match=rf"^{name} is .*{accepted}.*\.$") as caught:
        kind(**{name: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0}, {"temperature": 1e-300}, {"temperature": 1e9}, {"top_k": 10**9}, {"top_p": 1e-300},
        {"top_p": 1}, {"min_p": 0}, {"min_p": 1}, {"repetition_penalty": 0.5}, {"presence_penalty": -2},
        {"frequency_penalty": -2}, {"logit_bias": {0: -INFINITY, 7: 100}}, {"seed": 0}, {"seed": 2**64 - 1},
        {"top_logprobs": 0}, {"top_logprobs": 100},
    ],
)  # fmt: skip
def test_extreme_values_are_accepted(settings: dict[str, Any]) -> None:
    sampling = Sampling(**settings)
    assert all(getattr(sampling, name) == value for name, value in settings.items())


def test_defaults_are_greedy_and_change_nothing() -> None:
    assert Sampling() == Sampling(0.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, {}, None, None)
    assert not Sampling().penalises


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_each_penalty_penalises(name: str) -> None:
    assert Sampling(**{name: 0.5}).penalises
    assert not Sampling(temperature=1, top_k=3, top_p=0.5, min_p=0.1, logit_bias={1: 1}).penalises


def test_settings_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Sampling().temperature = 1  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        Speculation().draft_tokens = 1  # type: ignore[misc]


@pytest.mark.parametrize("value", [-1, 65, 3.0, True, "3", "AUTO", None])
def test_draft_tokens_out_of_range(value: Any) -> None:
    with pytest.raises(BadConfig, match=rf"^draft_tokens is {value!r}[;,] .*give 0 .* to 64, or auto\.$"):
        Speculation(draft_tokens=value)


@pytest.mark.parametrize("value", [0, 1, 64, "auto"])
def test_draft_tokens_in_range(value: Any) -> None:
    assert Speculation(value).draft_tokens == value


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"drafter": "Model"}, "drafter is 'Model'; give model, lookup, hybrid or none."),
        ({"drafter": ["model"]}, "drafter is ['model']; give model, lookup, hybrid or none."),
        ({"verification": "blocks"}, "verification is 'blocks'; give token or block."),
        ({"verification": None}, "verification is None; give token or block."),
        ({"most_draft_tokens": 0}, "most_draft_tokens is 0; give 1 to 15."),
        ({"most_draft_tokens": 16}, "most_draft_tokens is 16; give 1 to 15."),
    ],
)
def test_speculation_that_does_not_exist(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(BadConfig) as error:
        Speculation(**settings)
    assert str(error.value) == complaint


@pytest.mark.parametrize(
    ("settings", "plain"),
    [({}, False), ({"draft_tokens": 0}, True), ({"drafter": "none"}, True), ({"drafter": "lookup"}, False)],
)
def test_what_drafts_nothing_is_plain(settings: dict[str, Any], plain: bool) -> None:
    assert Speculation(**settings).plain is plain


@pytest.mark.parametrize(("settings", "least"), [
    ({"window": 0}, 65), ({"window": -1}, 65), ({"window": 64}, 65), ({"window": 64, "sinks": "system"}, 65),
    ({"window": 99, "sinks": 100}, 100), ({"window": 65, "sinks": 66}, 66),
])  # fmt: skip
def test_a_window_holds_a_round_of_drafts_and_no_fewer_than_the_sinks(settings: dict[str, Any], least: int) -> None:
    with pytest.raises(BadConfig, match=rf"^window is {settings['window']}; give at least {least}: .*\.$"):
        KVConfig(**settings)


@pytest.mark.parametrize("sinks", [-1, 65537, "all", "System"])
def test_sinks_out_of_range(sinks: Any) -> None:
    with pytest.raises(BadConfig, match=rf"^sinks is {sinks!r}.* give 0 to 65536, or system\.$"):
        KVConfig(window=100_000, sinks=sinks)


@pytest.mark.parametrize("sinks", [0, 4, 100, "system"])
def test_sinks_need_a_window(sinks: Any) -> None:
    with pytest.raises(BadConfig, match=rf"^sinks is {sinks!r}, .*; give a window too, .*\.$") as caught:
        KVConfig(sinks=sinks)
    assert "\n" not in str(caught.value)
    windowed = KVConfig(window=200, sinks=sinks)
    with pytest.raises(BadConfig, match="give a window too"):
        dataclasses.replace(windowed, window=None)
    assert dataclasses.replace(windowed, window=None, sinks=None) == KVConfig()


def test_a_window_that_names_no_sinks_can_be_taken_away() -> None:
    assert KVConfig().sinks is None
    assert KVConfig(window=200).sinks is None
    assert dataclasses.replace(KVConfig(window=200), window=None) == KVConfig()


@pytest.mark.parametrize("settings", [
    {}, {"storage": "int8", "draft_storage": "int8"}, {"window": 65}, {"window": 65, "sinks": 65},
    {"window": 65, "sinks": 0}, {"window": 65, "sinks": "system"}, {"window": 10**9, "sinks": 65536},
])  # fmt: skip
def test_ways_to_keep_keys_and_values(settings: dict[str, Any]) -> None:
    kv = KVConfig(**settings)
    assert all(getattr(kv, name) == value for name, value in settings.items())
    with pytest.raises(dataclasses.FrozenInstanceError):
        kv.window = 100  # type: ignore[misc]
