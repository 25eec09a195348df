"""Which tests run which lines of the package, read from what coverage.py kept of a run with a context for each test."""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from coverage import CoverageData

from tests.mutation.mutants import Edit, Mutant


class CoverageMap:
    """Answers which tests touch a mutant; `root` is the tree that was measured."""

    def __init__(self, data_file: Path, root: Path) -> None:
        self._data = CoverageData(str(data_file))
        self._data.read()
        self._root = root

    def tests_of(self, mutant: Mutant) -> set[str]:
        """Node ids of the tests that ran a line of the mutant.

        Lines that run at import (tables, constants) belong to no test: then it is all that ran any line of the file.
        """
        found = {test for edit in mutant.edits for test in self._tests_of_lines(edit)}
        return found or {test for edit in mutant.edits for test in self._tests_of_file(edit.file)}

    def _contexts(self, file: str) -> dict[int, list[str]]:
        return self._data.contexts_by_lineno(str(self._root / file))

    def _tests_of_lines(self, edit: Edit) -> set[str]:
        lines = edit.lines((self._root / edit.file).read_text("utf-8"))
        contexts = self._contexts(edit.file)
        return _node_ids(context for line in lines for context in contexts.get(line, []))

    def _tests_of_file(self, file: str) -> set[str]:
        return _node_ids(context for contexts in self._contexts(file).values() for context in contexts)


def _node_ids(contexts: Iterable[str]) -> set[str]:
    """pytest-cov writes `node id|phase`; the empty context is the time of the imports."""
    return {context.rpartition("|")[0] for context in contexts if context}


def in_running_order(tests: Iterable[str], package: str, seconds: dict[str, float]) -> list[str]:
    """The package's own tests first, then files by how long they take: what is cheap and near decides most often."""
    by_file: dict[str, list[str]] = defaultdict(list)
    for test in tests:
        by_file[test.partition("::")[0]].append(test)

    def cost(file: str) -> tuple[bool, float, str]:
        return not (package and file.startswith(f"tests/{package}/")), seconds.get(file, 5.0), file

    return [test for file in sorted(by_file, key=cost) for test in sorted(by_file[file])]
