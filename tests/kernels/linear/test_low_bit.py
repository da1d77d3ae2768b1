"""Test low-bit matrices: packing, and matmuls against float64 with the dequantized weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lib.kernels import DEVICE, ON_GPU, randn, relative_error
from lib.low_bit import LAYOUTS, some
from minillm import kernels
from minillm.kernels import GELU, reference
from minillm.kernels.linear.low_bit.layouts import (
    FP8,
    Layout,
    LowBit,
    concatenated,
    dequantize,
    expanded,
    factors,
    pack_levels,
    pack_super,
    padded,
    random_matrix,
    unpack_levels,
)

pytest.importorskip("triton")
from minillm.kernels.linear.low_bit import choose as low_bit_linear
from minillm.kernels.linear.low_bit import few_tokens as low_bit_matmul
from minillm.kernels.linear.low_bit import many_tokens as low_bit_dot
from minillm.kernels.linear.low_bit import one_token as low_bit_matvec
from minillm.kernels.linear.low_bit import unpack as low_bit_unpack

# Bits of a weight with its part of all scales; IQ4_XS's file has 4.25, for its scales have 6 bits there.
BITS = dict(zip(LAYOUTS, (4.5, 5.0, 5.5, 6.0, 8.5, 4.5, 5.5, 6.5625, 4.5, 4.3125, 4.25, 8 + 16 / 1280), strict=True))
SHAPES = [(6, 768), *([(5, 256), (1030, 4096), (4096, 14336)] if ON_GPU else [])]
TOKENS = (1, 2, 3, 20, 300) if ON_GPU else (1, 2)


@pytest.mark.parametrize("bits", [4, 5, 6, 8])
def test_levels_come_back(bits: int) -> None:
    levels = torch.randint(-128 if bits == 8 else 0, 128 if bits == 8 else 1 << bits, (7, 96))
    words, high = pack_levels(levels, bits)
    matrix = LowBit(Layout(bits, "plain", zero=3), (7, 96), words, high, torch.ones(7, 3).half())
    assert torch.equal(unpack_levels(matrix), levels.int())
    assert torch.equal(dequantize(matrix), levels.float() - 3)
    assert words.nbytes + (0 if high is None else high.nbytes) == 7 * 96 * bits // 8


def test_six_bits_of_scales_and_minima_come_back() -> None:
    scales, mins = torch.randint(0, 64, (2, 3, 2, 8))
    units = torch.rand(2, 3, 2).half()
    words, _ = pack_levels(torch.zeros(3, 512, dtype=torch.int32), 4)
    matrix = LowBit(Layout(4, "super"), (3, 512), words, None, pack_super(scales, mins, *units))
    found, zeros, offsets = factors(matrix, torch.float64)
    assert torch.equal(found, (scales * units[0].double()[..., None]).flatten(1))
    assert torch.equal(offsets, -(mins * units[1].double()[..., None]).flatten(1))
    assert not zeros.any()


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_take_the_bits_of_their_formats(name: str) -> None:
    assert some(LAYOUTS[name], 4, 1280).nbytes * 8 == BITS[name] * 4 * 1280


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_are_unpacked(name: str, shape: tuple[int, int]) -> None:
    matrix = some(LAYOUTS[name], *shape)
    exact = dequantize(matrix, torch.float64)
    out = torch.empty(shape, device=DEVICE)
    assert relative_error(low_bit_unpack.dequantize(matrix, out), exact) < 1e-6
    chosen = torch.tensor([3, 0, 3, shape[0] - 1], device=DEVICE)
    rows = low_bit_linear.embedding(chosen, matrix, torch.float32)
    assert torch.equal(rows, out[chosen])
    assert torch.equal(dequantize(matrix.rows(slice(1, 4)), torch.float64), exact[1:4])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_products(name: str, tokens: int, shape: tuple[int, int]) -> None:
    matrix = some(LAYOUTS[name], *shape)
    out, width = shape
    x, bias, residual = randn(tokens, width), randn(out), randn(tokens, out)
    norm = randn(width) / 10
    weight = dequantize(matrix, torch.float64)
    exact = torch.nn.functional.linear(x.double(), weight, bias.double())
    normed = reference.norm_linear(x.double(), norm.double(), 1e-5, weight, bias.double())
    activations = low_bit_matmul.convert_to_float16(x)
    normed_activations = low_bit_matmul.convert_to_float16(x, (norm, 1e-5))
    wide = torch.full((tokens, out + 3), 7.0, device=DEVICE)

    sums = exact - bias.double() + residual.double()
    gated = reference.silu_mul(normed) if out % 2 == 0 else None

    if tokens <= low_bit_matvec.MOST_TOKENS:
        low_bit_matvec.product(x, matrix, bias, wide[:, 1:-2])
        assert relative_error(wide[:, 1:-2], exact) < 1e-4
        assert bool((wide[:, [0, -2, -1]] == 7.0).all())
        got = low_bit_matvec.product(x, matrix, bias, torch.empty_like(residual), (norm, 1e-5))
        assert relative_error(got, normed) < 1e-4
        assert relative_error(low_bit_matvec.product(x, matrix, None, residual.clone(), add=True), sums) < 1e-4
        if gated is not None:
            got = low_bit_matvec.product(x, matrix, bias, randn(tokens, out // 2), (norm, 1e-5), gated=True)
            assert relative_error(got, gated) < 1e-3  # where gate or up is near zero, digits are lost
            got = low_bit_matvec.product(x, matrix, bias, randn(tokens, out // 2), (norm, 1e-5), gated=GELU)
            assert relative_error(got, reference.gelu_mul(normed)) < 1e-3
        if tokens == 1 and not ON_GPU:  # the interpreter takes its time
            return
    low_bit_matmul.matmul(activations, matrix, bias, wide[:, 1:-2])
    assert relative_error(wide[:, 1:-2], exact) < 2e-3
    assert bool((wide[:, [0, -2, -1]] == 7.0).all())
    got = low_bit_matmul.matmul(normed_activations, matrix, bias, torch.empty_like(residual))
    assert relative_error(got, normed) < 2e-3
    assert relative_error(low_bit_matmul.matmul(activations, matrix, None, residual.clone(), add=True), sums) < 2e-3
    if gated is not None:
        got = low_bit_matmul.matmul(normed_activations, matrix, bias, randn(tokens, out // 2), gated=True)
        assert relative_error(got, gated) < 5e-3


@pytest.mark.parametrize("tile", [(4, 1, 1, 2), (2, 2, 2, 1), *([(1, 1, 1, 1), (8, 1, 8, 3)] if ON_GPU else [])])
@pytest.mark.parametrize("name", ["q5_k", "q8_0", "q6_k"])
def test_tiles(name: str, tile: tuple[int, int, int, int]) -> None:
    """Warps share 6 turns of the input, in unequal parts; rows and tokens end within a tile."""
    matrix, x, residual = some(LAYOUTS[name], 22, 768), randn(9, 768), randn(9, 22)
    exact = torch.nn.functional.linear(x.double(), dequantize(matrix, torch.float64))
    activations, chosen = low_bit_matmul.convert_to_float16(x), low_bit_matmul.Tile(*tile)
    gated = low_bit_matmul.matmul(activations, matrix, None, randn(9, 11), gated=True, tile=chosen)
    assert relative_error(gated, reference.silu_mul(exact)) < 5e-3
    for _ in range(2 if ON_GPU else 1):
        got = low_bit_matmul.matmul(activations, matrix, None, residual.clone(), add=True, tile=chosen)
        assert relative_error(got, exact + residual.double()) < 2e-3


@pytest.mark.parametrize("shape", [(22, 768), *([(1030, 4096), (4096, 14336)] if ON_GPU else [])])
@pytest.mark.parametrize("name", LAYOUTS if ON_GPU else ["q4_1", "q5_0", "q6_k", "iq4_xs", "awq"])
def test_dozens_of_tokens(name: str, shape: tuple[int, int]) -> None:
    """Rows and tokens end within a tile; so do parts of the input."""
    (out, width), tokens = shape, 130 if ON_GPU else 17
    matrix, x, bias, norm = some(LAYOUTS[name], out, width), randn(tokens, width), randn(out), randn(width)
    weight, residual = dequantize(matrix, torch.float64), randn(tokens, out)
    normed = reference.norm_linear(x.double(), norm.double(), 1e-5, weight, bias.double())
    activations = low_bit_matmul.convert_to_float16(x, (norm, 1e-5), by_eights=False)
    wide = torch.full((tokens, out + 3), 7.0, device=DEVICE)
    low_bit_dot.product(activations, matrix, bias, wide[:, 1:-2])
    assert relative_error(wide[:, 1:-2], normed) < 2e-3
    assert bool((wide[:, [0, -2, -1]] == 7.0).all())
    gated = low_bit_dot.product(activations, matrix, bias, randn(tokens, out // 2), gated=True)
    assert relative_error(gated, reference.silu_mul(normed)) < 5e-3
    gated = low_bit_dot.product(activations, matrix, bias, randn(tokens, out // 2), gated=GELU)
    assert relative_error(gated, reference.gelu_mul(normed)) < 5e-3
    sums = residual.double() + torch.nn.functional.linear(x.double(), weight, bias.double())
    activations, tile = low_bit_matmul.convert_to_float16(x, by_eights=False), low_bit_dot.Tile(128, 32, 4, 4, 3)
    for each in (tile, None) if ON_GPU else (tile,):
        got = low_bit_dot.product(activations, matrix, bias, residual.clone(), add=True, tile=each)
        assert relative_error(got, sums) < 2e-3


@pytest.mark.skipif(not ON_GPU, reason="the interpreter does one thing after another")
@pytest.mark.parametrize("tokens", [33, 64, 200, 256])
@pytest.mark.parametrize("name", ["q4_0", "q4_k", "q6_k"])
def test_a_product_ends_before_its_weights_are_overwritten(name: str, tokens: int) -> None:
    """Otherwise some sums are wrong, others each time: of many rows, and where registers are few."""
    matrix, x = some(LAYOUTS[name], 6144, 4096), randn(tokens, 4096)
    exact = torch.nn.functional.linear(x.double(), dequantize(matrix, torch.float64))
    activations = low_bit_matmul.convert_to_float16(x, by_eights=False)
    first, *others = (low_bit_dot.product(activations, matrix, None, randn(tokens, 6144)) for _ in range(6))
    assert relative_error(first, exact) < 2e-3
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize(
    ("name", "tokens", "is_taken"), [("q4_k", 16, 0), ("q4_k", 256, 1), ("q8_0", 128, 1), ("q8_0", 129, 0)]
)
def test_numbers_of_tokens_that_are_taken(name: str, tokens: int, is_taken: bool) -> None:
    """If one of a layer's matrices has 8 bits, all are dequantized from 129 tokens on."""
    parts = some(LAYOUTS["q4_k"], 4, 256), some(LAYOUTS[name], 4, 256)
    if not ON_GPU or torch.cuda.get_device_capability()[0] == 9:
        assert low_bit_dot.takes(torch.empty(tokens, 256, dtype=torch.float16, device=DEVICE), parts) == is_taken


def test_rows_that_begin_within_a_word() -> None:
    """One group a row: the scales from the second row on begin at half a word; a GPU reads whole words only."""
    matrix, x = some(LAYOUTS["q4_0"], 20, 32), randn(17, 32)
    part = matrix.rows(slice(1, 20))
    assert part.scales.data_ptr() % 4
    got = low_bit_dot.product(low_bit_matmul.convert_to_float16(x, by_eights=False), part, None, randn(17, 19))
    exact = torch.nn.functional.linear(x.double(), dequantize(matrix, torch.float64))
    assert relative_error(got, exact[:, 1:]) < 2e-3


@pytest.mark.parametrize("width", [32, 160])
@pytest.mark.parametrize("kernel", ["lanes", "dot"])
def test_a_turn_that_the_input_does_not_fill(kernel: str, width: int) -> None:
    matrix, x = some(LAYOUTS["q4_1"], 20, width), randn(3, width)
    exact = torch.nn.functional.linear(x.double(), dequantize(matrix, torch.float64))
    multiply = low_bit_dot.product if kernel == "dot" else low_bit_matmul.matmul
    activations = low_bit_matmul.convert_to_float16(x, by_eights=kernel == "lanes")
    got = multiply(activations, matrix, None, torch.empty(3, 20, device=DEVICE))
    assert relative_error(got, exact) < 2e-3


@pytest.mark.parametrize("tokens", [1, 2, 5, 18, 257])
def test_a_layer_of_several_layouts(tokens: int) -> None:
    """A file may store v finer than q and k; each number of tokens has its own kernel."""
    matrices = [some(LAYOUTS[name], rows, 256, seed) for seed, (name, rows) in enumerate([("q4_k", 20), ("q6_k", 11)])]
    parts = concatenated([matrices[0], some(LAYOUTS["q4_k"], 9, 256, 5), matrices[1]])
    assert [part.shape for part in parts] == [(29, 256), (11, 256)]
    weight = torch.cat([dequantize(part, torch.float64) for part in parts])
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.float16, 5e-3)):
        x, bias, norm = randn(tokens, 256, dtype=dtype), randn(40, dtype=dtype), randn(256, dtype=dtype)
        residual = randn(tokens, 40, dtype=dtype)
        wide = (x.double(), norm.double(), 1e-5, weight, bias.double())
        got = low_bit_linear.product(x, parts, bias, None, (norm, 1e-5))
        assert relative_error(got, reference.norm_linear(*wide)) < tolerance
        got = low_bit_linear.product(x, parts, bias, None, (norm, 1e-5), gated=True)
        assert relative_error(got, reference.norm_gated_linear(*wide)) < 2 * tolerance
        exact = residual.double() + torch.nn.functional.linear(x.double(), weight, bias.double())
        out = residual.clone()
        assert low_bit_linear.product(x, parts, bias, out, add=True) is out
        assert relative_error(out, exact) < tolerance


@pytest.mark.parametrize(("names", "most"), [(["q4_k"], 64), (["q4_k", "q6_k"], 16), (["q8_0"], 16), (["iq4_xs"], 16)])
def test_a_copy_multiplies_many_tokens(monkeypatch: pytest.MonkeyPatch, names: list[str], most: int) -> None:
    monkeypatch.setattr(kernels, "low_bit_linear", low_bit_linear, raising=False)
    parts = tuple(some(LAYOUTS[name], 8, 256, seed) for seed, name in enumerate(names))
    weight = kernels.LinearWeight(parts)
    assert weight.copied_bytes(torch.bfloat16) == 2 * 8 * len(names) * 256
    weight.keep_copy(torch.float32)
    exact = torch.cat([dequantize(part, torch.float64) for part in parts])
    assert relative_error(weight.weight, exact) < 1e-6
    taken: list[int] = []

    def by_parts(x: Tensor, *others: object, **kinds: bool) -> Tensor:
        taken.append(x.shape[0])
        return x.new_zeros(x.shape[0], weight.out_features)

    monkeypatch.setattr(low_bit_linear, "product", by_parts)
    norm = randn(256)
    for tokens in (1, most, most + 1, 300):
        x = randn(tokens, 256)
        got = kernels.norm_linear(x, norm, 1e-5, weight)
        if tokens > most:
            assert relative_error(got, reference.norm_linear(x.double(), norm.double(), 1e-5, exact, None)) < 1e-4
    assert taken == [1, most]
    fp8 = LowBit(FP8, (8, 256), torch.zeros(8, 256, dtype=torch.float8_e4m3fn), None, torch.ones(8, 1))
    assert kernels.LinearWeight((fp8,)).copied_bytes(torch.bfloat16) == 0


@pytest.mark.parametrize("tokens", [1, 5, 257, *([18] if ON_GPU else [])])
def test_columns_in_an_order_of_their_own(tokens: int) -> None:
    """With GPTQ's ``desc_act``, each kernel reads x and the norm's weight in the matrix's order of columns."""
    order = torch.randperm(256, dtype=torch.int32).to(DEVICE)
    parts = tuple(replace(some(LAYOUTS["awq"], rows, 256, rows), order=order) for rows in (20, 6))
    weight = torch.cat([dequantize(part, torch.float64) for part in parts])
    plain = torch.cat([dequantize(replace(part, order=None), torch.float64) for part in parts])
    assert torch.equal(weight[:, order], plain)
    assert torch.equal(low_bit_linear.unpacked(parts, torch.float32), weight.float())
    assert torch.equal(expanded(parts), weight.float())
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.float16, 5e-3)):
        x, norm, residual = randn(tokens, 256, dtype=dtype), randn(256, dtype=dtype), randn(tokens, 26, dtype=dtype)
        exact = reference.norm_linear(x.double(), norm.double(), 1e-5, weight, None)
        assert relative_error(low_bit_linear.product(x, parts, None, None, (norm, 1e-5)), exact) < tolerance
        exact = residual.double() + x.double() @ weight.t()
        assert relative_error(low_bit_linear.product(x, parts, None, residual, add=True), exact) < tolerance


def test_matrices_that_read_x_in_different_orders_are_not_put_together() -> None:
    order = torch.randperm(256, dtype=torch.int32)
    first, second = (replace(some(LAYOUTS["awq"], 4, 256), order=order) for _ in range(2))
    (both,) = concatenated([first, replace(second, order=order.clone())])
    assert both.order is not None
    assert concatenated([first, replace(second, order=order.flip(0))]) == ()
    assert concatenated([first, replace(second, order=None)]) == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_no_tokens_have_no_products(dtype: torch.dtype) -> None:
    """A step without the last chunk of a prompt needs no logits."""
    parts, x = (some(LAYOUTS["q6_k"], 8, 256),), randn(0, 256, dtype=dtype)
    norm = randn(256, dtype=dtype), 1e-5
    assert low_bit_linear.product(x, parts, None, None, norm).shape == (0, 8)
    assert low_bit_linear.product(x, parts, None, None, norm, gated=True).shape == (0, 4)
    assert low_bit_linear.product(x, parts, None, randn(0, 8, dtype=dtype), add=True).shape == (0, 8)


def test_concatenated_matrices_are_all_of_few_bits() -> None:
    assert concatenated([some(LAYOUTS["q4_0"], 4, 32), None]) == ()


@pytest.mark.parametrize("name", LAYOUTS)
def test_padding_is_zero(name: str) -> None:
    matrix = padded(some(LAYOUTS[name], 5, 256), 8)
    assert matrix.shape == (8, 256)
    assert not dequantize(matrix)[5:].any()
    assert torch.equal(dequantize(matrix)[:5], dequantize(some(LAYOUTS[name], 5, 256)))


def test_activations_that_float16_could_not_hold() -> None:
    matrix = some(LAYOUTS["q4_0"], 8, 64)
    x = randn(3, 64) * torch.tensor([[1e6], [1.0], [1e-3]], device=DEVICE)
    exact = torch.nn.functional.linear(x.double(), dequantize(matrix, torch.float64))
    got = low_bit_matmul.matmul(low_bit_matmul.convert_to_float16(x), matrix, None, torch.empty(3, 8, device=DEVICE))
    for row, expected in zip(got, exact, strict=True):
        assert relative_error(row, expected) < 2e-3


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("tokens", [2, 5, 17])
def test_numbers_that_are_none_are_seen(value: float, tokens: int) -> None:
    matrix, x = some(LAYOUTS["q4_0"], 8, 64), randn(tokens, 64, dtype=torch.float16)
    x[1, 7] = value
    got = low_bit_linear.product(x, (matrix,), None, None, None)
    assert not got[1].isfinite().any()
    assert got[0].isfinite().all()


def test_a_scale_that_is_nan_spoils_its_row_only() -> None:
    matrix = some(LAYOUTS["q4_0"], 8, 64)
    matrix.scales[2, 1] = float("nan")
    for tokens in (1, 5, 17):
        got = low_bit_linear.product(randn(tokens, 64, dtype=torch.float16), (matrix,), None, None, None)
        assert got[:, 2].isnan().all()
        assert got[:, [0, 1, 3, 4, 5, 6, 7]].isfinite().all()


@pytest.mark.parametrize("name", ["q4_0", "q8_0", "q4_k", "q5_k", "q6_k", "int8 rows"])
def test_random_matrices_look_like_weights(name: str) -> None:
    matrix = random_matrix(LAYOUTS[name], (64, 2048), 0.02, torch.Generator(DEVICE).manual_seed(0))
    weights = dequantize(matrix)
    assert abs(float(weights.mean())) < 3e-3
    assert 0.01 < float(weights.std()) < 0.04
