"""`mlx-spec generate`: one prompt, one answer. Knows the options and what comes after what; no model code."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Annotated, Any

import typer

from mlx_spec.cli import console, options
from mlx_spec.cli.answer import write_json, write_text
from mlx_spec.cli.model_options import check_models, draft_wanted, given, kv_config, load, note_no_draft
from mlx_spec.cli.options import OUTPUT, option
from mlx_spec.cli.outcome import TracebackOption
from mlx_spec.cli.progress import progress
from mlx_spec.cli.prompt import check_utf8, read_prompt
from mlx_spec.errors import BadConfig
from mlx_spec.settings import HYBRID, MODEL, Sampling, Speculation

_PROMPT, _DRAFTING, _LENGTH, _CHOICE, _REPETITION = (
    "Prompt", "Drafting", "When to stop", "How words are chosen", "Against repetition")
HELP = (
    "Answer one prompt.\n\n"
    "The answer goes to stdout as it comes, figures and notes go to stderr. Sampling options left out take "
    "the values that suit the model (`mlx-spec models --json` shows them), else the likeliest token is taken."
)


def generate(
    prompt: Annotated[list[str] | None, typer.Argument(
        metavar="PROMPT", show_default=False,
        help="What to answer, in quotes; - reads it from stdin.")] = None,
    prompt_file: Annotated[str | None, option(
        "--prompt-file", panel=_PROMPT, metavar="FILE", help="Read the prompt from a file (UTF-8).")] = None,
    system: Annotated[str | None, option(
        "--system", panel=_PROMPT, metavar="TEXT", help="Instructions that stand before the prompt.")] = None,
    raw: Annotated[bool, option(
        "--raw", panel=_PROMPT,
        help="Continue the prompt as it is, without the model's chat template.")] = False,
    model: options.Model = None,
    draft: options.Draft = None,
    draft_tokens: Annotated[Any, option(
        "--draft-tokens", "-k", panel=_DRAFTING, metavar="K", parser=options.whole_or("auto"),
        help="Tokens drafted per pass of the target; 0 is plain decoding, auto chooses anew for each pass by what "
        "passes cost on this machine and what was accepted. "
        f"Default: the model's own, else {Speculation().draft_tokens}.")] = None,
    most_draft_tokens: Annotated[int | None, option(
        "--draft-tokens-max", panel=_DRAFTING, metavar="N", parser=options.whole,
        help=f"The most that -k auto drafts. Default: {Speculation().most_draft_tokens}.")] = None,
    drafter: Annotated[str | None, option(
        "--drafter", panel=_DRAFTING, metavar="DRAFTER",
        help="model: the draft model; lookup: what followed the same words earlier in prompt and answer; hybrid: "
        "lookup where it finds enough, else the model; none: plain decoding. Default: hybrid with a draft model, else "
        "lookup.")] = None,
    verification: Annotated[str | None, option(
        "--verify", panel=_DRAFTING, metavar="WAY",
        help="How drafted tokens are accepted, with the same distribution either way: token, one after the other, or "
        f"block, together, which accepts more. Default: {Speculation().verification}.")] = None,
    max_tokens: Annotated[int, option(
        "--max-tokens", "-n", panel=_LENGTH, metavar="N", parser=options.token_limit,
        help="Tokens to answer with at most, or unlimited (up to the model's context). Default: 512.")] = 512,
    stop: Annotated[list[str] | None, option(
        "--stop", panel=_LENGTH, metavar="TEXT", help="End before this text; may be repeated.")] = None,
    stop_token: Annotated[list[int] | None, option(
        "--stop-token", panel=_LENGTH, metavar="ID", parser=options.whole,
        help="End at this token id; may be repeated.")] = None,
    temperature: Annotated[float | None, option(
        "--temperature", "-t", panel=_CHOICE, metavar="T", parser=options.number,
        help="0 always takes the likeliest token; 1 follows the model's probabilities; more is wilder.")] = None,
    top_k: Annotated[int | None, option(
        "--top-k", panel=_CHOICE, metavar="K", parser=options.whole,
        help="Choose among the K likeliest tokens; 0 among all.")] = None,
    top_p: Annotated[float | None, option(
        "--top-p", panel=_CHOICE, metavar="P", parser=options.number,
        help="Choose among the fewest tokens that together have this probability; 1 among all.")] = None,
    min_p: Annotated[float | None, option(
        "--min-p", panel=_CHOICE, metavar="P", parser=options.number,
        help="Leave out tokens below this fraction of the likeliest one's probability; 0 leaves none out.")] = None,
    logit_bias: Annotated[list[Any] | None, option(
        "--logit-bias", panel=_CHOICE, metavar="TOKEN=VALUE", parser=options.bias,
        help="Add VALUE to the logit of a token id, -inf forbids it; may be repeated.")] = None,
    seed: Annotated[int | None, option(
        "--seed", panel=_CHOICE, metavar="N", parser=options.whole,
        help="The same seed gives the same answer. Default: a new one each time.")] = None,
    repetition_penalty: Annotated[float | None, option(
        "--repetition-penalty", panel=_REPETITION, metavar="X", parser=options.number,
        help="More than 1 makes tokens already in the text less likely; 1 is off.")] = None,
    presence_penalty: Annotated[float | None, option(
        "--presence-penalty", panel=_REPETITION, metavar="X", parser=options.number,
        help="Subtracted from the logit of each token already in the text; 0 is off.")] = None,
    frequency_penalty: Annotated[float | None, option(
        "--frequency-penalty", panel=_REPETITION, metavar="X", parser=options.number,
        help="The same, times how often the token is there; 0 is off.")] = None,
    storage: options.Storage = None,
    draft_storage: options.DraftStorage = None,
    window: options.Window = None,
    sinks: options.Sinks = None,
    as_json: Annotated[bool, option(
        "--json", panel=OUTPUT,
        help="Write one JSON object, with text and figures, instead of the text.")] = False,
    top_logprobs: Annotated[int | None, option(
        "--top-logprobs", panel=OUTPUT, metavar="N", parser=options.whole,
        help="With --json: the log-probability of each token and of the N likeliest in its place.")] = None,
    quiet: Annotated[bool, option(
        "--quiet", "-q", panel=OUTPUT,
        help="No figures, notes or progress on stderr; errors only.")] = False,
    traceback: TracebackOption = False,
) -> None:
    """Answers one prompt; see HELP."""
    # Everything that can be checked without a model is checked first: a large one takes long to load.
    chosen = given(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed,
        repetition_penalty=repetition_penalty, presence_penalty=presence_penalty, frequency_penalty=frequency_penalty,
        top_logprobs=top_logprobs, logit_bias=dict(logit_bias) if logit_bias else None,
    )  # fmt: skip
    Sampling(**chosen)
    ahead = given(
        draft_tokens=draft_tokens, most_draft_tokens=most_draft_tokens, drafter=drafter, verification=verification
    )
    if draft_tokens not in (None, "auto") and most_draft_tokens is not None:
        raise BadConfig("--draft-tokens-max bounds -k auto, and -k names a number; leave one of the two out.")
    Speculation(**ahead)
    kv = kv_config(model, storage=storage, draft_storage=draft_storage, window=window, sinks=sinks)
    if top_logprobs is not None and not as_json:
        raise BadConfig("--top-logprobs is shown only in the JSON object; add --json.")
    if raw and system is not None:
        raise BadConfig("--system needs the chat template that --raw leaves out; put it into the prompt.")
    _check_texts(system, stop or [], stop_token or [])
    text = read_prompt(prompt or [], prompt_file)
    name = check_models(model, draft)
    if drafter in (MODEL, HYBRID) and draft == "none":
        raise BadConfig(f"--drafter {drafter} needs a draft model, and --draft none loads none; name one, or use "
                        "--drafter lookup.")

    with console.notes(shown=not quiet):
        draft = draft_wanted(name, draft, ahead)
        llm = load(name, draft, kv, quiet=quiet)
        if llm.draft_name is None:
            note_no_draft({"--draft-kv": draft_storage})
        question: str | list[dict[str, str]] = text
        if system is not None:
            question = [{"role": "system", "content": system}, {"role": "user", "content": text}]
        with contextlib.ExitStack() as drawing:
            tell = drawing.enter_context(progress(shown=not quiet))
            chunks = llm.stream(
                question,
                sampling=dataclasses.replace(llm.sampling, **chosen),
                speculation=dataclasses.replace(llm.speculation, **ahead),
                max_tokens=None if max_tokens == options.UNLIMITED else max_tokens,
                stop=stop or (),
                stop_tokens=stop_token or (),
                raw=raw,
                prefill_progress=lambda done, total: tell("reading the prompt's tokens", done, total),
            )
            # A generator: closed at once, it leaves the caches in order also after Ctrl-C or a closed pipe.
            with contextlib.closing(chunks) as chunks:
                statistics = write_json(chunks, llm) if as_json else write_text(chunks, drawing.close)
        if not quiet:
            console.say(console.statistics_line(statistics))


def _check_texts(system: str | None, stop: list[str], stop_tokens: list[int]) -> None:
    if system is not None:
        check_utf8(system, "--system")
    for string in stop:
        check_utf8(string, "--stop")
        if not string:
            raise BadConfig("--stop '' is empty; give at least one character.")
    for token in stop_tokens:
        if token < 0:
            raise BadConfig(f"--stop-token is {token}; give token ids of 0 or more (they come with --json).")
