"""Origin of an equation: its name stack, its source line, and the function that created it."""

from __future__ import annotations

import functools
import importlib.util
import os

from dtrans._jax.imports import JaxprEqn


def scope_of(eqn: JaxprEqn) -> str:
    """Return the name stack of an equation as text, e.g. `transpose(jvp(dense))/dot`."""
    return str(eqn.source_info.name_stack)


def within_scope(eqn: JaxprEqn, outer: JaxprEqn) -> JaxprEqn:
    """Adapt the name stack and the traceback of an equation that is moved out of a call's body.

    Use this function when a call is replaced by its body. The name stack of the call then precedes
    the name stack of the equation. The traceback is the call's: JAX traces a jitted function once,
    so equations of the body have the traceback of the first caller.

    Args:
      eqn: the equation of the body.
      outer: the call.
    """
    info, call = eqn.source_info, outer.source_info
    stack = call.name_stack + info.name_stack if len(call.name_stack) else info.name_stack
    # `is_callback_on_rows` reads the traceback, so such a callback keeps its own
    traceback = info.traceback if is_callback_on_rows(eqn) else call.traceback
    return eqn.replace(source_info=info.replace(name_stack=stack, traceback=traceback))


def is_callback_on_rows(eqn: JaxprEqn) -> bool:
    """Return True if `jax.vmap` wrote a `pure_callback`: each output row then reads one input row.

    A row is an index of dimension 0, along which `vmap` mapped. In each operand, dimension 0 has
    all rows, or has size 1. A callback without `vmap` may have the same parameters, but its outputs
    may combine rows of its operands. Only the traceback distinguishes these two cases. JAX drops
    the traceback if `vmap` is applied to a jitted function: then the result is False.
    """
    if eqn.primitive.name != "pure_callback":
        return False
    traceback = eqn.source_info.traceback
    if eqn.params["vmap_method"] not in ("expand_dims", "broadcast_all") or traceback is None:
        return False
    frames = ((f.function_name, _library_of(f.file_name)) for f in traceback.frames)
    return ("ffi_batching_rule", "jax") in frames


def from_line_of(eqn: JaxprEqn, source: JaxprEqn) -> JaxprEqn:
    """Return `eqn` with the name stack and source line of `source`."""
    return eqn.replace(source_info=source.source_info)


@functools.cache
def _library_of(path: str) -> str:
    """Return the library of a source file: `jax`, `jaxlib`, `optax` or `dtrans`; else "".

    The file must be in the library's folder: a folder of the user may also be called `jax`.
    """
    for library in ("jax", "jaxlib", "optax", "dtrans"):
        spec = importlib.util.find_spec(library)
        for folder in (spec and spec.submodule_search_locations) or ():
            if os.path.abspath(path).startswith(os.path.join(os.path.abspath(folder), "")):
                return library
    return ""


def line_of(eqn: JaxprEqn) -> str:
    """Return the source line of an equation in the user's code, `model.py:12`; "" if unknown."""
    traceback = eqn.source_info.traceback
    for frame in [] if traceback is None else traceback.frames:
        if not _library_of(frame.file_name):
            return f"{os.path.basename(frame.file_name)}:{frame.line_num}"
    return ""


def origin_of(eqn: JaxprEqn) -> str:
    """Return the name of the function that created an equation, in the user's code or in optax.

    In optax, this is the function that defines `update`, such as `optax.clip_by_global_norm`.
    """
    traceback = eqn.source_info.traceback
    for frame in [] if traceback is None else traceback.frames:
        library = _library_of(frame.file_name)
        if library == "optax":
            outer, _, rest = frame.function_name.partition(".")
            if "update" in rest:
                contrib = os.path.basename(os.path.dirname(frame.file_name)) == "contrib"
                return ("optax.contrib." if contrib else "optax.") + outer
        elif not library:
            return frame.function_name.replace(".<locals>", "").removesuffix(".<lambda>")
    return ""
