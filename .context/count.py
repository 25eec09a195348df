"""Counts the package: code lines (no blanks, comments, docstrings), files, functions, names that occur twice.

Usage: python .context/count.py [ROOT] [--json]     (ROOT holds kvserve/; standard library only)
"""

import ast
import collections
import io
import statistics
import sys
import tokenize
from pathlib import Path

SKIP = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER}
DEFS = (ast.FunctionDef, ast.AsyncFunctionDef)


def docstring_nodes(tree):
    """Docstrings, and bare strings behind assignments (attribute docstrings)."""
    for node in ast.walk(tree):
        for body in (getattr(node, "body", None), getattr(node, "orelse", None)):
            if isinstance(body, list):
                for item in body:
                    if isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant) and isinstance(item.value.value, str):
                        yield item


def measure(path):
    text = path.read_text("utf-8")
    tree = ast.parse(text)
    doc = {line for node in docstring_nodes(tree) for line in range(node.lineno, node.end_lineno + 1)}
    code = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SKIP:
            code |= set(range(token.start[0], token.end[0] + 1))
    lines = text.splitlines()
    functions = []
    for node in ast.walk(tree):
        if isinstance(node, DEFS):
            functions.append((node.end_lineno - node.lineno + 1, node.name, node.lineno, bool(ast.get_docstring(node))))
    public = [n for n in ast.walk(tree) if isinstance(n, (*DEFS, ast.ClassDef))]
    return {
        "path": path, "lines": len(lines), "code": len(code - doc), "doc": len(doc),
        "comments": sum(line.lstrip().startswith("#") for line in lines),
        "chars": [len(line) for line in lines if line.strip()],
        "functions": functions,
        "classes": [n.name for n in ast.walk(tree) if isinstance(n, ast.ClassDef)],
        "documented": sum(bool(ast.get_docstring(n)) for n in public), "definitions": len(public),
        "blind": [i for i, line in enumerate(lines, 1) if "BLE001" in line],
    }


def quantile(values, share):
    values = sorted(values)
    return values[min(len(values) - 1, int(share * len(values)))]


def print_twice(files, rel):
    names = collections.defaultdict(list)
    for f in files:
        for name in f["classes"]:
            names[name].append(rel(f)[8:])
    print("\nclass names that occur twice:")
    for name, where in sorted(names.items()):
        if len(where) > 1:
            print("  ", name, where)
    stems = collections.defaultdict(list)
    for f in files:
        if f["path"].name not in ("__init__.py", "__main__.py"):
            stems[f["path"].name].append(rel(f)[8:])
    print("file names that occur twice:")
    for name, where in sorted(stems.items()):
        if len(where) > 1:
            print("  ", name, where)


def main():
    root = Path(sys.argv[1] if len(sys.argv) > 1 and not sys.argv[1].startswith("-") else ".")
    files = [measure(path) for path in sorted((root / "kvserve").rglob("*.py"))]
    rel = lambda f: f["path"].relative_to(root).as_posix()
    by = collections.defaultdict(lambda: [0, 0, 0])
    for f in files:
        parts = f["path"].relative_to(root / "kvserve").parts
        key = parts[0] if len(parts) > 1 else "(flat)"
        for i, n in enumerate((1, f["lines"], f["code"])):
            by[key][i] += n
    print(f"{'room':12} files  lines   code")
    for key, (n, lines, code) in sorted(by.items()):
        print(f"{key:12} {n:5} {lines:6} {code:6}")
    total = [sum(v[i] for v in by.values()) for i in range(3)]
    print(f"{'TOTAL':12} {total[0]:5} {total[1]:6} {total[2]:6}")
    sizes = [f["lines"] for f in files]
    print("file lines p50/p90/max", statistics.median(sizes), quantile(sizes, 0.9), max(sizes))
    fns = [(n, rel(f), name, line) for f in files for n, name, line, _ in f["functions"]]
    lens = [n for n, *_ in fns]
    print("functions", len(fns), "p50/p90/max", statistics.median(lens), quantile(lens, 0.9), max(lens))
    print("functions over 60:", [x for x in fns if x[0] > 60])
    print("functions over 45:", sorted((x for x in fns if x[0] > 45), reverse=True))
    doc = sum(f["doc"] for f in files)
    print(f"docstring lines {doc} = {doc / total[1]:.4f} of all lines, {doc / total[2]:.4f} of code; comment lines {sum(f['comments'] for f in files)}")
    documented, definitions = sum(f["documented"] for f in files), sum(f["definitions"] for f in files)
    print(f"definitions with a docstring {documented} of {definitions} = {documented / definitions:.4f}")
    chars = [n for f in files for n in f["chars"]]
    print(f"mean line length (no blanks) {statistics.mean(chars):.2f}")
    print("files over 400 lines:", [(f["lines"], rel(f)) for f in files if f["lines"] > 400])
    print_twice(files, rel)
    blind = [(rel(f), line) for f in files for line in f["blind"]]
    print("blind excepts:", len(blind))
    importers = imports(files, root)
    if "--small" in sys.argv:
        print("\nfiles under 110 lines with one importer:")
        for f in files:
            mod = rel(f)[:-3].replace("/", ".").removesuffix(".__init__")
            who = importers.get(mod, set())
            if f["lines"] < 110 and len(who) == 1 and f["path"].name != "__init__.py":
                print(f"   {rel(f)[8:]:42} {f['lines']:4} {f['code']:4}  <- {next(iter(who))[8:]}")
    if "--flat" in sys.argv:
        print("\nflat files:")
        for f in files:
            r = rel(f)
            if r.count("/") == 1 and f["path"].name != "__init__.py":
                mod = r[:-3].replace("/", ".")
                print(f"   {r[8:]:20} {f['lines']:4} {f['code']:4}  <- {', '.join(sorted(x[8:] for x in importers.get(mod, set())))}")


def imports(files, root):
    """module -> files that import it."""
    mods = {f["path"].relative_to(root).as_posix()[:-3].replace("/", ".").removesuffix(".__init__") for f in files}
    found = collections.defaultdict(set)
    for f in files:
        r = f["path"].relative_to(root).as_posix()
        for node in ast.walk(ast.parse(f["path"].read_text("utf-8"))):
            targets = []
            if isinstance(node, ast.Import):
                targets = [a.name for a in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                targets = [node.module] + [f"{node.module}.{a.name}" for a in node.names]
            for target in targets:
                if target in mods and target != "kvserve":
                    found[target].add(r)
    return found


main()
