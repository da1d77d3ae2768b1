"""What a beam search says: when a beam ends, and what its caller gets of it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from minillm.beams.candidates import BeamStep
from minillm.outputs import CompletionOutput, Delta, FinishReason, TokenLogprobs
from minillm.params import BeamSearchParams
from minillm.sequence import Sequence, SequenceGroup

if TYPE_CHECKING:
    from minillm.text.tokenizer import Tokenizer


def ending_of(tokenizer: Tokenizer | None, step: BeamStep, sequence: Sequence, token_id: int) -> str | int | None:
    """The token or stop string that ends ``sequence`` if it goes on with ``token_id``."""
    if token_id in step.end_ids:
        return token_id
    if step.params.stop and tokenizer is not None and sequence.num_output_tokens >= step.params.min_tokens:
        # Only text that the new token completes: what came before did not end the beam.
        before = text_of(tokenizer, sequence, sequence.output_token_ids)
        after = text_of(tokenizer, sequence, [*sequence.output_token_ids, token_id])
        for stop in step.params.stop:
            if after.find(stop, max(0, len(before) - len(stop))) >= 0:
                return stop
    return None


def finished_beam(
    tokenizer: Tokenizer | None, step: BeamStep, sequence: Sequence, token_id: int, token: TokenLogprobs | None
) -> CompletionOutput:
    reason = ending_of(tokenizer, step, sequence, token_id)
    return CompletionOutput(
        index=0,
        text="",  # made when it is asked for: most finished beams are overtaken
        token_ids=[*sequence.output_token_ids, token_id],
        cumulative_logprob=None,
        logprobs=None if step.params.logprobs is None else [*sequence.logprobs, *([token] if token else [])],
        finish_reason="length" if reason is None else "stop",
        stop_reason=reason if isinstance(reason, str) or reason in tuple(step.params.stop_token_ids) else None,
    )


def beam_outputs(tokenizer: Tokenizer | None, group: SequenceGroup) -> list[CompletionOutput]:
    """The best beams: those that have finished, then, of a search that was cut short, those that were running."""
    params = group.params
    assert isinstance(params, BeamSearchParams)
    finished = [beam for search in group.searches for beam in search.finished]
    finished.sort(key=lambda beam: -beam.score)
    outputs = [replace(b.beam, score=b.score, cumulative_logprob=b.logprob) for b in finished]
    if not all(search.done for search in group.searches):
        for search, beams in zip(group.searches, group.beams, strict=False):
            for logprob, sequence in zip(search.logprobs, beams, strict=False):
                length = max(1, sequence.num_output_tokens)
                score, tokens = logprob / length**params.length_penalty, sequence.output_token_ids
                logprobs = sequence.logprobs if params.logprobs is not None else None
                outputs.append(CompletionOutput(0, "", tokens, logprob, logprobs, sequence.finish_reason, score=score))
    wanted = params.n or params.beam_width
    return [
        replace(output, index=index, text=_beam_text(tokenizer, group, output))
        for index, output in enumerate(outputs[:wanted])
    ]


def best_beam(tokenizer: Tokenizer | None, group: SequenceGroup) -> Delta:
    """The best beam as it stands."""
    best = max(
        [(b.score, b.beam.token_ids) for search in group.searches for b in search.finished]
        + [
            (logprob / search.num_tokens**search.length_penalty, sequence.output_token_ids)
            for search, beams in zip(group.searches, group.beams, strict=False)
            if not search.done
            for logprob, sequence in zip(search.logprobs, beams, strict=False)
        ]
    )[1]
    reason: FinishReason | None = "stop" if all(search.done for search in group.searches) else None
    text = text_of(tokenizer, group.sequences[0], [t for t in best if t not in group.end_ids])
    return Delta(group.request_id, 0, text, list(best), reason, replaces=True)


def _beam_text(tokenizer: Tokenizer | None, group: SequenceGroup, output: CompletionOutput) -> str:
    tokens = output.token_ids
    if output.finish_reason == "stop" and tokens and tokens[-1] in group.end_ids:
        tokens = tokens[:-1]
    text = text_of(tokenizer, group.sequences[0], tokens)
    return text[: text.rindex(output.stop_reason)] if isinstance(output.stop_reason, str) else text


def text_of(tokenizer: Tokenizer | None, sequence: Sequence, token_ids: list[int]) -> str:
    """The text of output tokens that follow the sequence's prompt."""
    if tokenizer is None:
        return ""
    detokenizer = tokenizer.detokenizer(sequence.token_ids[: sequence.num_prompt_tokens])
    return "".join(map(detokenizer.push, token_ids)) + detokenizer.finish()
