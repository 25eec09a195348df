"""How tests are sorted into units, and units into parts, by what they took before."""

from tests.schedule import PIECE_SECONDS, Units

FILES = {"tests/a.py": 30.0, "tests/b.py": 10.0, "tests/proxy/": 20.0}


def ids(file: str, count: int) -> list[str]:
    """Node ids of one file."""
    return [f"{file}::test_{number}" for number in range(count)]


def test_a_file_is_one_unit_and_a_folder_with_a_dear_fixture_too() -> None:
    """What shares fixtures stays together, and goes out longest first."""
    units = Units([*ids("tests/b.py", 2), *ids("tests/proxy/c.py", 1), *ids("tests/proxy/d.py", 1)], FILES)
    assert units.dearest_first() == ["tests/proxy/", "tests/b.py"]
    assert units.of["tests/proxy/c.py::test_0"] == units.of["tests/proxy/d.py::test_0"]


def test_a_file_of_minutes_is_cut_where_it_stands() -> None:
    """Pieces are neighbours in the order of collection, so that a fixture of the module is begun once more at most."""
    units = Units(ids("tests/a.py", 10), {"tests/a.py": 3.5 * PIECE_SECONDS})
    pieces = [units.of[each] for each in ids("tests/a.py", 10)]
    assert pieces == sorted(pieces) and len(set(pieces)) == 3


def test_parts_share_all_and_are_about_as_long() -> None:
    """Every test is in exactly one part; an unknown file counts as well."""
    node_ids = [each for file in (*FILES, "tests/new.py") for each in ids(file, 3)]
    units = Units(node_ids, FILES)
    parts = units.parts(2)
    assert not parts[0] & parts[1] and parts[0] | parts[1] == set(units.of.values())
    lengths = [sum(units.seconds[unit] for unit in part) for part in parts]
    assert abs(lengths[0] - lengths[1]) <= 5
