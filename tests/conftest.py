import os
from collections.abc import Iterator

import pytest
import torch

# Lightning 2.6's CLI calls what jsonargparse deprecates.
os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")


@pytest.fixture(autouse=True)
def _same_start() -> None:
    """Every test starts from the same random numbers, on one thread."""
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    """A process group that a test starts, and its address in the environment, would reach later tests."""
    before = dict(os.environ)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(params=["unit", "parameter"])
def granularity(request: pytest.FixtureRequest) -> str:
    return request.param
