"""Moves modules and renames identifiers over code, tests, planted faults and docs. Run in the root of a clean checkout.

    python .context/rooms/rename.py PLAN [--dry]

PLAN has one order per line, `#` begins a comment:

    move kvserve/stage.py kvserve/app/model_swap.py        git mv, imports, dotted strings, paths in toml/md/json
    name Stage ModelSwap kvserve/app/model_swap.py          a class, function, constant or method: where it is defined, then
                                                            every file that imports it (or, with a trailing `*`, every file)
    name tenancy cache_lease kvserve/engine/*.py tests/engine/*.py    a variable: in these files only

Only NAME tokens change in Python files (so no word of a docstring does), besides `Name` in backticks in docstrings, comments
and docs. In mutants/*.toml both texts and `file` follow. A new name that is there already in a file is refused.
"""

import fnmatch, io, json, re, subprocess, sys, tokenize
from pathlib import Path

ROOT = Path.cwd()
DRY = "--dry" in sys.argv
PY = ["kvserve/**/*.py", "tests/**/*.py", "benchmarks/**/*.py", "scripts/**/*.py", "install_and_run.py", "start_llm.py"]
TEXT = ["tests/mutation/mutants/*.toml", "tests/mutation/results.md", "docs/*.md", "*.md", ".context/**/*.md", ".claude/**/*.md",
        "tests/durations.json", "pyproject.toml", "benchmarks/*.md", "benchmarks/results/*.md"]
KEEP = re.compile(r"^(CHANGELOG\.md|\.context/decisions/)")  # history says what it was


def files(patterns):
    return sorted({p for g in patterns for p in ROOT.glob(g) if p.is_file() and ".venv" not in p.parts})


def rel(p):
    return p.relative_to(ROOT).as_posix()


def write(p, old, new):
    if old != new and not DRY:
        p.write_text(new, "utf-8")
    return old != new


def dotted(path):
    return path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def move(old, new):
    a, b = dotted(old), dotted(new)
    if not DRY:
        target = ROOT / new
        target.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["git", "mv", old, new], check=True)
    pa, na = a.rpartition(".")[::2]
    pb, nb = b.rpartition(".")[::2]
    plain = re.compile(rf"(?<![\w.]){re.escape(a)}(?![\w])")
    single = re.compile(rf"^(\s*)from {re.escape(pa)} import (.+)$", re.M)
    count = 0

    def alone(match):
        names = [n.strip() for n in match[2].split("#")[0].strip("()").split(",")]
        mine = [n for n in names if n.split(" as ")[0] == na]
        if not mine:
            return match[0]
        rest = [n for n in names if n not in mine]
        local = mine[0].split(" as ")[1] if " as " in mine[0] else na
        line = f"{match[1]}from {pb} import {nb}" + (f" as {local}" if local != nb else "")
        return line + (f"\n{match[1]}from {pa} import {', '.join(rest)}" if rest else "")

    for p in files(PY + TEXT):
        if KEEP.match(rel(p)):
            continue
        text = p.read_text("utf-8")
        new_text = plain.sub(b, text)
        if p.suffix == ".py" or p.suffix == ".toml":
            new_text = single.sub(alone, new_text)
        new_text = re.sub(rf"(?<![\w/]){re.escape(old)}(?!\w)", new, new_text)
        short_old, short_new = old.removeprefix("kvserve/"), new.removeprefix("kvserve/")
        if p.suffix == ".md" and (old.startswith("kvserve/")):
            new_text = re.sub(rf"`{re.escape(short_old)}`", f"`{short_new}`", new_text)
        count += write(p, text, new_text)
    print(f"move {old} -> {new}: {count} files")


def in_backticks(text, old, new):
    return re.sub(rf"(`[^`\n]*?)(?<![\w]){re.escape(old)}(?![\w])([^`\n]*`)", rf"\g<1>{new}\g<2>", text)


def rename_python(text, old, new):
    out, changed = [], 0
    lines = text.splitlines(keepends=True)
    spots = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME and token.string == old:
            spots.append((token.start, token.end))
        elif token.type == tokenize.NAME and token.string == new:
            return None, 0
    for (row, start), (_, end) in reversed(spots):
        line = lines[row - 1]
        lines[row - 1] = line[:start] + new + line[end:]
        changed += 1
    body = "".join(lines)
    again = in_backticks(body, old, new)
    return again, changed + (again != body)


def name(old, new, where, everywhere):
    scope = []
    defined = [p for p in files(PY) if any(fnmatch.fnmatch(rel(p), w.removesuffix("*") if w.endswith("*.py*") else w) for w in where)]
    if everywhere:
        scope = files(PY)
    elif len(where) == 1 and "*" not in where[0]:
        mod = dotted(where[0])
        imports = re.compile(rf"(?:from {re.escape(mod)} import|import {re.escape(mod)}\b|from {re.escape(mod.rpartition('.')[0])} import [^\n]*\b{mod.rpartition('.')[2]}\b)")
        scope = [*defined, *(p for p in files(PY) if p not in defined and imports.search(p.read_text("utf-8")))]
    else:
        scope = defined
    count, hits, refused = 0, 0, []
    for p in scope:
        text = p.read_text("utf-8")
        if not re.search(rf"\b{re.escape(old)}\b", text):
            continue
        changed, n = rename_python(text, old, new)
        if changed is None:
            refused.append(rel(p))
            continue
        hits += n
        count += write(p, text, changed)
    names = {rel(p) for p in scope}
    for p in files(["tests/mutation/mutants/*.toml"]):
        text = p.read_text("utf-8")
        parts = re.split(r"(?m)^(?=\[\[)", text)
        new_parts = [
            re.sub(rf"(?<![\w]){re.escape(old)}(?![\w])", new, part) if (m := re.search(r'^file = "(.+)"', part, re.M)) and m[1] in names else part
            for part in parts
        ]
        hits += "".join(new_parts) != text
        write(p, text, "".join(new_parts))
    for p in files(["docs/*.md", "*.md", ".context/*.md", ".claude/**/*.md", "benchmarks/*.md"]):
        if KEEP.match(rel(p)) or not old[0].isupper():
            continue
        text = p.read_text("utf-8")
        hits += write(p, text, in_backticks(text, old, new))
    print(f"name {old} -> {new}: {hits} places in {count} files" + (f"; REFUSED (new name is there): {refused}" if refused else ""))


def main():
    if subprocess.run(["git", "status", "--porcelain", "-uno"], capture_output=True, text=True).stdout and not DRY:
        sys.exit("commit first: git diff is the only review of what this did")
    for line in Path(sys.argv[1]).read_text("utf-8").splitlines():
        words = line.split("#")[0].split()
        if not words:
            continue
        if words[0] == "move":
            move(words[1], words[2])
        elif words[0] == "name":
            name(words[1], words[2], [w for w in words[3:] if w != "*"], "*" in words[3:])
        else:
            sys.exit(f"unknown order: {line}")


main()
