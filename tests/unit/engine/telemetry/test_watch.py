"""A scrape never waits on a driver, and drivers are asked no more than once a second."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

import pytest

from paceline_engine.telemetry.reading import NoTelemetry, Reading, Sample
from paceline_engine.telemetry.watch import GpuWatch


class Driver:
    """One GPU, whose answers a test holds back or spoils."""

    def __init__(self) -> None:
        self.num_reads = 0
        self.asked_for: Sequence[int] = ()
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.now = 100.0
        self.error: Exception | None = None

    def open(self, ordinals: Sequence[int]) -> Driver:
        self.asked_for = ordinals
        if isinstance(self.error, NoTelemetry):
            raise self.error
        return self

    def read(self) -> tuple[Reading, ...]:
        self.may_answer.wait(60)
        if self.error is not None:
            raise self.error
        self.num_reads += 1
        busy = Sample("paceline_engine_gpu_busy_ratio", self.num_reads / 10)
        return (Reading(gpu="0", uuid="u", name="n", up=True, values=(busy,)),)

    def watch(self, **more: float) -> GpuWatch:
        return GpuWatch(self.open, clock=lambda: self.now, **more)


@pytest.fixture
def driver() -> Driver:
    return Driver()


def busy(watch: GpuWatch) -> list[float]:
    return [reading.values[0].value for reading in watch.readings]


def test_an_engine_without_gpus_asks_no_driver(driver: Driver) -> None:
    watch = driver.watch()
    watch.start(())
    asyncio.run(watch.refresh())
    assert (driver.asked_for, driver.num_reads, watch.readings) == ((), 0, ())


def test_readings_are_kept_for_a_second(driver: Driver) -> None:
    async def scrape_often() -> None:
        watch = driver.watch()
        watch.start((1, 2))
        for seconds, expected in ((0.0, 0.1), (0.9, 0.1), (0.2, 0.2), (0.0, 0.2)):
            driver.now += seconds
            await asyncio.gather(*(watch.refresh() for _ in range(5)))
            assert busy(watch) == [expected]

    asyncio.run(scrape_often())
    assert driver.asked_for == (1, 2)


def test_a_driver_that_hangs_is_left_alone_and_the_gpu_is_down_until_it_answers(driver: Driver) -> None:
    async def scrape() -> None:
        watch = driver.watch(max_wait_seconds=0.01)
        watch.start((0,))
        while not watch.readings:
            await watch.refresh()
        driver.may_answer.clear()
        threads = threading.active_count()
        for _ in range(5):
            driver.now += 1.5
            await watch.refresh()
            assert [(reading.gpu, reading.up, reading.values) for reading in watch.readings] == [("0", False, ())]
        assert threading.active_count() <= threads + 1
        assert driver.num_reads == 1
        driver.may_answer.set()
        while not watch.readings[0].up:
            driver.now += 1.5
            await watch.refresh()

    asyncio.run(asyncio.wait_for(scrape(), 60))


def test_where_gpus_cannot_be_read_one_line_says_so_once(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    driver.error = NoTelemetry("no library")

    async def scrape(watch: GpuWatch) -> None:
        watch.start((0,))
        for _ in range(3):
            await watch.refresh()
            driver.now += 2

    watch = driver.watch()
    with caplog.at_level("INFO"):
        asyncio.run(scrape(watch))
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "no GPU metrics: no library")
    ]
    assert watch.readings == ()


def test_a_bug_in_reading_ends_the_readings_not_the_scrapes(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    async def scrape(watch: GpuWatch, spoil: Callable[[], None]) -> None:
        watch.start((0,))
        await watch.refresh()
        spoil()
        for _ in range(3):
            driver.now += 2
            await watch.refresh()

    watch = driver.watch()
    asyncio.run(scrape(watch, lambda: setattr(driver, "error", RuntimeError("bug"))))
    assert [(reading.up, reading.values) for reading in watch.readings] == [(False, ())]
    assert caplog.text.count("GPU metrics end here") == 1
