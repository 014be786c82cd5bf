"""Places that hold chunks, from near to far. Each answers None for what it does not have, for whatever reason."""

from paceline_kvstore.tiers.base import Lease, Tier
from paceline_kvstore.tiers.disk import DiskOptions, DiskTier
from paceline_kvstore.tiers.memory import MemoryTier

__all__ = ["DiskOptions", "DiskTier", "Lease", "MemoryTier", "Tier"]
