"""The compiled decoder computes what transformers does, whatever the batch, the paging and the instruction set."""

from __future__ import annotations

import errno
import os
import random
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline_engine.backends.cpu_decoder import create_decoder
from paceline_engine.backends.cpu_model import TorchModel
from paceline_engine.backends.cpu_native import NativeDecoder, unsupported
from paceline_engine.config import EngineConfig
from paceline_engine.models.loader import default_cache_dir
from paceline_engine.native.build import NativeBuildError, ensure_library, find_compiler
from paceline_engine.native.library import FORMATS, ISA_VARIABLE, load_library
from paceline_engine.native.packed import MATRICES

MAX_TOKENS = 16
GEOMETRIES = ["gqa-tied", "mha-untied", "mqa-wide-heads", "bias", "linear-rope", "llama3-rope", "qwen3-qk-norm"]
VARIANTS = ["avx512", "avx2", "generic"]

pytestmark = [pytest.mark.native, pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler here")]


@pytest.fixture(scope="module")
def library():
    return load_library(ensure_library(default_cache_dir()))


@pytest.fixture(scope="module")
def native(library) -> Callable:
    return partial(NativeDecoder, library, weight_format="float32", threads=2)


@pytest.fixture(params=VARIANTS)
def variant(request, library, monkeypatch) -> str:
    if library.paceline_isa(request.param.encode()) is None:
        pytest.skip(f"this CPU has no {request.param}")
    monkeypatch.setenv(ISA_VARIABLE, request.param)
    return request.param


def run(loop, prompts, count=MAX_TOKENS):
    for i, prompt in enumerate(prompts):
        loop.add(str(i), prompt, count)
    return loop.run()


def reference(checkpoint, prompts, count=MAX_TOKENS):
    return {str(i): checkpoint.reference_tokens(prompt, count) for i, prompt in enumerate(prompts)}


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_greedy_equals_transformers_on_odd_sizes(
    checkpoints, new_loop, prompts_for, native, geometry, variant, equals_greedy
):
    checkpoint = checkpoints(geometry)
    prompts = prompts_for(4, checkpoint.config.vocab_size, seed=11, longest=30)
    loop = new_loop(checkpoint, make_decoder=native)
    named = {str(i): prompt for i, prompt in enumerate(prompts)}
    equals_greedy(checkpoint, named, run(loop, prompts), reference(checkpoint, prompts))
    assert loop.runner._decoder.isa == variant


@pytest.mark.parametrize("block_size", [1, 3, 16, 32])
def test_any_block_size_and_nan_in_what_is_not_owned(tiny, new_loop, prompts_for, native, block_size):
    prompts = prompts_for(5, tiny.config.vocab_size, seed=5, longest=40)
    num_blocks = 400 // block_size
    order = list(range(num_blocks))
    random.Random(block_size).shuffle(order)
    loop = new_loop(
        tiny, num_blocks=num_blocks, block_size=block_size, max_model_len=90, order=order, make_decoder=native
    )
    kv, pool = loop.runner.kv, loop.scheduler.kv.pool

    def poison():
        kv.tensor[:, :, [block for block in range(num_blocks) if pool.ref_count(block) == 0]] = torch.nan
        for request in loop.scheduler._running:
            for index, block in enumerate(request.block_ids):
                kv.tensor[:, :, block, max(0, request.num_computed_tokens - index * block_size) :] = torch.nan

    loop.before_step = poison
    assert run(loop, prompts) == reference(tiny, prompts)


def logits_of(loop, prompts):
    """Each request's logits rows, one a token, by its number."""
    rows: dict[int, list[torch.Tensor]] = {i: [] for i in range(len(prompts))}
    step = loop.runner._decoder.step

    def recording(batch, *more):
        logits = step(batch, *more)
        for item, row in zip(batch.samplers, logits, strict=True):
            rows[int(item.request_id)].append(row.clone())
        return logits

    loop.runner._decoder.step = recording
    run(loop, prompts)
    return rows


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_logits_are_the_same_bits_in_any_batch_and_any_chunking(tiny, new_loop, prompts_for, native, chunk):
    prompts = prompts_for(12, tiny.config.vocab_size, seed=2, longest=60)
    together = logits_of(
        new_loop(tiny, make_decoder=native, prefill_chunk_tokens=chunk, max_num_batched_tokens=80), prompts
    )
    for i, prompt in enumerate(prompts[:3]):
        alone = logits_of(new_loop(tiny, make_decoder=native, prefill_chunk_tokens=96), [prompt])[0]
        assert all(torch.equal(a, b) for a, b in zip(alone, together[i], strict=True))


def test_any_number_of_threads_gives_the_same_bits(tiny, new_loop, prompts_for, library):
    prompts = prompts_for(5, tiny.config.vocab_size, seed=8, longest=50)

    def with_threads(count):
        decoder = partial(NativeDecoder, library, weight_format="float32", threads=count)
        return logits_of(new_loop(tiny, make_decoder=decoder), prompts)

    one, five = with_threads(1), with_threads(5)
    assert all(torch.equal(a, b) for i in one for a, b in zip(one[i], five[i], strict=True))


def test_sliding_windows_and_layers_without_positions(build, tmp_path, new_loop, prompts_for, native):
    geometry = {"model_type": "mistral", "sliding_window": 7, "attn_implementation": "eager"}
    checkpoint = build(tmp_path / "mistral", geometry)
    prompts = prompts_for(4, checkpoint.config.vocab_size, seed=4, longest=40)
    assert run(new_loop(checkpoint, make_decoder=native), prompts) == reference(checkpoint, prompts)


def test_bfloat16_weights_and_kv_stay_close_to_float32(tiny, new_loop, prompts_for, library, native):
    prompts = prompts_for(3, tiny.config.vocab_size, seed=6, longest=30)
    half = partial(NativeDecoder, library, weight_format="bfloat16", threads=2)
    exact = logits_of(new_loop(tiny, make_decoder=native), prompts)
    rounded = logits_of(new_loop(tiny, make_decoder=half, dtype=torch.bfloat16), prompts)
    for i in range(len(prompts)):
        assert torch.nn.functional.cosine_similarity(exact[i][0], rounded[i][0], dim=0) > 0.999


def four_bits(tensor):
    """Integers of -8 to 7 times a power of 2: GGUF's Q4_0 and Q4_1."""
    tensor = torch.clamp((tensor * 16).round(), -8, 7) / 16
    tensor[:, ::32], tensor[:, 1::32] = -8 / 16, 7 / 16
    return tensor


def four_bits_without_the_largest(tensor):
    """What Q4_0 gives where the largest magnitude has no counterpart: -8 alone tells the scale."""
    tensor = torch.clamp((tensor * 16).round(), -3, 3) / 16
    tensor[:, ::32] = 8 / 16
    return tensor


def eight_bits(tensor):
    """Integers of -127 to 127 times a power of 2: Q8_0."""
    tensor = torch.clamp((tensor * 128).round(), -127, 127) / 128
    tensor[:, ::32] = 127 / 128
    return tensor


@pytest.fixture(scope="module")
def rounded_checkpoint(checkpoints, tmp_path_factory, make_checkpoint) -> Callable:
    """A checkpoint with the layers' matrices rounded, so that a narrower format holds them exactly; not the head."""

    def make(round_matrix):
        tiny = checkpoints("qwen3-qk-norm")
        tensors = {name: tensor for path in tiny.files for name, tensor in load_file(path).items()}
        for name, tensor in tensors.items():
            if tensor.dim() == 2 and "layers" in name:
                tensors[name] = round_matrix(tensor).contiguous()
        path = tmp_path_factory.mktemp("rounded") / "model.safetensors"
        save_file(tensors, path)
        return make_checkpoint(tiny.config, [path], None)

    return make


@pytest.fixture(scope="module")
def four_bit(rounded_checkpoint):
    return rounded_checkpoint(four_bits)


@pytest.mark.parametrize(
    ("round_matrix", "held"),
    [
        (four_bits, "int4"),
        (four_bits_without_the_largest, "int4"),
        (eight_bits, "int8"),
        (lambda tensor: tensor.bfloat16().float(), "bfloat16"),
        (lambda tensor: tensor, "float32"),
    ],
)
def test_float32_weights_are_read_in_the_narrowest_format_that_holds_them_and_give_the_same_bits(
    rounded_checkpoint, round_matrix, held, new_loop, prompts_for, native, variant, monkeypatch
):
    checkpoint = rounded_checkpoint(round_matrix)
    prompts = prompts_for(13, checkpoint.config.vocab_size, seed=6, longest=30)
    loop = new_loop(checkpoint, make_decoder=native)
    packed = loop.runner._decoder._packed
    assert {packed.format(f"0.{name}") for name in MATRICES} == {FORMATS[held]}
    assert packed.format("head") == FORMATS["float32"]
    narrow = logits_of(loop, prompts)
    monkeypatch.setattr("paceline_engine.native.packed.EXACT_FORMATS", ("float32",))
    wide = logits_of(new_loop(checkpoint, make_decoder=native), prompts)
    assert all(torch.equal(a, b) for i in wide for a, b in zip(narrow[i], wide[i], strict=True))


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_quantised_weights_give_what_the_rounded_weights_give_in_any_batch(
    four_bit, new_loop, prompts_for, library, native, weights, variant
):
    prompts = prompts_for(4, four_bit.config.vocab_size, seed=6, longest=30)
    quantised = partial(NativeDecoder, library, weight_format=weights, threads=2)
    exact = logits_of(new_loop(four_bit, make_decoder=native), prompts)
    together = logits_of(new_loop(four_bit, make_decoder=quantised), prompts)
    for i, prompt in enumerate(prompts):
        # What is left is the rounding of activations to 8 bits.
        assert torch.nn.functional.cosine_similarity(exact[i][0], together[i][0], dim=0) > 0.995
        alone = logits_of(new_loop(four_bit, make_decoder=quantised), [prompt])[0]
        assert all(torch.equal(a, b) for a, b in zip(alone, together[i], strict=True))


def test_nan_in_one_sequence_stays_there(tiny, new_loop, prompts_for, native):
    prompts = prompts_for(5, tiny.config.vocab_size, seed=3, longest=30)
    expected = reference(tiny, prompts)
    loop = new_loop(tiny, make_decoder=native)
    for i, prompt in enumerate(prompts):
        loop.add(str(i), prompt, MAX_TOKENS)
    while not all(loop.tokens.get(str(i)) for i in range(len(prompts))):
        loop.step()
    loop.runner.kv.tensor[1, 1, loop.scheduler._requests["3"].block_ids[0], 0] = torch.nan
    loop.run()
    assert loop.finished["3"].finish_reason == "error"
    assert all(loop.tokens[str(i)] == expected[str(i)] for i in (0, 1, 2, 4))


def test_a_token_outside_the_vocabulary_is_refused_before_the_kernels_see_it(tiny, new_loop, native):
    loop = new_loop(tiny, make_decoder=native)
    loop.add("0", [tiny.config.vocab_size], 1)
    with pytest.raises(IndexError, match="outside the vocabulary"):
        loop.step()


@pytest.fixture
def nothing_installed(tmp_path, monkeypatch):
    """As in an environment where nobody ran build-native."""
    monkeypatch.setattr("paceline_engine.native.build.installed_dir", lambda: tmp_path / "nothing")
    monkeypatch.delenv("PACELINE_NATIVE_DIR", raising=False)


def test_a_compiler_that_fails_is_one_line(tmp_path, monkeypatch, nothing_installed):
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho 'kernels.cpp:1: error: no such thing' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(NativeBuildError, match="no such thing"):
        ensure_library(tmp_path / "cache")
    assert list((tmp_path / "cache").rglob("*.so")) == []


def test_architectures_beyond_the_kernels_are_named(tiny):
    from dataclasses import replace

    assert unsupported(tiny.config) is None
    assert "soft caps" in str(unsupported(replace(tiny.config, logit_softcap=30.0)))
    assert "gelu" in str(unsupported(replace(tiny.config, hidden_act="gelu_tanh")))


def test_more_threads_than_cpus_in_two_decoders_at_once(tiny, new_loop, prompts_for, library):
    """Threads that lose their CPU in the middle of a step delay it, but neither stop it nor change it."""
    prompts = prompts_for(5, tiny.config.vocab_size, seed=8, longest=50)
    expected = reference(tiny, prompts)
    crowd = partial(NativeDecoder, library, weight_format="float32", threads=3 * (os.cpu_count() or 1) + 1)
    with ThreadPoolExecutor(2) as pool:
        loops = [new_loop(tiny, make_decoder=crowd) for _ in range(2)]
        assert list(pool.map(lambda loop: run(loop, prompts), loops)) == [expected, expected]


def test_idle_threads_sleep(tiny, new_loop, prompts_for, library):
    """A neighbour needs the CPU that a thread without work would spin on."""
    loop = new_loop(tiny, make_decoder=partial(NativeDecoder, library, weight_format="float32", threads=4))
    before = set(Path("/proc/self/task").iterdir())
    decoder = NativeDecoder(library, tiny.config, tiny.files, max_model_len=8, weight_format="float32", threads=4)
    mine = set(Path("/proc/self/task").iterdir()) - before
    assert len(mine) == 3
    run(loop, prompts_for(2, tiny.config.vocab_size))

    def states() -> set[str]:
        return {(task / "stat").read_text().rsplit(")", 1)[1].split()[0] for task in mine}

    deadline = time.monotonic() + 30
    while states() != {"S"} and time.monotonic() < deadline:
        os.sched_yield()
    assert states() == {"S"}
    del decoder


@pytest.fixture
def converted(tiny, tmp_path) -> Path:
    """A model folder in the cache: ours to write to."""
    (tmp_path / "paceline.json").write_text("{}")
    return tmp_path


def test_weights_are_packed_once_and_shared_by_later_engines(tiny, new_loop, prompts_for, native, converted):
    prompts = prompts_for(3, tiny.config.vocab_size)
    cached = partial(native, cache=converted)
    first = run(new_loop(tiny, make_decoder=cached), prompts)
    (packed,) = converted.glob("packed-*")
    written = packed.stat().st_mtime_ns
    assert run(new_loop(tiny, make_decoder=cached), prompts) == first == reference(tiny, prompts)
    assert [path.stat().st_mtime_ns for path in converted.glob("packed-*")] == [written]


def test_a_disk_without_room_for_packed_weights_does_not_stop_an_engine(
    tiny, new_loop, prompts_for, native, converted, monkeypatch, caplog
):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    prompts = prompts_for(3, tiny.config.vocab_size)
    loop = new_loop(tiny, make_decoder=partial(native, cache=converted))
    assert run(loop, prompts) == reference(tiny, prompts)
    assert "No space left" in caplog.text
    assert [path.name for path in converted.iterdir()] == ["paceline.json"]


def test_a_users_checkpoint_folder_stays_as_it_is(tiny, native):
    folder = tiny.files[0].parent
    before = sorted(folder.iterdir())
    native(tiny.config, tiny.files, max_model_len=8, cache=folder)
    assert sorted(folder.iterdir()) == before


class TestChoice:
    """`--cpu-kernels` and `--quantization` on machines with and without a compiler."""

    @pytest.fixture
    def no_compiler(self, monkeypatch, nothing_installed):
        monkeypatch.setenv("PATH", "")
        monkeypatch.delenv("CXX", raising=False)

    def decoder(self, tiny, tmp_path, **options):
        config = EngineConfig(model_dir=str(tiny.files[0].parent), native_dir=str(tmp_path), **options)
        return create_decoder(config, tiny.config, tiny.files, max_model_len=64, threads=1)

    def test_without_a_compiler_torch_runs_and_the_log_says_so(self, tiny, tmp_path, no_compiler, caplog):
        assert isinstance(self.decoder(tiny, tmp_path), TorchModel)
        assert "no C++ compiler" in caplog.text

    def test_what_was_insisted_on_is_refused_in_one_line(self, tiny, tmp_path, no_compiler):
        with pytest.raises(ValueError, match="--cpu-kernels native: no C\\+\\+ compiler"):
            self.decoder(tiny, tmp_path, cpu_kernels="native")
        with pytest.raises(ValueError, match="--quantization int4 needs the native CPU kernels: no C\\+\\+ compiler"):
            self.decoder(tiny, tmp_path, quantization="int4")
        with pytest.raises(ValueError, match="--quantization int8 needs the native CPU kernels"):
            self.decoder(tiny, tmp_path, cpu_kernels="torch", quantization="int8")

    def test_a_library_that_was_built_before_needs_no_compiler(self, tiny, tmp_path, library, monkeypatch):
        built = ensure_library(default_cache_dir())
        target = tmp_path / "image" / built.parent.name.rsplit("-", 1)[0] / built.name
        target.parent.mkdir(parents=True)
        shutil.copy(built, target)
        monkeypatch.setenv("PACELINE_NATIVE_DIR", str(tmp_path / "image"))
        monkeypatch.setenv("PATH", "")
        assert isinstance(self.decoder(tiny, tmp_path / "cache", cpu_kernels="native"), NativeDecoder)

    def test_precision_of_weights_is_part_of_the_identity_of_kv(self):
        digests = {EngineConfig(model_dir="m", quantization=name).weights_dtype for name in ("none", "int8", "int4")}
        assert len(digests) == 3
