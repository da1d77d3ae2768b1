"""Operations on idle sequences: ended sequences that keep their blocks. Used for branches and pinned prefixes."""

from minillm.engine.driver import Driver
from minillm.engine.forks import fork
from minillm.engine.requests import Request
from minillm.errors import CapacityError, MinillmError
from minillm.outputs import RequestOutput
from minillm.params import SamplingParams
from minillm.sequence import Sequence, SequenceGroup


def hold(driver: Driver, requests: list[Request]) -> list[tuple[Sequence, RequestOutput]]:
    """Run requests, and keep their sequences as idle sequences.

    Return (idle sequence, output) of each request, in order. Each request must ask for one completion, and have
    ``hold`` set.

    Raises:
        MinillmError: a request failed. The blocks of all ``requests`` have been freed.
    """
    groups: dict[int, SequenceGroup] = {}
    outputs: dict[int, RequestOutput] = {}
    jobs = iter([[(number, lambda each=each: each) for number, each in enumerate(requests)]])
    try:
        for number, result in driver.run(lambda num_free_seqs: next(jobs, []), added=groups.__setitem__):
            assert isinstance(result, RequestOutput), "nothing is streamed"
            if result.error is not None:
                raise MinillmError(result.error)
            outputs[number] = result
    except BaseException:
        for group in groups.values():
            release(driver, group.sequences[0])
        raise
    return [(groups[number].sequences[0], outputs[number]) for number in range(len(requests))]


def fork_idle(driver: Driver, sequence: Sequence, num_tokens: int | None = None) -> Sequence:
    """Fork an idle sequence: return a new one that shares the blocks of its first ``num_tokens`` tokens (or all)."""
    count = len(sequence.token_ids) if num_tokens is None else num_tokens
    with driver.locked() as engine:
        if sequence.table is None:  # its blocks were evicted
            return Sequence(engine.requests.new_seq_id(), sequence.token_ids[:count], count)
        child = fork(engine.requests, sequence, count)
        child.num_prompt_tokens = count
        engine.scheduler.idle.keep(child)
        return child


def release(driver: Driver, sequence: Sequence) -> None:
    """Free an idle or pinned sequence's blocks."""
    with driver.locked() as engine:
        engine.scheduler.idle.release(sequence)


def prefix_request(token_ids: list[int], salt: str | None, request_id: str = "") -> Request:
    """Return a request that computes and pins a prefix. The request also generates one token.

    Call `pin` for its sequence afterwards, which raises an error if the prefix could not be pinned.
    """
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    return Request(token_ids, params, hold=True, pin=True, salt=salt, request_id=request_id)


def pin(driver: Driver, sequence: Sequence) -> None:
    """Pin an idle sequence, such as a system prompt, so that its blocks are never evicted; see `IdleSequences.pin`.

    Raises:
        CapacityError: the sequence cannot be pinned. Its blocks have been freed.
    """
    with driver.locked() as engine:
        try:
            engine.scheduler.pin(sequence)
        except CapacityError:
            engine.scheduler.idle.release(sequence)
            raise


def unpin(driver: Driver, sequence: Sequence) -> None:
    """Free a pinned sequence's blocks. Does nothing if the sequence is no longer pinned."""
    with driver.locked() as engine:
        engine.scheduler.idle.unpin(sequence)
