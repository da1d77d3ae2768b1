"""Failures within a step. If a decoding method fails for a request, only that request ends.

If the device fails, all requests of the step end.
"""

from collections.abc import Mapping

from torch import Tensor

from minillm.engine.requests import Requests
from minillm.engine.scheduler import Scheduler
from minillm.errors import RequestError
from minillm.sequence import Chunk, Flight, Method, Schedule, SequenceGroup, Stage


def launch_each(
    parts: Mapping[Method, list[Chunk]],
    logits: Tensor,
    flights: list[Flight],
    schedule: Schedule,
    scheduler: Scheduler,
) -> None:
    """Launch each method for its chunks, and add the launched flights to ``flights``.

    A request for which a method fails ends with the error. If no request of the schedule is left, the device has
    failed, and the error is raised.
    """
    failed: set[SequenceGroup] = set()
    for method, chunks in parts.items():
        try:
            flights.append(method.launch(logits, chunks))
        except Exception as error:
            launched, ended = launch_others(method, logits, chunks, error, scheduler)
            flights += launched
            failed |= ended
            if failed.issuperset(chunk.group for chunk in schedule.chunks):
                raise


def launch_others(
    method: Method, logits: Tensor, chunks: list[Chunk], error: Exception, scheduler: Scheduler
) -> tuple[list[Flight], set[SequenceGroup]]:
    """Find the one group for which ``method.launch`` fails, fail it with ``error``, and launch the others.

    If the failure does not come from a single group, fail all groups.

    Returns:
        The launched flight in a list (empty if all failed), and the failed groups.
    """
    flights: list[Flight] = []
    groups = dict.fromkeys(chunk.group for chunk in chunks)
    for culprit in groups if len(groups) > 1 else ():
        try:
            flights.append(method.launch(logits, [chunk for chunk in chunks if chunk.group is not culprit]))
        except Exception:
            continue
        groups = {culprit: None}
        break
    for group in groups:
        scheduler.fail(group, error)
    return flights, set(groups)


def end_requests_of(schedule: Schedule, error: Exception, requests: Requests) -> None:
    """End every request of a step in which the device failed. Remove these requests' blocks from the prefix cache."""
    cache, preemption = requests.scheduler.cache, requests.scheduler.preemption
    groups: dict[SequenceGroup, None] = {}
    for chunk in schedule.chunks:
        if chunk.sequence.table is not None:
            cache.distrust(chunk.sequence.table)
        if requests.has(chunk.group):
            groups[chunk.group] = None
            chunk.group.error = RequestError(f"{type(error).__name__}: {error}")
    requests.end(list(groups))
    for group in schedule.preempted:
        if group.stage is Stage.SAVED and requests.has(group):
            preemption.start_over(group)  # its blocks may not have reached host memory


def fail_nan(requests: Requests, group: SequenceGroup) -> None:
    """Fail a group with NaN logits, and remove its blocks from the prefix cache.

    Logits are also NaN if a request's parameters exclude all tokens. Then the group already has an error, which stays.
    """
    group.error = group.error or RequestError("the model produced NaN; another dtype may help: float32 or bfloat16")
    for sequence in group.unfinished:
        if sequence.table is not None:
            requests.scheduler.cache.distrust(sequence.table)
