"""The part of a step that a device runner computes from the state on the device, as plain data."""

from dataclasses import dataclass


@dataclass(slots=True)
class DecodeWork:
    """The work to compute one token of each decoding sequence, from its row of device state (see `device.rows`)."""

    num_seqs: int
    longest: int  # tokens of the longest sequence, this step's token included
    rows: list[int] | None  # each sequence's row, then -1 for each row of padding; None: as in the last step
    changed: list[int]  # flat indices of the changed words
    values: list[int]  # the new words
    shares_blocks: bool  # whether to read shared blocks once, by the latest plan
    plan: list[list[int]] | None  # the fields of a `minillm.kernels.Plan`; None: as in the last step
    num_beams: int = 0  # number of beams, which the device forks after the step
    beam_rows: list[int] | None = None  # rows of the beams, then -1 for padding; None: as in the last step with beams
