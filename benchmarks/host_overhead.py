"""Host time per round against mlx-lm's speculative decoding, and the cost of a step against the pool's capacity.

Two 80-layer, 128-wide random models, so small that building and dispatching the graph is most of the work. Both
runtimes decode with the same weights and K, greedily, interleaved in one run:

    python benchmarks/host_overhead.py [--draft-tokens 3] [--rounds 20] [--repeats 5]

Host time is the CPU time of the Python thread; MLX computes on threads of its own. "Agreeing" is a draft with the
target's weights (every draft accepted), "disagreeing" one with other weights (nearly none).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
from common import save, spread
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models import llama as reference

from mlx_spec.architectures.definitions import model_classes
from mlx_spec.architectures.paged import PagedModel
from mlx_spec.decoding.drafters.draft_model import DraftModel
from mlx_spec.decoding.drafting import Drafting
from mlx_spec.decoding.engine import Decoding
from mlx_spec.decoding.schedule.schedule import FixedSchedule
from mlx_spec.settings import Sampling

CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 128, "num_hidden_layers": 80, "intermediate_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": 1024,
    "max_position_embeddings": 131072, "tie_word_embeddings": False,
}  # fmt: skip
PROMPT = list(range(1, 33))


def pair(seed: int) -> tuple[PagedModel, Any]:
    """The same random weights as our model and as mlx-lm's."""
    model_class, arguments_class = model_classes(CONFIG)
    module = model_class(arguments_class.from_dict(CONFIG))
    keys = iter(mx.random.split(mx.random.key(seed), 2000))
    weights = [
        (name, mx.ones_like(value) if "norm" in name else 0.05 * mx.random.normal(value.shape, key=next(keys)))
        for name, value in tree_flatten(module.parameters())
    ]
    module.update(tree_unflatten(weights))
    theirs = reference.Model(reference.ModelArgs.from_dict(CONFIG))
    theirs.update(tree_unflatten(weights))
    mx.eval(module.parameters())
    return PagedModel(module), theirs


def ours(target: PagedModel, draft: PagedModel | None, k: int, rounds: int) -> tuple[float, float]:
    """(host seconds, wall seconds) per round."""
    sampling = Sampling()
    size = CONFIG["vocab_size"]
    context = target.new_context()
    drafting = draft and Drafting([DraftModel(draft.new_context(), sampling, size)], FixedSchedule(k))
    decoding = Decoding(list(PROMPT), context, drafting, sampling=sampling, seed=0, vocabulary_size=size)
    decoding.prefill()
    steps = decoding.rounds(limit=None)
    next(steps)
    result = timed(lambda: next(steps), rounds)
    steps.close()
    context.close()
    if drafting:
        drafting.close()
    return result


def theirs(target: Any, draft: Any, k: int, rounds: int) -> tuple[float, float]:
    prompt = mx.array(PROMPT)
    if draft is None:
        plain = generate_step(prompt, target, max_tokens=-1)
        next(plain)
        return timed(lambda: next(plain), rounds)
    steps = speculative_generate_step(prompt, target, draft, num_draft_tokens=k, max_tokens=10**6)

    def one_round() -> None:
        while next(steps)[2]:  # a round ends with the token that is not from the draft
            pass

    one_round()
    return timed(one_round, rounds)


def timed(step: Callable[[], object], count: int) -> tuple[float, float]:
    host, wall = time.thread_time(), time.perf_counter()
    for _ in range(count):
        step()
    return (time.thread_time() - host) / count, (time.perf_counter() - wall) / count


def compare(name: str, run_ours: Callable[[], Any], run_theirs: Callable[[], Any], repeats: int) -> dict[str, Any]:
    """Both in turn; each figure is the median, each ratio that of neighbours in time."""
    run_ours(), run_theirs()  # warm both up
    pairs = [(run_ours(), run_theirs()) for _ in range(repeats)]
    result = {
        label: {
            "mlx_spec_ms": spread([a[i] * 1e3 for a, _ in pairs]),
            "mlx_lm_ms": spread([b[i] * 1e3 for _, b in pairs]),
            "ratio": spread([a[i] / b[i] for a, b in pairs]),
        }
        for i, label in enumerate(("host", "wall"))
    }
    for label, row in result.items():
        print(
            f"{name:24} {label}: mlx-spec {row['mlx_spec_ms']['median']:7.2f} ms   mlx-lm "
            f"{row['mlx_lm_ms']['median']:7.2f} ms   ratio {row['ratio']['median']:.3f} "
            f"({row['ratio']['least']:.3f} to {row['ratio']['most']:.3f})"
        )
    return result


def capacity_cost(k: int, rounds: int, repeats: int) -> list[dict[str, Any]]:
    """Wall time per round while the pools have room for more and more tokens that nobody uses."""
    target, draft = pair(1)[0], pair(2)[0]
    rows = []
    for pages in (16, 64, 256, 1024):
        for pool in (target.pool, draft.pool):
            pool.reserve(pages)
        for label, with_draft, draft_tokens in (("plain", None, 0), (f"K={k}", draft, k)):
            wall = [ours(target, with_draft, draft_tokens, rounds)[1] * 1e3 for _ in range(repeats)]
            rows.append({"slots": target.pool.pages * 64, "round": label, "wall_ms": spread(wall)})
            print(f"pool of {rows[-1]['slots']:6} slots   {label:6} {rows[-1]['wall_ms']['median']:7.2f} ms per round")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft-tokens", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    k, rounds, repeats = options.draft_tokens, options.rounds, options.repeats
    (target, target_theirs), (other, other_theirs) = pair(1), pair(2)
    results = {
        name: compare(
            name,
            lambda draft=draft: ours(target, draft, k, rounds),
            lambda draft=draft_theirs: theirs(target_theirs, draft, k, rounds),
            repeats,
        )
        for name, draft, draft_theirs in (
            (f"disagreeing, K={k}", other, other_theirs),
            (f"agreeing, K={k}", target, target_theirs),
            ("plain", None, None),
        )
    }
    save("host_overhead", {"models": CONFIG, "per_round": results,
                           "capacity": capacity_cost(k, rounds, repeats)}, options.output)


if __name__ == "__main__":
    main()
