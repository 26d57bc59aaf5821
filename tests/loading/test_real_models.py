"""Real models: short, and only with --real-models DIR."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.utils import load as load_reference

import mlx_spec
from mlx_spec import Sampling, Speculation

pytestmark = pytest.mark.slow

TEXT = """def fibonacci(n: int) -> list[int]:
    \"\"\"The first n Fibonacci numbers.\"\"\"
    numbers = [0, 1]
    while len(numbers) < n:
        numbers.append(numbers[-1] + numbers[-2])
    return numbers[:n]
"""


def test_native_logits_agree_with_mlx_lm_on_the_likeliest_token(real_models: Path) -> None:
    directory = real_models / "qwen2.5-coder-0.5b"
    llm = mlx_spec.load(directory)
    reference, _ = load_reference(str(directory))
    tokens = llm.tokenizer.encode(TEXT)
    ours, theirs = llm.logits(tokens), reference(mx.array([tokens]))[0]
    agreement = (mx.argmax(ours, axis=-1) == mx.argmax(theirs, axis=-1)).astype(mx.float32).mean().item()
    assert len(tokens) > 50
    assert agreement >= 0.98  # bfloat16 sums in another order can swap two near-equal tokens


def test_a_model_drafting_for_itself_is_always_accepted(real_models: Path) -> None:
    """The GGUF file and the directory made from it are one model, in 4 bits with float32 rows and in bfloat16."""
    llm = mlx_spec.load(real_models / "smollm2-135m", draft=real_models / "smollm2-135m.gguf")
    completion = llm.generate("What is gravity?", max_tokens=24)
    plain = llm.generate("What is gravity?", max_tokens=24, speculation=Speculation(draft_tokens=0))
    assert completion.statistics.acceptance_rate is not None
    assert completion.statistics.acceptance_rate > 0.9  # the two types round differently
    assert completion.statistics.target_passes < 12
    assert completion.text == plain.text
    assert llm.tokenizer.decode(completion.tokens) == completion.text


def test_the_same_seed_gives_the_same_text(real_models: Path) -> None:
    llm = mlx_spec.load(real_models / "smollm2-135m.gguf")
    sampling = Sampling(temperature=1.0, top_p=0.9, seed=7)
    texts = [llm.generate("Name a colour.", max_tokens=12, sampling=sampling).text for _ in range(2)]
    assert texts[0] == texts[1]


def test_the_command_answers_from_a_pair(real_models: Path) -> None:
    command = [
        sys.executable, "-m", "mlx_spec", "generate", "-m", str(real_models / "smollm2-135m"),
        "-d", str(real_models / "smollm2-135m.gguf"), "-k", "2", "-n", "8", "--json", "What is gravity?",
    ]  # fmt: skip
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    answer = json.loads(run.stdout)
    assert answer["completion_tokens"] == len(answer["tokens"]) == 8
    assert answer["drafted"] > 0
    assert answer["draft"].endswith(".gguf")
