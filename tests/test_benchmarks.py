"""The benchmarks run, on tiny models: what they say of those is worth nothing, but that they say it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from directories import write_model

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("pair")
    target, draft = write_model(folder / "target"), write_model(folder / "draft", seed=5, num_hidden_layers=1)
    for directory in (target, draft):
        (directory / "chat_template.jinja").write_text(TEMPLATE)
    return ["-m", str(target), "-d", str(draft)]


def run(tmp_path: Path, script: str, *arguments: str) -> str:
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, str(BENCHMARKS / script), *arguments], capture_output=True, text=True,
                          env=environment, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_speed_against_mlx_lm_and_what_a_projection_makes_of_it(tmp_path: Path, pair: list[str]) -> None:
    results, traces, projected = (tmp_path / f"{name}.json" for name in ("versus", "traces", "projection"))
    run(tmp_path, "versus_mlx_lm.py", *pair, "-k", "1", "2", "--tokens", "12", "--kinds", "chat",
        "--output", str(results))  # fmt: skip
    found = json.loads(results.read_text())
    assert [row["temperature"] for row in found["rows"]] == [0, 1]
    assert set(found["rows"][1]["runs"]) == {
        "mlx-lm plain", "mlx-lm K=1", "mlx-lm K=2", "mlx-spec plain", "mlx-spec K=2", "mlx-spec auto"}  # fmt: skip
    for row in found["rows"]:
        for way, figures in row["runs"].items():
            assert 1 <= figures["tokens"] <= 12
            assert figures["passes"] == figures["tokens"] or "plain" not in way
    greedy = [run["emitted"] for run in found["rows"][0]["runs"].values()]
    assert all(emitted == greedy[0] for emitted in greedy)  # both runtimes, however they draft
    assert found["summary"]["all"]["tokens per pass: mlx-lm plain"] == 1

    out = run(tmp_path, "projection.py", "--record", *pair, "--tokens-of", str(results), "--traces", str(traces),
              "--output", str(projected))  # fmt: skip
    assert out.count("PROJECTION, not a measurement") == 1
    for trace in json.loads(traces.read_text())["traces"]:
        assert len(trace["tokens"]) == len(trace["overlap"]) == len(trace["equal"]) == len(trace["confidences"])
        assert all(equal <= overlap + 1e-6 for equal, overlap in zip(trace["equal"], trace["overlap"], strict=True))
    projections = json.loads(projected.read_text())["projections"]
    assert [entry["temperature"] for entry in projections] == [0, 1]
    for entry in projections:
        assert all(value > 0 for value in entry["projected"].values())
        assert entry["projected"]["limit of every schedule, hybrid"] >= entry["projected"]["K auto, hybrid"]


def test_ways_to_verify(tmp_path: Path, pair: list[str]) -> None:
    results = tmp_path / "verification.json"
    run(tmp_path, "verification.py", *pair, "-k", "3", "--rounds", "6", "--kinds", "chat", "code",
        "--output", str(results))  # fmt: skip
    summary = json.loads(results.read_text())["summary"]
    for kind in ("chat", "code"):
        for count, (equality, token) in enumerate(zip(summary[kind]["equality"], summary[kind]["token"], strict=True)):
            assert 1 <= equality <= token <= count + 2
    assert summary["block / token"]["chat"][0] == pytest.approx(1)  # of one draft there is no block


def test_ways_to_find_the_threshold_of_top_p(tmp_path: Path) -> None:
    results = tmp_path / "sampling.json"
    run(tmp_path, "sampling.py", "--columns", "300", "5000", "--rows", "1", "2", "--repeats", "1",
        "--output", str(results))  # fmt: skip
    found = json.loads(results.read_text())
    assert len(found["rows"]) == 2 * 2 * 2 * 4
    for row in found["rows"]:
        for way in ("sort", "bisection"):  # but for the rounding of sums
            assert row["kept"]["search"] == pytest.approx(row["kept"][way], rel=2e-3)
    assert len(found["draws"]) == 4
