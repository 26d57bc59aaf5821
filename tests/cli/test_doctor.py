"""`mlx-spec doctor`: what it finds, shows and keeps to itself, with stand-ins for kernels and clock."""

from __future__ import annotations

import functools
import getpass
import io
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_spec.attention import choosing
from mlx_spec.attention.choosing import Times
from mlx_spec.attention.timing_ways import Chain
from mlx_spec.cli import diagnosis
from mlx_spec.cli.main import main
from mlx_spec.kernels import registry
from mlx_spec.kernels.self_check import Mismatch, SelfCheck, fingerprint
from mlx_spec.machine.remembered import Remembered

Run = Callable[..., tuple[int, str, str]]
WRONG = "paged_attention_tile[D=128,S=int8]"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run_line(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["doctor", *arguments])
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return run_line


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Remembered:
    kept = Remembered(tmp_path / "kernels.json", "M1")
    monkeypatch.setattr(choosing, "memory", lambda: kept)
    return kept


@pytest.fixture
def mac(memory: Remembered, monkeypatch: pytest.MonkeyPatch) -> dict[str, Exception]:
    """A machine with Metal, on which the variants named here fail, and the times of ways are their names' lengths."""
    errors: dict[str, Exception] = {}

    def compare(variant: registry.Variant, execute: registry.Execute) -> None:
        if variant.name in errors:
            raise errors[variant.name]

    def measure(trials: Mapping[str, Chain]) -> dict[str, float]:
        return {way: len(way) / 8 for way in trials}

    monkeypatch.setattr(registry, "available", lambda: True)
    monkeypatch.setattr(diagnosis, "SelfCheck", functools.partial(SelfCheck, compare=compare))
    monkeypatch.setattr(diagnosis, "Times", functools.partial(Times, measure=measure))
    return errors


@pytest.fixture
def no_metal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "available", lambda: False)


@pytest.mark.usefixtures("no_metal")
def test_without_metal_it_says_what_cannot_be_checked(run: Run) -> None:
    code, out, err = run()
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert re.fullmatch(r"mlx-spec +\d+\.\d+\.\d+", lines[0])
    for name in ("python", "system", "chip", "memory", "backend", *diagnosis.PACKAGES):
        assert any(re.match(rf"{name} +\S", line) for line in lines), name
    for kernel in registry.KERNELS:
        assert any(re.match(rf"{kernel.name} +\d+ +not checked$", line) for line in lines)
    assert "can only be checked on a Mac" in out
    assert "tests/shim" in out
    assert "MLX" in out
    assert "FASTEST" not in out


@pytest.mark.usefixtures("no_metal")
def test_without_metal_in_json(run: Run) -> None:
    code, out, err = run("--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert set(report) == {"facts", "versions", "variants", "kernels", "timings", "note"}
    assert report["variants"] == {"ok": 0, "failed": 0, "not_checked": len(report["kernels"])}
    assert report["versions"]["mlx"].startswith("0.")
    assert report["facts"]["memory_bytes"] > 2**30
    assert report["timings"] == []
    assert {kernel["result"] for kernel in report["kernels"]} == {"not checked"}
    assert "Without Metal" in report["note"]


def test_all_right_on_a_mac(run: Run, mac: dict[str, Exception]) -> None:
    code, out, err = run()
    assert code == 0
    assert err == f"checking and timing {len(diagnosis.all_variants()) + 12} things, about a minute\n"
    assert re.search(r"^paged_attention_vector +76 +ok$", out, re.M)
    assert "not checked" not in out
    assert "failed" not in out
    assert re.search(
        r"^0\.625 +1\.125 +0\.750 +0\.500 +0\.750 +tile +1 x 8 rows of 64/8 heads x 128, 4096 tokens in int8, float16$",
        out, re.M,
    )  # fmt: skip


def test_a_wrong_kernel_is_named_not_timed_and_exits_1(run: Run, mac: dict[str, Exception]) -> None:
    mac[WRONG] = Mismatch("a window, 4 heads per kv head, 2 rows: 3 of 9 values differ")
    code, out, _ = run()
    assert code == 1
    assert re.search(r"^paged_attention_tile +19 +ok$", out, re.M)
    assert re.search(r"^paged_attention_tile +1 +failed$", out, re.M)
    assert re.search(rf"^{re.escape(WRONG)} +1 +failed +a window, 4 heads per kv head, 2 rows: 3 of 9", out, re.M)
    assert re.search(r"^0\.625 +1\.125 +0\.750 +- +0\.750 +dense +1 x 1 rows of 64/8 heads x 128, .* int8", out, re.M)
    code, out, _ = run("--json")
    report = json.loads(out)
    assert code == 1
    assert report["variants"]["failed"] == 1
    [failed] = [kernel for kernel in report["kernels"] if kernel["result"] == "failed"]
    assert failed["variant"] == WRONG
    assert len(report["timings"]) == 12
    del mac[WRONG]
    assert run()[0] == 0  # what is remembered does not count


def test_a_kernel_that_ended_the_program_is_not_run(run: Run, mac: dict[str, Exception], memory: Remembered) -> None:
    with subprocess.Popen([sys.executable, "-c", "pass"]) as ended:
        pass
    memory.set("kernels", f"{WRONG} {fingerprint()}", f"checking {ended.pid} again")
    code, out, err = run()
    assert code == 1
    assert "the program ended twice while it was checked" in out
    assert "kernels.json first" in err


@pytest.mark.parametrize(("system", "cache", "shown"), [
    ("linux", "", "~/.cache/mlx-spec/kernels.json"),
    ("linux", "/var/caches", "/var/caches/mlx-spec/kernels.json"),
    ("darwin", "", "~/Library/Caches/mlx-spec/kernels.json"),
])  # fmt: skip
def test_the_file_to_remove_is_where_it_is_kept(
    run: Run, mac: dict[str, Exception], memory: Remembered, monkeypatch: pytest.MonkeyPatch,
    system: str, cache: str, shown: str,
) -> None:  # fmt: skip
    with subprocess.Popen([sys.executable, "-c", "pass"]) as ended:
        pass
    memory.set("kernels", f"{WRONG} {fingerprint()}", f"checking {ended.pid} again")
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(diagnosis, "_wired_limit", lambda: 0)
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    assert f"remove {shown} first." in run()[2]


def test_what_the_doctor_finds_is_what_later_runs_use(
    run: Run, mac: dict[str, Exception], memory: Remembered, monkeypatch: pytest.MonkeyPatch
) -> None:
    mac[WRONG] = Mismatch("off")
    run()

    def never(*_: Any) -> None:
        pytest.fail("known already")

    checks = SelfCheck(memory, compare=never)
    answers = [checks.trusts(variant) for variant in diagnosis.all_variants()]
    assert answers.count(False) == 1
    shape = diagnosis.typical_shapes()[0]
    assert Times(memory, never).fastest(str(shape), dict, ("vector", "dense")) == "dense"


def test_nothing_personal_is_in_the_report(run: Run, mac: dict[str, Exception]) -> None:
    home = Path.home()
    mac[WRONG] = RuntimeError(
        f"cannot open {home}/x/common.h, /Users/jane/metal/a.metal, {sys.prefix}/lib/b.py:3: error: a / b // c"
    )
    for arguments in ([], ["--json"]):
        _, out, err = run(*arguments)
        text = out + err
        assert "cannot open common.h, a.metal, b.py:3: error: a / b // c" in text
        assert not re.search(r"(?<![\w/*.])/(\w+/)", text), text
        assert socket.gethostname() not in text
        for word in (str(home), "jane", str(Path.cwd()), *([getpass.getuser()] if getpass.getuser() != "root" else [])):
            assert word not in text


@pytest.mark.usefixtures("no_metal")
def test_on_a_macs_system(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def sysctl(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[-1] == "iogpu.wired_limit_mb"
        return subprocess.CompletedProcess(command, 0, "28672\n", "")

    about = {"device_name": "Apple M3 Max", "max_recommended_working_set_size": 28 * 10**9, "max_buffer_length": 10**10}
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr("platform.mac_ver", lambda: ("15.5", ("", "", ""), "arm64"))
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda *_: about)
    monkeypatch.setattr(subprocess, "run", sysctl)
    code, out, _ = run()
    assert code == 0
    for line in ("chip +Apple M3 Max", "system +macOS 15.5", "wired limit +28672 MB", "largest buffer +10.0 GB",
                 "backend +CPU, though there is Metal", "recommended working set +28.0 GB"):  # fmt: skip
        assert re.search(rf"^{line}$", out, re.M), line
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, "0\n", ""))
    assert re.search(r"^wired limit +macOS's own$", run()[1], re.M)

    def missing(*_: Any, **__: Any) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "run", missing)
    assert re.search(r"^wired limit +unknown$", run()[1], re.M)


@pytest.mark.usefixtures("no_metal")
def test_a_package_that_is_missing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "PACKAGES", ("mlx", "no-such-package"))
    assert re.search(r"^no-such-package +not installed$", run()[1], re.M)
    assert json.loads(run("--json")[1])["versions"]["no-such-package"] is None


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal(mac: dict[str, Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    mac[WRONG] = Mismatch("[off]")
    out, err = _Terminal(), _Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with pytest.raises(SystemExit) as ended:
        main(["doctor"])
    assert ended.value.code == 1
    assert "\x1b[1mKERNEL" in out.getvalue()
    plain = re.sub(r"\x1b\[[\d;]*m", "", out.getvalue())
    assert f"{WRONG}" in plain
    assert "\n  [off]\n" in plain
    assert f"checking {WRONG}" in re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", err.getvalue())


def test_every_variant_is_listed_once() -> None:
    names = [variant.name for variant in diagnosis.all_variants()]
    assert len(names) == len(set(names))
    for group in (1, 3, 8):
        for head_dim in registry.HEAD_SIZES:
            for variant in registry.variants(head_dim, mx.int8, mx.bfloat16, True, group):
                assert variant.name in names


@pytest.mark.metal
def test_this_machine(run: Run) -> None:
    code, out, _ = run("--json")
    report = json.loads(out)
    assert code == 0, [kernel for kernel in report["kernels"] if kernel["error"]]
    assert report["variants"]["not_checked"] == 0
    assert all(len(timing["milliseconds"]) == 5 for timing in report["timings"])
    assert os.environ.get("USER", "nobody") not in out
