"""The ops on device state in plain PyTorch: the specification of the kernels in ``decode.py`` and ``beams.py``."""

import torch
from torch import Tensor

from minillm.kernels.arguments import DecodeInputs, Field, SearchField


def begin_decode(words: Tensor, rows: Tensor, block_size: int, inputs: DecodeInputs) -> None:
    """Fill ``inputs`` for a decode step from the device state. Advance the position in each of the slots by one.

    Args:
        words: ``[num_rows, Field.TABLE + width]`` int32, the device state: one row per slot.
        rows: ``[n]`` int32, the slots to decode, each once. -1 is padding: it becomes a sequence with token 0, no KV
            slot and an empty context.
        inputs: buffers of n sequences. Of a block table, only the blocks of the context are written.
    """
    real = rows >= 0
    state = words[rows.clamp(min=0).long()]
    positions = torch.where(real, state[:, Field.POSITION], 0)
    blocks = state[:, Field.TABLE :].gather(1, (positions // block_size).long()[:, None])[:, 0].long()
    floats = state.view(torch.float32)
    seeds = (state[:, Field.SEED_HIGH].long() << 32) | (state[:, Field.SEED_LOW].long() & 0xFFFFFFFF)
    inputs.token_ids.copy_(torch.where(real, state[:, Field.TOKEN], 0))
    inputs.positions.copy_(positions)
    inputs.slot_mapping.copy_(torch.where(real, blocks * block_size + positions % block_size, -1))
    inputs.context_lens.copy_(torch.where(real, positions + 1, 0))
    inputs.block_tables.copy_(state[:, Field.TABLE :])
    inputs.sampling.temperature.copy_(torch.where(real, floats[:, Field.TEMPERATURE], 0.0))
    inputs.sampling.top_k.copy_(torch.where(real, state[:, Field.TOP_K], 0))
    inputs.sampling.top_p.copy_(torch.where(real, floats[:, Field.TOP_P], 1.0))
    inputs.sampling.min_p.copy_(torch.where(real, floats[:, Field.MIN_P], 0.0))
    inputs.sampling.seeds.copy_(torch.where(real, seeds, 0))
    inputs.sampling.positions.copy_(torch.where(real, positions + 1, 0))
    words[rows[real].long(), Field.POSITION] += 1


def penalize(logits: Tensor, words: Tensor, counts: Tensor, rows: Tensor, out: Tensor) -> None:
    """Apply each slot's repetition, frequency and presence penalty, in this order. Write the results to float32
    ``out``.

    ``words`` is the device state, ``rows`` the slots: see `begin_decode`. ``counts`` are ``[num_rows, vocab]`` int32:
    twice the number of times a token was generated, plus 1 if the prompt has it.
    """
    out.copy_(logits)
    for i, row in enumerate(rows.tolist()):
        if row >= 0:
            first, last = Field.REPETITION_PENALTY, Field.PRESENCE_PENALTY + 1
            penalties = words[row, first:last].view(torch.float32).tolist()
            out[i] = torch.where(counts[row] > 0, penalized(out[i], counts[row] >> 1, *penalties), out[i])


def penalized(logits: Tensor, generated: Tensor, repetition: float, frequency: float, presence: float) -> Tensor:
    """Return the logits of tokens that have occurred, after repetition, frequency and presence penalty.

    ``generated`` counts how often each token was generated: 0 for tokens that occur only in the prompt. The repetition
    penalty applies to tokens of the prompt and to generated tokens. Frequency and presence penalty apply only to
    generated tokens.
    """
    logits = torch.where(logits > 0, logits / repetition, logits * repetition)
    return logits - torch.where(generated > 0, frequency * generated + presence, 0.0)


def end_decode(words: Tensor, counts: Tensor, rows: Tensor, token_ids: Tensor) -> None:
    """Store each slot's drawn token, which the next step computes, and add 2 to the token's count: see `penalize`.

    Slots of running beams, with ``FORKS`` 1, do not change.
    """
    real = (rows >= 0) & (words[rows.clamp(min=0).long(), Field.FORKS] == 0)
    kept, tokens = rows[real].long(), token_ids[real]
    words[kept, Field.TOKEN] = tokens.to(torch.int32)
    counts[kept, tokens] += 2


def choose_beams(
    words: Tensor, rows: Tensor, searches: Tensor, values: Tensor, ids: Tensor, vocab: int, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Advance beam searches by one step. Write the surviving beams to their slots, with the token to compute next.

    A search considers the best ``KEEP`` continuations of all its beams. Among equals, continuations of the better beam
    come first. The best considered continuations without an end token survive, as many as the search has beams. A
    beam's best survivor stays in the beam's slot. Its other survivors take the slots of beams that have no survivor, in
    the order of slots.

    Args:
        words: the device state; running beams have ``LOGPROB`` and ``RANK`` set.
        rows: ``[n]`` int32, slots of the beams, adjacent for each search; -1 is padding.
        searches: ``[searches, SearchField.WORDS]`` int32; a search is skipped if its ``rows`` are padding.
        values: ``[n, count]`` float32, log-probabilities of the most probable tokens of each beam, best first. NaN
            sorts first.
        ids: ``[n, count]`` int64, these tokens.
        vocab: size of the vocabulary; larger ids are clamped.
        width: the maximum number of beams of a search.

    Returns:
        ``[n]`` int32, for each real slot the index in ``rows`` of the beam that it continues.
        ``[searches, count]`` float32, the log-probabilities of each search's considered continuations, best first.
        ``[searches, 2, count]`` int32, the beam (its index in the search) and the token of each of these continuations.
    """
    n, count = values.shape
    parents = torch.arange(n, dtype=torch.int32, device=rows.device)
    logprobs, choices = values.new_zeros(len(searches), count), words.new_zeros(len(searches), 2, count)
    at, floats = rows.tolist(), words.view(torch.float32)
    for number, (first, beams, keep, *more) in enumerate(searches.tolist()):
        own = at[first : first + beams]
        if not own or min(own) < 0:
            continue
        ends = more[SearchField.ENDS - 3 :]
        found = []
        for slot, row in enumerate(own):
            totals = values[first + slot] + floats[row, Field.LOGPROB]
            rank, tokens = int(words[row, Field.RANK]), ids[first + slot].clamp(0, vocab - 1)
            found += [
                ((x == x, -x if x == x else 0.0, rank, i), x, slot, token)
                for i, (x, token) in enumerate(zip(totals.tolist(), tokens.tolist(), strict=True))
            ]
        best = [each[1:] for each in sorted(found)[:keep]]
        for place, (value, slot, token) in enumerate(best):
            logprobs[number, place] = value
            choices[number, 0, place], choices[number, 1, place] = slot, token
        living = [each for each in best if each[2] not in ends][:beams]
        dead = [slot for slot in range(beams) if slot not in {parent for _, parent, _ in living}]
        taken: set[int] = set()
        for rank, (value, parent, token) in enumerate(living):
            slot = dead.pop(0) if parent in taken else parent
            taken.add(parent)
            words[own[slot], Field.TOKEN], words[own[slot], Field.RANK] = token, rank
            floats[own[slot], Field.LOGPROB] = value
            parents[first + slot] = first + parent
    return parents, logprobs, choices


def fork_rows(words: Tensor, rows: Tensor, parents: Tensor, block_size: int) -> Tensor:
    """Copy the ids of full blocks to each slot that continues another slot's beam.

    A beam's last, partly filled block is not shared. Its content must be copied to the block that the slot has at this
    position of its own table. If any slot continues a beam, so does the beam's own slot; its block table is therefore
    never overwritten.

    Args:
        rows: ``[n]`` int32 slots, each once; -1 is padding. Slots that continue one beam have the same position of the
            next token.
        parents: ``[n]`` int32, for each slot the index in ``rows`` of the beam that it continues; arbitrary for
            padding.

    Returns:
        The blocks to copy, ``[n, 2]`` int64, as `block_copy` takes them.
    """
    copies = torch.full((len(rows), 2), -1, dtype=torch.int64, device=words.device)
    at = rows.tolist()
    for i, (row, parent) in enumerate(zip(at, parents.tolist(), strict=True)):
        if row >= 0 and parent != i:
            full, rest = divmod(int(words[row, Field.POSITION]), block_size)
            table, source = words[row, Field.TABLE :], words[at[parent], Field.TABLE :]
            table[:full] = source[:full]
            if rest:
                copies[i, 0], copies[i, 1] = source[full], table[full]
    return copies
