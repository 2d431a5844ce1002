"""Tests of the Python front end, file by file; the numbers themselves are judged in contract/."""
