"""Where attention state (KV) goes when it leaves the device: keys, the chunk format, and the tiers that hold chunks.

Bytes in, bytes out. Imports neither torch nor any other part of Paceline: engine, node server and tools use it alike.
"""

from paceline_kvstore.errors import CorruptChunk, ForeignChunk, KVStoreError, UnsupportedVersion
from paceline_kvstore.keys import ChunkKey

__all__ = ["ChunkKey", "CorruptChunk", "ForeignChunk", "KVStoreError", "UnsupportedVersion"]
