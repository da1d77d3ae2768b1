"""Forks of earlier answers, pinned prefixes, the pool."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from lib.models import write_sentencepiece_model
from lib.server import Server, served
from minillm.service import messages as chat


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


def test_a_fork_continues_the_best_of_several_answers(server: Server) -> None:
    for seed in range(4):
        best = post(server, "/v1/completions", prompt="a b", best_of=4, seed=seed, max_tokens=3, return_token_ids=True)
        fork = post(server, "/v1/completions", fork_of=best["id"], max_tokens=1, return_token_ids=True)
        assert fork["choices"][0]["prompt_token_ids"][-3:] == best["choices"][0]["token_ids"]


def test_answers_to_several_prompts_are_forked_by_the_number_of_the_prompt(server: Server) -> None:
    both = post(server, "/v1/completions", prompt=["a b", "c d"], n=2, seed=1, max_tokens=3, return_token_ids=True)
    for number in range(4):
        fork = {"id": f"{both['id']}-{number // 2}", "index": number % 2}
        rest = post(server, "/v1/completions", fork_of=fork, max_tokens=1, return_token_ids=True)
        assert rest["choices"][0]["prompt_token_ids"][-3:] == both["choices"][number]["token_ids"]
    refused = post(server, "/v1/completions", fork_of=both["id"], max_tokens=1)
    assert f"'{both['id']}-0' is the answer to the first" in refused["error"]["message"]


@pytest.mark.parametrize(
    ("fork", "words"),
    [
        ("nothing", "unknown answer 'nothing'"),
        ({"id": "ID", "index": 1}, "no completion 1"),
        ({"id": "ID", "num_tokens": 99}, "num_tokens is 99"),
        ({"id": "ID", "num_tokens": -1}, "num_tokens is -1"),
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
    assert prefix["num_tokens"] == len(post(server, "/tokenize", prompt="p" * 100)["tokens"])
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


@pytest.fixture(scope="module")
def of_two(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with two keys."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("anna: key-of-anna\nben: key-of-ben\n")
    with served(tiny, "--num-blocks", "256", "--api-key-file", str(keys)) as server:
        yield server


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer key-of-{name}"}


def test_the_words_of_one_key_are_not_anothers_to_read(of_two: Server) -> None:
    post(of_two, "/v1/completions", "key-of-anna", prompt="secret words", max_tokens=4, keep=True)
    for name, reads in (("anna", True), ("ben", False)):
        with httpx.stream("GET", f"{of_two.url}/v1/cache/events", headers=bearer(name), timeout=30) as events:
            first = next(line for line in events.iter_lines() if line.startswith("data: "))
        assert ("secret words" in str(json.loads(first[6:])["words"])) == reads
        assert json.loads(first[6:])["tables"], "that there is a table is no secret"


def test_a_block_of_one_key_says_nothing_to_another(of_two: Server) -> None:
    """Other keys see neither its tokens nor its salt, and cannot use the session."""
    text = "The words of Anna are hers alone. " * 2
    post(of_two, "/v1/completions", "key-of-anna", prompt=text, max_tokens=4, keep=True, cache_salt="annas-salt")
    tables = httpx.get(f"{of_two.url}/v1/cache", headers=bearer("anna")).json()["tables"]
    blocks = sorted({block for table in tables for block in table["blocks"]})
    for name, reads in (("anna", True), ("ben", False)):
        with httpx.stream("GET", f"{of_two.url}/v1/session", headers=bearer(name), timeout=30) as events:
            lines = events.iter_lines()
            session = json.loads(next(lines))["session"]
            body = b"".join(chat.encode(chat.Inspect(block)) for block in blocks)
            url = f"{of_two.url}/v1/session/{session}"
            other = "ben" if name == "anna" else "anna"
            json_type = {"content-type": "application/json"}
            for wrong, status in ((bearer(other), 404), (bearer("carl"), 401), ({}, 401)):
                assert httpx.post(url, content=body, headers={**json_type, **wrong}).status_code == status
            assert httpx.post(url, content=body, headers={**json_type, **bearer(name)}).status_code == 200
            facts = []
            for line in lines:
                if "BlockFacts" in line:
                    facts.append(json.loads(line))
                if len(facts) == len(blocks):
                    break
        assert ("Anna" in "".join(token for each in facts for token in each["tokens"])) == reads
        befores = "".join(each["before"] for each in facts)
        assert "anna" not in befores
        assert "salt" not in befores
        assert any(each["node"] is not None for each in facts)


def cached(server: Server, name: str, **more: Any) -> int:
    answer = post(server, "/v1/completions", f"key-of-{name}", max_tokens=1, **more)
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_no_key_learns_what_another_has_sent(of_two: Server) -> None:
    for salt in ({}, {"cache_salt": "common"}):
        text = f"A contract between two parties {salt}. " * 4
        assert cached(of_two, "anna", prompt=text, **salt) == 0
        assert cached(of_two, "ben", prompt=text, **salt) == 0, "that Anna has sent it is none of Ben's business"
        assert cached(of_two, "anna", prompt=text, **salt) > 50
    pinned = "A pinned beginning of some length, to be kept. " * 4
    post(of_two, "/v1/prefixes", "key-of-anna", prompt=pinned)
    assert cached(of_two, "ben", prompt=pinned + "x") == 0
    assert cached(of_two, "anna", prompt=pinned + "x") > 50


def test_a_fork_finds_the_blocks_of_its_answer_under_any_salt(of_two: Server) -> None:
    for salt in ({}, {"cache_salt": "a-salt"}):
        prompt = f"A long prompt whose blocks are kept {salt}. " * 4
        answer = post(of_two, "/v1/completions", "key-of-anna", prompt=prompt, max_tokens=4, keep=True, **salt)
        assert cached(of_two, "anna", fork_of=answer["id"]) > 50


def test_one_key_does_not_take_all_streams_of_events(of_two: Server) -> None:
    def stream(name: str) -> socket.socket:
        host, port = of_two.url.removeprefix("http://").split(":")
        connection = socket.create_connection((host, int(port)), timeout=30)
        head = f"GET /v1/session HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer key-of-{name}\r\n\r\n"
        connection.sendall(head.encode())
        return connection

    with ExitStack() as opened:
        statuses = []
        for _ in range(20):
            connection = opened.enter_context(stream("anna"))
            statuses.append(connection.recv(15)[9:12])
        assert statuses == [b"200"] * 16 + [b"429"] * 4
        assert opened.enter_context(stream("ben")).recv(15)[9:12] == b"200"


def test_large_lists_are_bounded(of_two: Server) -> None:
    ids = [1, 2, 3] * 100_000
    answer = post(of_two, "/v1/completions", "key-of-anna", prompt="a", max_tokens=4, allowed_token_ids=ids)
    assert answer["usage"]["completion_tokens"] > 0, "the same ids again count once"
    many = list(range(300_000))
    error = post(of_two, "/v1/completions", "key-of-anna", prompt="a", allowed_token_ids=many)["error"]
    assert error["param"] == "allowed_token_ids"
    assert "at most 262144" in error["message"]
    error = post(of_two, "/detokenize", "key-of-anna", tokens=[5] * 200_000)["error"]
    assert (error["param"], "send them in parts" in error["message"]) == ("tokens", True)


def test_a_fork_goes_on_within_a_word(tmp_path: Path) -> None:
    with served(write_sentencepiece_model(tmp_path)) as server:
        whole = post(server, "/v1/completions", prompt="the qu", max_tokens=2)
        for fork, text in (({"id": whole["id"], "num_tokens": 0}, "ick brown"), (whole["id"], " more")):
            answer = post(server, "/v1/completions", fork_of=fork, prompt=text, max_tokens=1, echo=True)
            before = "the qu" + (whole["choices"][0]["text"] if fork is whole["id"] else "")
            assert answer["choices"][0]["text"].startswith(before + text)
