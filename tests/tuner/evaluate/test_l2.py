"""The share of L2 that is set aside: watched and put back, also where a device has none."""

from __future__ import annotations

from types import SimpleNamespace

from tuner.evaluate.l2 import PersistingL2


class FakeDriver:
    """The three calls, on a context whose least limit is not 0."""

    CUlimit = SimpleNamespace(CU_LIMIT_PERSISTING_L2_CACHE_SIZE=6)

    def __init__(self, least: int = 0, refuses: bool = False) -> None:
        self.least, self.refuses = least, refuses
        self.limit = 1 << 20
        self.resets = 0

    def cuCtxSetLimit(self, limit: int, size: int) -> tuple[int]:
        self.limit = max(size, self.least)
        return (int(self.refuses),)

    def cuCtxGetLimit(self, limit: int) -> tuple[int, int]:
        return int(self.refuses), self.limit

    def cuCtxResetPersistingL2Cache(self) -> tuple[int]:
        self.resets += 1
        return (int(self.refuses),)


def test_limit_is_put_to_its_least_and_a_change_is_told_once() -> None:
    driver = FakeDriver(least=512)
    l2 = PersistingL2(driver)
    assert driver.limit == 512 and l2.tampered() is None
    driver.limit = 30 << 20
    assert l2.tampered() == "31457280 bytes of L2 were set aside for data that persists"
    assert driver.limit == 512 and driver.resets == 2
    assert l2.tampered() is None


def test_device_without_the_limit() -> None:
    driver = FakeDriver(refuses=True)
    l2 = PersistingL2(driver)
    driver.limit = 7
    assert l2.tampered() is None
