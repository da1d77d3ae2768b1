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
        _make_bfloat16_constants(interpreter, patch)
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
    """Check and broadcast equal types without work. Most operations have equal types."""
    core, semantic, builder = interpreter.tl.core, interpreter.TritonSemantic, interpreter.InterpreterBuilder
    plain: Any = type(core.float32)
    unwrap, check = core._unwrap_if_constexpr, semantic.binary_op_type_checking_impl
    broadcast = semantic.broadcast_impl_value
    simple = {int, float, str, bool, type(None), plain, core.block_type, core.pointer_type, core.tensor}
    whole: dict[tuple[str, str], Any] = {}
    spread: dict[tuple[Any, ...], Any] = {}  # a number as a block

    def unwrap_at_once(o: Any) -> Any:
        return o if type(o) in simple else unwrap(o)

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

    patch.setattr(core, "_unwrap_if_constexpr", unwrap_at_once)
    patch.setattr(semantic, "binary_op_type_checking_impl", checked)
    patch.setattr(semantic, "broadcast_impl_value", in_one_shape)
    for bits in (8, 16, 32, 64):
        for name in (f"get_int{bits}", f"get_uint{bits}"):
            patch.setattr(builder, name, kept(getattr(builder, name)))


def _make_bfloat16_constants(interpreter: Any, patch: pytest.MonkeyPatch) -> None:
    """Let kernels make bfloat16 constants other than zero. Before Triton 3.9, the interpreter cannot."""

    def made(self: Any, value: Any) -> Any:
        return self.create_fp_trunc(self.get_fp32(value), interpreter.tl.bfloat16)

    if not hasattr(interpreter.InterpreterBuilder, "get_bf16"):
        patch.setattr(interpreter.InterpreterBuilder, "get_bf16", made, raising=False)


def _call_at_once(interpreter: Any, patch: pytest.MonkeyPatch) -> None:
    """Call operations directly, without the two or three functions around them that check the caller."""
    core, semantic = interpreter.tl.core, interpreter.interpreter_semantic
    around = core.builtin(lambda: None).__code__

    def patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        fn = member.__wrapped__ if getattr(member, "__code__", None) is around else member

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return fn(*args, **kwargs)

        scope.set_attr(obj, name, quick(obj, name, call))

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
    "__ge__": np.greater_equal, "__eq__": np.equal, "__ne__": np.not_equal, "__mod__": np.fmod,
    "__floordiv__": lambda a, b: (a - np.fmod(a, b)) // b,
    "__radd__": lambda a, b: b + a, "__rsub__": lambda a, b: b - a, "__rmul__": lambda a, b: b * a,
}  # fmt: skip
_PROMOTED = {name for name in _UFUNCS if name.strip("_") in ("add", "sub", "mul", "lt", "le", "gt", "ge", "eq", "ne")}


def _quick(interpreter: Any) -> Callable[[Any, str, Any], Any]:
    """Return a function that makes operations quick: methods of tensors, and functions of the language.

    From the second call with the same types on, an operation is a single call of NumPy. The first call checks the
    types, and its result is compared. NumPy broadcasts as Triton does. Operations of types that NumPy lacks are left as
    they are.
    """
    core, handle_type = interpreter.tl.core, interpreter.TensorHandle
    semantic, np_dtype = interpreter.interpreter_semantic, interpreter._get_np_dtype
    numbers = {
        each.name
        for each in (
            core.int8, core.int16, core.int32, core.int64, core.uint8, core.uint16, core.uint32, core.uint64,
            core.float16, core.float32, core.float64,
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

    def planned(compute: Any, got: Any, *operands: Any) -> Any:
        """Return a plan if it gives the result that Triton gave."""
        facts = {name: value for name, value in vars(got).items() if name != "handle"}
        data, expected = compute(*operands), got.handle.data
        is_same = data.dtype == expected.dtype and data.shape == expected.shape
        return (compute, got.handle.dtype, facts) if is_same and data.tobytes() == expected.tobytes() else ()

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
                return result(plan[0](self.handle.data, other.handle.data if kind is core.tensor else None), *plan[1:])
            got = slow(self, other)
            if plan is None:
                operand = other.handle.data if kind is core.tensor else None
                compute = compute_of(name, self, other)
                plans[key] = planned(compute, got, self.handle.data, operand) if compute else ()
            return got

        return operate

    def compute_of(name: str, self: Any, other: Any) -> Any:
        """Return a function of the operands' arrays. That of a Python number is None."""
        compute, is_tensor = _UFUNCS[name], type(other) is core.tensor
        if self.dtype.is_ptr():
            width = max(1, self.dtype.element_ty.primitive_bitwidth // 8)
            if name != "__add__" or (is_tensor and other.dtype.name not in ("int32", "int64")):
                return None
            if is_tensor:
                return lambda pointers, offsets: pointers + width * offsets.astype(np.uint64)
            offset = np.uint64(width * other % (1 << 64))
            return lambda pointers, _: pointers + offset
        types = numbers
        if name in ("__and__", "__or__", "__xor__"):
            types = numbers | {"int1"}
        elif name == "__truediv__":  # quotients of whole numbers are float32
            types = {"fp32", "fp64"}
        if name not in _PROMOTED and is_tensor and self.dtype.name != other.dtype.name:
            return None
        if not {self.dtype.name, *([other.dtype.name] if is_tensor else [])} <= types:
            return None
        left, right = semantic.binary_op_type_checking_impl(self, other)
        kind = np_dtype(left.dtype)
        if not is_tensor:
            constant = right.handle.data
            if left is not self:
                return None
            return lambda data, _: compute(data, constant)
        if self.dtype.name == other.dtype.name:
            return compute
        return lambda a, b: compute(a.astype(kind, copy=False), b.astype(kind, copy=False))

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
                return result(plan[0](self.handle.data), *plan[1:])
            got = slow(self, dtype, None, bitcast)
            if plan is None:
                names, kind, source = {self.dtype.name, dtype.name}, got.handle.data.dtype, self.dtype
                compute = (lambda data: data.view(kind)) if bitcast else (lambda data: data.astype(kind))
                if names == {"bf16", "fp32"} and not bitcast:
                    compute = lambda data: interpreter._convert_float(data, source, dtype, None).view(kind)  # noqa: E731
                known = numbers | {"bf16"} if bitcast else numbers - {"fp16"}
                is_plain = names <= known or names in ({"fp16", "fp32"}, {"bf16", "fp32"})
                plans[key] = planned(compute, got, self.handle.data) if is_plain else ()
            return got

        return to

    def indexed(slow: Any) -> Any:
        def item(self: Any, slices: Any, **options: Any) -> Any:
            key = "[]", self.type.name, repr(slices)
            plan = plans.get(key)
            if plan:
                return result(plan[0](self.handle.data), *plan[1:])
            got = slow(self, slices)
            if plan is None:
                shape = got.handle.data.shape
                plans[key] = planned(lambda data: data.reshape(shape), got, self.handle.data)
            return got

        return item

    def load(slow: Any) -> Any:
        def loaded(pointer: Any, mask: Any = None, other: Any = None, **options: Any) -> Any:
            if type(other) is core.tensor or (mask is not None and type(mask) is not core.tensor):
                return slow(pointer, mask, other, **options)
            kept, facts = (None, None) if mask is None else (mask.handle.data, mask.type.name)
            key = "load", pointer.type.name, facts, repr(other)
            plan = plans.get(key)
            if plan:
                return result(plan[0](pointer.handle.data, kept), *plan[1:])
            got = slow(pointer, mask, other, **options)
            if plan is None:
                data, shape, kind = pointer.handle.data, got.handle.data.shape, got.handle.data.dtype
                default = np.zeros(shape, kind)
                if other is not None:
                    default += semantic.cast(semantic.to_tensor(other), pointer.dtype.element_ty).handle.data
                everywhere, fetch = np.ones(shape, bool), interpreter._interpreter.load

                def compute(pointers: Any, mask: Any) -> Any:
                    return fetch(pointers, everywhere if mask is None else np.broadcast_to(mask, shape), default, kind)

                is_plain = data.shape == shape and pointer.dtype.element_ty.name != "int1"
                plans[key] = planned(compute, got, data, kept) if is_plain else ()
            return got

        return loaded

    def constant(name: str, slow: Any) -> Any:
        def made(*arguments: Any, **options: Any) -> Any:
            key = name, repr(arguments)
            if any(type(each) is core.tensor for each in arguments) or len(options) > 1:
                return slow(*arguments, **options)
            if key not in plans:
                got = slow(*arguments, **options)
                plans[key] = planned(lambda: got.handle.data, got)
            compute, *facts = plans[key]
            return result(compute(), *facts)

        return made

    def quick(owner: Any, name: str, slow: Any) -> Any:
        if owner is core.tensor:
            if name in _UFUNCS:
                return binary(name, slow)
            return cast(slow) if name in ("to", "cast") else indexed(slow) if name == "__getitem__" else slow
        if owner in (interpreter.tl, core):
            return constant(name, slow) if name in ("full", "arange") else load(slow) if name == "load" else slow
        return slow

    return quick


def _leave_out_what_nobody_reads(interpreter: Any, patch: pytest.MonkeyPatch) -> None:
    """Skip the second, 64-bit computation of integer sums and products. It is for an assertion in debug mode."""
    options = interpreter.interpreter_builder.options
    if not options.debug:
        patch.setattr(interpreter.interpreter_builder, "options", replace(options, sanitize_overflow=False))
