"""What an INT8 cache costs in quality, beside mlx-lm's 8-bit cache, on real text.

    python benchmarks/kv_quality.py -m MODEL [MODEL ...] [--types float32 bfloat16] [--tokens 400] [-t TARGET -d DRAFT]

Computed in bfloat16, the rounding of everything else is part of what is measured; in float32 only the cache's shows.
MODEL is a directory in the hub's layout. Every token of a text is read with each cache, in chunks; at each position
the distribution over the next token is compared with that of the unquantized cache: KL divergence (nats), the
difference of the negative log-likelihood of the real next token, and whether the likeliest token is the same. The
texts are English prose and code that every Python installation has. With TARGET and DRAFT, also the acceptance of the
pair at temperature 1 with and without INT8 on the target: the expected acceptance, sum min(p, q), at every position.
"""

from __future__ import annotations

import argparse
import inspect
import textwrap
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import mlx.core as mx
import numpy as np
from common import save
from mlx_lm.models.cache import QuantizedKVCache
from mlx_lm.utils import load as load_reference

from mlx_spec.architectures.context import Context
from mlx_spec.architectures.paged import PagedModel
from mlx_spec.loading.language_models import sample_tokens
from mlx_spec.loading.loader import load

CHUNK = 32
TEXTS = {"prose": topics["objects"] + topics["naming"] + topics["exceptions"], "code": inspect.getsource(textwrap)}


def log_softmax(logits: mx.array) -> mx.array:
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def by_context(context: Context, tokens: list[int]) -> mx.array:
    """Log-probabilities after each token, (n, vocabulary)."""
    rows = []
    for start in range(0, len(tokens), CHUNK):
        rows.append(log_softmax(context.extend(tokens[start : start + CHUNK])))
        mx.eval(rows[-1])
    context.close()
    return mx.concatenate(rows)


def by_mlx_lm(model: Any, tokens: list[int]) -> mx.array:
    """The same with mlx-lm's affine 8-bit cache, groups of 64."""
    cache = [QuantizedKVCache(group_size=64, bits=8) for _ in model.layers]
    rows = []
    for start in range(0, len(tokens), CHUNK):
        rows.append(log_softmax(model(mx.array([tokens[start : start + CHUNK]]), cache=cache)[0]))
        mx.eval(rows[-1])
    return mx.concatenate(rows)


def compare(reference: mx.array, other: mx.array, tokens: list[int]) -> dict[str, float]:
    """Means over positions; `kl_error` is the standard error of the KL."""
    kl = np.array((mx.exp(reference) * (reference - other)).sum(axis=-1))
    following = mx.array(tokens[1:])[:, None]

    def nll(rows: mx.array) -> float:
        return -mx.take_along_axis(rows[:-1], following, axis=-1).mean().item()

    same = mx.argmax(reference, axis=-1) == mx.argmax(other, axis=-1)
    return {
        "kl": float(kl.mean()),
        "kl_error": float(kl.std() / np.sqrt(len(kl))),
        "nll_difference": nll(other) - nll(reference),
        "top1_agreement": same.astype(mx.float32).mean().item(),
    }


def quality(directory: Path, dtype: str, count: int) -> list[dict[str, Any]]:
    loaded = load(directory)
    loaded.module.set_dtype(getattr(mx, dtype))
    plain, int8 = PagedModel(loaded.module), PagedModel(loaded.module, int8=True)
    int8.take_divisors(sample_tokens(loaded.tokenizer))
    theirs, _ = load_reference(str(directory))
    theirs.set_dtype(getattr(mx, dtype))
    rows = []
    for kind, text in TEXTS.items():
        tokens = loaded.tokenizer.encode(text)[:count]
        reference = by_context(plain.new_context(), tokens)
        ways: dict[str, Callable[[], mx.array]] = {
            "mlx-spec int8": lambda tokens=tokens: by_context(int8.new_context(), tokens),
            "mlx-lm 8-bit": lambda tokens=tokens: by_mlx_lm(theirs, tokens),
        }
        for way, run in ways.items():
            figures = compare(reference, run(), tokens)
            about = {"model": directory.name, "type": dtype, "text": kind, "tokens": len(tokens), "cache": way}
            rows.append(about | figures)
            print(
                f"{directory.name:20} {dtype:8} {kind:6} {way:14} KL {figures['kl']:.5f} ± {figures['kl_error']:.5f}   "
                f"NLL {figures['nll_difference']:+.4f}   top-1 {figures['top1_agreement']:.3f}",
                flush=True,
            )
    return rows


def acceptance(target: Path, draft: Path, count: int) -> list[dict[str, Any]]:
    """Expected acceptance per position at temperature 1, and the difference INT8 makes, with 95% intervals."""
    loaded, small = load(target), load(draft)
    tokens = loaded.tokenizer.encode(TEXTS["code"])[:count]
    size = min(loaded.config["vocab_size"], small.config["vocab_size"])
    q = mx.exp(by_context(PagedModel(small.module).new_context(), tokens))[:, :size]
    rates = {}
    for way, int8 in (("unquantized", False), ("int8", True)):
        model = PagedModel(loaded.module, int8=int8)
        model.take_divisors(sample_tokens(loaded.tokenizer))
        p = mx.exp(by_context(model.new_context(), tokens))[:, :size]
        rates[way] = np.array(mx.minimum(p, q).sum(axis=-1))
    difference = rates["int8"] - rates["unquantized"]
    rows = []
    for name, values in (*rates.items(), ("difference", difference)):
        interval = 1.96 * values.std() / np.sqrt(len(values))
        rows.append({"target": target.name, "draft": draft.name, "cache": name, "tokens": len(tokens),
                     "acceptance": float(values.mean()), "interval": float(interval)})  # fmt: skip
        print(f"acceptance {name:12} {values.mean():+.4f} ± {interval:.4f}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--models", type=Path, nargs="+", default=[])
    parser.add_argument("-t", "--target", type=Path)
    parser.add_argument("-d", "--draft", type=Path)
    parser.add_argument("--types", nargs="+", choices=("float32", "bfloat16"), default=["float32"])
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if (options.target is None) != (options.draft is None):
        parser.error("give --target and --draft together")
    results: dict[str, Any] = {"quality": []}
    for dtype in options.types:
        for model in options.models:
            results["quality"] += quality(model, dtype, options.tokens)
            save("kv_quality", results, options.output)  # an interrupted run keeps what was measured
    if options.target:
        results["acceptance"] = acceptance(options.target, options.draft, options.tokens)
        save("kv_quality", results, options.output)


if __name__ == "__main__":
    main()
