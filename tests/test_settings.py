"""Settings check themselves and say what they accept."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import pickle
from typing import Any

import numpy as np
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


ALL = Sampling(0.7, 5, 0.9, 0.1, 1.2, 0.5, 0.25, {3: 1.5, 5: -math.inf}, 7, 2)


def test_settings_can_be_keys() -> None:
    same = dataclasses.replace(ALL, logit_bias={5: -math.inf, 3: 1.5})
    assert same == ALL
    assert {ALL: "x", Speculation(3): "y", KVConfig(window=100): "z"}[same] == "x"
    assert hash(same) == hash(ALL)
    assert dataclasses.replace(ALL, logit_bias={3: 1.5}) != ALL
    assert len({Sampling(), Sampling(logit_bias={}), Sampling(logit_bias={1: 1}), Sampling(logit_bias={1: 1.0})}) == 2


def test_biases_are_a_mapping_that_stays() -> None:
    given = {3: 1.5}
    sampling = Sampling(logit_bias=given)
    given[4] = 2.0
    assert dict(sampling.logit_bias) == {3: 1.5}
    biases: Any = sampling.logit_bias
    for change in (
        lambda: biases.__setitem__(3, 0), lambda: biases.__delitem__(3), lambda: biases.update({1: 1}), biases.clear,
        biases.popitem, lambda: biases.pop(3), lambda: biases.setdefault(9, 1), lambda: biases.__ior__({1: 1}),
    ):  # fmt: skip
        with pytest.raises(TypeError):
            change()
    assert biases == {3: 1.5}
    for other in (copy.copy(ALL), copy.deepcopy(ALL), pickle.loads(pickle.dumps(ALL)), dataclasses.replace(ALL)):
        assert other == ALL
        assert hash(other) == hash(ALL)
    written = json.loads(json.dumps(dataclasses.asdict(ALL)))
    assert written["logit_bias"] == {"3": 1.5, "5": -math.inf}


@pytest.mark.parametrize("whole", [np.int64, np.int8, np.uint8])
@pytest.mark.parametrize("real", [np.float32, np.float64, np.float16])
def test_numbers_of_numpy_are_numbers(whole: Any, real: Any) -> None:
    given = Sampling(real(0.5), whole(5), real(0.5), real(0.25), real(2), real(-0.5), whole(1), {whole(3): real(1.5)},
                     whole(7), whole(2))  # fmt: skip
    assert given == Sampling(0.5, 5, 0.5, 0.25, 2.0, -0.5, 1, {3: 1.5}, 7, 2)
    values = [*dataclasses.asdict(given).values(), *given.logit_bias, *given.logit_bias.values()]
    assert {type(value) for value in values} <= {int, float, type(given.logit_bias)}
    assert json.loads(json.dumps(dataclasses.asdict(given)))["temperature"] == 0.5
    assert json.dumps(dataclasses.asdict(Speculation(whole(3), most_draft_tokens=whole(2)))).startswith(
        '{"draft_tokens": 3')
    assert type(KVConfig(window=np.int64(100), sinks=whole(3)).sinks) is int


def test_what_is_no_number_of_numpy_either() -> None:
    for settings in ({"temperature": np.bool_(True)}, {"top_k": np.float64(2)}, {"seed": np.bool_(True)},
                     {"temperature": np.float32("nan")}, {"temperature": np.array([1.0])},
                     {"logit_bias": {np.bool_(True): 1.0}}, {"logit_bias": {1: np.bool_(True)}}):
        with pytest.raises(BadConfig):
            Sampling(**settings)  # type: ignore[arg-type]
    with pytest.raises(BadConfig):
        Speculation(np.bool_(True))  # type: ignore[arg-type]
