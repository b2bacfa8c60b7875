"""Text and HTML of programs (a list of ops) and of plans (a table and notes)."""

from __future__ import annotations

import html as html_escape
import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from dtrans._jax import is_jaxpr, opened


class ShownOp(Protocol):
    """Fields of an op that a listing shows (`dtrans.ir.op_list.Op`)."""

    @property
    def type(self) -> str: ...
    @property
    def role(self) -> str: ...
    @property
    def inputs(self) -> Sequence[str]: ...
    @property
    def outputs(self) -> Sequence[str]: ...
    @property
    def attrs(self) -> Mapping[str, Any]: ...


class ShownProgram(Protocol):
    """Fields of a program that a listing shows (`dtrans.ir.program.Program`)."""

    @property
    def name(self) -> str: ...
    @property
    def guessed(self) -> bool: ...
    @property
    def outvars(self) -> Mapping[str, Any]: ...
    @property
    def inputs(self) -> Mapping[str, Any]: ...
    @property
    def outputs(self) -> Mapping[str, Any]: ...
    @property
    def ops(self) -> Sequence[ShownOp]: ...
    @property
    def value_names(self) -> Mapping[Any, str]: ...


COLOURS = {
    "forward": "#1f6feb",
    "backward": "#8250df",
    "optimize": "#bc4c00",
    "lr_sched": "#9a6700",
    "rpc": "#cf222e",
    "dist": "#1a7f37",
}


def _is_empty(value: Any) -> bool:
    return value is None or value is False or (isinstance(value, (tuple, dict, str)) and not value)


def short_type(aval: Any) -> str:
    """Return a type as jaxprs print it: `f32[4,2]`."""
    if hasattr(aval, "str_short"):
        return str(aval.str_short(short_dtypes=True))
    return f"{aval.dtype}{list(aval.shape)}"


def literal(atom: Any) -> str:
    """Return the short text of a literal operand."""
    value = np.asarray(atom.val)
    if value.ndim == 0 and value.dtype.kind in "biufc":
        return f"{value.item()!r:.12}"
    return f"<{short_type(atom.aval)}>"


def attribute(value: Any) -> str:
    """Return the value of an op's attribute as one line of at most 120 characters."""
    if is_jaxpr(value):
        return f"<jaxpr, {len(opened(value).eqns)} equations>"
    if isinstance(value, tuple) and value and not isinstance(value[0], (int, float, str, tuple)):
        return f"<{len(value)} x {type(value[0]).__name__}>"
    text = str(value)
    # functions, e.g. derivative rules: their text contains an address, which differs in each run
    if "\n" in text or text.startswith("<"):
        return f"<{type(value).__name__}>"
    if len(text) <= 120:
        return text
    return text[:117] + "..."


def op_line(op: ShownOp) -> str:
    """Return an op as one line of text: `outputs = type inputs [attributes]`."""
    attrs = ", ".join(f"{k}={attribute(v)}" for k, v in op.attrs.items() if not _is_empty(v))
    line = f"{op.type} {' '.join(op.inputs)}".rstrip()
    if op.outputs:
        line = f"{', '.join(op.outputs)} = {line}"
    if attrs:
        line += f"  [{attrs}]"
    return line


def without_addresses(text: str) -> str:
    """Remove object addresses from a text, because they differ between processes."""
    return re.sub(r"0x[0-9a-f]+", "", text)


GUESSED = "roles are guessed from scope names; the programs of a plan have exact roles"


def text(program: ShownProgram) -> str:
    """Return a program as text: inputs, one line for each op with its role, and outputs."""
    lines = [f"program {program.name}" + (f": {GUESSED}" if program.guessed else "")]
    lines += [f"  in   {n}: {short_type(t)}" for n, t in program.inputs.items()]
    lines += [f"  {op.role:<9}{op_line(op)}" for op in program.ops]
    names = program.value_names
    for name, atom in program.outvars.items():
        source = literal(atom) if hasattr(atom, "val") else names[atom]
        lines.append(
            f"  out  {name}: {short_type(atom.aval)}"
            + (f" = {source}" if source.rstrip("'") != name else "")
        )
    return "\n".join(lines)


MANY_OPS = 40  # ops of a program that a notebook shows without folding
# Script that hides the rows without the text in the search box, and opens the groups with it.
_SEARCH = (
    "const text = this.value.toLowerCase();"
    "for (const group of this.parentNode.querySelectorAll('details')) {"
    "let found = 0;"
    "for (const row of group.querySelectorAll('tr')) {"
    "const fits = row.textContent.toLowerCase().includes(text);"
    "row.style.display = fits ? '' : 'none'; found += fits;}"
    "group.open = text !== '' && found > 0;}"
)


def html(program: ShownProgram) -> str:
    """Return a program as HTML, with a foldable table for each run of ops that have one role.

    A program of more than `MANY_OPS` ops opens folded, with a search box.
    """
    esc = html_escape.escape
    is_long = len(program.ops) > MANY_OPS
    groups = ""
    for role, ops in itertools.groupby(program.ops, lambda op: op.role):
        rows = []
        for op in ops:
            code = f"<code>{esc(op_line(op))}</code>"
            rows.append(f"<tr><td style='text-align:left'>{code}</td></tr>")
        groups += (
            f"<details{'' if is_long else ' open'}><summary style='color:{COLOURS[role]}'>{role}: "
            f"{len(rows)} ops</summary><table>{''.join(rows)}</table></details>"
        )
    search = ""
    if is_long:
        search = f'<input type="search" placeholder="search ops" oninput="{esc(_SEARCH)}">'
    inputs = ", ".join(f"{esc(n)}: {esc(short_type(t))}" for n, t in program.inputs.items())
    outputs = ", ".join(f"{esc(n)}: {esc(short_type(t))}" for n, t in program.outputs.items())
    return (
        f"<details open><summary><b>program {esc(program.name)}</b>: {len(program.ops)} ops"
        f"{f'; {GUESSED}' if program.guessed else ''}</summary>"
        f"<p>in <code>{inputs}</code></p>{search}{groups}<p>out <code>{outputs}</code></p>"
        "</details>"
    )


def plan_text(
    title: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    notes: Sequence[str],
    *,
    right: Collection[int],
) -> str:
    """Return a plan as text: title, table, notes; `right` lists the right-aligned columns."""
    table = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [title]
    for row in table:
        cells = []
        for i, (cell, width) in enumerate(zip(row, widths, strict=True)):
            cells.append(cell.rjust(width) if i in right else cell.ljust(width))
        lines.append(("  " + "  ".join(cells)).rstrip())
    return "\n".join([*lines, *notes])


def plan_html(
    title: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    notes: Sequence[str],
    *,
    code: int,
) -> str:
    """Return a plan as HTML: title, table, notes; column number `code` is in code font."""
    esc = html_escape.escape
    body = ""
    for row in rows:
        cells = [f"<td>{esc(text)}</td>" for text in row]
        cells[code] = f"<td style='text-align:left'><code>{esc(row[code])}</code></td>"
        body += f"<tr>{''.join(cells)}</tr>"
    head = "".join(f"<th>{esc(h)}</th>" for h in header)
    listed = "".join(f"<li>{esc(n)}</li>" for n in notes)
    return f"<b>{esc(title)}</b><table><tr>{head}</tr>{body}</table><ul>{listed}</ul>"


def folded_html(title: str, body: str) -> str:
    """Return HTML that shows only a title until the reader unfolds it.

    Args:
      title: text.
      body: HTML.
    """
    return f"<details><summary>{html_escape.escape(title)}</summary>{body}</details>"
