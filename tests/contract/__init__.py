"""The contract of Thresher, one suite for every backend.

    cases.py        problems: random data, packed or batched, poisoned padding
    run.py          one call of the public functions, results brought back to packed form
    plain.py        plain PyTorch in the dtype itself: the yardstick of the half precisions
    tolerances.py   the one table of tolerances
    checks.py       comparison with tests/reference64
    test_*.py       the promises; test_rows.py says which test keeps which
    random_problems.py   problems without end, each from its number (`make nightly`)

`pytest tests/contract --device cuda` runs the same files on a GPU.
"""
