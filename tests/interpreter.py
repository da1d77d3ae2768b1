"""Triton's interpreter does nothing twice: kernels take less than half the time, and compute the same.

Every operation of a kernel makes types and tensors anew, and each of them unwraps its shape, checks it, and writes
its name. What depends on nothing but a type is kept here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest


@contextmanager
def nothing_twice() -> Iterator[None]:
    """As long as it is open, where kernels are interpreted and the interpreter is made as we know it."""
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    is_on = os.environ.get("TRITON_INTERPRET") == "1"  # else the compiler has the same types
    if not is_on or interpreter is None or not hasattr(interpreter, "_LangPatchScope"):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        _patch_once_a_launch(interpreter, patch)
        _keep_types(interpreter, patch)
        _leave_out_what_nobody_reads(interpreter, patch)
        yield


def _patch_once_a_launch(interpreter: Any, patch: pytest.MonkeyPatch) -> None:
    """It patches its language anew for each function that a kernel calls: half of a test's time.

    Within a launch that finds everything patched already. Looking at three members is enough to know.
    """
    language, patch_all = interpreter.tl, interpreter._patch_lang

    def patch_what_is_not(fn: Any) -> Any:
        members = [language.load, language.tensor.to]
        if language.core in fn.__globals__.values():
            members.append(language.core.load)
        is_new = any(map(language.core.is_builtin, members))
        return patch_all(fn) if is_new else interpreter._LangPatchScope()

    patch.setattr(interpreter, "_patch_lang", patch_what_is_not)


def _keep_types(interpreter: Any, patch: pytest.MonkeyPatch) -> None:
    """What belongs to a type is found by the type's name."""
    core = interpreter.tl.core
    blocks: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
    shapes: dict[str, dict[str, Any]] = {}
    arrays: dict[str, Any] = {}
    new_block, new_tensor, find_dtype = core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, tuple([size.value if isinstance(size, core.constexpr) else size for size in shape])
        if key not in blocks:
            new_block(self, element_ty, shape)
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


def _leave_out_what_nobody_reads(interpreter: Any, patch: pytest.MonkeyPatch) -> None:
    """Each sum or product of integers is computed again in 64 bits, for an assertion that is off unless one debugs."""
    options = interpreter.interpreter_builder.options
    if not options.debug:
        patch.setattr(interpreter.interpreter_builder, "options", replace(options, sanitize_overflow=False))
