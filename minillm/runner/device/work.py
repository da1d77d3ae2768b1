"""The part of a step that a device runner computes from the state on the device, as plain data."""

from dataclasses import dataclass


@dataclass(slots=True)
class DecodeWork:
    """One token of each of the sequences that have a row on the device (`minillm.runner.device.rows`)."""

    num_seqs: int
    longest: int  # tokens of the longest of them, this step's included
    rows: list[int] | None  # of all sequences, and -1 for each row of padding; None: as in the last step
    changed: list[int]  # places in the rows' words
    values: list[int]  # the new words there
    shares_blocks: bool  # reading shared blocks once is worth it, as the latest plan says
    plan: list[list[int]] | None  # the fields of a `minillm.kernels.Plan`; None: as in the last step
    num_beams: int = 0  # sequences that the device forks after the step
    beam_rows: list[int] | None = None  # theirs, and -1 for each row of padding; None: as in the last step with any
