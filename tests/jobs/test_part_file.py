"""Test the part file: no answer is computed twice or lost, and the output is in order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lib.rows import answers, command, requests_file
from minillm.cli.main import main
from minillm.errors import MinillmError, UsageError
from minillm.jobs.part_file import PartFile


def test_answers_are_merged_in_order_and_a_broken_line_is_forgotten(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    for indices in ((), (4, 1), (2, 0)):
        part = PartFile(output, "job")
        part.open()
        for index in indices:
            part.add({"index": index, "error": None})
        part.close()
    with (tmp_path / "out.jsonl.part0").open("ab") as stream:
        stream.write(b'{"index": 3, "err')
    part.open()
    assert sorted(part.finished()) == [0, 1, 2, 4]
    with pytest.raises(UsageError, match="1 of 5 prompts are not finished"):
        part.merge(range(5))
    part.add({"index": 3, "error": "no"})
    assert sorted(part.finished()) == [0, 1, 2, 4], "what failed is tried again"
    assert part.merge(range(5)) == 1
    assert [json.loads(line)["index"] for line in output.read_text().splitlines()] == [0, 1, 2, 3, 4]
    assert list(tmp_path.iterdir()) == [output]
    part.close()


def test_two_runs_do_not_write_one_part(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    first, second = PartFile(output, "job"), PartFile(output, "job")
    first.open()
    first.add({"index": 0, "error": None})
    before = (tmp_path / "out.jsonl.part0").read_bytes()
    with pytest.raises(MinillmError, match=r"another run is writing .*out\.jsonl: wait for its end"):
        second.open()
    assert (tmp_path / "out.jsonl.part0").read_bytes() == before
    first.merge([0])
    third = PartFile(output, "job")
    third.open()  # the first has deleted its part, which it still holds
    third.add({"index": 0, "error": None})
    assert sorted(third.finished()) == [0]
    for each in (first, second, third):
        each.close()


def test_links_in_the_place_of_files_to_write_are_not_followed(tmp_path: Path) -> None:
    output, precious = tmp_path / "out", tmp_path / "precious"
    precious.write_text("precious")
    (tmp_path / "out.merging").symlink_to(precious)
    parts = PartFile(output, "job")
    parts.open()
    parts.add({"index": 0, "error": None})
    assert parts.merge([0]) == 0
    assert precious.read_text() == "precious"
    assert not output.is_symlink()
    assert json.loads(output.read_text())["index"] == 0
    (tmp_path / "out.part0").symlink_to(precious)
    with pytest.raises(UsageError, match="symbolic links"):
        PartFile(output, "job").open()
    assert precious.read_text() == "precious"


def test_parts_of_another_job_are_refused(tmp_path: Path) -> None:
    part = PartFile(tmp_path / "out", "one")
    part.open()
    part.close()
    with pytest.raises(UsageError, match="answers to other requests"):
        PartFile(tmp_path / "out", "two").open()


@pytest.mark.parametrize("text", ["junk", "[]", "3", "{}", '{"job": "one"}\njunk', '{"job": "one"}\n{}', "[" * 5000])
def test_a_file_that_is_no_part_is_left_alone(tmp_path: Path, text: str) -> None:
    part = tmp_path / "out.part0"
    part.write_text(text + "\n")
    with pytest.raises(UsageError, match="part0 holds no answers"):
        PartFile(tmp_path / "out", "one").open()
    assert part.read_text() == text + "\n"


def test_a_run_that_was_stopped_goes_on(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output = requests_file(tmp_path, 8, 5), tmp_path / "out.jsonl"
    assert main(command(tiny_model, source, output)) == 1, "one prompt is refused"
    whole = output.read_text().splitlines()
    assert [entry[:2] for entry in answers(output)] == [(i, f"line {i}") for i in range(8)]
    assert "1 of 8 prompts failed" in capsys.readouterr().err
    # As if it had died with three finished: their answers must not be computed again.
    output.unlink()
    with monkeypatch.context() as patch:
        patch.setattr("minillm.llm.LLM.work_off", _stopped)
        assert main(command(tiny_model, source, output)) == 130
    job = json.loads(output.with_name("out.jsonl.part0").read_text())
    kept = [json.loads(whole[i]) | {"prompt": "kept"} for i in (5, 0, 6)]
    output.with_name("out.jsonl.part0").write_text("".join(json.dumps(line) + "\n" for line in (job, *kept)))
    assert main(command(tiny_model, source, output)) == 1
    assert "5 prompts (3 were finished before)" in capsys.readouterr().err
    again = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["prompt"] == "kept" for line in again] == [i in (0, 5, 6) for i in range(8)]
    assert [line["outputs"] for line in again] == [json.loads(line)["outputs"] for line in whole]


def test_a_part_that_was_merged_is_deleted_by_the_next_run(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output = requests_file(tmp_path, 4, 2), tmp_path / "out.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda path, missing_ok=False: None)  # as if it was killed before
        assert main(command(tiny_model, source, output)) == 1
    part = tmp_path / "out.jsonl.part0"
    lines = part.read_text().splitlines(keepends=True)
    part.write_text("".join(lines[:-1]))
    assert main(command(tiny_model, source, output)) == 1
    assert part.exists(), "it is of a run with --force that was stopped"
    part.write_text("".join(lines))
    assert main(command(tiny_model, source, output)) == 1
    assert not part.exists()
    part.write_text("".join(lines))
    before = output.read_text().splitlines()
    assert main([*command(tiny_model, source, output), "--force"]) == 1
    assert output.read_text().splitlines()[0] != before[0], "times are those of the killed run"
    assert not part.exists()


def _stopped(llm: Any, take: Any, refuse: Any) -> Any:
    """`LLM.work_off`, stopped with ctrl-c before its first step."""
    raise KeyboardInterrupt
    yield
