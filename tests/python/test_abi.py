"""What leaves the shared libraries: the C++ API with its error, and what Python calls."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import thresher

LIBRARIES = Path(thresher.__file__).parent / "_lib"
HEADER = Path(thresher.__file__).resolve().parents[2] / "include" / "thresher" / "msa.h"
ERROR = {f"{what} for thresher::Error" for what in ("typeinfo", "typeinfo name", "vtable")}
CORE, BINDING = LIBRARIES / "libthresher.so", LIBRARIES / "libthresher_tvm_ffi.so"


def exported(library):
    if shutil.which("nm") is None or not library.exists():
        pytest.skip(f"needs nm and {library.name}")
    command = ["nm", "-D", "--defined-only", "--demangle", str(library)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [line.split(maxsplit=2)[2] for line in lines]


def test_the_library_exports_the_functions_of_its_header_and_its_error():
    if not HEADER.exists():
        pytest.skip("needs the headers of the source tree")
    declared = set(re.findall(r"THRESHER_API[^;(]*?(\w+)\(", HEADER.read_text()))
    assert len(declared) == 16, declared
    names = set(exported(CORE))
    assert names >= ERROR
    functions = {re.sub(r"\[abi:\w+\]", "", name).split("(")[0] for name in names - ERROR}
    assert functions == {f"thresher::{name}" for name in declared}


def test_the_binding_exports_nothing_of_the_core():
    names = exported(BINDING)
    functions = {name for name in names if name.startswith("__tvm_ffi_")}
    assert functions
    assert not [name for name in names if "thresher::" in name and name not in ERROR]
