"""Whether a draft speaks the target's language: the same ids for the same strings.

Knows tokenizers only, no weights. Sizes say nothing: two vocabularies of equal size may be unrelated, and
padded ones of different size may be the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mlx_spec.errors import IncompatiblePair

TOLERATED = 1 / 1000
"""Ids that may differ, as a share of those both know, if texts are encoded alike: renamed special tokens."""

# Words, capitals, digits, code, indentation, rare letters, other scripts, emoji: each merges its own way.
PROBE = (
    "The quick brown fox jumps over the lazy dog, twice; antidisestablishmentarianism isn't common.",
    "I'll say we've DONE it: 3.14159, 2024-07-31, 1,000,000 and 0x7fff at 12:30!?",
    "def fibonacci(n: int) -> int:\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n",
    '\tfor (let i = 0; i < items.length; i++) { console.log(`${i}: "${items[i]}"`); }\r\n\r\n',
    '{"name": "value", "list": [1, 2.5e-3, null, true], "path": "C:\\\\Users\\\\me/etc"}   \n\n\n   end',
    "<p class='a-b_c'>&amp;</p> SELECT * FROM t WHERE x != 'y'; \\frac{a}{b} = \\sum_{i=0}^{n} x_i^2",
    "Die Größe, l'œuvre, mañana, žluťoučký kůň, İstanbul, Việt Nam, smørrebrød — “quoted” … ½ €20",
    "Съешь же ещё этих мягких французских булок. Ελληνικά κείμενα. שלום עולם. مرحبا بالعالم",
    "我能吞下玻璃而不伤身体。東京は日本の首都です。안녕하세요 세계. नमस्ते दुनिया สวัสดีชาวโลก",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈 ∀x∈ℝ: ⌈x⌉ ≥ x, a\u0301 e\u0308 \u00a0\u200b\u3000end",
)

Encode = Callable[[str], list[int]]


def compare_tokenizers(
    target_name: str, target_vocabulary: Mapping[str, int], target_encode: Encode,
    draft_name: str, draft_vocabulary: Mapping[str, int], draft_encode: Encode,
) -> list[str]:
    """Warnings about a usable pair. Raises IncompatiblePair, naming what differs, for any other."""
    target, draft = _strings(target_vocabulary), _strings(draft_vocabulary)
    shared = target.keys() & draft.keys()
    moved = {draft_vocabulary[string] for token, string in target.items()
             if string in draft_vocabulary and draft_vocabulary[string] != token}
    differing = sorted(token for token in shared if target[token] != draft[token])
    # A string both know under different ids conflicts even where neither id is known to the other side.
    differing += sorted(token for token in moved if token not in shared)

    def show(token: int) -> str:
        text = f"id {token} is {_name(target, token)} in the target and {_name(draft, token)} in the draft"
        if token not in target:
            return f"{text} (in the target, {draft[token]!r} is {target_vocabulary[draft[token]]})"
        there = draft_vocabulary.get(target[token], token)
        return text if there == token else f"{text} (where {target[token]!r} is {there})"

    refusal = f"{draft_name} cannot draft for {target_name}: "
    step = "Choose a draft of the target's own family; `mlx-spec models` lists pairs."
    if not shared or len(differing) > TOLERATED * len(shared):
        shown = "; ".join(show(token) for token in differing[:3]) if shared else "they have no id in common"
        raise IncompatiblePair(f"{refusal}their tokenizers differ in {len(differing)} of {len(shared)} ids: "
                               f"{shown}. {step}")
    for text in PROBE:
        ours, theirs = _plain(target_encode, text), _plain(draft_encode, text)
        if ours != theirs:
            at = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]),
                      min(len(ours), len(theirs)))
            raise IncompatiblePair(
                f"{refusal}they split the same text differently: in {text[:24]!r}..., token {at + 1} "
                f"is {_here(target, ours, at)} for the target and {_here(draft, theirs, at)} for the draft. {step}"
            )
    warnings = []
    if differing:
        warnings.append(f"the draft {draft_name} disagrees with {target_name} on {_count(differing)}: "
                        f"{'; '.join(show(token) for token in differing[:3])}. Drafting stops short there.")
    sides = ((target, draft_vocabulary, draft, draft_name), (draft, target_vocabulary, target, target_name))
    for known, other_vocabulary, other, name in sides:
        # Many ids on one side are padding and mean nothing; a few are tokens that one side was given later.
        alone = sorted(token for token in known.keys() - other.keys() if known[token] not in other_vocabulary)
        if 0 < len(alone) <= TOLERATED * len(known):
            listed = ", ".join(repr(known[token]) for token in alone[:3])
            warnings.append(f"{name} does not know {_count(alone)} of the other model: {listed}"
                            f"{', ...' if len(alone) > 3 else ''}. Drafting stops short there.")
    return warnings


def _strings(vocabulary: Mapping[str, int]) -> dict[int, str]:
    return {token: string for string, token in vocabulary.items()}


def _name(strings: Mapping[int, str], token: int) -> str:
    return repr(strings[token]) if token in strings else "unknown"


def _here(strings: Mapping[int, str], tokens: list[int], at: int) -> str:
    return f"{tokens[at]} ({_name(strings, tokens[at])})" if at < len(tokens) else "absent"


def _count(tokens: list[int]) -> str:
    return "1 token" if len(tokens) == 1 else f"{len(tokens)} tokens"


def _plain(encode: Encode, text: str) -> list[int]:
    """Ids without those a tokenizer puts in front of every text: only the target's are used in a pair."""
    start, tokens = encode(""), encode(text)
    return tokens[len(start):] if tokens[: len(start)] == start else tokens
