"""Compute the bytes that a model's weights take in memory, and the bytes that each token reads.

The input is the name, shape and type of each stored tensor. A low-bit matrix may take more bits per weight in memory
than in the file. Only this module defines these numbers.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from minillm.storage import Storage
from minillm.weights.shape import Shape
from minillm.weights.stored import BLOCKS, FP8, FP8_BLOCKS, LOW_BIT, StoredTensor

_IN_4_BITS = ("Q4_0", "Q4_1", "Q4_K")
_WIDENED_BITS = 8.5  # per weight: GGUF types without kernels become int8 in groups of 32, each with a 16-bit scale
_IQ4_XS_BITS = 4.3125  # per weight: the scales take 8 bits in memory, 6 in the file
QUANTIZED = ("int8", "int4", "fp8")  # values of --quantize
_BITS = {"int8": 9.0, "int4": 5.0}  # bits per weight by --quantize; FP8 has 8 per weight and 32 per row
_FLOATS, _16_BIT_KINDS = ("F64", "F32", "F16", "BF16"), ("F16", "BF16")
_LEAST_BLOCKED = 1 << 18  # minimum number of weights of a float32 matrix that `kernels.cpu.linear` packs
# FBGEMM pads a matrix to multiples of (rows, columns). The third constant is the bytes of a row's scales and sums.
_16_BIT_BLOCK, _BLOCK_OF_LEVELS, _LEVEL_BYTES_OF_A_ROW = (16, 512), (32, 256), 32
_FIRST_ROWS = 64  # rows of the first matmul, in `minillm.model.calibration`
_TYPICAL = ("Q4_K", "Q6_K", "Q8_0")  # the types assumed if only a model's size is known
PACKED = "model.layers.packed"  # all matrices of a low-bit model if only its size is known
_PACKED_BITS = 4.5  # per weight
_SCALES = ("weight_scale", "weight_scale_inv")
_PACKED_PARTS = (".qweight", ".weight_packed")
_GATE = re.compile(r"(gate_proj|ffn_gate)\.weight$")
_EMBEDDINGS, _HEADS = ("model.embed_tokens.weight", "token_embd.weight"), ("lm_head.weight", "output.weight")


@dataclass(frozen=True)
class Layout:
    """The formats of a model's tensors in memory.

    Args:
        element_size: bytes of a number in the engine's dtype.
        packs: 16-bit matrices keep 2 bytes per weight even if the engine's dtype is float32, as on many CPUs.
        quantize: "int8", "int4" or "fp8", applied to 16-bit and 32-bit matrices of the layers during loading. int8 and
            int4 also apply to an output head that is separate from the embedding.
        storage: the storage of matrices, see `minillm.storage.Storage`. A low-bit embedding stays low-bit unless this
            is "expanded".
    """

    element_size: int
    packs: bool = False
    quantize: str = ""
    storage: Storage = "stored"

    @property
    def keeps_low_bit(self) -> bool:
        return self.storage != "expanded"


@dataclass(frozen=True)
class Weights:
    """Sizes of a model's weights in bytes.

    Attributes:
        memory: all weights in memory.
        read: the weights that are read to compute one token.
        loading: additional memory during loading.
        copied: the size of a copy of the low-bit matrices in the engine's dtype. `Budget.keeps_copy` says whether the
            engine keeps this copy.
    """

    memory: int
    read: int
    loading: int = 0
    copied: int = 0


def weights_in_memory(
    tensors: Iterable[StoredTensor], layout: Layout, share: Callable[[StoredTensor], float] = lambda tensor: 1.0
) -> Weights:
    """Add up the bytes of a model's tensors. ``share`` returns the fraction of a tensor that this rank holds."""
    found = _with_blocks(tensors)
    tied = not any(tensor.name in _HEADS for tensor in found)
    memory = read = copied = 0.0
    loading = 0.0
    for tensor in found:
        part = share(tensor)
        if _has_low_bit_matmuls(tensor, layout):
            is_embedding = tensor.name in _EMBEDDINGS
            table = part * _low_bit_table(tensor, layout) if is_embedding else 0.0
            kept, used = (part * each for each in _products(tensor, layout)) if tied or not is_embedding else (0.0, 0.0)
            memory += table + kept
            read += used
            loading = max(loading, part * _while_packed(tensor))
            continue
        used = part * _stored_bytes(tensor, layout)
        memory += part * _padded_bytes(tensor) if _is_packed(tensor, layout) and _is_matrix(tensor) else used
        if tensor.name in _EMBEDDINGS and tied and _is_packed(tensor, layout):
            used = part * _packed(tensor)  # the head is a second copy, in the layout for matmuls
            memory += part * _padded_bytes(tensor)
        if tensor.name not in _EMBEDDINGS or tied:
            read += used
            copied += part * _low_bit_count(tensor, layout) * layout.element_size
        if layout.packs and tensor.kind in _FLOATS and tensor.name not in _EMBEDDINGS:
            loading = max(loading, part * _in_float32(tensor))
    return Weights(round(memory), round(read), round(loading), round(copied))


def _with_blocks(tensors: Iterable[StoredTensor]) -> list[StoredTensor]:
    """Return the tensors. FP8 matrices that have a scale per block get the type `FP8_BLOCKS`.

    The engine dequantizes the matrices with a scale per block. Other FP8 matrices have a scale per row, or one scale.
    """
    found = list(tensors)
    scales = (t.name for t in found if t.name.endswith(_SCALES) and len(t.shape) == 2 and t.shape[1] > 1)
    in_blocks = {name.removesuffix("_inv").removesuffix("_scale") for name in scales}
    return [replace(t, kind=FP8_BLOCKS) if t.kind in FP8 and t.name in in_blocks else t for t in found]


def is_plain_matrix(tensor: StoredTensor) -> bool:
    """Return whether a tensor is a layer's matrix, stored in 16 or 32 bits."""
    return tensor.kind in _FLOATS and _is_matrix(tensor) and tensor.name not in _HEADS


def _in_float32(tensor: StoredTensor) -> int:
    """Return the bytes of a matrix in float32, before it is packed.

    The gate and up matrices of a layer are packed together as one matrix. So the bytes of a gate matrix count twice.
    """
    return 4 * tensor.count * (2 if _GATE.search(tensor.name) else 1)


def _is_matrix(tensor: StoredTensor) -> bool:
    return len(tensor.shape) == 2 and tensor.name.endswith(".weight") and tensor.name not in _EMBEDDINGS


def _is_weight(tensor: StoredTensor) -> bool:
    return len(tensor.shape) == 2 and tensor.name.endswith(".weight")


def _has_low_bit_matmuls(tensor: StoredTensor, layout: Layout) -> bool:
    """Return whether a tensor is a matrix that `kernels.cpu.low_bit` multiplies in 8 or 4 bits."""
    is_low_bit = tensor.kind in FP8 or tensor.is_in_blocks
    return _is_weight(tensor) and (layout.storage == "int8" or (layout.storage == "int4" and is_low_bit))


def _while_packed(tensor: StoredTensor) -> float:
    """Return the additional memory in bytes while a matrix is packed for low-bit matmuls.

    A matrix is packed at its first matmul. This memory holds two copies of the quantized integers, and the output of
    that matmul. If the matrix belongs to a layer and is stored in 16 or 32 bits, a float32 copy of it is added.
    """
    levels = 2 * tensor.count * 13 / 12 + 4 * _FIRST_ROWS * tensor.shape[0]
    is_table = tensor.name in (*_EMBEDDINGS, *_HEADS)
    return levels * (1 if is_table else 2) + (_in_float32(tensor) if tensor.kind in _FLOATS and not is_table else 0)


def _products(tensor: StoredTensor, layout: Layout) -> tuple[float, float]:
    """Return two sizes in bytes for a matrix that is packed for low-bit matmuls.

    The matrix is packed in an 8-bit layout, in a 4-bit layout, or in both. The 8-bit layout stores a twelfth of the
    columns twice.

    Returns:
        - the memory of all its packed layouts;
        - the bytes read to compute one token, from the 4-bit layout if the matrix has one.
    """
    read, (rows, columns) = tensor.count * 13 / 12, tensor.shape
    in_8 = _in_blocks(rows, columns + -(-columns // 12) + 2, _BLOCK_OF_LEVELS) + _LEVEL_BYTES_OF_A_ROW * rows
    if tensor.kind not in _IN_4_BITS:
        return in_8, read
    in_4 = tensor.count * 5 / 8
    return in_4 + (in_8 if layout.storage == "int8" else 0.0), in_4


def _in_blocks(rows: int, columns: int, block: tuple[int, int]) -> int:
    """Return the number of elements of a matrix after FBGEMM has padded it to whole blocks."""
    return -(-rows // block[0]) * block[0] * -(-columns // block[1]) * block[1]


def _low_bit_table(tensor: StoredTensor, layout: Layout) -> float:
    return _WIDENED_BITS / 8 * tensor.count if tensor.kind in _FLOATS else _stored_bytes(tensor, layout)


def _stored_bytes(tensor: StoredTensor, layout: Layout) -> float:
    is_matrix = _is_matrix(tensor)
    if tensor.kind in _FLOATS:
        if is_matrix and layout.quantize == "fp8" and tensor.name not in _HEADS:
            return _in_fp8(tensor)
        if is_matrix and layout.quantize in _BITS:
            return tensor.count * _BITS[layout.quantize] / 8
        if is_matrix and layout.packs:
            return _packed(tensor)
        if len(tensor.shape) == 2 and not tensor.name.endswith(".weight"):
            return tensor.num_bytes  # scales of packed weights (AWQ, GPTQ, compressed-tensors)
        return tensor.count * layout.element_size
    if tensor.kind in FP8:
        kept = layout.keeps_low_bit and tensor.kind != FP8_BLOCKS
        return _in_fp8(tensor) if kept else tensor.count * layout.element_size
    if tensor.is_in_blocks:
        if not layout.keeps_low_bit:
            return tensor.count * layout.element_size
        if tensor.kind not in LOW_BIT:
            return tensor.count * _WIDENED_BITS / 8
        if tensor.kind == "IQ4_XS":
            return tensor.count * _IQ4_XS_BITS / 8
    if tensor.name.endswith(_PACKED_PARTS) and not layout.keeps_low_bit:
        return tensor.num_bytes * 2 * layout.element_size  # a byte holds two 4-bit weights
    return tensor.num_bytes


def _low_bit_count(tensor: StoredTensor, layout: Layout) -> float:
    """Return the number of weights of a matrix that is low-bit in memory; 0 for any other tensor. FP8 is not low-bit.

    For packed weights (AWQ, GPTQ, compressed-tensors), the number is computed from the bytes.
    """
    if tensor.kind in _FLOATS:
        return tensor.count if _is_matrix(tensor) and layout.quantize in _BITS else 0
    if not layout.keeps_low_bit:
        return 0
    if tensor.is_in_blocks:
        return tensor.count
    if tensor.name == PACKED:
        return tensor.num_bytes * 8 / _PACKED_BITS
    return tensor.num_bytes * 2 if tensor.name.endswith(_PACKED_PARTS) else 0


def _in_fp8(tensor: StoredTensor) -> int:
    return tensor.count + 4 * tensor.shape[0]  # a scale for each row


def _is_packed(tensor: StoredTensor, layout: Layout) -> bool:
    """Return whether `kernels.cpu.packed_linear` stores a matrix in its own layout instead of torch's."""
    if not layout.packs or len(tensor.shape) != 2:
        return False
    becomes_numbers = (tensor.is_in_blocks or tensor.kind in FP8) and not layout.keeps_low_bit
    if tensor.kind in _16_BIT_KINDS:
        return True
    return (tensor.kind in _FLOATS or becomes_numbers) and tensor.count >= _LEAST_BLOCKED


def _packed(tensor: StoredTensor) -> int:
    return tensor.count * (2 if tensor.kind in _16_BIT_KINDS else 4)


def _padded_bytes(tensor: StoredTensor) -> int:
    """Return the bytes of a packed matrix. If it is stored in 16 bits, it is padded to whole FBGEMM blocks."""
    if tensor.kind not in _16_BIT_KINDS:
        return _packed(tensor)
    return 2 * _in_blocks(tensor.shape[0], tensor.shape[1], _16_BIT_BLOCK)


def expected_tensors(shape: Shape, size: int) -> tuple[StoredTensor, ...]:
    """Return the tensors that a model with this shape and a ``size`` in bytes probably has.

    The tensors' types follow from the bytes per weight. A low-bit model gets a single tensor, `PACKED`, for all its
    layers.
    """
    tables = _tables(shape)
    if size < 1.5 * shape.count:  # low-bit: takes its stored bytes
        table = size * shape.table // shape.count
        rest = StoredTensor(PACKED, (size - table * len(tables),), "U8")
        return (*(StoredTensor(name, (table,), "U8") for name in tables), rest)
    kind = "F32" if size > 3 * shape.count else "BF16"
    return _tensors(shape, [kind] * shape.layers, kind)


def expected_by_bits(shape: Shape, size: int) -> tuple[StoredTensor, ...]:
    """Return the tensors that a low-bit model of ``size`` bytes probably has.

    The layers get two neighboring types of 4, 6 and 8 bits. The two types are mixed so that all tensors add up to about
    ``size`` bytes.
    """
    bits = 8 * size / shape.count
    typical = {kind: 8 * BLOCKS[kind][1] / BLOCKS[kind][0] for kind in _TYPICAL}  # bits per weight
    low, high = _TYPICAL[:2] if bits < typical[_TYPICAL[1]] else _TYPICAL[1:]
    share = (bits - typical[low]) / (typical[high] - typical[low])
    num_high = round(shape.layers * min(1.0, max(0.0, share)))
    return _tensors(shape, [high] * num_high + [low] * (shape.layers - num_high), high)


def _tables(shape: Shape) -> tuple[str, ...]:
    """Return the names of the embedding and of the output head. If both are one matrix, return only its name."""
    return (_EMBEDDINGS[0],) if shape.tied else (_EMBEDDINGS[0], _HEADS[0])


def _tensors(shape: Shape, kinds: list[str], table: str) -> tuple[StoredTensor, ...]:
    """Return a model's tensors. ``kinds``: each layer's type. ``table``: the type of embedding and head."""
    attention = shape.matrices // shape.layers - 3 * shape.intermediate * shape.hidden
    wide, hidden = shape.intermediate, shape.hidden
    matrices = {"gate_proj": (wide, hidden), "up_proj": (wide, hidden), "down_proj": (hidden, wide)}
    matrices["self_attn"] = attention // hidden, hidden
    tensors = [StoredTensor(name, (shape.vocabulary, shape.hidden), table) for name in _tables(shape)]
    for layer, kind in enumerate(kinds):
        tensors += [StoredTensor(f"{layer}.{name}.weight", sizes, kind) for name, sizes in matrices.items()]
    return (*tensors, StoredTensor("norm.weight", (shape.vectors,), table if table in _FLOATS else "F32"))
