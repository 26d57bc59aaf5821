"""The memory of keys and values, measured: per token, in unfilled pages, at a prefill's peak, behind a window.

    python benchmarks/kv_memory.py [--prefill 1024] [--layers 4 16] [--positions 100000] [--output FILE]

Attention has the shapes of Llama-3-70B (80 layers, 64 heads, 8 kv heads of 128 channels). Keys and values of one layer
do not depend on the other layers, so a few layers are allocated and bytes per token are scaled to 80. The prefill runs
random models of those shapes whose hidden size is small: weights and activations hardly count. What differs between the
two storages is what they keep, layer by layer, and what they work with, one layer at a time; so with few layers INT8
has the higher peak, and from how it grows with the layers follows where it falls below and what it is at 80.

Memory is what MLX says is allocated (`mx.get_active_memory`, `mx.get_peak_memory`), not what the pool says of itself.
No real model is needed, and no figure is a time.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
from common import save

from mlx_spec.architectures.context import prefill
from mlx_spec.architectures.decoder import Decoder, DecoderArguments
from mlx_spec.architectures.paged import PagedModel
from mlx_spec.kv import PAGE, PagePool, PageTable

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 80, 64, 8, 128
STORAGES = {"16 bits": False, "int8": True}


def allocated() -> int:
    mx.synchronize()
    return int(mx.get_active_memory())


def bytes_per_token(layers: int, tokens: int) -> list[dict[str, Any]]:
    """Bytes MLX holds for a pool of `tokens`, scaled to 80 layers."""
    rows = []
    for name, int8 in STORAGES.items():
        before = allocated()
        pool = PagePool(layers=layers, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=mx.bfloat16, int8=int8)
        pool.reserve(tokens // PAGE)
        pool.evaluate()
        measured = allocated() - before
        scaled = measured / tokens / layers * LAYERS
        rows.append({"storage": name, "layers": layers, "tokens": tokens, "measured_bytes": measured,
                     "nbytes": pool.nbytes, "bytes_per_token_80_layers": scaled})  # fmt: skip
        del pool
    for row in rows:
        row["ratio"] = row["bytes_per_token_80_layers"] / rows[0]["bytes_per_token_80_layers"]
        print(f"bytes per token, 80 layers  {row['storage']:8} {row['bytes_per_token_80_layers'] / 1024:8.2f} KiB   "
              f"{row['ratio']:.4f} of 16 bits", flush=True)  # fmt: skip
    return rows


def page_waste(sequences: int, rounds: int) -> dict[str, Any]:
    """Sequences that grow in turn by random lengths, are cut back, closed and begun anew: pages against tokens."""
    choose = random.Random(0)
    pool = PagePool(layers=1, kv_heads=1, head_dim=8, dtype=mx.float16)
    tables = [PageTable(pool) for _ in range(sequences)]
    most = excess = unfilled = slots = 0
    for _ in range(rounds):
        table = choose.choice(tables)
        if choose.random() < 0.03:
            table.rewind(0)
        table.append(choose.choice((choose.randint(1, 8), choose.randint(1, 700))))
        table.rewind(table.length - choose.randint(0, min(8, table.length)))  # drafts that were rejected
        most = max(most, len(table.pages) * PAGE - table.length)
        needed = sum(-(-other.length // PAGE) for other in tables)
        excess = max(excess, pool.pages_in_use - needed)
        unfilled += pool.pages_in_use * PAGE - sum(table.length for table in tables)
        slots += pool.pages_in_use * PAGE
    row = {
        "sequences": sequences,
        "rounds": rounds,
        "tokens": sum(table.length for table in tables),
        "pages_needed": needed,
        "pages_in_use": pool.pages_in_use,
        "most_pages_not_needed": excess,
        "pages_allocated": pool.pages,
        "most_unfilled_slots_of_a_sequence": most,
        "mean_unfilled_share": unfilled / slots,
    }
    print(f"pages  {row['tokens']} tokens in {sequences} sequences need {needed}, in use {row['pages_in_use']}, "
          f"allocated {pool.pages}; at most {most} of a page's {PAGE} slots unfilled in a sequence, "
          f"{row['mean_unfilled_share']:.1%} of all slots in use on average", flush=True)  # fmt: skip
    return row


def random_decoder(layers: int, hidden_size: int, heads: int, kv_heads: int, head_dim: int) -> Decoder:
    """MLX's own initialisation, in bfloat16."""
    mx.random.seed(0)
    arguments = DecoderArguments(
        hidden_size=hidden_size, layers=layers, intermediate_size=hidden_size, heads=heads, kv_heads=kv_heads,
        head_dim=head_dim, vocabulary_size=64, norm_epsilon=1e-5, rope_theta=500000.0, rope_scaling=None,
        rope_traditional=False, max_position=None, tied=True,
    )  # fmt: skip
    module = Decoder(arguments)
    module.set_dtype(mx.bfloat16)
    mx.eval(module.parameters())
    return module


def random_tokens(count: int) -> list[int]:
    return [random.Random(1).randrange(64) for _ in range(count)]


def prefill_peak(layer_counts: list[int], tokens: int) -> list[dict[str, Any]]:
    """Peak of a prefill in the chunks the engine uses, less what was allocated before it (the weights)."""
    rows = []
    for layers in layer_counts:
        module = random_decoder(layers, 64, HEADS, KV_HEADS, HEAD_DIM)
        peaks: dict[str, int] = {}
        for name, int8 in STORAGES.items():
            context = PagedModel(module, int8=int8).new_context()
            before = allocated()
            mx.reset_peak_memory()
            prefill(context, random_tokens(tokens))
            mx.synchronize()
            peaks[name] = mx.get_peak_memory() - before
            row = {"storage": name, "layers": layers, "tokens": tokens, "peak_bytes": peaks[name],
                   "kv_bytes": context.nbytes, "working_bytes": peaks[name] - context.nbytes,
                   "ratio": peaks[name] / peaks["16 bits"]}  # fmt: skip
            rows.append(row)
            print(f"prefill of {tokens}, {layers} layers  {name:8} peak {row['peak_bytes'] / 2**20:7.1f} MiB: keys and "
                  f"values {row['kv_bytes'] / 2**20:6.1f}, work {row['working_bytes'] / 2**20:6.1f}   "
                  f"{row['ratio']:.3f} of 16 bits", flush=True)  # fmt: skip
            del context
        del module
    return rows


def projection(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The line through the peaks at the fewest and the most layers: its value at 80, and where the two lines cross."""
    lines: dict[str, tuple[float, float]] = {}
    for name in STORAGES:
        points = sorted((row["layers"], row["peak_bytes"]) for row in rows if row["storage"] == name)
        (fewest, low), (most, high) = points[0], points[-1]
        slope = (high - low) / (most - fewest)
        lines[name] = (low - slope * fewest, slope)
    (work, layer), (work_int8, layer_int8) = lines["16 bits"], lines["int8"]
    at_80 = {name: work + slope * LAYERS for name, (work, slope) in lines.items()}
    row = {
        "bytes_per_layer": {name: slope for name, (_, slope) in lines.items()},
        "bytes_once": {name: once for name, (once, _) in lines.items()},
        "int8_lower_from_layers": (work_int8 - work) / (layer - layer_int8),
        "peak_bytes_80_layers": at_80,
        "ratio_80_layers": at_80["int8"] / at_80["16 bits"],
    }
    print(f"projected   INT8's peak is the lower one from {row['int8_lower_from_layers']:.1f} layers on; at {LAYERS}, "
          f"{at_80['int8'] / 2**20:.0f} MiB to {at_80['16 bits'] / 2**20:.0f}, {row['ratio_80_layers']:.3f} of 16 bits",
          flush=True)  # fmt: skip
    return row


def behind_a_window(positions: int, sinks: int, window: int) -> list[dict[str, Any]]:
    """Bytes of the pool, and of everything MLX holds, while a tiny model reads far more than its window."""
    module = random_decoder(2, 32, 4, 2, 16)
    rows = []
    for name, int8 in STORAGES.items():
        model = PagedModel(module, int8=int8)
        context = model.new_context(sinks, window)
        marks = sorted({count for count in (1000, 2000, 5000, 10000, 20000, 50000) if count < positions} | {positions})
        seen: list[dict[str, int]] = []
        tokens = random_tokens(positions + 1)
        for mark in marks:
            prefill(context, tokens[: mark + 1])
            seen.append({"positions": context.length, "kv_bytes": context.nbytes, "allocated_bytes": allocated(),
                         "pages_held": len(context.table.pages)})  # fmt: skip
        without = -(-positions // PAGE) * model.pool.page_bytes
        rows.append({"storage": name, "sinks": sinks, "window": window, "seen": seen, "kv_bytes_without": without})
        print(f"window {window}, {sinks} sinks  {name:8} "
              + ", ".join(f"{at['positions']}: {at['kv_bytes'] / 1024:.1f} KiB" for at in seen)
              + f"; without a window {without / 1024:.1f} KiB", flush=True)  # fmt: skip
    return rows


def failures(results: dict[str, Any]) -> list[str]:
    """What is not as promised."""
    _, int8 = results["bytes_per_token"]
    waste, peaks = results["page_waste"], results["prefill_peak"]
    found = []
    if int8["ratio"] > 0.51:
        found.append(f"INT8 takes {int8['ratio']:.4f} of 16 bits, more than 0.51")
    if waste["most_pages_not_needed"] > 0 or waste["most_unfilled_slots_of_a_sequence"] >= PAGE:
        found.append("a sequence holds a page it does not need")
    deepest = max((row for row in peaks if row["storage"] == "int8"), key=lambda row: row["layers"])
    if deepest["ratio"] >= 1:
        found.append(f"INT8's peak with {deepest['layers']} layers is {deepest['ratio']:.3f} of that of 16 bits")
    found += [f"bytes grow behind a window with {row['storage']}" for row in results["behind_a_window"]
              if len({at["kv_bytes"] for at in row["seen"]}) > 1]  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill", type=int, default=1024, help="tokens of the prefill")
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 16], help="of the models that prefill")
    parser.add_argument("--positions", type=int, default=100_000, help="read behind a window")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if len(set(options.layers)) < 2:
        parser.error("give two different numbers of --layers: the growth from one to the other is projected")
    results: dict[str, Any] = {
        "bytes_per_token": bytes_per_token(layers=4, tokens=64 * PAGE),
        "page_waste": page_waste(sequences=200, rounds=5000),
        "behind_a_window": behind_a_window(options.positions, sinks=4, window=512),
        "prefill_peak": prefill_peak(options.layers, options.prefill),
    }
    results["prefill_projection"] = projection(results["prefill_peak"])
    results["failures"] = failures(results)
    save("kv_memory", results, options.output)
    if results["failures"]:
        sys.exit("\n".join(results["failures"]))


if __name__ == "__main__":
    main()
