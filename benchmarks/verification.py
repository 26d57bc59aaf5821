"""Tokens per target pass of three ways to verify the same drafts, on a real pair.

    python benchmarks/verification.py -m TARGET -d DRAFT [-k 5] [--rounds 12] [--temperature 1] [--kinds ...]

TARGET and DRAFT are directories in the hub's layout. In each round the draft model draws K tokens and the target reads
them all. From the two distributions at each of them follows how many tokens a pass emits on average over the chances
of verifying, for 1 to K of these drafts, without drawing anything: token by token (Leviathan et al. 2023), as a block
(Sun et al. 2024), and by mlx-lm's rule, a draft is accepted where a fresh sample of the target equals it. All three
leave the target's law as it is, so the same rounds stand for all; the answer goes on by block verification. Prompts are
the built-in ones, the shortest of each kind. Nothing is timed.
"""

from __future__ import annotations

import argparse
from math import exp, log
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import mlx.core as mx
import numpy as np
from common import save

from mlx_spec import LLM, Sampling
from mlx_spec.architectures.context import prefill
from mlx_spec.cli.bench.prompts import KINDS, PROMPTS
from mlx_spec.decoding.drafters.draft_model import DraftModel
from mlx_spec.decoding.sampling import distribution
from mlx_spec.decoding.verification import verify_block
from mlx_spec.llm.llm import load

EQUALITY, TOKEN, BLOCK = "equality", "token", "block"


def by_equality(target: np.ndarray, draft: np.ndarray, tokens: np.ndarray) -> float:
    """Tokens that a pass emits on average: target (k + 1, vocabulary) and draft (k, vocabulary) distributions, tokens
    (k,) drawn from `draft`. A draft is accepted with the probability that the target draws it too."""
    return 1 + float(np.cumprod(target[np.arange(len(tokens)), tokens]).sum())


def by_token(target: np.ndarray, draft: np.ndarray, tokens: np.ndarray) -> float:
    """The same where each draft is accepted with probability min(1, target / draft)."""
    places = np.arange(len(tokens))
    return 1 + float(np.cumprod(np.minimum(1, target[places, tokens] / draft[places, tokens])).sum())


def by_block(target: np.ndarray, draft: np.ndarray, tokens: np.ndarray) -> float:
    """The same where a prefix of i drafts holds with probability holds[i], whatever becomes of the others, and the
    longest that holds is accepted."""
    k = len(tokens)
    weights = [1.0]
    for place, token in enumerate(tokens):
        weights.append(min(1.0, weights[-1] * target[place, token] / draft[place, token]))
    holds = []
    for i in range(1, k):
        left = float(np.maximum(weights[i] * target[i] - draft[i], 0).sum())
        missing = left + 1 - weights[i]
        holds.append(left / missing if missing > 0 else 1.0)
    holds.append(weights[k])
    # At least i are accepted unless none of the prefixes of i and more holds.
    return 1 + sum(1 - float(np.prod([1 - chance for chance in holds[i:]])) for i in range(k))


WAYS = {EQUALITY: by_equality, TOKEN: by_token, BLOCK: by_block}


def measured(llm: LLM, prompt: list[int], k: int, rounds: int, sampling: Sampling) -> list[dict[str, Any]]:
    """Of each round, how many tokens each way emits on average for 1 to k drafts, and how many were emitted."""
    assert llm._draft is not None
    size, tokens = llm.vocabulary_size, list(prompt)
    target, drafter = llm._target.new_context(), DraftModel(llm._draft.new_context(), sampling, size)
    prefill(target, prompt)
    drafter.prefill(prompt)
    found: list[dict[str, Any]] = []
    for key in mx.random.split(mx.random.key(0), rounds):
        draft_key, verify_key = mx.random.split(key)
        proposal = drafter.propose(tokens, k, None, draft_key)
        read = mx.concatenate([mx.array(tokens[-1:], mx.int32), proposal.tokens])
        rows = distribution(target.extend(read), sampling, size)  # (k + 1, vocabulary)
        accepted, following = verify_block(rows, proposal.probabilities, proposal.tokens, verify_key)
        drafts = np.array(proposal.tokens)
        p, q = (np.array(x if x.ndim == 2 else mx.eye(size)[x]).astype(np.float64)
                for x in (rows, proposal.probabilities))  # fmt: skip
        expected = {
            way: [emitted(p[: count + 1], q[:count], drafts[:count]) for count in range(1, k + 1)]
            for way, emitted in WAYS.items()
        }
        emitted = [*drafts[: accepted.item()].tolist(), following.item()]
        found.append({"expected": expected, "emitted": len(emitted)})
        tokens += emitted
        target.rewind(len(tokens) - 1)
        drafter.rewind(tokens)
        if not llm.tokenizer.end_tokens.isdisjoint(emitted):
            break
    target.close()
    drafter.close()
    return found


def summarised(rounds: dict[str, list[dict[str, Any]]], k: int) -> dict[str, dict[str, Any]]:
    """Tokens per pass of each way for 1 to k drafts, by kind of prompt, and ratios as geometric means over kinds."""
    kinds: dict[str, dict[str, Any]] = {}
    for kind, found in rounds.items():
        kinds[kind] = {way: [mean(each["expected"][way][i] for each in found) for i in range(k)] for way in WAYS}
    summary = dict(kinds)
    for name, of, to in (("block / token", BLOCK, TOKEN), ("block / equality", BLOCK, EQUALITY)):
        ratios = {kind: [a / b for a, b in zip(row[of], row[to], strict=True)] for kind, row in kinds.items()}
        means = [exp(mean(log(each[i]) for each in ratios.values())) for i in range(k)]
        summary[name] = {**ratios, "geometric mean": means}
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, required=True)
    parser.add_argument("-d", "--draft", type=Path, required=True)
    parser.add_argument("-k", "--draft-tokens", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()

    llm, k = load(options.model, options.draft), options.draft_tokens
    sampling = Sampling(temperature=options.temperature)
    models = {"target": options.model.name, "draft": options.draft.name, "temperature": options.temperature}
    rounds: dict[str, list[dict[str, Any]]] = {}
    for kind in options.kinds:
        text = min((p.text for p in PROMPTS if p.kind == kind), key=len)
        prompt = llm.tokenizer.chat([{"role": "user", "content": text}])
        rounds[kind] = found = measured(llm, prompt, k, options.rounds, sampling)
        # How many were really emitted differs from the average by chance alone.
        off = [each["emitted"] - each["expected"][BLOCK][-1] for each in found]
        noise = f" ± {stdev(off) / len(off) ** 0.5:.2f}" if len(off) > 1 else ""
        figures = "   ".join(f"{way} {mean(each['expected'][way][-1] for each in found):.2f}" for way in WAYS)
        print(f"{kind:9} K={k}  {figures}   (emitted less expected {mean(off):+.2f}{noise})", flush=True)
        # After each prompt: an interrupted run keeps what was measured.
        save("verification", {"models": models, "summary": summarised(rounds, k), "rounds": rounds}, options.output)
    print(f"\ntokens per pass, drafts 1 to {k}")
    for heading, lines in summarised(rounds, k).items():
        for name, values in lines.items():
            print(f"  {heading:16} {name:14} {'  '.join(f'{value:.3f}' for value in values)}")


if __name__ == "__main__":
    main()
