"""What a tier counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TierStats:
    """Counts since the tier was made. `corrupt` also counts chunks of a foreign key or version.

    refused: puts that were not kept, for whatever reason. errors: calls that ended in an I/O error.
    """

    hits: int = 0
    misses: int = 0
    puts: int = 0
    refused: int = 0
    evictions: int = 0
    expired: int = 0
    corrupt: int = 0
    errors: int = 0
