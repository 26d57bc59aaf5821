"""Negative log-likelihood along a text several times longer than the window: with sinks, without, and with everything.

    python benchmarks/streaming.py -m MODEL [--window 256] [--sinks 4] [--blocks 12] [--output FILE]

MODEL is a directory in the hub's layout. Each cache reads the same English prose, which every Python installation
has, in blocks of 128 tokens. The text must stay within the context the model was trained for: then the full cache is a
fair reference, and what the others lose is due to what they do not see. Beside the JSON goes a plot of the same name,
if matplotlib is installed (the extra `plot`).
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import mlx.core as mx
import numpy as np
from common import RESULTS, save

from mlx_spec.architectures.paged import PagedContext, PagedModel
from mlx_spec.loading.loader import load

BLOCK = 128
TEXT = "".join(topics[name] for name in ("objects", "naming", "exceptions"))


@dataclass
class Way:
    """One cache and what it has made of the text so far."""

    name: str
    context: PagedContext
    nll: list[mx.array] = field(default_factory=list)  # per block (BLOCK,): of the token after each one read

    def read(self, tokens: list[int], following: list[int]) -> float:
        logits = self.context.extend(tokens).astype(mx.float32)
        real = mx.take_along_axis(logits, mx.array(following)[:, None], axis=-1)[:, 0]
        self.nll.append(mx.logsumexp(logits, axis=-1) - real)
        mx.eval(self.nll[-1])
        self.context.evaluate()
        self.context.settle(self.context.length)
        return float(self.nll[-1].mean())


def stream(directory: Path, sinks: int, window: int, blocks: int) -> list[Way]:
    """Read the text with every cache, block by block."""
    loaded = load(directory)
    tokens = loaded.tokenizer.encode(TEXT)[: blocks * BLOCK + 1]
    if len(tokens) <= blocks * BLOCK:
        sys.exit(f"the text has {len(tokens)} tokens, too few for {blocks} blocks of {BLOCK}; give fewer --blocks")
    if loaded.context_length is not None and len(tokens) > loaded.context_length:
        sys.exit(f"{blocks} blocks of {BLOCK} do not fit the model's context of {loaded.context_length}; "
                 "give fewer --blocks")  # fmt: skip

    def way(name: str, sinks: int = 0, window: int | None = None, int8: bool = False) -> Way:
        return Way(name, PagedModel(loaded.module, int8=int8).new_context(sinks, window))

    ways = [
        way("full"),
        way(f"{sinks} sinks", sinks, window),
        way(f"{sinks} sinks, int8", sinks, window, int8=True),
        way("no sinks", 0, window),
    ]
    print(f"{directory.name}, window {window}: negative log-likelihood (nats per token)")
    print("after  " + "".join(f"{way.name:>16}" for way in ways), flush=True)
    for start in range(0, blocks * BLOCK, BLOCK):
        block, following = tokens[start : start + BLOCK], tokens[start + 1 : start + BLOCK + 1]
        figures = [way.read(block, following) for way in ways]
        print(f"{start + BLOCK:6} " + "".join(f"{figure:16.4f}" for figure in figures), flush=True)
    return ways


def summary(ways: list[Way], first: int) -> list[dict[str, Any]]:
    """Means over the blocks from `first` on, in which every row has lost sight of something; `error` is standard."""
    reference = np.concatenate([np.array(block) for block in ways[0].nll[first:]])
    rows = []
    for way in ways:
        nll = np.concatenate([np.array(block) for block in way.nll[first:]])
        difference = nll - reference
        table = way.context.table
        rows.append({
            "cache": way.name,
            "nll_per_block": [float(block.mean()) for block in way.nll],
            "nll": float(nll.mean()),
            "perplexity": float(np.exp(nll.mean())),
            "nll_difference": float(difference.mean()),
            "error": float(difference.std() / np.sqrt(len(difference))),
            "nll_ratio": float(nll.mean() / reference.mean()),
            "kv_bytes": way.context.nbytes,
            "pages_held": len(table.pages),
            "pages_dropped": table.dropped,
        })  # fmt: skip
        row = rows[-1]
        print(f"{way.name:16} NLL {row['nll']:.4f}, {row['nll_ratio'] - 1:+7.1%} ({row['nll_difference']:+.4f} ± "
              f"{row['error']:.4f})   perplexity {row['perplexity']:9.1f}   {row['kv_bytes'] / 2**20:.2f} MiB, "
              f"{table.dropped} pages dropped")  # fmt: skip
    return rows


def plot(rows: list[dict[str, Any]], title: str, window: int, where: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot: matplotlib is not installed (pip install 'mlx-spec[plot]')", file=sys.stderr)
        return
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for row, style in zip(rows, ("k-", "C0o-", "C2x--", "C3s-"), strict=True):
        ends = [BLOCK * (index + 1) for index in range(len(row["nll_per_block"]))]
        axes.plot(ends, row["nll_per_block"], style, label=row["cache"], markersize=5)
    axes.axvline(window, color="0.6", linestyle=":", label=f"window of {window} full")
    axes.set(xlabel="tokens read", ylabel=f"negative log-likelihood per token, blocks of {BLOCK}", title=title)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")
    figure.savefig(where, dpi=120)
    print(f"written: {where.name}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, required=True)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--sinks", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=12, help=f"of {BLOCK} tokens")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    # The first block whose every row is past the window and the sinks.
    first = -(-(options.window + options.sinks) // BLOCK)
    if options.blocks <= first:
        parser.error(f"give more than {first} blocks: the window has to be left behind")
    ways = stream(options.model, options.sinks, options.window, options.blocks)
    rows = summary(ways, first)
    results = {"model": options.model.name, "text": "pydoc_data.topics", "tokens": options.blocks * BLOCK,
               "window": options.window, "sinks": options.sinks, "block": BLOCK, "first_block_of_means": first,
               "caches": rows}  # fmt: skip
    save("streaming", results, options.output)
    where = (options.output or RESULTS / "streaming.json").with_suffix(".png")
    plot(rows, f"{options.model.name}, window {options.window}", options.window, where)


if __name__ == "__main__":
    main()
