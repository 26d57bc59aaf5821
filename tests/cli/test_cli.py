"""The command line against a small stand-in for the runtime: options, output, errors, exit codes, signals."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from directories import write_model
from fake_answers import FIGURES, FakeLLM, fake_load

import mlx_spec
from mlx_spec.cli import console, tables
from mlx_spec.cli.main import main
from mlx_spec.cli.options import named_by_option
from mlx_spec.cli.progress import progress
from mlx_spec.errors import BadConfig
from mlx_spec.llm.completion import Chunk
from mlx_spec.llm.statistics import Drafted
from mlx_spec.settings import KVConfig, Sampling, Speculation


@pytest.fixture
def llms(monkeypatch: pytest.MonkeyPatch) -> list[FakeLLM]:
    """The stand-ins that were loaded."""
    loaded: list[FakeLLM] = []

    def load(model: str, draft: str | bool | None = None, kv: KVConfig | None = None) -> FakeLLM:
        loaded.append(fake_load(model, draft, kv))
        return loaded[-1]

    monkeypatch.setattr(mlx_spec, "load", load)
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    return loaded


@pytest.fixture
def run(llms: list[FakeLLM], capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs a command line; gives exit code, stdout, stderr."""

    def run_line(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return run_line


@pytest.fixture
def generate(run: Callable[..., tuple[int, str, str]]) -> Callable[..., tuple[int, str, str]]:
    return lambda *arguments: run("generate", "-m", "fake", *arguments)


def _stdin(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))


def _one_error(result: tuple[int, str, str], code: int, *parts: str) -> None:
    """Nothing on stdout, and one line on stderr with all parts."""
    assert result[0] == code, result
    assert result[1] == ""
    assert result[2].startswith("error: ")
    assert result[2].count("\n") == 1
    assert result[2].endswith("\n")
    for part in parts:
        assert part in result[2]


# Answers


def test_text_goes_to_stdout_and_figures_to_stderr(generate: Any, llms: list[FakeLLM]) -> None:
    code, out, err = generate("Hello")
    assert (code, out) == (0, "Grüße you\n")
    assert err == ("3 tokens, 1.5 tok/s, 1.50 tokens per target pass, 25% of 4 drafts accepted (model), K 2, "
                   "prefill 0.50 s (7 tokens), peak memory 2.0 GB\n")
    assert llms[0].closed


@pytest.mark.parametrize(("model", "expected"), [("newline", "a\n"), ("nothing", "\n")])
def test_exactly_one_newline_at_the_end(run: Any, model: str, expected: str) -> None:
    assert run("generate", "-m", model, "x")[1] == expected


def test_quiet_leaves_only_the_answer(run: Any) -> None:
    assert run("generate", "-q", "-m", "noted", "x") == (0, "Grüße you\n", "")


def test_notes_of_the_runtime_are_shown_once(run: Any) -> None:
    for _ in range(2):
        err = run("generate", "-m", "noted", "x")[2]
        assert err.splitlines()[0] == "note: speculation is off"
        assert err.count("note:") == 1


def test_json_is_one_object(generate: Any) -> None:
    code, out, _ = generate("--json", "x")
    assert code == 0
    assert out.count("\n") == 1
    assert json.loads(out) == {
        "text": "Grüße you", "tokens": [0, 1, 2, 99], "finish_reason": "stop", "prompt_tokens": 7,
        "completion_tokens": 3, "target_passes": 2, "drafted": 4, "accepted": 1, "acceptance_rate": 0.25,
        "tokens_per_pass": 1.5, "prefill_seconds": 0.5, "decode_seconds": 2.0, "tokens_per_second": 1.5,
        "kv_bytes": 1024, "peak_memory_bytes": 2_000_000_000, "model": "fake", "draft": "small", "seed": 11,
        "drafter": "model", "draft_tokens": 2, "verification": "block", "parked_passes": 0,
        "by_drafter": {"model": {"passes": 2, "drafted": 4, "accepted": 1}}, "passes_by_draft_tokens": {"2": 2},
        "accepted_by_position": [[2, 1], [1, 0]],
    }


def test_json_with_logprobs_has_no_infinity(generate: Any) -> None:
    answer = json.loads(generate("--json", "--top-logprobs", "2", "x")[1])
    assert answer["logprobs"][1] == {
        "token": 1, "text": "<1>", "logprob": -0.5,
        "top": [{"token": 1, "text": "<1>", "logprob": -0.5}, {"token": 9, "text": "<9>", "logprob": None}],
    }


def test_every_option_reaches_the_runtime(generate: Any, llms: list[FakeLLM]) -> None:
    code, _, err = generate(
        "-d", "tiny", "-k", "5", "-t", "0.25", "--top-k", "40", "--top-p", "0.5", "--min-p", "0.125",
        "--repetition-penalty", "1.5", "--presence-penalty", "0.5", "--frequency-penalty", "-0.5",
        "--logit-bias", "5=-inf", "--logit-bias", "6=2", "--seed", "3", "--top-logprobs", "0", "--json",
        "-n", "17", "--stop", "END", "--stop", "\n", "--stop-token", "8", "--stop-token", "9", "--raw",
        "--kv", "int8", "--draft-kv", "int8", "--window", "200", "--sinks", "system", "hello")
    assert code == 0, err
    assert llms[0].draft_name == "tiny"
    assert llms[0].kv == KVConfig("int8", "int8", 200, "system")
    call = llms[0].calls[0]
    assert call["sampling"] == Sampling(
        temperature=0.25, top_k=40, top_p=0.5, min_p=0.125, repetition_penalty=1.5, presence_penalty=0.5,
        frequency_penalty=-0.5, logit_bias={5: -float("inf"), 6: 2.0}, seed=3, top_logprobs=0)
    assert call["speculation"] == Speculation(draft_tokens=5)
    assert (call["prompt"], call["max_tokens"], call["raw"]) == ("hello", 17, True)
    assert (list(call["stop"]), list(call["stop_tokens"])) == (["END", "\n"], [8, 9])


@pytest.mark.parametrize(("arguments", "expected"), [
    ([], Speculation(2)),
    (["-k", "auto"], Speculation("auto")),
    (["-k", "0"], Speculation(0)),
    (["--draft-tokens", "64"], Speculation(64)),
    (["-k", "auto", "--draft-tokens-max", "7"], Speculation("auto", most_draft_tokens=7)),
    *((["--drafter", name], Speculation(2, name)) for name in ("model", "lookup", "hybrid", "none")),
    *((["--verify", way], Speculation(2, verification=way)) for way in ("token", "block")),
    (["-k", "auto", "--drafter", "lookup", "--verify", "token", "--draft-tokens-max", "1"],
     Speculation("auto", "lookup", "token", 1)),
])
def test_options_for_drafting(
    generate: Any, llms: list[FakeLLM], arguments: list[str], expected: Speculation
) -> None:
    code, _, err = generate(*arguments, "hello")
    assert code == 0, err
    assert llms[0].calls[0]["speculation"] == expected


def test_options_left_out_take_the_models_own(generate: Any, llms: list[FakeLLM]) -> None:
    generate("--top-p", "1", "hello")
    call = llms[0].calls[0]
    assert call["sampling"] == Sampling(temperature=0.6, top_p=1.0)
    assert call["speculation"] == Speculation(draft_tokens=2)
    assert call["max_tokens"] == 512
    assert llms[0].draft_name == "small"


@pytest.mark.parametrize(("arguments", "expected"), [
    ([], KVConfig()),
    (["--kv", "int8"], KVConfig("int8")),
    (["--draft-kv", "int8"], KVConfig(draft_storage="int8")),
    (["--window", "4096"], KVConfig(window=4096)),
    (["--window", "none"], KVConfig()),
    (["--window", "none", "--kv", "int8"], KVConfig("int8")),
    (["--window", "65", "--sinks", "0"], KVConfig(window=65, sinks=0)),
    (["--kv", "int8", "--window", "65", "--sinks", "65"], KVConfig("int8", window=65, sinks=65)),
])
def test_options_for_keys_and_values(
    generate: Any, llms: list[FakeLLM], arguments: list[str], expected: KVConfig
) -> None:
    assert generate(*arguments, "hello")[0] == 0
    assert llms[0].kv == expected


def test_options_change_the_models_own_way(
    run: Any, llms: list[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlx_spec.loading import catalog

    entry = replace(catalog.entries()["demo"], kv=KVConfig("int8", window=200, sinks=100))
    monkeypatch.setattr(catalog, "find", lambda name: entry if name == "demo" else None)
    for arguments, expected in (
        ([], entry.kv), (["--kv", "model"], KVConfig(window=200, sinks=100)),
        (["--sinks", "8"], KVConfig("int8", window=200, sinks=8)),
        (["--window", "300"], KVConfig("int8", window=300, sinks=100)),
        (["--window", "none"], KVConfig("int8")), (["--window", "none", "--kv", "model"], KVConfig()),
    ):
        assert run("generate", "-m", "demo", *arguments, "x")[0] == 0
        assert llms[-1].kv == expected
    _one_error(run("generate", "-m", "demo", "--window", "99", "x"), 2, "--window is 99", "at least 100")
    _one_error(run("generate", "-m", "demo", "--window", "none", "--sinks", "8", "x"), 2, "--sinks", "--window 4096")


def test_a_model_of_the_catalogue_keeps_its_own_way(run: Any, llms: list[FakeLLM]) -> None:
    for arguments, expected in (
        ([], KVConfig("int8")), (["--kv", "model"], KVConfig()), (["--window", "99"], KVConfig("int8", window=99)),
    ):
        assert run("generate", "-m", "llama-3.3-70b", *arguments, "x")[0] == 0
        assert llms[-1].kv == expected
    shown = {entry["name"]: entry["defaults"] for entry in json.loads(run("models", "--json")[1])}
    assert shown["llama-3.3-70b"]["storage"] == "int8"
    assert "storage" not in shown["qwen2.5-7b"]


def test_unlimited_and_no_draft(generate: Any, llms: list[FakeLLM]) -> None:
    generate("-n", "unlimited", "-d", "none", "hello")
    assert llms[0].calls[0]["max_tokens"] is None
    assert llms[0].draft_name is None


@pytest.mark.parametrize("arguments", [["-k", "0"], ["--drafter", "none"], ["--drafter", "lookup"],
                                       ["--drafter", "lookup", "-k", "3"]])
def test_a_draft_that_nothing_uses_is_not_loaded(run: Any, llms: list[FakeLLM], arguments: list[str]) -> None:
    for model in ("demo", "llama-3.3-70b"):
        code, _, err = run("generate", "-m", model, *arguments, "x")
        assert (code, llms[-1].draft_name) == (0, None)
        assert "not loaded" not in err
        code, _, err = run("generate", "-m", model, "-d", "other", *arguments, "x")
        assert (code, llms[-1].draft_name) == (0, None)
        use = "lookup" if "lookup" in arguments else "plain decoding"
        assert err.startswith(f"note: other is not loaded: {use} has no use for it\n")
    assert run("generate", "-m", "demo", "-d", "other", "x")[0] == 0
    assert llms[-1].draft_name == "other"


def test_a_model_of_the_catalogue_that_only_looks_up(
    run: Any, llms: list[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlx_spec.loading import catalog

    entry = replace(catalog.entries()["llama-3.3-70b"], speculation=Speculation(drafter="lookup"))
    monkeypatch.setattr(catalog, "find", lambda name: entry)
    run("generate", "-m", "any", "x")
    assert llms[-1].draft_name is None
    run("generate", "-m", "any", "--drafter", "hybrid", "x")
    assert llms[-1].draft_name == "small"


def test_max_tokens_of_zero_is_allowed(generate: Any, llms: list[FakeLLM]) -> None:
    assert generate("-n", "0", "hello")[0] == 0
    assert llms[0].calls[0]["max_tokens"] == 0


def test_system_text_becomes_a_message(generate: Any, llms: list[FakeLLM]) -> None:
    generate("--system", "be brief", "hello")
    assert llms[0].calls[0]["prompt"] == [{"role": "system", "content": "be brief"},
                                          {"role": "user", "content": "hello"}]


@pytest.mark.parametrize("data", [text.encode() for text in ("hé", "hé\n", "hé\r\n", "\ufeffhé")])
@pytest.mark.parametrize("way", ["stdin", "file", "file as stdin"])
def test_prompt_from_stdin_and_file(generate: Any, llms: list[FakeLLM], monkeypatch: pytest.MonkeyPatch,
                                    tmp_path: Path, data: bytes, way: str) -> None:
    _stdin(monkeypatch, data)
    (tmp_path / "prompt.txt").write_bytes(data)
    ways = {"stdin": ["-"], "file": ["--raw", "--prompt-file", str(tmp_path / "prompt.txt")],
            "file as stdin": ["--prompt-file", "-"]}
    assert generate(*ways[way])[0] == 0
    assert llms[0].calls[0]["prompt"] == "hé"


# Mistakes: one line, exit code 2, and no model is loaded


@pytest.mark.parametrize(("arguments", "parts"), [
    ([], ["no prompt", "--prompt-file"]),
    ([""], ["prompt is empty"]),
    ([" \n"], ["prompt is empty"]),
    (["What", "is", "this"], ["3 prompts", "quotes"]),
    (["-", "hello"], ["2 prompts", "quotes"]),
    (["hello", "--prompt-file", "p"], ["two prompts", "'hello'", "'p'"]),
    (["-", "--prompt-file", "p"], ["two prompts", "'-'", "'p'"]),
    (["--prompt-file", "absent.txt"], ["'absent.txt'", "No such file"]),
    (["--prompt-file", "."], ["'.'", "directory"]),
    (["--prompt-file", "a\0b"], ["cannot read"]),
    (["bad \udcff byte"], ["UTF-8"]),
    (["--system", "\udcff", "x"], ["--system", "UTF-8"]),
    (["--raw", "--system", "s", "x"], ["--system", "--raw"]),
    (["-d", "", "x"], ["--draft '' is empty", "none"]),
    (["-5 + 3?"], ["no such option: -5; put -- before a prompt that begins with -"]),
    (["--flags are what?"], ["put -- before a prompt"]),
    (["--kv", "int4", "x"], ["--kv is 'int4'", "model or int8"]),
    (["--draft-kv", "int4", "x"], ["--draft-kv is 'int4'"]),
    (["--kv", "", "x"], ["--kv is ''"]),
    (["--window", "64", "x"], ["--window is 64", "at least 65", "round of drafts"]),
    (["--window", "-1", "x"], ["--window is -1"]),
    (["--window", "wide", "x"], ["'wide'", "whole number", "'none'"]),
    (["--window", "0", "x"], ["--window is 0", "at least 65"]),
    (["--window", "", "x"], ["''", "'none'"]),
    (["--window", "100", "--sinks", "200", "x"], ["--window is 100", "at least 200"]),
    (["--window", "100", "--sinks", "-1", "x"], ["--sinks is -1", "system"]),
    (["--window", "100", "--sinks", "few", "x"], ["'few'"]),
    (["--sinks", "4", "x"], ["--sinks", "--window 4096"]),
    (["--sinks", "system", "x"], ["--sinks", "--window 4096"]),
    (["--window", "none", "--sinks", "4", "x"], ["--sinks", "--window 4096"]),
    (["--window", "8", "x"], ["--window is 8"]),
    (["--window", "100", "--sinks", "-1", "x"], ["--sinks is -1"]),
    (["--sinks", "4", "x"], ["--sinks", "--window"]),
    (["-k", "-1", "x"], ["--draft-tokens is -1", "0 (no speculation) to 64, or auto"]),
    (["-k", "65", "x"], ["--draft-tokens is 65", "to 64, or auto"]),
    (["-k", "two", "x"], ["--draft-tokens", "'two'", "whole number", "'auto'", "mlx-spec generate --help"]),
    (["-k", "1.5", "x"], ["'1.5'", "whole number", "'auto'"]),
    (["-k", "", "x"], ["''", "'auto'"]),
    (["--drafter", "eagle", "x"], ["--drafter is 'eagle'", "model, lookup, hybrid or none"]),
    (["--drafter", "", "x"], ["--drafter is ''", "model, lookup, hybrid or none"]),
    (["--verify", "tree", "x"], ["--verify is 'tree'", "token or block"]),
    (["--verify", "", "x"], ["--verify is ''", "token or block"]),
    (["--draft-tokens-max", "0", "x"], ["--draft-tokens-max is 0", "1 to 15"]),
    (["--draft-tokens-max", "16", "x"], ["--draft-tokens-max is 16", "1 to 15"]),
    (["--draft-tokens-max", "auto", "x"], ["--draft-tokens-max", "'auto'", "whole number"]),
    (["--draft-tokens-max", "5", "-k", "3", "x"], ["--draft-tokens-max", "-k auto"]),
    (["-t", "warm", "x"], ["'warm'", "not a number"]),
    (["-t", "-0.5", "x"], ["--temperature is -0.5"]),
    (["-t", "nan", "x"], ["--temperature is nan"]),
    (["--top-p", "0", "x"], ["--top-p is 0"]),
    (["--top-p", "1.5", "x"], ["--top-p is 1.5"]),
    (["--min-p", "-1", "x"], ["--min-p is -1"]),
    (["--top-k", "-1", "x"], ["--top-k is -1"]),
    (["--repetition-penalty", "0", "x"], ["--repetition-penalty is 0"]),
    (["--presence-penalty", "inf", "x"], ["--presence-penalty is inf"]),
    (["--seed", "-1", "x"], ["--seed is -1"]),
    (["--top-logprobs", "101", "--json", "x"], ["--top-logprobs is 101"]),
    (["--top-logprobs", "1", "x"], ["--top-logprobs", "--json"]),
    (["-n", "-1", "x"], ["--max-tokens", "'-1'", "unlimited", "mlx-spec generate --help"]),
    (["-n", "many", "x"], ["'many'", "unlimited"]),
    (["--stop", "", "x"], ["--stop '' is empty"]),
    (["--stop-token", "-3", "x"], ["--stop-token is -3"]),
    (["--logit-bias", "5", "x"], ["'5'", "TOKEN=VALUE"]),
    (["--logit-bias", "5=nan", "x"], ["--logit-bias is nan"]),
    (["--temprature", "1", "x"], ["--temprature", "mlx-spec generate --help"]),
    (["-m"], ["mlx-spec generate --help"]),
])
def test_mistakes(generate: Any, llms: list[FakeLLM], arguments: list[str], parts: list[str]) -> None:
    _one_error(generate(*arguments), 2, *parts)
    assert not llms


def test_every_setting_is_called_as_an_option_that_exists(run: Callable[..., tuple[int, str, str]]) -> None:
    options = set(re.findall(r"--[a-z-]+", run("generate", "--help")[1]))
    for config in (Sampling, Speculation, KVConfig):
        for field in fields(config):
            message = named_by_option(BadConfig(f"{field.name} is wrong.", setting=field.name))
            assert message.removesuffix(" is wrong.") in options


def test_a_message_that_begins_otherwise_stays_as_it_is() -> None:
    assert named_by_option(BadConfig("seed.toml: seed is -1.")) == "seed.toml: seed is -1."


@pytest.mark.parametrize("prompt", ["-5 + 3?", "--flags"])
def test_a_prompt_may_begin_with_a_dash(generate: Any, llms: list[FakeLLM], prompt: str) -> None:
    assert generate("--", prompt)[0] == 0
    assert llms[0].calls[0]["prompt"] == prompt


@pytest.mark.parametrize(("data", "part"), [(b"", "empty (stdin)"), (b"\n", "empty (stdin)"),
                                            (b"ab\xff", "0xff at 2")])
def test_mistakes_on_stdin(generate: Any, monkeypatch: pytest.MonkeyPatch, data: bytes, part: str) -> None:
    _stdin(monkeypatch, data)
    _one_error(generate("-"), 2, part)


def test_mistakes_in_a_file(generate: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "latin").write_bytes("hé".encode("latin-1"))
    _one_error(generate("--prompt-file", str(tmp_path / "empty")), 2, "prompt is empty")
    _one_error(generate("--prompt-file", str(tmp_path / "latin")), 2, "not UTF-8", "0xe9 at 1")


def test_closed_stdin(generate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    _one_error(generate("-"), 2, "stdin is closed")


@pytest.mark.parametrize(("arguments", "parts"), [
    (["generate", "hello"], ["no model", "--model demo"]),
    (["genrate"], ["'genrate'", "mlx-spec --help"]),
    (["--nonsense"], ["--nonsense", "mlx-spec --help"]),
    (["models", "extra"], ["extra", "mlx-spec models --help"]),
])
def test_mistakes_around_commands(run: Any, arguments: list[str], parts: list[str]) -> None:
    _one_error(run(*arguments), 2, *parts)


# Failures


@pytest.mark.parametrize(("model", "code", "line"), [
    ("absent", 2, "error: no model 'absent'; see mlx-spec models"), ("pair", 2, "error: other ids"),
    ("large", 2, "error: too large"), ("bad", 2, "error: bad file"), ("other", 1, "error: not you"),
    ("crash", 1, "error: ZeroDivisionError; run again with --traceback to see where."),
    ("broken", 1, "error: RuntimeError: first line; run again with --traceback to see where."),
    ("disk", 1, "error: OSError: [Errno 5] Input/output error; run again with --traceback to see where."),
])
def test_each_kind_of_error_has_its_exit_code(run: Any, model: str, code: int, line: str) -> None:
    assert run("generate", "-m", model, "x") == (code, "", line + "\n")


def test_traceback_only_when_asked_for(run: Any) -> None:
    code, _, err = run("generate", "-m", "broken", "x", "--traceback")
    assert code == 1
    assert err.startswith("Traceback")
    assert "in _chunks" in err
    assert err.endswith("error: RuntimeError: first line; run again with --traceback to see where.\n")


def test_what_the_runtime_refuses_is_a_mistake(generate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def stream(*_: Any, **__: Any) -> Iterator[Chunk]:
        raise BadConfig("the prompt has 9 tokens and fake takes 8 at most; shorten it.")

    monkeypatch.setattr(FakeLLM, "stream", stream)
    _one_error(generate("long"), 2, "9 tokens")


# Other commands


def test_version_and_help(run: Any) -> None:
    assert run("--version")[1].startswith("mlx-spec 0")
    for arguments in ([], ["--help"], ["-h"], ["generate", "--help"], ["models", "-h"]):
        code, out, err = run(*arguments)
        assert (code, err) == (0, "")
        assert "Usage" in out


def test_models_as_text_and_json(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_spec.loading.hub.is_local", lambda source: "70B" in source)
    code, out, err = run("models")
    assert (code, err) == (0, "")
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert "128k" in lines["llama-3.3-70b"]
    assert " target " in lines["llama-3.3-70b"]
    assert "Llama-3.2-1B" in lines["llama-3.3-70b"]
    assert lines["NAME"].split()[:2] == ["NAME", "SIZE"]
    listed = {entry["name"]: entry for entry in json.loads(run("models", "--json")[1])}
    assert listed["llama-3.3-70b"]["target"]["on_this_machine"] is True
    assert listed["llama-3.3-70b"]["draft"]["on_this_machine"] is False
    assert listed["demo"]["draft"] is None


# What is drawn


def test_figures_that_do_not_exist_are_left_out() -> None:
    nothing = replace(FIGURES, prompt_tokens=1, completion_tokens=0, target_passes=0, drafted=0, accepted=0,
                      draft_tokens="auto", by_drafter={}, passes_by_draft_tokens={}, accepted_by_position=[],
                      prefill_seconds=0, decode_seconds=0, peak_memory_bytes=999)
    assert console.statistics_line(nothing) == "0 tokens, prefill 0.00 s (1 token), peak memory 999 B"


def test_the_line_says_what_the_schedule_did() -> None:
    def line(**changes: Any) -> str:
        whole = console.statistics_line(replace(FIGURES, **changes))
        begin = "3 tokens, 1.5 tok/s, 1.50 tokens per target pass, "
        end = ", prefill 0.50 s (7 tokens), peak memory 2.0 GB"
        assert whole.startswith(begin)
        assert whole.endswith(end)
        return whole[len(begin) : len(whole) - len(end)]

    assert line() == "25% of 4 drafts accepted (model), K 2"
    both = {"lookup": Drafted(1, 3, 1), "model": Drafted(1, 1, 0)}
    assert line(drafter="hybrid", by_drafter=both) == "25% of 4 drafts accepted (lookup 1 of 3, model 0 of 1), K 2"
    auto = {"draft_tokens": "auto", "passes_by_draft_tokens": {0: 5, 1: 2, 4: 1}, "target_passes": 2}
    assert line(**auto) == "25% of 4 drafts accepted (model), K 0 to 4"
    assert line(**auto, parked_passes=1) == "25% of 4 drafts accepted (model), K 0 to 4, 1 of 2 passes parked"
    assert line(drafter="hybrid", by_drafter={"lookup": Drafted(2, 4, 1)}) == "25% of 4 drafts accepted (lookup), K 2"
    plain = auto | {"drafted": 0, "accepted": 0, "by_drafter": {}, "passes_by_draft_tokens": {0: 2}, "parked_passes": 2}
    assert line(**plain) == "K 0, 2 of 2 passes parked"


@pytest.mark.parametrize(("number", "text"), [(0, "0 B"), (1500, "1.5 kB"), (98_400_000, "98.4 MB"),
                                              (40_400_000_000, "40.4 GB"), (140 * 10**9, "140 GB")])
def test_sizes(number: int, text: str) -> None:
    assert console.size(number) == text


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


_CLEARED = "\x1b[1A\x1b[2K"
"""The line above, emptied."""


def test_progress_is_drawn_on_a_terminal_and_clears_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with progress("loading [model]"):
        pass
    for end in (4, 3):  # all done, and given up before
        with progress() as tell:
            assert terminal.getvalue().endswith(_CLEARED)
            tell("reading the [prompt]", 1, 4)
            assert "1/4" in terminal.getvalue().rpartition(_CLEARED)[2]
            tell("reading the [prompt]", end, 4)
            assert terminal.getvalue().endswith(_CLEARED) is (end == 4)
        assert terminal.getvalue().endswith(_CLEARED)
    assert "loading [model]" in terminal.getvalue()
    assert "reading the [prompt]" in terminal.getvalue()
    with pytest.raises(KeyboardInterrupt), progress("measuring"):
        raise KeyboardInterrupt
    assert terminal.getvalue().endswith(_CLEARED)
    assert terminal.getvalue().count("\x1b[?25l") == terminal.getvalue().count("\x1b[?25h") == 4  # cursor hidden, shown


def test_a_table_on_a_terminal_has_its_long_column_below(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    tables.show_table(["A", "B", "C"], [["one", "[2]", "target\ndraft"], ["three", "4", ""]])
    plain = re.sub(r"\x1b\[[\d;]*m", "", terminal.getvalue())
    assert plain == "A      B\none    [2]\n  target\n  draft\nthree  4\n"
    assert tables.aligned(["A", "C"], [["one", "target\ndraft"]]) == "A    C\none  target + draft\n"


@pytest.mark.parametrize("reason", ["no terminal", "NO_COLOR", "dumb", "not shown"])
def test_nothing_is_drawn_otherwise(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    terminal = io.StringIO() if reason == "no terminal" else _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "dumb" if reason == "dumb" else "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if reason == "NO_COLOR":
        monkeypatch.setenv("NO_COLOR", "1")
    shown = reason != "not shown"
    with progress("model", shown=shown) as tell:
        tell("reading", 1, 4)
    assert terminal.getvalue() == ""
    with progress(shown=shown, instead="{total} things") as tell:
        for done in range(5):
            tell("reading", done, 4)
    assert terminal.getvalue() == ("4 things\n" if shown else "")


def test_a_terminal_of_another_encoding_gets_question_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    data = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(data, encoding="ascii"))
    console.write("Grüße")
    assert data.getvalue() == b"Gr??e"


# Drafting, with tiny models


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A target and a draft."""
    folder = tmp_path_factory.mktemp("models")
    return str(write_model(folder / "target")), str(write_model(folder / "draft", seed=5, num_hidden_layers=1))


@pytest.fixture
def answered(
    tiny: tuple[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """Runs `generate` with the tiny target."""

    def run_line(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["generate", "-m", tiny[0], "-n", "30", "--logit-bias", "261=-inf", *arguments])
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return run_line


TEXT = "the lake, the lake, the lake, the"


def test_every_way_to_draft_gives_the_same_greedy_answer(
    answered: Callable[..., tuple[int, str, str]], tiny: tuple[str, str]
) -> None:
    """And the object says which way it was."""
    plain = json.loads(answered("-k", "0", "--json", TEXT)[1])
    assert (plain["drafter"], plain["draft_tokens"], plain["drafted"]) == ("none", 0, 0)
    assert plain["passes_by_draft_tokens"] == {"0": 30}
    for draft, drafter, expected in (
        ([], [], "lookup"), ([], ["--drafter", "lookup"], "lookup"), ([], ["--drafter", "none"], "none"),
        (["-d", tiny[1]], [], "hybrid"), (["-d", tiny[1]], ["--drafter", "hybrid"], "hybrid"),
        (["-d", tiny[1]], ["--drafter", "model"], "model"), (["-d", tiny[1]], ["--drafter", "lookup"], "lookup"),
        (["-d", tiny[1]], ["--drafter", "none"], "none"),
    ):
        for k in ("auto", "3"):
            for way in ("token", "block"):
                code, out, err = answered(*draft, *drafter, "-k", k, "--verify", way, "--json", TEXT)
                assert code == 0, err
                answer = json.loads(out)
                assert answer["tokens"] == plain["tokens"]
                assert (answer["drafter"], answer["verification"]) == (expected, way)
                assert answer["draft_tokens"] == (k if k == "auto" else int(k))
                assert sum(answer["passes_by_draft_tokens"].values()) == answer["target_passes"]
                assert sum(part["drafted"] for part in answer["by_drafter"].values()) == answer["drafted"]
                if expected == "none" or k != "auto":
                    assert (answer["drafted"] > 0) == (expected != "none")
                assert answer["parked_passes"] <= answer["passes_by_draft_tokens"].get("0", 0)


def test_auto_stays_below_its_bound(answered: Callable[..., tuple[int, str, str]], tiny: tuple[str, str]) -> None:
    answer = json.loads(answered("-d", tiny[0], "--draft-tokens-max", "2", "--json", TEXT)[1])
    assert max(map(int, answer["passes_by_draft_tokens"])) <= 2
    code, _, err = answered("-d", tiny[0], TEXT)
    assert code == 0
    assert re.search(r"tokens per target pass, .*K \d", err)
    assert err.count("\n") == 1


@pytest.mark.parametrize("drafter", ["model", "hybrid"])
def test_a_drafter_without_its_model(answered: Callable[..., tuple[int, str, str]], drafter: str) -> None:
    _one_error(answered("--drafter", drafter, TEXT), 2, f"--drafter is {drafter!r}", "--draft", "lookup")
    refused = answered("--drafter", drafter, "-d", "none", "-m", "not-even-looked-for", TEXT)
    _one_error(refused, 2, f"--drafter {drafter} needs a draft model", "--draft none", "lookup")
    assert answered("--drafter", drafter, "-k", "0", TEXT)[0] == 0


def test_lookup_on_an_empty_prompt(
    answered: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for prompt in ("", " "):
        _one_error(answered("--drafter", "lookup", prompt), 2, "prompt is empty")
    _stdin(monkeypatch, b"")
    _one_error(answered("--drafter", "lookup", "-"), 2, "empty (stdin)")
    assert json.loads(answered("--drafter", "lookup", "-k", "3", "--json", "a")[1])["drafter"] == "lookup"


# A process of its own: signals, pipes, disks

_PROGRAM = """
import fake_answers, mlx_spec
from mlx_spec.cli.main import main
mlx_spec.load = fake_answers.fake_load
main()
"""


def _start(
    *arguments: str, environment: dict[str, str] | None = None, **options: Any
) -> subprocess.Popen[bytes]:
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, **(environment or {})}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen([sys.executable, "-c", _PROGRAM, *arguments], env=environment, **streams)


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(("model", "text"), [("hang-load", b""), ("hang-prefill", b""),
                                             ("hang-decode", "Grüße \n".encode())])
def test_control_c_keeps_what_was_written(model: str, text: bytes, as_json: bool) -> None:
    process = _start("generate", "-m", model, "x", *(["--json"] if as_json else []))
    assert process.stderr is not None
    assert process.stderr.readline() == b"ready\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, b"" if as_json else text, b"")


def test_a_closed_pipe_ends_quietly() -> None:
    process = _start("generate", "-m", "endless", "x")
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(5) == b"word "
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=60) == 141
    process.stderr.close()


@pytest.mark.parametrize("arguments", [["generate", "--help"], ["models"], ["--version"]])
def test_a_pipe_closed_from_the_start_ends_quietly(arguments: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = _start(*arguments, stdout=writing)
    os.close(writing)
    assert process.communicate(timeout=60)[1] == b""
    assert process.returncode == 141


def test_a_closed_pipe_for_both_ends_quietly() -> None:
    process = _start("generate", "-m", "endless", "x", stderr=subprocess.STDOUT)
    assert process.stdout is not None
    process.stdout.read(5)
    process.stdout.close()
    assert process.wait(timeout=60) == 141


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_full_disk_is_one_line(more: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        process = _start("generate", "-m", "fake", "x", *more, stdout=full)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err == b"error: cannot write to standard output: No space left on device.\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(("model", "code"), [("noted", 0), ("absent", 2)])
def test_a_full_stderr_costs_no_answer(model: str, code: int) -> None:
    with open("/dev/full", "wb") as full:
        process = _start("generate", "-m", model, "x", "--json", stderr=full)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == code
    assert not out if code else json.loads(out)["text"] == "Grüße you"


def test_a_closed_stderr_costs_no_answer() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = _start("generate", "-m", "noted", "x", stderr=writing)
    os.close(writing)
    assert process.communicate(timeout=60)[0] == "Grüße you\n".encode()
    assert process.returncode == 0


@pytest.mark.parametrize("arguments", [["generate", "-m", "fake", "--json", "x"], ["models", "--json"]])
@pytest.mark.usefixtures("llms")
def test_json_is_whole_in_any_encoding(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    answers = []
    for encoding in ("utf-8", "ascii", "latin-1"):
        data = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(data, encoding=encoding))
        with pytest.raises(SystemExit):
            main(arguments)
        answers.append(json.loads(data.getvalue().decode(encoding)))
    assert answers[0] == answers[1] == answers[2]
    if arguments[0] == "generate":
        assert answers[0]["text"] == "Grüße you"


def test_json_from_a_process_of_another_encoding() -> None:
    process = _start("generate", "-m", "fake", "--json", "x", environment={"PYTHONIOENCODING": "latin-1"})
    assert json.loads(process.communicate(timeout=60)[0].decode("latin-1"))["text"] == "Grüße you"


@pytest.mark.parametrize("module", ["typer", "mlx_spec.cli.generate", "mlx_spec.settings"])
def test_control_c_while_the_program_is_imported(module: str) -> None:
    program = f"""
import importlib.abc, os, signal, sys
class Interrupting(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
from mlx_spec.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def _python(*arguments: str) -> str:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True).stdout


def test_the_module_runs() -> None:
    assert _python("-m", "mlx_spec", "--version").startswith("mlx-spec ")


def test_help_needs_no_heavy_import() -> None:
    heavy = "{'mlx', 'mlx_lm', 'transformers', 'huggingface_hub'}"
    assert _python("-c", f"import sys, mlx_spec.cli; print({heavy} & {{*sys.modules}})") == "set()\n"


def test_the_package_imports_nothing_before_control_c_is_answered() -> None:
    program = "import sys; known = {*sys.modules}; import mlx_spec.__main__; print(sorted({*sys.modules} - known))"
    assert _python("-c", program) == "['__future__', 'mlx_spec', 'mlx_spec.__main__']\n"
