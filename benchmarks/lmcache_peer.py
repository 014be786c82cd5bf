"""The process behind kv_lmcache.py, run by LMCache's own Python: JSON questions on stdin, answers on a descriptor.

Follows LMCache's public classes: a StorageManager is asked for memory, which is filled and put; a get is copied out and
given back. Chunks have the shape of a model's KV in bfloat16. A disk put has ended when its task has.
"""

import json
import os
import shutil
import sys
import time
from importlib.metadata import version
from pathlib import Path

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.event_manager import EventManager
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.storage_manager import StorageManager

TOKENS, GIB = 256, 1 << 30
SHAPES = {8 << 20: (16, 4), 32 << 20: (32, 8)}
"""Bytes of a chunk of 256 tokens -> layers, heads of 128."""


class Backend:
    def __init__(self, tier: str, chunk: int, count: int, folder: str) -> None:
        layers, heads = SHAPES[chunk]
        options: dict[str, object] = {"local_cpu": True}
        if tier == "disk":
            Path(folder).mkdir(parents=True, exist_ok=True)
            extra = {"use_odirect": True, "disk_io_threads": 4}
            options = {"local_cpu": False, "local_disk": f"file://{folder}/", "max_local_disk_size": 2.0}
            options["extra_config"] = extra
        room = max(0.5, 3 * chunk * count / GIB)
        config = LMCacheEngineConfig.from_defaults(chunk_size=TOKENS, max_local_cpu_size=room, **options)
        metadata = LMCacheMetadata(
            model_name="m", world_size=1, local_world_size=1, worker_id=0, local_worker_id=0,
            kv_dtype=torch.bfloat16, kv_shape=(layers, 2, TOKENS, heads, 128), role="worker",
        )  # fmt: skip
        self.folder, self.is_disk, self.count = folder, tier == "disk", count
        self.manager = StorageManager(config, metadata, EventManager())
        self.shape = torch.Size([2, layers, TOKENS, heads * 128])
        # Different buffers, as on the other side: no copy may come from the processor's cache.
        copies = 1 if self.is_disk else count
        self.sources = [torch.randn(self.shape, dtype=torch.float32).to(torch.bfloat16) for _ in range(copies)]
        self.out = torch.empty_like(self.sources[0])
        self.made, self.keys = 0, []

    def put(self) -> float:
        backends, old = self.manager.storage_backends, self.keys
        for key in old:
            for backend in backends.values():
                backend.remove(key)
        self.keys = [CacheEngineKey("m", 1, 0, self.made + number, torch.bfloat16) for number in range(self.count)]
        self.made += self.count
        begun = time.perf_counter()
        for number, key in enumerate(self.keys):
            memory = self.manager.allocate(self.shape, torch.bfloat16, fmt=MemoryFormat.KV_2LTD)
            memory.tensor.copy_(self.sources[number % len(self.sources)])
            self.manager.batched_put([key], [memory])
        last = list(backends.values())[-1]
        while self.is_disk and any(last.exists_in_put_tasks(key) for key in self.keys):
            time.sleep(0.0002)
        return time.perf_counter() - begun

    def get(self) -> float:
        seconds = 0.0
        for key in self.keys or (self.put() and self.keys):
            begun = time.perf_counter()
            memory = self.manager.get(key)
            self.out.copy_(memory.tensor)
            memory.ref_count_down()
            seconds += time.perf_counter() - begun
            if self.is_disk:
                # A get fills the memory backend, too; the next one must come from the disk.
                self.manager.storage_backends["LocalCPUBackend"].remove(key)
        return seconds

    def prefix(self) -> float:
        """All chunks in one call, which reads them with threads of its own."""
        keys = self.keys or (self.put() and self.keys)
        begun = time.perf_counter()
        for memory in self.manager.batched_get(keys, "LocalDiskBackend"):
            self.out.copy_(memory.tensor)
            memory.ref_count_down()
        seconds = time.perf_counter() - begun
        for key in keys:
            self.manager.storage_backends["LocalCPUBackend"].remove(key)
        return seconds

    def lease(self) -> float:
        """Seconds of one, p50."""
        times = []
        for _ in range(5000 // len(self.keys or (self.put() and self.keys))):
            for key in self.keys:
                begun = time.perf_counter()
                self.manager.get(key).ref_count_down()
                times.append(time.perf_counter() - begun)
        return sorted(times)[len(times) // 2]

    def close(self) -> None:
        self.manager.close()
        if self.is_disk:
            shutil.rmtree(self.folder, ignore_errors=True)


def main() -> None:
    # Copies by one thread, as on the other side: two would wait for each other on a busy machine.
    torch.set_num_threads(1)
    answers = os.fdopen(int(sys.argv[1]), "w")
    open_backends: dict[str, Backend] = {}
    for line in sys.stdin:
        question = json.loads(line)
        do, tier = question["do"], question.get("tier")
        try:
            answer: dict[str, object] = {}
            if do == "hello":
                answer["version"] = version("lmcache")
            elif do == "open":
                if tier in open_backends:
                    open_backends.pop(tier).close()
                open_backends[tier] = Backend(tier, question["chunk"], question["count"], question["folder"])
            elif do == "close":
                open_backends.pop(tier).close()
            else:
                answer["seconds"] = getattr(open_backends[tier], do)()
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
