"""A BLAS of a few lines, compiled on the spot, which does what a test wants; without a compiler it skips."""

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = r"""
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int is(const char *fault) {
    const char *wanted = getenv("FAKE_BLAS");
    return wanted != NULL && strcmp(wanted, fault) == 0;
}

__attribute__((constructor)) static void begin(void) {
    if (is("crashes")) abort();
    while (is("hangs")) pause();
}

const char *openblas_get_config(void) { return "OpenBLAS 9.8.7 NO_AFFINITY"; }

void cblas_sgemm(int order, int left, int right, int m, int n, int k, float alpha, const float *a, int lda,
                 const float *b, int ldb, float beta, float *c, int ldc) {
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) {
            float sum = 0;
            for (int l = 0; l < k; l++) sum += (left == 111 ? a[i * lda + l] : a[l * lda + i])
                                             * (right == 111 ? b[l * ldb + j] : b[j * ldb + l]);
            c[i * ldc + j] = alpha * sum + (beta == 0 && !is("reads") ? 0 : beta * c[i * ldc + j]);
        }
    if (is("errs") && m > 8) c[m / 2] += 0.125f;
}
"""
"""FAKE_BLAS in the environment names its fault: it ends the process or waits for ever when it is loaded, errs in one
number of a big product, or reads what stands where a result goes."""


def fake_blas(folder: Path, *needed: Path) -> Path:
    """The library, which needs these others, under the name of OpenBLAS."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler here")
    source, library = folder / "blas.c", folder / "libopenblas.so.0"
    source.write_text(SOURCE, "utf-8")
    subprocess.run([compiler, "-shared", "-fPIC", "-Wl,--no-as-needed", "-o", library, source, *needed], check=True)
    return library
