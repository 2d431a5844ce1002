"""Drop-ins for other MSA libraries: change the import, keep the call. See docs/compat.md."""

from . import flash_msa

__all__ = ["flash_msa"]
