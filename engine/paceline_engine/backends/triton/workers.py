"""The ranks of a model that is spread over the GPUs of one pod: a process for each but the first.

Rank 0 is the engine core. It starts the others, which load their part, follow its steps, and end with it. One that
ends before takes the core with it: the model is gone, and whoever supervises the engine starts it anew.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from paceline_engine.backends.triton.device import is_interpreted
from paceline_engine.backends.triton.parallel import TensorParallel
from paceline_engine.backends.triton.ranks import Kind, Ranks
from paceline_engine.config import EngineConfig
from paceline_engine.models.loader import load_model_dir
from paceline_engine.parent import die_with_parent
from paceline_engine.records import require_msgspec
from paceline_engine.sizing import size_blocks

CONFIG_VARIABLE = "PACELINE_WORKER_CONFIG"
# How long ranks may wait for the next message, which comes when somebody asks for something. That rank 0 is gone, the
# others hear from the system.
IDLE = timedelta(days=365)
# How long ranks may take to end.
CLOSE_SECONDS = 10.0

logger = logging.getLogger(__name__)


class Workers:
    """The other ranks' processes, and what rank 0 reaches them by."""

    def __init__(self, config: EngineConfig) -> None:
        size = config.tensor_parallel_size
        available = torch.cuda.device_count()
        if not is_interpreted() and available < size:
            raise ValueError(
                f"--tensor-parallel-size {size} needs {size} GPUs, and this process sees {available}; lower it, or "
                "ask for more nvidia.com/gpu"
            )
        self._folder = tempfile.mkdtemp(prefix="paceline-ranks-")
        address = f"file://{self._folder}/meeting"
        encoded = require_msgspec("a model on several GPUs").json.encode(config)
        environment = {**os.environ, CONFIG_VARIABLE: encoded.decode()}
        command = [sys.executable, "-m", "paceline_engine.backends.triton.workers"]
        self._processes = [
            subprocess.Popen([*command, str(rank), address, str(os.getpid())], env=environment)
            for rank in range(1, size)
        ]
        self._is_closing = False
        for rank, process in enumerate(self._processes, start=1):
            threading.Thread(target=self._watch, args=(rank, process), daemon=True, name=f"rank-{rank}").start()
        self.device, self.parallel, self.ranks = _meet(0, size, address)

    def close(self) -> None:
        """Have the other ranks end, and wait for them; those that don't listen are killed."""
        if self._is_closing:
            return
        self._is_closing = True
        # Where a step has failed, the others may stand in a collective and never listen.
        leaving = threading.Thread(target=self._leave, daemon=True, name="leave-ranks")
        leaving.start()
        deadline = time.monotonic() + CLOSE_SECONDS
        for process in self._processes:
            _end(process, deadline)
        leaving.join(max(0.0, deadline - time.monotonic()))
        shutil.rmtree(self._folder, ignore_errors=True)

    def _leave(self) -> None:
        self.ranks.send(Kind.STOP)
        # Beside the others: NCCL lets nobody go before all do.
        self.parallel.close()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if not self._is_closing:
            logger.error("rank %d of the model ended with code %d; so does the engine core", rank, code)
            # The main thread waits in a collective that nobody will join any more.
            os._exit(1)


def _end(process: subprocess.Popen[bytes], deadline: float) -> None:
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _meet(rank: int, size: int, address: str) -> tuple[torch.device, TensorParallel, Ranks]:
    """This rank's device, its group, and the channel between the hosts' memories."""
    device = torch.device("cpu")
    if not is_interpreted():
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    parallel = TensorParallel.connect(rank, size, address=address, device=device)
    group = dist.new_group(backend="gloo", timeout=IDLE)
    assert isinstance(group, dist.ProcessGroup)
    return device, parallel, Ranks(group)


def follow(config: EngineConfig, rank: int, address: str) -> None:
    """Load this rank's part and make rank 0's steps until it says stop."""
    from paceline_engine.backends.triton.resident import Resident

    device, parallel, ranks = _meet(rank, config.tensor_parallel_size, address)
    loaded = load_model_dir(config.model_dir)
    resident = Resident(
        config,
        loaded.config,
        loaded.files,
        device=device,
        size=partial(size_blocks, config, loaded.config),
        parallel=parallel,
    )
    while True:
        message = ranks.receive()
        match message.kind:
            case Kind.STOP:
                break
            case Kind.SLEEP:
                resident.release_kv()
            case Kind.WAKE:
                resident.allocate_kv()
            case Kind.STEP:
                resident.model.follow(message, resident.kv)
    resident.drop_graphs()
    parallel.close()


def main() -> int:
    """Entry of a rank's process: RANK ADDRESS PARENT_PID."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    rank, address, parent = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    die_with_parent(parent)
    msgspec = require_msgspec("a model on several GPUs")
    follow(msgspec.json.decode(os.environ[CONFIG_VARIABLE], type=EngineConfig), rank, address)
    return 0


if __name__ == "__main__":
    sys.exit(main())
