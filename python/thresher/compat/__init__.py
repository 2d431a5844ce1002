"""Drop-ins for other MSA libraries: change the import, keep the call. See docs/compat.md."""

from . import flash_msa, msa_v1

__all__ = ["flash_msa", "msa_v1"]
