"""Finds and loads libthresher_tvm_ffi.so, which brings libthresher.so along."""

import functools
import os
from pathlib import Path


@functools.cache
def library():
    """The loaded module; its functions are listed in bindings/tvm_ffi/exports.cpp."""
    import tvm_ffi

    folder = Path(os.environ.get("THRESHER_LIBRARY_DIR", Path(__file__).parent / "_lib"))
    path = folder / "libthresher_tvm_ffi.so"
    if not path.exists():
        raise ImportError(
            f"thresher's library was not found at {path}: run `make build` in the source tree or "
            "`pip install .`, or set THRESHER_LIBRARY_DIR"
        )
    return tvm_ffi.load_module(str(path))
