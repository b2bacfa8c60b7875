"""Where an equation comes from: its name stack, and who wrote it."""

from __future__ import annotations

import functools
import importlib.util
import os

from dtrans._jax.imports import JaxprEqn


def scope_of(eqn: JaxprEqn) -> str:
    """The name stack of an equation as text, e.g. `transpose(jvp(dense))/dot`."""
    return str(eqn.source_info.name_stack)


def within_scope(eqn: JaxprEqn, outer: JaxprEqn) -> JaxprEqn:
    """`eqn`, inlined out of the call `outer`, under the name stack it had inside that call.

    It takes over the call's traceback: a jitted function is traced once, and its equations remember
    who called it first, which may have been another program.
    """
    info, call = eqn.source_info, outer.source_info
    stack = call.name_stack + info.name_stack if len(call.name_stack) else info.name_stack
    return eqn.replace(source_info=info.replace(name_stack=stack, traceback=call.traceback))


def from_line_of(eqn: JaxprEqn, source: JaxprEqn) -> JaxprEqn:
    """`eqn`, written for the sake of `source`: its name stack, and its line."""
    return eqn.replace(source_info=source.source_info)


@functools.cache
def _library_of(path: str) -> str:
    """The library that a source file belongs to: `jax`, `jaxlib`, `optax` or `dtrans`; "" for a
    file of the user.

    Files are compared with the folders that the libraries are imported from: a user's own folder
    may be called so too.
    """
    for library in ("jax", "jaxlib", "optax", "dtrans"):
        spec = importlib.util.find_spec(library)
        for folder in (spec and spec.submodule_search_locations) or ():
            if os.path.abspath(path).startswith(os.path.join(os.path.abspath(folder), "")):
                return library
    return ""


def line_of(eqn: JaxprEqn) -> str:
    """The user's line that an equation comes from, `model.py:12`; "" where no frame of its
    traceback is the user's."""
    traceback = eqn.source_info.traceback
    for frame in [] if traceback is None else traceback.frames:
        if not _library_of(frame.file_name):
            return f"{os.path.basename(frame.file_name)}:{frame.line_num}"
    return ""


def origin_of(eqn: JaxprEqn) -> str:
    """Who wrote an equation, as far as its traceback tells: `optax.clip_by_global_norm`, or a
    function's own name.

    Of optax it is the transformation that is named: a function that has an `update` inside.
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
