"""What an engine is told of the BLAS: enough to tell it from any other."""

from pathlib import Path

from kvserve.app.blas import Blas, what_computes


def test_another_build_under_the_same_name_is_told_from_it(tmp_path: Path) -> None:
    """By its file, where it has one that can be looked at."""
    found = Blas("OpenBLAS 0.3.21", str(tmp_path / "blas.so"))
    builds = [found.build]
    for text in ("one", "other"):
        (tmp_path / "blas.so").write_text(text)
        builds += [found.build]
    assert len(set(builds)) == 3 and all(build.startswith(f"OpenBLAS 0.3.21 {found.path}") for build in builds)


def test_variables_that_choose_kernels_are_told_from_others() -> None:
    """A kernel that errs is no rounding: what was found out of a model with another one does not count."""
    library = Blas("OpenBLAS 0.3.21", "/x/blas.so")
    names = ("MLX_DISABLE_COMPILE", "OPENBLAS_CORETYPE", "MKL_ENABLE_INSTRUCTIONS", "NVIDIA_TF32_OVERRIDE")
    environs = [{}, *({name: value} for name in names for value in "12")]
    assert len({what_computes(found, environ) for found in (None, library) for environ in environs}) == 2 * len(
        environs
    )
    assert what_computes(library, {"HOME": "/x", "API_KEY": "secret"}) == what_computes(library, {})
