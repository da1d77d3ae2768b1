"""Our host functions compute what Triton's do."""

import triton

from minillm.kernels.arguments import cdiv, next_power_of_2


def test_numbers_are_rounded_as_by_triton() -> None:
    for number in [*range(1, 70), 255, 256, 257, 4095, 4096, 4097, (1 << 31) + 1]:
        assert next_power_of_2(number) == triton.next_power_of_2(number)
        for divisor in (1, 2, 7, 64, 100):
            assert cdiv(number, divisor) == triton.cdiv(number, divisor)
    assert next_power_of_2(0) == 1, "a tile has at least one element"
    assert cdiv(0, 64) == 0
