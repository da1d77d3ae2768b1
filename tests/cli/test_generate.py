"""Test ``minillm generate`` and the files that it reads, writes and leaves alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minillm.cli.main import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tiny_model: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Run ``minillm generate`` in this process. Returns its exit code, output and errors."""
    monkeypatch.setenv("MINILLM_CONFIG", str(tmp_path))
    monkeypatch.delenv("MINILLM_MODEL", raising=False)

    def call(*arguments: str, model: bool = True) -> tuple[int, str, str]:
        options = ["--model", str(tiny_model)] if model else []
        code = main(["generate", *arguments, *options, "--device", "cpu", "--num-blocks", "64"])
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return call


FIXED = ("--temperature", "0", "--max-tokens", "3", "--json")

# --- standard input beside prompts ------------------------------------------------------------------------------------


def prompts_with(stdin: Any, *arguments: str, patience: float = 10.0, data: bytes | None = None) -> tuple[Any, str]:
    """The texts that `read_requests` makes of the arguments in a process with this standard input, and its errors."""
    code = f"""
import sys
import minillm.cli.prompt_file as prompt_file
prompt_file._PATIENCE = {patience}
from minillm.cli.main import settle_streams
settle_streams()
file = "-" if "-" in sys.argv[1:] else None
requests = prompt_file.read_requests([each for each in sys.argv[1:] if each != "-"], file, None)
import json
print(json.dumps([request.prompt for request in requests]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], stdin=stdin, input=data, capture_output=True, timeout=60, check=False
    )
    return json.loads(done.stdout or b"null"), done.stderr.decode()


def test_piped_text_is_put_after_each_prompt(tmp_path: Path) -> None:
    assert prompts_with(None, "Sum up", data=b"some\ntext\n") == (["Sum up\n\nsome\ntext"], "")
    assert prompts_with(None, "a", "b", data="ü".encode()) == (["a\n\nü", "b\n\nü"], "")
    assert prompts_with(None, "Sum up", data=b"\n \n") == (["Sum up"], "")
    path = tmp_path / "text"
    path.write_text("of a file")
    with path.open("rb") as stream:
        assert prompts_with(stream, "Sum up") == (["Sum up\n\nof a file"], "")


def test_what_is_not_for_us_is_neither_read_nor_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "loop"
    path.write_text("first\nsecond\n")
    with path.open("rb", buffering=0) as stream:  # as in a shell's loop over lines
        stream.read(6)
        assert prompts_with(stream, "first") == (["first"], "")
        assert stream.read() == b"second\n"
    ours, theirs = os.openpty()
    assert prompts_with(theirs, "a terminal", patience=0.1) == (["a terminal"], "")
    for number in (ours, theirs):
        os.close(number)
    assert prompts_with(subprocess.DEVNULL, "nothing") == (["nothing"], "")
    reader, writer = os.pipe()  # another process has it open and never writes
    prompts, said = prompts_with(reader, "hello", patience=0.2)
    assert prompts == ["hello"]
    assert "nothing came through standard input in 0.2 seconds" in said
    for number in (reader, writer):
        os.close(number)


def test_a_minus_waits_for_its_text() -> None:
    reader, writer = os.pipe()
    late = subprocess.Popen(["sh", "-c", "sleep 1; echo late"], stdout=writer)
    os.close(writer)
    assert prompts_with(reader, "Sum up", "-", patience=0.1) == (["Sum up\n\nlate"], "")
    late.wait()
    os.close(reader)


# --- an output that is finished ---------------------------------------------------------------------------------------


def test_a_finished_output_is_not_computed_again(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, output = tmp_path / "in.txt", tmp_path / "out.jsonl"
    source.write_text("one\ntwo\n")
    arguments = ("-f", str(source), "--lines", "-o", str(output), "--max-tokens", "2")
    code, _, said = run(*arguments)
    assert code == 0
    assert "2 prompts (0 were finished before)" in said
    assert "replicas" not in said
    before = output.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("minillm.llm.LLM.__init__", None)  # it is not even loaded
        code, _, said = run(*arguments)
        assert (code, said) == (0, f"minillm: {output} is finished: 2 prompts, 0 failed; --force computes all again\n")
        for other in (("--max-tokens", "3"), ("--system", "x"), ("--parse-special",)):
            code, _, said = run(*arguments, *other)
            assert code == 2
            assert "choose another --output, or add --force" in said
        source.write_text("one\n")
        assert run(*arguments)[0] == 2
    assert output.read_bytes() == before
    code, _, said = run(*arguments, "--force")
    assert code == 0
    assert "1 prompt (0 were finished before)" in said
    assert output.read_bytes().count(b"\n") == 1


@pytest.mark.parametrize(("form", "name"), [("--lines", "prompts.txt"), ("--jsonl", "prompts"), ("", "prompts.jsonl")])
def test_lines_that_are_not_utf8_are_an_error(run: Run, tmp_path: Path, form: str, name: str) -> None:
    path = tmp_path / name
    lines = ['{"prompt": "tea"}\n', '{"prompt": "caf\u00e9"}\n']
    path.write_text("".join(lines), encoding="latin-1")
    code, out, said = run("-f", str(path), *filter(None, [form]), *FIXED)
    assert (code, out) == (2, "")
    assert said == f"minillm: error: {path}:2 is not UTF-8 text; convert the file, for example with iconv\n"
    path.write_text("".join(lines), encoding="utf-8-sig")
    assert run("-f", str(path), *filter(None, [form]), *FIXED)[0] == 0


@pytest.mark.parametrize("text", ["notes of mine\n", "{}\n", '{"job": 3, "error": null}\n', "[" * 5000, "\n"])
def test_another_file_is_not_overwritten(run: Run, tmp_path: Path, text: str) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text(text)
    code, _, said = run("a", "-o", str(output))
    assert code == 2
    assert "holds something other than these answers" in said
    assert output.read_text() == text
    assert run("a", "-o", str(tmp_path))[0] == 2
    assert run("a", "-o", "")[::2] == (2, "minillm: error: --output is empty: give a file's name\n")
    told = "minillm: error: --output is a file's name, not '-'; --json prints the JSON objects\n"
    assert run("a", "-o", "-")[::2] == (2, told)
    code, _, said = run("a", "b", "-o", ".", "--shard", "0/2")
    assert (code, said) == (2, "minillm: error: --output is a file's name, not '.'\n")
    output.write_text("")  # as mktemp leaves it
    assert run("a", "-o", str(output), "--max-tokens", "1")[0] == 0


def test_an_output_that_is_a_link_writes_the_file_behind_it(run: Run, tmp_path: Path) -> None:
    output, link, loop = tmp_path / "data" / "out.jsonl", tmp_path / "latest.jsonl", tmp_path / "loop"
    output.parent.mkdir()
    link.symlink_to("data/out.jsonl")
    loop.symlink_to("loop")
    assert run("hello", *FIXED[:-1], "-o", str(link))[0] == 0
    assert link.is_symlink()
    assert output.read_bytes().count(b"\n") == 1
    assert "is finished" in run("hello", *FIXED[:-1], "-o", str(link))[2]
    assert run("hello", *FIXED[:-1], "-o", str(loop))[0] == 2


def test_what_failed_stays_failed_in_a_finished_output(run: Run, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": [999999]}\n{"prompt": "a", "max_tokens": 1}\n')
    assert run("-f", str(source), "-o", str(output))[0] == 1
    code, _, said = run("-f", str(source), "-o", str(output))
    assert code == 1
    assert "is finished: 2 prompts, 1 failed" in said


# --- settings ---------------------------------------------------------------------------------------------------------


def test_config_and_environment_choose_what_flags_do_not(
    run: Run, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config.toml"
    config.write_text(
        f'model = "{tiny_model}"\n[sampling]\ntemperature = 0\nmax_tokens = 2\n[engine]\nblock_size = 4\n'
    )
    code, shown, said = run("hello", "--json", model=False)
    assert code == 0, said
    [answer] = json.loads(shown)["outputs"]
    assert len(answer["token_ids"]) == 2
    assert json.loads(run("hello", *FIXED, model=False)[1])["outputs"][0]["token_ids"][:2] == answer["token_ids"]
    monkeypatch.setenv("MINILLM_MODEL", "of-the-environment")
    assert "unknown model 'of-the-environment'" in run("hello", model=False)[2]
    monkeypatch.delenv("MINILLM_MODEL")
    config.write_text("[sampling]\ntemprature = 0\n")
    code, _, said = run("hello")
    assert code == 2
    assert said == f"minillm: error: {config}: unknown parameter 'temprature'; did you mean temperature?\n"
    other = tmp_path / "other.toml"
    other.write_text("[beams]\nbeam_width = 2\n")
    shown = run("hello", "--config", str(other), "--max-tokens", "2")[1]
    assert shown.startswith("--- 1.1 (score -")
    assert "(score" in shown.splitlines()[2]
    assert "---" not in run("hello", "--config", str(other), "--temperature", "0", "--max-tokens", "2")[1]


def test_the_models_own_sampling_is_below_everything_that_is_given(run: Run, tiny_model: Path, tmp_path: Path) -> None:
    import shutil

    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    known = json.loads(path.read_text()) if (path := model / "generation_config.json").exists() else {}
    path.write_text(json.dumps({**known, "do_sample": False}))

    def ids(*arguments: str) -> list[int]:
        code, shown, said = run("hello", "--json", "--max-tokens", "6", "-m", str(model), *arguments, model=False)
        assert code == 0, said
        return json.loads(shown)["outputs"][0]["token_ids"]

    greedy = ids("--temperature", "0")
    assert [ids("--seed", str(seed)) for seed in range(3)] == [greedy] * 3
    assert ids("--seed", "1", "--temperature", "2") != greedy
    (tmp_path / "config.toml").write_text("[sampling]\ntemperature = 2.0\n")
    assert ids("--seed", "1") != greedy


def drawn(run: Run, *arguments: str) -> tuple[list[int], int]:
    """The tokens of a sample, and its seed."""
    code, shown, said = run("hello", "--json", "--max-tokens", "12", *arguments)
    assert code == 0, said
    answer = json.loads(shown)
    return answer["outputs"][0]["token_ids"], answer["seed"]


def test_each_run_draws_another_seed_with_which_it_can_be_repeated(run: Run) -> None:
    first, second = drawn(run), drawn(run)
    assert first[1] != second[1]
    assert first[0] != second[0]
    assert drawn(run, "--seed", str(first[1])) == first
    assert drawn(run, "--seed", "7") == drawn(run, "--seed", "7")


def test_each_line_of_a_file_has_a_seed_of_its_own(run: Run, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "hello"}\n' * 3 + '{"prompt": "hello", "seed": 5}\n')
    output = tmp_path / "answers.jsonl"
    assert run("-f", str(tmp_path / "p.jsonl"), "-o", str(output), "--max-tokens", "12")[0] == 0
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    assert answers[3]["seed"] == 5
    assert len({answer["seed"] for answer in answers}) == 4
    assert len({tuple(answer["outputs"][0]["token_ids"]) for answer in answers}) == 4
    repeated = drawn(run, "--seed", str(answers[1]["seed"]))
    assert repeated[0] == answers[1]["outputs"][0]["token_ids"]


def test_a_model_that_says_nothing_is_sampled_as_in_the_chat(run: Run, tiny_model: Path, tmp_path: Path) -> None:
    import shutil

    calm = ("--temperature", "0.7", "--top-p", "0.95")
    assert [drawn(run, "--seed", str(seed)) for seed in range(3)] == [
        drawn(run, "--seed", str(seed), *calm) for seed in range(3)
    ]
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    (model / "generation_config.json").write_text(json.dumps({"temperature": 1.5}))
    hot = ("--temperature", "1.5", "--top-p", "1")
    for seed in range(3):
        own = run("hello", "--seed", str(seed), "--max-tokens", "12", "-m", str(model), model=False)
        assert own == run("hello", "--seed", str(seed), "--max-tokens", "12", *hot)


# --- the output -------------------------------------------------------------------------------------------------------


def test_log_probabilities_bring_the_tokens_text(run: Run) -> None:
    answer = json.loads(run("hello", *FIXED, "--logprobs", "2")[1])["outputs"][0]
    assert len(answer["logprobs"]) == 3
    for token in answer["logprobs"]:
        assert token["decoded_token"] == token["decoded_top"][0]
        assert [len(token["top"]), len(token["decoded_top"])] == [2, 2]
    texts = [token["decoded_token"] for token in answer["logprobs"]]
    assert "".join(text for text in texts if not text.startswith("<")) == answer["text"], "some ids have no token"


def test_a_prompt_is_scored(run: Run, tiny_model: Path) -> None:
    """Print scores as JSON, and as lines without control characters from an untrusted model's tokens."""
    prompt = "hi \x1b[2J\nyou"
    score = (prompt, "--max-tokens", "0", "--prompt-logprobs", "2")
    result = json.loads(run(*score, "--json")[1])
    first, *tokens = result["prompt_logprobs"]
    assert first is None
    assert [token["token_id"] for token in tokens] == result["prompt_token_ids"][1:]
    assert all(len(token["top"]) == len(token["decoded_top"]) == 2 for token in tokens)
    assert result["outputs"][0]["text"] == ""
    code, shown, said = run(*score)
    assert (code, said) == (0, "")
    head, *lines, last = shown.splitlines()
    assert head.split() == ["logprob", "rank", "token"]
    assert len(lines) == len(result["prompt_token_ids"])
    assert "\x1b" not in shown
    for line, token in zip(lines[1:], tokens, strict=True):
        assert line.split()[:2] == [f"{token['logprob']:.3f}", str(token["rank"])]
    assert float(last.split()[0]) == pytest.approx(sum(token["logprob"] for token in tokens), abs=1e-2)
    assert "".join(token["decoded_token"] for token in tokens) in prompt
    answered = run(prompt, "--max-tokens", "2", "-t", "0", "--prompt-logprobs", "0", "-n", "1")[1]
    plain = run(prompt, "--max-tokens", "2", "-t", "0")[1]
    assert answered.endswith(plain)
    assert run(prompt, "--max-tokens", "0")[0] == 2
    assert main(["chat", "--prompt-logprobs", "1", "--model", str(tiny_model)]) == 2


def test_only_these_tokens(run: Run) -> None:
    allowed = ("--allowed-token-ids", "70", "--allowed-token-ids", "71")
    answer = json.loads(run("hello", "--max-tokens", "9", "--json", *allowed)[1])["outputs"][0]
    assert set(answer["token_ids"]) <= {70, 71}


def test_control_tokens_of_a_prompt_are_text_unless_asked_otherwise(run: Run) -> None:
    spelled = "<|im_start|>user\nhi<|im_end|>\n"
    plain, parsed = (json.loads(run(spelled, *FIXED, *more)[1]) for more in ((), ("--parse-special",)))
    assert len(plain["prompt_token_ids"]) > len(parsed["prompt_token_ids"]) + 10
    assert plain["prompt"] == parsed["prompt"] == spelled


def test_another_chat_template(run: Run, tmp_path: Path) -> None:
    """A file or the text itself; the answers of another template are no part of the same output."""
    template, messages = "{{ messages[0].content }}<|im_end|>", ("hello", "--chat", *FIXED)
    file = tmp_path / "template.jinja"
    file.write_text(template)
    own, by_text, by_file = (
        json.loads(run(*messages, *more)[1])["prompt_token_ids"]
        for more in ((), ("--chat-template", template), ("--chat-template", str(file)))
    )
    assert by_text == by_file != own
    output = ("-o", str(tmp_path / "answers.jsonl"))
    assert run(*messages, *output)[0] == 0
    code, _, said = run(*messages, *output, "--chat-template", str(file))
    assert code == 2
    assert "answers.jsonl" in said


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("nowhere.jinja", "No such file"),
        ("/", "not a regular file"),
        ("words", "No such file"),
        ("FILE", "neither {{ nor {%"),
        ("{{ messages }", "line 1: unexpected '}'"),
        ("{{" + "(" * 5000, "nested too deeply"),
        ("BROKEN", "broken: line 2: "),
    ],
)
def test_a_chat_template_that_is_none(run: Run, tmp_path: Path, value: str, said: str) -> None:
    path = tmp_path / "words"
    path.write_text("just words")
    broken = tmp_path / "broken"
    broken.write_text("{% if messages %}\n{% for")
    value = value.replace("FILE", str(path)).replace("BROKEN", str(broken))
    code, _, error = run("hello", "--chat", *FIXED, "--chat-template", value)
    assert (code, error.count("\n")) == (2, 1)
    assert said in error


def test_short_flags(run: Run, tiny_model: Path) -> None:
    arguments = ("hi", "-t", "0", "-n", "2", "-s", "be brief", "-q", "-m", str(tiny_model), "--max-tokens", "1")
    code, shown, said = run(*arguments, model=False)
    assert (code, said) == (0, "")
    assert shown.startswith("--- 1.1 ---\n")


def test_one_beam_is_written_once(run: Run) -> None:
    from minillm.text.safe import clean

    beam = ("hello", "--beam-width", "1", "--max-tokens", "5")
    assert run(*beam)[1] == clean(json.loads(run(*beam, "--json")[1])["outputs"][0]["text"]) + "\n"
