"""Cache the work that Triton's interpreter repeats: kernels compute the same in less than half the time.

Every operation of a kernel creates types and tensors, and each of them unwraps and checks its shape and formats its
name. The results that depend on a type alone are cached here.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest


@contextmanager
def nothing_twice() -> Iterator[None]:
    """Patch the interpreter while the context is open, if kernels are interpreted and its code is known."""
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    is_on = os.environ.get("TRITON_INTERPRET") == "1"  # else the compiler has the same types
    if not is_on or interpreter is None or not hasattr(interpreter, "_LangPatchScope"):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        _patch_once_a_launch(interpreter, patch)
        _keep_types(interpreter, patch)
        _see_what_is_equal(interpreter, patch)
        _make_handles_at_once(interpreter, patch)
        _call_at_once(interpreter, patch)
        _shift_bfloat16(interpreter, patch)
        _list_builtins_once(interpreter, patch)
        _leave_out_what_nobody_reads(interpreter, patch)
        yield


def _patch_once_a_launch(interpreter: Any, patch: pytest.MonkeyPatch) -> None:
    """Patch the language once per launch. The interpreter does it for each function, in half of a test's time.

    Three members show whether the language is patched already.
    """
    language, patch_all = interpreter.tl, interpreter._patch_lang
    sees_core: dict[Any, bool] = {}

    def patch_what_is_not(fn: Any) -> Any:
        members = [language.load, language.tensor.to]
        if fn not in sees_core:
            sees_core[fn] = any(value is language.core for value in fn.__globals__.values())
        if sees_core[fn]:
            members.append(language.core.load)
        is_new = any(map(language.core.is_builtin, members))
        return patch_all(fn) if is_new else interpreter._LangPatchScope()

    patch.setattr(interpreter, "_patch_lang", patch_what_is_not)


def _keep_types(interpreter: Any, patch: pytest.MonkeyPatch) -> None:
    """Cache the facts of a type by its name."""
    core = interpreter.tl.core
    blocks: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
    shapes: dict[str, dict[str, Any]] = {}
    arrays: dict[str, Any] = {}
    new_block, new_tensor, find_dtype = core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, tuple([size.value if isinstance(size, core.constexpr) else size for size in shape])
        if key not in blocks:
            new_block(self, element_ty, shape)
            self.sizes = key[1]  # shapes are compared as plain tuples
            blocks[key] = {name: value for name, value in vars(self).items() if name != "element_ty"}
        vars(self).update(blocks[key])
        self.element_ty = element_ty

    def tensor(self: Any, handle: Any, type: Any) -> None:
        if type.name not in shapes:
            new_tensor(self, handle, type)
            shapes[type.name] = {"shape": self.shape, "numel": self.numel}
        vars(self).update(shapes[type.name])
        self.handle, self.type, self.dtype = handle, type, type.scalar

    def dtype_of(type: Any) -> Any:
        if type.name not in arrays:
            arrays[type.name] = find_dtype(type)
        return arrays[type.name]

    patch.setattr(core.block_type, "__init__", block)
    patch.setattr(core.tensor, "__init__", tensor)
    patch.setattr(interpreter, "_get_np_dtype", dtype_of)


def _see_what_is_equal(interpreter: Any, patch: pytest.MonkeyPatch) -> None:
    """Compare, promote and broadcast equal types without work. Most operations have equal types."""
    core, semantic, builder = interpreter.tl.core, interpreter.TritonSemantic, interpreter.InterpreterBuilder
    plain: Any = type(core.float32)
    unwrap, compare = core._unwrap_if_constexpr, plain.__eq__
    give_element, to_ir = core.block_type.with_element_ty, core.block_type.to_ir
    check, promote, broadcast = (
        semantic.binary_op_type_checking_impl, semantic.computation_type_impl, semantic.broadcast_impl_value
    )  # fmt: skip
    simple = {int, float, str, bool, type(None), plain, core.block_type, core.pointer_type, core.tensor}
    blocks: dict[tuple[str, str], Any] = {}
    promoted: dict[tuple[Any, ...], Any] = {}
    whole: dict[tuple[str, str], Any] = {}
    spread: dict[tuple[Any, ...], Any] = {}  # a number as a block
    bytes_of: dict[str, int] = {}

    def unwrap_at_once(o: Any) -> Any:
        return o if type(o) in simple else unwrap(o)

    def is_equal(self: Any, other: Any) -> bool:
        return self is other or compare(self, other)

    def block_of(self: Any, element: Any) -> Any:
        if type(element) is not plain:  # a pointer's name leaves out where it points
            return give_element(self, element)
        key = self.name, element.name
        if key not in blocks:
            blocks[key] = give_element(self, element)
        return blocks[key]

    def block_in_ir(self: Any, of: Any) -> Any:
        return self if type(self.element_ty) is plain else to_ir(self, of)

    def checked(self: Any, lhs: Any, rhs: Any, *rules: bool, **named: bool) -> Any:
        divides = named.get("div_or_mod", rules[3:] == (True,))
        if type(lhs) is type(rhs) is core.tensor and not divides and is_same(lhs.type, rhs.type):
            return lhs, rhs
        block, number = (lhs, rhs) if type(rhs) in (int, float) else (rhs, lhs)
        if type(number) not in (int, float) or type(block) is not core.tensor or type(block.dtype) is not plain:
            return check(self, lhs, rhs, *rules, **named)
        key = block.type.name, type(number), repr(number), rules, *named.items()
        if key not in spread:
            found = check(self, lhs, rhs, *rules, **named)
            if found[number is lhs] is not block:  # it is widened
                return found
            spread[key] = found[number is rhs]
        return (block, spread[key]) if number is rhs else (spread[key], block)

    def is_same(a: Any, b: Any) -> bool:
        return type(a.scalar) is plain and (a is b or a.name == b.name)

    def common(self: Any, a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, divides: bool) -> Any:
        key = a.name, a_is_scalar, b.name, b_is_scalar, divides
        if key not in promoted:
            promoted[key] = promote(self, a, a_is_scalar, b, b_is_scalar, divides)
        return promoted[key]

    def in_one_shape(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.type.is_block() and rhs.type.is_block() and lhs.type.sizes == rhs.type.sizes:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    def kept(make: Any) -> Any:
        """Whole numbers of a program are made once; no operation writes into what it reads."""

        def made(self: Any, value: Any) -> Any:
            if type(value) is not int:
                return make(self, value)
            key = make.__name__, str(value)
            if key not in whole:
                whole[key] = make(self, value)
            return whole[key]

        return made

    def fits(array: Any, type: Any) -> bool:
        if type.name not in bytes_of:
            is_pointer = isinstance(type, core.pointer_type)
            bytes_of[type.name] = 1 << 30 if is_pointer else max(8, type.primitive_bitwidth) // 8
        return bool(array.itemsize <= bytes_of[type.name])

    patch.setattr(core, "_unwrap_if_constexpr", unwrap_at_once)
    patch.setattr(plain, "__eq__", is_equal)
    patch.setattr(core.block_type, "with_element_ty", block_of)
    patch.setattr(core.block_type, "to_ir", block_in_ir)
    patch.setattr(semantic, "binary_op_type_checking_impl", checked)
    patch.setattr(semantic, "computation_type_impl", common)
    patch.setattr(semantic, "broadcast_impl_value", in_one_shape)
    for bits in (8, 16, 32, 64):
        for name in (f"get_int{bits}", f"get_uint{bits}"):
            patch.setattr(builder, name, kept(getattr(builder, name)))
    patch.setattr(interpreter, "_validate_np_data_size", fits)


def _call_at_once(interpreter: Any, patch: pytest.MonkeyPatch) -> None:
    """Call operations directly, without the two or three functions around them that check the caller."""
    core, semantic = interpreter.tl.core, interpreter.interpreter_semantic
    around = core.builtin(lambda: None).__code__

    def patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        fn = member.__wrapped__ if getattr(member, "__code__", None) is around else member

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return fn(*args, **kwargs)

        scope.set_attr(obj, name, quick(name, call) if obj is core.tensor else call)

    quick = _quick(interpreter)
    patch.setattr(interpreter, "_patch_attr", patch_attr)


def _make_handles_at_once(interpreter: Any, patch: pytest.MonkeyPatch) -> None:
    """Create handles without a check of their data's size. Operations that can widen their data check it."""

    def handle(self: Any, data: Any, dtype: Any) -> None:
        self.data, self.dtype, self.attr = data, dtype, {}

    patch.setattr(interpreter.TensorHandle, "__init__", handle)


def _shift_bfloat16(interpreter: Any, patch: pytest.MonkeyPatch) -> None:
    """Convert between bfloat16 and float32 by a shift, as the interpreter does with 20 operations.

    The interpreter has a rule of its own for numbers below the normal ones.
    """
    core, convert = interpreter.tl.core, interpreter._convert_float

    def shift(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if rounding is None and {source.name, target.name} == {"bf16", "fp32"}:
            bits = data.view(np.uint16 if source is core.bfloat16 else np.uint32)
            one = 1 << (source.primitive_bitwidth - 9)  # the smallest normal number
            magnitude = bits & (one * 256 - 1)
            if not ((magnitude - 1) < one - 1).any():
                if source is core.bfloat16:
                    return bits.astype(np.uint32) << 16
                return (bits >> 16).astype(np.uint16)
        return convert(data, source, target, rounding)

    patch.setattr(interpreter, "_convert_float", shift)


def _list_builtins_once(interpreter: Any, patch: pytest.MonkeyPatch) -> None:
    """List the functions to patch once. The interpreter searches all members of the language for each launch."""
    is_builtin, builtins = interpreter.tl.core.is_builtin, {}

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        if package not in builtins:
            builtins[package] = [(name, each) for name, each in inspect.getmembers(package) if is_builtin(each)]
        for name, member in builtins[package]:
            interpreter._patch_attr(package, name, member, builder, scope)

    patch.setattr(interpreter, "_patch_builtin", patch_builtin)


_UFUNCS: dict[str, Any] = {
    "__add__": np.add, "__sub__": np.subtract, "__mul__": np.multiply, "__truediv__": np.divide,
    "__and__": np.bitwise_and, "__or__": np.bitwise_or, "__xor__": np.bitwise_xor, "__lshift__": np.left_shift,
    "__rshift__": np.right_shift, "__lt__": np.less, "__le__": np.less_equal, "__gt__": np.greater,
    "__ge__": np.greater_equal, "__eq__": np.equal, "__ne__": np.not_equal,
}  # fmt: skip


def _quick(interpreter: Any) -> Callable[[str, Any], Any]:
    """Return a function that makes a method of tensors quick.

    From the second call with the same types on, an operation is a single call of NumPy. The first call checks the
    types. NumPy broadcasts as Triton does. Operations with promotion, and those of types that NumPy lacks, are left as
    they are.
    """
    core, handle_type = interpreter.tl.core, interpreter.TensorHandle
    semantic = interpreter.interpreter_semantic
    same_in_numpy = {
        each.name
        for each in (
            core.int8, core.int16, core.int32, core.int64, core.uint8, core.uint16, core.uint32, core.uint64,
            core.float32, core.float64,
        )
    }  # fmt: skip
    plans: dict[Any, Any] = {}
    new = object.__new__

    def result(data: Any, dtype: Any, facts: dict[str, Any]) -> Any:
        handle, tensor = new(handle_type), new(core.tensor)
        handle.data, handle.dtype, handle.attr = data, dtype, {}
        members = vars(tensor)
        members.update(facts)
        members["handle"] = handle
        return tensor

    def facts_of(tensor: Any) -> dict[str, Any]:
        return {name: value for name, value in vars(tensor).items() if name != "handle"}

    def binary(name: str, slow: Any) -> Any:
        def operate(self: Any, other: Any, **options: Any) -> Any:
            kind = type(other)
            if kind is core.constexpr:
                other = other.value
                kind = type(other)
            if kind is core.tensor:
                key = name, self.type.name, other.type.name
            elif kind is int:
                key = name, self.type.name, other
            elif kind is float:
                key = name, self.type.name, repr(other)
            else:
                return slow(self, other)
            plan = plans.get(key)
            if plan:
                data = other.handle.data if plan[1] is None else plan[1]
                return result(plan[0](self.handle.data, data), plan[2], plan[3])
            got = slow(self, other)
            if plan is None:
                plans[key] = plan_of(name, self, other, got)
            return got

        return operate

    def plan_of(name: str, self: Any, other: Any, got: Any) -> Any:
        plain, compute = self.dtype.name, _UFUNCS[name]
        if type(other) is core.tensor:
            if name == "__truediv__":  # quotients of whole numbers are float32
                types = {"fp32", "fp64"}
            elif name in ("__and__", "__or__", "__xor__"):
                types = same_in_numpy | {"int1"}
            else:
                types = same_in_numpy
            if name == "__add__" and self.dtype.is_ptr() and other.dtype.name in ("int32", "int64"):
                width = max(1, self.dtype.element_ty.primitive_bitwidth // 8)
                compute = lambda pointers, offsets: pointers + width * offsets.astype(np.uint64)  # noqa: E731
            elif plain != other.dtype.name or plain not in types:
                return ()
            return compute, None, got.handle.dtype, facts_of(got)
        if plain not in same_in_numpy:
            return ()
        left, right = semantic.binary_op_type_checking_impl(self, other)
        return () if left is not self else (compute, right.handle.data, got.handle.dtype, facts_of(got))

    def cast(slow: Any) -> Any:
        def to(self: Any, dtype: Any, fp_downcast_rounding: Any = None, bitcast: Any = False, **options: Any) -> Any:
            if type(dtype) is core.constexpr:
                dtype = dtype.value
            if dtype is self.dtype:
                return self
            if fp_downcast_rounding is not None or type(bitcast) is not bool:
                return slow(self, dtype, fp_downcast_rounding, bitcast)
            key = self.type.name, dtype.name, bitcast
            plan = plans.get(key)
            if plan:
                data = self.handle.data
                return result(data.view(plan[0]) if bitcast else data.astype(plan[0]), plan[1], plan[2])
            got = slow(self, dtype, None, bitcast)
            if plan is None:
                names = {self.dtype.name, dtype.name}
                is_plain = names <= same_in_numpy or names == {"fp16", "fp32"}
                plans[key] = (got.handle.data.dtype, got.handle.dtype, facts_of(got)) if is_plain else ()
            return got

        return to

    def quick(name: str, slow: Any) -> Any:
        return binary(name, slow) if name in _UFUNCS else cast(slow) if name in ("to", "cast") else slow

    return quick


def _leave_out_what_nobody_reads(interpreter: Any, patch: pytest.MonkeyPatch) -> None:
    """Skip the second, 64-bit computation of integer sums and products. It is for an assertion in debug mode."""
    options = interpreter.interpreter_builder.options
    if not options.debug:
        patch.setattr(interpreter.interpreter_builder, "options", replace(options, sanitize_overflow=False))
