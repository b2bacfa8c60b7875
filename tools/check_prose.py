"""Check of prose: finds docstrings, comments, messages and pages that break the rules.

    python -m tools.check_prose              the folders and files that `tools/prose.txt` lists
    python -m tools.check_prose dtrans/ir    a folder, a module or a page

CONTRIBUTING.md has the rules. A program can check these:

- Functions start with an imperative verb. Docstrings never start with a wh-word.
- "of" shows possession: `is of`, `are of`, `of which` and `of whom` are not used.
- Sentences of docstrings and pages have 25 words at most, pages 1,200 words, lines 100 characters.
- No name is, starts with or ends with a participle such as `made`.
- A statement has at most one comprehension.

`ruff check --select D401` finds verbs in another mood; this module finds sentences without a verb.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path


ROOT = Path(__file__).resolve().parent.parent
LISTED = ROOT / "tools" / "prose.txt"

MAX_WORDS = 25
MAX_PAGE_WORDS = 1200
MAX_COLUMNS = 100

WH_WORDS = {"what", "whether", "which", "how", "who", "whose", "whom", "where", "when", "why"}
NOT_VERBS = set(
    re.findall(
        r"\w+",
        "a all an and another any as at both by each either every for from if in it its no none "
        "nothing of on one other others some that the their these they this those to with",
    )
)
# words that no sentence starts with; "when" and "where" are absent, because they begin conditions
QUESTIONS = {"what", "whether", "how"}
# words that follow nouns: a docstring with one of these as its second word starts with a noun
AFTER_NOUNS = {"of", "that", "which", "whose", "where"}
# verbs that may also stand before these words, as in "Check that"
BEFORE_CLAUSES = {"warn", "record", "note", "check", "ensure", "dispose", "assume", "think"}
# endings of verbs that look like plural nouns, such as "pass" and "focus"
VERBS_IN_S = ("ss", "focus", "bias", "canvas")

CLAUSES = re.compile(r"\b(is|are) of\b|\bof (which|whom)\b", re.IGNORECASE)
PARTICIPLES = {"made", "given", "held", "own", "told", "whole", "kept", "turned"}

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)

Finding = tuple[Path, int, str]


def listed(text: str) -> list[str]:
    """Return the names in a list, one per line. A comment begins with `#`."""
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    return list(filter(None, lines))


def check_file(path: Path) -> Iterator[Finding]:
    """Find the lines of a Python file or of a page that break a rule."""
    text = path.read_text()
    if path.suffix != ".py":
        yield from ((path, number, fault) for number, fault in check_page(text))
        return
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > MAX_COLUMNS:
            yield path, number, f"{len(line)} columns, at most {MAX_COLUMNS}"
    for number, fault in [*check_source(text), *check_statements(text)]:
        yield path, number, fault


# -- pages -----------------------------------------------------------------------------------------


def check_page(text: str) -> Iterator[tuple[int, str]]:
    """Find faults in a page of Markdown, without its code, tables and headings."""
    prose, is_code = [], False
    for line in text.splitlines():
        fence = line.lstrip().startswith("```")
        is_code ^= fence
        skipped = fence or is_code or line.startswith(("|", "#", "    "))
        prose.append("" if skipped else line)
    text = "\n".join(prose)
    yield from check_text(text, 1)
    if len(text.split()) > MAX_PAGE_WORDS:
        yield 1, f"the page has {len(text.split())} words, at most {MAX_PAGE_WORDS}"


# -- docstrings, comments and messages -------------------------------------------------------------


def check_source(source: str) -> Iterator[tuple[int, str]]:
    """Find faults in the docstrings, comments, strings and names of a module."""
    tree = ast.parse(source)
    docs: set[ast.AST] = set()
    for node in ast.walk(tree):
        yield from _check_names(node)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                assert isinstance(node.body[0], ast.Expr)
                docs.add(node.body[0].value)
                line = node.body[0].lineno
                yield from ((line, fault) for fault in _check_opening(node, text))
                yield from check_text(text, line)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docs:
            clause = CLAUSES.search(node.value)
            if clause is not None:
                yield node.lineno, f'a string has "{clause[0]}"'
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and (clause := CLAUSES.search(token.string)):
            yield token.start[0], f'a comment has "{clause[0]}"'


def _check_opening(node: ast.AST, text: str) -> Iterator[str]:
    words = [*re.findall(r"[\w'`.-]+", text.splitlines()[0]), "", ""]
    first, second = words[0].lower(), words[1].lower()
    if first in WH_WORDS:
        yield f"a docstring starts with {words[0]!r}"
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not _is_property(node):
        is_plural = first.endswith("s") and not first.endswith(VERBS_IN_S)
        is_noun = second in AFTER_NOUNS and first not in BEFORE_CLAUSES
        if first in NOT_VERBS or is_plural or is_noun:
            yield f"{node.name} starts with {words[0]!r}, not with an imperative verb"


def _is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(d).endswith("property") for d in node.decorator_list)


def _check_names(node: ast.AST) -> Iterator[tuple[int, str]]:
    match node:
        case (
            ast.FunctionDef(name=name)
            | ast.AsyncFunctionDef(name=name)
            | ast.ClassDef(name=name)
            | ast.arg(arg=name)
            | ast.Name(id=name, ctx=ast.Store())
            | ast.Attribute(attr=name, ctx=ast.Store())
            | ast.alias(asname=str(name))
            | ast.ExceptHandler(name=str(name))
        ):
            words = re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+", name.strip("_")) or [""]
            if {words[0].lower(), words[-1].lower()} & PARTICIPLES:
                yield node.lineno, f"{name} is named by a participle"


# -- statements ------------------------------------------------------------------------------------


def check_statements(source: str) -> Iterator[tuple[int, str]]:
    """Find statements with several comprehensions; inner statements are counted separately."""
    for statement in ast.walk(ast.parse(source)):
        if isinstance(statement, ast.stmt):
            count = sum(isinstance(node, COMPREHENSIONS) for node in _expressions(statement))
            if count > 1:
                yield statement.lineno, f"{count} comprehensions in a statement, at most 1"


def _expressions(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield the nodes of a statement that belong to no statement inside it."""
    nodes: list[ast.AST] = [statement]
    while nodes:
        for child in ast.iter_child_nodes(nodes.pop()):
            if not isinstance(child, ast.stmt):
                yield child
                nodes.append(child)


# -- sentences -------------------------------------------------------------------------------------


def check_text(text: str, line: int) -> Iterator[tuple[int, str]]:
    """Find long sentences and clauses with "of" in a text that begins at a line of its file."""
    for start, paragraph in _paragraphs(text):
        if clause := CLAUSES.search(re.sub(r"`[^`]*`", "x", paragraph)):
            yield line + start, f'"{clause[0]}" in: {paragraph[:60]}'
        for sentence in re.split(r"(?<=[.?!:])\s+", paragraph):
            # a span of code counts as one word
            words = re.sub(r"`[^`]*`", "x", sentence).split()
            count = sum(re.search(r"[^\W_]", word) is not None for word in words)
            if words and words[0].lower() in QUESTIONS:
                yield line + start, f"a sentence starts with {words[0]!r}: {sentence[:60]}"
            if count > MAX_WORDS:
                yield line + start, f"{count} words, at most {MAX_WORDS}: {sentence[:60]}"


def _paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Split a text into paragraphs, items of lists, arguments and rows of tables."""
    start, found, before = 0, list[str](), 0
    for number, line in enumerate(text.splitlines()):
        indent = len(line) - len(line.lstrip())
        stripped = line.strip()
        begins = (
            not stripped
            or indent < before
            or re.match(r"[-*] |\d+\. |>>> |\.\.\. |[\w, *`]+: ", stripped) is not None
            or "  " in stripped
        )
        if begins and found:
            yield start, " ".join(found)
            found = []
        if stripped:
            start = start if found else number
            found.append(re.sub(r"^([-*] |\d+\. )", "", stripped))
            before = indent
    if found:
        yield start, " ".join(found)


def check(names: list[str]) -> list[Finding]:
    """Return the faults in folders and files, by their names in the repository."""
    findings: list[Finding] = []
    for name in names:
        path = ROOT / name
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        for file in files:
            findings += check_file(file)
    return findings


def main() -> int:
    """Print the faults in listed or named folders; return the exit status."""
    names = sys.argv[1:] or listed(LISTED.read_text())
    findings = check(names)
    for path, line, fault in findings:
        print(f"{path.relative_to(ROOT)}:{line}: {fault}")
    sources = [name for name in names if not name.endswith(".md")]
    if not sources:
        return bool(findings)
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--quiet", "--select", "D401"]
    moods = subprocess.run([*ruff, "--output-format", "concise", *sources], cwd=ROOT)
    return bool(findings or moods.returncode)


if __name__ == "__main__":
    sys.exit(main())
