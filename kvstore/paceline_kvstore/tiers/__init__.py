"""Places that hold chunks, from near to far. Each answers None for what it does not have, for whatever reason.

The S3 tier is imported from its own module, for it needs boto3 only where it is used.
"""

from paceline_kvstore.tiers.base import FillableTier, Filling, Lease, Tier
from paceline_kvstore.tiers.disk import DiskOptions, DiskTier
from paceline_kvstore.tiers.guarded import GuardedTier
from paceline_kvstore.tiers.memory import MemoryTier

__all__ = ["DiskOptions", "DiskTier", "FillableTier", "Filling", "GuardedTier", "Lease", "MemoryTier", "Tier"]
