"""What every test needs before torch is imported, and hypothesis's settings."""

import gc
import os
import signal

import pytest
import servers
from forked_workers import pytest_addoption, pytest_runtestloop  # noqa: F401  # hooks of pytest
from hypothesis import settings

# Ranks are threads or processes here, several to a core: torch's own threads on top would only make them wait.
# The environment, unlike torch.set_num_threads, also reaches the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Some virtual machines announce AMX and then stop the process that uses it, as oneDNN does for bfloat16.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

# A shell without job control starts what it runs in the background with Ctrl-C ignored, and so would be every process
# of the tests that press it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # by nohup, and tests hang up on what they start
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

MINUTES = 240  # seconds

# A deadline per example measures the machine's load; pytest-timeout already stops what hangs.
settings.register_profile("penstock", deadline=None)
settings.load_profile("penstock")


def pytest_configure(config: pytest.Config) -> None:
    """Start servers before the tests are loaded, which no server needs; workers are forked later."""
    if config.option.workers and not config.option.collectonly:
        servers.share()


@pytest.hookimpl(trylast=True)  # of the tests that are left
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with a test that states a timeout of minutes come first: at the end, other workers would wait for them."""
    marks = [(item.path, item.get_closest_marker("timeout")) for item in items]
    long = {path for path, mark in marks if mark is not None and mark.args[0] >= MINUTES}
    items.sort(key=lambda item: item.path not in long)


def pytest_collection_finish() -> None:
    """What is loaded by now stays: tests that collect garbage need not look through it all, a quarter second each."""
    gc.collect()
    gc.freeze()
