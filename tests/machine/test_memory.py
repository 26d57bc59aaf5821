"""Whether a model fits, and the wired limit, with MLX's functions replaced."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from mlx_spec.errors import DoesNotFit
from mlx_spec.machine import memory
from mlx_spec.machine.memory import available_memory, check_fits, wired_limit

GB = 10**9


def test_what_fits_passes_and_so_does_the_unknown() -> None:
    check_fits("m", 5 * GB, 5 * GB, {})
    check_fits("m", 5 * GB, None, {})


def test_what_does_not_fit_is_refused_with_numbers_and_the_largest_that_does() -> None:
    expected = r"m needs 40\.4 GB for its weights and 20\.0 GB is available; .* middle \(18\.7 GB"
    with pytest.raises(DoesNotFit, match=expected):
        check_fits("m", 40_400_000_000, 20 * GB, {"small": GB, "middle": 18_700_000_000, "large": 30 * GB})
    with pytest.raises(DoesNotFit, match="close other programs"):
        check_fits("m", 2 * GB, -GB, {"small": GB})


def test_this_machine_says_how_much_it_has() -> None:
    available = available_memory()
    assert available is None or 0 < available < 2**50


def test_a_mac_has_its_working_set_less_what_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.sys, "platform", "darwin")
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 10 * GB})
    monkeypatch.setattr(mx, "get_active_memory", lambda: 3 * GB)
    assert available_memory() == 7 * GB


def test_a_system_that_does_not_say_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(memory.sys, "platform", "linux")
    monkeypatch.setattr(Path, "read_text", refuse)
    assert available_memory() is None


@pytest.fixture
def metal(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A pretended Mac; returns what was called, in order."""
    calls: list[object] = []

    def set_wired_limit(limit: int) -> int:
        calls.append(limit)
        return 7

    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 1000})
    monkeypatch.setattr(mx, "set_wired_limit", set_wired_limit)
    monkeypatch.setattr(mx, "synchronize", lambda: calls.append("synchronize"))
    return calls


def test_the_limit_is_raised_and_put_back_after_the_work(metal: list[object]) -> None:
    with wired_limit():
        assert metal == [1000]
    assert metal == [1000, "synchronize", 7]


def test_nested_use_puts_it_back_once(metal: list[object]) -> None:
    with wired_limit():
        with wired_limit(), wired_limit():
            pass
        assert metal == [1000]
    assert metal == [1000, "synchronize", 7]


def test_an_exception_puts_it_back_once(metal: list[object]) -> None:
    with pytest.raises(ZeroDivisionError), wired_limit(), wired_limit():
        raise ZeroDivisionError
    assert metal == [1000, "synchronize", 7]
    with wired_limit():
        pass
    assert metal == [1000, "synchronize", 7] * 2


def test_a_failing_synchronisation_puts_it_back_too(
    metal: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError

    monkeypatch.setattr(mx, "synchronize", fail)
    with pytest.raises(RuntimeError), wired_limit():
        pass
    assert metal == [1000, 7]


def test_without_metal_nothing_happens(metal: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    with wired_limit():
        pass
    assert metal == []
