"""Forks of earlier answers, pinned prefixes, the pool."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from running_server import Server, served
from support import write_sentencepiece_model


def post(server: Server, path: str, key: str = "", **body: Any) -> Any:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.post(f"{server.url}{path}", json=body, headers=headers, timeout=60).json()


@pytest.mark.parametrize("keep", [False, True])
def test_a_fork_goes_on_as_the_answer_did(server: Server, keep: bool) -> None:
    whole = post(server, "/v1/completions", prompt="x" * 40, max_tokens=40, temperature=0, ignore_eos=True, keep=keep)
    for count in (0, 1, 17, 32, 40):
        fork = {"id": whole["id"], "num_tokens": count}
        rest = post(server, "/v1/completions", fork_of=fork, max_tokens=40 - count or 1, temperature=0, ignore_eos=True)
        assert "error" not in rest, rest
        if count < 40:
            assert whole["choices"][0]["text"].endswith(rest["choices"][0]["text"][1:])
        cached = rest["usage"]["prompt_tokens_details"]["cached_tokens"]
        least = rest["usage"]["prompt_tokens"] - (1 if keep and count < 40 else 18)
        assert cached >= least, (count, rest["usage"])


def test_a_fork_with_more_text_and_a_fork_of_a_chat(server: Server) -> None:
    chat = post(
        server,
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "Hm"}],
        max_tokens=9,
        n=2,
        seed=1,
        keep=True,
    )
    fork = {"id": chat["id"], "index": 1, "num_tokens": 3}
    more = post(server, "/v1/chat/completions", fork_of=fork, max_tokens=4)
    assert more["usage"]["prompt_tokens"] == chat["usage"]["prompt_tokens"] + 3
    text = post(server, "/v1/completions", fork_of=chat["id"], prompt=" and so", max_tokens=4)
    assert text["usage"]["prompt_tokens"] > chat["usage"]["prompt_tokens"]
    both = post(server, "/v1/chat/completions", fork_of=chat["id"], messages=[], max_tokens=4)
    assert both["error"]["param"] == "messages"


@pytest.mark.parametrize(
    ("fork", "words"),
    [
        ("nothing", "no answer 'nothing'"),
        ({"id": "ID", "index": 7}, "and none 7"),
        ({"id": "ID", "num_tokens": 99}, "99 of them are asked for"),
        ({"id": "ID", "num_tokens": -1}, "-1 of them"),
    ],
)
def test_a_fork_of_nothing_is_refused(server: Server, fork: Any, words: str) -> None:
    answer = post(server, "/v1/completions", prompt="a", max_tokens=2)
    fork = json.loads(json.dumps(fork).replace("ID", answer["id"]))
    assert words in post(server, "/v1/completions", fork_of=fork)["error"]["message"]


def test_names_in_refusals_stay_on_their_line(server: Server) -> None:
    for name in ("a\nb", "\u202e", "x" * 900):
        body = {"prompt": "x", "max_tokens": 1, "fork_of": name}
        answers = [httpx.post(f"{server.url}/v1/completions", json=body)]
        answers.append(httpx.delete(f"{server.url}/v1/prefixes/{quote(name)}"))
        answers.append(httpx.post(f"{server.url}/v1/completions", json={**body, "model": name}))
        for answer in answers:
            assert answer.status_code in (400, 404)
            message = answer.json()["error"]["message"]
            assert message.isprintable()
            assert len(message) < 300


def test_prefixes_are_pinned_listed_and_freed(server: Server) -> None:
    prefix = post(server, "/v1/prefixes", prompt="p" * 100)
    assert prefix["num_blocks"] >= 3
    assert prefix in httpx.get(f"{server.url}/v1/prefixes").json()["data"]
    tables = httpx.get(f"{server.url}/v1/cache").json()["tables"]
    assert [(t["state"], t["request"]) for t in tables if t["state"] == "pinned"] == [("pinned", prefix["id"])]
    answer = post(server, "/v1/completions", prompt="p" * 100 + "q", max_tokens=2)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= prefix["num_tokens"] // 16 * 16 - 16
    assert httpx.delete(f"{server.url}/v1/prefixes/{prefix['id']}").json()["deleted"]
    assert httpx.delete(f"{server.url}/v1/prefixes/{prefix['id']}").status_code == 404
    assert not [t for t in httpx.get(f"{server.url}/v1/cache").json()["tables"] if t["state"] == "pinned"]


def test_events_tell_of_tables_as_they_come_and_go(server: Server) -> None:
    seen: set[int] = set()
    gone: set[int] = set()
    with httpx.stream("GET", f"{server.url}/v1/cache/events", timeout=30) as events:
        lines = (line for line in events.iter_lines() if line.startswith("data: "))
        json.loads(next(lines)[6:])  # all that is there
        done = threading.Event()

        def ask() -> None:  # again and again: what comes and goes between two pictures is in neither
            while not done.is_set():
                post(server, "/v1/completions", prompt="b" * 30, max_tokens=60, n=3, ignore_eos=True)

        with ThreadPoolExecutor() as pool:
            pool.submit(ask)
            for line in lines:
                changed = json.loads(line[6:])
                seen |= {table[0] for table in changed["tables"]}
                gone |= set(changed["gone"])
                if len(seen & gone) >= 3:
                    done.set()
                if done.is_set() and seen <= gone:
                    break


def test_one_key_cannot_see_what_another_has(tiny: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# ours\nanna: key-of-anna\nben: key-of-ben\n")
    with served(tiny, "--num-blocks", "64", "--api-key-file", str(keys)) as server:
        assert httpx.get(f"{server.url}/health").status_code == 200
        for headers in ({}, {"authorization": "Bearer key-of-carl"}, {"authorization": "key-of-anna"}):
            assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 401
        answer = post(server, "/v1/completions", "key-of-anna", prompt="a", max_tokens=4)
        assert "error" in post(server, "/v1/completions", "key-of-ben", fork_of=answer["id"])
        assert "error" not in post(server, "/v1/completions", "key-of-anna", fork_of=answer["id"])
        prefix = post(server, "/v1/prefixes", "key-of-anna", prompt="a" * 50)
        bens = {"authorization": "Bearer key-of-ben"}
        assert httpx.get(f"{server.url}/v1/prefixes", headers=bens).json()["data"] == []
        assert httpx.delete(f"{server.url}/v1/prefixes/{prefix['id']}", headers=bens).status_code == 404
        assert "key-of" not in "".join(server.said)


def test_the_words_of_one_key_are_not_anothers_to_read(tiny: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("anna: key-of-anna\nben: key-of-ben\n")
    with served(tiny, "--num-blocks", "64", "--api-key-file", str(keys)) as server:
        post(server, "/v1/completions", "key-of-anna", prompt="secret words", max_tokens=4, keep=True)
        for key, reads in (("key-of-anna", True), ("key-of-ben", False)):
            headers = {"authorization": f"Bearer {key}"}
            with httpx.stream("GET", f"{server.url}/v1/cache/events", headers=headers, timeout=30) as events:
                first = next(line for line in events.iter_lines() if line.startswith("data: "))
            assert ("secret words" in str(json.loads(first[6:])["words"])) == reads
            assert json.loads(first[6:])["tables"], "that there is a table is no secret"


def test_a_fork_goes_on_within_a_word(tmp_path: Path) -> None:
    with served(write_sentencepiece_model(tmp_path)) as server:
        whole = post(server, "/v1/completions", prompt="the qu", max_tokens=2)
        for fork, text in (({"id": whole["id"], "num_tokens": 0}, "ick brown"), (whole["id"], " more")):
            answer = post(server, "/v1/completions", fork_of=fork, prompt=text, max_tokens=1, echo=True)
            before = "the qu" + (whole["choices"][0]["text"] if fork is whole["id"] else "")
            assert answer["choices"][0]["text"].startswith(before + text)
