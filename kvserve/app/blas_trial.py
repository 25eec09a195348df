"""Runs as a program of its own, with a BLAS preloaded: whether its products in float32 are right. It knows one function
of BLAS and nothing of the package; exit code 0 means that they are, 1 comes with the reason.
"""

import ctypes
import random
import sys
from operator import mul

ROW_MAJOR, PLAIN, TRANSPOSED = 101, 111, 112

SHAPES = ((1, 48, 64), (8, 64, 40), (33, 70, 130))
"""Rows, columns and what is summed over: one token, a few, and enough work that a library shares it among its threads.
It is a multiple of no kernel's block."""

type Matrix = list[list[float]]


def fault() -> str | None:
    """What is wrong with the BLAS of this process, None where nothing is."""
    blas = ctypes.CDLL(None)
    if not hasattr(blas, "cblas_sgemm"):
        return "it was not loaded, or has no cblas_sgemm"
    draw = random.Random(0)
    for num_rows, num_columns, depth in SHAPES:
        left, right = drawn(draw, num_rows, depth), drawn(draw, num_columns, depth)
        expected = [[sum(map(mul, row, column)) for column in right] for row in left]
        if product(blas, left, right) != expected:
            return f"a product of {num_rows} x {depth} by {depth} x {num_columns} was wrong"
    return None


def drawn(draw: random.Random, num_rows: int, num_columns: int) -> Matrix:
    """Eighths of small whole numbers: sums of their products are exact in float32, in whatever order they are."""
    return [[draw.randint(-8, 8) / 8 for _ in range(num_columns)] for _ in range(num_rows)]


def product(blas: ctypes.CDLL, left: Matrix, right: Matrix) -> Matrix:
    """Of `left` and the transposed `right`, as a linear layer asks for it: into memory that holds anything."""
    num_rows, num_columns, depth = len(left), len(right), len(left[0])
    result = (ctypes.c_float * (num_rows * num_columns))(*([float("nan")] * (num_rows * num_columns)))
    blas.cblas_sgemm(
        *(ROW_MAJOR, PLAIN, TRANSPOSED, num_rows, num_columns, depth, ctypes.c_float(1.0)),
        *(flat(left), depth, flat(right), depth, ctypes.c_float(0.0), result, num_columns),
    )
    return [list(result[row * num_columns : (row + 1) * num_columns]) for row in range(num_rows)]


def flat(matrix: Matrix) -> "ctypes.Array[ctypes.c_float]":
    """Row after row."""
    numbers = [number for row in matrix for number in row]
    return (ctypes.c_float * len(numbers))(*numbers)


if __name__ == "__main__":
    sys.exit(fault())  # a text goes to stderr, with exit code 1
