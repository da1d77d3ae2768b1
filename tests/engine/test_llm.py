"""`LLM`, the way scripts use it."""

from __future__ import annotations

import shutil
import signal
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from lib.cache_checks import check
from minillm import LLM, BeamSearchParams, SamplingParams
from minillm.engine.requests import Request
from minillm.errors import CapacityError, MinillmError, UsageError, WeightsError
from minillm.outputs import Delta
from minillm.system import deferred_interrupt

GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM(str(tiny_model), device="cpu", block_size=4, num_blocks=256)


@pytest.fixture(autouse=True)
def balanced(llm: LLM) -> Any:
    yield
    check(llm.engine.cache)
    stats = llm.cache_stats()
    assert stats.free_blocks == stats.num_blocks, "blocks leaked"
    assert not llm.engine.requests.groups
    assert not llm.engine.requests.finished


def test_one_prompt_or_many_text_or_ids(llm: LLM) -> None:
    [one] = llm.generate("hello world", GREEDY)
    ids = llm.tokenizer.encode("hello world")
    [same] = llm.generate(ids, GREEDY)
    prompts: list[str | list[int]] = ["hello world", ids, "other"]
    many = llm.generate(prompts, GREEDY)
    assert one.prompt == "hello world"
    assert one.prompt_token_ids == same.prompt_token_ids == ids
    tokens = one.outputs[0].token_ids
    assert [output.outputs[0].token_ids for output in (same, *many[:2])] == [tokens] * 3
    assert one.outputs[0].text == llm.tokenizer.decode(ids + tokens)[len(llm.tokenizer.decode(ids)) :]
    assert [output.request_id for output in many] == sorted(output.request_id for output in many)
    assert llm.generate([], GREEDY) == []


def test_a_prompt_without_end_is_refused_before_it_is_tokenized(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.tokenizer, "encode", lambda *arguments, **options: pytest.fail("it was tokenized"))
    with pytest.raises(UsageError, match="the prompt has 1,000,000,000 characters, but at most"):
        llm.generate(" " * 10**9, GREEDY)


def test_each_prompt_has_its_own_parameters(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (3, 9, 1)]
    outputs = llm.generate(["a", "b", "c"], params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 9, 1]
    with pytest.raises(UsageError, match="2 sets of sampling parameters for 3"):
        llm.generate(["a", "b", "c"], params[:2])
    with pytest.raises(UsageError, match="0 sets of sampling parameters for 1"):
        llm.generate(["a"], [])
    with pytest.raises(UsageError, match="0 sets of sampling parameters for 1"):
        llm.chat([{"role": "user", "content": "a"}], [])
    for wrong in (5, "x", {"temperature": 1}, [{"temperature": 1}], SamplingParams):
        with pytest.raises(UsageError, match="sampling parameters are a SamplingParams or BeamSearchParams"):
            llm.generate("a", wrong)  # type: ignore[arg-type]
    for samples in (GREEDY, [BeamSearchParams(), GREEDY]):
        with pytest.raises(UsageError, match="a beam search goes with BeamSearchParams, not SamplingParams"):
            llm.beam_search(["a", "b"], samples)  # type: ignore[arg-type]


def test_a_prompt_that_is_none_fails_alone(llm: LLM) -> None:
    prompts: Any = ["a", None, {"text": "b"}, [10**9], "c"]
    outputs = dict(llm.as_completed(prompts, GREEDY))
    assert [outputs[i].error is None for i in range(5)] == [True, False, False, False, True]
    with pytest.raises(UsageError, match="prompt 1: a prompt is text or a list of token ids, not NoneType"):
        llm.generate(prompts, GREEDY)


def test_a_stream_adds_up_to_the_whole(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, stop=["qq", "zz"])
    [whole] = llm.generate("hello", params)
    deltas = list(llm.stream("hello", params))
    assert "".join(delta.text for delta in deltas) == whole.outputs[0].text
    assert [i for delta in deltas for i in delta.token_ids] == whole.outputs[0].token_ids
    assert deltas[-1].finish_reason == whole.outputs[0].finish_reason
    assert all(delta.finish_reason is None for delta in deltas[:-1])


def test_stop_strings_end_a_completion_and_are_not_part_of_it(llm: LLM) -> None:
    [plain] = llm.generate("hello", SamplingParams(temperature=0, max_tokens=40))
    text = plain.outputs[0].text
    stop = text[10:14]
    assert len(stop) == 4
    [stopped] = llm.generate("hello", SamplingParams(temperature=0, max_tokens=40, stop=[stop, "never there"]))
    assert stopped.outputs[0].text == text[: text.index(stop)]
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", stop)
    later = SamplingParams(temperature=0, max_tokens=40, stop=[stop], min_tokens=40)
    assert len(llm.generate("hello", later)[0].outputs[0].token_ids) == 40
    token = plain.outputs[0].token_ids[5]
    [by_id] = llm.generate("hello", SamplingParams(temperature=0, max_tokens=40, stop_token_ids=[token]))
    assert by_id.outputs[0].token_ids == plain.outputs[0].token_ids[: plain.outputs[0].token_ids.index(token) + 1]
    assert by_id.outputs[0].stop_reason == token


def test_end_of_sequence_ends_unless_ignored_or_too_early(llm: LLM) -> None:
    [eos] = llm.engine.requests.eos_token_ids - {llm.tokenizer.eos_token_id}
    push = {eos: 100.0}
    [ended] = llm.generate("hello", SamplingParams(max_tokens=9, logit_bias=push))
    assert ended.outputs[0].token_ids == [eos]
    assert ended.outputs[0].finish_reason == "stop"
    assert ended.outputs[0].stop_reason is None
    [ignored] = llm.generate("hello", SamplingParams(max_tokens=9, logit_bias=push, ignore_eos=True))
    assert ignored.outputs[0].token_ids == [eos] * 9
    assert ignored.outputs[0].text == "", "special tokens have no text"
    [late] = llm.generate("hello", SamplingParams(max_tokens=9, logit_bias=push, min_tokens=4))
    assert late.outputs[0].token_ids.index(eos) == 4


def reference_logits(llm: LLM, history: list[int], monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """The next token's logits, from an engine of its own."""
    seen: list[torch.Tensor] = []
    from lib.engine import engine_for

    model = llm.engine.runner.model
    engine = engine_for(model, num_blocks=128)
    run = engine.runner.run

    def spy(*arguments: Any) -> Any:
        logits, chunks = run(*arguments)
        seen.append(logits)
        return logits, chunks

    monkeypatch.setattr(engine.runner, "run", spy)
    engine.add_request("x", history, SamplingParams(max_tokens=1))
    while engine.has_work:
        engine.step()
    return seen[-1][0].double()


@pytest.mark.parametrize(
    "penalties",
    [
        {"repetition_penalty": 1.8},
        {"repetition_penalty": 0.5},
        {"frequency_penalty": 1.5},
        {"presence_penalty": 2.0},
        {
            "repetition_penalty": 1.3,
            "frequency_penalty": 0.7,
            "presence_penalty": -0.4,
            "logit_bias": {9: 3.0, 11: -50.0},
        },
    ],
)
def test_penalties_follow_their_definitions(
    llm: LLM, penalties: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = llm.tokenizer.encode("the quick brown fox")
    params = SamplingParams(temperature=0, max_tokens=10, **penalties)
    [output] = llm.generate(prompt, params)
    tokens = output.outputs[0].token_ids
    for i, chosen in enumerate(tokens):
        logits = reference_logits(llm, prompt + tokens[:i], monkeypatch)
        for token_id, bias in penalties.get("logit_bias", {}).items():
            logits[token_id] += bias
        for token_id in set(prompt + tokens[:i]):
            penalty = penalties.get("repetition_penalty", 1.0)
            logits[token_id] = logits[token_id] / penalty if logits[token_id] > 0 else logits[token_id] * penalty
        for token_id in set(tokens[:i]):
            logits[token_id] -= penalties.get("frequency_penalty", 0.0) * tokens[:i].count(token_id)
            logits[token_id] -= penalties.get("presence_penalty", 0.0)
        assert logits[chosen] >= logits.max() - 1e-4


@pytest.mark.parametrize("size", [1, 2, 3])
def test_no_run_of_tokens_comes_twice(llm: LLM, size: int) -> None:
    """A bias asks for one token again and again, which makes a run that overlaps itself."""
    prompt = [30, 31, 30]
    params = SamplingParams(temperature=0, max_tokens=12, no_repeat_ngram_size=size, logit_bias={9: 100.0, 31: 50.0})
    [output] = llm.generate(prompt, params)
    tokens = prompt + output.outputs[0].token_ids
    runs = [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]
    assert len(set(runs)) == len(runs) - (size == 1), "only the prompt repeats itself"
    assert tokens.count(9) >= size


def test_chat_goes_through_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    [output] = llm.chat(messages, GREEDY)
    assert output.prompt_token_ids == llm.tokenizer.apply_chat_template(messages)
    two = llm.chat([messages, [{"role": "user", "content": "Bye"}]], GREEDY)
    assert two[0].outputs[0].token_ids == output.outputs[0].token_ids
    assert two[1].prompt_token_ids != two[0].prompt_token_ids


def test_chat_takes_what_other_libraries_take(llm: LLM) -> None:
    """vLLM's names and forms."""
    parts: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    template = "{% for m in messages %}{{ m.content }}!{% endfor %}"
    [output] = llm.chat(parts, sampling_params=GREEDY, use_tqdm=False, chat_template=template)
    assert llm.tokenizer.decode(output.prompt_token_ids) == "Hi!"
    [plain] = llm.chat([{"role": "user", "content": "Hi"}], sampling_params=GREEDY)
    assert llm.chat(parts, GREEDY)[0].outputs[0].token_ids == plain.outputs[0].token_ids
    ids = llm.get_tokenizer().encode("a")
    prompts: list[Any] = [{"prompt": "a"}, {"prompt": "its text", "prompt_token_ids": ids}]
    one, two = llm.generate(prompts, sampling_params=GREEDY, use_tqdm=False)
    assert one.outputs[0].token_ids == two.outputs[0].token_ids


def test_a_bad_prompt_fails_alone_or_before_anything_runs(llm: LLM) -> None:
    prompts: list[Any] = ["fine", [10**6], "x" * 10_000, [], "also fine"]
    results = dict(llm.as_completed(prompts, GREEDY))
    assert [results[i].error is None for i in range(5)] == [True, False, False, False, True]
    assert "token id 1000000" in (results[1].error or "")
    assert "context holds" in (results[2].error or "")
    assert "empty" in (results[3].error or "")
    steps = llm.engine.figures.num_steps
    with pytest.raises(UsageError, match="prompt 1: token id"):
        llm.generate(prompts, GREEDY)
    assert llm.engine.figures.num_steps == steps
    with pytest.raises(CapacityError, match="blocks"):
        llm.generate("x", SamplingParams(n=200, max_tokens=400))


def test_leaving_an_iterator_aborts_what_it_started(llm: LLM) -> None:
    for _ in llm.as_completed(["a", "b", "c"], [SamplingParams(max_tokens=n) for n in (2, 200, 300)]):
        break
    stream = llm.stream("hello", SamplingParams(max_tokens=100))
    next(stream)
    assert llm.engine.requests.groups
    stream.close()


def test_two_streams_interleave(llm: LLM) -> None:
    alone = [[d.token_ids for d in llm.stream(prompt, GREEDY)] for prompt in ("one", "two")]
    first, second = llm.stream("one", GREEDY), llm.stream("two", GREEDY)
    both: list[list[list[int]]] = [[], []]
    for _ in range(12):
        for number, stream in enumerate((first, second)):
            delta = next(stream, None)
            if delta is not None:
                both[number].append(delta.token_ids)
    assert list(first) == list(second) == []
    assert both == alone


def test_streams_of_many_threads(llm: LLM) -> None:
    """Threads switch as often as they can, so they often add requests while others look for their own."""
    prompts = [[5, 6, 7 + number % 5] for number in range(120)]
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    alone = [[delta.token_ids for delta in llm.stream(prompt, params)] for prompt in prompts[:5]]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(32) as pool:
            streams = list(pool.map(lambda prompt: list(llm.stream(prompt, params)), prompts))
    finally:
        sys.setswitchinterval(before)
    assert [[delta.token_ids for delta in stream] for stream in streams] == alone * 24


def test_a_step_of_another_caller_ends_no_stream_early(llm: LLM) -> None:
    request = Request([5, 6, 7], SamplingParams(max_tokens=4, ignore_eos=True), streamed=True)
    jobs = iter([[(name, lambda: request) for name in "ab"]])
    found = Counter[str]()
    for name, result in llm._driver.run(lambda num_free_seqs: next(jobs, [])):
        found[name] += isinstance(result, Delta)
        if name == "b":  # the deltas of "a" have been taken
            llm._driver.step()
    assert found == {"a": 4, "b": 4}


def test_a_stream_that_is_left_takes_no_delta_from_another(llm: LLM) -> None:
    first, second = (llm.stream(name, GREEDY, request_id=name) for name in ("first", "second"))
    next(first)
    next(second)
    llm.abort("first")
    second.close()
    assert list(first)[-1].finish_reason == "abort"


def test_an_id_is_in_use_until_its_output_is_taken(llm: LLM) -> None:
    first = llm.stream("hello", GREEDY, request_id="mine")
    while next(first).finish_reason is None:
        pass
    with pytest.raises(UsageError, match="in use"):
        next(llm.stream("other", GREEDY, request_id="mine"))
    assert list(first) == []
    assert list(llm.stream("other", GREEDY, request_id="mine"))


def test_abort_from_another_thread_keeps_what_was_said(llm: LLM) -> None:
    threading.Timer(0.2, llm.abort, ["mine"]).start()
    deltas = list(llm.stream("hello", SamplingParams(max_tokens=400, ignore_eos=True), request_id="mine"))
    assert deltas[-1].finish_reason in ("abort", "length")
    assert sum(len(delta.token_ids) for delta in deltas) > 0


def test_no_step_goes_through_all_requests_that_wait(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    searches, queues, scheduler = list[object](), set[int](), llm.engine.scheduler

    class Deltas(dict[str, Any]):
        def __contains__(self, name: object) -> bool:
            searches.append(name)
            return super().__contains__(name)

    monkeypatch.setattr(llm._driver, "_deltas", Deltas())
    monkeypatch.setattr(scheduler, "max_num_seqs", 2)
    for _ in llm.as_completed([[5, 6]] * 100, SamplingParams(temperature=0, max_tokens=2)):
        queues.add(id(scheduler.waiting))
    assert len(queues) == 1, "the queue is copied, although only running requests have ended"
    assert not searches


def test_ctrl_c_stops_between_steps_and_keeps_what_is_finished(llm: LLM) -> None:
    finished = []
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (2, 400, 400, 400)]
    before = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))

    def run() -> None:
        for index, _ in llm.as_completed(["a", "b", "c", "d"], params):
            finished.append(index)
            signal.setitimer(signal.ITIMER_REAL, 0.05)

    with pytest.raises(KeyboardInterrupt):
        run()
    signal.signal(signal.SIGALRM, before)
    assert finished == [0]


def test_an_interrupt_inside_a_step_waits_and_a_second_does_not() -> None:
    reached = []

    def step(interrupts: int) -> None:
        with deferred_interrupt():
            for _ in range(interrupts):
                signal.raise_signal(signal.SIGINT)
            reached.append(interrupts)

    with pytest.raises(KeyboardInterrupt):
        step(1)
    with pytest.raises(KeyboardInterrupt):
        step(2)
    assert reached == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_wrong_options_are_errors(tiny_model: Path) -> None:
    for options, said in (
        ({"block_sise": 4}, "did you mean block_size"),
        ({"quantization": "awq"}, "unknown option 'quantization'"),
        ({"device": "cuda:77"}, "cuda"),
        ({"max_model_len": 100_000}, "context of 512"),
        ({"num_blocks": 2, "block_size": 4, "max_model_len": 100}, "needs 25 blocks"),
        ({"num_blocks": 1 << 39}, "does not fit"),
    ):
        with pytest.raises(MinillmError, match=said):
            LLM(str(tiny_model), **{"device": "cpu", **options})  # type: ignore[arg-type]


def test_a_model_may_be_a_path_object(tiny_model: Path) -> None:
    assert LLM(tiny_model, device="cpu", num_blocks=8).name == str(tiny_model)
    for wrong in (5, b"model", ["model"]):
        with pytest.raises(UsageError, match="a model is a name or a path, not"):
            LLM(wrong)  # type: ignore[arg-type]


def test_the_context_shrinks_to_a_small_pool(tiny_model: Path) -> None:
    small = LLM(str(tiny_model), device="cpu", num_blocks=8, block_size=4)
    assert small.engine.max_model_len == 32
    [output] = small.generate("hello", SamplingParams(max_tokens=400, ignore_eos=True))
    assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 32
    assert output.outputs[0].finish_reason == "length"


def test_random_weights_of_a_directory_need_its_config_alone(tiny_model: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_model / "config.json", tmp_path)
    options: dict[str, Any] = {"load_format": "dummy", "device": "cpu", "num_blocks": 8}
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    llm = LLM(str(tmp_path), **options)
    assert len(llm.generate([[1, 2, 3]], params)[0].outputs[0].token_ids) == 2
    with pytest.raises(UsageError, match="no tokenizer"):
        llm.generate("text")
    shutil.copy(tiny_model / "tokenizer.json", tmp_path)
    assert len(LLM(str(tmp_path), **options).generate("text", params)[0].outputs[0].token_ids) == 2
    (tmp_path / "config.json").unlink()
    with pytest.raises(WeightsError, match=r"config\.json is missing"):
        LLM(str(tmp_path), **options)


def test_random_weights_need_no_checkpoint() -> None:
    llm = LLM("smollm2-135m", load_format="dummy", device="cpu", num_blocks=8)
    [output] = llm.generate([1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 2
    with pytest.raises(UsageError, match="no tokenizer"):
        llm.generate("text")
    with llm.branch([1, 2, 3]) as branch:
        assert len(branch.append([4]).sample(SamplingParams(max_tokens=2, ignore_eos=True)).token_ids) == 2
