"""What top-p costs: the search of `mlx_spec.decoding.sampling` against bisection in one compiled function and a sort.

    python benchmarks/sampling.py [--columns 32000 128256 151936] [--rows 1 5] [--repeats 7]

Rows of random logits, peaked and flat, become distributions in three ways that keep the same tokens, but for the
rounding of sums. They differ in how the least probability that top-p keeps is found, and run in turn; a ratio is the
median of neighbours in time. Beside them softmax alone, and a token drawn from each row, where it is certain also as
it was before, by noise. The bisection's libraries are compiled before anything is timed; how many each way makes, and
how long the first distribution takes then, is measured in fresh processes with --libraries.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
from common import save, spread

from mlx_spec.decoding import sampling as module
from mlx_spec.decoding.sampling import distribution, draw
from mlx_spec.settings import Sampling

SETTINGS = {
    "top-p 0.9": Sampling(temperature=0.7, top_p=0.9),
    "top-p 0.999": Sampling(temperature=1, top_p=0.999),
    "top-k 50, top-p 0.9": Sampling(temperature=0.7, top_k=50, top_p=0.9),
    "top-p 0.9, min-p 0.05": Sampling(temperature=0.7, top_p=0.9, min_p=0.05),
}
SCALES = {"peaked": 3.0, "flat": 0.3}
Threshold = Callable[[mx.array, mx.array], mx.array]


@mx.compile
def bisection(probabilities: mx.array, mass: mx.array) -> mx.array:
    """As it was: a bit of the threshold after the other, each a constant of the compiled function."""
    bits = probabilities.view(mx.int32)
    low = mx.zeros_like(mass).astype(mx.int32)
    for position in reversed(range(30)):
        middle = low + (1 << position)
        enough = mx.where(bits >= middle, probabilities, 0).sum(axis=-1, keepdims=True) >= mass
        low = mx.where(enough, middle, low)
    return low.view(mx.float32)


def full_sort(probabilities: mx.array, mass: mx.array) -> mx.array:
    ascending = mx.sort(probabilities, axis=-1)
    enough = mx.cumsum(ascending, axis=-1, reverse=True) >= mass
    return mx.where(enough, ascending, 0).max(axis=-1, keepdims=True)


WAYS: dict[str, Threshold] = {"search": module._nucleus_threshold, "bisection": bisection, "sort": full_sort}


def milliseconds(run: Callable[[], mx.array]) -> float:
    started = time.perf_counter()
    mx.eval(run())
    return (time.perf_counter() - started) * 1e3


def by(way: str, logits: mx.array, sampling: Sampling) -> mx.array:
    module._nucleus_threshold = WAYS[way]
    try:
        return distribution(logits, sampling, logits.shape[-1])
    finally:
        module._nucleus_threshold = WAYS["search"]


def compared(logits: mx.array, sampling: Sampling, repeats: int) -> dict[str, Any]:
    kept = {way: (by(way, logits, sampling) > 0).sum(axis=-1).tolist() for way in WAYS}  # and warm
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(repeats):
        for way in WAYS:
            times[way].append(milliseconds(lambda way=way: by(way, logits, sampling)))
    return {
        "kept": kept,
        "ms": {way: spread(values) for way, values in times.items()},
        "ratio": {f"search / {way}": median(a / b for a, b in zip(times["search"], times[way], strict=True))
                  for way in ("bisection", "sort")},
    }  # fmt: skip


def drawn(logits: mx.array, repeats: int) -> dict[str, float]:
    """Milliseconds per row of a draw, where the distribution is sampled and where it is certain."""
    key, (rows, columns) = mx.random.key(0), logits.shape
    sampled = distribution(logits, Sampling(temperature=1), columns)
    mx.eval(sampled)
    runs: dict[str, Callable[[], mx.array]] = {
        "softmax": lambda: distribution(logits, Sampling(temperature=1), columns),
        "draw": lambda: draw(sampled, key),
        "greedy, drawn": lambda: draw(distribution(logits, Sampling(), columns), key),
        "greedy, by noise": lambda: mx.random.categorical(
            mx.log((mx.arange(columns) == mx.argmax(logits, axis=-1, keepdims=True)).astype(mx.float32)), key=key),
    }  # fmt: skip
    return {
        name: median(milliseconds(run) for _ in range(repeats + 1)) / rows for name, run in runs.items()
    }


def libraries(way: str) -> dict[str, float]:
    """Shared objects and seconds of a first top-p answer's distribution, in a process and a TMPDIR of its own."""
    script = (
        "import sys, time; sys.path.insert(0, sys.argv[1]); import mlx.core as mx, sampling\n"
        "logits = mx.random.normal((1, 8192)); mx.eval(logits); started = time.perf_counter()\n"
        "mx.eval(sampling.by(sys.argv[2], logits, sampling.SETTINGS['top-p 0.9']))\n"
        "print(time.perf_counter() - started)"
    )
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([sys.executable, "-c", script, str(Path(__file__).parent), way], check=True, text=True,
                              capture_output=True, env=os.environ | {"TMPDIR": folder})  # fmt: skip
        return {"libraries": len([*Path(folder).rglob("*.so")]), "seconds": float(done.stdout)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--columns", type=int, nargs="+", default=[32000, 128256, 151936])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 5])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--libraries", action="store_true")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {"rows": [], "draws": []}
    if options.libraries:
        results["libraries"] = {way: libraries(way) for way in WAYS}
        print(f"first top-p distribution: {results['libraries']}")
    for columns in options.columns:
        for rows in options.rows:
            for shape, scale in SCALES.items():
                logits = scale * mx.random.normal((rows, columns), key=mx.random.key(0))
                mx.eval(logits)
                for name, sampling in SETTINGS.items():
                    found = compared(logits, sampling, options.repeats)
                    results["rows"].append(
                        {"columns": columns, "rows": rows, "logits": shape, "settings": name} | found)
                    figures = "   ".join(f"{way} {found['ms'][way]['median']:7.2f} ms" for way in WAYS)
                    ratios = "   ".join(f"{pair} {ratio:.2f}" for pair, ratio in found["ratio"].items())
                    print(f"{columns:6} x {rows}  {shape:6}  {name:22} {figures}   {ratios}", flush=True)
            figures = drawn(logits, options.repeats)
            results["draws"].append({"columns": columns, "rows": rows, "ms_per_row": figures})
            print(f"{columns:6} x {rows}  ms per row: " + "   ".join(f"{k} {v:.2f}" for k, v in figures.items()))
    save("sampling", results, options.output)


if __name__ == "__main__":
    main()
